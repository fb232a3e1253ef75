"""Head to head: Poplar against DeepSpeed, FSDP2 and DDP on the same unequal ranks.

Real processes, really unequal (see `contest/clusters.py`); the same model, data, global batch,
optimizer, dtype and learning rate in every engine; everybody's best legal setting; turn by turn in
one run. The yardstick is the sum of speeds: what the ranks do in plain PyTorch passes when working
together costs nothing.

    make peers                                             # DeepSpeed, once
    python benchmarks/train.py --quick                     # a look, in two minutes
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
from contest.clusters import CLUSTERS, Cluster, find_cluster
from contest.crew import CrewFailed
from contest.outcome import Contest
from contest.race import Rules, hold
from contest.row import Row, rows_of, write_rows
from contest.table import summary_of, table_of
from contest.task import MODELS, Task
from emulation import EmulationUnavailable
from rich.console import Console

QUICK = Rules(
    policies=("even", "exact"),
    parts=False,
    steps=5,
    calibration_seconds=3.0,
    profile_seconds=12.0,
    memory=False,
)


def main() -> None:
    """Contest by contest; rows are written as soon as there are any."""
    options = parse_options()
    # Memory that is freed and given back has to be faulted in again at every step; keeping it makes
    # timings steadier, for all engines alike.
    os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(2**30))
    os.environ.setdefault("MALLOC_TRIM_THRESHOLD_", str(2**31 - 1))
    os.environ["OMP_NUM_THREADS"] = "1"  # a rank is one thread; others would share its quota
    # A table that is wider than its terminal may wrap; in a file it must not.
    console = Console(width=None if sys.stdout.isatty() else 200, soft_wrap=True, highlight=False)
    contests: list[Contest] = []
    rows: list[Row] = []
    for cluster in options.clusters:
        contest = attempt(cluster, options, console)
        if contest is None:
            continue
        contests.append(contest)
        fresh = rows_of(contest)
        rows += fresh
        if options.output:
            write_rows(options.output, fresh)
        console.print(table_of(fresh))
        for note in contest.notes:
            console.print(f"  {note}")
    if not contests:
        raise SystemExit(1)
    console.print(summary_of(rows))
    held = {contest.cluster for contest in contests}
    skipped = [cluster.name for cluster in options.clusters if cluster.name not in held]
    if options.page:
        from contest.page import write_page

        try:
            write_page(contests, options.page)
        except ImportError as missing:
            console.print(f"no {options.page}: {missing}")
        else:
            console.print(f"{options.page} shows it all")
    if skipped:
        raise SystemExit(f"not held: {', '.join(skipped)} (see above)")


def attempt(cluster: Cluster, options: argparse.Namespace, console: Console) -> Contest | None:
    """One contest, or None and a line that says why not."""
    task = replace(options.task, global_batch=options.samples * cluster.size)
    start = time.perf_counter()
    console.print(f"\n{cluster.name}: {cluster}; global batch {task.global_batch}")

    def tell(text: str) -> None:
        if options.verbose:
            console.print(f"  {time.perf_counter() - start:6.1f} s  {text}", style="dim")

    try:
        contest = hold(cluster, task, options.rules, tell)
    except (EmulationUnavailable, CrewFailed, ValueError) as failure:
        console.print(f"{cluster.name} was skipped: {failure}", style="bold", markup=False)
        return None
    console.print(f"{cluster.name} took {time.perf_counter() - start:.0f} s")
    return contest


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0],
        epilog=f"Clusters: {', '.join(CLUSTERS)}, or relative speeds by quota, as 3:2:2.",
    )
    several = {"nargs": "+"}
    parser.add_argument("--clusters", **several, help="(default: all; quick: 2:1:1)")
    parser.add_argument("--model", choices=MODELS, default="llama", help="(default: llama)")
    parser.add_argument("--size", default="demo", help="of the model (default: demo)")
    parser.add_argument("--context", type=int, default=64, help="bytes a sample (default: 64)")
    parser.add_argument(
        "--samples", type=int, help="per rank and step, on average (default: 32, quick: 16)"
    )
    parser.add_argument("--stages", type=int, choices=range(4), **several, help="(default: all)")
    parser.add_argument(
        "--policies", choices=("even", "flops", "paper", "exact"), **several, help="of Poplar"
    )
    parser.add_argument("--peers", choices=("ddp", "fsdp2", "deepspeed"), nargs="*", help=" ")
    parser.add_argument("--steps", type=int, help="that count, of each (default: 50, quick: 5)")
    parser.add_argument("--no-memory", action="store_true", help="do not measure peak memory")
    parser.add_argument("--no-parts", action="store_true", help="without strong or weak ranks only")
    parser.add_argument("--quick", action="store_true", help="few steps: a look in two minutes")
    parser.add_argument("--output", type=Path, metavar="FILE", help="append one JSON row each")
    parser.add_argument("--page", type=Path, metavar="FILE", help="write an HTML report")
    parser.add_argument("--verbose", action="store_true", help="tell what is going on")
    options = parser.parse_args(arguments)
    if options.context < 1:
        parser.error(f"--context must be at least 1, got {options.context}")
    try:
        names = options.clusters or (["2:1:1"] if options.quick else list(CLUSTERS))
        options.clusters = [find_cluster(name) for name in dict.fromkeys(names)]
        options.task = Task(model=options.model, size=options.size, context=options.context)
        options.task.new_model()
    except (ValueError, KeyError) as error:
        parser.error(str(error))
    if options.steps is not None and options.steps < 3:
        parser.error(f"--steps must be at least 3 to give a median, got {options.steps}")
    if options.samples is None:
        options.samples = 16 if options.quick else 32
    if options.samples < 1:
        parser.error(f"--samples must be at least 1, got {options.samples}")
    options.rules = rules_of(options)
    return options


def rules_of(options: argparse.Namespace) -> Rules:
    """What the command line says, over the defaults."""
    rules = QUICK if options.quick else Rules()
    asked = {name: getattr(options, name) for name in ("stages", "policies", "peers")}
    chosen = {
        name: tuple(dict.fromkeys(value)) for name, value in asked.items() if value is not None
    }
    return replace(
        rules,
        steps=options.steps or rules.steps,
        memory=rules.memory and not options.no_memory,
        parts=rules.parts and not options.no_parts,
        **chosen,
    )


if __name__ == "__main__":
    main()
