"""Run one comparison: calibrate, plan, run all configurations in turns, calibrate again.

Engines take turns of a few steps, so that other load on the machine affects all of them equally.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from datetime import datetime

from head_to_head import calibration, configurations, worker_calls
from head_to_head.clusters import Cluster, OpenCluster
from head_to_head.engine import Configuration
from head_to_head.ideal import ideals
from head_to_head.notes import notes
from head_to_head.outcome import TURN_STEPS, Calibration, Comparison, MicroBatches, Outcome
from head_to_head.task import Task
from head_to_head.worker_calls import Turn
from head_to_head.workers import Workers, WorkersFailed
from poplar import Plan

WARMUP_STEPS = 3
"""Steps that are not counted: first allocations, DDP's new buckets, Poplar's collective order."""
Log = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What is compared, and for how long."""

    stages: tuple[int, ...] = (0, 1, 2, 3)
    policies: tuple[str, ...] = ("even", "flops", "paper", "exact")
    peers: tuple[str, ...] = ("ddp", "fsdp2", "deepspeed")
    subsets: bool = True
    """Also train on the strong ranks only, and on the weak ranks only."""
    steps: int = 50
    calibration_seconds: float = 10.0
    profile_seconds: float = 40.0
    memory: bool = True
    """Measure each engine's peak memory, in separate processes."""


@dataclass(slots=True)
class Trial:
    """A configuration, the workers that run it, and its measurements so far."""

    configuration: Configuration
    workers: Workers
    predicted: float | None = None
    step_seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    peak_memory: tuple[int, ...] = ()
    absent: str = ""

    def outcome(self) -> Outcome:
        """All measurements, as a value."""
        return Outcome(
            configuration=self.configuration,
            step_seconds=tuple(self.step_seconds),
            losses=tuple(self.losses),
            predicted_seconds=self.predicted,
            peak_memory=self.peak_memory,
            absent=self.absent,
        )


def compare(cluster: Cluster, task: Task, settings: Settings, log: Log) -> Comparison:
    """Run one comparison.

    Raises:
        EmulationUnavailable: this machine cannot emulate the cluster.
        ValueError: a global batch that peers cannot divide.
        WorkersFailed: Poplar's own processes could not be started, calibrated or profiled.
    """
    with cluster.opened() as open_cluster:
        comparison = _timed(cluster, open_cluster, task, settings, log)
        if not settings.memory:
            return comparison
        return _with_memory(comparison, open_cluster, task, log)


def _timed(
    cluster: Cluster, open_cluster: OpenCluster, task: Task, settings: Settings, log: Log
) -> Comparison:
    began = datetime.now().isoformat(timespec="seconds")
    with ExitStack() as stack:
        groups = {
            name: stack.enter_context(Workers(open_cluster, name))
            for name in worker_groups(settings)
        }
        for workers in groups.values():
            workers.call(worker_calls.import_engines, workers.name)
            workers.call(worker_calls.slow_down)
        before = _calibrate(groups, task, settings, log)
        trials = list(_trials(groups, cluster, task, settings, before, log))
        for trial in trials:
            log(f"building {trial.configuration.name}")
            _attempt(trial, lambda trial=trial: _build(trial, task))
        splits = dict.fromkeys(_splits(cluster, task, trials))
        turns, in_step = _run_rounds(groups["plain"], task, settings, trials, splits, before, log)
        after = _calibrate(groups, task, settings, log)
    comparison = replace(
        _collected(cluster, task, (before, after), trials, settings, began),
        turns=turns,
        even_seconds=tuple(statistics.median(seconds) for seconds in next(iter(in_step.values()))),
        in_step=in_step,
    )
    return replace(
        comparison,
        ideal_over_even=ideals(cluster, comparison),
        notes=tuple(notes(cluster, comparison)),
    )


def _calibrate(groups: dict[str, Workers], task: Task, settings: Settings, log: Log) -> Calibration:
    log("calibrating")
    seconds = settings.calibration_seconds
    measured: Calibration = groups["plain"].call(calibration.calibrate, task, seconds)[0]
    return measured


