"""Predicted against measured peak memory of each rank, over models, stages, batches and plans.

python benchmarks/memory.py --quick
python benchmarks/memory.py --models llama --stages 3 --batches 2 --output rows.jsonl
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
import process_memory
from peaks.measure import measure_model
from peaks.subjects import SUBJECTS
from rows import Column, Kind, Row, Target, at_least, new_parser, report

MIB = 2**20
ERROR = 0.05
"""Most by which a predicted peak differs from the measured one."""
UNDER = 0.02
"""Most by which a predicted peak is below the measured one."""
COLUMNS = (
    *(Column(name, name) for name in ("model", "stage", "plan", "batch", "rank")),
    Column("predicted MiB", lambda row: row["predicted_bytes"] / MIB, "{:.0f}"),
    Column("measured", lambda row: row["measured_bytes"] / MIB, "{:.0f}"),
    Column("error", "error", "{:+.1%}"),
)


def main() -> None:
    """Measure the models one after the other, or show saved rows."""
    options = parse_options()
    process_memory.prepare_rank_processes()
    os.environ["OMP_NUM_THREADS"] = "1"
    rows = (
        row
        for model in options.models
        for row in measure_model(model, options.stages, options.batches)
    )
    report(options, rows, Kind("memory peaks", COLUMNS, targets))


def targets(rows: Sequence[Row]) -> Iterator[Target]:
    """The largest errors of each model."""
    for model in dict.fromkeys(row["model"] for row in rows):
        errors = [row["error"] for row in rows if row["model"] == model]
        for what, value, wanted in (
            ("largest error of a predicted peak", max(map(abs, errors)), ERROR),
            ("largest part of a peak that was not predicted", max(0.0, -min(errors)), UNDER),
        ):
            yield Target(case=model, what=what, value=value, wanted=wanted, at_most=True)


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = new_parser(__doc__, quick="micro-batches of 2 samples only")
    several = {"nargs": "+"}
    parser.add_argument(
        "--models", **several, choices=SUBJECTS, default=list(SUBJECTS), help="models"
    )
    parser.add_argument(
        "--stages", **several, type=int, choices=range(4), default=[0, 1, 2, 3], help="stages"
    )
    parser.add_argument(
        "--batches", **several, type=at_least(1), default=[2, 4, 8], help="micro-batches"
    )
    options = parser.parse_args(arguments)
    if options.quick:
        options.batches = [2]
    return options


if __name__ == "__main__":
    main()
