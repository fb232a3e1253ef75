"""NCCL for several ranks on one GPU: the library to preload, its version, its settings.

`torch.cuda.nccl.version()` is the version that torch was compiled with. Here the library that a
process uses is asked itself.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path

SHARES_A_GPU = (2, 30)
"""The first version that lets ranks of one host share a GPU."""
MAX_CTAS = 2
"""Thread blocks of a collective, by default. NCCL's own default is for one or two ranks per GPU:
ranks that wait for each other must all fit on the GPU at the same time."""
LIBRARY = "libnccl.so*"
_ASK = "import sys; from single_gpu import nccl; print(nccl.code_of(sys.argv[1]))"
_ASK_TORCH = "import torch; from single_gpu import nccl; print(nccl.loaded_code() or '')"

Version = tuple[int, int, int]


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


def version_of(library: Path) -> Version:
    """The version of a library, which is loaded in a separate process.

    Raises:
        ValueError: it cannot be loaded, or is not NCCL.
    """
    done = _run(_ASK, str(library))
    if done.returncode:
        reason = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        raise ValueError(f"{library} cannot be used as NCCL: {reason[0]}")
    return parse(int(done.stdout))


def _run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True,
        text=True,
        cwd=Path(__file__).resolve().parents[1],
        check=False,
    )


def version_in_use(path: Path | None) -> Version | None:
    """The version that ranks with `path` preloaded use; None: torch's own, if it has one.

    Raises:
        ValueError: `path` is not NCCL.
    """
    if path is not None:
        return version_of(find_library(path))
    code = _run(_ASK_TORCH).stdout.strip()
    return parse(int(code)) if code else None


def code_of(library: str | None) -> int:
    """What `ncclGetVersion` of a library returns; None: of this process's global symbols.

    Raises:
        OSError: the library cannot be loaded.
        AttributeError: it is not NCCL.
    """
    code = ctypes.c_int()
    status = ctypes.CDLL(library).ncclGetVersion(ctypes.byref(code))
    if status:
        raise OSError(f"ncclGetVersion returned {status}")
    return code.value


def loaded_version() -> Version | None:
    """The version that this process uses; None if NCCL is not loaded."""
    code = loaded_code()
    return None if code is None else parse(code)


def loaded_code() -> int | None:
    """The number of `loaded_version`."""
    # A preloaded library has global symbols, which torch's calls are bound to.
    for library in (None, *_mapped()):
        try:
            return code_of(library)
        except (OSError, AttributeError):
            continue
    return None


def _mapped() -> list[str]:
    """Files of NCCL that are mapped into this process."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    paths = {line.split(maxsplit=5)[5] for line in lines if "libnccl" in line}
    return sorted(path for path in paths if Path(path).match(LIBRARY))


def parse(code: int) -> Version:
    """Major, minor and patch of the number that NCCL gives; before 2.9 it had fewer digits."""
    unit = 1_000 if code < 10_000 else 10_000
    return code // unit, code % unit // 100, code % 100


def text_of(version: tuple[int, ...] | None) -> str:
    """As `2.30.7`."""
    return "none" if version is None else ".".join(map(str, version))


def environment(library: Path | None, max_ctas: int = MAX_CTAS) -> dict[str, str]:
    """Environment of ranks that share a GPU."""
    settings = {
        "NCCL_MULTI_RANK_GPU_ENABLE": "1",
        "NCCL_MAX_CTAS": str(max_ctas),
        "NCCL_NVLS_ENABLE": "0",  # reductions in a switch, which one GPU does not have
    }
    return settings if library is None else {**settings, "LD_PRELOAD": str(library)}


def one_host_per_rank(rank: int) -> dict[str, str]:
    """Environment of a rank that shares a GPU with any version, as if each rank had its own host.

    NCCL before 2.30 refuses two ranks with one bus id *and* one hash of the host; `NCCL_HOSTID`
    replaces the hash (`src/init.cc`). The ranks then exchange data through sockets.
    """
    return {
        "NCCL_HOSTID": f"rank{rank}",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": "1",
        "NCCL_NET": "Socket",
        "NCCL_MAX_CTAS": str(MAX_CTAS),
    }
