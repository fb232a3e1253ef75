"""What a plan costs on a measured cluster: seconds, bytes on every rank, and what bounds the step.

The arithmetic is in `cost_model` and `memory_model`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from poplar.formatting import format_bytes
from poplar.plan import Plan
from poplar.planner.cost_model import StageCosts, costs_of
from poplar.planner.rank_groups import each
from poplar.profile import ClusterProfile

_SLOWER_LINK = 1.1
"""How many times slower than all others a measured link must be to be reported as the slowest."""
_MAX_SLOWDOWN = 2.0
"""Memory bounds a step only if one more sample keeps the rank's pass below this many times the
longest pass."""


class DoesNotFit(ValueError):
    """A plan that needs more memory than a rank has, or a micro-batch that was not measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """What the cost model expects of one plan."""

    step_seconds: float
    samples_per_second: float
    compute_seconds: tuple[float, ...]
    """By rank: the sum of its passes, with the engine's overhead."""
    optimizer_seconds: tuple[float, ...]
    """By rank."""
    communication_seconds: float
    """Exposed communication of a step; at most the step."""
    memory_bytes: tuple[int, ...]
    """By rank: what the plan needs, with what the framework holds."""
    busy_fraction: tuple[float, ...]
    """By rank: compute and optimizer over the step."""
    bound: str
    """What bounds the step, as a sentence."""
    optimality_gap: float | None = None
    """Upper bound on how much shorter the step of another plan at this stage can be, as a fraction
    of this step. 0.0: proven optimal; None: no search. The search covers the number of persistent
    units, not which units."""

    def to_dict(self) -> dict[str, Any]:
        """This prediction as JSON types."""
        values = dataclasses.asdict(self)
        return {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}


@dataclass(frozen=True, slots=True)
class Bound:
    """What limits the step."""

    what: str
    """`"compute"`, `"network"` or `"memory"`."""
    rank: int | None
    """The rank that is the bound; None: all ranks."""
    sentence: str


def memory_needed(cluster: ClusterProfile, plan: Plan) -> tuple[int, ...]:
    """Bytes that each rank needs under a plan, even if it has fewer.

    Raises:
        ValueError: see `costs_of`.
        DoesNotFit: a micro-batch larger than the largest that was measured.
    """
    return _memory_needed(costs_of(cluster, plan), plan)


def _memory_needed(costs: StageCosts, plan: Plan) -> tuple[int, ...]:
    for rank, passes in enumerate(plan.micro_batches):
        _check_measured(costs.cluster, rank, max(passes, default=0))
    keys = list(zip(costs.cluster.device_kinds, plan.micro_batches, plan.shares, strict=True))
    first = dict(zip(keys, count(), strict=False))
    return tuple(each(lambda key: math.ceil(_needed(costs, plan, first[key])), keys))


def predict(cluster: ClusterProfile, plan: Plan) -> Prediction:
    """Predict one step of a plan.

    Raises:
        DoesNotFit: the plan needs more memory than a rank has, or a micro-batch that was not
            measured.
        ValueError: see `costs_of`.
    """
    return predict_at(costs_of(cluster, plan), plan)


def fits(cluster: ClusterProfile, plan: Plan) -> bool:
    """Whether every rank has the memory that a plan needs."""
    try:
        predict(cluster, plan)
    except DoesNotFit:
        return False
    return True


def predict_at(costs: StageCosts, plan: Plan) -> Prediction:
    """Predict one step of a plan, with the cost model of its stage."""
    memory = _memory_needed(costs, plan)
    for rank, (needed, own) in enumerate(zip(memory, costs.memories, strict=True)):
        if needed > own.limit:
            _check_fits(costs, plan, rank)
    synchronizations = costs.synchronizations(plan.micro_batches)
    seconds = costs.synchronizations_seconds(synchronizations, costs.communication(plan.shares))
    tail = costs.tail_seconds(plan.shares)
    step = math.fsum(seconds) + tail
    # Negative residuals can make the tail shorter than its gather.
    exposed = [min(costs.gather_after_step_seconds(plan.shares), tail)]
    exposed += [end - one.latest for end, one in zip(seconds, synchronizations, strict=True)]
    communication = min(step, math.fsum(exposed))
    compute, optimizer = _rank_seconds(costs, plan)
    busy = tuple(
        min(1.0, (passes + update) / step) if step else 1.0
        for passes, update in zip(compute, optimizer, strict=True)
    )
    return Prediction(
        step_seconds=step,
        samples_per_second=plan.global_batch / step if step else math.inf,
        compute_seconds=compute,
        optimizer_seconds=optimizer,
        communication_seconds=communication,
        memory_bytes=memory,
        busy_fraction=busy,
        bound=bound_of(costs, plan, busy, communication / step if step else 0.0).sentence,
    )


