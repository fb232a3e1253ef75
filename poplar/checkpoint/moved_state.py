"""Moves optimizer state, masters and values from old owners to new ones.

All of them move by `transfer`, which sends each entry directly from the rank that has it to a rank
that needs it. A segment is what an old and a new flat parameter have in common, in one piece: all
of it if only the owners change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from poplar.comm import Communicator, Control
from poplar.comm.shard_layout import Layout
from poplar.zero.flat_parameter import FlatParameter
from poplar.zero.optimizers.state_values import scaled
from poplar.zero.update import ParameterRun, ShardedUpdate, adjacent_runs

StateOf = Callable[[ParameterRun], dict[str, Any]]
"""From a run to the state of what this rank owns of it now."""


class CutValue(NamedTuple):
    """A state value that is cut with its run."""

    dtype: torch.dtype
    entries: int
    """Of the whole run."""


Schema = Mapping[str, CutValue | Any]
"""By name of a state value of a run, how it is cut, or what it is."""
Schemas = Mapping[ParameterRun, Schema]


@dataclass(frozen=True)
class Segment:
    """Consecutive elements that two flat parameters, or two layouts of one, have in common."""

    source: FlatParameter
    source_start: int
    target_start: int
    numel: int
    old: Layout | None
    """How state is divided now; None: every rank has all of it."""
    new: Layout | None
    """How it will be divided."""

    @classmethod
    def whole(cls, flat: FlatParameter, old: Layout | None, new: Layout | None) -> Segment:
        """All of a flat parameter, of which only the owners change."""
        return cls(flat, 0, 0, flat.numel, old, new)


def gather_schemas(control: Control, update: ShardedUpdate) -> dict[ParameterRun, Schema]:
    """The schema of each run. Collective.

    Ranks that own nothing of a run get it from those that do. Of a local flat parameter, ranks have
    parts of different sizes, so each has its own. A rank without runs has no part in it.
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
    received = control.exchange_objects(own, what="moving optimizer state")
    by_rank = [schemas for schemas in received if len(schemas) == len(own)]
    return {
        run: mine if run.flat.is_local else next(filter(None, found), {})
        for run, mine, found in zip(update.runs, own, zip(*by_rank, strict=True), strict=True)
    }


def bounds(layout: Layout | None, numel: int, rank: int) -> tuple[int, int]:
    """The first element that a rank has and the one after its last; None: it has all."""
    return (0, numel) if layout is None else layout.bounds(rank)


def part_of(layout: Layout | None, start: int, numel: int) -> Layout | None:
    """As `Layout.part`; None: every rank has everything."""
    return None if layout is None else layout.part(start, numel)


def transfer(
    comm: Communicator, part: Tensor, old: Layout | None, new: Layout | None, what: str
) -> Tensor:
    """This rank's part under `new`, from all ranks' parts under `old`. Collective if they differ.

    Args:
        part: what this rank has under `old`, 1-D.
        old: the layout now; None: every rank has everything.
        new: the layout afterwards; None: every rank gets everything.
    """
    if old == new:
        return part
    if old is None:
        low, high = bounds(new, part.numel(), comm.group.rank)
        return part[low:high]
    sent = part.view(torch.uint8) if part.dtype.itemsize == 1 else part
    if new is not None:
        return comm.reshard(sent, old, new, what=what).view(part.dtype)
    whole = sent.new_empty(old.numel)
    comm.all_gather(whole, old, what=what, own=sent).wait()
    return whole.view(part.dtype)


class Piece(NamedTuple):
    """What a rank gets of one run."""

    schema: Schema
    numel: int
    """Elements."""
    cut: Mapping[str, Tensor]
    """The entries of the values that are cut."""


