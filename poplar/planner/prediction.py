"""What a plan will cost on a measured cluster: seconds, and bytes on every rank.

And what bounds it. The arithmetic is in `stage_costs`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple

from poplar.formatting import format_bytes
from poplar.plan import Plan
from poplar.planner.cost_model import StageCosts, costs_of
from poplar.planner.rank_groups import each
from poplar.profile import ClusterProfile

_SLOWER_LINK = 1.1
"""Of two links, how many times slower one has to be to be called slower: rates are measured."""


_MUCH_LATER = 2.0
"""A rank that would hold everybody up for so many times as long is not short of memory."""


class DoesNotFit(ValueError):
    """A plan that needs more memory than a rank has, or a batch that was never measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """What the cost model expects of one plan."""

    step_seconds: float
    samples_per_second: float
    compute_seconds: tuple[float, ...]
    """By rank: the sum of its passes, what the engine adds to each included."""
    optimizer_seconds: tuple[float, ...]
    """By rank."""
    communication_seconds: float
    """Of a step, what does not run under compute; never more than the step."""
    memory_bytes: tuple[int, ...]
    """By rank: what the plan needs, everything that the framework holds included."""
    busy_fraction: tuple[float, ...]
    """By rank: compute and optimizer over the step."""
    bound: str
    """What bounds the step, in a sentence for a person."""
    optimality_gap: float | None = None
    """How much faster, as a fraction of this step, any other plan of its stage can be: 0.0 where
    it is proven that none is, None where nobody searched. Of units that stay gathered their number
    is searched, not which of them."""

    def to_dict(self) -> dict[str, Any]:
        """This prediction in JSON's types."""
        return {
            key: list(value) if isinstance(value, tuple) else value
            for key, value in (
                (member.name, getattr(self, member.name)) for member in dataclasses.fields(self)
            )
        }


class Bound(NamedTuple):
    """What would have to be better for a step to be shorter."""

    what: str
    """`"compute"`, `"network"` or `"memory"`."""
    rank: int | None
    """Whose; None: all ranks' alike."""
    sentence: str
    """For a person."""


def memory_needed(cluster: ClusterProfile, plan: Plan) -> tuple[int, ...]:
    """Bytes that each rank needs under a plan, whether it has them or not.

    Raises:
        ValueError: a plan for another number of ranks, or with units of their own strategy.
        DoesNotFit: a micro-batch beyond what was measured, so that nobody knows what it needs.
    """
    return _memory_needed(costs_of(cluster, plan), plan)


def _memory_needed(costs: StageCosts, plan: Plan) -> tuple[int, ...]:
    for rank, passes in enumerate(plan.micro_batches):
        _check_measured(costs.cluster, rank, max(passes, default=0))
    keys = list(zip(costs.cluster.device_kinds, plan.micro_batches, plan.shares, strict=True))
    first = dict(zip(keys, count(), strict=False))
    return tuple(each(lambda key: math.ceil(_needed(costs, plan, first[key])), keys))


def predict(cluster: ClusterProfile, plan: Plan) -> Prediction:
    """What one step of a plan will cost.

    Raises:
        DoesNotFit: it needs more memory than a rank has, or a micro-batch that was not measured;
            names the rank, what is needed and what there is.
        ValueError: a plan for another number of ranks, or with units of their own strategy.
    """
    return predict_at(costs_of(cluster, plan), plan)


def predict_at(costs: StageCosts, plan: Plan) -> Prediction:
    """As `predict`, with the costs of the plan's stage."""
    cluster = costs.cluster
    memory = _memory_needed(costs, plan)
    for rank, (needed, own) in enumerate(zip(memory, costs.memories, strict=True)):
        if needed > own.limit:
            _check_fits(costs, plan, rank)
    synchronizations = costs.synchronizations(plan.micro_batches)
    communication = costs.communication(plan.shares)
    met = costs.synchronizations_seconds(synchronizations, communication)
    tail = costs.tail_seconds(plan.shares)
    step = math.fsum(met) + tail
    first = dict(zip(cluster.device_kinds, count(), strict=False))

    def computed(key: tuple[int, tuple[int, ...]]) -> float:
        kind, passes = key
        return math.fsum(costs.pass_seconds(first[kind], batch) for batch in passes)

    def updated(key: tuple[int, float]) -> float:
        kind, share = key
        return max(0.0, costs.optimizer_seconds(first[kind], share))

    kinds = cluster.device_kinds
    compute = tuple(each(computed, list(zip(kinds, plan.micro_batches, strict=True))))
    optimizer = tuple(each(updated, list(zip(kinds, plan.shares, strict=True))))
    at_synchronizations = [
        seconds - synchronization.latest
        for seconds, synchronization in zip(met, synchronizations, strict=True)
    ]
    # Residuals may be negative: what follows the last meeting can be shorter than its gather.
    after = min(costs.gather_after_step_seconds(plan.shares), tail)
    communication = min(step, math.fsum([*at_synchronizations, after]))
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


def describe(cluster: ClusterProfile, plan: Plan, prediction: Prediction, policy: str) -> Plan:
    """The plan with its prediction in JSON's types, and what a table needs beside it.

    It names the transport that was measured, unless it names one already.
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
            f"was measured is {device.max_batch}; plan smaller passes, or profile with a larger "
            "max_batch"
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
            f"{format_bytes(limit)} of {format_bytes(device.memory_bytes)}; give it smaller "
            "micro-batches, a smaller share, or choose a higher stage"
        )


def bound_of(costs: StageCosts, plan: Plan, busy: Sequence[float], communication: float) -> Bound:
    """What bounds a step, from what was predicted of it.

    Args:
        costs: of the plan's stage.
        plan: whose step.
        busy: by rank, compute and optimizer over the step.
        communication: what does not run under compute, over the step.
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
            useful = measured and costs.pass_seconds(rank, more) <= _MUCH_LATER * latest
            if useful and not memory.fits(more, plan.shares[rank]):
                sentence = (
                    f"rank {rank}'s memory: it holds no more than {largest} samples at a time, so "
                    f"ranks meet {passes} times a step ({100 * communication:.0f} % of it is "
                    "communication)"
                )
                return Bound("memory", rank, sentence)
    slowest = _slowest_link(costs)
    whose = "" if slowest is None else f", rank {slowest}'s link is the slowest"
    return Bound(
        "network", slowest, f"communication ({100 * communication:.0f} % of the step{whose})"
    )


def _slowest_link(costs: StageCosts) -> int | None:
    """The rank that every collective waits for, if its link is slower than all others'."""
    network = costs.cluster.network
    rates = [
        max(there, back)
        for there, back in zip(
            network.send_seconds_per_byte, network.receive_seconds_per_byte, strict=True
        )
    ]
    *_, second, first = [0.0, *sorted(rates)]
    return rates.index(first) if len(rates) > 1 and first > _SLOWER_LINK * second else None
