"""Even plan against Poplar's plan on four unequal CPU ranks: `make demo`.

Rank 0 has a CPU core to itself, the other three ranks share a second one. Poplar profiles the
ranks and plans. Then one model trains twice from the same seed, under the even plan and under
Poplar's, at the same ZeRO stage and in alternating turns. Writes `report.html` and `run.json`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from launch import LaunchError, run_ranks
from llama import SIZES, Llama, next_byte_loss, warmup_then_cosine
from other_load import OtherLoad, describe, warnings_of
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from text import ByteWindows, load_text
from torch import Tensor
from torch.utils.data import DataLoader, default_collate

import poplar
from poplar import ClusterProfile, HeteroBatchSampler, HeteroZeroOptimizer, Plan, monitoring
from poplar.pair.speed import Speed, measure_speeds, sum_of_speeds

Batch = dict[str, Tensor]

RANKS = 4
SEED = 0
CONFIG = replace(SIZES["demo"], context=128)
"""Short windows of text, so that the demo takes two minutes on two cores."""
TEXT_BYTES = 8_000_000
GLOBAL_BATCH = 72
"""Large enough that a step takes about a second and communication is a small part of it."""
OPTIMIZER = {"lr": 2e-3, "betas": (0.9, 0.95)}
"""Arguments of `torch.optim.AdamW`, for profiling and for training."""
EXAMPLE_SAMPLES = 8
LARGEST_MEASURED_BATCH = 16
"""On a CPU, larger batches hardly change the samples per second."""
ROUND_STEPS = 5
"""Steps of one plan before the other plan's turn."""
MAX_LOSS_DIFFERENCE = 1e-2
"""In nats. A larger difference means that the two plans did not train the same model."""


def main() -> None:
    options = parse_options()
    # glibc returns freed memory to the system, and page faults make timings noisy. Keep it.
    os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(2**30))
    os.environ.setdefault("MALLOC_TRIM_THRESHOLD_", str(2**31 - 1))
    cores = unequal_cores()
    print(describe_cores(cores), flush=True)
    try:
        run_ranks(compare, RANKS, options, cores=cores)
    except LaunchError as failure:
        print(failure, file=sys.stderr)
        raise SystemExit(1) from None


def compare(options: argparse.Namespace) -> None:
    """Train under both plans in turns and report. Every rank must call it."""
    console = Console(quiet=dist.get_rank() != 0, soft_wrap=True, highlight=False)
    text, _ = load_text(CONFIG.context, limit=TEXT_BYTES)
    before = measure(text, options.measure_seconds)
    report_speeds(console, before)

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
    load = OtherLoad()
    train_in_turns(runs, options.steps, console)
    other_load = load.fraction()

    after = measure(text, options.measure_seconds)
    record = monitoring.RunRecord(
        title="A small Llama on four unequal CPU ranks",
        profile=profile,
        runs=tuple(run.to_report() for run in runs),
        sum_of_speeds=sum_of_speeds(before, after),
    )
    if dist.get_rank() == 0:
        write_outputs(console, record, options.output)
        summarize(console, record, warnings_of(other_load, before, after, planned))


def report_speeds(console: Console, speeds: Sequence[Speed]) -> None:
    """Print every rank's speed, and a warning if the ranks are not as unequal as they should be."""
    values = [speed.samples_per_second for speed in speeds]
    listed = ", ".join(f"{value:.1f}" for value in values)
    console.print(f"measured speeds: {listed} samples/s")
    if values[0] < 2 * max(values[1:]):
        console.print("rank 0 is not twice as fast as the others; other programs may use its core")


def train_in_turns(runs: Sequence[Run], steps: int, console: Console) -> None:
    """Run all steps of all plans, a few at a time. Every rank must call it."""
    with progress(console, len(runs) * steps) as advance:
        for run in turns(runs, steps):
            run.one_step()
            advance(f"{run.name}: loss {run.losses[-1]:.2f}")


@contextmanager
def progress(console: Console, total: int) -> Iterator[Callable[[str], None]]:
    """Yield a function to call with a message after each of `total` steps.

    A terminal shows a bar with the remaining time, other consoles ten lines, a quiet one nothing.
    """
    columns = (
        MofNCompleteColumn(),
        BarColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    hidden = console.quiet or not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=hidden) as bar:
        task = bar.add_task("", total=total)

        def advance(text: str) -> None:
            bar.update(task, advance=1, description=text)
            done = round(bar.tasks[task].completed)
            if not console.is_terminal and 10 * done // total > 10 * (done - 1) // total:
                console.print(f"{done}/{total} {text}")

        yield advance


