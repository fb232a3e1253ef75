"""A rank that becomes slower in mid-run, and recovers: with and without plans that follow it.

CPU ranks under quotas train a Llama. In mid-run the quota of one rank is divided by a factor, and
restored later. The same steps run with `follow_drift(replan="auto")` and without, on the same
global batches, so their losses must agree. The part of the sum of speeds is throughput over the sum
of the speeds at which the ranks compute in the same steps (`StepResult.rank_times`). What is
missing is waits, and the communication that is not overlapped, whose part of a step is shown.

    python benchmarks/drift.py --quick
    python benchmarks/drift.py --stages 0 1 2 3 --factors 2 1.3 1.15 --output rows.jsonl
    python benchmarks/drift.py --overhead

`--overhead` trains the same optimizer with and without `follow_drift`, in turns: rounds of a few
steps without, with, with and without. Each four rounds give one ratio of seconds. It prints the
median of the ratios, and the interval of 95 % of the medians of samples that are drawn from them.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
import torch
import torch.distributed as dist
from emulation import Ranks, cpu_quotas
from launch import run_ranks
from llama import SIZES, Llama, LlamaConfig, next_byte_loss
from rows import Column, Kind, Row, Target, new_parser, report
from torch import Tensor

from poplar import HeteroZeroOptimizer, Plan, profile_cluster, search
from poplar.values.profile import ClusterProfile

QUOTAS = (0.4, 0.4, 0.4)
CHANGED = 1
"""The rank whose quota changes."""
GLOBAL_BATCH, CONTEXT = 48, 64
NOTICED, REACHED, LEAST_PART = 20, 20, 0.9
"""Steps to notice a change, steps until the throughput is reached, and its part of the sum."""
LEARNING_RATE = 1e-4
COLUMNS = (
    Column("stage", "stage"),
    Column("factor", "factor"),
    Column("steps to plan", "steps_to_plan"),
    Column("to recover", "steps_to_recover"),
    Column("batches", "batches"),
    Column("samples/s before", "before", "{:.1f}"),
    Column("slow, fixed plan", "slow_fixed", "{:.1f}"),
    Column("slow, followed", "slow_followed", "{:.1f}"),
    Column("gain", "gain", "{:.2f}"),
    Column("part of sum before", "part_before", "{:.2f}"),
    Column("slow", "part_slow", "{:.2f}"),
    Column("after", "part_after", "{:.2f}"),
    Column("communication", "communication_slow", "{:.2f}"),
    Column("loss difference", "loss_difference", "{:.1e}"),
)
OVERHEAD_COLUMNS = (
    Column("stage", "stage"),
    Column("model", "model"),
    Column("ms per step", "milliseconds", "{:.1f}"),
    Column("steps", "steps"),
    Column("overhead, %", "overhead_percent", "{:+.2f}"),
    Column("from", "from_percent", "{:+.2f}"),
    Column("to", "to_percent", "{:+.2f}"),
)
MOST_OVERHEAD = 0.5
"""Percent of a step."""
OVERHEAD_CASES = (("tiny", 8, 12, 1), ("demo", 32, 2, 1))
"""Model, global batch, steps per round, stage."""
RESAMPLED = 2000


@dataclass(frozen=True)
class Schedule:
    """Steps until the rank becomes slower, until it recovers, and until the end."""

    slow_at: int
    recovers_at: int
    steps: int
    measured: int
    """Last steps of each part, of which the throughput is measured."""


FULL = Schedule(slow_at=35, recovers_at=75, steps=115, measured=12)
QUICK = Schedule(slow_at=30, recovers_at=55, steps=80, measured=8)


def main() -> None:
    """Measure all cases, or show saved rows."""
    options = parse_options()
    os.environ["OMP_NUM_THREADS"] = "1"  # more threads would share the rank's quota
    rows = report(
        options,
        measure_overhead(options.seconds) if options.overhead else measure_all(options),
        Kind("drift", COLUMNS, targets),
        Kind("drift_overhead", OVERHEAD_COLUMNS, overhead_targets),
    )
    for row in rows:
        for line in row.get("messages") or ():
            print(f"  stage {row['stage']}, {row['factor']}x: {line}")


def measure_all(options: argparse.Namespace) -> Iterator[Row]:
    """One row per stage and factor."""
    for stage in options.stages:
        yield from measure(stage, options.factors, quick=options.quick)


def measure(stage: int, factors: Sequence[float], *, quick: bool) -> list[Row]:
    """One row per factor."""
    schedule = QUICK if quick else FULL
    with cpu_quotas(QUOTAS) as ranks:
        found = run_ranks(train_all, len(QUOTAS), ranks, stage, factors, schedule, quick)
    case = {"stage": stage, "quotas": QUOTAS, "changed_rank": CHANGED, "quick": quick}
    return [
        Row.of("drift", {**case, "factor": factor}, figures)
        for factor, figures in zip(factors, found, strict=True)
    ]


def train_all(
    ranks: Ranks,
    stage: int,
    factors: Sequence[float],
    schedule: Schedule,
    quick: bool,
) -> list[dict[str, Any]]:
    """All factors of a stage on one profile. Collective."""
    torch.set_num_threads(1)
    ranks.enter(dist.get_rank())
    config = replace(SIZES["tiny" if quick else "demo"], context=CONTEXT)
    profile = profiled(config, stage, GLOBAL_BATCH, seconds=5 if quick else 12)
    plan = search(profile, global_batch=GLOBAL_BATCH, stages=(stage,), leave_out="never")
    figures = []
    for factor in factors:
        runs = [
            train(ranks, profile, plan, factor, schedule, config, follows=follows)
            for follows in (False, True)
        ]
        figures.append(compared(*runs, schedule))
    return figures


def profiled(config: LlamaConfig, stage: int, max_batch: int, *, seconds: float) -> ClusterProfile:
    """A new profile of the ranks. Collective."""
    return profile_cluster(
        Llama(config),
        next_byte_loss,
        whole_batch(0, 4),
        stages=(stage,),
        max_batch=max_batch,
        seconds=seconds,
        cache=False,
        lr=LEARNING_RATE,
    )


def whole_batch(step: int, samples: int) -> dict[str, Tensor]:
    """The global batch of a step."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(256, (samples, CONTEXT + 1), generator=generator)
    return {"input": tokens[:, :-1], "target": tokens[:, 1:]}