def _build(trial: Trial, task: Task) -> None:
    trial.workers.call(worker_calls.build, task, trial.configuration)
    _take_turn(trial, WARMUP_STEPS, counts=False)


def _run_rounds(
    plain: Workers,
    task: Task,
    settings: Settings,
    trials: Sequence[Trial],
    splits: Iterable[MicroBatches],
    before: Calibration,
    log: Log,
) -> tuple[tuple[tuple[float, ...], ...], dict[MicroBatches, tuple[tuple[float, ...], ...]]]:
    """All trials in turns, beside plain passes; returns speeds and step seconds of the latter."""
    turns: list[tuple[float, ...]] = []
    in_step: dict[MicroBatches, list[tuple[float, ...]]] = {split: [] for split in splits}
    for number, round_ in enumerate(rounds(trials, settings.steps), start=1):
        log(f"round {number}: plain passes")
        turns.append(plain.call(calibration.take_turn, task, before.batches)[0])
        for split, measured in in_step.items():
            steps = calibration.steps_of_turn(split, before.speeds)
            by_rank = plain.call(calibration.in_step, task, split, steps)
            measured.append(tuple(max(step) for step in zip(*by_rank, strict=True)))
        for trial in round_.trials:
            log(f"round {number}: {trial.configuration.name}")
            _attempt(trial, lambda trial=trial, n=round_.steps: _take_turn(trial, n))
    return tuple(turns), {split: tuple(measured) for split, measured in in_step.items()}


def worker_groups(settings: Settings) -> Iterator[str]:
    """Names of the worker groups. DeepSpeed's ZeRO-3 patches torch, so it has its own processes."""
    yield "plain"  # plain PyTorch passes, unaffected by any engine
    yield "poplar"
    if {"ddp", "fsdp2"} & {*settings.peers}:
        yield "torch"
    if "deepspeed" in settings.peers:
        if {0, 1, 2} & {*settings.stages}:
            yield "deepspeed"
        if 3 in settings.stages:
            yield "deepspeed-3"


def worker_group(configuration: Configuration) -> str:
    """Name of the worker group that runs a configuration."""
    if configuration.provider == "poplar":
        return "poplar"
    if configuration.provider == "deepspeed":
        return "deepspeed-3" if configuration.stage == 3 else "deepspeed"
    return "torch"


def _splits(cluster: Cluster, task: Task, trials: Sequence[Trial]) -> Iterator[MicroBatches]:
    """The even split, and the split of every configuration that uses all ranks."""
    micro_batch = configurations.even_micro_batch(cluster, task)
    yield Plan.even(cluster.size, task.global_batch, micro_batch, 0).micro_batches
    for trial in trials:
        if len(trial.configuration.ranks) == cluster.size:
            yield trial.configuration.plan.micro_batches


@dataclass(frozen=True, slots=True)
class Round:
    """A turn of so many steps for each trial, in this order."""

    trials: tuple[Trial, ...]
    steps: int


def rounds(trials: Sequence[Trial], steps: int) -> Iterator[Round]:
    """Turns of a few steps each, in reverse order every other round; failed trials are left out."""
    order = tuple(trials)
    for start in range(0, steps, TURN_STEPS):
        present = tuple(trial for trial in order if not trial.absent)
        yield Round(present, min(TURN_STEPS, steps - start))
        order = order[::-1]


def _trials(
    groups: dict[str, Workers],
    cluster: Cluster,
    task: Task,
    settings: Settings,
    before: Calibration,
    log: Log,
) -> Iterator[Trial]:
    log("profiling and planning")
    _, proposals = groups["poplar"].call(
        configurations.propose,
        task,
        settings.stages,
        settings.policies,
        before.rank_flops,
        settings.profile_seconds,
    )[0]
    for configuration, predicted in configurations.poplar_configurations(proposals, cluster.size):
        yield Trial(configuration, groups["poplar"], predicted)
    peers = [
        *configurations.peers(cluster, task, settings.stages),
        *configurations.uneven_peers(cluster, task, settings.stages, before.speeds),
    ]
    for configuration in peers:
        if configuration.provider.partition("_")[0] in settings.peers:
            yield Trial(configuration, groups[worker_group(configuration)])
    if settings.subsets:
        for configuration in configurations.subset_configurations(cluster, task, before.speeds):
            yield Trial(configuration, groups["poplar"])


