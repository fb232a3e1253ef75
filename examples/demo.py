"""What Poplar gains when ranks are unequal, on any machine with two cores: `make demo`.

Four ranks: one has a core to itself, three share another. Nobody types a batch size: Poplar
profiles the ranks and plans. Then one model is trained twice from one seed: by the even plan, as
DDP, FSDP and DeepSpeed would cut the batch, and by the planned one, at the same stage. The two take
turns, so what the machine does besides hits both alike. Global batches, learning rate and loss
curve are the same; only the time differs.

What was measured, decided and seen ends in a folder: `report.html`, `run.json` and pictures.
"""

from __future__ import annotations

import argparse
import json
import math
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
from neighbours import measure_in_turns, neighbours, own_part
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from speed import Speed, measure_speeds, sum_of_speeds
from text import ByteWindows, load_text
from torch.utils.data import DataLoader, default_collate
from train_llama import Batch, epochs, progress, warmup_then_cosine

import poplar
from poplar import ClusterProfile, HeteroBatchSampler, HeteroZeroOptimizer, Plan, report

RANKS = 4
SEED = 0
CONFIG = SIZES["demo"]
TEXT_BYTES = 8_000_000
GLOBAL_BATCH = 72
"""Makes a step take about a second: among four processes on two cores, communication costs tens of
milliseconds."""
OPTIMIZER = {"lr": 2e-3, "betas": (0.9, 0.95)}
"""Of `torch.optim.AdamW`, for measuring and for training."""
EXAMPLE_SAMPLES = 8
LARGEST_MEASURED_BATCH = 16
"""Samples per second hardly change beyond it on a CPU."""
ROUND_STEPS = 5
"""Steps that one run takes before it is the other's turn."""
NEIGHBOUR_ROUNDS = 5
"""How often each plan near the chosen one has its turn."""
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
    start = time.perf_counter()
    profile, planned = profile_and_plan(text, options)
    console.print(f"profiled and planned in {time.perf_counter() - start:.0f} s")
    even = poplar.search(profile, global_batch=GLOBAL_BATCH, stages=(planned.stage,), policy="even")
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
    near = measure_neighbours(runs[-1], profile, options.neighbours, console)
    record = report.RunRecord(
        title="A small Llama on four unequal CPU ranks",
        profile=profile,
        runs=tuple(run.told() for run in runs),
        sum_of_speeds=sum_of_speeds(before, after),
        neighbours=near,
    )
    if rank == 0:
        keep(console, record, options.output)
        summarize(console, record)


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
    spans: list[list[report.Span]] = field(default_factory=list)
    """What this rank did in each step."""

    def __post_init__(self) -> None:
        torch.manual_seed(SEED)
        self.optimizer = HeteroZeroOptimizer(
            Llama(CONFIG), torch.optim.AdamW, plan=self.plan, **OPTIMIZER
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
        with self.optimizer.trace() as spans:
            result = self.optimizer.train_step(next_byte_loss, batch, max_norm=1.0)
        self.scheduler.step()
        self.seconds.append(time.perf_counter() - start)
        self.losses.append(float(result.loss))
        self.spans.append(spans)

    def told(self) -> report.Run:
        """What all ranks saw of this run, its median step traced. Every rank must call it."""
        seconds = slowest(self.seconds)
        typical = seconds.index(statistics.median_low(seconds)) + 1
        spans: list[list[report.Span]] = [[]] * RANKS
        dist.all_gather_object(spans, self.spans[typical])
        return report.Run(
            name=self.name,
            plan=self.plan,
            losses=tuple(self.losses),
            step_seconds=tuple(seconds),
            predicted_step_seconds=(self.plan.prediction or {}).get("step_seconds"),
            spans=tuple(map(tuple, spans)),
        )


def turns(runs: Sequence[Run], steps: int) -> Iterator[Run]:
    """Who takes the next step: rounds of a few steps each; who began a round ends the next."""
    order = list(runs)
    for start in range(0, steps, ROUND_STEPS):
        for run in order:
            dist.barrier()
            for _ in range(min(ROUND_STEPS, steps - start)):
                yield run
        order.reverse()


def profile_and_plan(text: ByteWindows, options: argparse.Namespace) -> tuple[ClusterProfile, Plan]:
    """Measure the ranks now, whatever was measured before, and decide. Every rank must call it."""
    torch.manual_seed(SEED)
    tuned = poplar.tune(
        Llama(CONFIG),
        next_byte_loss,
        samples_of(text, range(EXAMPLE_SAMPLES)),
        global_batch=GLOBAL_BATCH,
        stage=options.stage,
        seconds=options.profile_seconds,
        cache=False,
        **OPTIMIZER,
    )
    return tuned.profile, tuned.plan


def samples_of(text: ByteWindows, indices: range) -> Batch:
    return default_collate([text[index] for index in indices])


def measure_neighbours(
    run: Run, profile: ClusterProfile, count: int, console: Console
) -> tuple[report.Neighbour, ...] | None:
    """The chosen plan and up to `count` near it, in turns. Every rank must call it."""
    if not count:
        return None
    plans = [run.plan, *neighbours(run.plan, profile, count)]

    def one_step(plan: Plan) -> None:
        batch = own_part(plan, dist.get_rank(), lambda indices: samples_of(run.text, indices))
        run.optimizer.train_step(next_byte_loss, batch, max_norm=1.0)

    with progress(console, NEIGHBOUR_ROUNDS * len(plans)) as advance:
        seconds = measure_in_turns(
            run.optimizer, plans, one_step, rounds=NEIGHBOUR_ROUNDS, tell=advance
        )
    return tuple(
        report.Neighbour(plan=plan, step_seconds=each)
        for plan, each in zip(plans, seconds, strict=True)
    )


def measure(text: ByteWindows, seconds: float) -> tuple[Speed, ...]:
    """Every rank's speed in plain passes, while all of them run."""
    return measure_speeds(
        Llama(CONFIG),
        next_byte_loss,
        lambda samples: samples_of(text, range(samples)),
        max_batch=LARGEST_MEASURED_BATCH,
        seconds=seconds,
    )


def slowest(seconds: Sequence[float]) -> list[float]:
    """Seconds of each step on the rank that took longest, without the first step's preparations."""
    steps = torch.tensor(seconds[1:], dtype=torch.float64)
    dist.all_reduce(steps, op=dist.ReduceOp.MAX)
    return steps.tolist()


def keep(console: Console, record: report.RunRecord, folder: Path) -> None:
    """Write down what happened: for people, for programs, and pictures for slides."""
    folder.mkdir(parents=True, exist_ok=True)
    record.to_json(folder / "run.json")
    try:
        report.write_report(record, folder / "report.html", folder)
    except ImportError as error:
        console.print(f"no report.html: {error}")
    else:
        console.print(f"{folder / 'report.html'} tells it all; the pictures are beside it\n")


def summarize(console: Console, record: report.RunRecord) -> None:
    """A table for people; the last line is for programs."""
    console.print(table_of(record))
    even, planned = record.runs
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
    ratio = best_neighbour_ratio(record)
    if ratio is not None:
        console.print(
            f"the chosen plan is {100 * ratio:.1f} % as fast as the best of "
            f"{len(record.neighbours or ()) - 1} plans near it"
        )
    total = record.sum_of_speeds or math.nan
    speedup = planned.samples_per_second / even.samples_per_second
    of_sum = planned.samples_per_second / total
    console.print(
        f"speed-up {speedup:.2f}x · {100 * of_sum:.0f} % of the sum of speeds, "
        f"{total:.1f} samples/s"
    )
    outcome = {
        "stage": planned.plan.stage,
        "even_samples_per_second": round(even.samples_per_second, 2),
        "planned_samples_per_second": round(planned.samples_per_second, 2),
        "speedup": round(speedup, 3),
        "fraction_of_sum_of_speeds": round(of_sum, 3),
        "predicted_step_seconds": rounded(planned.predicted_step_seconds),
        "measured_step_seconds": rounded(planned.measured_step_seconds),
        "max_loss_difference": max(differences),
    }
    if ratio is not None:
        outcome["best_neighbour_ratio"] = rounded(ratio)
    print(json.dumps(outcome), flush=True)
    if not one_curve:
        raise RuntimeError(
            f"the loss curves differ by {max(differences):.3g}, more than {ONE_CURVE}"
        )


def table_of(record: report.RunRecord) -> Table:
    stage = record.chosen.plan.stage
    table = Table(
        title=f"stage {stage}, seconds of a step of {GLOBAL_BATCH} samples",
        title_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    table.add_column("plan", no_wrap=True)
    headings = ("samples", "predicted", "p20", "p50", "p80", "samples/s", "of sum")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for run in record.runs:
        low, *_, high = statistics.quantiles(run.step_seconds, n=5)
        predicted = run.predicted_step_seconds
        fraction = run.samples_per_second / (record.sum_of_speeds or math.nan)
        table.add_row(
            run.name,
            " ".join(str(run.plan.samples(rank)) for rank in range(RANKS)),
            "–" if predicted is None else f"{predicted:.3f}",
            *(f"{value:.3f}" for value in (low, run.measured_step_seconds, high)),
            f"{run.samples_per_second:.1f}",
            f"{100 * fraction:.0f} %",
        )
    return table


def best_neighbour_ratio(record: report.RunRecord) -> float | None:
    """Speed of the chosen plan over that of its best neighbour; above 1 it is the best of all."""
    if record.neighbours is None or len(record.neighbours) < 2:
        return None
    chosen, *others = record.neighbours
    return min(near.step_seconds for near in others) / chosen.step_seconds


def rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 4)


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


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Profile unequal CPU ranks, plan, and train by an even plan and by that one.",
    )
    parser.add_argument(
        "--stage", choices=("auto", "0", "1", "2", "3"), default="auto", help="ZeRO stage"
    )
    parser.add_argument(
        "--steps", type=int, help="optimizer steps by each plan (default: 30, quick: 8)"
    )
    parser.add_argument("--quick", action="store_true", help="few steps: a first impression")
    parser.add_argument(
        "--neighbours",
        type=int,
        default=0,
        metavar="N",
        help="measure N plans near the chosen one too (default: 0; 20 take about 5 minutes)",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("demo"),
        metavar="FOLDER",
        help="for report.html, run.json and pictures (default: demo)",
    )
    options = parser.parse_args(arguments)
    options.stage = "auto" if options.stage == "auto" else int(options.stage)
    options.steps = (8 if options.quick else 30) if options.steps is None else options.steps
    if options.steps < 3:
        parser.error(f"--steps must be at least 3 to give a median, got {options.steps}")
    if options.neighbours < 0:
        parser.error(f"--neighbours must be 0 or more, got {options.neighbours}")
    options.measure_seconds = 4.0 if options.quick else 10.0
    options.profile_seconds = 15.0 if options.quick else 45.0
    return options


if __name__ == "__main__":
    main()
