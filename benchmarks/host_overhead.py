"""What a training step costs the host: Poplar beside FSDP2 on 8 and 64 fake ranks in one process.

Collective calls per pass, CPU seconds per step (medians, in turns) and bytes sent per rank, for the
modules of a Llama whose widths are scaled down so that tensor data costs almost nothing.

    python benchmarks/host_overhead.py --quick
    python benchmarks/host_overhead.py --models llama-7b --ranks 64 --stages 3
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
from host.measure import Case, measure
from host.scaled_model import SHAPES
from rows import Column, Kind, Row, Target, at_least, new_parser, report

MOST_CALLS, MOST_SECONDS = 1.5, 1.2
"""Limits for Poplar, as multiples of FSDP2."""
GIB = 1 << 30


def main() -> None:
    """Measure all cases, or show saved rows."""
    options = parse_options()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # on fake ranks values mean nothing; denormal ones are slow
    report(options, measure_all(options), Kind("host_overhead", COLUMNS, targets))


def measure_all(options: argparse.Namespace) -> Iterator[Row]:
    """Poplar's row and FSDP2's of each case."""
    for name, ranks, stage in product(options.models, options.ranks, options.stages):
        shape = replace(SHAPES[name], layers=options.layers)
        case = Case(shape=shape, ranks=ranks, stage=stage, max_norm=options.max_norm)
        yield from measure(case, rounds=options.rounds, steps=options.steps)


def case_of(row: Row) -> str:
    """What both engines ran."""
    return f"{row['model']}, {row['ranks']} ranks, stage {row['stage']}"


def _gib(figure: str, kind: str, row: Row) -> float | None:
    return row[figure] and row[figure][kind] / GIB


COLUMNS = (
    Column("case", case_of),
    Column("engine", "provider"),
    Column("calls", "total_calls"),
    Column("CPU ms", lambda row: 1e3 * row["p50_seconds"], "{:.1f}"),
    Column("passes alone", lambda row: 1e3 * row["passes_seconds"], "{:.1f}"),
    Column("GiB gathered", partial(_gib, "sent_bytes", "gather"), "{:.2f}"),
    Column("modelled", partial(_gib, "modelled_bytes", "gather"), "{:.2f}"),
    Column("GiB reduced", partial(_gib, "sent_bytes", "reduce"), "{:.2f}"),
    Column("modelled", partial(_gib, "modelled_bytes", "reduce"), "{:.2f}"),
)


def targets(rows: Sequence[Row]) -> Iterator[Target]:
    """Poplar's collective calls and CPU seconds of a step, as multiples of FSDP2's."""
    by_case: dict[str, dict[str, Row]] = {}
    for row in rows:
        same = {name: value for name, value in row.case.items() if name != "provider"}
        by_case.setdefault(str(same), {})[row["provider"]] = row
    for both in by_case.values():
        if not {"poplar", "fsdp2"} <= both.keys():
            continue
        ours, theirs = both["poplar"], both["fsdp2"]
        for what, name, most in (
            ("collective calls over FSDP2's", "total_calls", MOST_CALLS),
            ("CPU seconds over FSDP2's", "p50_seconds", MOST_SECONDS),
        ):
            ratio = ours[name] / theirs[name]
            yield Target(case=case_of(ours), what=what, value=ratio, wanted=most, at_most=True)


def parse_options() -> argparse.Namespace:
    """Parse the command line."""
    parser = new_parser(__doc__, rounds=5, quick="the 1.1B shape, 2 rounds")
    several = {"nargs": "+"}
    parser.add_argument("--models", **several, choices=SHAPES, default=list(SHAPES), help="shapes")
    parser.add_argument("--ranks", **several, type=at_least(2), default=[8, 64], help="group sizes")
    parser.add_argument(
        "--stages", **several, type=int, choices=(2, 3), default=[2, 3], help="stages"
    )
    parser.add_argument("--layers", type=int, help="blocks of the models, instead of all")
    parser.add_argument("--max-norm", type=float, help="clip gradients to this norm")
    parser.add_argument("--steps", type=at_least(1), default=6, help="steps in a turn")
    options = parser.parse_args()
    if options.quick:
        options.models, options.rounds = ["llama-1.1b"], 2
    return options


if __name__ == "__main__":
    main()
