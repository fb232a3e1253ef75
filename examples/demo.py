"""What Poplar gains when ranks are unequal, on any machine with two cores: `make demo`.

Four ranks: one has a core to itself, three share another. After their speeds have been measured,
one model is trained twice from one seed: by `Plan.even`, as DDP, FSDP and DeepSpeed would cut the
batch, and by `Plan.proportional` to the measured speeds. The two take turns, so what the machine
does besides hits both alike. Global batches, learning rate and loss curve are the same; only the
time differs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from launch import LaunchError, run_ranks
from llama import SIZES, Llama, next_byte_loss
from rich.console import Console
from rich.table import Table
from speed import Speed, measure_speeds, sum_of_speeds
from text import ByteWindows, load_text
from torch.utils.data import DataLoader, default_collate
from train_llama import Batch, epochs, progress, warmup_then_cosine

from poplar import HeteroBatchSampler, HeteroZeroOptimizer, Plan

RANKS = 4
SEED = 0
CONFIG = SIZES["demo"]
TEXT_BYTES = 8_000_000
GLOBAL_BATCH = 72
"""Divides evenly at speeds of 3:1:1:1, and makes a step take about a second: among four processes
on two cores, communication costs tens of milliseconds."""
LARGEST_MEASURED_BATCH = 16
"""Samples per second hardly change beyond it on a CPU."""
ROUND_STEPS = 5
"""Steps that one run takes before it is the other's turn."""
ONE_CURVE = 1e-2
"""Loss difference, in nats, above which the two runs did not compute the same thing."""


def main() -> None:
    options = parse_options()
    # Memory that is freed and given back has to be faulted in again at every step, by all ranks of
    # a core in turn; keeping it makes timings steadier, for the yardstick and both runs alike.
    os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(2**30))
    os.environ.setdefault("MALLOC_TRIM_THRESHOLD_", str(2**31 - 1))
    cores = unequal_cores()
    print(describe(cores), flush=True)
    try:
        run_ranks(compare, RANKS, options, cores=cores)
    except LaunchError as failure:
        print(failure, file=sys.stderr)
        raise SystemExit(1) from None


def compare(options: argparse.Namespace) -> None:
    """Train by both plans in turns and report; every rank runs this."""
    rank = dist.get_rank()
    console = Console(quiet=rank != 0, soft_wrap=True, highlight=False)
    text, _ = load_text(CONFIG.context, limit=TEXT_BYTES)

    before = measure(text, options.measure_seconds)
    speeds = [speed.samples_per_second for speed in before]
    console.print(
        "measured speeds: " + ", ".join(f"{speed:.1f}" for speed in speeds) + " samples/s"
    )
    if speeds[0] < 2 * max(speeds[1:]):
        console.print("rank 0 is not twice as fast as the others: do other programs use its core?")
    even = Plan.even(RANKS, GLOBAL_BATCH, GLOBAL_BATCH, options.stage)
    planned = Plan.proportional(speeds, GLOBAL_BATCH, options.stage, GLOBAL_BATCH)
    runs = [
        Run("even", even, text, options.steps),
        Run("planned", planned, text, options.steps),
    ]
    for run in runs:
        console.print(f"\n{run.name}:\n{run.plan}")
    console.print()

    with progress(console, 2 * options.steps) as advance:
        for run in turns(runs, options.steps):
            run.one_step()
            advance(f"{run.name}: loss {run.losses[-1]:.2f}")

    after = measure(text, options.measure_seconds)
    timings = [slowest(run.seconds) for run in runs]
    if rank == 0:
        report(console, options.stage, runs, timings, sum_of_speeds(before, after))


