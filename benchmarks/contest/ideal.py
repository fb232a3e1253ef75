"""How much faster than the even split any split of samples could be."""

from __future__ import annotations

import statistics

from contest.clusters import SLOW_LINK, Cluster
from contest.outcome import Contest

GATHERS_AND_REDUCTIONS = (2, 2, 2, 3)
"""By stage: how often a step of one pass moves the model, as gradients or as parameters."""
BYTES_PER_ELEMENT = 4


def ideals(cluster: Cluster, contest: Contest) -> dict[int, float]:
    """By stage, the ideal over even that the calibration gives.

    Even ranks wait for the slowest; ideally each does as much as it is fast. Where a slow link lies
    between hosts, both wait for the bytes that have to cross it, and the ideal is less.
    """
    speeds = contest.speeds
    even = contest.task.global_batch / (len(speeds) * min(speeds))
    if contest.even_seconds:  # measured, which knows what a waiting rank leaves to the others
        even = statistics.median(contest.even_seconds)
    ideal = contest.task.global_batch / sum(speeds)
    link = {stage: link_seconds(cluster, stage, contest) for stage in contest.ideal_over_even}
    return {stage: (even + link[stage]) / (ideal + link[stage]) for stage in link}


def link_seconds(cluster: Cluster, stage: int, contest: Contest) -> float:
    """Least time on the slow link, in either direction: half of the model per gather or reduction,
    as two hosts with one rank each and even shares have it; 0 without such a link.
    """
    if not cluster.hosts:
        return 0.0
    moved = GATHERS_AND_REDUCTIONS[stage] * contest.parameters * BYTES_PER_ELEMENT / 2
    return moved * 8 / SLOW_LINK
