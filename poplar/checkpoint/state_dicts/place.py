"""`Place`: which elements of a parameter this rank has, and where they are in its flat tensors.

Saving, loading and state dicts cut flat tensors here and nowhere else. `Owners` knows the ranks
that have the other elements.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from poplar.comm import Control
from poplar.comm.shard_layout import Layout
from poplar.values.canonical_name import canonical
from poplar.zero.engine import Engine
from poplar.zero.flat_parameter import FlatParameter
from poplar.zero.optimizers.state_values import scaled

if TYPE_CHECKING:
    from poplar.checkpoint.state_dicts.shard_tensor import ShardTensor


def names_of(model: nn.Module, groups: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """The name of every parameter, by param group."""
    names = {id(parameter): canonical(name) for name, parameter in model.named_parameters()}
    return [[names[id(parameter)] for parameter in group["params"]] for group in groups]


@dataclass(frozen=True)
class Place:
    """A parameter in a flat parameter.

    A flat tensor is 1-D and has one value for each element of a part of the flat parameter, which
    includes what this rank owns of the parameter. `first` is the element of the flat parameter at
    which it begins.
    """

    flat: FlatParameter
    position: int

    @property
    def parameter(self) -> nn.Parameter:
        return self.flat.parameters[self.position]

    @property
    def name(self) -> str:
        """The name as torch's `get_state_dict` gives it."""
        return canonical(self.flat.names[self.position])

    @property
    def owned(self) -> tuple[int, int]:
        """Start and end of the owned elements, counted from the parameter's first."""
        return self.flat.owned_range(self.position)

    def entries(
        self, shape: Sequence[int], bounds: tuple[int, int] | None = None
    ) -> tuple[int, int]:
        """Start and end of the entries of a value that belong to elements of the parameter.

        Args:
            shape: of the value of the whole parameter.
            bounds: of the elements; default: the owned ones.
        """
        numel, (start, stop) = self.parameter.numel(), bounds or self.owned
        return scaled(start, numel, shape), scaled(stop, numel, shape)

    def part(self, values: Tensor, first: int | None = None) -> Tensor:
        """The owned elements in a flat tensor, a view."""
        return self.shard(values, first).local

    def shard(
        self,
        values: Tensor,
        first: int | None = None,
        shape: Sequence[int] | None = None,
        *,
        owners: Owners | None = None,
        bounds: tuple[int, int] | None = None,
    ) -> ShardTensor:
        """The owned elements in a flat tensor, as a view of a part of the parameter.

        Args:
            first: default: the first element that this rank owns.
            shape: of the value of the whole parameter; default: the parameter's.
            bounds: other elements of the parameter than the owned ones.
        """
        from poplar.checkpoint.state_dicts.shard_tensor import ShardTensor

        first = self.flat.owned[0] if first is None else first
        shape = self.parameter.shape if shape is None else shape
        base = scaled(first - self.flat.offsets[self.position], self.parameter.numel(), shape)
        start, stop = self.entries(shape, bounds)
        return ShardTensor(values.view(-1)[start - base : stop - base], shape, start, owners)

    def saved_shard(
        self,
        values: Tensor,
        rank: int,
        first: int | None = None,
        shape: Sequence[int] | None = None,
    ) -> ShardTensor:
        """What a rank saves: as `shard`, but each element on one rank, also if all own all."""
        offset, numel = self.flat.offsets[self.position], self.parameter.numel()
        bounds = self.flat.layout.bounds(rank)
        start, stop = (min(max(bound - offset, 0), numel) for bound in bounds)
        return self.shard(values, first, shape, bounds=(start, stop))

    def owners(self, engine: Engine, shape: Sequence[int] | None = None) -> Owners | None:
        """The ranks that own elements; None if each rank has a whole parameter of its own.

        Args:
            shape: of a value of the whole parameter; default: the parameter's.
        """
        if self.flat.is_local:
            return None
        return Owners(engine, self, self.parameter.shape if shape is None else shape)


