"""Poplar's kernels against what torch users launch: pack, reduce, update, and the chain of them.

    python benchmarks/kernels.py --output rows.jsonl --plot kernels.png

On the CPU with torch's own threads, or on a GPU (`--device cuda`; with `POPLAR_OPS=triton` by
Triton's kernels). Every way's result is held against the others' before anything is timed. Ways
take turns in every round, beside a copy: figures are GB/s of the bytes that have to move at least,
percent of the copy's bandwidth, and how much faster than the usual way. How much faster goes by
the host's seconds, launches included, which is what a trainer waits for; bandwidths on CUDA go by
the device's own. In `update` optimizers of apex and DeepSpeed take part where they are installed.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import sys
import warnings
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import torch
from operators.lists import LISTS
from operators.measure import measure
from operators.peers import installed
from operators.row import Row, read_rows, rows_of, write_rows
from operators.show import draw, table_of, verdicts_table
from operators.targets import verdicts
from operators.tasks import DTYPES, OPERATIONS, tasks_of
from rich.console import Console

from poplar import ops

STATE_BYTES = 24
"""Of an element: what each optimizer of `update` holds at most, with what it needs on the way."""


def main() -> None:
    """Task after task, one in memory at a time."""
    options = parse_options()
    console = Console()
    if options.show:
        rows = read_rows(options.show)
    else:
        if options.device == "cuda" and not torch.cuda.is_available():
            sys.exit(f"torch {torch.__version__} sees no GPU here: `poplar doctor` says more")
        torch.set_num_threads(options.threads)
        # Rows name Triton: better none than those of plain PyTorch in its place.
        warnings.filterwarnings("error", message="Triton's kernels do not run on")
        console.print(ops.describe())
        rows = run(options, console)
    console.print(table_of(rows))
    found = list(verdicts(rows))
    if found:
        console.print(verdicts_table(found))
    if options.plot:
        draw(rows, options.plot)


def run(options: argparse.Namespace, console: Console) -> list[Row]:
    """Measure everything that was asked for."""
    rows: list[Row] = []
    wanted = options.peers and "update" in options.operations
    peers = installed(options.device) if wanted else []
    for name, dtype in product(options.tensors, options.dtypes):
        operations = [o for o in options.operations if fits(name, o, options.device, len(peers))]
        for make in tasks_of(operations, LISTS[name], dtype, options.device, peers):
            task = make()
            if options.verbose:
                console.print(f"{task.name}, {name}, {dtype}")
            made = rows_of(task, name, dtype, measure(task, options.rounds), options.threads)
            rows += made
            if options.output:
                write_rows(made, options.output)
            del task
            gc.collect()
            if options.device == "cuda":
                torch.cuda.empty_cache()
    return rows


def fits(name: str, operation: str, device: str, peers: int = 0) -> bool:
    """Whether it is held: a 1.1B model takes 79 GB with the three optimizers of `update`."""
    needed = STATE_BYTES * LISTS[name].numel * (3 + peers)
    if device == "cuda" and torch.cuda.mem_get_info()[0] > needed:
        return True
    return LISTS[name].numel < 500_000_000 or operation in ("pack", "reduce")


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """What to measure, and where it goes."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    several: dict[str, object] = {"nargs": "+", "metavar": "NAME"}
    parser.add_argument("--operations", choices=OPERATIONS, default=OPERATIONS, **several)
    parser.add_argument(
        "--tensors", choices=tuple(LISTS), default=("gpt-124m", "llama-1.1b"), **several
    )
    parser.add_argument("--dtypes", choices=tuple(DTYPES), default=tuple(DTYPES), **several)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="on cuda percent of the copy goes by the device's own seconds, ratios by the host's",
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument(
        "--no-peers",
        dest="peers",
        action="store_false",
        help="leave out apex and DeepSpeed, which may have to be compiled first",
    )
    parser.add_argument("--quick", action="store_true", help="the small list, three rounds")
    parser.add_argument("--show", type=Path, metavar="FILE", help="show saved rows")
    parser.add_argument("--output", type=Path, metavar="FILE", help="add rows as JSON lines")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw percent of the copy; takes matplotlib"
    )
    parser.add_argument("--verbose", action="store_true", help="tell what is going on")
    options = parser.parse_args(arguments)
    if options.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot takes matplotlib: pip install 'poplar-zero[report]'")
    if options.quick:
        options.tensors, options.rounds = ("small",), 3
    return options


if __name__ == "__main__":
    main()
