"""DDP, FSDP2 and DeepSpeed on Poplar's `cpu:poplar` backend and on gloo.

Equal ranks with one core each; the same model, data and settings; interleaved measurements. Losses
must agree.

    make peers                                             # DeepSpeed, once
    python benchmarks/backends.py --output rows.jsonl
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import date
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
import provenance
from emulation import EmulationUnavailable
from head_to_head import worker_calls
from head_to_head.clusters import Cluster, OpenCluster
from head_to_head.engine import Configuration
from head_to_head.task import Task
from head_to_head.workers import Workers, WorkersFailed, last_lines
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rows import write_rows

from poplar import Plan

BACKENDS = ("gloo", "cpu:poplar")
ENGINES = (("ddp", 0), ("fsdp2", 3), *(("deepspeed", stage) for stage in range(4)))
STEPS_A_TURN = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One row of `--output`: one engine on both backends. This class is the schema."""

    benchmark: str
    engine: str
    stage: int
    ranks: int
    global_batch: int
    gloo_seconds: float
    """Median seconds of a step, between the ends of consecutive steps on the slowest rank."""
    poplar_seconds: float
    faster: float
    """`gloo_seconds / poplar_seconds`."""
    loss_difference: float
    """The largest over all steps and ranks."""
    steps: int
    """Measured steps on each backend."""
    device: str
    versions: str
    commit: str
    day: str


def main() -> None:
    """Measure the engines; print the error of those that are not installed."""
    options = parse_options()
    os.environ["OMP_NUM_THREADS"] = "1"  # one thread per rank
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    task = Task(size=options.size, global_batch=options.samples * 2)
    rows = []
    try:
        with Cluster(name="1:1", cores=(0, 1)).opened() as open_cluster:
            for provider, stage in ENGINES:
                if provider not in options.engines:
                    continue
                try:
                    rows.append(measure(open_cluster, task, provider, stage, options.rounds))
                except WorkersFailed as failure:
                    console.print(f"{provider}, stage {stage}: {last_lines(str(failure))}")
    except EmulationUnavailable as failure:
        raise SystemExit(str(failure)) from None
    if options.output:
        write_rows(options.output, rows)
    table = Table(
        *("engine", "ms on gloo", "on cpu:poplar", "faster", "loss difference"), box=SIMPLE_HEAD
    )
    for row in rows:
        times = (f"{1e3 * seconds:.1f}" for seconds in (row.gloo_seconds, row.poplar_seconds))
        name = f"{row.engine}, ZeRO-{row.stage}"
        table.add_row(name, *times, f"{row.faster:.3f}", f"{row.loss_difference:.1g}")
    console.print(table)


def measure(open_cluster: OpenCluster, task: Task, provider: str, stage: int, rounds: int) -> Row:
    """One engine, on both backends in turns.

    Raises:
        WorkersFailed: it is not installed, or does not run.
    """
    size = open_cluster.cluster.size
    plan = Plan.even(size, task.global_batch, task.global_batch // size, stage)
    configuration = Configuration(
        name=provider,
        provider=provider,
        stage=stage,
        policy="even",
        plan=plan,
        ranks=tuple(range(size)),
    )
    seconds: dict[str, list[float]] = {backend: [] for backend in BACKENDS}
    losses: dict[str, list[float]] = {backend: [] for backend in BACKENDS}
    with ExitStack() as stack:
        groups = {}
        for backend in BACKENDS:
            workers = stack.enter_context(
                Workers(open_cluster, f"{provider} on {backend}", backend)
            )
            workers.call(
                worker_calls.import_engines, "torch" if provider != "deepspeed" else provider
            )
            workers.call(worker_calls.slow_down)  # each to its core
            workers.call(worker_calls.build, task, configuration)
            workers.call(worker_calls.take_turn, configuration.name, STEPS_A_TURN)
            groups[backend] = workers
        for _ in range(rounds):
            for backend, workers in groups.items():
                turns = workers.call(worker_calls.take_turn, configuration.name, STEPS_A_TURN)
                ends = [max(turn.ends[step] for turn in turns) for step in range(STEPS_A_TURN)]
                begin = max(turn.start for turn in turns)
                pairs = zip([begin, *ends[:-1]], ends, strict=True)
                seconds[backend] += [end - start for start, end in pairs]
                losses[backend] += [loss for turn in turns for loss in turn.losses]
    on_gloo, on_poplar = (statistics.median(seconds[backend]) for backend in BACKENDS)
    differences = (abs(a - b) for a, b in zip(*losses.values(), strict=True))
    return Row(
        benchmark="backends",
        engine=provider,
        stage=stage,
        ranks=size,
        global_batch=task.global_batch,
        gloo_seconds=on_gloo,
        poplar_seconds=on_poplar,
        faster=on_gloo / on_poplar,
        loss_difference=max(differences),
        steps=rounds * STEPS_A_TURN,
        device=provenance.device(),
        versions=provenance.versions("torch", "deepspeed"),
        commit=provenance.commit(),
        day=date.today().isoformat(),
    )


def parse_options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--size", default="demo", help="size of the Llama model (default: demo)")
    parser.add_argument(
        "--samples", type=int, default=8, help="samples per rank and step (default: 8)"
    )
    engines = tuple(dict(ENGINES))
    parser.add_argument(
        "--engines", nargs="+", choices=engines, default=engines, help="engines (default: all)"
    )
    parser.add_argument("--rounds", type=int, default=6, help="rounds of measurements (default: 6)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="append the rows as JSON lines")
    options = parser.parse_args()
    for name in ("samples", "rounds"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(options, name)}")
    return options


if __name__ == "__main__":
    main()
