"""The whole training state of a plain optimizer, collected on one rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from poplar.checkpoint.moved_state import (
    MovedState,
    Segment,
    gather_schemas,
    moved_master,
    state_of_runs,
)
from poplar.checkpoint.state_dicts.optimizer_state import MASTER
from poplar.checkpoint.state_dicts.place import names_of
from poplar.zero.agreement import caught, raise_on_any_error
from poplar.zero.engine import Engine
from poplar.zero.flat_parameter import FlatParameter, layout_on_rank
from poplar.zero.optimizers.state_values import copy_value
from poplar.zero.update import ParameterRun, ShardedUpdate


def full_state_dict(
    optimizer: torch.optim.Optimizer, engine: Engine, update: ShardedUpdate, to: int
) -> dict[str, Any] | None:
    """The state dict of a plain optimizer on rank `to`, None on other ranks. Collective."""
    names = names_of(engine.model, optimizer.param_groups)
    indices: dict[int, int] = {}
    groups = []
    for group, inside in zip(optimizer.param_groups, names, strict=True):
        first = len(indices)
        indices |= {id(p): first + place for place, p in enumerate(group["params"])}
        settings = {key: value for key, value in group.items() if key != "params"}
        params = list(range(first, len(indices)))
        groups.append({"param_names": inside, **settings, "params": params})
    state = _collect(engine, update, indices, to)
    here = engine.comm.group.rank == to
    return {"state": state, "param_groups": groups} if here else None


def _collect(
    engine: Engine, update: ShardedUpdate, indices: Mapping[int, int], to: int
) -> dict[int, dict[str, Any]]:
    """The whole state by index of the parameter, on the CPU of rank `to`. Collective.

    The state of one flat parameter at a time is on the device of `to`.

    Args:
        indices: index of each parameter in the param groups, by `id(parameter)`.
        to: the rank that gets it; others get an empty dict.
    """
    schemas = gather_schemas(engine.control, update)
    state: dict[int, dict[str, Any]] = {}
    error: Exception | None = None  # the other ranks send until the end
    for flat in engine.trained:
        update.take_written_values(flat)
        old = engine.strategy.state_layout(flat)
        new = old if flat.is_local else layout_on_rank(flat, to, engine.comm.group.size)
        segment = Segment.whole(flat, old, new)
        state_of = state_of_runs(update, [MovedState(engine.comm, update, segment, schemas)])
        master = moved_master(engine.comm, segment) if flat.has_masters else None
        if engine.comm.group.rank == to and error is None:
            add = partial(_add, state, update.runs, flat, state_of, master, indices)
            error = caught(add)
    raise_on_any_error(engine.control, error, doing="full_state_dict()")
    return dict(sorted(state.items()))


def _add(
    state: dict[int, dict[str, Any]],
    runs: Sequence[ParameterRun],
    flat: FlatParameter,
    state_of: Callable[[ParameterRun], dict[str, Any]],
    master: Tensor | None,
    indices: Mapping[int, int],
) -> None:
    """Add the whole state of one flat parameter, on the CPU."""
    for run in runs:
        if run.flat is not flat:
            continue
        values = state_of(run)
        if master is not None:
            whole = master[run.start : run.stop]
            values[MASTER] = whole.view(run.shape_of(whole.numel())).clone()
        for position in range(run.first, run.last) if values else ():
            start = flat.offsets[position] - run.start
            index = indices[id(flat.parameters[position])]
            if run.is_separate:
                state[index] = {key: _on_cpu(value) for key, value in values.items()}
                continue
            state[index] = {
                key: _of_parameter(value, flat, position, start, run.stop - run.start)
                for key, value in values.items()
            }


def _of_parameter(value: Any, flat: FlatParameter, position: int, start: int, numel: int) -> Any:
    """The part of a state value that belongs to one parameter, in its shape, on the CPU.

    Args:
        start: the parameter's first element in a state tensor.
        numel: elements of a state tensor; a tensor of another size belongs to all parameters.
    """
    if not isinstance(value, Tensor) or value.dim() != 1 or value.numel() != numel:
        return _on_cpu(copy_value(value))
    parameter = flat.parameters[position]
    part = value[start : start + parameter.numel()].view(parameter.shape)
    whole = torch.empty(parameter.shape, dtype=value.dtype, device="cpu")
    return whole.copy_(part)


def _on_cpu(value: Any) -> Any:
    """A tensor on the CPU, or any other value itself."""
    return value.cpu() if isinstance(value, Tensor) else value
