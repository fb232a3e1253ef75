"""NCCL for several ranks on one GPU: the library to preload, its version, its settings."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

MAX_CTAS = 2
"""Thread blocks of a collective, by default. NCCL's own default is for one or two ranks per GPU:
ranks that wait for each other must all fit on the GPU at the same time."""
LIBRARY = "libnccl.so*"


def find_library(path: Path) -> Path:
    """NCCL's library: `path` itself, or the one file in or below the folder `path`.

    Raises:
        ValueError: there is none, or several.
    """
    if path.is_file():
        return path.resolve()
    found = sorted({file.resolve() for file in path.rglob(LIBRARY) if file.is_file()})
    if len(found) != 1:
        names = ", ".join(map(str, found)) or "none"
        raise ValueError(f"{path}: expected one {LIBRARY} in this folder, found {names}")
    return found[0]


def loaded_version() -> str:
    """The version that this process uses: of the preloaded library, else of torch's own."""
    code = ctypes.c_int()
    try:
        ctypes.CDLL(None).ncclGetVersion(ctypes.byref(code))
    except AttributeError:
        return ".".join(map(str, torch.cuda.nccl.version()))
    return f"{code.value // 10_000}.{code.value % 10_000 // 100}.{code.value % 100}"


def environment(library: Path, max_ctas: int = MAX_CTAS) -> dict[str, str]:
    """Environment of ranks that share a GPU by a library of version 2.30 or newer."""
    return {
        "LD_PRELOAD": str(library),
        "NCCL_MULTI_RANK_GPU_ENABLE": "1",
        "NCCL_MAX_CTAS": str(max_ctas),
        "NCCL_NVLS_ENABLE": "0",  # reductions in a switch, which one GPU does not have
    }


def one_host_per_rank(rank: int, max_ctas: int = MAX_CTAS) -> dict[str, str]:
    """Environment of a rank that shares a GPU with any version, as if each rank had its own host.

    NCCL before 2.30 refuses two ranks with one bus id *and* one hash of the host; `NCCL_HOSTID`
    replaces the hash (`src/init.cc`). The ranks then exchange data through sockets.
    """
    return {
        "NCCL_HOSTID": f"rank{rank}",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": "1",
        "NCCL_NET": "Socket",
        "NCCL_MAX_CTAS": str(max_ctas),
    }