def _rank_seconds(costs: StageCosts, plan: Plan) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """By rank: seconds of its passes, and of its optimizer."""
    kinds = costs.cluster.device_kinds
    first = dict(zip(kinds, count(), strict=False))

    def computed(key: tuple[int, tuple[int, ...]]) -> float:
        kind, passes = key
        return math.fsum(costs.pass_seconds(first[kind], batch) for batch in passes)

    def updated(key: tuple[int, float]) -> float:
        kind, share = key
        return max(0.0, costs.optimizer_seconds(first[kind], share))

    compute = each(computed, list(zip(kinds, plan.micro_batches, strict=True)))
    return tuple(compute), tuple(each(updated, list(zip(kinds, plan.shares, strict=True))))


def describe(cluster: ClusterProfile, plan: Plan, prediction: Prediction, policy: str) -> Plan:
    """Attach a prediction to a plan, as JSON types, with the device columns of the plan's table.

    A plan without a transport gets the one that was measured.
    """
    return dataclasses.replace(
        plan,
        transport=plan.transport or cluster.network.transport,
        prediction={
            **prediction.to_dict(),
            "devices": [device.name for device in cluster.devices],
            "memory_limit_bytes": [device.memory_bytes for device in cluster.devices],
            "policy": policy,
        },
    )


def _needed(costs: StageCosts, plan: Plan, rank: int) -> float:
    largest = max(plan.micro_batches[rank], default=0)
    return costs.memories[rank].needed(largest, plan.shares[rank])


def _check_measured(cluster: ClusterProfile, rank: int, batch: int) -> None:
    device = cluster.devices[rank]
    if batch > device.max_batch:
        raise DoesNotFit(
            f"rank {rank} ({device.name}): a micro-batch of {batch} samples, but the largest that "
            f"was measured is {device.max_batch}; use smaller micro-batches, or profile with a "
            "larger max_batch"
        )


def _check_fits(costs: StageCosts, plan: Plan, rank: int) -> None:
    largest, share = max(plan.micro_batches[rank], default=0), plan.shares[rank]
    memory = costs.memories[rank]
    if not memory.fits(largest, share):
        needed, limit = memory.needed(largest, share), memory.limit
        device = costs.cluster.devices[rank]
        raise DoesNotFit(
            f"rank {rank} ({device.name}) needs {format_bytes(needed)} for {largest} samples and "
            f"{100 * share:.1f} % of the state at stage {plan.stage}, but may use "
            f"{format_bytes(limit)} of {format_bytes(device.memory_bytes)}; use smaller "
            "micro-batches, a smaller share or a higher stage"
        )


def bound_of(costs: StageCosts, plan: Plan, busy: Sequence[float], communication: float) -> Bound:
    """What bounds a step: compute, the network, or the memory of a rank.

    Args:
        costs: the cost model of the plan's stage.
        plan: the plan.
        busy: by rank, compute and optimizer as a fraction of the step.
        communication: exposed communication as a fraction of the step.
    """
    busiest = max(range(plan.world_size), key=lambda rank: busy[rank])
    if communication <= busy[busiest]:
        sentence = f"rank {busiest}'s compute ({100 * busy[busiest]:.0f} % busy)"
        return Bound("compute", busiest, sentence)
    passes = max(map(len, plan.micro_batches))
    if costs.synchronizes_every_pass and passes > 1:
        latest = max(
            synchronization.latest for synchronization in costs.synchronizations(plan.micro_batches)
        )
        for rank, memory in enumerate(costs.memories):
            largest = max(plan.micro_batches[rank])
            more = largest + 1
            measured = more <= memory.device.max_batch
            useful = measured and costs.pass_seconds(rank, more) <= _MAX_SLOWDOWN * latest
            if useful and not memory.fits(more, plan.shares[rank]):
                sentence = (
                    f"rank {rank}'s memory: it holds no more than {largest} samples at a time, so "
                    f"ranks synchronize {passes} times a step ({100 * communication:.0f} % of it "
                    "is communication)"
                )
                return Bound("memory", rank, sentence)
    slowest = _slowest_link(costs)
    whose = "" if slowest is None else f", rank {slowest}'s link is the slowest"
    return Bound(
        "network", slowest, f"communication ({100 * communication:.0f} % of the step{whose})"
    )


def _slowest_link(costs: StageCosts) -> int | None:
    """The rank whose link is slower than all others, if there is one."""
    network = costs.cluster.network
    rates = [
        max(there, back)
        for there, back in zip(
            network.send_seconds_per_byte, network.receive_seconds_per_byte, strict=True
        )
    ]
    *_, second, first = [0.0, *sorted(rates)]
    return rates.index(first) if len(rates) > 1 and first > _SLOWER_LINK * second else None
