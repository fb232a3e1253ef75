"""Programs that end without waiting for an asynchronous save: in time, and not silently."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import os, resource, sys, time
from datetime import timedelta
import torch, torch.distributed as dist
import poplar

rank, folder, ends = int(sys.argv[1]), sys.argv[2], sys.argv[3]
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
optimizer = poplar.HeteroZeroOptimizer(
    torch.nn.Linear(600, 600), torch.optim.SGD, stage=3, timeout=timedelta(minutes=5), lr=0.1
)
manager = poplar.CheckpointManager(f"{folder}/saved", optimizer, asynchronous=True)
manager.save(1)
manager.wait()
if rank == 1 and ends == "full disk":
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
if rank == 1 and ends == "killed":
    poplar.checkpoint.files.data_file.DataFile.write_items = lambda *_: os._exit(3)
if ends == "exits":
    write = poplar.checkpoint.files.data_file.DataFile.write_items
    slow = lambda *given: (time.sleep(2), write(*given))[1]
    poplar.checkpoint.files.data_file.DataFile.write_items = slow
manager.save(2)
if ends == "exits":  # as in a handler of SIGTERM
    stop = lambda model, x: sys.exit(0) if rank == 0 else model(x).sum()
    optimizer.train_step(stop, torch.ones(1, 600))
if ends == "raises":
    raise ValueError("the program is wrong")
"""


def run(folder: Path, ends: str) -> list[tuple[int, str]]:
    """Exit code and stderr of two ranks."""
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(rank), str(folder), ends],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        errors = [rank.communicate(timeout=240)[1] for rank in ranks]  # below the deadline
    finally:
        for rank in ranks:
            rank.kill()
    return [(rank.returncode, error) for rank, error in zip(ranks, errors, strict=True)]


@pytest.mark.parametrize("ends", ["full disk", pytest.param("killed", marks=pytest.mark.full)])
def test_failed_save_is_reported_and_the_exit_code_says_so(tmp_path: Path, ends: str) -> None:
    (code, error), (other_code, other_error) = run(tmp_path, ends)
    assert code == 1, error
    assert "poplar: rank 0: saving the checkpoint" in error
    assert "rank 1 has ended or failed before its part" in error
    if ends == "full disk":
        assert other_code == 1
        assert "step-00000002.incomplete/__1_0.distcp" in other_error
    else:
        assert other_code == 3
    assert names_of_saved(tmp_path) == ["step-00000001"]


def names_of_saved(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "saved").iterdir())


def test_save_is_completed_if_a_rank_exits_in_a_step(tmp_path: Path) -> None:
    (code, error), (other_code, other_error) = run(tmp_path, "exits")
    assert code == 0, error
    assert other_code == 1
    assert "CollectiveTimeout" in other_error
    assert names_of_saved(tmp_path) == ["step-00000001", "step-00000002"]


@pytest.mark.full
def test_save_is_completed_after_an_error_of_the_program(tmp_path: Path) -> None:
    for code, error in run(tmp_path, "raises"):
        assert code == 1
        assert "the program is wrong" in error
        assert "failed" not in error
    assert names_of_saved(tmp_path) == ["step-00000001", "step-00000002"]
