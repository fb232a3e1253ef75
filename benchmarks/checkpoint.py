"""Saving and loading a checkpoint against the disk's own bandwidth, in turns, on ranks of one host.

The yardstick writes (and syncs) or reads as many bytes as the checkpoint has, on all ranks at once.
It passes the page cache where the file system can do that, which is faster. Nothing that is read,
by the yardstick or by loading, is in the page cache. `new s` is a plain reader that copies into new
memory, whose first use may take longer than the disk. Peak memory is what saving needs above what
is held. Other processes measure it: in them glibc returns freed memory to the system at once, which
takes a third of the time.

    python benchmarks/checkpoint.py --parameters 128 --folder /data/scratch
    python benchmarks/checkpoint.py --quick
"""

from __future__ import annotations

import argparse
import fcntl
import mmap
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
import torch
import torch.distributed as dist
from launch import LaunchError, run_ranks
from process_memory import (
    peak_resident_bytes,
    release_freed_memory,
    reset_peak,
    resident_bytes,
    return_freed_memory,
)
from rows import Column, Row, Target, new_console, new_parser, print_targets, table_of, write_rows
from torch import nn

import poplar

BLOCK = 1024
CHUNK = 8 << 20
TARGET = 0.8
STALL = 0.05
MIB = 1 << 20


COLUMNS = (
    Column("stage", "stage"),
    Column("MiB", lambda row: row["bytes"] / MIB, "{:.0f}"),
    Column("write s", "write_seconds", "{:.2f}"),
    Column("save s", "save_seconds", "{:.2f}"),
    Column("of disk", lambda row: row["write_seconds"] / row["save_seconds"], "{:.0%}"),
    Column("read s", "read_seconds", "{:.2f}"),
    Column("new s", "copy_out_seconds", "{:.2f}"),
    Column("load s", "load_seconds", "{:.2f}"),
    Column("of disk", lambda row: row["read_seconds"] / row["load_seconds"], "{:.0%}"),
    Column("copy s", "copy_seconds", "{:.3f}"),
    Column("stall s", "stall_seconds", "{:.3f}"),
    Column("peak MiB", lambda row: row["save_peak_bytes"] / MIB, "{:.1f}"),
    Column("unit MiB", lambda row: row["unit_bytes"] / MIB, "{:.1f}"),
)


def main() -> None:
    """Measure all stages, print a table, append rows."""
    options = parse_options()
    rows = []
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for stage in options.stages:
            times, memory = Path(folder, "times"), Path(folder, "memory")
            try:
                run_ranks(measure_times, options.ranks, options, stage, folder, times)
                run_ranks(measure_memory, options.ranks, options, stage, folder, memory)
            except LaunchError as failure:
                raise SystemExit(str(failure)) from None
            rows.append(row_of(options, stage, times, memory))
    if options.output:
        write_rows(options.output, rows)
    console = new_console()
    console.print(table_of(rows, COLUMNS))
    print_targets((target for row in rows for target in targets(row)), console)


def row_of(options: argparse.Namespace, stage: int, times: Path, memory: Path) -> Row:
    """What the ranks have measured."""
    measured = {**torch.load(times), **torch.load(memory)}
    return Row.of("checkpoint", {"stage": stage, "ranks": options.ranks}, measured)


def measure_times(options: argparse.Namespace, stage: int, folder: str, output: Path) -> None:
    """Measure how long saving and loading take on this rank; write medians of the slowest rank."""
    torch.set_num_threads(1)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    _, optimizer = trained(options.parameters * 10**6, stage, ranks)
    path = Path(folder, f"stage-{stage}")
    poplar.save_checkpoint(path, optimizer)
    own = path / f"__{rank}_0.distcp"
    size, total = own.stat().st_size, sum(file.stat().st_size for file in path.iterdir())
    pages = mmap.mmap(-1, CHUNK)
    pages.write(os.urandom(CHUNK))
    block = memoryview(pages)
    seconds: dict[str, list[float]] = {}
    record = recorder(seconds)
    plain, again = Path(folder, f"plain-{rank}"), Path(folder, "again")
    for number in range(options.rounds):
        remove(plain, again)
        writes = [
            ("write", partial(write_plain, plain, size, block)),
            ("save", partial(poplar.save_checkpoint, again, optimizer)),
        ]
        # Who comes first finds pages that were freed just before; getting others takes longer.
        for name, action in writes[:: 1 if number % 2 else -1]:
            record(name, action)
    for number in range(options.rounds):
        reads = [
            ("read", plain, partial(read_plain, plain, pages)),
            ("copy_out", plain, partial(read_plain, plain, pages, size)),
            ("load", again / own.name, partial(poplar.load_checkpoint, again, optimizer)),
        ]
        for name, file, action in reads[:: 1 if number % 2 else -1]:
            drop_cache(file)
            record(name, action)
    remove(plain, again)
    measure_asynchronous(Path(folder, "manager"), optimizer, options.rounds, record)
    dist.barrier()
    if rank == 0:
        shutil.rmtree(path)
        shutil.rmtree(Path(folder, "manager"))
    everything: list[dict[str, list[float]]] = [{}] * ranks
    dist.all_gather_object(everything, seconds)
    slowest = {
        f"{key}_seconds": statistics.median(
            max(times) for times in zip(*(e[key] for e in everything), strict=True)
        )
        for key in seconds
    }
    if rank == 0:
        torch.save({"bytes": total, **slowest}, output)


