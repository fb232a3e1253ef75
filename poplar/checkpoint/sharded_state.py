"""Saving, loading and moving sharded training state.

Every move of state is a list of transfers from one layout to another: to other shares when the plan
changes, to one rank when a whole state dict is wanted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from poplar.comm import Control
from poplar.comm.shard_layout import Layout
from poplar.zero.agreement import raise_on_any_error
from poplar.zero.engine import Engine
from poplar.zero.flat_parameter import FlatParameter
from poplar.zero.update import Run, ShardedUpdate, is_elementwise


def state_bytes(engine: Engine, update: ShardedUpdate) -> dict[str, int]:
    """Bytes of the storages that hold training state on this rank, each counted once."""
    seen: set[int] = set()

    def count(tensors: Sequence[Tensor]) -> int:
        total = 0
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.nbytes() and storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                total += storage.nbytes()
        return total

    parameters = [tensor for flat in engine.flats for tensor in (flat.values, flat.shard)]
    states = [value for run in update.runs for value in update.state_of(run).values()]
    return {
        "parameters": count(parameters),
        "gradients": count([flat.gradient for flat in engine.trained]),
        "optimizer": count([flat.master for flat in engine.trained])
        + count([value for value in states if isinstance(value, Tensor)]),
    }


def local_state(
    engine: Engine, update: ShardedUpdate, identity: Mapping[str, Any]
) -> dict[str, Any]:
    """This rank's optimizer state, run by run, and masters where the values are not fp32."""
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
    """Refuse another rank's state, or one of another world, stage or layout.

    Raises:
        ValueError: what differs.
    """
    for key, expected in identity.items():
        found = saved["identity"].get(key)
        if _as_lists(found) != _as_lists(expected):
            raise ValueError(
                f"this optimizer state was saved with {key} {found}, but here it is {expected}; "
                "load each rank's own file under the plan that it was saved with, or go through "
                "consolidate_state_dict()"
            )


def load_local_state(engine: Engine, update: ShardedUpdate, saved: Mapping[str, Any]) -> None:
    """Take over what `local_state` gave, after `check_identity`."""
    flats = engine.trained
    groups = {
        (run.flat, position): run.group
        for run in update.runs
        for position in range(run.first, run.last)
    }
    runs = [
        Run(flats[r["flat"]], groups[flats[r["flat"]], r["first"]], r["first"], r["last"], None)
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
    shares_by_unit: Mapping[str, Sequence[float]],
) -> None:
    """Move masters, values and optimizer state to new shares. Collective, between steps.

    `own_shares`: of the units, by name, that do not follow `shares`.
    """
    schemas = _gather_schemas(engine, update)
    shares_of = {
        flat: shares_by_unit.get(unit.name, shares) for unit in engine.units for flat in unit.flats
    }
    for flat in engine.flats:
        old = flat.layout
        new = engine.strategy.layout_for(flat, shares_of[flat])
        if new == old:
            continue
        states: dict[Run, dict[str, Any]] = {}
        if flat.trained:
            whole = _reshard_state(engine, update, flat, schemas, old, new)
            master_moves = flat.master is not flat.shard
            master = (
                engine.comm.reshard(flat.master, old, new, what=f"moving unit {flat.name}")
                if master_moves
                else None
            )
            engine.strategy.change_layout(flat, new, master)
            for run in update.runs:
                if run.flat is flat:
                    states[run] = whole(run)
            update.rebind(flat, states)
        else:
            engine.strategy.change_layout(flat, new, None)


def consolidated_state(
    engine: Engine,
    update: ShardedUpdate,
    packed_groups: list[dict[str, Any]],
    optimizer: torch.optim.Optimizer,
    to: int,
) -> dict[str, Any] | None:
    """Every parameter's state, as a plain optimizer saves it, on rank `to`. Collective."""
    here = engine.comm.group.rank == to
    schemas = _gather_schemas(engine, update)
    number = {
        id(parameter): index
        for index, parameter in enumerate(p for g in optimizer.param_groups for p in g["params"])
    }
    state: dict[int, dict[str, Any]] = {}
    for flat in engine.trained:
        gathered = Layout(
            tuple(0 if rank <= to else flat.numel for rank in range(engine.comm.group.size + 1))
        )
        old = engine.strategy.state_layout(flat, to)
        collect = _reshard_state(engine, update, flat, schemas, old, gathered)
        for run in update.runs:
            if run.flat is not flat:
                continue
            values = collect(run)
            if not here or not values:
                continue
            for position in range(run.first, run.last):
                parameter = flat.parameters[position]
                low = flat.offsets[position] - run.start
                state[number[id(parameter)]] = {
                    key: value[low : low + parameter.numel()].view(parameter.shape).clone()
                    if isinstance(value, Tensor)
                    and value.dim() == 1
                    and value.numel() == run.stop - run.start
                    else _copy(value)
                    for key, value in values.items()
                }
    return {"state": state, "param_groups": packed_groups} if here else None


def save_model(engine: Engine, control: Control, model: nn.Module, path: Path) -> None:
    """Write all weights and buffers, tied ones once, from rank 0. Collective."""
    from safetensors.torch import save_file

    error: Exception | None = None
    with engine.unsharded_parameters(writeback=False):
        if control.group.rank == 0:
            try:
                state, tied = _unique_tensors(model)
                # Names left out are noted as safetensors does, so that load_model finds them.
                save_file(state, path, metadata={"format": "pt", **tied})
            except Exception as caught:
                error = caught
    raise_on_any_error(control, error, doing=f"save_model({str(path)!r})")


def _unique_tensors(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The model's state without second names of one tensor, and what those names stand for."""
    state: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    first: dict[tuple[int, torch.Size, torch.dtype], str] = {}
    for name, value in model.state_dict().items():
        key = (value.data_ptr(), value.shape, value.dtype)
        if value.numel() and first.setdefault(key, name) != name:
            tied[name] = first[key]
        else:
            # A view into a flat buffer would be written with the whole buffer behind it.
            state[name] = value.detach().cpu().clone(memory_format=torch.contiguous_format)
    return state, tied


def _gather_schemas(engine: Engine, update: ShardedUpdate) -> list[dict[str, tuple[Any, Any]]]:
    """Say of what each run's state consists: dtype if elementwise, else the value. Collective.

    A rank that owns nothing of a run learns it from those that do.
    """
    mine = []
    for run in update.runs:
        schema: dict[str, tuple[Any, Any]] = {}
        for key, value in update.state_of(run).items():
            elementwise = is_elementwise(value, run.tensor)
            schema[key] = (value.dtype, None) if elementwise else (None, value)
        mine.append(schema)
    everybody = engine.control.exchange_objects(mine, what="moving optimizer state")
    return [
        next((schema for schema in of_run if schema), {}) for of_run in zip(*everybody, strict=True)
    ]


def _reshard_state(  # type: ignore[no-untyped-def]
    engine: Engine,
    update: ShardedUpdate,
    flat: FlatParameter,
    schemas: Sequence[Mapping[str, tuple[Any, Any]]],
    old: Layout,
    new: Layout,
):
    """Move a buffer's state from `old` to `new`; returns a function from run to its part."""
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

    def local(run: Run) -> dict[str, Any]:
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
