"""Where a figure comes from: the machine, the versions, the commit and the day."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from functools import cache
from pathlib import Path


@cache
def device(kind: str = "cpu") -> str:
    """The machine's processor and its number of cores, or its first GPU."""
    if kind == "cuda":
        import torch

        return f"cuda: {torch.cuda.get_device_name()}"
    return f"{_processor()}, {os.cpu_count()} cores"


@cache
def versions(*names: str) -> str:
    """Of packages, as `torch 2.13.0, no deepspeed`, and of Python."""
    said = []
    for name in names:
        try:
            said.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            said.append(f"no {name}")
    return f"{', '.join(said)}, python {platform.python_version()}"


@cache
def commit() -> str:
    """Of this repository, `-dirty` if something was changed since; where a copy has no history, as
    `POPLAR_COMMIT` says.
    """
    command = ["git", "describe", "--always", "--dirty"]
    try:
        found = subprocess.run(
            command, capture_output=True, text=True, cwd=Path(__file__).parent, check=False
        )
        said = found.stdout.strip()
    except OSError:  # no git; the figures are no worse for it
        said = ""
    return said or os.environ.get("POPLAR_COMMIT", "unknown")


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
