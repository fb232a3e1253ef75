"""Benchmark of Poplar's kernels against common torch code: pack, reduce, update, and all of them.

    python benchmarks/kernels.py --output rows.jsonl --plot kernels.png

On the CPU with torch's threads, or on a GPU (`--device cuda`; with `POPLAR_OPS=triton` for Triton's
kernels). All results are compared before anything is timed. The variants and a copy are interleaved
in every round. Figures are GB/s of the minimum bytes, percent of the copy's bandwidth, and the
speed-up over the usual torch code. Speed-ups use host seconds, launches included, because that is
what training waits for; bandwidths on CUDA use device seconds. In `update`, the optimizers of apex
and DeepSpeed take part if they are installed.
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
from operators.row import Row, read_rows, rows_of
from operators.show import draw, table_of, verdicts_table
from operators.targets import verdicts
from operators.tasks import DTYPES, OPERATIONS, tasks_of
from rich.console import Console
from rows import write_rows

from poplar import ops

STATE_BYTES = 24
"""Bytes per element that each optimizer of `update` needs at most, temporaries included."""


def main() -> None:
    """Run all tasks, with one in memory at a time."""
    options = parse_options()
    console = Console()
    if options.show:
        rows = read_rows(options.show)
    else:
        if options.device == "cuda" and not torch.cuda.is_available():
            sys.exit(f"torch {torch.__version__} sees no GPU here: `poplar doctor` says more")
        torch.set_num_threads(options.threads)
        # Rows name the provider, so plain PyTorch must not silently replace Triton.
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
    """Measure the requested tasks."""
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
                write_rows(options.output, made)
            del task
            gc.collect()
            if options.device == "cuda":
                torch.cuda.empty_cache()
    return rows


def fits(name: str, operation: str, device: str, peers: int = 0) -> bool:
    """Whether memory suffices: a 1.1B model takes 79 GB with the three optimizers of `update`."""
    needed = STATE_BYTES * LISTS[name].numel * (3 + peers)
    if device == "cuda" and torch.cuda.mem_get_info()[0] > needed:
        return True
    return LISTS[name].numel < 500_000_000 or operation in ("pack", "reduce")


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
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
        help="on cuda, percent of the copy uses device seconds and speed-ups use host seconds",
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument(
        "--no-peers",
        dest="peers",
        action="store_false",
        help="without apex and DeepSpeed, which may have to be compiled first",
    )
    parser.add_argument("--quick", action="store_true", help="the small model, three rounds")
    parser.add_argument("--show", type=Path, metavar="FILE", help="show saved rows")
    parser.add_argument("--output", type=Path, metavar="FILE", help="append the rows as JSON lines")
    parser.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        help="draw percent of the copy's bandwidth; needs matplotlib",
    )
    parser.add_argument("--verbose", action="store_true", help="print progress")
    options = parser.parse_args(arguments)
    if options.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install 'poplar-zero[report]'")
    if options.quick:
        options.tensors, options.rounds = ("small",), 3
    return options


if __name__ == "__main__":
    main()
