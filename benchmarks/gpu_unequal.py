"""Several ranks on one GPU, unequal by MPS percentages: Poplar's plan, the even plan, DDP, FSDP2.

Each rank is a process with its part of the GPU's multiprocessors and memory. They profile and plan,
then the plans run in turns: predicted against measured time, and both against the sum of speeds of
plain passes. Ranks communicate by NCCL (before 2.30 as if each had its own host) or through host
memory. A hang is reported with the stacks and NCCL's flight record of every rank.

    python benchmarks/gpu_unequal.py --nccl site/nvidia/nccl --output rows.jsonl
    python benchmarks/gpu_unequal.py --transports staged --percent 60 40
    python benchmarks/gpu_unequal.py --starts 20 --no-comparison      # does any start hang?
    python benchmarks/gpu_unequal.py --show benchmarks/results/h100/unequal.jsonl
    python benchmarks/gpu_unequal.py --device cpu --case "tiny ranks" --seconds 8

On the CPU, percentages are of the cores: ranks that share a core are slower.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import date
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
import provenance
import torch.distributed as dist
from rich.console import Console
from rows import write_rows
from single_gpu import nccl, ranks
from single_gpu.cases import CASES
from single_gpu.command import new_console, new_parser, require_device
from single_gpu.mps import MpsUnavailable, mps_daemon, thread_percentage
from single_gpu.unequal_rank import Settings, compare, start
from single_gpu.unequal_row import StartsRow, UnequalRow, load_rows, verdicts
from single_gpu.unequal_table import table_of
from watchdog import Ended, unused, watch

TRANSPORTS = ("nccl", "staged")
START_SECONDS = 45.0
"""The deadline of one of `--starts`, which make a few steps."""
STAGES = 4
ROWS = "rows.jsonl"


def main() -> None:
    """Run the comparison and the starts for each transport; exit status 1 if one did not end."""
    options = parse_options()
    if options.inside:
        work(options)
        ranks.leave()
    console = new_console()
    if options.show:
        show(load_rows(options.show), console)
        return
    require_device(options.device)
    rows: list[UnequalRow | StartsRow] = []
    problems = []
    with tempfile.TemporaryDirectory(prefix="poplar-unequal-") as name:
        for transport in options.transports:
            why_not = why_not_here(transport, options)
            if why_not:
                console.print(f"{transport}: not run. {why_not}", markup=False)
                continue
            folder = unused((options.logs or Path(name)) / transport)
            try:
                found, reports = run(transport, folder, options)
            except MpsUnavailable as missing:
                console.print(f"{transport}: not run. {missing}", markup=False)
                continue
            rows += found
            problems += reports
    if options.output:
        write_rows(options.output, rows)
    show(rows, console)
    for report in problems:
        console.print(report, markup=False)
    sys.exit(int(bool(problems) or not rows))


def run(
    transport: str, folder: Path, options: argparse.Namespace
) -> tuple[list[UnequalRow | StartsRow], list[str]]:
    """Rows of one transport, and a report for each start that failed or hung."""
    rows: list[UnequalRow | StartsRow] = []
    reports = []
    if options.comparison:
        here = folder / "comparison"
        ended = launch(transport, "comparison", here, options, options.deadline)
        rows += load_rows(here / ROWS) if (here / ROWS).exists() else []
        if ended.verdict != "ok":
            rows.append(row_of_starts(transport, [ended], options, what="comparison"))
            reports.append(f"{transport}, comparison: {ended.report}")
    if options.starts:
        starts = [
            launch(transport, str(n % STAGES), folder / str(n), options, START_SECONDS)
            for n in range(options.starts)
        ]
        rows.append(row_of_starts(transport, starts, options))
        reports += [
            f"{transport}, start {n}, stage {n % STAGES}: {ended.report}"
            for n, ended in enumerate(starts)
            if ended.verdict != "ok"
        ]
    return rows, reports


def launch(
    transport: str, task: str, folder: Path, options: argparse.Namespace, seconds: float
) -> Ended:
    """Start all ranks with a task: `comparison`, or a stage for a few steps.

    Raises:
        MpsUnavailable: the ranks cannot be made unequal here.
    """
    count = len(options.percent) or options.ranks
    inside = ["--inside", folder, "--transports", transport, "--task", task]
    with clients(options) as shared:  # for each start, as ranks that were killed may leave traces
        environments = [
            {**ranks.environment(folder), **hosts_of_ranks(options, rank), **shared, **own}
            for rank, own in enumerate(speeds_of_ranks(options, count))
        ]
        return watch(__file__, [*sys.argv[1:], *inside], environments, folder, seconds=seconds)


def speeds_of_ranks(options: argparse.Namespace, count: int) -> Iterator[dict[str, str]]:
    """What makes each rank slower or faster, as its environment."""
    if not options.percent:
        yield from ({} for _ in range(count))
    elif options.device == "cuda":
        yield from map(thread_percentage, options.percent)
    else:
        for core in ranks.cores_of(options.percent, sorted(os.sched_getaffinity(0))):
            yield {ranks.CORE: str(core)}


@contextmanager
def clients(options: argparse.Namespace) -> Iterator[dict[str, str]]:
    """The environment of all ranks on a GPU; an MPS daemon runs while the context is open.

    Raises:
        MpsUnavailable: there is none here.
    """
    if options.device != "cuda":
        yield {}
        return
    library = nccl.find_library(options.nccl) if options.nccl else None
    settings = nccl.environment(library, options.max_ctas)
    with mps_daemon() if options.percent else nullcontext({}) as daemon:
        yield {**settings, **daemon}


def why_not_here(transport: str, options: argparse.Namespace) -> str:
    """Why a transport cannot be used; empty if it can."""
    if options.device == "cpu" or transport != "nccl" or nccl.version_in_use(options.nccl):
        return ""
    return "NCCL is not loaded; this build of torch has none"


def hosts_of_ranks(options: argparse.Namespace, rank: int) -> dict[str, str]:
    """What lets a rank share the GPU if this version of NCCL does not support it."""
    version = nccl.version_in_use(options.nccl) if options.device == "cuda" else None
    old = version is not None and version < nccl.SHARES_A_GPU
    return nccl.one_host_per_rank(rank) if old else {}


def work(options: argparse.Namespace) -> None:
    """In a rank: one task."""
    (transport,) = options.transports
    by_nccl = transport == "nccl" and options.device == "cuda"
    device = ranks.join(options.device, nccl=by_nccl, seconds=options.deadline)
    settings = Settings(
        case=CASES[options.case],
        percent=tuple(options.percent) or None,
        nccl=by_nccl,
        stage=options.stage if options.stage == "auto" else int(options.stage),
        seconds=options.seconds,
        speed_seconds=options.speed_seconds,
        turn_seconds=options.turn_seconds,
        rounds=options.rounds,
    )
    if options.task != "comparison":
        start(settings, device, int(options.task))
        return
    row = compare(settings, device)
    if dist.get_rank() == 0:
        write_rows(options.inside / ROWS, [row])


def row_of_starts(
    transport: str, starts: Sequence[Ended], options: argparse.Namespace, what: str = "starts"
) -> StartsRow:
    """How the starts ended."""
    by_nccl = transport == "nccl" and options.device == "cuda"
    version = nccl.text_of(nccl.version_in_use(options.nccl)) if by_nccl else ""
    return StartsRow(
        what=what,
        ranks=len(options.percent) or options.ranks,
        mps_percent=list(options.percent) or None,
        backend=f"nccl {version}" if by_nccl else "gloo",
        starts=len(starts),
        hung=sum(ended.verdict == "hang" for ended in starts),
        failed=sum(ended.verdict == "failed" for ended in starts),
        seconds=statistics.median(ended.seconds for ended in starts),
        device=provenance.device(options.device),
        versions=provenance.versions("torch"),
        commit=provenance.commit(),
        day=date.today().isoformat(),
    )


def show(rows: Sequence[UnequalRow | StartsRow], console: Console) -> None:
    """Print the rows, and how many targets they meet."""
    compared = [row for row in rows if isinstance(row, UnequalRow)]
    if compared:
        console.print(table_of(compared))
    for row in compared:
        for peer, reason in row.absent.items():
            console.print(f"no {peer} by {row.backend}: {reason}", markup=False)
    judged = list(verdicts(rows))
    for verdict in judged:
        console.print(f"{'✓' if verdict.met else 'short'}  {verdict.text}", markup=False)
    console.print(f"{sum(verdict.met for verdict in judged)} of {len(judged)} targets met")


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = new_parser((__doc__ or "").partition("\n")[0])
    parser.add_argument("--transports", choices=TRANSPORTS, nargs="+", default=TRANSPORTS)
    parser.add_argument(
        "--percent",
        type=float,
        nargs="*",
        default=(50.0, 25.0, 25.0),
        help="of the multiprocessors, by rank (default: 50 25 25); empty: no limits, no MPS",
    )
    parser.add_argument("--ranks", type=int, default=2, help="with an empty --percent")
    parser.add_argument(
        "--nccl", type=Path, metavar="PATH", help="preload this NCCL: a library or its folder"
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
    parser.add_argument("--rounds", type=int, default=5, help="of turns (default: 5)")
    parser.add_argument("--starts", type=int, default=0, help="count hangs in so many starts")
    parser.add_argument("--no-comparison", dest="comparison", action="store_false")
    parser.add_argument("--deadline", type=float, default=240.0, help="of a comparison, in seconds")
    parser.add_argument("--task", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.device == "cpu":
        options.transports = ["staged"]  # in host memory anyway
    if options.percent and min(options.percent) <= 0:
        parser.error(f"--percent must be above 0, got {options.percent}")
    return options


if __name__ == "__main__":
    main()
