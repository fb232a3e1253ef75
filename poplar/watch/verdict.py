"""What the ranks of a watched job wait for, and what unequal batches would gain.

The time of a rank in a step is its compute, its input, its update and its waits. Until the last
rank has issued a collective, the others wait for that rank; from then on it is the network.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import mean, median, pstdev
from typing import Any

from poplar.values.formatting import format_ranks, format_seconds
from poplar.watch.records import RankRecord, StepRecord, common_steps

COMPUTE, INPUT, NETWORK = "compute", "input pipeline", "network"
LEAST_WAITING, LEAST_NETWORK = 0.05, 0.25
"""Fractions of a rank's time below which there is no advice. Waiting counts beyond what the other
rank waits for this one: equal ranks also wait for each other, in turn."""
LEAST_GAIN = 1.05
LATE_PART = 0.5
"""Of the longest waiting of a rank: ranks that wait less are late."""
PARTS = 8
"""Parts of the run whose gains are compared."""

ADVICE = {
    "DDP": (
        "poplar.integrations.ddp",
        "passes = poplar.integrations.ddp.UnequalPasses(model, plan)",
        "ddp-and-fsdp2",
    ),
    "FSDP2": (
        "poplar.integrations.fsdp2",
        "passes = poplar.integrations.fsdp2.UnequalPasses(model, plan)",
        "ddp-and-fsdp2",
    ),
    "DeepSpeed": (
        "poplar",
        "optimizer = poplar.HeteroZeroOptimizer(model, torch.optim.AdamW, plan=plan)",
        "which-integration",
    ),
    "Trainer": (
        "poplar.integrations.transformers",
        "trainer = poplar.integrations.transformers.PoplarTrainer(...)  # instead of Trainer",
        "transformers",
    ),
    "Poplar": ("poplar", "optimizer.apply_plan(plan)", "slow-rank"),
}
"""By engine: the module that is imported, the line that uses a plan, and the guide."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankTime:
    """Seconds of a step of one rank."""

    rank: int
    host: str
    device: str
    step: float
    compute: float
    input: float
    optimizer: float
    network: float
    waiting: tuple[float, ...]
    """By rank that it waited for."""
    samples: float
    """0: unknown."""
    batches: float
    """That were drawn; several with gradient accumulation. 0: unknown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """The ranks, the rank that the others wait for, and the gain of unequal batches."""

    steps: int
    engine: str
    world_size: int
    ranks: tuple[RankTime, ...]
    """Those that were recorded."""
    cause: str | None
    """None: no rank is slower than the others."""
    waiting_rank: int
    waiting_on: tuple[int, ...]
    """The ranks that hardly wait: the others wait for them."""
    waiting_fraction: float
    """Of the waiting rank's time; of a step if the cause is the network."""
    batches: tuple[int, ...]
    """Samples per rank that would be fastest; of 1000 together if those of now are unknown."""
    gain: float
    """Seconds of a step now over those with `batches`."""
    gain_spread: float
    """Standard deviation of the gain over parts of the run."""
    endings: tuple[str, ...]
    """On which ranks recording has ended before the job, and why."""

    @property
    def advised(self) -> bool:
        """Whether unequal batches are worth it."""
        return self.cause == COMPUTE and self.gain - self.gain_spread >= LEAST_GAIN

    def to_dict(self) -> dict[str, Any]:
        """JSON types."""
        return {**asdict(self), "advised": self.advised, "sentences": self.sentences()}

    def sentences(self) -> list[str]:
        """The verdict in words, the most important first."""
        sentences, remedy = [], ": start poplar watch on every host with the same --folder"
        if self.endings:
            sentences.append(f"Only a part of the job was recorded: {'; '.join(self.endings)}.")
            remedy = ""
        if len(self.ranks) < self.world_size:
            sentences.append(
                f"Only {len(self.ranks)} of {self.world_size} ranks were recorded, so waits for "
                f"the others count as network{remedy}."
            )
        return sentences + self._found()

    def _found(self) -> list[str]:
        """The verdict on the ranks that were recorded."""
        step = next(time.step for time in self.ranks if time.rank == self.waiting_rank)
        percent = f"{self.waiting_fraction:.0%}"
        if self.cause is None:
            return [
                "No rank is slower than the others: each waits for another about as long as that "
                "one waits for it. Unequal batches would gain nothing here."
            ]
        if self.cause == NETWORK:
            return [
                f"{percent} of a step of {format_seconds(step)} is communication that all ranks "
                "wait for: the network is slow. See docs/guides/which-stage.md."
            ]
        late = format_ranks(self.waiting_on)
        found = (
            f"{percent} of rank {self.waiting_rank}'s time is waiting for {late}, "
            f"whose {self.cause} is slower."
        )
        if self.cause == INPUT:
            late_ranks = (time for time in self.ranks if time.rank in self.waiting_on)
            seconds = max(time.input / max(1, time.batches) for time in late_ranks)
            return [
                f"{found} A batch there takes {format_seconds(seconds)}: give the DataLoader more "
                "workers, or move the data to a faster disk."
            ]
        gain = f"{self.gain:.2f}x +- {self.gain_spread:.2f}"
        if not self.advised:
            return [f"{found} A plan would give {gain}, too little to change anything."]
        module, line, guide = ADVICE[self.engine]
        return [
            f"{found} A plan would give {gain} here: change these lines.",
            f"    import {module}",
            f"    plan = {self._plan()}",
            f"    {line}",
            f"    See docs/guides/{guide}.md.",
        ]

    def _plan(self) -> str:
        """A call that returns a plan with `batches`, with `...` for what is unknown."""
        stage = {"DDP": "0", "FSDP2": "3"}.get(self.engine, "...")
        known = [time for time in self.ranks if time.samples]
        if known and all(time.batches <= 1 for time in known):
            batches = ",".join(map(str, self.batches))
            return f'poplar.Plan.manual("{batches}", stage={stage})  # or autotune(...)'
        total = sum(self.batches) if known else "..."
        # As large as now: a larger micro-batch may not fit.
        largest = max((math.ceil(time.samples / time.batches) for time in known), default="...")
        return (
            f"poplar.Plan.proportional({list(self.batches)}, global_batch={total}, stage={stage}, "
            f"max_micro_batch={largest})"
        )


