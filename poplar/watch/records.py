"""Reads what the recorder has written, and by how much the clocks of ranks differ."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

BLOCKED_SECONDS = 1e-3
"""A rank that waited at least as long was blocked, and left the collective when it was complete."""
FIRST_STEPS = 3
"""Steps that are left out: torch allocates memory and rebuilds buckets in them."""
SPIKE = 3.0
"""Medians of a step from which on it is left out: an evaluation, or a checkpoint."""
RANKS, ENDINGS = "rank-*.jsonl", "ended-*.txt"
"""The files of a record."""
MOST_BYTES = 2**21
"""Bytes at the end of a file that are read: hundreds of steps at least."""


@dataclass(frozen=True, slots=True)
class Wait:
    """A collective in which a rank did not compute, in seconds of the clock."""

    key: str
    """The same on all ranks for the same collective of a step."""
    issued: float
    begin: float
    end: float


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """One step of one rank, from the end of the update before to the end of its own."""

    number: int
    begin: float
    end: float
    samples: int
    """0: unknown."""
    batches: int
    """That were drawn; several with gradient accumulation. 0: unknown."""
    data: float
    """Seconds until the batch was there."""
    optimizer: float
    """Seconds of the update, without collectives."""
    waits: tuple[Wait, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class RankRecord:
    """The steps of one rank."""

    rank: int
    world_size: int
    host: str
    clock: str
    """Ranks with the same one have the same clock."""
    engine: str
    device: str
    steps: tuple[StepRecord, ...]
    ahead: float = 0.0
    """Seconds by which its clock is ahead of that of the first rank."""


def read_records(folder: Path) -> tuple[RankRecord, ...]:
    """The ranks that have recorded a step, in order, with the offsets of their clocks."""
    records = filter(None, map(_read_rank, folder.glob(RANKS)))
    found = sorted(records, key=lambda record: record.rank)
    # An elastic job that has started again with fewer ranks has left files of the others.
    return align_clocks([one for one in found if one.rank < found[0].world_size])


def read_endings(folder: Path) -> tuple[str, ...]:
    """On which ranks recording has ended before the job, and why."""
    texts = {path.read_text(encoding="utf-8") for path in folder.glob(ENDINGS)}
    return tuple(sorted(text.strip() for text in texts if text.endswith("\n")))


def _read_rank(path: Path) -> RankRecord | None:
    with path.open("rb") as file:
        first = file.readline()
        file.seek(max(len(first), file.seek(0, 2) - MOST_BYTES))
        lines = file.read().split(b"\n")[:-1]  # the last line may be incomplete, and the first
    read = (json.loads(line) for line in lines if line.startswith(b'{"number"'))
    steps = tuple(
        StepRecord(**{**step, "waits": tuple(Wait(*wait) for wait in step["waits"])})
        for step in read
    )
    if not steps:
        return None
    later = tuple(step for step in steps if step.number > FIRST_STEPS)
    return RankRecord(**json.loads(first), steps=later or steps)


def align_clocks(ranks: Sequence[RankRecord]) -> tuple[RankRecord, ...]:
    """The same records with the offsets of their clocks.

    Ranks that are blocked in a collective leave it together, so the median difference of their ends
    is the offset of their clocks. Ranks of one host share a clock, and need none.
    """
    offsets: dict[str, float] = {}
    for rank in ranks:
        if rank.clock not in offsets:
            offsets[rank.clock] = _offset(rank, ranks[0]) if offsets else 0.0
    return tuple(replace(rank, ahead=offsets[rank.clock]) for rank in ranks)


def common_steps(ranks: Sequence[RankRecord]) -> list[tuple[StepRecord, ...]]:
    """The steps that all ranks have recorded, by rank; without spikes."""
    by_number = [{step.number: step for step in rank.steps} for rank in ranks]
    numbers = sorted(set.intersection(*map(set, by_number))) if by_number else []
    steps = [tuple(steps[number] for steps in by_number) for number in numbers]
    longest = [max(step.end - step.begin for step in ranks) for ranks in steps]
    limit = SPIKE * median(longest) if steps else 0.0
    return [step for step, seconds in zip(steps, longest, strict=True) if seconds <= limit]


def _offset(rank: RankRecord, reference: RankRecord) -> float:
    """Seconds by which the clock of `rank` is ahead."""
    found = {False: list[float](), True: list[float]()}
    steps = {step.number: step for step in reference.steps}
    for mine in rank.steps:
        its = steps.get(mine.number)
        if its is None:
            continue
        ends = {wait.key: wait for wait in its.waits}
        for wait in mine.waits:
            other = ends.get(wait.key)
            if other is not None and wait.key:
                blocked = min(wait.end - wait.begin, other.end - other.begin) >= BLOCKED_SECONDS
                found[blocked].append(wait.end - other.end)
    return median(found[True] or found[False] or [0.0])