def measure_memory(options: argparse.Namespace, stage: int, folder: str, output: Path) -> None:
    """Measure the peak of saving on this rank; write that of the worst rank."""
    torch.set_num_threads(1)
    return_freed_memory()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    _, optimizer = trained(options.parameters * 10**6, stage, ranks)
    path, peaks = Path(folder, f"memory-{stage}"), []
    for number in range(options.rounds + 1):
        release_freed_memory()
        reset_peak()
        held = resident_bytes()
        poplar.save_checkpoint(path, optimizer)
        if number:  # the first save imports modules
            peaks.append(peak_resident_bytes() - held)
        dist.barrier()
        if rank == 0:
            shutil.rmtree(path)
    by_rank: list[int] = [0] * ranks
    dist.all_gather_object(by_rank, max(peaks))
    if rank == 0:
        unit = max(unit.unsharded_bytes for unit in optimizer._engine.units)
        torch.save({"save_peak_bytes": max(by_rank), "unit_bytes": unit}, output)


def measure_asynchronous(
    folder: Path, optimizer: poplar.HeteroZeroOptimizer, rounds: int, record: Recorder
) -> None:
    """How long an asynchronous save stalls training, beside a copy of the same bytes."""
    manager = poplar.CheckpointManager(folder, optimizer, keep=1, asynchronous=True)
    manager.save(0)
    manager.wait()
    staged = manager._staging
    assert staged is not None
    target = torch.empty_like(staged._buffer)
    for step in range(1, rounds + 1):
        record("stall", partial(manager.save, step))
        manager.wait()
        record("copy", partial(target.copy_, staged._buffer))
    dist.barrier()


Recorder = Callable[[str, Callable[[], object]], None]


def recorder(seconds: dict[str, list[float]]) -> Recorder:
    """A function that times another one, which all ranks start together."""

    def record(name: str, action: Callable[[], object]) -> None:
        dist.barrier()
        began = time.perf_counter()
        action()
        seconds.setdefault(name, []).append(time.perf_counter() - began)

    return record


def trained(
    parameters: int, stage: int, ranks: int
) -> tuple[nn.Module, poplar.HeteroZeroOptimizer]:
    """A model after one step, so that there is optimizer state."""
    blocks = max(1, parameters // BLOCK**2)
    model = nn.Sequential(*(nn.Linear(BLOCK, BLOCK, bias=False) for _ in range(blocks)))
    optimizer = poplar.HeteroZeroOptimizer(model, torch.optim.AdamW, stage=stage, lr=1e-3)
    optimizer.train_step(lambda net, x: net(x).square().mean(), torch.ones(1, BLOCK))
    return model, optimizer


def write_plain(path: Path, size: int, block: memoryview) -> None:
    """Write and sync as many bytes, past the page cache if the file system can do that.

    `block` has `CHUNK` bytes and begins at a page.
    """
    with path.open("wb", buffering=0) as file:
        flags = fcntl.fcntl(file, fcntl.F_GETFL)
        with suppress(OSError):
            fcntl.fcntl(file, fcntl.F_SETFL, flags | os.O_DIRECT)
        for start in range(0, size, CHUNK):
            if size - start < CHUNK:
                fcntl.fcntl(file, fcntl.F_SETFL, flags)
            file.write(block[: min(CHUNK, size - start)])
        os.fsync(file.fileno())


def read_plain(path: Path, block: mmap.mmap, copied: int = 0) -> None:
    """Read all bytes, past the page cache if the file system can do that, into `block`.

    `copied` of them are then copied into new memory.
    """
    target, done = memoryview(torch.empty(copied, dtype=torch.uint8).numpy()), 0
    with path.open("rb", buffering=0) as file:
        with suppress(OSError):
            fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) | os.O_DIRECT)
        while count := file.readinto(block):
            if copied:
                target[done : done + count] = memoryview(block)[:count]
            done += count
            if count < CHUNK:
                break


def remove(plain: Path, checkpoint: Path) -> None:
    """Remove what an earlier round has written. All ranks wait for each other."""
    plain.unlink(missing_ok=True)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(checkpoint, ignore_errors=True)
    dist.barrier()


def drop_cache(path: Path) -> None:
    """Remove a file from the page cache, on all ranks."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    dist.barrier()


def targets(row: Row) -> Iterator[Target]:
    """Seconds of saving and loading against the disk's; the stall and the peak of saving."""
    case = f"stage {row['stage']}"
    saving = row["write_seconds"] / row["save_seconds"]
    loading = row["read_seconds"] / row["load_seconds"]
    beyond = (row["stall_seconds"] - row["copy_seconds"]) / row["save_seconds"]
    units = row["save_peak_bytes"] / row["unit_bytes"]
    yield Target(case=case, what="saves at the disk's speed", value=saving, wanted=TARGET)
    yield Target(case=case, what="loads at the disk's speed", value=loading, wanted=TARGET)
    for what, value, wanted in (
        ("saving needs so many units", units, 1.0),
        ("stalls beyond the copy, of a save", beyond, STALL),
    ):
        yield Target(case=case, what=what, value=value, wanted=wanted, at_most=True)


def parse_options() -> argparse.Namespace:
    """Parse the command line."""
    parser = new_parser(__doc__, rounds=6, quick="8 million parameters, 2 rounds, stage 3")
    parser.add_argument("--parameters", type=int, default=64, help="millions")
    parser.add_argument("--ranks", type=int, default=2, help="ranks of this host")
    parser.add_argument(
        "--stages", nargs="+", type=int, choices=range(4), default=[1, 3], help="stages"
    )
    parser.add_argument("--folder", type=Path, help="on the disk to measure (default: temporary)")
    options = parser.parse_args()
    if options.quick:
        options.parameters, options.rounds, options.stages = 8, 2, [3]
    return options


if __name__ == "__main__":
    main()
