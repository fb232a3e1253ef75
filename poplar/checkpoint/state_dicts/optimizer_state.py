"""`OptimizerState`: this rank's part of the optimizer state by parameter, as views.

It is the `state` of the optimizer, which torch's `get_state_dict` and `Optimizer.state_dict` read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from poplar.checkpoint.state_dicts.place import Place, places_of
from poplar.system.storage import with_own_storage
from poplar.zero.engine import Engine
from poplar.zero.optimizers.state_values import StateValue, copy_value, taken_apart
from poplar.zero.update import ParameterRun, ShardedUpdate

MASTER = "master"
"""State of parameters that are not fp32: their fp32 values."""


class WritableState(dict[str, Any]):
    """The state of one parameter: what is set in it is written into the optimizer, or raises.

    A copy is a dict of the user.
    """

    def __init__(
        self, values: Any = (), write: Callable[[Mapping[str, Any]], None] | None = None
    ) -> None:
        """`write` writes the values that are set; without it this is a dict of the user."""
        super().__init__(values)
        self._write = write

    def __setitem__(self, key: str, value: Any) -> None:
        self.update({key: value})

    def setdefault(self, key: str, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def update(self, *values: Any, **more: Any) -> None:
        given = dict(*values, **more)
        if self._write is None:
            super().update(given)
        else:
            self._write(given)

    def __ior__(self, values: Any) -> Any:  # type: ignore[misc]  # typeshed has overloads
        self.update(values)
        return self

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


class OptimizerState(Mapping[Tensor, dict[str, Any]]):
    """By trained parameter, the state of the elements that this rank owns.

    State that is cut with the parameter is a `ShardTensor`, or a tensor in the parameter's shape
    where every rank has the whole state (stage 0). These are views: updates change them, and what
    is written into them, or set in their place, is in effect. All other values, such as step
    counters, are copies, because parameters share them. Of a parameter of which this rank owns
    nothing, all of them are empty `ShardTensor`s, so that state dicts have the same keys on all
    ranks. State that no update has created yet is created when it is read.
    """

    def __init__(self, engine: Engine, update: ShardedUpdate) -> None:
        self._engine, self._update = engine, update
        self._places = {id(place.parameter): place for place in places_of(engine.trained)}

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[Tensor]:
        return (parameter for flat in self._engine.trained for parameter in flat.parameters)

    def __getitem__(self, parameter: Tensor) -> dict[str, Any]:
        if id(parameter) not in self._places:
            raise KeyError(parameter)
        return WritableState(self._read(parameter), partial(self._write, parameter))

    def _read(self, parameter: Tensor) -> dict[str, Any]:
        place = self._places[id(parameter)]
        flat, run = place.flat, self._run_of(place)
        if run.tensor is None or not _is_owned(place):
            return self._absent(place)
        state = self._update.created_state_of(run)
        if flat.has_masters:
            self._update.take_written_values(flat, *flat.span(place.position))
            state[MASTER] = run.tensor
        if self._engine.strategy.replicates_state and run.is_separate:
            return state
        return {
            key: self._view(run, place, value, key) for key, value in taken_apart(state).items()
        }

    def __setitem__(self, parameter: Tensor, values: Mapping[str, Any]) -> None:
        """Write values into the state; for trainers that move it to the parameters' device.

        Raises:
            ValueError: other keys, or another step, which parameters share.
        """
        state = self._read(parameter)
        if state.keys() != values.keys():
            raise _cannot_set(state, values)
        self._write(parameter, values)

    def _write(self, parameter: Tensor, values: Mapping[str, Any]) -> None:
        """Write the values of some keys. Raises as `__setitem__`."""
        state = self._read(parameter)
        if not values.keys() <= state.keys():
            raise _cannot_set(state, values)
        if not _is_owned(self._places[id(parameter)]):
            return
        shared = {key for key in values if _is_shared(state[key], parameter)}
        if any(state[key] != values[key] for key in shared):
            raise _cannot_set(state, values)
        for key in values.keys() - shared:
            state[key].copy_(values[key])

    def _run_of(self, place: Place) -> ParameterRun:
        return next(
            run
            for run in self._update.runs
            if run.flat is place.flat and run.first <= place.position < run.last
        )

    def _absent(self, place: Place) -> dict[str, Any]:
        """The state of a parameter of which this rank owns nothing: no elements."""
        from poplar.checkpoint.state_dicts.shard_tensor import ShardTensor

        flat, engine = place.flat, self._engine
        layout = dict(self._update.layouts.of(flat, place.position))
        if flat.has_masters:
            layout[MASTER] = StateValue(place.parameter.shape, flat.master)
        return {
            key: ShardTensor(value.new_empty(0), value.shape, 0)
            if shape is None
            else ShardTensor(value.new_empty(0), shape, 0, place.owners(engine, shape))
            for key, (shape, value) in layout.items()
            if isinstance(value, Tensor)
        }

    def _view(self, run: ParameterRun, place: Place, value: Any, key: str) -> Any:
        """The owned entries of one parameter in a state value of its run, or a copy."""
        shape = place.parameter.shape
        if key != MASTER:
            found = self._update.whole_shape(run, place.position, key, value)
            if found is None:
                return copy_value(value)
            shape = found
        if self._engine.strategy.replicates_state:
            return with_own_storage(place.part(value, run.first_owned).view(shape))
        owners = place.owners(self._engine, shape)
        return place.shard(value, run.first_owned, shape, owners=owners)


def _is_owned(place: Place) -> bool:
    """Whether this rank owns elements of a parameter, or it has none."""
    start, stop = place.owned
    return start < stop or place.parameter.numel() == 0


def _is_shared(value: Any, parameter: Tensor) -> bool:
    return not isinstance(value, Tensor) or (value.dim() == 0 and value.shape != parameter.shape)


def _cannot_set(state: Mapping[str, Any], values: Mapping[str, Any]) -> ValueError:
    return ValueError(
        f"the state of this parameter has {_summary(state)}, got {_summary(values)}; use "
        "load_state_dict() to change it. What the optimizer class does not have, as of a wrapper, "
        "is not kept there: keep it in a dict of your own, by parameter"
    )


def _summary(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: tuple(value.shape) if isinstance(value, Tensor) and value.dim() else value
        for key, value in values.items()
    }


def copy_state(_: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """The first hook of `state_dict()`: what later ones write in it is in the state dict alone."""
    state_dict["state"] = {key: {**values} for key, values in state_dict["state"].items()}


def collected_state_dict(
    optimizer: torch.optim.Optimizer, collected: Mapping[str, Any]
) -> dict[str, Any]:
    """What `Optimizer.state_dict` makes of a collected state: with its hooks, and own keys."""
    for before in optimizer._optimizer_state_dict_pre_hooks.values():
        before(optimizer)
    state: dict[str, Any] = {
        **collected,
        "param_groups": [dict(group) for group in collected["param_groups"]],
    }
    for after in optimizer._optimizer_state_dict_post_hooks.values():
        changed = after(optimizer, state)
        state = state if changed is None else changed
    return state
