r"""Two unequal ranks on one GPU: training against one process, delays, failures, short memory.

    exact     every stage, uneven shares, recomputation, evaluation and a checkpoint, against one
              process on the whole batch
    delays    random delays before collectives, in sums and in the computation change no bit
    raises    a rank that raises in its loss: no rank applies the step, and the next one works
    late      a rank that comes after the deadline: the other one raises in time and lives on
    exits     a rank whose process ends: the other one raises in time and lives on
    plans     plans that change between steps, and a rank left out, against one process
    codecs    compressed communication at every stage, beside exact gradients
    elastic   checkpoints in memory, also of a lost rank, loaded with other shares
    drift     a rank that becomes slower: the plan follows
    bases     adapters on a quantised base at every stage, against one process
    memory    memory runs out at each allocation of a step: all ranks raise, and the next step works

    python benchmarks/gpu_ranks.py exact delays --output rows.jsonl
    python benchmarks/gpu_ranks.py memory --device cpu --seconds 60

For NCCL each rank is a host (`NCCL_HOSTID`): it refuses two ranks of one host on one GPU. On the
CPU the same code runs on gloo.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
import torch
import torch.distributed as dist
from rows import Row, read_rows, shown_rows, write_rows
from single_gpu import nccl, ranks
from two_ranks.bases import bases
from two_ranks.codecs import codecs
from two_ranks.delays import delays
from two_ranks.drift import drift
from two_ranks.elastic import elastic
from two_ranks.exact import exact
from two_ranks.failures import exits, late, raises
from two_ranks.memory import memory
from two_ranks.plans import plans
from two_ranks.rank import BENCHMARK, RANKS, ROWS, Rank
from watchdog import Ended, watch

TASKS: dict[str, Callable[[Rank], None]] = {
    task.__name__: task
    for task in (
        *(exact, delays, plans, codecs, elastic, drift, bases),
        *(raises, late, exits, memory),
    )
}


def run_in_rank(options: argparse.Namespace) -> None:
    """Join the other rank and run one task."""
    device = ranks.join(options.device, nccl=options.device == "cuda", seconds=600.0)
    torch.backends.cuda.matmul.allow_tf32 = False
    ends = time.monotonic() + options.seconds
    own = Rank(device, dist.get_rank(), options.inside, ends, options.tries)
    TASKS[options.tasks[0]](own)
    print(f"rank {own.rank}: end of {options.tasks[0]}")
    ranks.leave()


def main(arguments: Sequence[str] | None = None) -> None:
    """Start the ranks of each task; the exit status is 1 if a task failed or hung."""
    options = parse_options(arguments)
    if options.show:
        show_rows(shown_rows(options.show, BENCHMARK))
        return
    if options.inside:
        run_in_rank(options)
    failed = []
    with tempfile.TemporaryDirectory(prefix="poplar-gpu-") as name:
        for task in options.tasks:
            folder = Path(name, task)
            environments = [
                {**ranks.environment(folder), **nccl.one_host_per_rank(rank)}
                for rank in range(RANKS)
            ]
            inside = [task, "--inside", folder, "--device", options.device]
            inside += ["--seconds", f"{0.7 * options.seconds:g}"]
            inside += ["--tries", str(options.tries)] if options.tries else []
            ended = watch(
                __file__,
                inside,
                environments,
                folder,
                seconds=options.seconds,
            )
            path = folder / ROWS
            rows = read_rows(path, BENCHMARK) if path.exists() else []
            if options.output:
                write_rows(options.output, rows)
            failed += show(task, rows, ended)
    print(f"{len(options.tasks) - len(set(failed))} of {len(options.tasks)} tasks passed")
    sys.exit(int(bool(failed)))


def show(task: str, rows: Sequence[Row], ended: Ended) -> list[str]:
    """Print the rows of a task; returns its name if it failed."""
    show_rows(rows)
    ok = ended.verdict == "ok" and bool(rows) and all(row["ok"] for row in rows)
    if ended.verdict != "ok":
        print(f"{task}: {ended.report}")
    return [] if ok else [task]


def show_rows(rows: Sequence[Row]) -> None:
    """Print a line for each case."""
    for row in rows:
        numbers = {k: v for k, v in row.figures.items() if k not in ("ok", "message")}
        figures = ", ".join(f"{name} {value:.3g}" for name, value in numbers.items())
        verdict = "ok" if row["ok"] else "WRONG"
        operators = row.get("operators") or ""
        case = f"{row['task']}, {row['case']}, {operators}"
        print(f"{case}: {verdict}. {figures} {row['message']}")


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tasks", nargs="*", metavar="TASK")
    parser.add_argument("--show", type=Path, metavar="FILE", help="print saved rows, run no task")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seconds", type=float, default=60.0, help="limit of each task")
    parser.add_argument(
        "--tries",
        type=int,
        metavar="N",
        help="places per stage at which a task fails; default: all",
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="append the rows as JSON lines")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if not (options.tasks or options.show) or not TASKS.keys() >= {*options.tasks}:
        parser.error(f"expected --show FILE, or tasks of {', '.join(TASKS)}; got {options.tasks}")
    return options


if __name__ == "__main__":
    main()