def _attempt(trial: Trial, work: Callable[[], None]) -> None:
    """Call `work` unless the trial has failed; if it fails now, record why."""
    if trial.absent:
        return
    try:
        work()
    except WorkersFailed as failure:
        trial.absent = failure.last_line


def _take_turn(trial: Trial, steps: int, *, counts: bool = True) -> None:
    turns: Sequence[Turn | None] = trial.workers.call(
        worker_calls.take_turn, trial.configuration.name, steps
    )
    seen = [turn for turn in turns if turn is not None]
    trial.losses += mean_losses(trial.configuration, turns)
    if counts:
        trial.step_seconds += durations(seen)


def durations(turns: Sequence[Turn]) -> list[float]:
    """Seconds of each step on the slowest rank, from the end of the previous step to its own."""
    ends = [max(own) for own in zip(*(turn.ends for turn in turns), strict=True)]
    starts = [max(turn.start for turn in turns), *ends[:-1]]
    return [end - start for start, end in zip(starts, ends, strict=True)]


def mean_losses(configuration: Configuration, turns: Sequence[Turn | None]) -> list[float]:
    """The global batch's mean loss by step: ranks are weighted by their samples."""
    weighted = [
        (configuration.samples(rank), turn.losses)
        for rank, turn in enumerate(turns)
        if turn is not None and configuration.samples(rank)
    ]
    total = sum(weight for weight, _ in weighted)
    steps = zip(*(losses for _, losses in weighted), strict=True)
    weights = [weight for weight, _ in weighted]
    return [
        sum(weight * loss for weight, loss in zip(weights, losses, strict=True)) / total
        for losses in steps
    ]


def _collected(
    cluster: Cluster,
    task: Task,
    calibrations: tuple[Calibration, Calibration],
    trials: Sequence[Trial],
    settings: Settings,
    began: str,
) -> Comparison:
    model = task.new_model()
    return Comparison(
        began=began,
        cluster=cluster.name,
        described=str(cluster),
        unequal=cluster.unequal,
        task=task,
        flops_per_sample=calibration.flops_per_sample(task),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        before=calibrations[0],
        after=calibrations[1],
        ideal_over_even=dict.fromkeys(settings.stages, 1.0),
        outcomes=tuple(trial.outcome() for trial in trials),
    )


def _with_memory(
    comparison: Comparison, open_cluster: OpenCluster, task: Task, log: Log
) -> Comparison:
    """The same comparison, with the peak memory of every configuration that has a result."""
    outcomes: dict[str, Outcome] = {
        outcome.configuration.name: outcome for outcome in comparison.outcomes
    }
    by_family: dict[str, list[Configuration]] = {}
    for outcome in comparison.outcomes:
        if not outcome.absent:
            by_family.setdefault(worker_group(outcome.configuration), []).append(
                outcome.configuration
            )
    for name, members in by_family.items():
        for configuration, peaks in _peaks(open_cluster, name, members, task, log):
            outcomes[configuration.name] = replace(
                outcomes[configuration.name],
                peak_memory=tuple(peaks[rank] for rank in configuration.ranks),
            )
    return replace(comparison, outcomes=tuple(outcomes.values()))


def _peaks(
    open_cluster: OpenCluster, name: str, members: Sequence[Configuration], task: Task, log: Log
) -> Iterator[tuple[Configuration, Sequence[int]]]:
    """Peak memory by rank of each configuration of a worker group, where it can be measured."""
    try:
        with Workers(open_cluster, name) as workers:
            for configuration in members:
                log(f"memory of {configuration.name}")
                try:
                    peaks = workers.call(worker_calls.peak_memory, task, configuration)
                except WorkersFailed as failure:
                    log(f"no peak memory of {configuration.name}: {failure.last_line}")
                    continue
                yield configuration, peaks
    except WorkersFailed as failure:
        log(f"no peak memory of {name}: {failure.last_line}")
