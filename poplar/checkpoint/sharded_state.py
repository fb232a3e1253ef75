"""Saves, loads and reshards the sharded training state.

State is always moved from one layout to another: to other shares when the plan changes, or to one
rank for a full state dict.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from poplar.comm.shard_layout import Layout
from poplar.zero.engine import Engine
from poplar.zero.flat_parameter import FlatParameter, layout_on_rank
from poplar.zero.update import ParameterRun, ShardedUpdate, is_elementwise


def local_state(
    engine: Engine, update: ShardedUpdate, identity: Mapping[str, Any]
) -> dict[str, Any]:
    """This rank's optimizer state by run, and the masters of parameters that are not fp32."""
    names = {flat: index for index, flat in enumerate(engine.trained)}
    runs = [
        {
            "flat": names[run.flat],
            "first": run.first,
            "last": run.last,
            "state": update.state_of(run),
        }
        for run in update.runs
    ]
    masters = [None if flat.master is flat.shard else flat.master for flat in engine.trained]
    return {"identity": dict(identity), "runs": runs, "masters": masters}


def check_identity(saved: Mapping[str, Any], identity: Mapping[str, Any]) -> None:
    """Check that a saved state is from this rank, world size, stage and layout.

    Raises:
        ValueError: one of these differs.
    """
    for key, expected in identity.items():
        found = saved["identity"].get(key)
        if _as_lists(found) != _as_lists(expected):
            raise ValueError(
                f"this optimizer state was saved with {key} {found}, but here it is {expected}; "
                "load each rank's own file under the plan with which it was saved, or use "
                "consolidate_state_dict()"
            )


def load_local_state(engine: Engine, update: ShardedUpdate, saved: Mapping[str, Any]) -> None:
    """Load the result of `local_state`; call `check_identity` first."""
    flats = engine.trained
    groups = {
        (run.flat, position): run.group
        for run in update.runs
        for position in range(run.first, run.last)
    }
    runs = [
        ParameterRun(
            flats[r["flat"]], groups[flats[r["flat"]], r["first"]], r["first"], r["last"], None
        )
        for r in saved["runs"]
    ]
    states = {
        run: {key: _copy(value) for key, value in r["state"].items()}
        for run, r in zip(runs, saved["runs"], strict=True)
    }
    for flat, master in zip(flats, saved["masters"], strict=True):
        if master is not None:
            flat.master.copy_(master)
    update.replace_runs(runs)
    for flat in flats:
        update.rebind(flat, states)


def reshard(
    engine: Engine,
    update: ShardedUpdate,
    shares: Sequence[float],
    unit_shares: Mapping[str, Sequence[float]],
) -> None:
    """Move masters, values and optimizer state to new shares. Collective, between steps.

    Args:
        shares: fraction of each rank.
        unit_shares: by name, the shares of units that do not use `shares`.
    """
    schemas = _gather_schemas(engine, update)
    for unit in engine.units:
        for flat in unit.flats:
            new = engine.strategy.layout_for(flat, unit_shares.get(unit.name, shares))
            if new == flat.layout:
                continue
            if flat.trained:
                _reshard_trained(engine, update, flat, schemas, new)
            else:
                engine.strategy.change_layout(flat, new, None)


def _reshard_trained(
    engine: Engine,
    update: ShardedUpdate,
    flat: FlatParameter,
    schemas: Sequence[Mapping[str, tuple[Any, Any]]],
    new: Layout,
) -> None:
    old = flat.layout
    local_state_of = _reshard_state(engine, update, flat, schemas, old, new)
    master = None
    if flat.master is not flat.shard:
        master = engine.comm.reshard(flat.master, old, new, what=f"moving unit {flat.name}")
    engine.strategy.change_layout(flat, new, master)
    update.rebind(flat, {run: local_state_of(run) for run in update.runs if run.flat is flat})


def consolidated_state(
    engine: Engine,
    update: ShardedUpdate,
    packed_groups: list[dict[str, Any]],
    optimizer: torch.optim.Optimizer,
    to: int,
) -> dict[str, Any] | None:
    """The state dict of a plain optimizer, on rank `to`; None on other ranks. Collective."""
    schemas = _gather_schemas(engine, update)
    index_of = {
        id(parameter): index
        for index, parameter in enumerate(p for g in optimizer.param_groups for p in g["params"])
    }
    state: dict[int, dict[str, Any]] = {}
    for flat in engine.trained:
        old = engine.strategy.state_layout(flat, to)
        new = layout_on_rank(flat, to, engine.comm.group.size)
        collected_state_of = _reshard_state(engine, update, flat, schemas, old, new)
        for run in update.runs:
            values = collected_state_of(run) if run.flat is flat else {}
            if not values:  # also on ranks other than `to`
                continue
            for position in range(run.first, run.last):
                parameter = flat.parameters[position]
                state[index_of[id(parameter)]] = {
                    key: _value_of(value, run, position) for key, value in values.items()
                }
    here = engine.comm.group.rank == to
    return {"state": state, "param_groups": packed_groups} if here else None


def _value_of(value: Any, run: ParameterRun, position: int) -> Any:
    """The part of a run's state value that belongs to one parameter, in its shape."""
    elementwise = isinstance(value, Tensor) and value.dim() == 1
    if not elementwise or value.numel() != run.stop - run.start:
        return _copy(value)
    parameter = run.flat.parameters[position]
    start = run.flat.offsets[position] - run.start
    return value[start : start + parameter.numel()].view(parameter.shape).clone()


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


def _reshard_state(  # type: ignore[no-untyped-def]
    engine: Engine,
    update: ShardedUpdate,
    flat: FlatParameter,
    schemas: Sequence[Mapping[str, tuple[Any, Any]]],
    old: Layout,
    new: Layout,
):
    """Reshard the state of a flat parameter; returns a function from run to its local state."""
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
        moved[key] = engine.comm.reshard(shard, old, new, what=f"moving the state of {flat.name}")
    new_low, new_high = new.bounds(rank)
    table = dict(runs)

    def local(run: ParameterRun) -> dict[str, Any]:
        start, stop = max(run.start, new_low), min(run.stop, new_high)
        if start >= stop:
            return {}
        return {
            key: moved[key][start - new_low : stop - new_low].clone()
            if dtype is not None
            else _copy(value)
            for key, (dtype, value) in table[run].items()
        }

    return local


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _as_lists(value: Any) -> Any:
    return [_as_lists(item) for item in value] if isinstance(value, (list, tuple)) else value
