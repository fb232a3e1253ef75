"""Facts about one rank: versions, device, memory, operators and transport.

Plain values with JSON both ways, so that ranks that cannot exchange tensors can still be compared.
Collecting them makes no process group and sends nothing.
"""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version

import torch
import torch.distributed as dist

import poplar
from poplar import ops
from poplar.comm import host_topology
from poplar.system import devices, host_limits
from poplar.system.devices import DeviceInfo
from poplar.values.formatting import format_ranks

_OPTIONAL_PACKAGES = ("triton", "nvidia-ml-py")
"""Names of distributions."""

_SETTINGS = (
    "GLOO_SOCKET_IFNAME",
    "NCCL_MULTI_RANK_GPU_ENABLE",
    "NCCL_P2P_DISABLE",
    "NCCL_P2P_LEVEL",
    "NCCL_SHM_DISABLE",
    "NCCL_SOCKET_IFNAME",
)
"""Environment variables that decide how ranks reach each other."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankFacts:
    """One rank, its device and its host."""

    rank: int
    host_id: str
    """The boot id of the host; its name if that is unknown."""
    device: DeviceInfo
    dtypes: tuple[str, ...]
    """That the device multiplies without emulation."""
    versions: Mapping[str, str]
    """By name: poplar, python, torch, CUDA, NCCL, driver, ...; absent is "none"."""
    machine: str
    """Architecture of the host: "x86_64"."""
    operators: str
    """Which implementation of the tensor operators is used, and why."""
    native_operators: bool
    transport: str
    """How tensors are sent between ranks; "none: ..." with the reason."""
    memory_bytes: int
    """That this rank may use, if nothing else is started on its host."""
    shared_memory_bytes: tuple[int, int] | None
    """Free and total of `/dev/shm`."""
    cores: int
    """Number of CPU cores that this process may run on."""
    threads: int
    """CPU threads that torch computes with in this process."""
    address: str
    """What the host name resolves to; empty: to nothing, or there is one rank only."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of NCCL and gloo that are set."""
    kernel: str = ""
    """Release of the operating system's kernel."""
    architectures: tuple[str, ...] = ()
    """CUDA architectures that this build of torch has kernels for."""
    operators_problem: tuple[str, str] | None = None
    """Why the operators cannot run on the device, and what to do; None if they can."""
    peer_access: Mapping[str, bool] = field(default_factory=dict)
    """By UUID of each other visible GPU: whether this one can read its memory."""
    affinity: str = "0"
    """The cores that this process may run on, as a hexadecimal mask like that of `taskset`; "0" if
    they are not known."""
    cpu_quota: tuple[int, float] | None = None
    """The smallest CPU quota of this process: the number of the control group that shares it, and
    the quota in cores. None: no quota."""


def describe_values(ranks: Sequence[RankFacts], values: Sequence[str]) -> str:
    """One value per rank as text: the value, or if they differ, each value with its ranks."""
    groups: dict[str, list[int]] = {}
    for facts, value in zip(ranks, values, strict=True):
        groups.setdefault(value, []).append(facts.rank)
    if len(groups) == 1:
        return values[0]
    return ", ".join(
        f"{value or 'none'} ({format_ranks(members)})" for value, members in groups.items()
    )


def own_rank() -> int:
    """This process's rank, from the process group or the launcher; else 0."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    return int(os.environ.get("RANK", "0"))


def own_world_size() -> int:
    """The number of ranks, from the process group or the launcher; else 1."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))


def own_device() -> torch.device:
    """The CUDA device of the local rank, or the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    return torch.device("cuda", local_rank % torch.cuda.device_count())


def collect_facts(device: torch.device) -> RankFacts:
    """Collect the facts of this rank. Creates a CUDA context on a CUDA device."""
    info = devices.describe(device)
    sharing = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if info.kind == "cpu" else 1
    return RankFacts(
        rank=own_rank(),
        host_id=host_topology.host_id()[0],
        device=info,
        dtypes=("float32", "float16", "bfloat16") if info.has_bf16 else ("float32", "float16"),
        versions=_versions(info),
        machine=platform.machine(),
        operators=ops.describe(),
        native_operators=ops.native_cuda if info.kind == "cuda" else ops.native,
        transport=_transport(info),
        memory_bytes=devices.memory_available(device, sharing),
        shared_memory_bytes=host_limits.shared_memory(),
        cores=host_limits.cores(),
        threads=torch.get_num_threads(),
        address=_address(),
        settings={name: os.environ[name] for name in _SETTINGS if os.environ.get(name)},
        kernel=platform.release(),
        architectures=tuple(torch.cuda.get_arch_list()) if info.kind == "cuda" else (),
        operators_problem=ops.problem_on(info.capability) if info.capability else None,
        peer_access=devices.peer_access(device),
        affinity=f"{sum(1 << core for core in host_limits.affinity()):x}",
        cpu_quota=host_limits.shared_quota(),
    )


def _versions(info: DeviceInfo) -> dict[str, str]:
    has_nccl = torch.cuda.is_available() and dist.is_nccl_available()
    return {
        "poplar": poplar.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "CUDA": torch.version.cuda or "none",
        "NCCL": ".".join(map(str, torch.cuda.nccl.version())) if has_nccl else "none",
        "driver": info.driver or "none",
        **{name: _installed(name) for name in _OPTIONAL_PACKAGES},
    }


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
        return ""  # not needed, and an unreachable name server takes seconds
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return ""
