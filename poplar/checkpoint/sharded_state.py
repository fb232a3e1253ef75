"""Moves the sharded training state from one layout to another.

To other shares when the plan changes, or to one rank for a full state dict.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from poplar.comm.shard_layout import Layout
from poplar.zero.engine import Engine
from poplar.zero.flat_parameter import FlatParameter
from poplar.zero.update import ParameterRun, ShardedUpdate, copy_value, is_elementwise


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
    schemas = gather_schemas(engine, update)
    for unit in engine.units:
        for flat in unit.flats:
            new = engine.strategy.divided(flat, unit_shares.get(unit.name, shares))
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
    update.take_written_values(flat)
    old = flat.layout
    local_state_of = reshard_state(engine, update, flat, schemas, old, new)
    master = None
    if flat.master is not flat.shard:
        master = engine.comm.reshard(flat.master, old, new, what=f"moving unit {flat.name}")
    engine.strategy.change_layout(flat, new, master)
    update.rebind(flat, {run: local_state_of(run) for run in update.runs if run.flat is flat})


def gather_schemas(engine: Engine, update: ShardedUpdate) -> list[dict[str, tuple[Any, Any]]]:
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


def reshard_state(
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
            key: moved[key][start - new_low : stop - new_low].clone()
            if dtype is not None
            else copy_value(value)
            for key, (dtype, value) in table[run].items()
        }

    return local
