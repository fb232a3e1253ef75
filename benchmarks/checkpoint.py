"""Saving and loading a checkpoint with Poplar and with PyTorch alone, in turns, on one host.

PyTorch alone is FSDP2 and `torch.distributed.checkpoint` with `sync_files=True`, of the same model
and optimizer. Both save and load what `get_state_dict` names, and bring files to the disk. Poplar
also writes and verifies checksums. Loading finds the files in the page cache. `stall` is how long
an asynchronous save stops training. Peak memory is what saving needs above what is held; other
processes measure it, in which glibc returns freed memory at once, which takes a third of the time.

    python benchmarks/checkpoint.py --parameters 64 --folder /data/scratch
    python benchmarks/checkpoint.py --quick
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from launch import LaunchError, run_ranks
from process_memory import (
    peak_resident_bytes,
    release_freed_memory,
    reset_peak,
    resident_bytes,
    return_freed_memory,
)
from rows import Column, Kind, Row, Target, new_parser, report
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import poplar

BLOCK = 1024
SLOWER = 1.3
"""What Poplar adds, such as checksums, may take at most this factor of PyTorch alone."""
MIB = 1 << 20
T = TypeVar("T")


COLUMNS = (
    Column("stage", "stage"),
    Column("MiB", lambda row: row["bytes"] / MIB, "{:.0f}"),
    Column("torch save s", "torch_save_seconds", "{:.2f}"),
    Column("save s", "save_seconds", "{:.2f}"),
    Column("torch load s", "torch_load_seconds", "{:.2f}"),
    Column("load s", "load_seconds", "{:.2f}"),
    Column("torch stall s", "torch_stall_seconds", "{:.3f}"),
    Column("stall s", "stall_seconds", "{:.3f}"),
    Column("peak MiB", lambda row: row["save_peak_bytes"] / MIB, "{:.1f}"),
    Column("unit MiB", lambda row: row["unit_bytes"] / MIB, "{:.1f}"),
)


def main() -> None:
    """Measure all stages, or show saved rows."""
    options = parse_options()
    rows = (measure(options, stage) for stage in options.stages)
    report(options, rows, Kind("checkpoint", COLUMNS, targets), expected=(LaunchError,))


def measure(options: argparse.Namespace, stage: int) -> Row:
    """The row of a stage."""
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        times = run_ranks(measure_times, options.ranks, options, stage, folder)
        memory = run_ranks(measure_memory, options.ranks, options, stage, folder)
    case = {"stage": stage, "ranks": options.ranks}
    return Row.of("checkpoint", case, {**times, **memory})


class WithPoplar:
    """A training with Poplar's optimizer."""

    prefix = ""

    def __init__(self, parameters: int, stage: int) -> None:
        self.optimizer = poplar.HeteroZeroOptimizer(
            model_of(parameters), torch.optim.AdamW, stage=stage, lr=1e-3
        )
        self.optimizer.train_step(lambda net, x: net(x).square().mean(), torch.ones(1, BLOCK))
        self._manager: poplar.CheckpointManager | None = None

    def save(self, path: Path) -> None:
        """Save a checkpoint."""
        poplar.save_checkpoint(path, self.optimizer)

    def load(self, path: Path) -> None:
        """Load a checkpoint."""
        poplar.load_checkpoint(path, self.optimizer)

    def stall(self, path: Path) -> Callable[[], None]:
        """Start an asynchronous save; the result waits until it is complete."""
        if self._manager is None:
            self._manager = poplar.CheckpointManager(path, self.optimizer, asynchronous=True)
        self._manager.save(0)
        return self._manager.wait


class TorchAlone:
    """A training with FSDP2, saved and loaded as PyTorch's documentation does."""

    prefix = "torch_"

    def __init__(self, parameters: int) -> None:
        self.model = model_of(parameters)
        for layer in self.model:
            fully_shard(layer)
        fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.model(torch.ones(1, BLOCK)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _state(self) -> dict[str, object]:
        model, optim = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optim}

    def save(self, path: Path) -> None:
        """Save a checkpoint, and bring it to the disk."""
        dcp.save(self._state(), storage_writer=dcp.FileSystemWriter(path, sync_files=True))

    def load(self, path: Path) -> None:
        """Load a checkpoint."""
        state = self._state()
        dcp.load(state, checkpoint_id=path)
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],  # type: ignore[arg-type]
            optim_state_dict=state["optim"],  # type: ignore[arg-type]
        )

    def stall(self, path: Path) -> Callable[[], None]:
        """Start an asynchronous save; the result waits until it is complete."""
        writer = dcp.FileSystemWriter(path, sync_files=True)
        saving = dcp.async_save(self._state(), storage_writer=writer)
        return lambda: saving.result() and None  # type: ignore[union-attr]


