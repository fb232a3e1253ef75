"""Notes on conditions that affect the results of a comparison."""

from __future__ import annotations

from collections.abc import Iterator

from emulation import PERIOD_US
from idle_states import can_prevent_idle_states

from head_to_head.clusters import Cluster
from head_to_head.outcome import Comparison

DRIFT = 0.1
"""Relative change of a rank's speed in plain passes that is reported."""
SMALL_QUOTA = 0.2
"""Fraction of a core below which the pauses of a quota are reported."""


def notes(cluster: Cluster, comparison: Comparison) -> Iterator[str]:
    """The notes, one sentence each."""
    pairs = zip(comparison.before.speeds, comparison.after.speeds, strict=True)
    for rank, (early, late) in enumerate(pairs):
        change = late / early - 1
        if abs(change) > DRIFT:
            yield (
                f"drift: rank {rank} ran {early:.1f} samples/s in plain passes before the run and "
                f"{late:.1f} after it ({100 * change:+.0f} %)"
            )
    for rank, speeds in enumerate(zip(*comparison.turns, strict=True)):
        if max(speeds) > (1 + DRIFT) * min(speeds):
            yield (
                f"noise: from round to round, rank {rank} ran {min(speeds):.1f} to "
                f"{max(speeds):.1f} samples/s in plain passes of one size"
            )
    for rank, quota in enumerate(cluster.quotas):
        if quota < SMALL_QUOTA:
            period = PERIOD_US / 1000
            yield (
                f"stall: rank {rank} has {quota * period:.1f} ms of every {period:g} ms; when they "
                f"are used up it stands still for up to {(1 - quota) * period:.1f} ms, at every "
                "collective that waits for it"
            )
    if not can_prevent_idle_states():
        yield (
            "sleeping cores: this process has a CPU quota, so cores sleep when ranks wait "
            "(idle_states.py); that slows ranks under quotas, and unevenly"
        )
    if cluster.cores:
        yield (
            "core sharing: a rank that waits leaves its core to the other ranks of that core, so "
            "predictions are judged under quotas only"
        )
    if cluster.hosts:
        yield (
            "slow link: the ideal over even counts the bytes that have to cross the link; the "
            "sum of speeds does not"
        )
