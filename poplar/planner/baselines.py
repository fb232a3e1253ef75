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
from poplar.planner.branch_and_bound import Decision
from poplar.planner.cost_model import StageCosts
from poplar.planner.heuristic import Alternation, with_smaller_passes_first
from poplar.planner.memory_model import Caps
from poplar.planner.memory_shortfall import (
    Request,
    Shortfall,
    memory_shortfall,
    missing_bytes,
    shortfall_at,
)
from poplar.values.plan import Plan

Policy = Callable[[StageCosts, Request], Decision]
"""From the costs of a stage and a request to a plan."""
_Maker = Callable[[StageCosts, int, Sequence[int]], Plan]
"""From the costs of a stage, a global batch and the largest micro-batch of each rank to a plan."""


def _even(costs: StageCosts, global_batch: int, caps: Sequence[int]) -> Plan:
    """The same for every rank: the largest micro-batch that fits on all of them, fewest passes.

    If there are fewer samples than ranks, the first ranks get one each.
    """
    return Plan.even(len(caps), global_batch, min(caps[:global_batch]), costs.stage)


def _flops(costs: StageCosts, global_batch: int, caps: Sequence[int]) -> Plan:
    """Samples in proportion to peak FLOP/s, as Whale does."""
    return Plan.proportional(_peak_flops(costs), global_batch, costs.stage, caps)


def _peak_flops(costs: StageCosts) -> list[float]:
    """By rank.

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
    return peaks


def _paper(costs: StageCosts, global_batch: int, caps: Sequence[int]) -> Plan:
    """Poplar as published, reconstructed.

    At stages 0 and 1, each rank gets samples in proportion to its best speed, in passes of its best
    batch and one remainder. At stages 2 and 3, a limit on the time of a pass is swept: each rank
    takes its largest batch within the limit, and the limit with the fastest step is used.
    """
    if costs.synchronizes_every_pass:
        return _sweep(costs, global_batch, caps)
    best = [_best_batch(costs, rank, cap) for rank, cap in enumerate(caps)]
    speeds = [
        batch / max(costs.pass_seconds(rank, batch), _SHORTEST_PASS) if batch else 0.0
        for rank, batch in enumerate(best)
    ]
    return Plan.proportional(speeds, global_batch, costs.stage, best)


def even_shares(costs: StageCosts, request: Request) -> Decision:
    """The fastest batches and passes beside even shares, as DDP and FSDP2 can run them."""
    found = Alternation(costs, request).best_batches(costs.cluster.even_shares)
    found = with_smaller_passes_first(costs, found)
    return Decision(
        Plan(
            stage=costs.stage,
            global_batch=request.global_batch,
            micro_batches=found.micro_batches,
            shares=found.shares,
        )
    )


def _largest_that_fit(make: _Maker, costs: StageCosts, request: Request) -> Decision:
    """The plan of the largest micro-batches that fit: of a single pass if that is enough."""
    plan = _one_pass(make, costs, request)
    later = [caps.later for caps in _caps(costs, request)]
    return Decision(plan or make(costs, request.global_batch, later))


def _one_pass(make: _Maker, costs: StageCosts, request: Request) -> Plan | None:
    """The plan of the largest micro-batches of a first pass, if that fits and is enough."""
    caps = [caps.first for caps in _caps(costs, request)]
    with_sample = caps[: request.global_batch] if make is _even else [max(caps)]
    if min(caps) < 0 or min(with_sample) < 1:
        return None
    plan = make(costs, request.global_batch, caps)
    return plan if max(map(len, plan.micro_batches)) == 1 else None


_MAKERS: Mapping[str, _Maker] = {"even": _even, "flops": _flops, "paper": _paper}
BASELINES: Mapping[str, Policy] = {
    **{name: partial(_largest_that_fit, make) for name, make in _MAKERS.items()},
    "even_shares": even_shares,
}

_SHORTEST_PASS = 1e-9
"""Seconds. Measured residuals can reduce a pass to 0, and speeds must stay finite."""


def policy_shortfall(costs: StageCosts, request: Request) -> Shortfall | None:
    """What is missing for every plan of the policy at this stage; None: one fits.

    Raises:
        ValueError: the profile lacks what the policy needs.
    """
    policy = request.policy
    if policy not in BASELINES:
        return memory_shortfall(costs, request)
    if policy == "flops":
        _peak_flops(costs)
    shares = costs.cluster.even_shares
    ranks, sample = range(len(shares)), Caps(1, 1)
    if policy == "even":
        with_sample: Sequence[int] = ranks[: request.global_batch]
    else:
        lacking = [missing_bytes(costs, rank, sample, shares[rank]) for rank in ranks]
        with_sample = [lacking.index(min(lacking))]
    caps = [sample if rank in with_sample else Caps(0, 0) for rank in ranks]
    missing = shortfall_at(costs, caps, shares)
    if policy in _MAKERS:
        fits = missing is None or _one_pass(_MAKERS[policy], costs, request) is not None
    else:
        fits = bool(Alternation(costs, request).best_batches(shares).micro_batches)
    return None if fits else missing


def _caps(costs: StageCosts, request: Request) -> list[Caps]:
    """By rank, the largest micro-batches that fit beside an even share."""
    return [
        memory.largest_caps(share, request.max_micro_batch)
        for memory, share in zip(costs.memories, costs.cluster.even_shares, strict=True)
    ]


def _best_batch(costs: StageCosts, rank: int, cap: int) -> int:
    """The micro-batch with the most samples per second; 0 if the rank cannot hold a sample."""
    sizes = range(cap, 0, -1)
    return min(sizes, key=lambda batch: costs.pass_seconds(rank, batch) / batch, default=0)


def _sweep(costs: StageCosts, global_batch: int, caps: Sequence[int]) -> Plan:
    shares = costs.cluster.even_shares
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
