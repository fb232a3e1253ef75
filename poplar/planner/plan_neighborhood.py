"""Plans similar to a given one: samples moved between ranks, or another number of passes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from poplar.plan import FIRST_STAGE_SYNCHRONIZING_EVERY_PASS, Plan


def moved(plan: Plan, source: int, target: int, samples: int = 1) -> Plan | None:
    """The plan with samples moved from the longest pass of `source` to the shortest of `target`.

    At stages 2 and 3, which synchronize at every pass, both ranks change in the same pass: the
    longest of `source`. None if it has fewer samples, or a rank has no passes.
    """
    passes = [list(sizes) for sizes in plan.micro_batches]
    if not passes[source] or not passes[target]:
        return None
    longest = max(range(len(passes[source])), key=passes[source].__getitem__)
    if plan.stage >= FIRST_STAGE_SYNCHRONIZING_EVERY_PASS:
        receiving = longest
    else:
        receiving = min(range(len(passes[target])), key=passes[target].__getitem__)
    if passes[source][longest] < samples:
        return None
    passes[source][longest] -= samples
    passes[target][receiving] += samples
    micro_batches = tuple(tuple(sizes) for sizes in passes)
    return replace(plan, micro_batches=micro_batches, prediction=None)


def recut(plan: Plan, ranks: Sequence[int], passes: int) -> Plan:
    """The plan with the samples of these ranks in `passes` passes of nearly equal size."""
    micro_batches = tuple(
        _spread(sum(sizes), passes) if rank in ranks else sizes
        for rank, sizes in enumerate(plan.micro_batches)
    )
    return replace(plan, micro_batches=micro_batches, prediction=None)


def _spread(samples: int, passes: int) -> tuple[int, ...]:
    size, larger = divmod(samples, passes)
    return (size,) * (passes - larger) + (size + 1,) * larger
