"""Where a measurement comes from: hardware, package versions and commit."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


@cache
def device(kind: str = "cpu") -> str:
    """The machine's processor and its number of cores, or its first GPU."""
    if kind == "cuda":
        import torch

        return f"cuda: {torch.cuda.get_device_name()}"
    return f"{_processor()}, {os.cpu_count()} cores"


@cache
def versions(*names: str) -> str:
    """Versions of packages and of Python, as `torch 2.13.0, no deepspeed, python 3.11.7`."""
    found = []
    for name in names:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"no {name}")
    return ", ".join([*found, f"python {platform.python_version()}"])


@cache
def commit() -> str:
    """This checkout's commit, with `-dirty` if files other than saved rows differ from it.

    `POPLAR_COMMIT` overrides it, for copies without a history. A repository that only
    encloses such a copy does not count.
    """
    if "POPLAR_COMMIT" in os.environ:
        return os.environ["POPLAR_COMMIT"]
    if _git("rev-parse", "--show-toplevel") != str(ROOT):
        return "unknown"
    name = _git("describe", "--always") or "unknown"
    changed = _git(
        "status", "--porcelain", "--untracked-files=no", "--", ".", ":!/benchmarks/results"
    )
    return f"{name}-dirty" if changed else name


def _git(*command: str) -> str:
    """What git prints; nothing if it fails or is not installed."""
    try:
        finished = subprocess.run(
            ["git", *command], capture_output=True, text=True, cwd=ROOT, check=False
        )
    except OSError:
        return ""
    return finished.stdout.strip()


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
