"""Passes as a person would cut them, where it costs nothing.

Curves are measured, so between two ways to cut the same samples noise decides: sixteen passes of 7
may seem a hair faster than three of 38. A rank that is not the last anyway, or hardly slower for
it, gets the fewest passes of equal size instead.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from poplar.planner.batch_allocation import MicroBatches
from poplar.planner.cost_model import StageCosts
from poplar.planner.rank_groups import members

_SLOWER = 0.01
"""How much longer, as a fraction, a rank may compute for fewer passes while it is not the last."""
_ROUNDING = 1e-12


def tidied(
    costs: StageCosts, micro_batches: MicroBatches, caps: Sequence[int], allowed: float
) -> MicroBatches:
    """Fewer passes for ranks that meet once a step.

    Args:
        costs: of a stage at which ranks meet once a step.
        micro_batches: passes that are fast.
        caps: by rank, the largest micro-batch.
        allowed: seconds by which the meeting may become later.
    """
    ((latest, reducible),) = costs.synchronizations(micro_batches)
    allowed += _ROUNDING * latest
    alike = members(zip(costs.cluster.device_kinds, micro_batches, caps, strict=True))
    tidy = list(micro_batches)
    for ranks in alike:
        first = ranks[0]
        passes = _fewer(
            costs, first, tidy[first], caps[first], latest + allowed, reducible + allowed
        )
        for rank in ranks:
            tidy[rank] = passes
    return tuple(tidy)


def _fewer(
    costs: StageCosts,
    rank: int,
    passes: tuple[int, ...],
    cap: int,
    latest: float,
    reducible: float,
) -> tuple[int, ...]:
    samples = sum(passes)
    most = _end(costs, rank, passes) * (1.0 + _SLOWER)
    if not costs.overlaps:
        reducible = math.inf
    for count in range(-(-samples // max(1, cap)), len(passes)):
        size, larger = divmod(samples, count)
        cut = (size,) * (count - larger) + (size + 1,) * larger
        end = _end(costs, rank, cut)
        begun = end - costs.reducible_fraction * costs.pass_seconds(rank, cut[-1])
        if end <= min(most, latest) and begun <= reducible:
            return cut
    return passes


def _end(costs: StageCosts, rank: int, passes: Sequence[int]) -> float:
    return math.fsum(costs.pass_seconds(rank, batch) for batch in passes)
