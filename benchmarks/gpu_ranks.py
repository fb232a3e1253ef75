r"""Two unequal ranks on one GPU: training against one process, delays, failures, short memory.

    exact     every stage, uneven shares, recomputation, evaluation and a checkpoint, against one
              process on the whole batch
    delays    random delays before collectives, in sums and in the computation change no bit
    raises    a rank that raises in its loss: no rank applies the step, and the next one works
    late      a rank that comes after the deadline: the other one raises in time and lives on
    exits     a rank whose process ends: the other one raises in time and lives on
    memory    memory runs out at each allocation of a step: all ranks raise, and the next step works
    gathers   seconds of the host per all-gather, by the call that is used

    python benchmarks/gpu_ranks.py exact delays --output rows.jsonl
    python benchmarks/gpu_ranks.py memory --device cpu --seconds 60

For NCCL each rank is a host (`NCCL_HOSTID`): it refuses two ranks of one host on one GPU. On the
CPU the same code runs on gloo.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
import torch
import torch.distributed as dist
from single_gpu import nccl, ranks
from two_ranks.delays import delays
from two_ranks.exact import exact
from two_ranks.failures import exits, late, raises
from two_ranks.gathers import gathers
from two_ranks.memory import memory
from two_ranks.rank import RANKS, ROWS, Rank, Row
from watchdog import Ended, watch

TASKS: dict[str, Callable[[Rank], None]] = {
    task.__name__: task for task in (exact, delays, raises, late, exits, memory, gathers)
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
            rows = folder / ROWS
            lines = rows.read_text(encoding="utf-8").splitlines() if rows.exists() else []
            if options.output:
                options.output.parent.mkdir(parents=True, exist_ok=True)
                with options.output.open("a", encoding="utf-8") as file:
                    file.writelines(line + "\n" for line in lines)
            failed += show(task, lines, ended)
    print(f"{len(options.tasks) - len(set(failed))} of {len(options.tasks)} tasks passed")
    sys.exit(int(bool(failed)))


def show(task: str, lines: Sequence[str], ended: Ended) -> list[str]:
    """Print the rows of a task; returns its name if it failed."""
    rows = [Row(**json.loads(line)) for line in lines]
    for row in rows:
        figures = ", ".join(f"{name} {value:.3g}" for name, value in row.figures.items())
        print(f"{row.task}, {row.case}: {'ok' if row.ok else 'WRONG'}. {figures} {row.message}")
    ok = ended.verdict == "ok" and bool(rows) and all(row.ok for row in rows)
    if ended.verdict != "ok":
        print(f"{task}: {ended.report}")
    return [] if ok else [task]


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tasks", nargs="+", choices=TASKS, metavar="TASK")
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
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
