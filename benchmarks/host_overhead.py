"""What a training step costs the host: Poplar beside FSDP2 on 8 and 64 fake ranks in one process.

Collective calls per pass, CPU seconds per step (medians, in turns) and bytes sent per rank, for the
modules of a Llama whose widths are scaled down so that tensor data costs almost nothing.

    python benchmarks/host_overhead.py --quick
    python benchmarks/host_overhead.py --models llama-7b --ranks 64 --stages 3 --profile 40
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
from host.measure import Case, measure
from host.scaled_model import SHAPES
from rows import (
    Row,
    Target,
    at_least,
    new_console,
    new_parser,
    print_targets,
    text_table,
    write_rows,
)

MOST_CALLS, MOST_SECONDS = 1.5, 1.2
"""Limits for Poplar, as multiples of FSDP2."""
GIB = 1 << 30
HEADINGS = (
    *("case", "calls", "FSDP2", "ratio", "CPU ms", "FSDP2", "ratio", "passes alone"),
    *("GiB gathered", "modelled", "reduced", "modelled"),
)
Pair = tuple[Row, Row]
"""Poplar's row and FSDP2's."""


def main() -> None:
    """Measure all cases, print a table and the targets, append rows."""
    options = parse_options()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # on fake ranks values mean nothing; denormal ones are slow
    console = new_console()
    pairs = []
    for name in options.models:
        shape = replace(SHAPES[name], layers=options.layers)
        for ranks in options.ranks:
            for stage in options.stages:
                case = Case(shape=shape, ranks=ranks, stage=stage, max_norm=options.max_norm)
                pairs.append(
                    measure(
                        case, rounds=options.rounds, steps=options.steps, profile=options.profile
                    )
                )
    if options.output:
        write_rows(options.output, [row for pair in pairs for row in pair])
    console.print(text_table(HEADINGS, map(cells, pairs)))
    print_targets(targets(pairs), console)


def cells(pair: Pair) -> list[str]:
    """The line of one case; bytes are Poplar's, as counted and as modelled."""
    ours, theirs = pair
    sizes = [
        row_sizes[kind] / GIB
        for kind in ("gather", "reduce")
        for row_sizes in (ours["sent_bytes"], ours["modelled_bytes"])
    ]
    calls, seconds = "total_calls", "p50_seconds"
    return [
        case_of(ours),
        *(str(row[calls]) for row in pair),
        f"{ours[calls] / theirs[calls]:.2f}",
        *(f"{1e3 * row[seconds]:.1f}" for row in pair),
        f"{ours[seconds] / theirs[seconds]:.2f}",
        f"{1e3 * ours['passes_seconds']:.1f}",
        *(f"{size:.2f}" for size in sizes),
    ]


def case_of(row: Row) -> str:
    """What both engines ran."""
    return f"{row['model']}, {row['ranks']} ranks, stage {row['stage']}"


def targets(pairs: Sequence[Pair]) -> Iterator[Target]:
    """Poplar's collective calls and CPU seconds of a step, as multiples of FSDP2's."""
    for ours, theirs in pairs:
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
    parser.add_argument(
        "--profile", type=int, default=0, metavar="N", help="print Poplar's N costliest functions"
    )
    options = parser.parse_args()
    if options.quick:
        options.models, options.rounds = ["llama-1.1b"], 2
    return options


if __name__ == "__main__":
    main()