class MovedState:
    """The state of a segment at its new owners. The constructor is collective."""

    def __init__(
        self, comm: Communicator, update: ShardedUpdate, segment: Segment, schemas: Schemas
    ) -> None:
        self.segment, self.schemas = segment, schemas
        self.runs = dict(self._overlapping_runs())
        """The runs of the segment, with the first element there and the one after the last."""
        self._bounds = bounds(segment.new, segment.numel, comm.group.rank)
        self._moved: dict[ParameterRun, dict[str, Tensor]] = {}
        for run in self.runs:
            cut = {k: value for k, value in schemas[run].items() if isinstance(value, CutValue)}
            own = update.state_of(run)
            self._moved[run] = {k: self._move(comm, run, cut[k], own.get(k)) for k in cut}

    def _overlapping_runs(self) -> Iterator[tuple[ParameterRun, tuple[int, int]]]:
        shift = self.segment.source_start
        for run in self.schemas:
            start, stop = max(run.start - shift, 0), min(run.stop - shift, self.segment.numel)
            if run.flat is self.segment.source and start < stop:
                yield run, (start, stop)

    def _move(
        self, comm: Communicator, run: ParameterRun, cut: CutValue, value: Tensor | None
    ) -> Tensor:
        """The entries of one state value of a run at their new owners.

        Args:
            value: those that this rank has now; None: it has none.
        """
        segment, size = self.segment, run.stop - run.start

        def entry(element: int) -> int:
            """The entry of the whole value that belongs to an element of the segment."""
            inside = min(max(element + segment.source_start - run.start, 0), size)
            return scaled(inside, size, (cut.entries,))

        def of_entries(layout: Layout | None) -> Layout | None:
            if layout is None:
                return None
            return Layout(tuple(entry(offset) - entry(0) for offset in layout.offsets))

        low, high = map(entry, bounds(segment.old, segment.numel, comm.group.rank))
        own = torch.zeros(high - low, dtype=cut.dtype, device=segment.source.device)
        if value is not None and low < high:
            first = scaled(run.first_owned - run.start, size, (cut.entries,))
            own.copy_(value.reshape(-1)[low - first : high - first])
        what = f"moving the state of {segment.source.name}"
        return transfer(comm, own, of_entries(segment.old), of_entries(segment.new), what)

    def pieces(self, start: int, stop: int) -> Iterator[Piece]:
        """What this rank gets of elements `[start, stop)` of the new buffer, in order."""
        low, high = self._bounds
        shift = self.segment.target_start
        for run, (first, last) in self.runs.items():
            numel = min(last, high, stop - shift) - max(first, low, start - shift)
            if numel > 0:
                yield Piece(self.schemas[run], numel, self._moved[run])


def state_of_runs(update: ShardedUpdate, moved: Sequence[MovedState]) -> StateOf:
    """A function from a run of the new buffer to the state of what this rank gets of it.

    Args:
        moved: all segments of the new buffer.
    """

    def state_of(run: ParameterRun) -> dict[str, Any]:
        found = [piece for each in moved for piece in each.pieces(run.start, run.stop)]
        if not found or not found[0].schema:
            return {}
        schema, _, first = found[0]
        if len(found) > 1:
            first = {key: torch.cat([piece.cut[key] for piece in found]) for key in first}
        others = {k: value for k, value in schema.items() if not isinstance(value, CutValue)}
        shape = run.shape_of(sum(piece.numel for piece in found))
        return update.new_state(run, shape, first, others)

    return state_of


def moved_master(comm: Communicator, segment: Segment) -> Tensor:
    """The masters of a segment at their new owners. Collective."""
    flat, start = segment.source, segment.source_start
    low, high = bounds(segment.old, segment.numel, comm.group.rank)
    part = flat.intersect_owned(start + low, start + high)
    own = (flat.master[part] if part is not None else flat.master[:0]).to(flat.device)
    return transfer(comm, own, segment.old, segment.new, f"moving the masters of {flat.name}")


def runs_after(flat: FlatParameter, moved: Sequence[MovedState]) -> list[ParameterRun]:
    """The runs of a new flat parameter: adjacent parameters whose state is of the same step."""
    keys: list[Any] = [None] * len(flat.parameters)
    for position in range(len(keys)):
        start, _ = flat.span(position)
        for each in moved:
            at = start - each.segment.target_start
            for run, (first, last) in each.runs.items():
                if first <= at < last:
                    keys[position] = _comparable(each.schemas[run])
    return adjacent_runs(flat, keys)


def _comparable(schema: Schema) -> dict[str, Any]:
    return {
        key: value.dtype
        if isinstance(value, CutValue)
        else (value.tolist() if isinstance(value, Tensor) else value)
        for key, value in schema.items()
    }
