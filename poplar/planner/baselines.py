"""Policies to compare the exact search with: one function each, from a stage's costs to a plan.

`even` is what DDP, FSDP and DeepSpeed do, `flops` follows Whale, and `paper` is our reconstruction
of Poplar as published (arXiv 2408.12596). `even_shares` is the exact search for batches only, for
engines that cannot shard unevenly. All use even shares. Their plans fit in memory, if there is no
`policy_shortfall`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from poplar import _core
from poplar.plan import Plan
from poplar.planner.branch_and_bound import Decision
from poplar.planner.cost_model import StageCosts
from poplar.planner.heuristic import Alternation, Request
from poplar.planner.memory_shortfall import (
    Shortfall,
    memory_shortfall,
    missing_bytes,
    shortfall_at,
)

Policy = Callable[[StageCosts, Request], Decision]
"""From the costs of a stage and a request to a plan."""


def even(costs: StageCosts, request: Request) -> Decision:
    """The same for every rank: the largest micro-batch that fits on all of them, fewest passes.

    If there are fewer samples than ranks, the first ranks get one each.
    """
    caps = _caps(costs, request)
    cap = min(caps[: request.global_batch])
    return Decision(Plan.even(len(caps), request.global_batch, cap, costs.stage))


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


def even_shares(costs: StageCosts, request: Request) -> Decision:
    """The fastest batches and passes beside even shares, as DDP and FSDP2 can run them."""
    found = Alternation(costs, request).best_batches(_even_shares(costs))
    return Decision(
        Plan(
            stage=costs.stage,
            global_batch=request.global_batch,
            micro_batches=found.micro_batches,
            shares=found.shares,
        )
    )


BASELINES: Mapping[str, Policy] = {
    "even": even,
    "flops": flops,
    "paper": paper,
    "even_shares": even_shares,
}

_SHORTEST_PASS = 1e-9
"""Seconds. Measured residuals can reduce a pass to 0, and speeds must stay finite."""


def policy_shortfall(costs: StageCosts, policy: str, global_batch: int) -> Shortfall | None:
    """What is missing for every plan of a policy at this stage; None: one fits."""
    if policy not in BASELINES:
        return memory_shortfall(costs)
    shares = _even_shares(costs)
    ranks = range(len(shares))
    if policy == "even":
        with_sample: Sequence[int] = ranks[:global_batch]
    else:
        with_sample = [min(ranks, key=lambda rank: missing_bytes(costs, rank, 1, shares[rank]))]
    return shortfall_at(costs, [int(rank in with_sample) for rank in ranks], shares)


def _caps(costs: StageCosts, request: Request) -> list[int]:
    """By rank, the largest micro-batch that fits beside an even share."""
    return [
        memory.largest_batch(share, request.max_micro_batch)
        for memory, share in zip(costs.memories, _even_shares(costs), strict=True)
    ]


def _even_shares(costs: StageCosts) -> tuple[float, ...]:
    n = costs.cluster.world_size
    return (1.0 / n,) * n


def _best_batch(costs: StageCosts, rank: int, cap: int) -> int:
    """The micro-batch with the most samples per second; 0 if the rank cannot hold a sample."""
    sizes = range(cap, 0, -1)
    return min(sizes, key=lambda batch: costs.pass_seconds(rank, batch) / batch, default=0)


def _sweep(costs: StageCosts, global_batch: int, caps: Sequence[int]) -> Plan:
    shares = _even_shares(costs)
    gather, reduce = costs.communication(shares)
    communication = costs.schedule.gathers * gather + reduce

    def largest_within(limit: float) -> list[int]:
        """By rank, the largest micro-batch whose pass takes at most `limit` seconds."""
        return [
            bisect_right(range(1, cap + 1), limit, key=partial(costs.pass_seconds, rank))
            for rank, cap in enumerate(caps)
        ]

    def step_seconds(limit: float) -> float:
        return -(-global_batch // sum(largest_within(limit))) * (limit + communication)

    limits = {
        costs.pass_seconds(rank, batch)
        for rank, cap in enumerate(caps)
        for batch in range(1, cap + 1)
    }
    batches = largest_within(min(sorted(limits), key=step_seconds))
    passes = -(-global_batch // sum(batches))
    remainder = _core.apportion(global_batch - (passes - 1) * sum(batches), batches)
    return Plan(
        stage=costs.stage,
        global_batch=global_batch,
        micro_batches=tuple(
            (first, *(batch,) * (passes - 1))
            for first, batch in zip(remainder, batches, strict=True)
        ),
        shares=shares,
    )
