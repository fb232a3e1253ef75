"""The whole state of a training whose parameters are divided over ranks, as of one device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from poplar.checkpoint.state_dicts.shard_tensor import ShardTensor
from poplar.optimizer import HeteroZeroOptimizer
from poplar.programmes.run.divided_guard import DividedGuard
from poplar.programmes.run.divided_model import DividedModel
from poplar.zero.agreement import run_on_all_ranks


class WholeState:
    """Collects, loads and saves the state. All methods are collective."""

    def __init__(
        self, divided: DividedModel, optimizer: HeteroZeroOptimizer, guard: DividedGuard
    ) -> None:
        self._divided, self._optimizer, self._guard = divided, optimizer, guard
        self._control = optimizer.control
        self._name_of = {id(p): name for name, p in divided.parameters.items()}

    def collect(self, to: int) -> dict[str, Any] | None:
        """The state on rank `to`, None on others; see `DistributedTraining.state_dict`."""
        optimizer = self._optimizer.full_state_dict(to)
        values = self._values(to)
        for index, (name, parameter) in enumerate(self._optimized()):
            if name in self._divided.sharded:
                whole = self._optimizer_state(name, parameter)
                if optimizer is not None:
                    optimizer["state"][index] = whole
        if optimizer is None or values is None:
            return None
        model = {
            key: value.detach().cpu().clone() if name is None else values[name]
            for key, name, value in self._entries()
        }
        return {"model": model, "optimizer": optimizer}

    def load(self, state: Mapping[str, Any]) -> None:
        """Take this rank's part of a whole state; see `DistributedTraining.load_state_dict`."""
        doing = "load_state_dict()"
        own = run_on_all_ranks(self._control, lambda: self._own_values(state["model"]), doing=doing)
        self._optimizer.load_state_dict(self._own_optimizer_state(state["optimizer"]))
        with torch.no_grad(), self._optimizer.full_parameters(writeback=True):
            for key, _, value in self._entries():
                value.copy_(own[key])

    def save_model(self, path: Path) -> None:
        """Rank 0 writes all values, tied ones once, as safetensors."""
        from safetensors.torch import save_file

        values = self._values(0)

        def write() -> None:
            if values is None:
                return
            buffers = dict(self._divided.model.named_buffers())
            saved = {key for key, _, _ in self._entries()}
            named = {**values, **{name: b.cpu() for name, b in buffers.items() if name in saved}}
            unfinished = path.with_name(f".{path.name}.part")
            tensors = {name: value.detach().contiguous() for name, value in named.items()}
            save_file(tensors, unfinished, metadata={"format": "pt"})
            unfinished.replace(path)

        run_on_all_ranks(self._control, write, doing=f"save_model({str(path)!r})")

    def _entries(self) -> Iterator[tuple[str, str | None, Tensor]]:
        """Yield each key of the state dict, the parameter's name (None: a buffer), own value."""
        with self._guard.allowed():
            state = self._divided.model.state_dict(keep_vars=True)
        for key, value in state.items():
            yield key, self._name_of.get(id(value)), value.detach()

    def _optimized(self) -> list[tuple[str, nn.Parameter]]:
        """Name and parameter, in the order of the optimizer."""
        groups = self._optimizer.param_groups
        return [(self._name_of[id(p)], p) for group in groups for p in group["params"]]

    def _values(self, to: int) -> dict[str, Tensor] | None:
        """The whole values of all parameters, on the CPU of rank `to`."""
        values: dict[str, Tensor] = {}
        for name, parameter in self._divided.parameters.items():
            whole = self._divided.whole(name, parameter.detach())
            if self._control.group.rank == to:
                values[name] = whole.cpu().clone()
        return values if self._control.group.rank == to else None

    def _optimizer_state(self, name: str, parameter: nn.Parameter) -> dict[str, Any]:
        """The whole state of a sharded parameter, on the CPU."""
        state, parts = self._optimizer.state[parameter], {}
        for key, own in sorted(state.items()):
            if isinstance(own, ShardTensor) and own.shape == parameter.shape:
                parts[key] = own.local.view(parameter.shape)
        # Such as a step counter, which a rank with an empty part does not have.
        others = {key: value for key, value in state.items() if key not in parts}
        mine = others if parameter.numel() else None
        by_rank = self._control.exchange_objects(mine, what="state_dict()")
        known = next(values for values in by_rank if values is not None)
        return {**known, **{key: self._divided.whole(name, p).cpu() for key, p in parts.items()}}

    def _own_values(self, model: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """This rank's part of the values of a model's state dict.

        Raises:
            ValueError: it is of another model.
        """
        known = {key: (name, value) for key, name, value in self._entries()}
        if model.keys() != known.keys():
            differing = sorted(model.keys() ^ known.keys())
            raise ValueError(f"the state is of another model: the names {differing} differ")
        own = {}
        for key, (name, value) in known.items():
            given = model[key]
            shape = value.shape if name is None else self._divided.shape(name)
            if tuple(given.shape) != tuple(shape):
                raise ValueError(
                    f"{key!r} has the shape {tuple(given.shape)} in the state, but here it has "
                    f"the shape {tuple(shape)}; the state is of another model"
                )
            own[key] = given if name is None else self._divided.own(name, given)
        return own

    def _own_optimizer_state(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """The state of an optimizer with this rank's parts of the sharded parameters."""
        states = dict(state["state"])
        for index, (name, _) in enumerate(self._optimized()):
            if name in self._divided.sharded and index in states:
                shape = self._divided.shape(name)
                states[index] = {
                    key: self._divided.own(name, value).contiguous()
                    if isinstance(value, Tensor) and tuple(value.shape) == shape
                    else value
                    for key, value in states[index].items()
                }
        return {**state, "state": states}
