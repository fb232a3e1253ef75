"""Plans and intervals on random clusters whose true curves are known and whose timings are noisy.

Nothing runs: passes and steps take simulated seconds on a simulated clock, and the code that times,
fits, searches and tunes is that of the package. Each cluster has 2 to 5 ranks of up to 3 kinds,
whose pass times are lines, lines with steps, or published curves, and one kind of noise, in half of
the clusters that of a host, so that all ranks are slow at the same time. All stages may be chosen.

    python benchmarks/noise.py --clusters 1000 --output rows.jsonl

`regret` is how much longer the chosen plan takes than the best plan of the true curves; `error` is
the predicted over the measured step, minus 1; `covered` says whether the measured step is inside of
the predicted interval. The measured step is the median of steps after the plan was chosen.
"""

from __future__ import annotations

import argparse
import os
import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from statistics import fmean, median, quantiles
from typing import Any
from unittest import mock

from noisy_machine import NOISES, Machine, Noise, true_cluster
from rows import Column, Kind, Row, at_least, new_parser, report

from poplar.planner.search import search
from poplar.planner.what_if import with_slower_devices
from poplar.profiler import batch_sizes, trial_runs
from poplar.tuning import autotune

LARGE = 0.05
"""Regrets above this are counted; *beyond*: those above it and half of the plan's interval."""
RUN_STEPS = 30
"""Steps of the run that a prediction is compared with."""


def simulate(seed: int) -> Row:
    """Tune one random cluster."""
    draw = random.Random(seed)
    true, kind = true_cluster(draw), NOISES[seed % len(NOISES)]
    quiet = Machine(true, [Noise(random.Random(seed), "quiet") for _ in true.devices])
    with on_clock(quiet):
        quiet.profile()
    noises = [Noise(draw, kind, profiled=quiet.clock.now) for _ in true.devices]
    if draw.random() < 0.5:
        noises = [noise.on_host_of(noises[0]) for noise in noises]
    machine = Machine(true, noises)
    batch = draw.choice((16, 24, 40, 64, 72, 100, 128))
    with on_clock(machine):
        profile = machine.profile()
        profiled_at = machine.clock.now
        request = {"global_batch": batch, "stages": machine.stages, "leave_out": "never"}
        before = search(profile, **request)
        profiled = machine.run_plan(before, steps=RUN_STEPS).step_seconds
        machine.clock.now = 0.0
        machine.measured = profile, profiled_at
        tuned = machine.tune(batch)
        took = machine.clock.now
        measured = machine.run_plan(tuned.plan, steps=RUN_STEPS).step_seconds
    usual = with_slower_devices(true, [noise.mean_level for noise in machine.noises])
    best = [search(known, preference=0.0, **request) for known in (true, usual)]
    least = min(map(machine.mean_seconds, best))
    figures: dict[str, Any] = {"seconds": took, "passes": max(map(len, tuned.plan.micro_batches))}
    for name, plan, seconds in (("profiled", before, profiled), ("tuned", tuned.plan, measured)):
        low, high = plan.prediction["step_interval"]
        figures |= {
            f"{name}_regret": machine.mean_seconds(plan) / least - 1.0,
            f"{name}_error": plan.prediction["step_seconds"] / seconds - 1.0,
            f"{name}_covered": low <= seconds <= high,
            f"{name}_width": (high - low) / 2.0 / plan.prediction["step_seconds"],
        }
    case = {"seed": seed, "noise": kind, "ranks": true.world_size}
    return Row.of("noise", case, figures, packages=())


@contextmanager
def on_clock(machine: Machine) -> Iterator[None]:
    """The package reads the clock of the machine inside."""
    with ExitStack() as stack:
        for module in (autotune, batch_sizes, trial_runs):
            stack.enter_context(mock.patch.object(module, "time", machine.clock))
        yield


def summaries(seeds: Sequence[int]) -> Iterator[Row]:
    """One row for each noise and one for all, before and after trial runs."""
    with ProcessPoolExecutor(min(len(seeds), os.cpu_count() or 1)) as pool:
        rows = list(pool.map(simulate, seeds, chunksize=4))
    for kind in (*NOISES, "any"):
        own = [row for row in rows if kind in ("any", row["noise"])]
        if len(own) < 2:
            continue
        for name in ("profiled", "tuned"):
            regrets = [row[f"{name}_regret"] for row in own]
            errors = [abs(row[f"{name}_error"]) for row in own]
            yield Row.of(
                "noise",
                {"noise": kind, "plan": name},
                {
                    "clusters": len(own),
                    "median": median(regrets),
                    "p90": p90(regrets),
                    "worst": max(regrets),
                    "above": fmean(regret > LARGE for regret in regrets),
                    "beyond": fmean(
                        regret - row[f"{name}_width"] > LARGE
                        for regret, row in zip(regrets, own, strict=True)
                    ),
                    "error": median(errors),
                    "error_p90": p90(errors),
                    "covered": fmean(row[f"{name}_covered"] for row in own),
                    "width": median(row[f"{name}_width"] for row in own),
                    "seconds": median(row["seconds"] for row in own),
                },
                packages=(),
            )


def p90(values: Sequence[float]) -> float:
    """The 90th percentile."""
    return quantiles(values, n=10, method="inclusive")[8]


COLUMNS = (
    Column("noise", "noise"),
    Column("plan", "plan"),
    Column("clusters", "clusters"),
    Column("regret", "median", "{:.1%}"),
    Column("p90", "p90", "{:.1%}"),
    Column("worst", "worst", "{:.1%}"),
    Column("above 5 %", "above", "{:.1%}"),
    Column("beyond the interval", "beyond", "{:.1%}"),
    Column("error", "error", "{:.1%}"),
    Column("p90 error", "error_p90", "{:.1%}"),
    Column("covered", "covered", "{:.0%}"),
    Column("half-width", "width", "{:.1%}"),
    Column("seconds", "seconds", "{:.0f}"),
)


def main() -> None:
    """Simulate clusters, or show saved rows."""
    options = parse_options()
    seeds = range(options.first, options.first + options.clusters)
    report(options, summaries(seeds), Kind("noise", COLUMNS))


def parse_options() -> argparse.Namespace:
    """The command line."""
    parser = new_parser(__doc__)
    parser.add_argument("--clusters", type=at_least(2), default=1000, help="random clusters")
    parser.add_argument("--first", type=at_least(0), default=0, help="the first seed")
    return parser.parse_args()


if __name__ == "__main__":
    main()
