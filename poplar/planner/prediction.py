"""What a plan costs on a measured cluster: seconds, bytes on every rank, and what bounds the step.

The arithmetic is in `cost_model` and `memory_model`.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

from poplar.planner.active_ranks import active_part
from poplar.planner.cost_model import StageCosts, costs_of
from poplar.planner.memory_model import Caps
from poplar.planner.memory_shortfall import DoesNotFit, shortfall_of
from poplar.values.curve import DEVIATIONS, LEVEL
from poplar.values.errors import check_class
from poplar.values.formatting import format_percent
from poplar.values.plan import Plan
from poplar.values.profile import ClusterProfile, NetworkProfile
from poplar.values.schema import to_json_types

MODEL_ERROR = 0.05
"""Half of the interval of a plan that did not run on a steady machine, as a fraction of the step:
81 % of the plans in `benchmarks/results/prediction.jsonl` were within it."""
TRIAL_NOISE = 0.007
"""Relative standard deviation that steps of a plan that ran have at least."""
_QUANTILES = (1 - LEVEL) / 2, 0.5, (1 + LEVEL) / 2
_LEAST = 1e-4
_HALVINGS = 30
_normal = NormalDist()
_SLOWER_LINK = 1.1
"""How many times slower than all others a measured link must be to be reported as the slowest."""
_MAX_SLOWDOWN = 2.0
"""Memory bounds a step only if one more sample keeps the rank's pass below this many times the
longest pass."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """What the cost model expects of one plan."""

    step_seconds: float
    step_interval: tuple[float, float]
    """In which the step lies with a probability of `LEVEL`."""
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
    bound: str = ""
    """What bounds the step, as a sentence."""
    optimality_gap: float | None = None
    """Upper bound on how much shorter the step of another plan at this stage can be, as a fraction
    of this step. 0.0: proven optimal; None: no search. The search covers the number of persistent
    units, not which units."""

    @property
    def error(self) -> float:
        """Half of the interval, as a fraction of the step."""
        low, high = self.step_interval
        return (high - low) / 2.0 / self.step_seconds if self.step_seconds else 0.0

    def to_dict(self) -> dict[str, Any]:
        """This prediction as JSON types."""
        return {**to_json_types(self)}


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
    part, own = active_part(cluster, plan)
    needed = _memory_needed(costs_of(part, own), own, plan.active_ranks)
    return plan.by_rank(needed, 0)


def _memory_needed(costs: StageCosts, plan: Plan, numbers: Sequence[int]) -> tuple[int, ...]:
    """What a plan without left-out ranks needs; `numbers` are the names of its ranks."""
    for rank, device, passes in zip(
        numbers, costs.cluster.devices, plan.micro_batches, strict=True
    ):
        if (largest := max(passes, default=0)) > device.max_batch:
            raise DoesNotFit(
                f"rank {rank} ({device.name}): a micro-batch of {largest} samples, but the largest "
                f"that was measured is {device.max_batch}; use smaller micro-batches, or profile "
                "with a larger max_batch"
            )
    return tuple(map(math.ceil, costs.needed_bytes(plan.micro_batches, plan.shares)))


def unmeasured_batches(cluster: ClusterProfile, plan: Plan) -> tuple[tuple[int, ...], ...]:
    """By rank, the micro-batch sizes of the plan that are not points of the rank's curve.

    Empty for a rank that recomputes units: its curve lies between two measured ones.
    """
    return tuple(
        ()
        if plan.recomputed_units(rank)
        else tuple(sorted(set(sizes) - {point.batch for point in device.points} - {0}))
        for rank, (sizes, device) in enumerate(
            zip(plan.micro_batches, cluster.devices, strict=True)
        )
    )


def fits(cluster: ClusterProfile, plan: Plan) -> bool:
    """Whether every rank has the memory that a plan needs."""
    try:
        predict(cluster, plan)
    except DoesNotFit:
        return False
    return True


def predicted_seconds(plan: Plan) -> float:
    """The step seconds of the prediction that a plan of the search has."""
    return float((plan.prediction or {})["step_seconds"])


def predict(cluster: ClusterProfile, plan: Plan) -> Prediction:
    """Predict one step of a plan.

    Raises:
        DoesNotFit: the plan needs more memory than a rank has, or a micro-batch that was not
            measured.
        TypeError: the arguments have other classes.
        ValueError: see `costs_of`.
    """
    check_class("cluster", cluster, ClusterProfile)
    check_class("plan", plan, Plan)
    numbers, whole = plan.active_ranks, plan
    cluster, plan = active_part(cluster, plan)
    costs = costs_of(cluster, plan)
    memory = _memory_needed(costs, plan, numbers)
    owned = costs.owned(plan.shares)
    missing = shortfall_of(costs, plan.micro_batches, plan.shares, numbers)
    if missing is not None:
        raise DoesNotFit(
            f"the plan does not fit at stage {plan.stage}: {missing.sentence}; use smaller "
            "micro-batches, a smaller share or a higher stage"
        )
    synchronizations = costs.synchronizations(plan.micro_batches)
    seconds = costs.synchronizations_seconds(synchronizations, costs.communication(plan.shares))
    tail = costs.tail_seconds(plan.shares)
    step = math.fsum(seconds) + tail
    # Negative residuals can make the tail shorter than its all-gather.
    exposed = [min(costs.gather_after_step_seconds(plan.shares), tail)]
    exposed += [end - one.latest for end, one in zip(seconds, synchronizations, strict=True)]
    compute = costs.by_rank(
        lambda rank, passes: math.fsum(costs.pass_seconds(rank, batch) for batch in passes),
        plan.micro_batches,
    )
    optimizer = costs.by_rank(
        lambda rank, share: max(0.0, costs.optimizer_seconds(rank, share)), owned
    )
    prediction = Prediction(
        step_seconds=step,
        step_interval=_interval(costs, plan, compute, step),
        samples_per_second=plan.global_batch / step if step else math.inf,
        compute_seconds=tuple(compute),
        optimizer_seconds=tuple(optimizer),
        communication_seconds=min(step, math.fsum(exposed)),
        memory_bytes=memory,
        busy_fraction=tuple(
            min(1.0, (passes + update) / step) if step else 1.0
            for passes, update in zip(compute, optimizer, strict=True)
        ),
    )
    return dataclasses.replace(
        prediction,
        bound=bound_of(costs, plan, prediction, numbers).sentence,
        compute_seconds=whole.by_rank(prediction.compute_seconds, 0.0),
        optimizer_seconds=whole.by_rank(prediction.optimizer_seconds, 0.0),
        memory_bytes=whole.by_rank(prediction.memory_bytes, 0),
        busy_fraction=whole.by_rank(prediction.busy_fraction, 0.0),
    )


def _interval(
    costs: StageCosts, plan: Plan, compute: Sequence[float], step: float
) -> tuple[float, float]:
    """In which a step lies whose ranks compute so long, each with the error of its curve.

    The step ends with the slowest rank, so errors of several ranks make it longer rather than
    shorter. What the cost model leaves out is added to both sides, and the step itself is inside.
    """
    devices = costs.cluster.devices
    between = unmeasured_batches(costs.cluster, plan)
    ranks = Counter(
        (seconds, math.hypot(device.noise, device.interpolation_error if sizes else 0.0))
        for seconds, device, sizes in zip(compute, devices, between, strict=True)
        if seconds
    )
    longest, model = max(compute), MODEL_ERROR * step
    low, middle, high = (_latest(ranks, longest, p) for p in _QUANTILES)
    usual = step + middle - longest
    return (
        min(step, usual - math.hypot(middle - low, model)),
        max(step, usual + math.hypot(high - middle, model)),
    )


def _latest(ranks: Mapping[tuple[float, float], int], longest: float, part: float) -> float:
    """The seconds within which all ranks have ended with this probability."""
    if all(noise <= _LEAST for _, noise in ranks):
        return longest

    def falls_short(seconds: float) -> bool:
        logs = (
            many * math.log(max(_normal.cdf((seconds / mean - 1.0) / max(noise, _LEAST)), 1e-300))
            for (mean, noise), many in ranks.items()
        )
        return math.fsum(logs) < math.log(part)

    low, high = 0.0, 8.0 * longest
    for _ in range(_HALVINGS):
        middle = (low + high) / 2.0
        low, high = (middle, high) if falls_short(middle) else (low, middle)
    return high


def describe(
    cluster: ClusterProfile,
    plan: Plan,
    policy: str,
    optimality_gap: float | None = None,
    *,
    noise: float | None = None,
) -> Plan:
    """Attach a prediction to a plan, as JSON types, with the device columns of the plan's table.

    A plan without a transport gets the one that was measured. `noise` is the relative standard
    deviation of its steps, if it ran; then the interval follows from that.
    """
    prediction = dataclasses.replace(predict(cluster, plan), optimality_gap=optimality_gap)
    if noise is not None:
        step = prediction.step_seconds
        half = DEVIATIONS * max(noise, TRIAL_NOISE) * step
        prediction = dataclasses.replace(prediction, step_interval=(step - half, step + half))
    fields = prediction.to_dict()
    if "simulated" in cluster.identity:
        del fields["step_interval"]  # nothing was measured: `poplar simulate` shows wider ones
    transport = plan.transport or active_part(cluster, plan)[0].network.transport
    plan = dataclasses.replace(plan, transport=transport, prediction=None)
    return dataclasses.replace(
        plan,
        prediction={
            **fields,
            "digest": plan.digest(),
            "devices": [device.name for device in cluster.devices],
            "memory_limit_bytes": [device.memory_bytes for device in cluster.devices],
            "policy": policy,
        },
    )


def bound_of(
    costs: StageCosts, plan: Plan, prediction: Prediction, numbers: Sequence[int]
) -> Bound:
    """What bounds a predicted step: compute, the network, or the memory of a rank.

    Args:
        costs: of the active ranks.
        plan: of the active ranks alone.
        prediction: of that plan.
        numbers: the number of each active rank, for the result.
    """
    step, busy = prediction.step_seconds, prediction.busy_fraction
    communication = prediction.communication_seconds / step if step else 0.0
    busiest = busy.index(max(busy))
    if communication <= busy[busiest]:
        sentence = f"rank {numbers[busiest]}'s compute ({format_percent(busy[busiest])} busy)"
        if on_host := costs.cluster.devices[busiest].state_on_host:
            update = format_percent(prediction.optimizer_seconds[busiest] / step)
            sentence += (
                f", of which the update takes {update}, with {format_percent(on_host)} of the "
                "optimizer state in host memory"
            )
        return Bound("compute", numbers[busiest], sentence)
    passes = max(map(len, plan.micro_batches))
    owned = costs.owned(plan.shares)
    if costs.synchronizes_every_pass and passes > 1:
        latest = max(one.latest for one in costs.synchronizations(plan.micro_batches))
        for rank, memory in enumerate(costs.memories):
            largest = max(plan.micro_batches[rank])
            # Infinite for batches that were not measured.
            is_useful = costs.pass_seconds(rank, largest + 1) <= _MAX_SLOWDOWN * latest
            if is_useful and not memory.fits(Caps(0, largest + 1), owned[rank]):
                sentence = (
                    f"rank {numbers[rank]}'s memory: it holds no more than {largest} samples at "
                    f"a time, so ranks synchronize {passes} times a step "
                    f"({format_percent(communication)} of it is communication)"
                )
                return Bound("memory", numbers[rank], sentence)
    slowest = _slowest_link(costs.cluster.network)
    slowest = None if slowest is None else numbers[slowest]
    which = "" if slowest is None else f", rank {slowest}'s link is the slowest"
    sentence = f"communication ({format_percent(communication)} of the step{which})"
    return Bound("network", slowest, sentence)


def _slowest_link(network: NetworkProfile) -> int | None:
    """The rank whose link is slower than all others, if there is one."""
    rates = list(map(max, network.send_seconds_per_byte, network.receive_seconds_per_byte))
    *_, second, first = [0.0, *sorted(rates)]
    return rates.index(first) if len(rates) > 1 and first > _SLOWER_LINK * second else None