def part_of(whole: dict[str, Tensor], plan: Plan) -> dict[str, Tensor]:
    """This rank's part of a global batch."""
    first = plan.offset(dist.get_rank())
    last = first + plan.samples(dist.get_rank())
    return {name: tensor[first:last] for name, tensor in whole.items()}


def train(
    ranks: Ranks,
    profile: ClusterProfile,
    plan: Plan,
    factor: float,
    schedule: Schedule,
    config: LlamaConfig,
    *,
    follows: bool,
) -> dict[str, Any]:
    """Train all steps; returns what each took, the losses and the messages. Collective."""
    torch.manual_seed(0)
    rank = dist.get_rank()
    optimizer = HeteroZeroOptimizer(Llama(config), torch.optim.AdamW, plan=plan, lr=LEARNING_RATE)
    replan = "auto" if follows else "off"
    follower = optimizer.follow_drift(profile, replan=replan, leave_out="never")
    names = ("seconds", "communication", "speeds", "losses", "samples")
    found: dict[str, Any] = {name: [] for name in names}
    for step in range(schedule.steps):
        if step in (schedule.slow_at, schedule.recovers_at) and rank == 0:
            slower = factor if step == schedule.slow_at else 1.0
            ranks.change(CHANGED, QUOTAS[CHANGED] / slower)
        current = optimizer.plan
        assert current is not None
        part = part_of(whole_batch(step, GLOBAL_BATCH), current)
        dist.barrier()
        began = time.perf_counter()
        result = optimizer.train_step(next_byte_loss, part)
        dist.barrier()
        found["seconds"].append(time.perf_counter() - began)
        found["communication"].append(result.rank_times[0].communication_seconds)
        found["losses"].append(result.loss)
        found["samples"].append([current.samples(each) for each in range(current.world_size)])
        found["speeds"].append(
            sum(
                current.samples(each) / times.compute_seconds
                for each, times in enumerate(result.rank_times)
                if times.compute_seconds > 0.0
            )
        )
    found["messages"] = [] if follower is None else follower.messages
    optimizer.release()
    return found


def compared(fixed: dict[str, Any], followed: dict[str, Any], schedule: Schedule) -> dict[str, Any]:
    """The figures of two runs of the same steps."""
    ends = (schedule.slow_at, schedule.recovers_at, schedule.steps)
    parts = [slice(end - schedule.measured, end) for end in ends]

    def throughput(run: dict[str, Any], part: slice) -> float:
        return GLOBAL_BATCH / median(run["seconds"][part])

    def of_sum(part: slice) -> float:
        return throughput(followed, part) / median(followed["speeds"][part])

    before, slow, after = parts
    differences = zip(fixed["losses"], followed["losses"], strict=True)
    return {
        "steps_to_plan": steps_until_change(followed["samples"], *ends[:2]),
        "steps_to_recover": steps_until_change(followed["samples"], *ends[1:]),
        "batches": [followed["samples"][end - 1] for end in ends],
        "before": throughput(followed, before),
        "slow_fixed": throughput(fixed, slow),
        "slow_followed": throughput(followed, slow),
        "gain": throughput(followed, slow) / throughput(fixed, slow),
        "part_before": of_sum(before),
        "part_slow": of_sum(slow),
        "part_after": of_sum(after),
        "communication_slow": median(
            communication / seconds
            for communication, seconds in zip(
                followed["communication"][slow], followed["seconds"][slow], strict=True
            )
        ),
        "loss_difference": max(abs(one - other) / other for one, other in differences),
        "messages": followed["messages"],
    }


