"""Policies to compare the exact search with: one function each, from a stage's costs to a plan.

`even` is what DDP, FSDP and DeepSpeed do, `flops` follows Whale, and `paper` is our reconstruction
of Poplar as published (arXiv 2408.12596). All use even shares. Their plans fit in memory; otherwise
`NoPlanFits` is raised.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence

from poplar import _core
from poplar.plan import Plan
from poplar.planner.branch_and_bound import Decision
from poplar.planner.cost_model import StageCosts
from poplar.planner.heuristic import Request
from poplar.planner.memory_shortfall import (
    NoPlanFits,
    Shortfall,
    ShortfallRule,
    memory_shortfall,
    shortfall_at_shares,
)

Policy = Callable[[StageCosts, Request], Decision]
"""From the costs of a stage and a request to a plan."""


def even(costs: StageCosts, request: Request) -> Decision:
    """The same for every rank: the largest micro-batch that fits on all of them, fewest passes.

    If there are fewer samples than ranks, the first ranks get one each.
    """
    working = _evenly_working(costs, request.global_batch)
    caps = _caps(costs, request, working)
    plan = Plan.even(
        len(caps), request.global_batch, min(caps[rank] for rank in working), costs.stage
    )
    return Decision(plan)


def flops(costs: StageCosts, request: Request) -> Decision:
    """Samples in proportion to peak FLOP/s, as Whale does.

    Raises:
        ValueError: the profile lacks the peak FLOP/s of a device.
    """
    peaks = []
    for rank, device in enumerate(costs.cluster.devices):
        if device.peak_flops is None:
            raise ValueError(
                f"rank {rank} ({device.name}): the profile has no peak_flops, which policy 'flops' "
                "needs; add it to the profile, or choose another policy"
            )
        peaks.append(device.peak_flops)
    caps = _caps(costs, request)
    return Decision(Plan.proportional(peaks, request.global_batch, costs.stage, caps))


def paper(costs: StageCosts, request: Request) -> Decision:
    """Poplar as published, reconstructed.

    At stages 0 and 1, each rank gets samples in proportion to its best speed, in passes of its best
    batch and one remainder. At stages 2 and 3, a limit on the time of a pass is swept: each rank
    takes its largest batch within the limit, and the limit with the fastest step is used.
    """
    caps = _caps(costs, request)
    if costs.synchronizes_every_pass:
        return Decision(_sweep(costs, request.global_batch, caps))
    best = [_best_batch(costs, rank, cap) for rank, cap in enumerate(caps)]
    speeds = [
        batch / max(costs.pass_seconds(rank, batch), _SHORTEST_PASS) if batch else 0.0
        for rank, batch in enumerate(best)
    ]
    return Decision(Plan.proportional(speeds, request.global_batch, costs.stage, best))


BASELINES: Mapping[str, Policy] = {"even": even, "flops": flops, "paper": paper}

_SHORTEST_PASS = 1e-9
"""Seconds. Measured residuals can reduce a pass to 0, and speeds must stay finite."""


def shortfall_rule(policy: str, global_batch: int) -> ShortfallRule:
    """The rule that says what is missing if this policy finds no plan."""
    if policy not in BASELINES:
        return memory_shortfall

    def at_even_shares(costs: StageCosts) -> Shortfall | None:
        working = _evenly_working(costs, global_batch) if policy == "even" else ()
        return shortfall_at_shares(costs, _even_shares(costs), working=working)

    return at_even_shares


def _evenly_working(costs: StageCosts, global_batch: int) -> range:
    """Ranks that get samples under policy `even`."""
    return range(min(costs.cluster.world_size, global_batch))


def _caps(costs: StageCosts, request: Request, working: Collection[int] = ()) -> list[int]:
    """By rank, the largest micro-batch that fits beside an even share.

    Args:
        costs: of the stage.
        request: of the plan.
        working: ranks that must hold a sample; empty: at least one rank must.

    Raises:
        NoPlanFits: a rank cannot hold its share of the state, or a sample that it must hold.
    """
    shares = _even_shares(costs)
    missing = shortfall_at_shares(costs, shares, working=working)
    if missing is not None:
        raise NoPlanFits([missing])
    return [
        memory.largest_batch(share, request.max_micro_batch)
        for memory, share in zip(costs.memories, shares, strict=True)
    ]


def _even_shares(costs: StageCosts) -> tuple[float, ...]:
    n = costs.cluster.world_size
    return (1.0 / n,) * n


def _best_batch(costs: StageCosts, rank: int, cap: int) -> int:
    """The micro-batch with the most samples per second; 0 if the rank cannot hold a sample."""
    rates = {batch: costs.pass_seconds(rank, batch) / batch for batch in range(1, cap + 1)}
    return min(rates, key=lambda batch: (rates[batch], -batch), default=0)


def _sweep(costs: StageCosts, global_batch: int, caps: Sequence[int]) -> Plan:
    shares = _even_shares(costs)
    communication = costs.communication(shares)
    limits = {
        costs.pass_seconds(rank, batch)
        for rank, cap in enumerate(caps)
        for batch in range(1, cap + 1)
    }
    cheapest, chosen, passes = float("inf"), [0], 1
    for limit in sorted(limits):
        batches = [_largest_within(costs, rank, cap, limit) for rank, cap in enumerate(caps)]
        count = -(-global_batch // sum(batches))
        seconds = count * (
            limit + costs.schedule.gathers * communication.gather + communication.reduce
        )
        if seconds < cheapest:
            cheapest, chosen, passes = seconds, batches, count
    remainder = _core.apportion(global_batch - (passes - 1) * sum(chosen), chosen)
    return Plan(
        stage=costs.stage,
        global_batch=global_batch,
        micro_batches=tuple(
            (first, *(batch,) * (passes - 1))
            for first, batch in zip(remainder, chosen, strict=True)
        ),
        shares=shares,
    )


def _largest_within(costs: StageCosts, rank: int, cap: int, limit: float) -> int:
    """The largest micro-batch whose pass takes at most `limit` seconds."""
    return bisect_right(range(1, cap + 1), limit, key=lambda batch: costs.pass_seconds(rank, batch))
