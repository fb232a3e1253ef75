"""The demo several times, every second time beside another program that uses the cores at random.

    python benchmarks/demo_runs.py --output rows.jsonl
    python benchmarks/demo_runs.py --show rows.jsonl

Each run is `examples/demo.py` in processes of its own. The load computes on one of the cores for a
few seconds, pauses, and goes on with a core that may be another one. The targets are what a reader
of the demo relies on: the plan changes no loss, it is never slower than the even plan, the
prediction is in its interval, and "noisy" is said when the machine is.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from rows import Column, Kind, Row, Target, at_least, new_parser, report

BENCHMARK = "demo"
DEMO = Path(__file__).resolve().parent.parent / "examples" / "demo.py"
LONGEST = 150.0
"""Seconds from the start of the demo to its page."""
MOST_DIFFERENCE = 1e-5
"""Between the losses of the two plans, in nats: rounding."""
COVERED = 0.8
"""Part of the measured steps in the interval of their prediction."""
BUSY, IDLE = (1.0, 8.0), (1.0, 8.0)
"""Seconds for which the load computes and pauses."""


def measure(number: int, arguments: Sequence[str]) -> Row:
    """Run the demo once; odd numbers are run beside a load."""
    case = {"run": number, "load": bool(number % 2), "arguments": " ".join(arguments)}
    with tempfile.TemporaryDirectory() as folder, load(number) if case["load"] else nullcontext():
        began = time.perf_counter()
        command = [sys.executable, str(DEMO), "--output", folder, *arguments]
        finished = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        seconds = time.perf_counter() - began
    figures: dict[str, Any] = json.loads(finished.stdout.splitlines()[-1])
    return Row.of(BENCHMARK, case, {"seconds": seconds, **figures})


@contextmanager
def load(seed: int) -> Iterator[None]:
    """Another program on the cores, at random times."""
    process = multiprocessing.get_context("spawn").Process(
        target=compute, args=(seed,), daemon=True
    )
    process.start()
    try:
        yield
    finally:
        process.terminate()
        process.join()


def compute(seed: int) -> None:
    """Compute on one core after the other, with pauses, until the process is ended."""
    draw, cores = random.Random(seed), sorted(os.sched_getaffinity(0))
    while True:
        os.sched_setaffinity(0, {draw.choice(cores)})
        ends = time.perf_counter() + draw.uniform(*BUSY)
        while time.perf_counter() < ends:
            sum(range(10_000))
        time.sleep(draw.uniform(*IDLE))


def is_covered(row: Row) -> bool:
    """Whether the measured step is in the interval of the prediction."""
    low, high = row["predicted_step_interval"]
    return bool(low <= row["measured_step_seconds"] <= high)


def targets(rows: Sequence[Row]) -> Iterator[Target]:
    """What a reader of the demo relies on."""
    case = f"{len(rows)} runs"

    def worst(value: Any, *, wanted: float, what: str) -> Target:
        return Target(case=case, what=what, value=value, wanted=wanted, at_most=True)

    yield worst(
        max(row["max_loss_difference"] for row in rows),
        wanted=MOST_DIFFERENCE,
        what="largest difference of losses",
    )
    yield worst(max(row["seconds"] for row in rows), wanted=LONGEST, what="seconds until the page")
    yield Target(
        case=case, what="least speed-up", value=min(row["speedup"] for row in rows), wanted=1.0
    )
    yield Target(
        case=case,
        what="steps in the predicted interval",
        value=sum(map(is_covered, rows)) / len(rows),
        wanted=COVERED,
    )
    yield Target(
        case=case,
        what='"noisy" was said of a machine with load, and only then',
        value=sum(bool(row["noise"]) == row["load"] for row in rows) / len(rows),
        wanted=1.0,
    )


COLUMNS = (
    Column("run", "run"),
    Column("load", lambda row: "yes" if row["load"] else "no"),
    Column("seconds", "seconds", "{:.0f}"),
    Column("stage", "stage"),
    Column("even, samples/s", "even_samples_per_second", "{:.1f}"),
    Column("planned", "planned_samples_per_second", "{:.1f}"),
    Column("speed-up", "speedup", "{:.2f}x"),
    Column("of the sum", "fraction_of_sum_of_speeds", "{:.0%}"),
    Column("predicted step", "predicted_step_seconds", "{:.3f} s"),
    Column("interval", lambda row: tuple(row["predicted_step_interval"]), "{:.3f} to {:.3f}"),
    Column("measured", "measured_step_seconds", "{:.3f}"),
    Column("difference of losses", "max_loss_difference", "{:.1e}"),
    Column("noisy", lambda row: "yes" if row["noise"] else "no"),
)


def main() -> None:
    """Measure or show, and print the table."""
    options = parse_options()
    rows = (measure(number, options.arguments) for number in range(options.runs))
    report(options, rows, Kind(BENCHMARK, COLUMNS, targets, "The demo on four CPU ranks"))


def parse_options() -> argparse.Namespace:
    """The options of this script; others are those of the demo."""
    parser = new_parser(__doc__)
    parser.add_argument("--runs", type=at_least(1), default=10, help="of the demo")
    options, options.arguments = parser.parse_known_args()
    return options


if __name__ == "__main__":
    main()