def measure_times(options: argparse.Namespace, stage: int, folder: str) -> dict[str, float]:
    """How long saving and loading take: medians of the slowest rank. Collective."""
    warnings.filterwarnings("ignore", module="torch")
    torch.set_num_threads(1)
    rank = dist.get_rank()
    both = [WithPoplar(options.parameters * 10**6, stage), TorchAlone(options.parameters * 10**6)]
    seconds: dict[str, list[float]] = {}
    total = 0
    for number in range(options.rounds + 1):
        for each in both[:: 1 if number % 2 else -1]:
            path, again = Path(folder, f"{each.prefix}one"), Path(folder, f"{each.prefix}two")
            record(seconds, f"{each.prefix}save", lambda each=each, path=path: each.save(path))
            record(seconds, f"{each.prefix}load", lambda each=each, path=path: each.load(path))
            if isinstance(each, WithPoplar):
                total = sum(file.stat().st_size for file in path.iterdir())
            wait = record(
                seconds, f"{each.prefix}stall", lambda each=each, again=again: each.stall(again)
            )
            wait()
            dist.barrier()
            if rank == 0:
                shutil.rmtree(path)
                shutil.rmtree(again)
            dist.barrier()
    everything: list[dict[str, list[float]]] = [{}] * options.ranks
    dist.all_gather_object(everything, seconds)
    slowest = {
        f"{key}_seconds": statistics.median(
            [max(times) for times in zip(*(e[key] for e in everything), strict=True)][1:]
        )
        for key in seconds  # the first round imports modules and allocates buffers
    }
    return {"bytes": total, **slowest}


def record(seconds: dict[str, list[float]], name: str, action: Callable[[], T]) -> T:
    """Time an action, which all ranks start together."""
    dist.barrier()
    began = time.perf_counter()
    result = action()
    seconds.setdefault(name, []).append(time.perf_counter() - began)
    return result


def measure_memory(options: argparse.Namespace, stage: int, folder: str) -> dict[str, int]:
    """The peak of saving on the worst rank. Collective."""
    torch.set_num_threads(1)
    return_freed_memory()
    training = WithPoplar(options.parameters * 10**6, stage)
    path, peaks = Path(folder, f"memory-{stage}"), []
    for number in range(options.rounds + 1):
        release_freed_memory()
        reset_peak()
        held = resident_bytes()
        training.save(path)
        if number:  # the first save imports modules
            peaks.append(peak_resident_bytes() - held)
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(path)
    by_rank: list[int] = [0] * options.ranks
    dist.all_gather_object(by_rank, max(peaks))
    unit = max(unit.unsharded_bytes for unit in training.optimizer._training.engine.units)
    return {"save_peak_bytes": max(by_rank), "unit_bytes": unit}


def model_of(parameters: int) -> nn.Sequential:
    """Square layers with this many parameters."""
    blocks = max(1, parameters // BLOCK**2)
    return nn.Sequential(*(nn.Linear(BLOCK, BLOCK, bias=False) for _ in range(blocks)))


def targets(rows: Sequence[Row]) -> Iterator[Target]:
    """Seconds against PyTorch alone, and the peak of saving."""
    for row in rows:
        at_most = partial(Target, case=f"stage {row['stage']}", at_most=True)
        for what in ("save", "load", "stall"):
            ratio = row[f"{what}_seconds"] / row[f"torch_{what}_seconds"]
            yield at_most(what=f"{what} over torch", value=ratio, wanted=SLOWER)
        units = row["save_peak_bytes"] / row["unit_bytes"]
        yield at_most(what="saving needs so many units", value=units, wanted=1)


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
