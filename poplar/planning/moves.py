"""Plans that differ from another one by a few samples."""

from __future__ import annotations

from dataclasses import replace

from poplar.planning.plan import MEETS_EVERY_PASS, Plan


def moved(plan: Plan, source: int, target: int, samples: int = 1) -> Plan | None:
    """The plan with some samples of the longest pass of `source` in the shortest of `target`.

    Where ranks meet at every pass, both change in the same one: the longest of `source`. None if
    there are not so many samples, or one of the ranks has no passes.
    """
    passes = [list(sizes) for sizes in plan.micro_batches]
    if not passes[source] or not passes[target]:
        return None
    longest = max(range(len(passes[source])), key=passes[source].__getitem__)
    if plan.stage >= MEETS_EVERY_PASS:
        same = longest
    else:
        same = min(range(len(passes[target])), key=passes[target].__getitem__)
    if passes[source][longest] < samples:
        return None
    passes[source][longest] -= samples
    passes[target][same] += samples
    micro_batches = tuple(tuple(sizes) for sizes in passes)
    return replace(plan, micro_batches=micro_batches, prediction=None)
