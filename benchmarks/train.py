"""Head to head: Poplar against DeepSpeed, FSDP2 and DDP on the same unequal ranks.

Ranks are processes slowed down by CPU quotas or shared cores (`head_to_head/clusters.py`). Every
engine has the same model, data, global batch, optimizer, dtype and learning rate, and its best
permitted settings; engines take turns of a few steps. DDP and FSDP2 also run with uneven batches
set manually. Results are compared with the sum of speeds: plain PyTorch passes on all ranks at the
same time, without communication.

    make peers                                             # DeepSpeed, once
    python benchmarks/train.py --quick                     # two minutes
    python benchmarks/train.py --clusters 2:1:1 4:1 --output rows.jsonl
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
from emulation import EmulationUnavailable
from head_to_head.clusters import CLUSTERS, Cluster, find_cluster
from head_to_head.columns import COLUMNS, title_of
from head_to_head.figures import rows_of
from head_to_head.row import comparisons_of, in_order, latest_rows
from head_to_head.runner import Settings, compare
from head_to_head.targets import targets
from head_to_head.task import MODELS, Task
from head_to_head.workers import WorkersFailed
from head_to_head.workloads import WORKLOADS
from rich.console import Console
from rows import (
    Row,
    at_least,
    new_console,
    new_parser,
    print_targets,
    shown_rows,
    table_of,
    write_rows,
)

QUICK = Settings(
    policies=("even", "exact"),
    subsets=False,
    steps=5,
    calibration_seconds=3.0,
    profile_seconds=12.0,
    memory=False,
)


def main() -> None:
    """Run one comparison per cluster; write its rows as soon as it ends."""
    options = parse_options()
    if options.show:
        shown_rows(options.show, "train")  # raises if there is none
        show(latest_rows(options.show), new_console())
        return
    # Returning freed memory to the system causes page faults at every step; not returning it makes
    # timings steadier for all engines.
    os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(2**30))
    os.environ.setdefault("MALLOC_TRIM_THRESHOLD_", str(2**31 - 1))
    os.environ["OMP_NUM_THREADS"] = "1"  # more threads would share the rank's quota
    console = new_console()
    rows: list[Row] = []
    skipped = []
    for cluster in options.clusters:
        fresh = attempt(cluster, options, console)
        rows += fresh
        if not fresh:
            skipped.append(cluster.name)
    print_targets(targets(rows), console)
    if skipped:
        raise SystemExit(f"skipped: {', '.join(skipped)} (see above)")


def show(rows: Sequence[Row], console: Console) -> None:
    """Print saved rows."""
    for name, own in comparisons_of(rows).items():
        console.print(f"\n{name}: {own[0]['described']}")
        console.print(table_of(in_order(own), COLUMNS, title_of(own[0])))
    print_targets(targets(rows), console)


def attempt(cluster: Cluster, options: argparse.Namespace, console: Console) -> list[Row]:
    """The rows of one comparison, written and printed; none if it was skipped, with a reason."""
    task = replace(options.task, global_batch=options.samples * cluster.size)
    start = time.perf_counter()
    console.print(f"\n{cluster.name}: {cluster}; global batch {task.global_batch}")

    def log(text: str) -> None:
        if options.verbose:
            console.print(f"  {time.perf_counter() - start:6.1f} s  {text}", style="dim")

    try:
        comparison = compare(cluster, task, options.settings, log)
    except (EmulationUnavailable, WorkersFailed, ValueError) as failure:
        console.print(f"{cluster.name} was skipped: {failure}", style="bold", markup=False)
        return []
    rows = rows_of(comparison)
    if options.output:
        write_rows(options.output, rows)
    console.print(table_of(in_order(rows), COLUMNS, title_of(rows[0])))
    for note in comparison.notes:
        console.print(f"  {note}")
    console.print(f"{cluster.name} took {time.perf_counter() - start:.0f} s")
    return rows


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = new_parser(__doc__, quick="few steps, about two minutes")
    parser.epilog = (
        f"Clusters: {', '.join(CLUSTERS)}, or relative speeds by quota, as 3:2:2; with "
        "links between hosts of one rank each, as 3:2:2@1G or 3:2:2@100M."
    )
    several = {"nargs": "+"}
    parser.add_argument("--clusters", **several, help="(default: all; quick: 2:1:1)")
    parser.add_argument("--model", choices=MODELS, default="llama", help="(default: llama)")
    parser.add_argument("--size", default="demo", help="size of the model (default: demo)")
    parser.add_argument(
        "--context", type=at_least(1), default=64, help="bytes a sample of text (default: 64)"
    )
    parser.add_argument(
        "--samples", type=at_least(1), help="per rank and step, on average (default: 32, quick: 16)"
    )
    parser.add_argument("--stages", type=int, choices=range(4), **several, help="(default: all)")
    parser.add_argument(
        "--policies",
        choices=("even", "flops", "paper", "exact", "int8", "int4", "programme"),
        **several,
        help="policies of Poplar; int8 and int4 are the plan of exact, compressed, beside it",
    )
    parser.add_argument(
        "--peers", choices=("ddp", "fsdp2", "deepspeed"), nargs="*", help="(default: all)"
    )
    parser.add_argument(
        "--steps", type=at_least(3), help="counted steps of each (default: 50, quick: 5)"
    )
    parser.add_argument("--no-memory", action="store_true", help="do not measure peak memory")
    parser.add_argument("--no-parts", action="store_true", help="skip strong and weak ranks only")
    parser.add_argument("--verbose", action="store_true", help="print progress")
    options = parser.parse_args(arguments)
    try:
        names = options.clusters or (["2:1:1"] if options.quick else list(CLUSTERS))
        options.clusters = [find_cluster(name) for name in dict.fromkeys(names)]
        options.task = Task(
            model=options.model,
            size=options.size,
            context=options.context,
            learning_rate=WORKLOADS[options.model].learning_rate,
        )
        options.task.new_model()
    except (ValueError, KeyError) as error:
        parser.error(str(error))
    options.samples = options.samples or (16 if options.quick else 32)
    options.settings = settings_of(options)
    return options


def settings_of(options: argparse.Namespace) -> Settings:
    """The defaults, overridden by the command line."""
    settings = QUICK if options.quick else Settings()
    asked = {name: getattr(options, name) for name in ("stages", "policies", "peers")}
    chosen = {
        name: tuple(dict.fromkeys(value)) for name, value in asked.items() if value is not None
    }
    return replace(
        settings,
        steps=options.steps or settings.steps,
        memory=settings.memory and not options.no_memory,
        subsets=settings.subsets and not options.no_parts,
        **chosen,
    )


if __name__ == "__main__":
    main()
