"""A change of plan between two steps: the training state moves to where the new plan has it.

If the stage and the units stay, `follow_plan` changes the engine. Else `replace_engine` makes
another one of the same model, one unit at a time: a unit of the old engine is freed when the new
ones have taken its parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise

import torch

from poplar.checkpoint.moved_state import (
    MovedState,
    Schemas,
    Segment,
    bounds,
    gather_schemas,
    moved_master,
    part_of,
    runs_after,
    state_of_runs,
    transfer,
)
from poplar.comm.shard_layout import Layout
from poplar.values.plan import Plan
from poplar.zero.engine import Engine
from poplar.zero.flat_parameter import FlatParameter
from poplar.zero.setup import (
    Request,
    assemble_engine,
    compare_kernels,
    opaque_layout,
    place_opaque,
    place_state,
    strategy_of,
)
from poplar.zero.stages.strategy import Layouts, Strategy
from poplar.zero.unit import Unit
from poplar.zero.update import ShardedUpdate

DOING = "apply_plan()"
"""What the ranks do, for errors."""


def follow_plan(engine: Engine, update: ShardedUpdate, plan: Plan) -> None:
    """Move the state to other owners and other memory. Collective, between steps."""
    schemas = gather_schemas(engine.control, update)
    strategy, before = engine.strategy, [_placed(flat) for flat in engine.trained]
    if plan.communication.parameters == "exact":
        send_masters(engine, update)
    strategy.communicate(plan.communication)
    layouts = place_state(strategy, engine.units, plan)
    moved = {flat for flat, was in zip(engine.trained, before, strict=True) if _placed(flat) != was}
    for flat, new in layouts.items():
        if flat.trained and (new != flat.layout or flat in moved):
            _move(engine, update, flat, schemas, new)
        elif new != flat.layout:
            strategy.change_layout(flat, new, None)
    for opaque in (opaque for unit in engine.units for opaque in unit.opaque):
        new = opaque_layout(opaque, plan, engine.comm)
        if new != opaque.layout:
            what = f"moving unit {opaque.name}"
            shard = engine.comm.reshard(opaque.shard, opaque.layout, new, what=what)
            opaque.divide(new, engine.comm.share(shard))
    compare_kernels(engine, update, DOING)
    engine.follow(plan)


def send_masters(engine: Engine, update: ShardedUpdate) -> None:
    """Give all ranks the exact values, written ones included. Collective, between steps."""
    for flat in engine.trained:
        update.take_written_values(flat)
    engine.strategy.gather_masters(engine.units)


def _placed(flat: FlatParameter) -> tuple[bool, bool]:
    """What decides which memory there is, beside the layout."""
    return flat.is_hosted, flat.sends_differences


def _move(
    engine: Engine, update: ShardedUpdate, flat: FlatParameter, schemas: Schemas, new: Layout
) -> None:
    update.take_written_values(flat)
    whole = engine.strategy.replicates_state
    segment = Segment.whole(flat, None if whole else flat.layout, None if whole else new)
    state = MovedState(engine.comm, update, segment, schemas)
    master = moved_master(engine.comm, segment) if flat.has_masters else None
    if new == flat.layout:
        flat.divide(new, flat.owned, flat.shard, master)
    else:
        engine.strategy.change_layout(flat, new, master)
    update.rebind(flat, state_of_runs(update, [state]))


def replace_engine(
    old: Engine,
    update: ShardedUpdate,
    request: Request,
    units: Sequence[Unit],
    check_step: Callable[[], None],
) -> Engine:
    """The engine of another plan, with the state of `old`. Collective, between steps.

    `old` must not be used afterwards; its changes of the model have been removed. The update serves
    both engines. `units` are those of the new plan, without values.
    """
    send_masters(old, update)
    strategy = strategy_of(request, old.comm, steps=old.strategy.steps)
    schemas = gather_schemas(old.control, update)
    move = EngineMove(old, update, strategy, schemas, place_state(strategy, units, request.plan))
    for unit in units:
        move.take(unit, request.plan)
    move.finish()
    engine = assemble_engine(request, units, strategy, old.control, check_step)
    compare_kernels(engine, update, DOING)
    return engine


class EngineMove:
    """Moves the units of one engine to those of another one."""

    def __init__(
        self,
        old: Engine | None,
        update: ShardedUpdate,
        strategy: Strategy,
        schemas: Schemas,
        layouts: Layouts,
        *,
        stays: bool = False,
    ) -> None:
        """
        Args:
            old: the engine; None: this rank has none, and nothing of the state.
            strategy: of the new engine.
            layouts: of its flat parameters.
            stays: every rank has what it had, so nothing is sent. The groups may differ.
        """
        self._old_strategy = strategy if old is None else old.strategy
        self._update, self._strategy = update, strategy
        self._schemas, self._layouts, self._stays = schemas, layouts, stays
        self._comm, self._rank = strategy.comm, strategy.comm.group.rank
        units = () if old is None else old.units
        flats = [flat for unit in units for flat in unit.flats]
        self._sharded = dict.fromkeys(self._old_strategy.sharded(units))
        """Units of the old engine whose parameters are sharded still."""
        self._stays_sharded = bool(self._sharded) and strategy.shards_parameters
        self._home = {id(p): (f, n) for f in flats for n, p in enumerate(f.parameters)}
        """The old flat parameter of a parameter, and its position there."""
        self._left = {flat: len(flat.parameters) for flat in flats}
        """How many parameters of an old flat parameter have not moved yet."""

    def take(self, unit: Unit, plan: Plan | None) -> None:
        """Move one unit of the new engine. Collective."""
        if not self._stays_sharded:
            self._unshard_sources(unit)
        for flat in unit.flats:
            self._take_flat(flat)
        for opaque in unit.opaque:
            place_opaque(opaque, opaque.packed_bytes(), plan, self._comm)

    def finish(self) -> None:
        """Move what is in no unit of the new engine. Collective."""
        self._unshard(list(self._sharded) if not self._stays_sharded else [])
        for flat in [*self._left]:
            self._free(flat)

    def _unshard_sources(self, unit: Unit) -> None:
        """Give this rank all values of the old units that have parameters of a new one."""
        wanted = {id(p) for flat in unit.flats for p in flat.parameters}
        self._unshard(
            source
            for source in list(self._sharded)
            if any(id(p) in wanted for flat in source.flats for p in flat.parameters)
        )

    def _unshard(self, units: Iterable[Unit]) -> None:
        for unit in units:
            self._old_strategy.unshard(unit, in_step=False, lasting=True)
            self._old_strategy.wait_for_unshard(unit)
            del self._sharded[unit]

    def _take_flat(self, flat: FlatParameter) -> None:
        with torch.no_grad():
            self._strategy.allocate(flat, self._layouts[flat])
            segments = list(self._segments(flat))
            if self._stays_sharded:
                for segment in segments:
                    self._reshard_values(flat, segment)
            else:
                for parameter, offset in zip(flat.parameters, flat.offsets, strict=True):
                    values = parameter.detach().reshape(-1)
                    self._strategy.write_initial_values(flat, offset, values)
            if flat.trained:
                self._take_state(flat, segments)
            self._strategy.bind_parameters(flat)
        for parameter in flat.parameters:
            source, _ = self._home.get(id(parameter), (None, 0))
            if source is not None:
                self._left[source] -= 1
                if not self._left[source]:
                    self._free(source)

    def _segments(self, flat: FlatParameter) -> Iterator[Segment]:
        """What the new flat parameter has of old ones; nothing if it was in no unit."""
        homes = [self._home[id(p)] for p in flat.parameters if id(p) in self._home]
        follows = [
            at > 0 and home == (homes[at - 1][0], homes[at - 1][1] + 1)
            for at, home in enumerate(homes)
        ]
        starts = [at for at, one in enumerate(follows) if not one]
        new = self._strategy.state_layout(flat)
        for first, end in pairwise([*starts, len(homes)]):
            source, position = homes[first]
            start, source_start = flat.span(first)[0], source.span(position)[0]
            numel = flat.span(end - 1)[1] - start
            before = after = part_of(new, start, numel)
            if not self._stays:
                before = part_of(self._old_strategy.state_layout(source), source_start, numel)
            yield Segment(source, source_start, start, numel, before, after)

    def _reshard_values(self, flat: FlatParameter, segment: Segment) -> None:
        """Move the values of a segment, which both engines divide as the state."""
        source, start = segment.source, segment.source_start
        low, high = bounds(segment.old, segment.numel, self._rank)
        part = source.intersect_owned(start + low, start + high)
        own = source.shard[part] if part is not None else source.shard[:0]
        what = f"moving the values of {source.name}"
        moved = transfer(self._comm, own, segment.old, segment.new, what)
        first, _ = bounds(segment.new, segment.numel, self._rank)
        self._strategy.write_initial_values(flat, segment.target_start + first, moved)

    def _take_state(self, flat: FlatParameter, segments: Sequence[Segment]) -> None:
        moved = [
            MovedState(self._comm, self._update, segment, self._schemas) for segment in segments
        ]
        for segment in segments if flat.has_masters else ():
            masters, start = moved_master(self._comm, segment), segment.target_start
            low, high = bounds(segment.new, segment.numel, self._rank)
            part = flat.intersect_owned(start + low, start + high)
            if part is not None:
                flat.master[part].copy_(masters)
        self._update.add_runs(runs_after(flat, moved), state_of_runs(self._update, moved))

    def _free(self, flat: FlatParameter) -> None:
        """Free an old flat parameter."""
        del self._left[flat]
        self._old_strategy.wait_for_readers(flat)
        self._update.drop_runs(flat)
        self._old_strategy.free_gradient(flat)
        flat.free()
