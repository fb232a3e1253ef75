"""One contest: open the cluster, calibrate, plan, let all entrants take turns, calibrate again."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from datetime import datetime

from contest import entrants as enter
from contest import ranks, yardstick
from contest.clusters import Cluster, Place
from contest.crew import Crew, CrewFailed, last_lines
from contest.engine import Entrant
from contest.ideal import ideals
from contest.notes import notes
from contest.outcome import TURN_STEPS, Calibration, Contest, MicroBatches, Outcome
from contest.ranks import Turn
from contest.task import Task
from poplar import Plan
from poplar.system.trace import Span

WARMUP_STEPS = 3
"""Not counted: allocations, DDP's rebuilding of its buckets, the recording of our schedule."""
Tell = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """What enters and for how long."""

    stages: tuple[int, ...] = (0, 1, 2, 3)
    policies: tuple[str, ...] = ("even", "flops", "paper", "exact")
    peers: tuple[str, ...] = ("ddp", "fsdp2", "deepspeed")
    parts: bool = True
    """Strong ranks only, and weak ranks only."""
    steps: int = 50
    calibration_seconds: float = 10.0
    profile_seconds: float = 40.0
    memory: bool = True
    """Measure each engine's peak memory, in processes of its own."""


@dataclass(slots=True)
class Lane:
    """An entrant, the crew that plays it, and what it has done so far."""

    entrant: Entrant
    crew: Crew
    predicted: float | None = None
    step_seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    spans: tuple[tuple[Span, ...], ...] = ()
    peak_memory: tuple[int, ...] = ()
    absent: str = ""

    def outcome(self) -> Outcome:
        """Everything, as a value."""
        return Outcome(
            entrant=self.entrant,
            step_seconds=tuple(self.step_seconds),
            losses=tuple(self.losses),
            predicted_seconds=self.predicted,
            spans=self.spans,
            peak_memory=self.peak_memory,
            absent=self.absent,
        )


def hold(cluster: Cluster, task: Task, rules: Rules, tell: Tell) -> Contest:
    """Hold one contest.

    Raises:
        EmulationUnavailable: this machine can't be made into such a cluster.
        ValueError: a global batch that peers cannot divide.
        CrewFailed: Poplar's own processes could not be started, calibrated or profiled.
    """
    with cluster.opened() as place:
        contest = _timed(cluster, place, task, rules, tell)
        if not rules.memory:
            return contest
        return _with_memory(contest, place, task, tell)


def _timed(cluster: Cluster, place: Place, task: Task, rules: Rules, tell: Tell) -> Contest:
    began = datetime.now().isoformat(timespec="seconds")
    with ExitStack() as stack:
        crews = {name: stack.enter_context(Crew(place, name)) for name in families(rules)}
        for crew in crews.values():
            crew.call(ranks.import_engines, crew.name)
            crew.call(ranks.slow_down)
        home = crews["plain"]
        tell("calibrating")
        before: Calibration = home.call(yardstick.calibrate, task, rules.calibration_seconds)[0]
        lanes = list(_lanes(crews, cluster, task, rules, before, tell))
        for lane in lanes:
            tell(f"building {lane.entrant.name}")
            _attempt(lane, lambda lane=lane: lane.crew.call(ranks.build, task, lane.entrant))
            _attempt(lane, lambda lane=lane: _take_turn(lane, WARMUP_STEPS, counts=False))
        turns: list[tuple[float, ...]] = []
        in_step: dict[MicroBatches, list[tuple[float, ...]]] = {
            split: [] for split in _splits(cluster, task, lanes)
        }
        for number, round_ in enumerate(rounds(lanes, rules.steps), start=1):
            tell(f"round {number}: plain passes")
            turns.append(home.call(yardstick.take_turn, task, before.batches)[0])
            for split, measured in in_step.items():
                steps = yardstick.steps_of_turn(split, before.speeds)
                everyones = home.call(yardstick.in_step, task, split, steps)
                measured.append(tuple(max(step) for step in zip(*everyones, strict=True)))
            for lane in round_.lanes:
                tell(f"round {number}: {lane.entrant.name}")
                _attempt(lane, lambda lane=lane, n=round_.steps: _take_turn(lane, n))
        tell("one step of each, traced")
        for lane in lanes:
            if not lane.absent:
                with suppress(CrewFailed):  # a picture less; its figures are there
                    _trace(lane)
        tell("calibrating again")
        after: Calibration = home.call(yardstick.calibrate, task, rules.calibration_seconds)[0]
    contest = _told(cluster, task, (before, after), lanes, rules, began)
    contest = replace(
        contest,
        turns=tuple(turns),
        even_seconds=tuple(statistics.median(seconds) for seconds in next(iter(in_step.values()))),
        in_step={split: tuple(measured) for split, measured in in_step.items()},
    )
    return replace(
        contest, ideal_over_even=ideals(cluster, contest), notes=tuple(notes(cluster, contest))
    )


