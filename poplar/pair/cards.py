"""What a row says about the cards and the software: no names of hosts or users, no identifiers."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

import poplar
from poplar.pair.row import Card
from poplar.system import devices
from poplar.system.devices import DeviceInfo


@dataclass(frozen=True, kw_only=True)
class OwnCard:
    """This rank's device. The host name in it is compared, and not part of a row."""

    info: DeviceInfo
    free_bytes: int
    reaches_others: bool | None
    """Whether it can access the memory of all others; None: a CPU, or one of several hosts."""

    @classmethod
    def of(cls, device: torch.device) -> OwnCard:
        """Look at a device of the default process group."""
        local, world = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), dist.get_world_size()
        reaches = None
        if device.type == "cuda" and local == world <= torch.cuda.device_count():
            others = [other for other in range(world) if other != device.index]
            reaches = all(torch.cuda.can_device_access_peer(device.index, one) for one in others)
        return cls(
            info=devices.describe(device),
            free_bytes=devices.memory_available(device, local if device.type == "cpu" else 1),
            reaches_others=reaches,
        )

    @property
    def public(self) -> Card:
        """What a row has of it."""
        return Card(
            name=self.info.name,
            memory_gib=round(self.info.total_bytes / 2**30, 1),
            compute_capability=".".join(map(str, self.info.capability or ())),
            links=self.info.links,
        )

    def versions(self) -> dict[str, str]:
        """Of this package and of what it runs on; what does not exist is left out."""
        is_cuda = self.info.kind == "cuda"
        found = {
            "poplar": poplar.__version__,
            "commit": commit(),
            "torch": torch.__version__,
            "CUDA": torch.version.cuda or "",
            "NCCL": ".".join(map(str, torch.cuda.nccl.version())) if is_cuda else "",
            "driver": self.info.driver,
        }
        return {name: version for name, version in found.items() if version}


def commit() -> str:
    """Of the checkout that this package is in; empty for an installed package."""
    if "POPLAR_COMMIT" in os.environ:
        return os.environ["POPLAR_COMMIT"]
    root = Path(poplar.__file__).resolve().parents[1]
    if not (root / ".git").exists():
        return ""
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:  # git is not installed
        return ""