def steps_until_change(samples: Sequence[Sequence[int]], start: int, stop: int) -> int | None:
    """Steps from `start` until the changed rank has another batch; None: it has not."""
    before = samples[start][CHANGED]
    changed = (step for step in range(start, stop) if samples[step][CHANGED] != before)
    return next((step - start for step in changed), None)


def measure_overhead(seconds: float) -> Iterator[Row]:
    """One row per case, each measured for about so many seconds."""
    for model, global_batch, steps, stage in OVERHEAD_CASES:
        found = run_ranks(train_in_turns, 2, model, global_batch, steps, stage, seconds)
        case = {"stage": stage, "model": model, "global_batch": global_batch, "ranks": 2}
        yield Row.of("drift_overhead", case, found)


def train_in_turns(
    model: str, global_batch: int, steps: int, stage: int, seconds: float
) -> dict[str, float]:
    """Train rounds with and without following. Collective."""
    torch.set_num_threads(1)
    config = replace(SIZES[model], context=CONTEXT)
    profile = profiled(config, stage, global_batch, seconds=5)
    plan = Plan.even(2, global_batch, global_batch // 2, stage)
    optimizer = HeteroZeroOptimizer(Llama(config), torch.optim.AdamW, plan=plan, lr=LEARNING_RATE)
    follower = optimizer.follow_drift(profile)  # "advise": the plan stays
    part = part_of(whole_batch(0, global_batch), plan)

    def seconds_of_round(follows: bool) -> float:
        # `follow_drift` would begin anew, and its first steps do less.
        optimizer._training.step.follow_speeds(follower if follows else None)
        began = time.perf_counter()
        for _ in range(steps):
            optimizer.train_step(next_byte_loss, part)
        return time.perf_counter() - began

    for _ in range(10):
        seconds_of_round(follows=True)
    needed = torch.tensor(4 * seconds_of_round(follows=True))
    dist.broadcast(needed, 0)
    times = [
        [seconds_of_round(follows) for follows in (False, True, True, False)]
        for _ in range(max(20, round(seconds / float(needed))))
    ]
    ratios = [(one + two) / (before + after) for before, one, two, after in times]
    random.seed(0)
    medians = sorted(median(random.choices(ratios, k=len(ratios))) for _ in range(RESAMPLED))
    percents = [100.0 * (each - 1.0) for each in (median(ratios), medians[50], medians[-50])]
    figures = dict(zip(("overhead_percent", "from_percent", "to_percent"), percents, strict=True))
    milliseconds = 1e3 * median(first / steps for first, *_ in times)
    return {**figures, "milliseconds": milliseconds, "steps": 4 * steps * len(times)}


def overhead_targets(rows: Sequence[Row]) -> Iterator[Target]:
    """What following costs."""
    for row in rows:
        case, what = f"stage {row['stage']}, {row['model']}", "overhead of following, %"
        value = row["overhead_percent"]
        yield Target(case=case, what=what, value=value, wanted=MOST_OVERHEAD, at_most=True)


def targets(rows: Sequence[Row]) -> Iterator[Target]:
    """How soon a plan follows, what it reaches, and that losses do not change."""
    for row in rows:
        case = f"stage {row['stage']}, {row['factor']:g}x"
        for name in ("steps_to_plan", "steps_to_recover"):
            if (value := row[name]) is not None:  # else the plan was near enough, as the parts show
                most = NOTICED + REACHED
                yield Target(case=case, what=name, value=value, wanted=most, at_most=True)
        for name in ("part_slow", "part_after"):
            what = f"{name.replace('_', ' ')}, over that before"
            value = row[name] / row["part_before"]
            yield Target(case=case, what=what, value=value, wanted=LEAST_PART)
        value = row["loss_difference"]
        yield Target(case=case, what="loss difference", value=value, wanted=1e-4, at_most=True)


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = new_parser(__doc__, quick="a tiny model and fewer steps at stage 1")
    several = {"nargs": "+"}
    parser.add_argument("--stages", type=int, choices=range(4), default=None, **several)
    parser.add_argument("--factors", type=float, default=None, **several)
    parser.add_argument("--overhead", action="store_true", help="measure what following costs")
    parser.add_argument("--seconds", type=float, default=120.0, help="of each case of --overhead")
    options = parser.parse_args(arguments)
    options.stages = options.stages or ([1] if options.quick else [0, 1, 2, 3])
    options.factors = options.factors or ([2.0] if options.quick else [2.0, 1.3, 1.15])
    return options


if __name__ == "__main__":
    main()
