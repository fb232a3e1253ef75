"""A machine whose true pass times and noise are known, in the place of profiler and cache.

Passes and steps take simulated seconds on a simulated clock. What times sizes, fits curves and
calibrates is the code of the package.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import accumulate
from statistics import fmean, median
from types import SimpleNamespace
from typing import Any

from published_curves import CURVES
from torch import nn

from poplar.planner import calibration
from poplar.planner.cost_model import costs_of
from poplar.profiler import batch_curves, batch_sizes, trial_runs
from poplar.tuning import autotune
from poplar.values.observation import Observation
from poplar.values.plan import Plan
from poplar.values.profile import (
    BatchPoint,
    ClusterProfile,
    DeviceProfile,
    ModelProfile,
    NetworkProfile,
)

NOISES = ("quiet", "drift", "bursts", "quota", "tails", "shared", "ended", "all")
"""Steady; slow changes of speed; other programs for seconds; a CPU quota's periods; single passes
that take much longer; a core that others share, so that every pass differs; a program that ends
while the machine is profiled; and all of these."""
SECONDS = 60.0
"""Time budget of `autotune`."""
GRID = 0.25
"""Seconds for which the slowness of a rank is constant."""
HORIZON = 600.0
"""Seconds after which the slowness repeats."""
MOST_TAIL = 30.0
TAIL = 0.1 * (3.0 - 2.0 * MOST_TAIL**-0.5)
"""Expected part by which a disturbed pass is longer: a Pareto distribution of index 1.5."""
MOMENTS = 80
"""Moments over which the expected seconds of a step are averaged."""


@dataclass
class Clock:
    """Takes the place of the module `time`."""

    now: float = 0.0

    def perf_counter(self) -> float:
        return self.now


class Noise:
    """How much longer work takes on one rank at a time."""

    def __init__(self, draw: random.Random, kind: str, profiled: float = 0.0) -> None:
        """`profiled`: seconds in which a quiet machine is profiled."""
        has = {name: kind in (name, "all") for name in NOISES}
        self._draw = draw
        self._jitter = draw.uniform(0.05, 0.4) if has["shared"] else draw.uniform(0.002, 0.02)
        self._tails = draw.uniform(0.01, 0.1) if has["tails"] else 0.0
        self._period = draw.choice((0.01, 0.1)) * draw.uniform(0.2, 0.8) if has["quota"] else 0.0
        drift = draw.uniform(0.01, 0.06) if has["drift"] else 0.002
        keeps = math.exp(-GRID / draw.uniform(10.0, 100.0))
        busy, idle = draw.uniform(0.5, 8.0), draw.uniform(5.0, 40.0)
        slower = draw.uniform(1.1, 2.0) if has["bursts"] else 1.0
        busy_first, ends = 1.0, 0.0
        if has["ended"] and draw.random() < 0.5:
            busy_first, ends = draw.uniform(1.2, 2.0), profiled * draw.uniform(0.1, 0.9)
        levels, log, on = [], draw.gauss(0.0, drift), False
        for cell in range(int(HORIZON / GRID)):
            log = keeps * log + draw.gauss(0.0, drift * math.sqrt(1.0 - keeps**2))
            on = draw.random() < (1.0 - GRID / busy if on else GRID / idle)
            first = busy_first if cell * GRID < ends else 1.0
            levels.append(math.exp(log) * (slower if on else 1.0) * first)
        self._sums = list(accumulate(levels, initial=0.0))
        self.mean_level = fmean(levels)

    def on_host_of(self, other: Noise) -> Noise:
        """This noise, but it is slow when `other` is."""
        self._sums, self.mean_level = other._sums, other.mean_level
        return self

    def seconds(self, work: float, now: float) -> float:
        """What a pass of `work` seconds takes at a time."""
        work *= self.level(work, now) * self._draw.lognormvariate(0.0, self._jitter)
        if self._draw.random() < self._tails:
            work *= 1.0 + 0.1 * min(self._draw.paretovariate(1.5), MOST_TAIL)
        return max(0.5 * work, work + self._period * self._draw.uniform(-0.5, 0.5))

    def expected(self, work: float, now: float, chance: float) -> float:
        """What a pass takes whose short noise is so many standard deviations from its mean."""
        square = math.exp(self._jitter**2)
        short = math.sqrt(square) * (1.0 + self._tails * TAIL)
        short *= 1.0 + chance * math.sqrt(square - 1.0)
        whole = work * self.level(work, now) * short
        return whole + chance * self._period / math.sqrt(12.0)

    def level(self, work: float, now: float) -> float:
        """The part of it that lasts longer than a pass: drift and bursts."""
        cells = len(self._sums) - 1
        first, many = int(now / GRID) % cells, max(1, min(round(work / GRID), cells))
        last = first + many
        total = self._sums[min(last, cells)] - self._sums[first] + self._sums[max(0, last - cells)]
        return total / many


@dataclass
class Machine:
    """A cluster whose true profile is known; takes the place of profiler and cache in a tuner."""

    true: ClusterProfile
    noises: Sequence[Noise]
    stages: tuple[int, ...] = (0, 1, 2, 3)
    clock: Clock = field(default_factory=Clock)
    plans: dict[str, Plan] = field(default_factory=dict)
    measured: tuple[ClusterProfile, float] | None = None
    """A profile, and when it was finished."""
    show: bool = False
    _known: dict[Any, tuple[list[list[float]], float, bool]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        size = self.true.world_size
        group = SimpleNamespace(rank=0, size=size)
        self.session = SimpleNamespace(
            group=group,
            asynchronous=False,
            identity={},
            measuring=nullcontext,
            exchange=lambda value: [value] * size,
            from_first_rank=lambda value: value,
            on_first_rank=lambda work, doing: work(),
        )
        self.profiler = self

    def passes(self, rank: int, size: int, repeats: int = 1) -> float:
        """Seconds of a pass of this rank, the mean over `repeats`; the clock goes on."""
        began = self.clock.now
        for _ in range(repeats):
            work = self.true.devices[rank].seconds(size)
            self.clock.now += self.noises[rank].seconds(work, self.clock.now)
        return (self.clock.now - began) / repeats

    def timed(
        self, by_rank: Sequence[Sequence[BatchPoint]], seconds: float, least: int, samples: Any
    ) -> list[list[BatchPoint]]:
        """Time sizes on all ranks at once."""
        began, ends, found = self.clock.now, [], []
        for rank, sizes in enumerate(by_rank):
            self.clock.now = began
            one = SimpleNamespace(
                seconds=lambda n, repeats, rank=rank: self.passes(rank, n, repeats)
            )
            found.append(
                batch_sizes.time_sizes(
                    one, sizes, seconds=seconds, least=least, samples=samples[rank]
                )
            )
            ends.append(self.clock.now)
        self.clock.now = max(ends)
        return found

    def profile(self) -> ClusterProfile:
        """As `profile_cluster` measures it; the one that was measured, if there is one."""
        if self.measured is not None:
            profile, self.clock.now = self.measured
            return profile
        budget = autotune.PROFILE_PART * SECONDS
        by_rank = [
            [self._first(rank, n) for n in sizes_of(d)] for rank, d in enumerate(self.true.devices)
        ]
        self.clock.now = 5.0
        longest = batch_curves._longest(by_rank)
        seconds = min(batch_curves.TIMES_EACH * longest, budget * batch_curves.TIMING)
        samples = [defaultdict(list) for _ in by_rank]
        points = self.timed(by_rank, seconds, 2, samples)
        noise = batch_curves.times_to_be_sure(points)
        more = min((noise - 1.0) * seconds, budget * batch_curves.TIMING - seconds)
        if more > 0.0:
            points = self.timed(by_rank, more, 2, samples)
        measured = map(batch_curves.smoothed, points)
        devices = [
            replace(device, points=tuple(own))
            for device, own in zip(self.true.devices, measured, strict=True)
        ]
        return self._calibrated(replace(self.true, devices=tuple(devices)), noise)

    def _first(self, rank: int, size: int) -> BatchPoint:
        known = self.true.devices[rank]
        return BatchPoint(
            batch=size,
            seconds=self.noises[rank].seconds(known.seconds(size), self.clock.now),
            activation_bytes=round(known.activation_bytes(size)),
        )

    def _calibrated(self, profile: ClusterProfile, noise: float) -> ClusterProfile:
        plans = [p for s in self.stages for p in calibration.plans_to_observe(profile, s)]
        budget = autotune.PROFILE_PART * SECONDS * 0.4
        seconds = trial_runs._plain_seconds(profile, plans, budget)
        turns = []
        for _ in trial_runs.take_turns(math.ceil(noise), budget, lambda value: value):
            turns.append([])
            before = self._slowdowns(profile, plans[0], seconds)
            for plan in plans:
                seen = self.run_plan(plan, steps=trial_runs.STEPS)
                after = self._slowdowns(profile, plan, seconds)
                turns[-1].append(trial_runs.with_slowdowns(seen, before, after))
                before = after
        return calibration.fit(profile, turns, asynchronous=False)

    def _slowdowns(self, profile: ClusterProfile, plan: Plan, seconds: float) -> list[float]:
        if seconds < trial_runs.SHORTEST_SAMPLE_SECONDS:
            return [1.0] * profile.world_size
        known = []
        for device, sizes in zip(profile.devices, plan.micro_batches, strict=True):
            largest = max([device.points[0].batch, *sizes])
            known.append([point for point in device.points if point.batch <= largest][-1])
        fresh = [defaultdict(list) for _ in known]
        now = self.timed([[point] for point in known], seconds, 2, fresh)
        return [new.seconds / old.seconds for (new,), old in zip(now, known, strict=True)]

    def measure_points(
        self, batches: Sequence[Sequence[int]], references: Sequence[BatchPoint]
    ) -> list[list[BatchPoint]]:
        by_rank = [
            [self._first(rank, size) for size in (*own, known.batch)]
            for rank, (own, known) in enumerate(zip(batches, references, strict=True))
        ]
        fresh = [defaultdict(list) for _ in by_rank]
        each = batch_curves.TIMES_EACH
        found = self.timed(by_rank, each * batch_curves._longest(by_rank), each, fresh)
        return [
            [batch_curves.at_speed_of(known, point, again) for point in points]
            for known, (*points, again) in zip(references, found, strict=True)
        ]

    def run_plan(self, plan: Plan, *, steps: int, report: Any = None) -> Observation:
        """Steps of a plan: each synchronization waits for the slowest rank."""
        taken = [self._step(plan, self._seconds) for _ in range(steps)]
        passes = [
            tuple(median(times) for times in zip(*(step[1][rank] for step in taken), strict=True))
            for rank in range(plan.world_size)
        ]
        return Observation(
            plan=plan,
            step_seconds=median(step for step, _ in taken),
            pass_seconds=tuple(passes),
            other_seconds=(0.0,) * plan.world_size,
        )

    def _seconds(self, rank: int, work: float) -> float:
        return self.noises[rank].seconds(work, self.clock.now)

    def mean_seconds(self, plan: Plan) -> float:
        """Seconds of a step in the long run; the same chances for every plan."""
        now, taken = self.clock.now, []
        for moment in range(MOMENTS):
            self.clock.now = moment * HORIZON / MOMENTS
            draws = [random.Random(f"{moment} {rank}") for rank in range(plan.world_size)]

            def seconds(rank: int, work: float, draws: list[random.Random] = draws) -> float:
                chance = draws[rank].gauss(0.0, 1.0)
                return self.noises[rank].expected(work, self.clock.now, chance)

            taken.append(self._step(plan, seconds)[0])
        self.clock.now = now
        return fmean(taken)

    def _step(
        self, plan: Plan, seconds_of: Callable[[int, float], float]
    ) -> tuple[float, list[list[float]]]:
        works, rest, in_turn = self._parts(plan)
        by_rank = [
            [seconds_of(rank, work) if work else 0.0 for work in own]
            for rank, own in enumerate(works)
        ]
        slowest = max(map(sum, by_rank))
        if in_turn:
            slowest = sum(map(max, zip(*by_rank, strict=True)))
        self.clock.now += rest + slowest
        passes = [
            [s for s, size in zip(own, sizes, strict=True) if size]
            for own, sizes in zip(by_rank, plan.micro_batches, strict=True)
        ]
        return rest + slowest, passes

    def _parts(self, plan: Plan) -> tuple[list[list[float]], float, bool]:
        """Seconds of passes by rank and of the rest of a step; whether passes end together."""
        key = plan.stage, plan.micro_batches, plan.shares
        if key not in self._known:
            costs = costs_of(self.true, plan)
            latest = sum(one.latest for one in costs.synchronizations(plan.micro_batches))
            rest = costs.step_seconds(plan.micro_batches, plan.shares) - latest
            both = zip(self.true.devices, plan.micro_batches, strict=True)
            works = [list(map(device.seconds, sizes)) for device, sizes in both]
            self._known[key] = works, rest, costs.synchronizes_every_pass
        return self._known[key]

    def use(self, profile: ClusterProfile) -> None: ...

    def save(self, profile: ClusterProfile) -> None: ...

    def tune(self, global_batch: int) -> autotune.Tuned:
        job = autotune.TuningJob.of(
            nn.Linear(1, 1),
            lambda model, batch: batch,
            (),
            global_batch=global_batch,
            stages=self.stages,
            seconds=SECONDS,
            loss="sum",  # so there is no weight to be checked
            leave_out="never",
        )
        return autotune.Tuner(self, job).tune()


def sizes_of(device: DeviceProfile) -> list[int]:
    """1, 2, 4, ... and the largest batch."""
    most = device.max_batch
    return [*(1 << power for power in range((most - 1).bit_length())), most]


def true_cluster(draw: random.Random) -> ClusterProfile:
    """A cluster whose profile has every batch."""
    kinds = [true_device(draw, number) for number in range(draw.randint(1, 3))]
    devices = [draw.choice(kinds) for _ in range(draw.randint(2, 5))]
    step = 32 * fmean(device.seconds(1) for device in devices) / len(devices)
    rates = (1e-9,) * len(devices)
    return ClusterProfile(
        devices=tuple(devices),
        model=ModelProfile(unit_numels=(1000,) * 4),
        network=NetworkProfile(
            reduce_scatter_seconds=step * draw.uniform(0.005, 0.1),
            all_gather_seconds=step * draw.uniform(0.005, 0.1),
            send_seconds_per_byte=rates,
            receive_seconds_per_byte=rates,
        ),
    )


def true_device(draw: random.Random, number: int) -> DeviceProfile:
    """A device whose profile has every batch."""
    most, sample = draw.choice((8, 16, 20, 32, 48, 64)), 0.05 / draw.uniform(1.0, 8.0)
    latency = sample * draw.choice((0.0, 0.3, 1.0, 4.0))
    shape = draw.choice(("line", "line", "steps", "published"))
    if shape == "published":
        known = draw.choice(CURVES).seconds
        first, largest = known[1], max(known)
        curve = DeviceProfile(
            name="",
            memory_bytes=1,
            optimizer_seconds=0.0,
            points=tuple(
                BatchPoint(batch=b, seconds=s / first, activation_bytes=0) for b, s in known.items()
            ),
        )
        most = min(most, largest)
        seconds = [sample * curve.seconds(batch) for batch in range(1, most + 1)]
    else:
        tile = draw.choice((2, 4, 8)) if shape == "steps" else 1
        part = draw.uniform(0.3, 1.0)  # of the time is in steps
        seconds = [
            latency + sample * (part * math.ceil(b / tile) * tile + (1.0 - part) * b)
            for b in range(1, most + 1)
        ]
    points = (
        BatchPoint(batch=b, seconds=s, activation_bytes=b << 20) for b, s in enumerate(seconds, 1)
    )
    return DeviceProfile(
        name=f"{shape} {number}",
        memory_bytes=1 << 40,
        points=tuple(points),
        optimizer_seconds=0.1 * sample,
    )