def families(rules: Rules) -> Iterator[str]:
    """The crews that are needed. ZeRO-3 of DeepSpeed changes torch itself: it has its own."""
    yield "plain"  # the yardstick, whatever may happen to an engine
    yield "poplar"
    if {"ddp", "fsdp2"} & {*rules.peers}:
        yield "torch"
    if "deepspeed" in rules.peers:
        if {0, 1, 2} & {*rules.stages}:
            yield "deepspeed"
        if 3 in rules.stages:
            yield "deepspeed-3"


def family(entrant: Entrant) -> str:
    """Whose crew plays this entrant."""
    if entrant.provider == "poplar":
        return "poplar"
    if entrant.provider == "deepspeed":
        return "deepspeed-3" if entrant.stage == 3 else "deepspeed"
    return "torch"


def _splits(cluster: Cluster, task: Task, lanes: Sequence[Lane]) -> Iterator[MicroBatches]:
    """The even one, and those of all entrants that take all ranks."""
    micro_batch = enter.even_micro_batch(cluster, task)
    yield Plan.even(cluster.size, task.global_batch, micro_batch, 0).micro_batches
    for lane in lanes:
        if len(lane.entrant.ranks) == cluster.size:
            yield lane.entrant.plan.micro_batches


@dataclass(frozen=True, slots=True)
class Round:
    """A turn for each, in this order, of so many steps."""

    lanes: tuple[Lane, ...]
    steps: int


def rounds(lanes: Sequence[Lane], steps: int) -> Iterator[Round]:
    """A few steps each; who began a round ends the next. Who has failed is left out."""
    order = tuple(lanes)
    for start in range(0, steps, TURN_STEPS):
        present = tuple(lane for lane in order if not lane.absent)
        yield Round(present, min(TURN_STEPS, steps - start))
        order = order[::-1]


def _lanes(
    crews: dict[str, Crew],
    cluster: Cluster,
    task: Task,
    rules: Rules,
    before: Calibration,
    tell: Tell,
) -> Iterator[Lane]:
    tell("profiling and planning")
    _, proposals = crews["poplar"].call(
        enter.propose, task, rules.stages, rules.policies, before.rank_flops, rules.profile_seconds
    )[0]
    for entrant, predicted in enter.ours(proposals, cluster.size):
        yield Lane(entrant, crews["poplar"], predicted)
    peers = [
        *enter.peers(cluster, task, rules.stages),
        *enter.uneven_peers(cluster, task, rules.stages, before.speeds),
    ]
    for entrant in peers:
        if entrant.provider in rules.peers:
            yield Lane(entrant, crews[family(entrant)])
    if rules.parts:
        for entrant in enter.parts(cluster, task, before.speeds):
            yield Lane(entrant, crews["poplar"])


