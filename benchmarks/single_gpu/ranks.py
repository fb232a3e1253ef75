"""A rank that `watchdog.py` has started: its process group and its device."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from emulation import CorePlacement

RENDEZVOUS = "POPLAR_RENDEZVOUS"
"""The environment variable with the file at which the ranks of one start meet."""
CORE = "POPLAR_CORE"
"""The environment variable with the core that a rank is bound to; not bound without it."""


def environment(folder: Path) -> dict[str, str]:
    """Environment of ranks that meet in `folder`; all of them are on this machine."""
    settings = {RENDEZVOUS: str(folder / "rendezvous"), "OMP_NUM_THREADS": "1"}
    if Path("/sys/class/net/lo").exists():  # the host's name may not resolve
        settings["GLOO_SOCKET_IFNAME"] = "lo"
    return settings


def cores_of(percent: Sequence[float], cores: Sequence[int]) -> tuple[int, ...]:
    """A core for each rank, so that ranks which share a core are slower.

    The stand-in on the CPU for a percentage of a GPU: 50, 25 and 25 % of two cores are one rank
    that has a core and two that share the other.
    """
    before = [sum(percent[:rank]) / sum(percent) for rank in range(len(percent))]
    return tuple(cores[int(part * len(cores) + 1e-9)] for part in before)


def join(device: str, *, nccl: bool, seconds: float) -> torch.device:
    """Join the default process group; returns this rank's device, which several ranks may share.

    Args:
        device: `cuda` or `cpu`.
        nccl: CUDA tensors by NCCL; otherwise there is only gloo.
        seconds: timeout of the group's collectives.
    """
    torch.set_num_threads(1)
    if CORE in os.environ:
        CorePlacement(int(os.environ[CORE])).apply()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    target = torch.device("cpu")
    if device == "cuda":
        target = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(target)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if nccl else "gloo",
        init_method=f"file://{os.environ[RENDEZVOUS]}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=seconds),
    )
    return target


def leave() -> None:
    """End this process at once: threads of gloo may abort the interpreter's shutdown."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
