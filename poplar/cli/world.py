"""The ranks that a command runs on: itself alone, or all that a launcher has started."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from poplar.doctor import Report, examine
from poplar.doctor.facts import own_device
from poplar.errors import PoplarError


def chosen_device(choice: str) -> torch.device:
    """This rank's device.

    Args:
        choice: `"auto"`: CUDA where there is any; `"cuda"`; `"cpu"`.

    Raises:
        ValueError: CUDA was asked for where there is none.
    """
    device = torch.device("cpu") if choice == "cpu" else own_device()
    if choice == "cuda" and device.type != "cuda":
        raise ValueError("there is no CUDA device here, or this build of torch has no CUDA")
    return device


@dataclass(frozen=True)
class World:
    """Who this process is among the ranks of the command."""

    rank: int
    size: int


@contextlib.contextmanager
def joined(device: torch.device) -> Iterator[World]:
    """The default process group, for as long as the context lasts.

    Before the ranks of a job do anything together, they are compared.

    Raises:
        PoplarError: ranks that cannot work together; says what the doctor found.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if "RANK" in os.environ:
        _refuse_problems(examine(device))
        dist.init_process_group(_backends(device))
    else:
        # Alone, nobody has to find this host: the loopback interface serves whatever its name is.
        if Path("/sys/class/net/lo").exists():
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group(_backends(device), store=HashStore(), rank=0, world_size=1)
    try:
        yield World(dist.get_rank(), dist.get_world_size())
    finally:
        dist.destroy_process_group()


def _backends(device: torch.device) -> str:
    """One for each kind of tensor: what ranks agree on stays on the host."""
    on_host = dist.get_default_backend_for_device("cpu")
    if device.type == "cpu":
        return on_host
    return f"cpu:{on_host},{device.type}:{dist.get_default_backend_for_device(device.type)}"


def _refuse_problems(report: Report) -> None:
    problems = [finding for finding in report.findings if finding.kind == "problem"]
    if problems:
        raise PoplarError(". ".join(map(str, problems)))
