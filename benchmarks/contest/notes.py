"""What a reader of the figures has to know."""

from __future__ import annotations

from collections.abc import Iterator

from awake import REQUESTS, can_stay_awake
from emulation import PERIOD_US

from contest.clusters import Cluster
from contest.outcome import Contest

DRIFT = 0.1
"""A rank whose calibrated speed changed by more than this during a run is told of."""
SMALL_QUOTA = 0.2
"""Of a core: below it the stall counts."""


def notes(cluster: Cluster, contest: Contest) -> Iterator[str]:
    """Sentences, none if there is nothing to say."""
    pairs = zip(contest.before.speeds, contest.after.speeds, strict=True)
    for rank, (early, late) in enumerate(pairs):
        change = late / early - 1
        if abs(change) > DRIFT:
            yield (
                f"drift: rank {rank} did {early:.1f} samples/s on its own before the run and "
                f"{late:.1f} after it ({100 * change:+.0f} %)"
            )
    for rank, quota in enumerate(cluster.quotas):
        if quota < SMALL_QUOTA:
            period = PERIOD_US / 1000
            yield (
                f"stall: rank {rank} has {quota * period:.1f} ms of every {period:g} ms; when they "
                f"are used up it stands still for up to {(1 - quota) * period:.1f} ms, at every "
                "collective that waits for it"
            )
    if not can_stay_awake():
        yield (
            f"sleeping cores: {REQUESTS} can't be written to, so cores sleep when ranks wait; on a "
            "virtual machine that slows ranks under quotas by 6 to 9 %, and unevenly"
        )
    if cluster.cores:
        yield (
            "core sharing: a rank that waits leaves its core to its neighbours, so predictions "
            "are judged under quotas only"
        )
    if cluster.hosts:
        yield (
            "slow link: the ideal over even counts the bytes that have to cross the link; the "
            "sum of speeds does not"
        )
