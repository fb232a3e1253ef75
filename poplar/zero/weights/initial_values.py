"""Where the values of a new engine come from: the model, its initializers, or safetensors files.

The checks come before any change. A rank stores its part of each parameter as soon as it is known,
and the user's parameters change only after all ranks have theirs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from poplar.comm import Control
from poplar.system.storage import separate_elements
from poplar.zero.agreement import run_on_all_ranks
from poplar.zero.checks.replica_check import replicate
from poplar.zero.flat_parameter import FlatParameter
from poplar.zero.stages.strategy import Layouts, Strategy
from poplar.zero.weights.materialization import (
    Initialization,
    Initializer,
    check_buffers,
    check_initializers,
    is_on_meta,
    real_tensors,
)
from poplar.zero.weights.weight_files import WeightFiles

Weights = str | Path | Initializer | None
"""Where the values come from: a path of safetensors, a function for one module, or neither."""
_DOING = "initializing the model"


@dataclass(frozen=True, kw_only=True, eq=False)
class InitialValues:
    """The source of a model's values."""

    model: nn.Module
    unit_names: Sequence[str]
    on_meta: bool
    files: WeightFiles | None
    names: dict[int, str]
    """Names in the files, by `id` of the parameter or buffer."""
    function: Initializer | None
    unset_buffers: frozenset[int]
    """Buffers on `meta` that are not in the files, by `id`."""
    identity: str
    """What must be equal on all ranks, as text for error messages."""

    @classmethod
    def of(cls, model: nn.Module, unit_names: Sequence[str], weights: Weights) -> InitialValues:
        """Check the arguments on this rank; raise if there is no source for some values."""
        on_meta = is_on_meta(model)
        files: WeightFiles | None = None
        names: dict[int, str] = {}
        function: Initializer | None = None
        if isinstance(weights, (str, Path)):
            files = WeightFiles(weights)
            names = files.names_of(model)
        elif weights is None or callable(weights):
            function = weights
            if on_meta:
                check_initializers(model, unit_names, function)
        else:
            raise TypeError(
                "weights must be a path of safetensors, or a function that initializes the "
                f"parameters of one module, got {type(weights).__name__}; write a state dict with "
                "safetensors.torch.save_file, or load it into a model that is not on meta"
            )
        if function is not None and not on_meta:
            raise ValueError(
                "weights is a function, but the parameters are not on meta; call "
                "model.apply(function) before the optimizer is built"
            )
        unset = {id(b) for b in model.buffers() if b.is_meta and id(b) not in names}
        if files is not None:
            check_buffers(model, unset)
        return cls(
            model=model,
            unit_names=unit_names,
            on_meta=on_meta,
            files=files,
            names=names,
            function=function,
            unset_buffers=frozenset(unset),
            identity=_identity(on_meta, files, function),
        )

    def real_tensors(self, device: torch.device) -> AbstractContextManager[None]:
        """A context in which a model on `meta` is on `device`; see `materialization`."""
        return real_tensors(self.model, device) if self.on_meta else nullcontext()

    def place(self, layouts: Layouts, strategy: Strategy, control: Control) -> None:
        """Allocate flat parameters under these layouts, and give them their values. Collective."""
        if self.files is None and not self.on_meta:
            for flat, layout in layouts.items():
                packed = flat.packed_parameters()
                if not flat.is_local:
                    what = {f"{flat.name}'s initial values": packed}
                    replicate(what, strategy.comm, control, doing=_DOING)
                strategy.allocate(flat, layout)
                strategy.write_initial_values(flat, 0, packed)
                strategy.bind_parameters(flat)
            return
        for flat, layout in layouts.items():
            strategy.allocate(flat, layout)
        store = _Store(layouts, strategy)
        mine = torch.get_rng_state() if control.group.rank == 0 else None
        state = control.exchange_objects(mine, what=_DOING)[0]
        assert state is not None
        before = torch.get_rng_state()
        try:
            buffers = run_on_all_ranks(control, lambda: self._write(store, state), doing=_DOING)
        except BaseException:
            torch.set_rng_state(before)
            raise
        with torch.no_grad():
            for parameter, values in store.whole.items():
                if self.on_meta:
                    parameter.data = values.to(parameter.device, parameter.dtype)
                else:
                    parameter.copy_(values)
            for buffer, values in buffers:
                separate_elements(buffer)
                buffer.copy_(values)
        for flat in layouts:
            if not (strategy.shards_parameters or flat.is_local):
                _replicate(flat, strategy, control)
            strategy.bind_parameters(flat)

    def _write(self, store: _Store, random_state: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Store all parameters; returns the buffers that were read, with their values. Local."""
        files = self.files
        if files is None:
            Initialization(self.model, self.unit_names, self.function).run(store, random_state)
            check_buffers(self.model, self.unset_buffers)
            return []
        for parameter in self.model.parameters():
            name = self.names[id(parameter)]
            start, stop = store.part(parameter)
            store.write(parameter, start, files.read(name, start, stop))
        saved = [b for b in self.model.buffers() if id(b) in self.names]
        return [(buffer, files.read_whole(self.names[id(buffer)])) for buffer in saved]


def _replicate(flat: FlatParameter, strategy: Strategy, control: Control) -> None:
    """Give all ranks the first rank's values of what all of them store. Collective."""
    stored = {f"{flat.name}'s initial values": flat.values}
    has_all_masters = strategy.replicates_state and flat.has_masters
    if has_all_masters:
        stored[f"{flat.name}'s initial masters"] = flat.master
    sent = replicate(stored, strategy.comm, control, doing=_DOING, device=flat.device)
    if sent and not has_all_masters:  # the owner has set its masters to values of its own
        flat.master.copy_(flat.shard)


def _identity(on_meta: bool, files: WeightFiles | None, function: Initializer | None) -> str:
    if files is not None:
        source = f"files: {files.identity()}"
    elif function is not None:
        source = getattr(function, "__qualname__", type(function).__qualname__)
    else:
        source = "the modules' initializers" if on_meta else "the model"
    return f"{source}, {'on meta' if on_meta else 'in memory'}"


class _Store:
    """What a rank keeps of the initial values."""

    def __init__(self, flats: Iterable[FlatParameter], strategy: Strategy) -> None:
        self._strategy = strategy
        self._places = {
            id(parameter): (flat, offset)
            for flat in flats
            for parameter, offset in zip(flat.parameters, flat.offsets, strict=True)
        }
        self.whole: dict[nn.Parameter, Tensor] = {}
        """Parameters that are in no flat parameter, with their values."""

    def __call__(self, parameter: nn.Parameter, data: Tensor) -> None:
        """Keep the part of `data`, all values of a parameter, that this rank stores."""
        self.write(parameter, 0, data.reshape(-1))

    def write(self, parameter: nn.Parameter, start: int, data: Tensor) -> None:
        """Keep 1-D `data`, the elements of a parameter from `start` on."""
        if id(parameter) in self._places:
            flat, offset = self._places[id(parameter)]
            self._strategy.write_initial_values(flat, offset + start, data)
        else:
            self.whole[parameter] = data.view(parameter.shape)

    def part(self, parameter: nn.Parameter) -> tuple[int, int]:
        """The first element of a parameter that this rank stores and the one after the last."""
        if id(parameter) not in self._places:
            return 0, parameter.numel()
        flat, offset = self._places[id(parameter)]
        values, first = self._strategy.stored_values(flat)
        start = max(0, first - offset)
        return start, max(start, min(parameter.numel(), first + values.numel() - offset))