@dataclass
class Run:
    """One model in training by one plan, and what was seen of it."""

    name: str
    plan: Plan
    text: ByteWindows
    steps: int
    losses: list[float] = field(default_factory=list)
    """Of the whole global batch, one per step."""
    seconds: list[float] = field(default_factory=list)
    """From one step of this rank to the next, loading included."""

    def __post_init__(self) -> None:
        torch.manual_seed(SEED)
        self.optimizer = HeteroZeroOptimizer(
            Llama(CONFIG), torch.optim.AdamW, plan=self.plan, lr=2e-3, betas=(0.9, 0.95)
        )
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, warmup_then_cosine(max(1, self.steps // 10), self.steps)
        )
        sampler = HeteroBatchSampler(len(self.text), self.plan, seed=SEED)
        self.batches = epochs(DataLoader(self.text, batch_sampler=sampler), sampler)

    def one_step(self) -> None:
        """One optimizer step, on the same global batch whatever the plan."""
        start = time.perf_counter()
        batch: Batch = next(self.batches)
        result = self.optimizer.train_step(next_byte_loss, batch, max_norm=1.0)
        self.scheduler.step()
        self.seconds.append(time.perf_counter() - start)
        self.losses.append(float(result.loss))


def turns(runs: Sequence[Run], steps: int) -> Iterator[Run]:
    """Who takes the next step: rounds of a few steps each; who began a round ends the next."""
    order = list(runs)
    for start in range(0, steps, ROUND_STEPS):
        for run in order:
            dist.barrier()
            for _ in range(min(ROUND_STEPS, steps - start)):
                yield run
        order.reverse()


def measure(text: ByteWindows, seconds: float) -> tuple[Speed, ...]:
    """Every rank's speed in plain passes, while all of them run."""
    return measure_speeds(
        Llama(CONFIG),
        next_byte_loss,
        lambda samples: default_collate([text[index] for index in range(samples)]),
        max_batch=LARGEST_MEASURED_BATCH,
        seconds=seconds,
    )


def slowest(seconds: Sequence[float]) -> list[float]:
    """Seconds of each step on the rank that took longest, without the first step's preparations."""
    steps = torch.tensor(seconds[1:], dtype=torch.float64)
    dist.all_reduce(steps, op=dist.ReduceOp.MAX)
    return steps.tolist()


def report(
    console: Console,
    stage: int,
    runs: Sequence[Run],
    timings: Sequence[Sequence[float]],
    total: float,
) -> None:
    """A table for people; the last line is for programs."""
    table = Table(
        title=f"stage {stage}, seconds of a step of {GLOBAL_BATCH} samples", title_justify="left"
    )
    table.add_column("plan", no_wrap=True)
    for heading in ("samples per rank", "p20 s", "p50 s", "p80 s", "samples/s", "of sum"):
        table.add_column(heading, justify="right", no_wrap=True)
    reached = []
    for run, seconds in zip(runs, timings, strict=True):
        median = statistics.median(seconds)
        low, *_, high = statistics.quantiles(seconds, n=5)
        reached.append(GLOBAL_BATCH / median)
        table.add_row(
            run.name,
            " ".join(str(run.plan.samples(rank)) for rank in range(RANKS)),
            *(f"{value:.3f}" for value in (low, median, high)),
            f"{reached[-1]:.1f}",
            f"{100 * reached[-1] / total:.0f} %",
        )
    console.print(table)

    even, planned = runs
    differences = [abs(a - b) for a, b in zip(even.losses, planned.losses, strict=True)]
    for step in (1, (len(differences) + 1) // 2, len(differences)):
        console.print(
            f"step {step} · loss {even.losses[step - 1]:.6f} even, "
            f"{planned.losses[step - 1]:.6f} planned"
        )
    one_curve = max(differences) <= ONE_CURVE
    console.print(
        f"{'one loss curve' if one_curve else 'TWO LOSS CURVES'}: they differ by at most "
        f"{max(differences):.2g} over {len(differences)} steps"
    )
    console.print(
        f"speed-up {reached[1] / reached[0]:.2f}x · {100 * reached[1] / total:.0f} % of the sum of "
        f"speeds, {total:.1f} samples/s"
    )
    outcome = {
        "stage": stage,
        "even_samples_per_second": round(reached[0], 2),
        "planned_samples_per_second": round(reached[1], 2),
        "speedup": round(reached[1] / reached[0], 3),
        "fraction_of_sum_of_speeds": round(reached[1] / total, 3),
        "max_loss_difference": max(differences),
    }
    print(json.dumps(outcome), flush=True)
    if not one_curve:
        raise RuntimeError(
            f"the loss curves differ by {max(differences):.3g}, more than {ONE_CURVE}"
        )


def unequal_cores() -> tuple[int, ...] | None:
    """One core for rank 0, one for all others; None where processes cannot be bound to cores."""
    if not hasattr(os, "sched_setaffinity"):
        return None
    first, *others = sorted(os.sched_getaffinity(0))
    # Two threads of one physical core slow each other down: better a second core.
    siblings = _siblings(first)
    apart = [core for core in others if core not in siblings]
    second = (apart or others or [first])[0]
    return (first,) + (second,) * (RANKS - 1)


def _siblings(core: int) -> set[int]:
    """Threads of the same physical core, as Linux lists them: `0,32` or `0-1`."""
    listed = Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list")
    try:
        parts = [part.split("-") for part in listed.read_text().strip().split(",")]
        return {core for part in parts for core in range(int(part[0]), int(part[-1]) + 1)}
    except (OSError, ValueError):
        return set()


def describe(cores: tuple[int, ...] | None) -> str:
    if cores is None:
        return f"{RANKS} ranks, free to run on any core here: expect equal speeds and no gain"
    if cores[0] == cores[1]:
        return f"{RANKS} ranks on the only core: expect equal speeds and no gain"
    return (
        f"{RANKS} ranks on 2 cores: rank 0 has core {cores[0]} to itself, "
        f"ranks 1 to {RANKS - 1} share core {cores[1]}"
    )


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train by an even plan and by measured speeds, in turns, on unequal CPU ranks.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--stage", type=int, choices=(0, 1, 2, 3), default=0, help="ZeRO stage")
    parser.add_argument("--steps", type=int, help="optimizer steps by each plan (40, quick: 8)")
    parser.add_argument("--quick", action="store_true", help="few steps: a first impression")
    options = parser.parse_args()
    options.steps = options.steps or (8 if options.quick else 40)
    if options.steps < 3:
        parser.error(f"--steps must be at least 3 to give a median, got {options.steps}")
    options.measure_seconds = 4.0 if options.quick else 12.0
    return options


if __name__ == "__main__":
    main()
