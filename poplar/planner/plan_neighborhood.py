"""Plans near another one: samples at another rank, or in another number of passes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from poplar.plan import FIRST_STAGE_SYNCHRONIZING_EVERY_PASS, Plan


def moved(plan: Plan, source: int, target: int, samples: int = 1) -> Plan | None:
    """The plan with some samples of the longest pass of `source` in the shortest of `target`.

    Where ranks meet at every pass, both change in the same one: the longest of `source`. None if
    there are not so many samples, or one of the ranks has no passes.
    """
    passes = [list(sizes) for sizes in plan.micro_batches]
    if not passes[source] or not passes[target]:
        return None
    longest = max(range(len(passes[source])), key=passes[source].__getitem__)
    if plan.stage >= FIRST_STAGE_SYNCHRONIZING_EVERY_PASS:
        same = longest
    else:
        same = min(range(len(passes[target])), key=passes[target].__getitem__)
    if passes[source][longest] < samples:
        return None
    passes[source][longest] -= samples
    passes[target][same] += samples
    micro_batches = tuple(tuple(sizes) for sizes in passes)
    return replace(plan, micro_batches=micro_batches, prediction=None)


def recut(plan: Plan, ranks: Sequence[int], passes: int) -> Plan:
    """The plan with the samples of these ranks in so many passes, as alike as they can be."""
    micro_batches = tuple(
        _spread(sum(sizes), passes) if rank in ranks else sizes
        for rank, sizes in enumerate(plan.micro_batches)
    )
    return replace(plan, micro_batches=micro_batches, prediction=None)


def _spread(samples: int, passes: int) -> tuple[int, ...]:
    size, larger = divmod(samples, passes)
    return (size,) * (passes - larger) + (size + 1,) * larger
