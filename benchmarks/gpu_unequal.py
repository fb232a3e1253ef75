"""Several ranks on one GPU, unequal by MPS percentages: Poplar's plan, the even plan, DDP, FSDP2.

Each rank is a process with its part of the GPU's multiprocessors and memory. They profile and plan,
then the plans run in turns: predicted against measured time, and both against the sum of speeds of
plain passes. Ranks communicate by NCCL (before 2.30 as if each had its own host) or through host
memory. A hang is reported with the stacks and NCCL's flight record of every rank.

    python benchmarks/gpu_unequal.py --nccl site/nvidia/nccl --output rows.jsonl
    python benchmarks/gpu_unequal.py --transports staged --percent 60 40
    python benchmarks/gpu_unequal.py --show benchmarks/results/h200/unequal.jsonl
    python benchmarks/gpu_unequal.py --device cpu --case "tiny ranks" --seconds 8

On the CPU, percentages are of the cores: ranks that share a core are slower.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
import torch.distributed as dist
from rich.console import Console
from rows import Row, new_console, print_targets, read_rows, shown_rows, table_of, write_rows
from single_gpu import nccl, ranks
from single_gpu.cases import CASES
from single_gpu.command import gpu_parser, require_device
from single_gpu.mps import MpsUnavailable, mps_daemon, thread_percentage
from single_gpu.unequal_rank import Settings, compare
from single_gpu.unequal_report import COLUMNS, targets
from watchdog import Ended, unused, watch

TRANSPORTS = ("nccl", "staged")
ROWS, BENCHMARK = "rows.jsonl", "gpu_unequal"


def main() -> None:
    """Compare by each transport; the exit status is 1 if a comparison did not end."""
    options = parse_options()
    if options.inside:
        work(options)
        ranks.leave()
    console = new_console()
    if options.show:
        show(shown_rows(options.show, BENCHMARK), console)
        return
    require_device(options.device)
    rows: list[Row] = []
    problems = []
    with tempfile.TemporaryDirectory(prefix="poplar-unequal-") as name:
        for transport in options.transports:
            folder = unused((options.logs or Path(name)) / transport)
            try:
                ended = launch(transport, folder, options)
            except MpsUnavailable as missing:
                console.print(f"{transport}: not run. {missing}", markup=False)
                continue
            if (folder / ROWS).exists():
                rows += read_rows(folder / ROWS, BENCHMARK)
            if ended.verdict != "ok":
                problems.append(f"{transport}: {ended.report}")
    if options.output:
        write_rows(options.output, rows)
    show(rows, console)
    for report in problems:
        console.print(report, markup=False)
    sys.exit(int(bool(problems) or not rows))


def launch(transport: str, folder: Path, options: argparse.Namespace) -> Ended:
    """Start all ranks with a comparison.

    Raises:
        MpsUnavailable: the ranks cannot be made unequal here.
    """
    inside = ["--inside", folder, "--transports", transport]
    with mps_daemon() if options.device == "cuda" else nullcontext({}) as shared:
        environments = [
            {**ranks.environment(folder), **settings_of(options, rank), **shared, **own}
            for rank, own in enumerate(speeds_of_ranks(options))
        ]
        arguments = [*sys.argv[1:], *inside]
        return watch(__file__, arguments, environments, folder, seconds=options.deadline)


def speeds_of_ranks(options: argparse.Namespace) -> Iterator[dict[str, str]]:
    """What makes each rank slower or faster, as its environment."""
    if options.device == "cuda":
        yield from map(thread_percentage, options.percent)
    else:
        for core in ranks.cores_of(options.percent, sorted(os.sched_getaffinity(0))):
            yield {ranks.CORE: str(core)}


def settings_of(options: argparse.Namespace, rank: int) -> dict[str, str]:
    """What lets a rank share the GPU: a new library, or a host of its own for each rank."""
    if options.device != "cuda":
        return {}
    if options.nccl:
        return nccl.environment(nccl.find_library(options.nccl), options.max_ctas)
    return nccl.one_host_per_rank(rank, options.max_ctas)


def work(options: argparse.Namespace) -> None:
    """In a rank: the comparison."""
    (transport,) = options.transports
    by_nccl = transport == "nccl" and options.device == "cuda"
    device = ranks.join(options.device, nccl=by_nccl, seconds=options.deadline)
    settings = Settings(
        case=CASES[options.case],
        percent=tuple(options.percent),
        nccl=by_nccl,
        stage=options.stage if options.stage == "auto" else int(options.stage),
        seconds=options.seconds,
        speed_seconds=options.speed_seconds,
        turn_seconds=options.turn_seconds,
        rounds=options.rounds,
    )
    row = compare(settings, device)
    if dist.get_rank() == 0:
        write_rows(options.inside / ROWS, [row])


def show(rows: Sequence[Row], console: Console) -> None:
    """Print the rows, and how many targets they meet."""
    if rows:
        console.print(table_of(rows, COLUMNS))
    for row in rows:
        for peer, reason in (row.get("absent") or {}).items():
            console.print(f"no {peer} by {row['backend']}: {reason}", markup=False)
    print_targets(targets(rows), console)


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = gpu_parser(__doc__, rounds=5)
    parser.add_argument("--transports", choices=TRANSPORTS, nargs="+", default=TRANSPORTS)
    parser.add_argument(
        "--percent",
        type=float,
        nargs="+",
        default=(50.0, 25.0, 25.0),
        help="of the multiprocessors, by rank (default: 50 25 25)",
    )
    parser.add_argument(
        "--nccl", type=Path, metavar="PATH", help="preload this NCCL (2.30 or newer)"
    )
    parser.add_argument(
        "--max-ctas",
        type=int,
        default=nccl.MAX_CTAS,
        help=f"NCCL_MAX_CTAS of each rank (default: {nccl.MAX_CTAS})",
    )
    parser.add_argument("--case", choices=CASES, default="narrow", help="model and batch")
    parser.add_argument("--stage", choices=("auto", *"0123"), default="auto")
    parser.add_argument("--seconds", type=float, default=40.0, help="budget of tuning")
    parser.add_argument("--speed-seconds", type=float, default=8.0, help="for plain passes")
    parser.add_argument("--turn-seconds", type=float, default=1.5, help="of one engine")
    parser.add_argument("--deadline", type=float, default=240.0, help="of a comparison, in seconds")
    options = parser.parse_args(arguments)
    if options.device == "cpu":
        options.transports = ["staged"]  # in host memory anyway
    if not min(options.percent) > 0:
        parser.error(f"--percent must be above 0, got {options.percent}")
    return options


if __name__ == "__main__":
    main()
