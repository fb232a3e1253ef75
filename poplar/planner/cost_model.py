"""The closed form of a step: the cost of its parts on a measured cluster.

Ranks compute until the next synchronization, which the last rank starts. Let `T` be the end of the
last rank's compute since the previous synchronization, `F` the earliest time at which every rank
has gradients of a unit, and `k` the part of the communication that does not belong to the last
unit. Then

    sync(c) = T + c - min(overlap * c k, T - F)

because compute runs at `overlap` of its speed during communication: either all communication that
can overlap does, or all remaining compute has run. Unshards in the forward (stage 3) overlap only
the forward. At stage 2 reductions that are incomplete at the end of a pass overlap the next
pass's forward. `communication_schedule` has the windows. Measured residuals by stage are added; no
synchronization takes less time than the compute before it. `search` minimizes what `predict` says,
so both use this module.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count
from typing import Any, TypeVar

from poplar.planner.collective_costs import (
    CollectiveCost,
    CollectiveCosts,
    with_encoding,
    without_codec,
)
from poplar.planner.communication_schedule import (
    CommunicationSchedule,
    CommunicationSeconds,
    Synchronization,
    schedules,
)
from poplar.planner.factored_costs import Exchange, exchanges_of, seconds_of_exchange
from poplar.planner.memory_model import Caps, RankMemory, rank_memory, sent_gradients
from poplar.planner.recomputed_curves import parts_of, with_recomputed_parts
from poplar.step.moments import elements_of
from poplar.step.units import StepUnits
from poplar.values.communication import EXACT
from poplar.values.plan import FIRST_STAGE_SYNCHRONIZING_EVERY_PASS, Plan
from poplar.values.profile import ClusterProfile

T = TypeVar("T")
_Value = TypeVar("_Value")
_Key = TypeVar("_Key", bound=Hashable)


def residual_of(measured: float, communication: float) -> float:
    """The residual of a step that communicates less than the steps that showed it.

    A negative residual is communication that ran beside compute although the model says that it
    cannot: on a CPU rank, data that is on the way. So it is at most what is communicated.

    Args:
        communication: seconds of what can run beside compute.
    """
    return max(measured, -communication)


@dataclass(frozen=True)
class StageCosts:
    """The cost model of one cluster at one stage."""

    cluster: ClusterProfile
    stage: int
    persistent: frozenset[int] = frozenset()
    """Units that stay unsharded between the passes of a step, at stage 3."""
    recomputed: tuple[frozenset[int], ...] = ()
    """By rank, units that it recomputes; `cluster` has the curves of such passes. Empty: none."""
    unit_shares: tuple[tuple[int, tuple[float, ...]], ...] = ()
    """Units with their own shares. If there are any, the engine merges no units at any stage."""
    exchanges: tuple[Exchange, ...] = ()
    """Layers whose gradients are sent as factors."""

    def with_recomputed(
        self, measured: ClusterProfile, units: Sequence[frozenset[int]]
    ) -> StageCosts:
        """These costs if every rank recomputes its `units`, on the `measured` cluster."""
        if not any(units):
            return replace(self, cluster=measured, recomputed=())
        cluster = with_recomputed_parts(measured, [parts_of(measured.model, own) for own in units])
        return replace(self, cluster=cluster, recomputed=tuple(units))

    @property
    def synchronizes_every_pass(self) -> bool:
        """Whether ranks synchronize at every pass; otherwise once per step."""
        return self.stage >= FIRST_STAGE_SYNCHRONIZING_EVERY_PASS

    @property
    def shares_matter(self) -> bool:
        """Whether any state is sharded."""
        return self.stage >= 1

    @property
    def gathers_after_step(self) -> bool:
        """Whether updated parameters are all-gathered after the optimizer."""
        return self.stage in (1, 2)

    @cached_property
    def schedules(self) -> tuple[CommunicationSchedule, CommunicationSchedule]:
        """The communication of a usual synchronization and of the costliest one of a step."""
        usual, costliest = self._schedules
        residual = self.synchronization_residual
        return replace(usual, residual=residual), replace(costliest, residual=residual)

    @cached_property
    def _schedules(self) -> tuple[CommunicationSchedule, CommunicationSchedule]:
        """Without residuals."""
        cluster = self.cluster
        return schedules(
            cluster.model,
            self.stage,
            self.persistent,
            self.overlap,
            cluster.backward_fraction,
            may_merge=not self.unit_shares,
            gather_part=self._gather_part,
        )

    @property
    def _gather_part(self) -> float:
        """Seconds of an all-gather over those of one and a reduction."""
        network = self.cluster.network
        gather, reduce = network.all_gather_seconds, network.reduce_scatter_seconds
        if self.cluster.communication != EXACT:
            gather = self.collectives.all_gather.even_seconds
            reduce = self.collectives.reduce_scatter.even_seconds
        is_used = gather + reduce > 0.0 and self.cluster.model.unit_forward_fraction
        return gather / (gather + reduce) if is_used else 0.5

    @property
    def schedule(self) -> CommunicationSchedule:
        """The communication of the costliest synchronization."""
        return self.schedules[1]

    @property
    def costliest_comes_first(self) -> bool:
        """Whether the costliest synchronization of a step is the first one, not the last one."""
        return bool(self.persistent)

    @cached_property
    def reducible_fraction(self) -> float:
        """The part of a pass, up to its end, in which gradients can be reduced."""
        return self.cluster.backward_fraction * (1.0 - self.schedule.reduction_start)

    @cached_property
    def overlaps(self) -> bool:
        """Whether any communication runs under compute."""
        return min(self.reducible_fraction, self.overlap) > 0.0

    @cached_property
    def overlap(self) -> float:
        """Part of communication that runs under compute: not encoding and decoding, which use the
        same cores or device.
        """
        cluster = self.cluster
        if cluster.communication == EXACT or not cluster.overlap:
            return cluster.overlap

        def seconds(collectives: CollectiveCosts) -> float:
            return collectives.reduce_scatter.even_seconds + collectives.all_gather.even_seconds

        sent = with_encoding(
            self.exact_collectives, without_codec(cluster), self.stage, self._measured_buffers
        )
        whole = seconds(self.collectives)
        return cluster.overlap * min(1.0, seconds(sent) / whole) if whole else cluster.overlap

    @cached_property
    def collectives(self) -> CollectiveCosts:
        """`R(p)` and `G(p)`."""
        return with_encoding(
            self.exact_collectives, self.cluster, self.stage, self._measured_buffers
        )

    @property
    def exact_collectives(self) -> CollectiveCosts:
        """As measured, whatever is encoded."""
        network = self.cluster.network
        buffers = self._measured_buffers if network.collective_latency_seconds else 1
        return CollectiveCosts.of(network, buffers)

    @property
    def _measured_buffers(self) -> int:
        """With how many buffers the collectives of the whole model were measured."""
        return StepUnits.of(self.cluster.model, 0).reductions

    @cached_property
    def memories(self) -> tuple[RankMemory, ...]:
        """By rank."""
        return tuple(
            self.by_rank(lambda rank: rank_memory(self.cluster, self.stage, rank, self.persistent))
        )

    def needed_bytes(
        self, micro_batches: Sequence[Sequence[int]], shares: Sequence[float]
    ) -> list[float]:
        """By rank, bytes for exactly these passes beside these shares."""
        needed = self.by_rank(
            lambda rank, *needs: self.memories[rank].needed(*needs),
            list(map(Caps.of, micro_batches)),
            self.owned(shares),
        )
        if self.unit_shares and self.shares_matter:
            return list(map(operator.add, needed, self._received_beyond(shares)))
        return needed

    def _received_beyond(self, shares: Sequence[float]) -> list[float]:
        """By rank, at most how much more reductions of units receive of which it owns more than of
        the whole model.
        """
        model, keeps = self.cluster.model, self.cluster.network.receive_buffers
        each = max(
            elements_of(model, self.stage, len(shares), keeps, sent).received.per_share
            for sent in sent_gradients(self.cluster, self.stage)
        )
        at_once = self.layout.reductions_in_flight if keeps == "freed" else len(self.layout.numels)
        cuts = dict(self.unit_shares)

        def beyond(rank: int, owned: float) -> float:
            numels = (
                max(0.0, cuts.get(unit, shares)[rank] - owned) * numel
                for unit, numel in enumerate(model.unit_numels)
            )
            return each * math.fsum(sorted(numels)[-at_once:])

        return list(map(beyond, range(len(shares)), self.owned(shares)))

    def by_rank(self, function: Callable[..., T], *columns: Sequence[Hashable]) -> list[T]:
        """`function(rank, *values)` of each rank, computed once for equal devices and values.

        Args:
            function: depends on the rank only by its device.
            columns: sequences of one value per rank.
        """
        distinct = self._distinct(*columns)
        values = {key: function(rank, *key[1:]) for key, rank in distinct.items()}
        keys = zip(self.cluster.device_group_indices, *columns, strict=True)
        return list(map(values.__getitem__, keys))

    def _distinct(self, *columns: Sequence[Hashable]) -> dict[tuple[Any, ...], int]:
        """A rank for each combination of device group and values."""
        keys = zip(self.cluster.device_group_indices, *columns, strict=True)
        return dict(zip(keys, count(), strict=False))

    @cached_property
    def layout(self) -> StepUnits:
        """The units that are communicated."""
        return StepUnits.of(
            self.cluster.model, self.stage, self.persistent, may_merge=not self.unit_shares
        )

    @property
    def _own_shares(self) -> list[tuple[float, Sequence[float]]]:
        """The units with their own shares, as parts of the model."""
        model = self.cluster.model
        return [(model.unit_numels[unit] / model.numel, own) for unit, own in self.unit_shares]

    def _collective_seconds(self, cost: CollectiveCost, shares: Sequence[float]) -> float:
        """A collective on the whole model; each unit under its shares."""
        if not self.shares_matter:
            return cost.even_seconds
        whole = cost.seconds(shares)
        own = (part * (cost.seconds(cut) - whole) for part, cut in self._own_shares)
        return max(0.0, whole + math.fsum(own)) if self.unit_shares else whole

    def owned(self, shares: Sequence[float]) -> tuple[float, ...]:
        """By rank, the part of the sharded state that it owns, with units' own shares."""
        if not (self.unit_shares and self.shares_matter):
            return tuple(shares)
        own = self._own_shares
        others = max(0.0, 1.0 - math.fsum(part for part, _ in own))
        return tuple(
            others * share + math.fsum(part * cut[rank] for part, cut in own)
            for rank, share in enumerate(shares)
        )

    @property
    def synchronization_residual(self) -> float:
        """Measured seconds of a synchronization beyond its collectives; see `residual_of`."""
        network = self.cluster.network
        measured = network.synchronization_seconds[self.stage]
        return residual_of(measured, self.most_hidden_seconds)

    @property
    def step_residual(self) -> float:
        """Measured seconds of a step beyond the other terms; see `residual_of`."""
        network = self.cluster.network
        return residual_of(network.step_seconds[self.stage], self.most_hidden_seconds)

    @cached_property
    def most_hidden_seconds(self) -> float:
        """The limit of negative residuals. Infinite if whole gradients are sent exactly: residuals
        were measured so.
        """
        if not self.exchanges and self.cluster.communication == EXACT:
            return math.inf
        return math.fsum(self.communication(self.cluster.even_shares))

    def pass_seconds(self, rank: int, batch: int) -> float:
        """One pass of this rank in the engine; 0 without samples."""
        if batch == 0:
            return 0.0
        device = self.cluster.devices[rank]
        return max(0.0, device.seconds(batch) + device.pass_overhead_seconds[self.stage])

    def pass_seconds_up_to(self, rank: int, most: int) -> list[float]:
        """`pass_seconds` of 0, 1, ... `most` samples, which is at most `max_batch`."""
        device = self.cluster.devices[rank]
        overhead = device.pass_overhead_seconds[self.stage]
        return [0.0, *(max(0.0, one + overhead) for one in device.seconds_up_to(most)[1:])]

    def optimizer_seconds(self, rank: int, share: float) -> float:
        """The optimizer on a part of the state that it owns (`owned`), with this rank's overhead
        per step; may be negative.
        """
        device = self.cluster.devices[rank]
        owned = share if self.shares_matter else 1.0
        return device.optimizer_step_seconds(owned) + device.step_overhead_seconds[self.stage]

    def communication(self, shares: Sequence[float]) -> CommunicationSeconds:
        """The collectives of a synchronization."""
        gathered, both = 0.0, self.collectives
        if self._schedules[1].gathers:
            gathered = self._collective_seconds(both.all_gather, shares)
        reduced = self._collective_seconds(both.reduce_scatter, shares)
        if self.exchanges:
            reduced *= 1.0 - self.factored_part
            reduced += math.fsum(self.exchange_seconds(each, shares) for each in self.exchanges)
            if not self.shares_matter:  # no rank needs the gradient of another one
                gathered *= 1.0 - self.factored_part
        return CommunicationSeconds(gathered, reduced)

    @property
    def factored_part(self) -> float:
        """The part of the model whose gradients are sent as factors."""
        return sum(each.layer.numel for each in self.exchanges) / self.cluster.model.numel

    def exchange_seconds(self, exchange: Exchange, shares: Sequence[float]) -> float:
        """Seconds in which the factors of a layer are sent and multiplied."""
        own = dict(self.unit_shares).get(exchange.layer.unit, shares)
        replicated = not self.shares_matter
        return seconds_of_exchange(self.cluster, exchange, own, replicated=replicated)

    def synchronizations_seconds(
        self, synchronizations: Sequence[Synchronization], communication: CommunicationSeconds
    ) -> list[float]:
        """Seconds of each synchronization of a step, in order."""
        usual, costliest = self.schedules
        known = {one: usual.seconds(one, communication) for one in set(synchronizations)}
        seconds = list(map(known.__getitem__, synchronizations))
        place = 0 if self.costliest_comes_first else -1
        seconds[place] = costliest.seconds(synchronizations[place], communication)
        return seconds

    def tail_seconds(self, shares: Sequence[float]) -> float:
        """Seconds after the last synchronization: the optimizer, and its all-gather."""
        distinct = self._distinct(self.owned(shares)).items()
        slowest = max(self.optimizer_seconds(rank, share) for (_, share), rank in distinct)
        gather = self.gather_after_step_seconds(shares)
        return max(0.0, slowest + gather + self.step_residual)

    def gather_after_step_seconds(self, shares: Sequence[float]) -> float:
        """The all-gather after the optimizer; 0 at stages without one."""
        if not self.gathers_after_step:
            return 0.0
        return self._collective_seconds(self.collectives.all_gather, shares)

    def synchronizations(self, micro_batches: Sequence[Sequence[int]]) -> list[Synchronization]:
        """Every synchronization of a step."""
        ranks = list(self._distinct(micro_batches).values())
        if not self.synchronizes_every_pass:
            return [self.synchronization((rank, micro_batches[rank]) for rank in ranks)]
        columns = list(zip(*(micro_batches[rank] for rank in ranks), strict=True))
        known = {
            column: self.synchronization(
                (rank, (batch,)) for rank, batch in zip(ranks, column, strict=True)
            )
            for column in set(columns)
        }
        return list(map(known.__getitem__, columns))

    def counted(
        self, synchronizations: Sequence[Synchronization]
    ) -> Counter[tuple[Synchronization, bool]]:
        """How many synchronizations of a step there are of each kind; True: it is the costliest."""
        last = len(synchronizations) - 1
        costliest = 0 if self.costliest_comes_first else last
        return Counter((one, place == costliest) for place, one in enumerate(synchronizations))

    def step_seconds(
        self, micro_batches: Sequence[Sequence[int]], shares: Sequence[float]
    ) -> float:
        """A whole step."""
        synchronizations = self.synchronizations(micro_batches)
        seconds = self.synchronizations_seconds(synchronizations, self.communication(shares))
        return math.fsum(seconds) + self.tail_seconds(shares)

    def synchronization(self, passes_of: Iterable[tuple[int, Sequence[int]]]) -> Synchronization:
        """The synchronization after these ranks have run these passes; equal ranks count once."""
        latest = reducible = 0.0
        for rank, own in passes_of:
            counts = Counter(own)
            del counts[0]
            if not counts:
                continue
            seconds = {batch: self.pass_seconds(rank, batch) for batch in counts}
            end = math.fsum(count * seconds[batch] for batch, count in counts.items())
            latest = max(latest, end)
            last = next(batch for batch in reversed(own) if batch)
            reducible = max(reducible, end - self.reducible_fraction * seconds[last])
        return Synchronization(latest, reducible)