def _attempt(lane: Lane, work: Callable[[], None]) -> None:
    """Do something with an entrant unless it has failed; if it fails now, keep why."""
    if lane.absent:
        return
    try:
        work()
    except CrewFailed as failure:
        lane.absent = last_lines(str(failure))


def _take_turn(lane: Lane, steps: int, *, counts: bool = True) -> None:
    turns: Sequence[Turn | None] = lane.crew.call(ranks.take_turn, lane.entrant.name, steps)
    seen = [turn for turn in turns if turn is not None]
    lane.losses += mean_losses(lane.entrant, turns)
    if counts:
        lane.step_seconds += durations(seen)


def durations(turns: Sequence[Turn]) -> list[float]:
    """Seconds of each step on the rank that took longest: from the end of the one before to its."""
    ends = [max(own) for own in zip(*(turn.ends for turn in turns), strict=True)]
    starts = [max(turn.start for turn in turns), *ends[:-1]]
    return [end - start for start, end in zip(starts, ends, strict=True)]


def mean_losses(entrant: Entrant, turns: Sequence[Turn | None]) -> list[float]:
    """The global batch's mean loss by step: ranks weigh as many samples as they had."""
    weighted = [
        (entrant.samples(rank), turn.losses)
        for rank, turn in enumerate(turns)
        if turn is not None and entrant.samples(rank)
    ]
    total = sum(weight for weight, _ in weighted)
    steps = zip(*(losses for _, losses in weighted), strict=True)
    weights = [weight for weight, _ in weighted]
    return [
        sum(weight * loss for weight, loss in zip(weights, losses, strict=True)) / total
        for losses in steps
    ]


def _trace(lane: Lane) -> None:
    spans = lane.crew.call(ranks.trace_step, lane.entrant.name)
    lane.spans = tuple(spans[rank] for rank in lane.entrant.ranks)


def _told(
    cluster: Cluster,
    task: Task,
    calibrations: tuple[Calibration, Calibration],
    lanes: Sequence[Lane],
    rules: Rules,
    began: str,
) -> Contest:
    model = task.new_model()
    return Contest(
        began=began,
        cluster=cluster.name,
        described=str(cluster),
        unequal=cluster.unequal,
        task=task,
        flops_per_sample=yardstick.flops_per_sample(task),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        before=calibrations[0],
        after=calibrations[1],
        ideal_over_even=dict.fromkeys(rules.stages, 1.0),
        outcomes=tuple(lane.outcome() for lane in lanes),
    )


def _with_memory(contest: Contest, place: Place, task: Task, tell: Tell) -> Contest:
    """The same contest, with the peak memory of every entrant that has a result."""
    outcomes: dict[str, Outcome] = {outcome.entrant.name: outcome for outcome in contest.outcomes}
    by_family: dict[str, list[Entrant]] = {}
    for outcome in contest.outcomes:
        if not outcome.absent:
            by_family.setdefault(family(outcome.entrant), []).append(outcome.entrant)
    for name, members in by_family.items():
        for entrant, peaks in _peaks(place, name, members, task, tell):
            outcomes[entrant.name] = replace(
                outcomes[entrant.name],
                peak_memory=tuple(peaks[rank] for rank in entrant.ranks),
            )
    return replace(contest, outcomes=tuple(outcomes.values()))


def _peaks(
    place: Place, name: str, members: Sequence[Entrant], task: Task, tell: Tell
) -> Iterator[tuple[Entrant, Sequence[int]]]:
    """Peak memory by rank, of each of a family's entrants for which it can be had."""
    try:
        with Crew(place, name) as crew:
            for entrant in members:
                tell(f"memory of {entrant.name}")
                try:
                    peaks = crew.call(ranks.peak_memory, task, entrant)
                except CrewFailed as failure:
                    tell(f"no peak memory of {entrant.name}: {last_lines(str(failure))}")
                    continue
                yield entrant, peaks
    except CrewFailed as failure:
        tell(f"no peak memory of {name}: {last_lines(str(failure))}")
