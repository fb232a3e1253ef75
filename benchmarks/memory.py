"""Memory: predicted peaks, the largest model under enforced limits, gains by recomputation.

*Peaks*: for stages, models and batches, with even and uneven plans, the memory that the plan
predicts for each rank against the peak of its process.

*Largest*: ranks have equal compute and unequal memory limits, which the kernel enforces. A
bisection over the blocks of a Llama finds the largest model with which an engine completes two
steps of AdamW in fp32, with a global batch of one sample per rank: Poplar with a plan for the
limits; and Poplar, FSDP2 and DeepSpeed with even shares.

*Recomputation*: samples per second of the plan that may recompute units on some ranks, over those
of the best plan without, on ranks of equal speed under enforced limits.

    python benchmarks/memory.py --quick
    python benchmarks/memory.py --parts largest --clusters 8:1:1:1 --output rows.jsonl
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
from memory_limits import process_memory, recomputation
from memory_limits.clusters import MIB, MemoryCluster
from memory_limits.configurations import ENGINES
from memory_limits.largest import Settings, largest_models
from memory_limits.peaks import measure_model
from memory_limits.row import LargestRow, PeakRow, RecomputationRow
from memory_limits.subjects import SUBJECTS
from memory_limits.table import largest_table, peaks_table, recomputation_table, verdicts_table
from memory_limits.targets import OVER_EVEN, verdicts
from memory_limits.task import GrowingLlama
from rich.console import Console
from rows import write_rows

PARTS = ("peaks", "largest", "recomputation")


def main() -> None:
    """Run the parts; rows are written as soon as there are any."""
    options = parse_options()
    process_memory.prepare_rank_processes()
    os.environ["OMP_NUM_THREADS"] = "1"
    console = Console(width=None if sys.stdout.isatty() else 160, soft_wrap=True, highlight=False)
    rows: list[LargestRow | PeakRow | RecomputationRow] = []
    if "peaks" in options.parts:
        for model in options.models:
            found = measure_model(model, options.stages, options.batches)
            peaks = list(found)
            rows += peaks
            console.print(peaks_table(peaks))
            if options.output:
                write_rows(options.output, peaks)
    if "largest" in options.parts:
        for cluster in options.clusters:
            largest = run_cluster(cluster, options, console)
            rows += largest
            console.print(largest_table(largest))
            if options.output:
                write_rows(options.output, largest)
    if "recomputation" in options.parts:
        log = logger(options, console)
        compared = [
            recomputation.compare(cluster, options.recomputation, log)
            for cluster in options.recomputation_clusters
        ]
        rows += compared
        console.print(recomputation_table(compared))
        if options.output:
            write_rows(options.output, compared)
    console.print(verdicts_table(list(verdicts(rows))))


def run_cluster(
    cluster: MemoryCluster, options: argparse.Namespace, console: Console
) -> list[LargestRow]:
    """The largest model of each engine on one cluster."""
    return largest_models(cluster, options.engines, options.settings, logger(options, console))


def logger(options: argparse.Namespace, console: Console) -> Callable[[str], None]:
    """Prints lines with the seconds since now, with `--verbose`."""
    began = time.perf_counter()

    def log(text: str) -> None:
        if options.verbose:
            console.print(f"  {time.perf_counter() - began:6.1f} s  {text}", style="dim")

    return log


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    several = {"nargs": "+"}
    parser.add_argument("--parts", **several, choices=PARTS, default=list(PARTS), help=" ")
    parser.add_argument("--models", **several, choices=SUBJECTS, default=list(SUBJECTS), help=" ")
    parser.add_argument(
        "--stages", **several, type=int, choices=range(4), default=[0, 1, 2, 3], help=" "
    )
    parser.add_argument("--batches", **several, type=int, help="micro-batches (2 4 8; quick: 2)")
    parser.add_argument(
        "--clusters", **several, default=list(OVER_EVEN), help="limits of the ranks, relatively"
    )
    parser.add_argument("--engines", **several, choices=ENGINES, default=list(ENGINES), help=" ")
    parser.add_argument(
        "--largest-limit", type=int, metavar="MIB", help="of a cluster (800; quick: 240)"
    )
    parser.add_argument("--width", type=int, help="of the growing Llama (256; quick: 192)")
    parser.add_argument(
        "--plans",
        choices=("autotune", "scaled"),
        default="autotune",
        help="plans of Poplar: profile the model itself, or scale a profile of small models",
    )
    parser.add_argument(
        "--recomputation-limit",
        type=int,
        metavar="MIB",
        help="largest limit where recomputation is compared (192)",
    )
    parser.add_argument("--context", type=int, default=128, help="bytes per sample there")
    parser.add_argument("--global-batch", type=int, default=16, help="samples there")
    parser.add_argument(
        "--quick", action="store_true", help="one batch, small limits, a coarser bisection"
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="append JSON rows")
    parser.add_argument("--verbose", action="store_true", help="print each trial")
    options = parser.parse_args(arguments)
    defaults = {"batches": ([2, 4, 8], [2]), "largest_limit": (800, 240), "width": (256, 192)}
    defaults["recomputation_limit"] = (192, 192)
    for name, (full, quick) in defaults.items():
        if getattr(options, name) is None:
            setattr(options, name, quick if options.quick else full)
    if min(options.batches) < 1 or options.largest_limit < 1:
        parser.error("--batches and --largest-limit must be at least 1")
    try:
        options.clusters = [
            MemoryCluster.of(name, options.largest_limit * MIB) for name in options.clusters
        ]
        options.recomputation_clusters = [
            MemoryCluster.of(cluster.name, options.recomputation_limit * MIB)
            for cluster in options.clusters
        ]
    except ValueError as error:
        parser.error(f"--clusters: {error}")
    options.recomputation = recomputation.Settings(
        task=GrowingLlama(blocks_count=6, width=128, context=options.context),
        global_batch=options.global_batch,
        rounds=2 if options.quick else 5,
        steps=2 if options.quick else 4,
        seconds=20.0 if options.quick else 60.0,
    )
    options.settings = Settings(
        task=GrowingLlama(blocks_count=1, width=options.width),
        tolerance=0.05 if options.quick else 0.02,
        autotune=options.plans == "autotune",
        seconds=8.0 if options.quick else 20.0,
    )
    return options


if __name__ == "__main__":
    main()
