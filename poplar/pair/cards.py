"""What a row says about the cards and the software: no names of hosts or users, no identifiers."""

from __future__ import annotations

import itertools
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import poplar
from poplar.doctor.facts import RankFacts
from poplar.pair.row import Card


def card_of(facts: RankFacts) -> Card:
    """What a row has of a rank's device."""
    device = facts.device
    return Card(
        name=device.name,
        memory_gib=round(device.total_bytes / 2**30, 1),
        compute_capability=".".join(map(str, device.capability or ())),
        links=device.links,
    )


def peer_to_peer(ranks: Sequence[RankFacts]) -> bool | None:
    """Whether all GPUs can read each other's memory; None: unknown, as between hosts, or CPUs."""
    pairs = itertools.permutations(ranks, 2)
    access = [own.peer_access.get(other.device.uuid) for own, other in pairs]
    return None if None in access else all(access)


def versions(facts: RankFacts) -> dict[str, str]:
    """Of this package and of what it runs on; what does not exist is left out."""
    names = ("torch", "CUDA", "NCCL", "driver")
    found = {"poplar": poplar.__version__, "commit": commit()}
    found |= {name: facts.versions[name] for name in names}
    return {name: version for name, version in found.items() if version not in ("", "none")}


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