@dataclass
class Run:
    """One model in training under one plan, and its measurements."""

    name: str
    plan: Plan
    text: ByteWindows
    steps: int
    losses: list[float] = field(default_factory=list)
    """Loss of the global batch, one per step."""
    seconds: list[float] = field(default_factory=list)
    """Seconds per step on this rank, with data loading."""
    spans: list[list[monitoring.Span]] = field(default_factory=list)
    """Trace of this rank, one list per step."""

    def __post_init__(self) -> None:
        torch.manual_seed(SEED)
        self.optimizer = HeteroZeroOptimizer(
            Llama(CONFIG), torch.optim.AdamW, plan=self.plan, **OPTIMIZER
        )
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, warmup_then_cosine(max(1, self.steps // 10), self.steps)
        )
        sampler = HeteroBatchSampler(len(self.text), self.plan, seed=SEED)
        self.batches = epochs(DataLoader(self.text, batch_sampler=sampler))

    def one_step(self) -> None:
        """Run one optimizer step. The global batch is the same under every plan."""
        start = time.perf_counter()
        batch: Batch = next(self.batches)
        with self.optimizer.trace() as spans:
            result = self.optimizer.train_step(next_byte_loss, batch, max_norm=1.0)
        self.scheduler.step()
        self.seconds.append(time.perf_counter() - start)
        self.losses.append(float(result.loss))
        self.spans.append(spans)

    def to_report(self) -> monitoring.Run:
        """Results of all ranks, with the trace of the median step. Every rank must call it."""
        seconds = slowest_rank(self.seconds)
        typical = seconds.index(statistics.median_low(seconds)) + 1
        spans: list[list[monitoring.Span]] = [[]] * RANKS
        dist.all_gather_object(spans, self.spans[typical])
        return monitoring.Run(
            name=self.name,
            plan=self.plan,
            losses=tuple(self.losses),
            step_seconds=tuple(seconds),
            predicted_step_seconds=(self.plan.prediction or {}).get("step_seconds"),
            spans=tuple(map(tuple, spans)),
        )


def epochs(loader: DataLoader[Batch]) -> Iterator[Batch]:
    """This rank's part of each global batch, without end."""
    while True:
        yield from loader


def turns(runs: Sequence[Run], steps: int) -> Iterator[Run]:
    """The run of each next step: rounds of a few steps, in alternating order."""
    order = list(runs)
    for start in range(0, steps, ROUND_STEPS):
        for run in order:
            dist.barrier()
            for _ in range(min(ROUND_STEPS, steps - start)):
                yield run
        order.reverse()


def profile_and_plan(text: ByteWindows, options: argparse.Namespace) -> tuple[ClusterProfile, Plan]:
    """Profile the ranks without the cache, and plan. Every rank must call it."""
    torch.manual_seed(SEED)
    tuned = poplar.tune(
        Llama(CONFIG),
        next_byte_loss,
        samples_of(text, range(EXAMPLE_SAMPLES)),
        global_batch=GLOBAL_BATCH,
        stage=options.stage,
        seconds=options.profile_seconds,
        cache=False,
        leave_out="never",
        **OPTIMIZER,
    )
    return tuned.profile, tuned.plan


def samples_of(text: ByteWindows, indices: range) -> Batch:
    return default_collate([text[index] for index in indices])


def measure(text: ByteWindows, seconds: float) -> tuple[Speed, ...]:
    """Every rank's speed in plain PyTorch passes, all ranks at once."""
    return measure_speeds(
        Llama(CONFIG),
        next_byte_loss,
        lambda samples: samples_of(text, range(samples)),
        max_batch=LARGEST_MEASURED_BATCH,
        seconds=seconds,
    )


def slowest_rank(seconds: Sequence[float]) -> list[float]:
    """Seconds of each step on the slowest rank, without the first step. Every rank must call it."""
    steps = torch.tensor(seconds[1:], dtype=torch.float64)
    dist.all_reduce(steps, op=dist.ReduceOp.MAX)
    return steps.tolist()


def write_outputs(console: Console, record: monitoring.RunRecord, folder: Path) -> None:
    """Write `run.json` and `report.html`."""
    folder.mkdir(parents=True, exist_ok=True)
    record.to_json(folder / "run.json")
    try:
        monitoring.write_report(record, folder / "report.html")
    except ImportError as error:
        console.print(f"no report.html: {error}")
    else:
        console.print(f"report: {folder / 'report.html'}\n")


def summarize(
    console: Console,
    record: monitoring.RunRecord,
    noise_warnings: Sequence[str] = (),
) -> None:
    """Print the results, then one line of JSON for programs.

    Args:
        console: where the text goes.
        record: of both runs.
        noise_warnings: of the machine.

    Raises:
        RuntimeError: the two loss curves differ by more than rounding.
    """
    console.print(table_of(record))
    even, planned = record.runs
    differences = [abs(a - b) for a, b in zip(even.losses, planned.losses, strict=True)]
    for step in (1, (len(differences) + 1) // 2, len(differences)):
        console.print(
            f"step {step} · loss {even.losses[step - 1]:.6f} even, "
            f"{planned.losses[step - 1]:.6f} planned"
        )
    console.print(
        f"the loss curves differ by at most {max(differences):.2g} over {len(differences)} steps"
    )
    outcome = outcome_of(record, max(differences), noise_warnings)
    console.print(
        f"speed-up {outcome['speedup']:.2f}x · "
        f"{100 * outcome['fraction_of_sum_of_speeds']:.0f} % of the sum of speeds, "
        f"{record.sum_of_speeds or math.nan:.1f} samples/s"
    )
    console.print(describe(noise_warnings))
    print(json.dumps(outcome), flush=True)
    if max(differences) > MAX_LOSS_DIFFERENCE:
        raise RuntimeError(
            f"the loss curves differ by {max(differences):.3g}, more than {MAX_LOSS_DIFFERENCE}"
        )


def outcome_of(
    record: monitoring.RunRecord, max_loss_difference: float, noise_warnings: Sequence[str]
) -> dict[str, Any]:
    """The results in JSON types."""
    even, planned = record.runs
    total = record.sum_of_speeds or math.nan
    return {
        "stage": planned.plan.stage,
        "even_samples_per_second": round(even.samples_per_second, 2),
        "planned_samples_per_second": round(planned.samples_per_second, 2),
        "speedup": round(planned.samples_per_second / even.samples_per_second, 3),
        "fraction_of_sum_of_speeds": round(planned.samples_per_second / total, 3),
        "predicted_step_seconds": rounded(planned.predicted_step_seconds),
        "predicted_step_interval": (planned.plan.prediction or {}).get("step_interval"),
        "measured_step_seconds": rounded(planned.measured_step_seconds),
        "max_loss_difference": max_loss_difference,
        "noise": list(noise_warnings),
    }


def table_of(record: monitoring.RunRecord) -> Table:
    """One line per plan: predicted and measured seconds per step, and speeds."""
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


def rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 4)


def unequal_cores() -> tuple[int, ...]:
    """One core for rank 0 and one for all others."""
    first, *others = sorted(os.sched_getaffinity(0))
    # Two threads of one physical core slow each other down, so prefer a second core.
    siblings = _siblings(first)
    apart = [core for core in others if core not in siblings]
    second = (apart or others or [first])[0]
    return (first,) + (second,) * (RANKS - 1)


def _siblings(core: int) -> set[int]:
    """Logical cores of the same physical core; Linux lists them as `0,32` or `0-1`."""
    listed = Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list")
    try:
        parts = [part.split("-") for part in listed.read_text().strip().split(",")]
        return {core for part in parts for core in range(int(part[0]), int(part[-1]) + 1)}
    except (OSError, ValueError):
        return set()


def describe_cores(cores: tuple[int, ...]) -> str:
    if cores[0] == cores[1]:
        return f"{RANKS} ranks on the only core: expect equal speeds and no gain"
    return (
        f"{RANKS} ranks on 2 cores: rank 0 has core {cores[0]} to itself, "
        f"ranks 1 to {RANKS - 1} share core {cores[1]}"
    )


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Profile four unequal CPU ranks, plan, and compare the plan with an even one.",
    )
    parser.add_argument(
        "--stage", choices=("auto", "0", "1", "2", "3"), default="auto", help="ZeRO stage"
    )
    parser.add_argument(
        "--steps", type=int, help="optimizer steps under each plan (default: 20, with --quick 8)"
    )
    parser.add_argument("--quick", action="store_true", help="fewer steps and shorter measurements")
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("demo"),
        metavar="FOLDER",
        help="where to write report.html and run.json (default: demo)",
    )
    options = parser.parse_args(arguments)
    options.stage = "auto" if options.stage == "auto" else int(options.stage)
    options.steps = (8 if options.quick else 20) if options.steps is None else options.steps
    if options.steps < 3:
        parser.error(f"--steps must be at least 3 to give a median, got {options.steps}")
    options.measure_seconds = 4.0 if options.quick else 6.0
    options.profile_seconds = 15.0 if options.quick else 30.0
    return options


if __name__ == "__main__":
    main()
