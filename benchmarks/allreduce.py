"""Benchmark of collectives: Poplar's transports, gloo, MPI and DeepSpeed, interleaved in one run.

It starts its own ranks on this host, with `mpirun` if MPI takes part; under `torchrun` it uses the
existing ranks. Every result is checked before it is timed. The headline rows use ordinary tensors
for inputs and results; rows called zero-copy use buffers that all ranks can read.

    pip install mpi4py && make peers                       # MPI and DeepSpeed, once
    python benchmarks/allreduce.py --quick                 # two minutes
    python benchmarks/allreduce.py --show benchmarks/results/allreduce.jsonl
    python benchmarks/allreduce.py --link 1 --sizes 64MiB   # two hosts, 1 Gbit/s between them
    python benchmarks/allreduce.py --output rows.jsonl
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
import torch
import torch.distributed as dist
from collectives import mpi_provider
from collectives.case import DTYPES, OPERATIONS
from collectives.measure import ACROSS_HOSTS_ONLY, PROVIDERS, Request, measure, shares_of
from collectives.row import COLUMNS
from collectives.targets import HEADLINE, targets
from launch import LaunchError, run_ranks
from network import EmulationUnavailable, Hosts, emulated_network
from rows import Kind, Row, at_least, new_parser, read_rows, report, write_rows

SIZES = ("4KiB", "64KiB", "1MiB", "16MiB", "64MiB", "256MiB")
SHARES = ("70/10/10/10", "50/50/0/0", "90/10")
ACROSS_HOSTS = ("gloo", "all-to-all", "process_group", *ACROSS_HOSTS_ONLY)
"""Providers that do not need shared memory."""
KIND = Kind("allreduce", COLUMNS, targets)
EXPECTED = (LaunchError, EmulationUnavailable, subprocess.CalledProcessError)
UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "B": 1}


def main() -> None:
    """Run the benchmark once per number of ranks, in separate processes, or on existing ranks."""
    options = parse_options()
    os.environ["OMP_NUM_THREADS"] = "1"  # one thread per rank, for all providers
    if options.rendezvous:
        rows = work(options)
        if dist.get_rank() == 0:
            write_rows(options.output, rows)
    elif "RANK" in os.environ and not options.show:
        rows = work(options)
        if dist.get_rank() == 0:
            report(options, rows, KIND)
    else:
        rows = (row for ranks in options.ranks for row in start(options, ranks))
        report(options, rows, KIND, expected=EXPECTED)


def start(options: argparse.Namespace, ranks: int) -> list[Row]:
    """The rows of `work` in this many processes."""
    if options.link is None and "mpi" in options.providers and not mpi_provider.why_absent():
        with tempfile.TemporaryDirectory() as folder:
            output = Path(folder, "rows.jsonl")
            again = [sys.executable, __file__, *sys.argv[1:], "--output", str(output)]
            command = [*mpi_provider.command(ranks), *again, "--rendezvous", f"{folder}/ranks"]
            subprocess.run(command, check=True)
            return read_rows(output)
    if options.link is None:
        return run_ranks(work, ranks, options)
    with emulated_network(bits_per_second=1e9 * options.link) as hosts:
        enters = partial(enter, hosts, ranks)
        return run_ranks(work, ranks, options, before=enters)


def enter(hosts: Hosts, ranks: int, rank: int) -> None:
    """The first half of the ranks run on one host, the others on the other."""
    hosts.enter(int(rank >= ranks // 2))


def work(options: argparse.Namespace) -> list[Row]:
    """Run the benchmark on one rank, started by `mpirun`, `torchrun` or `start`. Collective."""
    torch.set_num_threads(1)
    if options.rendezvous:
        from mpi4py import MPI

        world = MPI.COMM_WORLD
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group(
            "gloo",
            init_method=f"file://{options.rendezvous}",
            rank=world.rank,
            world_size=world.size,
        )
    elif not dist.is_initialized():
        dist.init_process_group("gloo")
    first, began = dist.get_rank() == 0, time.perf_counter()

    def log(text: str) -> None:
        if first and options.verbose:
            print(f"  {time.perf_counter() - began:6.1f} s  {text}", flush=True)

    rows = measure(request_of(options), log)
    dist.barrier()
    return rows


def request_of(options: argparse.Namespace) -> Request:
    """The request for these command-line options."""
    quick = options.quick
    return Request(
        providers=tuple(options.providers),
        operations=tuple(options.operations),
        sizes=tuple(options.sizes or map(bytes_of, ("4KiB", "64MiB") if quick else SIZES)),
        dtypes=tuple(options.dtypes or (("fp32",) if quick else DTYPES)),
        shares=tuple(shares_of(text) for text in options.shares),
        headline=HEADLINE,
        rounds=options.rounds,
        link_gigabits=options.link,
    )


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = new_parser(__doc__, rounds=11, quick="few sizes, 5 rounds")
    several = {"nargs": "+"}
    parser.add_argument(
        "--ranks", type=at_least(2), default=[2, 4], **several, help="ranks, one run each"
    )
    parser.add_argument(
        "--operations", choices=OPERATIONS, default=OPERATIONS, **several, help="collectives"
    )
    parser.add_argument(
        "--providers",
        choices=PROVIDERS,
        **several,
        help="(default: all for these hosts)",
    )
    parser.add_argument(
        "--sizes", type=bytes_of, metavar="SIZE", **several, help=f"(default: {' '.join(SIZES)})"
    )
    parser.add_argument("--dtypes", choices=DTYPES, **several, help="(default: all)")
    parser.add_argument(
        "--shares",
        metavar="P/P/...",
        nargs="*",
        default=SHARES,
        help=f"percentages per rank, besides even shares (default: {' '.join(SHARES)})",
    )
    parser.add_argument(
        "--link",
        type=float,
        metavar="GIGABITS",
        help="Gbit/s between two hosts (network namespaces) with half of the ranks each",
    )
    parser.add_argument("--verbose", action="store_true", help="print progress")
    parser.add_argument("--rendezvous", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.quick:
        options.rounds = min(options.rounds, 5)
    on_one_host = [name for name in PROVIDERS if name not in ACROSS_HOSTS_ONLY]
    default = on_one_host if options.link is None else ACROSS_HOSTS
    options.providers = options.providers or default
    if options.link is not None and not options.link > 0:
        parser.error(f"--link must be above 0, got {options.link:g}")
    if options.link is None and "sockets" in options.providers:
        parser.error("--providers sockets connects two emulated hosts: add --link GIGABITS")
    try:
        for text in options.shares:
            shares_of(text)
    except ValueError as error:
        parser.error(f"--{error}")
    return options


def bytes_of(text: str) -> int:
    """`64MiB` as a number of bytes."""
    unit = next((unit for unit in UNITS if text.endswith(unit)), "")
    number = text.removesuffix(unit)
    if not number.isdecimal() or int(number) == 0:
        raise argparse.ArgumentTypeError(
            f"expected a size such as 4KiB, 64MiB or 1GiB, got {text!r}"
        )
    return int(number) * UNITS.get(unit, 1)


if __name__ == "__main__":
    main()