def check_plan(cluster: ClusterProfile, plan: Plan) -> None:
    """Raise ValueError unless a plan is for these ranks, and only uses what was measured on them.

    Call it before ranks that are left out are removed: the messages have the numbers of ranks.
    """
    if plan.world_size != cluster.world_size:
        raise ValueError(
            f"the plan is for {plan.world_size} ranks, but the profile has {cluster.world_size}; "
            "profile the ranks that will train"
        )
    recomputing = {rank for unit in plan.units for rank in unit.recomputed_on}
    for rank, device in enumerate(cluster.devices):
        part = plan.part_on_host(rank)
        if part and device.host_optimizer_seconds is None:
            raise ValueError(
                f"rank {rank} ({device.name}) keeps {part:.1%} of its optimizer state in host "
                "memory, but the profile has no update there; profile again, or leave host_state "
                "empty"
            )
        if rank in recomputing and not device.recomputed_points:
            raise ValueError(
                f"rank {rank} ({device.name}) recomputes units, but the profile has no passes with "
                "recomputation of this rank; profile again, or leave recomputed_on empty"
            )


def hosting(cluster: ClusterProfile, parts: Sequence[float]) -> ClusterProfile:
    """The cluster if every rank keeps this part of its optimizer state in host memory."""
    if not any(parts):
        return cluster
    devices = (
        replace(device, state_on_host=part) if part else device
        for device, part in zip(cluster.devices, parts, strict=True)
    )
    return replace(cluster, devices=tuple(devices))


