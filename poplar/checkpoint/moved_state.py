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


class _Span(NamedTuple):
    """What a segment has of a run."""

    start: int
    stop: int
    entries: int
    """Of a state value."""

    def entry(self, element: int) -> int:
        """The entries that belong to what is before an element of the segment."""
        inside = min(max(element - self.start, 0), self.stop - self.start)
        return scaled(inside, self.stop - self.start, (self.entries,))


class _Entries:
    """The entries of one state value of a segment, in the order of its runs."""

    def __init__(self, spans: Mapping[ParameterRun, _Span]) -> None:
        """`spans`: of each run that has the value."""
        self.spans = spans

    def before(self, element: int) -> int:
        """All entries that belong to what is before an element."""
        return sum(span.entry(element) for span in self.spans.values())

    def layout(self, layout: Layout | None) -> Layout | None:
        """How the entries are divided if the elements have this layout."""
        if layout is None:
            return None
        return Layout(tuple(self.before(offset) for offset in layout.offsets))

    def places(self, run: ParameterRun, low: int, high: int) -> tuple[slice, slice]:
        """The entries of a run for the elements `[low, high)`.

        Returns:
            Where they are among all entries for these elements, and among those of the span.
        """
        span = self.spans[run]
        first, last = span.entry(low), span.entry(high)
        base = self.before(max(low, span.start)) - self.before(low)
        return slice(base, base + last - first), slice(first, last)


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
        self._moved: dict[tuple[str, torch.dtype], tuple[_Entries, Tensor]] = {}
        kinds: dict[tuple[str, torch.dtype], dict[ParameterRun, _Span]] = {}
        for run, (start, stop) in self.runs.items():
            for key, value in schemas[run].items():
                if isinstance(value, CutValue):
                    numel = scaled(stop - start, run.stop - run.start, (value.entries,))
                    kind = kinds.setdefault((key, value.dtype), {})
                    kind[run] = _Span(start, stop, numel)
        what = f"moving the state of {segment.source.name}"
        for key, dtype in sorted(kinds, key=str):
            entries = _Entries(kinds[key, dtype])
            own = self._own(update, entries, key, dtype, comm.group.rank)
            moved = transfer(
                comm, own, entries.layout(segment.old), entries.layout(segment.new), what
            )
            self._moved[key, dtype] = entries, moved

    def _overlapping_runs(self) -> Iterator[tuple[ParameterRun, tuple[int, int]]]:
        shift = self.segment.source_start
        for run in self.schemas:
            start, stop = max(run.start - shift, 0), min(run.stop - shift, self.segment.numel)
            if run.flat is self.segment.source and start < stop:
                yield run, (start, stop)

    def _own(
        self, update: ShardedUpdate, entries: _Entries, key: str, dtype: torch.dtype, rank: int
    ) -> Tensor:
        """The entries that this rank has now."""
        segment = self.segment
        low, high = bounds(segment.old, segment.numel, rank)
        numel = entries.before(high) - entries.before(low)
        own = torch.zeros(numel, dtype=dtype, device=segment.source.device)
        for run, span in entries.spans.items():
            value = update.state_of(run).get(key)
            here, part = entries.places(run, low, high)
            if value is None or here.start == here.stop:
                continue
            size, total = run.stop - run.start, self.schemas[run][key].entries
            first = scaled(run.first_owned - run.start, size, (total,))
            shift = scaled(span.start + segment.source_start - run.start, size, (total,)) - first
            own[here] = value.reshape(-1)[part.start + shift : part.stop + shift]
        return own

    def pieces(self, start: int, stop: int) -> Iterator[Piece]:
        """What this rank gets of elements `[start, stop)` of the new buffer, in order."""
        low, high = self._bounds
        shift = self.segment.target_start
        for run, (first, last) in self.runs.items():
            numel = min(last, high, stop - shift) - max(first, low, start - shift)
            if numel > 0:
                cut = {
                    key: moved[entries.places(run, low, high)[0]]
                    for (key, _), (entries, moved) in self._moved.items()
                    if run in entries.spans
                }
                yield Piece(self.schemas[run], numel, cut)


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
