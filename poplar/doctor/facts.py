"""What one rank says of itself before ranks work together: versions, device, memory, who serves.

Plain values, JSON both ways, so that `doctor` can compare ranks that may not even be able to
understand each other's tensors. Gathering them makes no process group and sends nothing.
"""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import torch.distributed as dist

import poplar
from poplar import ops
from poplar.system import devices, host_limits
from poplar.system.devices import DeviceInfo

_ASKED_FOR = ("rich", "triton", "typer", "nvidia-ml-py")
"""Packages that serve if they are there, by the names of their distributions."""

_HOST_NAME_SETTINGS = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


@dataclass(frozen=True, kw_only=True, slots=True)
class RankFacts:
    """One rank, its device and its host."""

    rank: int
    node: str
    """Which of the launcher's nodes it is on; the host's name without a launcher."""
    device: DeviceInfo
    dtypes: tuple[str, ...]
    """In which the device multiplies by itself, without emulation."""
    versions: Mapping[str, str]
    """By name: poplar, python, torch, CUDA, NCCL, driver, ...; absent is "none"."""
    machine: str
    """Architecture of the host's processor: "x86_64"."""
    operators: str
    """What serves the engine's tensor operators, and why."""
    native_operators: bool
    transport: str
    """What carries tensors between ranks."""
    memory_bytes: int
    """What this rank may use, if nothing else is started on its host."""
    shared_memory_bytes: tuple[int, int] | None
    """Free and total of `/dev/shm`."""
    cores: int
    """Of the host's processor, that this process may run on."""
    threads: int
    """Of its own, that torch computes with on the host's processor."""
    address: str
    """What the host's own name resolves to; empty if to nothing, or nobody was asked."""
    interface: str
    """The network interface that was asked for by environment; empty if none was."""
    architectures: tuple[str, ...] = ()
    """Which CUDA architectures this build of torch has kernels for."""
    may_share_device: bool = False
    """Whether NCCL was told that several ranks use one device."""

    def to_dict(self) -> dict[str, Any]:
        """In JSON's types; `from_dict` gives it back."""
        return asdict(self)

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> RankFacts:
        """The facts that `to_dict` wrote, perhaps through JSON."""
        fields = _tuples(content)
        fields["device"] = DeviceInfo(**_tuples(content["device"]))
        return cls(**fields)


def own_rank() -> int:
    """This process's rank, by the process group or the launcher; 0 alone."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    return int(os.environ.get("RANK", "0"))


def own_world_size() -> int:
    """Ranks of this job, by the process group or the launcher; 1 alone."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))


def own_device() -> torch.device:
    """The device that a launched process is meant to use: by its local rank, or the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    return torch.device("cuda", local_rank % torch.cuda.device_count())


def gather(device: torch.device) -> RankFacts:
    """What this rank can say of itself. Makes a CUDA context on a CUDA device."""
    info = devices.describe(device)
    ranks_on_host = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return RankFacts(
        rank=own_rank(),
        node=os.environ.get("GROUP_RANK", platform.node()),
        device=info,
        dtypes=("float32", "float16", "bfloat16") if info.has_bf16 else ("float32", "float16"),
        versions=_versions(info),
        machine=platform.machine(),
        operators=ops.describe(),
        native_operators=ops.native_cuda if info.kind == "cuda" else ops.native,
        transport=_transport(info),
        memory_bytes=devices.memory_available(device, ranks_on_host),
        shared_memory_bytes=host_limits.shared_memory(),
        cores=host_limits.cores(),
        threads=torch.get_num_threads(),
        address=_address(),
        interface=next(filter(None, map(os.environ.get, _HOST_NAME_SETTINGS)), ""),
        architectures=tuple(torch.cuda.get_arch_list()) if info.kind == "cuda" else (),
        may_share_device=os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1",
    )


def _versions(info: DeviceInfo) -> dict[str, str]:
    return {
        "poplar": poplar.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "CUDA": torch.version.cuda or "none",
        "NCCL": _nccl_version(),
        "driver": info.driver or "none",
        **{name: _installed(name) for name in _ASKED_FOR},
    }


def _nccl_version() -> str:
    if not torch.cuda.is_available() or not dist.is_nccl_available():
        return "none"
    return ".".join(map(str, torch.cuda.nccl.version()))


def _installed(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "none"


def _transport(info: DeviceInfo) -> str:
    if not dist.is_available():
        return "none: this build of torch has no torch.distributed"
    backend = dist.get_default_backend_for_device(info.kind)
    if not dist.is_backend_available(backend):
        return f"none: this build of torch has no {backend}"
    return f"process group over {backend}"


def _address() -> str:
    if own_world_size() == 1:
        return ""  # nobody has to find this host, and asking a dead name server takes seconds
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return ""


def _tuples(content: Mapping[str, Any]) -> dict[str, Any]:
    """JSON has lists where values are tuples."""
    return {
        name: tuple(value) if isinstance(value, list) else value for name, value in content.items()
    }
