"""How others decide, beside how we do: one function per policy, from a stage's costs to a plan.

`exact` is ours. `even` is what DDP, FSDP and DeepSpeed do. `flops` follows Whale, and `paper` is
our reconstruction of Poplar as published (arXiv 2408.12596). All of them keep within each rank's
memory, or raise `NoPlanFits`; those that are not ours know even shares only.
"""

from __future__ import annotations

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
from poplar.planner.persistent_units import fastest_plan_with_persistent_units

Policy = Callable[[StageCosts, Request], Decision]
"""From the costs of a stage and what is wanted of it."""


def even(costs: StageCosts, request: Request) -> Decision:
    """The same for every rank: the largest micro-batch that fits the smallest, fewest passes.

    Where there are fewer samples than ranks, the first ranks get one each and the others none.
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
        ValueError: a device whose peak is not known.
    """
    peaks = []
    for rank, device in enumerate(costs.cluster.devices):
        if device.peak_flops is None:
            raise ValueError(
                f"rank {rank} ({device.name}): the profile has no peak_flops, which policy 'flops' "
                "goes by; add it to the profile, or choose another policy"
            )
        peaks.append(device.peak_flops)
    caps = _caps(costs, request)
    return Decision(Plan.proportional(peaks, request.global_batch, costs.stage, caps))


def paper(costs: StageCosts, request: Request) -> Decision:
    """Poplar as published, reconstructed.

    Where ranks meet once a step, each gets samples in proportion to its best speed, in passes of
    its best batch and one remainder. Where they meet at every pass, a limit on the time of a pass
    is swept: each rank takes its largest batch within it, and the limit with the cheapest step is
    kept.
    """
    caps = _caps(costs, request)
    if costs.synchronizes_every_pass:
        return Decision(_swept(costs, request.global_batch, caps))
    best = [_best_batch(costs, rank, cap) for rank, cap in enumerate(caps)]
    speeds = [
        batch / max(costs.pass_seconds(rank, batch), _SHORTEST_PASS) if batch else 0.0
        for rank, batch in enumerate(best)
    ]
    return Decision(Plan.proportional(speeds, request.global_batch, costs.stage, best))


POLICIES: Mapping[str, Policy] = {
    "exact": fastest_plan_with_persistent_units,
    "even": even,
    "flops": flops,
    "paper": paper,
}

_SHORTEST_PASS = 1e-9
"""Seconds: a residual may take all of a pass away, and a speed has to stay finite."""


def shortfall_rule(policy: str, global_batch: int) -> ShortfallRule:
    """What is missing where this policy finds no plan."""
    if policy == "exact":
        return memory_shortfall

    def at_even_shares(costs: StageCosts) -> Shortfall | None:
        working = _evenly_working(costs, global_batch) if policy == "even" else ()
        return shortfall_at_shares(costs, _even_shares(costs), working=working)

    return at_even_shares


def _evenly_working(costs: StageCosts, global_batch: int) -> range:
    """Ranks that get samples where all get equally many."""
    return range(min(costs.cluster.world_size, global_batch))


def _caps(costs: StageCosts, request: Request, working: Collection[int] = ()) -> list[int]:
    """By rank, the largest micro-batch that even shares leave room for.

    Args:
        costs: of the stage.
        request: what is wanted.
        working: ranks that have to hold a sample; empty: any one of them has to.

    Raises:
        NoPlanFits: a rank cannot hold its share of the state, or a sample where it has to.
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
    """The micro-batch at which this rank does most samples a second; 0 if it cannot hold one."""
    rates = {batch: costs.pass_seconds(rank, batch) / batch for batch in range(1, cap + 1)}
    return min(rates, key=lambda batch: (rates[batch], -batch), default=0)


def _swept(costs: StageCosts, global_batch: int, caps: Sequence[int]) -> Plan:
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
    rest = global_batch - (passes - 1) * sum(chosen)
    first = _core.apportion(rest, chosen)
    return Plan(
        stage=costs.stage,
        global_batch=global_batch,
        micro_batches=tuple(
            (some, *(batch,) * (passes - 1)) for some, batch in zip(first, chosen, strict=True)
        ),
        shares=shares,
    )


def _largest_within(costs: StageCosts, rank: int, cap: int, limit: float) -> int:
    low, high = 0, cap
    while low < high:
        middle = (low + high + 1) // 2
        fits = costs.pass_seconds(rank, middle) <= limit
        low, high = (middle, high) if fits else (low, middle - 1)
    return low