def under_plan(cluster: ClusterProfile, plan: Plan) -> ClusterProfile:
    """The cluster with the state in host memory and the communication of a plan."""
    cluster = hosting(cluster, plan.host_state)
    if plan.communication in (EXACT, cluster.communication):
        return cluster
    return replace(cluster, communication=plan.communication)


def step_seconds_of(cluster: ClusterProfile, plan: Plan) -> float:
    """Seconds of a plan's step, whether it fits or not; errors are those of `costs_of`."""
    return costs_of(cluster, plan).step_seconds(plan.micro_batches, plan.shares)


def costs_of(cluster: ClusterProfile, plan: Plan) -> StageCosts:
    """The cost model of a plan's stage, units and state in host memory.

    Raises:
        ValueError: the plan is for another number of ranks, names units that the profile does not
            have, or recomputes units or keeps state in host memory without measurements of that.
    """
    check_plan(cluster, plan)
    cluster = under_plan(cluster, plan)
    known = {name: unit for unit, name in enumerate(cluster.model.unit_names)}
    for unit in plan.units:
        is_different = unit.shares not in (None, plan.shares)
        needs_unit = is_different or unit.persistent or unit.recomputed_on
        if unit.name not in known and (known or needs_unit):
            raise ValueError(
                f"the plan names unit {unit.name!r}, which the profile does not have; it has "
                f"{', '.join(known) or 'no unit names: profile again'}"
            )
        if unit.recomputed_on and known[unit.name] not in cluster.model.recomputable_units:
            raise ValueError(
                f"unit {unit.name!r} cannot be recomputed: it holds what is outside of the "
                "repeated blocks; leave its recomputed_on empty"
            )
    persistent = frozenset(known[unit.name] for unit in plan.units if unit.persistent)
    recomputed: list[set[int]] = [set() for _ in cluster.devices]
    for unit in plan.units:
        for rank in unit.recomputed_on:
            recomputed[rank].add(known[unit.name])
    own = ((known[u.name], u.shares) for u in plan.units if u.shares not in (None, plan.shares))
    costs = StageCosts(cluster, plan.stage, persistent, unit_shares=tuple(sorted(own)))
    costs = replace(costs, exchanges=exchanges_of(cluster, plan))
    return costs.with_recomputed(cluster, list(map(frozenset, recomputed)))


def group_equal(values: Iterable[Hashable]) -> list[list[int]]:
    """The positions of each distinct value, ascending; values by first appearance."""
    found: dict[Hashable, list[int]] = {}
    for position, value in enumerate(values):
        found.setdefault(value, []).append(position)
    return list(found.values())


def map_distinct(function: Callable[[_Key], _Value], keys: Sequence[_Key]) -> list[_Value]:
    """`function(key)` for each key, computed once for equal keys."""
    known = {key: function(key) for key in dict.fromkeys(keys)}
    return list(map(known.__getitem__, keys))
