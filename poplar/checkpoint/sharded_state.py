"""The sharded training state in another layout.

`follow` moves it to other owners and other memory when the plan changes; `full_state_dict` collects
it on one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

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
from poplar.zero.optimizers.state_values import copy_value, scaled
from poplar.zero.setup import compare_kernels, place_state
from poplar.zero.unit import shares_by_unit
from poplar.zero.update import ParameterRun, ShardedUpdate


def follow(engine: Engine, update: ShardedUpdate, plan: Plan) -> None:
    """Move values and optimizer state to where a plan has them. Collective, between steps."""
    schemas = _gather_schemas(engine, update)
    was_hosted = {flat for flat in engine.trained if flat.is_hosted}
    for flat, new in place_state(engine.strategy, engine.units, plan).items():
        if new == flat.layout:
            if flat.is_hosted is not (flat in was_hosted):
                _move_state(update, flat)
        elif flat.trained:
            _reshard_trained(engine, update, flat, schemas, new)
        else:
            engine.strategy.change_layout(flat, new, None)
    shares, unit_shares = plan.shares, shares_by_unit(plan)
    for unit in engine.units:
        for opaque in unit.opaque:
            layout = Layout.from_shares(opaque.numel, unit_shares.get(unit.name, shares))
            engine.strategy.change_opaque_layout(opaque, layout)
    compare_kernels(engine, update, "apply_plan()")


def _move_state(update: ShardedUpdate, flat: FlatParameter) -> None:
    """Move the masters and the state of a flat parameter between device and host. Local."""
    update.take_written_values(flat)
    states = {run: update.state_of(run) for run in update.runs if run.flat is flat}
    shapes = {
        (run, key): update.whole_shape(run, run.first, key, value)
        for run, state in states.items()
        for key, value in state.items()
    }

    def moved(run: ParameterRun) -> dict[str, Any]:
        cut = {key for key in states[run] if shapes[run, key] is not None}
        others = {key: value for key, value in states[run].items() if key not in cut}
        if not states[run] or run.tensor is None:
            return {}
        return update.new_state(run, run.tensor.shape, {k: states[run][k] for k in cut}, others)

    flat.divide(flat.layout, flat.owned, flat.shard, flat.master if flat.has_masters else None)
    update.rebind(flat, moved)


def _reshard_trained(
    engine: Engine,
    update: ShardedUpdate,
    flat: FlatParameter,
    schemas: Sequence[Schema],
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
    update.rebind(flat, local_state_of)


class CutValue(NamedTuple):
    """A state value that is cut with its run."""

    dtype: torch.dtype
    entries: int
    """Of the whole run."""


Schema = Mapping[str, CutValue | Any]
"""By name of a state value of a run, how it is cut, or what it is."""


def _gather_schemas(engine: Engine, update: ShardedUpdate) -> list[Schema]:
    """The schema of each run. Collective.

    Ranks that own nothing of a run get it from those that do. Of a local flat parameter, ranks have
    parts of different sizes, so each has its own.
    """

    def schema(run: ParameterRun) -> Schema:
        if not (state := update.state_of(run)):
            return {}
        numel = run.stop - run.start
        return {
            key: CutValue(value.dtype, shape.numel() if run.is_separate else numel)
            if (shape := update.whole_shape(run, run.first, key, value)) is not None
            else value
            for key, value in state.items()
        }

    own = [schema(run) for run in update.runs]
    by_rank = engine.control.exchange_objects(own, what="moving optimizer state")
    return [
        mine if run.flat.is_local else next(filter(None, found), {})
        for run, mine, found in zip(update.runs, own, zip(*by_rank, strict=True), strict=True)
    ]


class _Entries:
    """The entries of one state value of a flat parameter, in the order of its runs.

    Args:
        counts: the entries of each run that has the value.
    """

    def __init__(self, counts: Mapping[ParameterRun, int]) -> None:
        self.counts = counts

    def of(self, run: ParameterRun, element: int) -> int:
        """The entries of a run that belong to what is before an element."""
        numel = run.stop - run.start
        return scaled(min(max(element - run.start, 0), numel), numel, (self.counts[run],))

    def before(self, element: int) -> int:
        """All entries that belong to what is before an element."""
        return sum(self.of(run, element) for run in self.counts)

    def layout(self, layout: Layout) -> Layout:
        """How the entries are divided if the elements have this layout."""
        return Layout(tuple(self.before(offset) for offset in layout.offsets))

    def places(self, run: ParameterRun, low: int, high: int) -> tuple[slice, slice]:
        """The entries of a run for the elements `[low, high)`.

        Returns:
            Where they are among all entries for these elements, and among those of the run.
        """
        first, last = self.of(run, low), self.of(run, high)
        base = self.before(max(low, run.start)) - self.before(low)
        return slice(base, base + last - first), slice(first, last)


def _reshard_state(
    engine: Engine,
    update: ShardedUpdate,
    flat: FlatParameter,
    schemas: Sequence[Schema],
    old: Layout,
    new: Layout,
) -> Callable[[ParameterRun], dict[str, Any]]:
    """Reshard the state of a flat parameter. Collective.

    Returns:
        A function from a run to the state of what this rank owns of it in the new layout.
    """
    rank = engine.comm.group.rank
    table = {
        run: schema for run, schema in zip(update.runs, schemas, strict=True) if run.flat is flat
    }
    kinds: dict[tuple[str, torch.dtype], dict[ParameterRun, int]] = {}
    for run, schema in table.items():
        for key, value in schema.items():
            if isinstance(value, CutValue):
                kinds.setdefault((key, value.dtype), {})[run] = value.entries
    moved: dict[tuple[str, torch.dtype], tuple[_Entries, Tensor]] = {}
    what = f"moving the state of {flat.name}"
    for key, dtype in sorted(kinds, key=str):
        entries = _Entries(kinds[key, dtype])
        before, after = entries.layout(old), entries.layout(new)
        shard = torch.zeros(before.size(rank), dtype=dtype, device=flat.device)
        for run in entries.counts:
            if (value := update.state_of(run).get(key)) is not None:
                here, part = entries.places(run, *old.bounds(rank))
                base = entries.of(run, run.first_owned)
                shard[here] = value.reshape(-1)[part.start - base : part.stop - base]
        if before != after:
            sent = shard.view(torch.uint8) if dtype.itemsize == 1 else shard
            shard = engine.comm.reshard(sent, before, after, what=what).view(dtype)
        moved[key, dtype] = entries, shard
    low, high = new.bounds(rank)

    def local(run: ParameterRun) -> dict[str, Any]:
        start, stop = max(run.start, low), min(run.stop, high)
        if start >= stop or not table[run]:
            return {}
        cut, others = {}, {}
        for key, value in table[run].items():
            if isinstance(value, CutValue):
                entries, shard = moved[key, value.dtype]
                cut[key] = shard[entries.places(run, low, high)[0]]
            else:
                others[key] = value
        return update.new_state(run, run.shape_of(stop - start), cut, others)

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
    if not isinstance(value, Tensor) or value.dim() != 1 or value.numel() != numel:
        return _on_cpu(copy_value(value))
    parameter = flat.parameters[position]
    part = value[start : start + parameter.numel()].view(parameter.shape)
    whole = torch.empty(parameter.shape, dtype=value.dtype, device="cpu")
    return whole.copy_(part)


def _on_cpu(value: Any) -> Any:
    """A tensor on the CPU, or any other value itself."""
    return value.cpu() if isinstance(value, Tensor) else value