def judge(ranks: Sequence[RankRecord], endings: Sequence[str] = ()) -> Verdict | None:
    """The verdict on what has been recorded; None without a step that all ranks have recorded.

    Args:
        endings: on which ranks recording has ended before the job, and why.
    """
    steps = common_steps(ranks)
    count = len(steps)
    if count == 0:
        return None
    times = _times(ranks, steps)
    size = max(1, count // PARTS)
    parts = [_gain(_times(ranks, steps[k : k + size])) for k in range(0, count - size + 1, size)]
    gain, batches = _gain(times)
    network = min(time.network / time.step for time in times)
    net = [_net_waiting(times, place) for place in range(len(times))]
    waiting = max(range(len(times)), key=net.__getitem__)
    most, cause = times[waiting], None
    fraction = sum(most.waiting) / most.step
    late = [time for time in times if sum(time.waiting) <= LATE_PART * sum(most.waiting)]
    slower = net[waiting] / most.step
    if slower >= LEAST_WAITING and late:
        cause = _cause(most, max(late, key=lambda time: time.step - sum(time.waiting)))
    spread = pstdev([part for part, _ in parts])
    if network >= max(LEAST_NETWORK, slower) and (cause != COMPUTE or gain - spread < LEAST_GAIN):
        cause, fraction = NETWORK, network
    return Verdict(
        steps=count,
        engine=ranks[0].engine,
        world_size=ranks[0].world_size,
        ranks=times,
        cause=cause,
        waiting_rank=most.rank,
        waiting_on=tuple(time.rank for time in late),
        waiting_fraction=fraction,
        batches=batches,
        gain=gain,
        gain_spread=spread,
        endings=tuple(endings),
    )


def _times(
    ranks: Sequence[RankRecord], steps: Sequence[Sequence[StepRecord]]
) -> tuple[RankTime, ...]:
    """The times of the ranks over some steps; means of who waits for whom, else medians."""
    ahead = [rank.ahead for rank in ranks]
    waited = [_waits(step, ahead) for step in steps]
    times = []
    for place, rank in enumerate(ranks):
        own = [step[place] for step in steps]
        blocked = [sum(waits[place][0]) + waits[place][1] for waits in waited]
        times.append(
            RankTime(
                rank=rank.rank,
                host=rank.host,
                device=rank.device,
                step=median(step.end - step.begin for step in own),
                compute=median(
                    max(0.0, step.end - step.begin - step.data - step.optimizer - wait)
                    for step, wait in zip(own, blocked, strict=True)
                ),
                input=median(step.data for step in own),
                optimizer=median(step.optimizer for step in own),
                network=median(waits[place][1] for waits in waited),
                waiting=tuple(
                    mean(waits[place][0][other] for waits in waited) for other in range(len(ranks))
                ),
                samples=median(step.samples for step in own),
                batches=median(step.batches for step in own),
            )
        )
    return tuple(times)


def _waits(step: Sequence[StepRecord], ahead: Sequence[float]) -> list[tuple[list[float], float]]:
    """By rank: seconds that it waited for each rank, and for the network."""
    last: dict[str, tuple[float, int]] = {}
    for place, record in enumerate(step):
        for wait in record.waits:
            own = wait.issued - ahead[place], place
            last[wait.key] = max(last.get(wait.key, own), own)
    found = []
    for place, record in enumerate(step):
        by_rank, network = [0.0] * len(step), 0.0
        for wait in record.waits:
            issued, late = last[wait.key]
            seconds = wait.end - wait.begin
            alone = max(0.0, issued + ahead[place] - wait.begin)
            for_rank = min(seconds, alone) if wait.key else 0.0
            by_rank[late] += for_rank
            network += seconds - for_rank
        found.append((by_rank, network))
    return found


def _net_waiting(times: Sequence[RankTime], place: int) -> float:
    """Seconds that a rank waits for others beyond what they wait for it."""
    waits = enumerate(times[place].waiting)
    return sum(seconds - times[other].waiting[place] for other, seconds in waits)


def _cause(waiting: RankTime, late: RankTime) -> str:
    """Why a rank is late: what takes it longer than the rank that waits."""
    more_input = late.input - waiting.input
    more_compute = late.compute + late.optimizer - waiting.compute - waiting.optimizer
    return INPUT if more_input > max(0.0, more_compute) else COMPUTE


def _gain(times: Sequence[RankTime]) -> tuple[float, tuple[int, ...]]:
    """How much faster a step is with the fastest batches, and these.

    Input and update keep their seconds, compute grows with the samples, and what a step has beyond
    the slowest rank stays.
    """
    samples = [time.samples for time in times]
    if not any(samples):  # unknown: as many everywhere
        samples = [_UNKNOWN_SAMPLES / len(times)] * len(times)
    fixed = [time.input + time.optimizer for time in times]
    each = [
        max(time.compute, 1e-6) / n if n else _IDLE_SECONDS
        for time, n in zip(times, samples, strict=True)
    ]
    now = median(time.step for time in times)
    slowest = max(f + time.compute for f, time in zip(fixed, times, strict=True))
    batches = _fastest_batches(fixed, each, round(sum(samples)))
    planned = max(f + n * e for f, e, n in zip(fixed, each, batches, strict=True))
    return now / (max(0.0, now - slowest) + planned), batches


_UNKNOWN_SAMPLES = 1000.0
"""Of all ranks."""
_IDLE_SECONDS = 1e3
"""Per sample of a rank without samples: nothing is known of its speed, so it gets none."""


def _fastest_batches(fixed: Sequence[float], each: Sequence[float], total: int) -> tuple[int, ...]:
    """Samples per rank, `total` together, whose largest `fixed + samples * each` is smallest."""

    def within(seconds: float) -> list[int]:
        return [max(0, int((seconds - f) / e)) for f, e in zip(fixed, each, strict=True)]

    low, high = 0.0, max(fixed) + total * max(each)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(within(middle)) <= total else (low, middle)
    batches = within(low)
    # The others, at most about one per rank, are each for the rank that then ends first.
    ends = [
        (f + (n + 1) * e, r) for r, (f, e, n) in enumerate(zip(fixed, each, batches, strict=True))
    ]
    heapq.heapify(ends)
    for _ in range(total - sum(batches)):
        end, rank = ends[0]
        batches[rank] += 1
        heapq.heapreplace(ends, (end + each[rank], rank))
    return tuple(batches)
