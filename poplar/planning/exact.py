"""The fastest plan of one stage."""

from __future__ import annotations

from collections.abc import Sequence

from poplar.planning.allocation import EveryPass, MicroBatches, OncePerStep
from poplar.planning.cost_model import StageCosts
from poplar.planning.plan import Plan
from poplar.planning.shortage import NoPlanFits, shortage, shortage_at_shares


def plan_at_shares(
    costs: StageCosts, shares: Sequence[float], global_batch: int, most: int
) -> Plan | None:
    """The fastest plan with these shares and micro-batches of at most `most`; None: none fits."""
    caps = [m.largest_batch(share, most) for m, share in zip(costs.memories, shares, strict=True)]
    if min(caps) < 0 or max(caps) < 1:
        return None
    return Plan(
        stage=costs.stage,
        global_batch=global_batch,
        micro_batches=_batches(costs, caps, shares, global_batch),
        shares=tuple(shares),
    )


def _batches(
    costs: StageCosts, caps: Sequence[int], shares: Sequence[float], global_batch: int
) -> MicroBatches:
    traffic = costs.traffic(shares)
    if costs.meets_every_pass:
        every = EveryPass(costs, caps, global_batch)
        return every.micro_batches(every.at(traffic)[1])
    return OncePerStep(costs, caps, global_batch).at(traffic)[1].micro_batches


def exact(costs: StageCosts, global_batch: int, most: int) -> Plan:
    """The fastest plan of this stage."""
    missing = shortage(costs)
    if missing is not None:
        raise missing
    n = len(costs.memories)
    even = (1.0 / n,) * n
    plan = plan_at_shares(costs, even, global_batch, most)
    if plan is not None:
        return plan
    room = [max(0.0, memory.largest_share(1)) for memory in costs.memories]
    plan = plan_at_shares(costs, [r / sum(room) for r in room], global_batch, most)
    if plan is None:
        raise shortage_at_shares(costs, even, 1) or NoPlanFits("no plan fits")
    return plan
