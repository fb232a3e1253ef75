"""The sharded training state in another layout.

`follow` moves it to other owners and other memory when the plan changes; `full_state_dict` collects
it on one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from poplar.checkpoint.state_dicts.optimizer_state import MASTER
from poplar.checkpoint.state_dicts.place import names_of
from poplar.comm.shard_layout import Layout
from poplar.values.errors import agreed
from poplar.values.plan import Plan
from poplar.zero.agreement import caught, raise_on_any_error
from poplar.zero.engine import Engine
from poplar.zero.flat_parameter import FlatParameter, layout_on_rank
from poplar.zero.setup import compare_kernels, place_state
from poplar.zero.unit import shares_by_unit
from poplar.zero.update import ParameterRun, ShardedUpdate, copy_value, is_elementwise


def follow(engine: Engine, update: ShardedUpdate, plan: Plan) -> None:
    """Move values and optimizer state to where a plan has them. Collective, between steps."""
    shares, unit_shares = plan.shares, shares_by_unit(plan)
    schemas = _gather_schemas(engine, update)
    was_hosted = {flat for flat in engine.trained if flat.is_hosted}
    place_state(engine.strategy, engine.units, plan)
    for unit in engine.units:
        for flat in unit.flats:
            new = engine.strategy.divided(flat, unit_shares.get(unit.name, shares))
            if new == flat.layout:
                if flat.is_hosted is not (flat in was_hosted):
                    _move_state(update, flat)
            elif flat.trained:
                _reshard_trained(engine, update, flat, schemas, new)
            else:
                engine.strategy.change_layout(flat, new, None)
        for opaque in unit.opaque:
            new = Layout.from_shares(opaque.numel, unit_shares.get(unit.name, shares))
            engine.strategy.change_opaque_layout(opaque, new)
    compare_kernels(engine, update, "apply_plan()")


def _move_state(update: ShardedUpdate, flat: FlatParameter) -> None:
    """Move the masters and the state of a flat parameter between device and host. Local."""
    update.take_written_values(flat)
    states = {run: update.state_of(run) for run in update.runs if run.flat is flat}
    flat.divide(flat.layout, flat.owned, flat.shard, flat.master if flat.has_masters else None)
    for run, state in states.items():
        moved = {key for key, value in state.items() if is_elementwise(value, run.tensor)}
        state.update({key: state[key].to(flat.master.device, copy=True) for key in moved})
    update.rebind(flat, states)


def _reshard_trained(
    engine: Engine,
    update: ShardedUpdate,
    flat: FlatParameter,
    schemas: Sequence[Mapping[str, tuple[Any, Any]]],
    new: Layout,
) -> None:
    update.take_written_values(flat)
    old = flat.layout
    local_state_of = _reshard_state(engine, update, flat, schemas, old, new)
    master = None
    if flat.has_masters:
        whole = flat.master.to(flat.device)
        master = engine.comm.reshard(whole, old, new, what=f"moving unit {flat.name}")
    engine.strategy.change_layout(flat, new, master)
    update.rebind(flat, {run: local_state_of(run) for run in update.runs if run.flat is flat})


def _gather_schemas(engine: Engine, update: ShardedUpdate) -> list[dict[str, tuple[Any, Any]]]:
    """For each run and state name: its dtype if elementwise, else its value. Collective.

    Ranks that own nothing of a run get the schema from those that do.
    """
    mine = []
    for run in update.runs:
        schema: dict[str, tuple[Any, Any]] = {}
        for key, value in update.state_of(run).items():
            elementwise = is_elementwise(value, run.tensor)
            schema[key] = (value.dtype, None) if elementwise else (None, value)
        mine.append(schema)
    by_rank = engine.control.exchange_objects(mine, what="moving optimizer state")
    return [
        next((schema for schema in schemas if schema), {}) for schemas in zip(*by_rank, strict=True)
    ]


def _reshard_state(
    engine: Engine,
    update: ShardedUpdate,
    flat: FlatParameter,
    schemas: Sequence[Mapping[str, tuple[Any, Any]]],
    old: Layout,
    new: Layout,
) -> Callable[[ParameterRun], dict[str, Any]]:
    """Reshard the state of a flat parameter. Collective.

    Returns:
        A function from a run to the state of what this rank owns of it in the new layout.
    """
    rank = engine.comm.group.rank
    low, high = old.bounds(rank)
    runs = [
        (run, schema) for run, schema in zip(update.runs, schemas, strict=True) if run.flat is flat
    ]
    elementwise = {
        key: dtype for _, schema in runs for key, (dtype, _) in schema.items() if dtype is not None
    }
    moved: dict[str, Tensor] = {}
    for key in sorted(elementwise):
        shard = torch.zeros(high - low, dtype=elementwise[key], device=flat.device)
        for run, _ in runs:
            value = update.state_of(run).get(key)
            start, stop = max(run.start, low), min(run.stop, high)
            if value is not None and start < stop:
                base = max(run.start, flat.owned[0])
                shard[start - low : stop - low] = value[start - base : stop - base]
        what = f"moving the state of {flat.name}"
        moved[key] = shard if old == new else engine.comm.reshard(shard, old, new, what=what)
    new_low, new_high = new.bounds(rank)
    table = dict(runs)

    def local(run: ParameterRun) -> dict[str, Any]:
        start, stop = max(run.start, new_low), min(run.stop, new_high)
        if start >= stop:
            return {}
        return {
            key: moved[key][start - new_low : stop - new_low].to(flat.master.device, copy=True)
            if dtype is not None
            else copy_value(value)
            for key, (dtype, value) in table[run].items()
        }

    return local


def full_state_dict(
    optimizer: torch.optim.Optimizer, engine: Engine, update: ShardedUpdate, to: int
) -> dict[str, Any] | None:
    """The state dict of a plain optimizer on rank `to`, None on other ranks. Collective."""
    size = engine.comm.group.size
    by_rank = engine.control.exchange_objects(to, what="full_state_dict()")
    if to not in range(size) or len(set(by_rank)) > 1:
        raise agreed(
            ValueError(
                f"to={to!r} must be one of the {size} ranks, which count from 0, and the same on "
                f"all ranks; they gave {by_rank}"
            )
        )
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
    schemas = _gather_schemas(engine, update)
    state: dict[int, dict[str, Any]] = {}
    error: Exception | None = None  # the other ranks send until the end
    for flat in engine.trained:
        update.take_written_values(flat)
        old = engine.strategy.state_layout(flat, to)
        new = old if flat.is_local else layout_on_rank(flat, to, engine.comm.group.size)
        state_of = _reshard_state(engine, update, flat, schemas, old, new)
        master = _collect_master(engine, flat, old, new)
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
            values[MASTER] = master[run.start : run.stop]
        for position in range(run.first, run.last) if values else ():
            start = flat.offsets[position] - run.start
            state[indices[id(flat.parameters[position])]] = {
                key: _of_parameter(value, flat, position, start, run.stop - run.start)
                for key, value in values.items()
            }


def _collect_master(engine: Engine, flat: FlatParameter, old: Layout, new: Layout) -> Tensor | None:
    """The fp32 values of a flat parameter, if there are other ones, in layout `new`. Collective."""
    if not flat.has_masters:
        return None
    part = flat.intersect_owned(*old.bounds(engine.comm.group.rank))
    own = (flat.master[part] if part is not None else flat.master[:0]).to(flat.device)
    if old == new:
        return own
    return engine.comm.reshard(own, old, new, what=f"collecting the masters of {flat.name}")


def _of_parameter(value: Any, flat: FlatParameter, position: int, start: int, numel: int) -> Any:
    """The part of a state value that belongs to one parameter, in its shape, on the CPU.

    Args:
        start: the parameter's first element in a state tensor.
        numel: elements of a state tensor; a tensor of another size belongs to all parameters.
    """
    if not isinstance(value, Tensor):
        return value
    if value.dim() != 1 or value.numel() != numel:
        return copy_value(value).cpu()
    parameter = flat.parameters[position]
    part = value[start : start + parameter.numel()].view(parameter.shape)
    whole = torch.empty(parameter.shape, dtype=value.dtype, device="cpu")
    return whole.copy_(part)
