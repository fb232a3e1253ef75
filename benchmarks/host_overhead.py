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
from host.row import Row
from host.scaled_model import SHAPES
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rows import write_rows

MOST_CALLS, MOST_SECONDS = 1.5, 1.2
"""Limits for Poplar, as multiples of FSDP2."""
GIB = 1 << 30


def main() -> None:
    """Measure all cases, print a table and what misses a limit, append rows."""
    options = parse_options()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # on fake ranks values mean nothing; denormal ones are slow
    console = Console(width=None if sys.stdout.isatty() else 150, highlight=False)
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
    console.print(table(pairs))
    for line in verdict(pairs):
        console.print(line, soft_wrap=True)


def table(pairs: Sequence[tuple[Row, Row]]) -> Table:
    """One line per case; bytes are Poplar's, as counted and as modelled."""
    columns = (
        *("case", "calls", "FSDP2", "ratio", "CPU ms", "FSDP2", "ratio", "passes alone"),
        *("GiB gathered", "modelled", "reduced", "modelled"),
    )
    made = Table(box=SIMPLE_HEAD)
    for number, column in enumerate(columns):
        made.add_column(column, no_wrap=True, justify="right" if number else "left")
    for ours, theirs in pairs:
        assert ours.sent_bytes is not None
        sizes = [
            sizes[kind] / GIB
            for kind in ("gather", "reduce")
            for sizes in (ours.sent_bytes, ours.modelled_bytes)
        ]
        made.add_row(
            ours.case,
            str(ours.total_calls),
            str(theirs.total_calls),
            f"{calls_ratio(ours, theirs):.2f}",
            f"{1e3 * ours.p50_seconds:.1f}",
            f"{1e3 * theirs.p50_seconds:.1f}",
            f"{seconds_ratio(ours, theirs):.2f}",
            f"{1e3 * ours.passes_seconds:.1f}",
            *(f"{size:.2f}" for size in sizes),
        )
    return made


def verdict(pairs: Sequence[tuple[Row, Row]]) -> Iterator[str]:
    """A line for each case that misses a limit, then a summary."""
    missed = 0
    for ours, theirs in pairs:
        for what, ratio, limit in (
            ("collective calls", calls_ratio(ours, theirs), MOST_CALLS),
            ("CPU seconds", seconds_ratio(ours, theirs), MOST_SECONDS),
        ):
            if ratio > limit:
                missed += 1
                yield f"{ours.case}: {what} {ratio:.2f}x FSDP2, limit {limit}x"
    yield f"{2 * len(pairs) - missed} of {2 * len(pairs)} limits met"


def calls_ratio(ours: Row, theirs: Row) -> float:
    """Collective calls per pass, as a multiple of FSDP2's."""
    return ours.total_calls / theirs.total_calls


def seconds_ratio(ours: Row, theirs: Row) -> float:
    """CPU seconds per step, as a multiple of FSDP2's."""
    return ours.p50_seconds / theirs.p50_seconds


def parse_options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--models", nargs="+", choices=SHAPES, default=list(SHAPES), help="shapes (default: all)"
    )
    parser.add_argument(
        "--ranks", nargs="+", type=int, default=[8, 64], help="group sizes (default: 8 64)"
    )
    parser.add_argument(
        "--stages", nargs="+", type=int, choices=(2, 3), default=[2, 3], help="default: 2 3"
    )
    parser.add_argument("--layers", type=int, help="blocks of the models (default: all)")
    parser.add_argument("--max-norm", type=float, help="clip gradients to this norm")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each engine (default: 5)")
    parser.add_argument("--steps", type=int, default=6, help="steps in a turn (default: 6)")
    parser.add_argument(
        "--profile", type=int, default=0, metavar="N", help="print Poplar's N costliest functions"
    )
    parser.add_argument("--quick", action="store_true", help="the 1.1B shape, 2 rounds")
    parser.add_argument("--output", type=Path, metavar="FILE", help="append the rows as JSON lines")
    options = parser.parse_args()
    if options.quick:
        options.models, options.rounds = ["llama-1.1b"], 2
    for name in ("rounds", "steps"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(options, name)}")
    if min(options.ranks) < 2:
        parser.error(f"--ranks must be at least 2, got {options.ranks}")
    return options


if __name__ == "__main__":
    main()
