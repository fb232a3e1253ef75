"""The process group of a command: one rank alone, or all ranks that torchrun started."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from poplar.doctor import examine
from poplar.doctor.facts import own_device
from poplar.values.errors import PoplarError


def chosen_device(choice: str) -> torch.device:
    """This rank's device.

    Args:
        choice: `"cuda"`, `"cpu"`, or `"auto"`: CUDA if there is a device.

    Raises:
        ValueError: "cuda" without a CUDA device.
    """
    device = torch.device("cpu") if choice == "cpu" else own_device()
    if choice == "cuda" and device.type != "cuda":
        raise ValueError(
            "--device cuda, but torch finds no CUDA device; check nvidia-smi and that "
            "torch.version.cuda is set, or use --device cpu"
        )
    return device


@contextlib.contextmanager
def joined(device: torch.device) -> Iterator[tuple[int, int]]:
    """The default process group, as long as the context lasts; its own rank and number of ranks.

    The ranks of a job are compared before their first collective.

    Raises:
        PoplarError: the ranks cannot work together; lists the doctor's problems.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if "RANK" in os.environ:
        problems = [found for found in examine(device).findings if found.kind == "problem"]
        if problems:
            raise PoplarError(". ".join(map(str, problems)))
        dist.init_process_group(_backends(device))
    else:
        # A single rank uses the loopback interface, even if the host name resolves to another
        # address.
        if Path("/sys/class/net/lo").exists():
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group(_backends(device), store=HashStore(), rank=0, world_size=1)
    try:
        yield dist.get_rank(), dist.get_world_size()
    finally:
        dist.destroy_process_group()


def _backends(device: torch.device) -> str:
    """One backend per device type: control messages stay on the host."""
    on_host = dist.get_default_backend_for_device("cpu")
    if device.type == "cpu":
        return on_host
    return f"cpu:{on_host},{device.type}:{dist.get_default_backend_for_device(device.type)}"
