"""The largest possible speed-up of any split of samples over the even split."""

from __future__ import annotations

import statistics

from head_to_head.clusters import Cluster
from head_to_head.outcome import Comparison

GATHERS_AND_REDUCTIONS = (2, 2, 2, 3)
"""By stage: how many times a step of one pass communicates the size of the model."""
BYTES_PER_ELEMENT = 4


def ideals(cluster: Cluster, comparison: Comparison) -> dict[int, float]:
    """Ideal speed-up over the even split by stage, from the calibration.

    With even batches all ranks wait for the slowest; ideally, samples are proportional to speed. A
    slow link between hosts adds the same seconds to both, which lowers the ideal.
    """
    speeds = comparison.speeds
    even = comparison.task.global_batch / (len(speeds) * min(speeds))
    if comparison.even_seconds:  # measured: includes what waiting ranks leave to others
        even = statistics.median(comparison.even_seconds)
    ideal = comparison.task.global_batch / sum(speeds)
    link = {stage: link_seconds(cluster, stage, comparison) for stage in comparison.ideal_over_even}
    return {stage: (even + link[stage]) / (ideal + link[stage]) for stage in link}


def link_seconds(cluster: Cluster, stage: int, comparison: Comparison) -> float:
    """Least seconds on a host's link: what other ranks own, per unshard or reduction, each way.

    Holds for hosts with one rank each and even shares; 0 without slow links.
    """
    if not cluster.hosts:
        return 0.0
    others = 1.0 - 1.0 / cluster.size
    moved = GATHERS_AND_REDUCTIONS[stage] * comparison.parameters * BYTES_PER_ELEMENT * others
    return moved * 8 / cluster.link