def places_of(flats: Iterable[FlatParameter]) -> Iterator[Place]:
    """The places of all parameters."""
    return (Place(flat, position) for flat in flats for position in range(len(flat.parameters)))


def elements_of(value: object, shape: Sequence[int], bounds: tuple[int, int], name: str) -> Tensor:
    """Elements `[start, stop)` of a tensor of this shape, in row-major order, from a state dict.

    Args:
        value: the whole tensor, or a `ShardTensor` with a part of it.
        bounds: `start` and `stop`.

    Raises:
        TypeError: it is another kind of tensor, or none.
        ValueError: it has another shape, or not all of these elements.
    """
    from poplar.checkpoint.state_dicts.shard_tensor import ShardTensor

    if not isinstance(value, Tensor):
        raise TypeError(f"{name} is a {type(value).__name__}, but should be a tensor")
    if tuple(value.shape) != tuple(shape):
        raise ValueError(
            f"{name} has shape {tuple(value.shape)}, but here it has shape {tuple(shape)}; "
            "the state is of another model"
        )
    if isinstance(value, ShardTensor):
        values, first = value.local, value.start
    elif type(value) in (Tensor, nn.Parameter):
        values, first = value.detach().reshape(-1), 0
    else:
        raise TypeError(
            f"{name} is a {type(value).__name__}; load it with torch.distributed.checkpoint, "
            "or make it a whole tensor first"
        )
    check_held((first, first + values.numel()), bounds, name)
    start, stop = bounds
    return values[start - first : stop - first] if start < stop else values[:0]


def check_held(held: tuple[int, int], owned: tuple[int, int], name: str) -> None:
    """Raise ValueError unless the held elements `[first, end)` contain the owned ones."""
    (first, end), (start, stop) = held, owned
    if start < stop and not first <= start <= stop <= end:
        raise ValueError(
            f"{name} holds elements [{first}, {end}), but this rank owns [{start}, {stop}): it was "
            "saved by another rank or under another plan; load it with "
            "torch.distributed.checkpoint, or save full_state_dict()"
        )


class Owners:
    """How the elements of a parameter, and its state, are divided among the ranks.

    It does not keep the engine alive.
    """

    def __init__(self, engine: Engine, place: Place, shape: Sequence[int]) -> None:
        self._engine = weakref.ref(engine)
        self._name, offset = place.name, place.flat.offsets[place.position]
        numel = place.parameter.numel()
        elements = place.flat.layout.part(offset, numel)
        self._layout = Layout(tuple(scaled(end, numel, shape) for end in elements.offsets))
        self._device = place.flat.device

    @property
    def control(self) -> Control:
        """The channel for small values of the ranks."""
        return self._live_engine.control

    @property
    def _live_engine(self) -> Engine:
        engine = self._engine()
        if engine is None:
            raise RuntimeError(
                f"the optimizer of {self._name!r} does not exist any more, so the ranks cannot "
                "gather its elements; call full_tensor() while it does"
            )
        return engine

    def gather(self, local: Tensor) -> Tensor:
        """All elements, 1-D, on the device of `local`. Collective.

        Args:
            local: those that this rank had when the object was made.

        Raises:
            RuntimeError: in the middle of a step, or the optimizer does not exist any more.
        """
        engine = self._live_engine
        engine.hooks.before_call("full_tensor()")
        if engine.scheduler.active:
            raise RuntimeError("full_tensor() inside a pass; end the backward first")
        own = local.to(self._device)
        whole = torch.empty(self._layout.numel, dtype=own.dtype, device=self._device)
        what = f"gathering {self._name}"
        engine.comm.all_gather(whole, self._layout, what=what, own=own).wait()
        return whole.to(local.device)

    def __deepcopy__(self, _memo: dict[int, Any]) -> Owners:
        return self  # it never changes
