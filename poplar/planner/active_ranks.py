"""Plans that leave ranks out: the cluster of the active ranks, and which ranks may be active.

A rank behind a slow link takes part in every collective, so it can cost more than it computes. The
search compares sets of active ranks, and a lower bound on the step lets it search few of them.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise, product
from typing import NamedTuple

from poplar.planner.collective_costs import least_ratios, rate_seconds
from poplar.planner.cost_model import StageCosts, check_plan
from poplar.planner.recomputed_curves import recomputing
from poplar.planner.share_limits import convex_hull
from poplar.values.plan import FIRST_STAGE_SHARDING_PARAMETERS, STRATEGIES, Plan
from poplar.values.profile import ClusterProfile, DeviceProfile, NetworkProfile

MOST_SETS = 2048
"""Sets of active ranks whose bounds are compared; with more, whole hosts are left out."""
_PARTS = 16
"""Of more equal ranks than this, so many numbers are tried: neighbouring ones differ little."""
_FEW = 4
"""Of many equal ranks, so many may also be left out: they may be slower by what is called noise."""
_HALVINGS = 30
"""Of the range of seconds in which ranks may have run all samples."""
_NO_RESIDUALS = (0.0,) * len(STRATEGIES)


def of_ranks(cluster: ClusterProfile, ranks: Sequence[int]) -> ClusterProfile:
    """The cluster with the devices and links of these ranks, in this order. Collectives keep their
    measured seconds.
    """
    network = cluster.network
    links = replace(
        network,
        send_seconds_per_byte=_of(network.send_seconds_per_byte, ranks),
        receive_seconds_per_byte=_of(network.receive_seconds_per_byte, ranks),
        hosts=tuple(network.hosts[rank] for rank in ranks if network.hosts),
        network_seconds_per_byte=_of(network.network_seconds_per_byte, ranks),
    )
    devices = tuple(cluster.devices[rank] for rank in ranks)
    return replace(cluster, devices=devices, network=links)


def without_ranks(cluster: ClusterProfile, ranks: Collection[int]) -> ClusterProfile:
    """The cluster without some ranks, whose collectives take as long as the other links allow.

    A single rank has no collectives. Ranks of a single host do not use the network between hosts,
    and their collectives take as long as those within hosts, if these were measured.
    """
    if not ranks:
        return cluster
    active = [rank for rank in range(cluster.world_size) if rank not in ranks]
    left, names = of_ranks(cluster, active), hosts_of(cluster)
    network, left_on = left.network, Counter(names[rank] for rank in active)
    largest, before = max(left_on.values()), max(Counter(names).values())
    fewer = (1.0 - 1.0 / largest) / (1.0 - 1.0 / before) if largest > 1 else 0.0
    within = tuple(fewer * seconds for seconds in network.within_host_seconds)
    is_measured = 1 < len(left_on) < left.world_size  # otherwise the field is empty
    network = replace(network, within_host_seconds=within if is_measured else ())
    if len(set(network.hosts)) == 1:
        network = _within_one_host(network)
    is_one_host = within and len(left_on) == 1 < len(set(names))
    if left.world_size == 1 or is_one_host:
        # Nothing that was measured between hosts concerns these ranks.
        reduced, gathered = within or (0.0, 0.0)
        network = replace(
            network,
            reduce_scatter_seconds=reduced,
            all_gather_seconds=gathered,
            synchronization_seconds=_NO_RESIDUALS,
            step_seconds=_NO_RESIDUALS,
            collective_latency_seconds=(),
        )
    else:
        both = zip(rate_seconds(network), rate_seconds(cluster.network), strict=True)
        fewer = (1.0 - 1.0 / left.world_size) / (1.0 - 1.0 / cluster.world_size)
        network = network.times(*(after / before if before else fewer for after, before in both))
    return replace(left, network=network)


def active_part(cluster: ClusterProfile, plan: Plan) -> tuple[ClusterProfile, Plan]:
    """The cluster and the plan of the plan's active ranks alone.

    Raises:
        ValueError: see `check_plan`.
    """
    check_plan(cluster, plan)
    if not plan.left_out:
        return cluster, plan
    return without_ranks(cluster, plan.left_out), plan.of_active_ranks()


def hosts_of(cluster: ClusterProfile) -> Sequence[object]:
    """By rank, the number or the name of its host."""
    return cluster.network.hosts or [device.host for device in cluster.devices]


def _within_one_host(network: NetworkProfile) -> NetworkProfile:
    """The network of ranks of one host, whose links are known apart from the network or not."""

    def within(rates: Sequence[float]) -> tuple[float, ...]:
        between = network.network_seconds_per_byte or (0.0,) * len(rates)
        return tuple(max(0.0, rate - part) for rate, part in zip(rates, between, strict=True))

    return replace(
        network,
        send_seconds_per_byte=within(network.send_seconds_per_byte),
        receive_seconds_per_byte=within(network.receive_seconds_per_byte),
        hosts=(),
        network_seconds_per_byte=(),
        transport=None,
    )


def _of(values: Sequence[float], ranks: Sequence[int]) -> tuple[float, ...]:
    return tuple(values[rank] for rank in ranks if values)


class ActiveSet(NamedTuple):
    """Ranks that may train without the others."""

    bounds: Mapping[int, float]
    """By stage: no plan of these ranks has a shorter step, in seconds."""
    left_out: tuple[int, ...]
    """The other ranks, ascending."""

    @property
    def bound(self) -> float:
        """The least of all stages."""
        return min(self.bounds.values())


def active_sets(
    cluster: ClusterProfile,
    groups: Sequence[Sequence[int]],
    stages: Collection[int],
    *,
    global_batch: int,
    max_micro_batch: int,
    may_factor: bool,
) -> Iterator[ActiveSet]:
    """Sets of ranks that may be active, by ascending bound, without the set of all ranks.

    Of equal devices on a host, the fastest ones are active, of many some numbers of them
    (`_counts`). If these are more than `MOST_SETS` sets, all ranks of a host are active or none, of
    equal hosts the first ones. If these are still too many, hosts are left out in the order of
    their samples per second over the seconds of their links.

    Args:
        cluster: all ranks.
        groups: ranks with equal devices and links, up to noise.
        stages: ZeRO stages of the plans.
        global_batch: samples of a step.
        max_micro_batch: the largest micro-batch.
        may_factor: gradients of linear layers may be sent as factors, which may take no time.
    """
    bounds = _Bounds(cluster, stages, global_batch, max_micro_batch, may_factor=may_factor)
    found = _sets(cluster, groups, bounds.samples_per_second)
    sets = [active for active in found if 0 < len(active) < cluster.world_size]
    sets.sort(key=len, reverse=True)  # of equal bounds, more ranks first
    # First a bound that takes little time to compute, and a better one of those that are searched.
    queue = [(min(bounds.rough(active).values()), number) for number, active in enumerate(sets)]
    heapq.heapify(queue)
    better: dict[int, Mapping[int, float]] = {}
    while queue:
        _, number = heapq.heappop(queue)
        if number in better:
            left_out = sorted(set(range(cluster.world_size)).difference(sets[number]))
            yield ActiveSet(better[number], tuple(left_out))
        else:
            better[number] = bounds.of(sets[number])
            heapq.heappush(queue, (min(better[number].values()), number))


class _Bounds:
    """Lower bounds on the steps of sets of ranks. The arguments are those of `active_sets`."""

    def __init__(
        self,
        cluster: ClusterProfile,
        stages: Collection[int],
        global_batch: int,
        max_micro_batch: int,
        *,
        may_factor: bool,
    ) -> None:
        network, model, hosts = cluster.network, cluster.model, hosts_of(cluster)
        self._cluster, self._hosts, self._global_batch = cluster, hosts, global_batch
        keys = zip(cluster.rank_group_indices, hosts, strict=True)
        first: dict[tuple[object, ...], int] = {}
        self._alike = [first.setdefault(key, rank) for rank, key in enumerate(keys)]
        """By rank, the first one with an equal device and link on the same host."""
        self._curves = {
            rank: _Curve(cluster.devices[rank], max_micro_batch) for rank in first.values()
        }
        linear = sum(layer.numel for layer in model.linear_layers) if may_factor else 0
        self._whole = max(0.0, 1.0 - linear / model.numel) if linear else 1.0
        """The part of the model that is never sent as factors."""
        measured = self._whole * network.reduce_scatter_seconds, network.all_gather_seconds
        self._reduced, self._gathered = (
            ratio * seconds / by_rates if by_rates else 0.0
            for ratio, seconds, by_rates in zip(
                least_ratios(cluster), measured, rate_seconds(network), strict=True
            )
        )
        units = range(len(model.unit_numels))
        self._costs = [
            StageCosts(
                cluster,
                stage,
                frozenset(units if stage >= FIRST_STAGE_SHARDING_PARAMETERS else ()),
            )
            for stage in stages
        ]
        """With all units persistent, which takes the fewest all-gathers."""

    @property
    def samples_per_second(self) -> list[float]:
        """By rank, at most."""
        return [self._curves[rank].samples_per_second for rank in self._alike]

    def rough(self, active: Sequence[int]) -> dict[int, float]:
        """By stage, a bound by the samples per second of the ranks."""
        return self._by_stage(active, self._least_compute(self._counted(active)))

    def of(self, active: Sequence[int]) -> dict[int, float]:
        """By stage, a bound by the seconds of whole passes."""
        counts = self._counted(active)
        least = self._least_compute(counts)
        most = least + max(curve.latency for curve, _ in counts)
        for _ in range(_HALVINGS):
            middle = (least + most) / 2.0
            samples = math.fsum(many * curve.samples_within(middle) for curve, many in counts)
            least, most = (least, middle) if samples >= self._global_batch else (middle, most)
        return self._by_stage(active, least)

    def _counted(self, active: Iterable[int]) -> list[tuple[_Curve, int]]:
        """How many of these ranks have each curve."""
        counts = Counter(map(self._alike.__getitem__, active))
        return [(self._curves[rank], many) for rank, many in counts.items()]

    def _least_compute(self, counts: Sequence[tuple[_Curve, int]]) -> float:
        rates = (many * curve.samples_per_second for curve, many in counts)
        return self._global_batch / math.fsum(rates)

    def _by_stage(self, active: Sequence[int], compute: float) -> dict[int, float]:
        """By stage, a bound on the steps in which some rank computes at least this long."""
        network = self._cluster.network
        some = sorted(set(map(self._alike.__getitem__, active)))
        sending, receiving = _least_seconds(network, some, len(active))
        if network.within_host_seconds and len({self._hosts[rank] for rank in some}) == 1:
            sending = receiving = 0.0
        reduced, gathered = self._reduced * sending, self._gathered * receiving

        def step(costs: StageCosts) -> float:
            stage = costs.stage
            gathers = costs.schedule.gathers * gathered
            if not costs.shares_matter:  # no rank needs the gradient of a layer sent as factors
                gathers *= self._whole
            communication = reduced + gathers
            overlapped = min(self._cluster.overlap * communication, compute)
            residual = min(0.0, network.synchronization_seconds[stage])
            exposed = max(0.0, communication - overlapped + residual)
            overhead = max(
                self._cluster.devices[rank].step_overhead_seconds[stage] for rank in some
            )
            residual = min(0.0, network.step_seconds[stage] + overhead)
            tail = max(0.0, residual + (gathered if costs.gathers_after_step else 0.0))
            return compute + exposed + tail

        return {costs.stage: step(costs) for costs in self._costs}


class _Curve:
    """The most samples that a rank may run in some seconds, in passes of any sizes.

    Lines below its measured passes bound the seconds from below: one through the origin, and the
    edges of their convex hull.
    """

    def __init__(self, device: DeviceProfile, max_micro_batch: int) -> None:
        seconds = _least_seconds_by_batch(device, max_micro_batch)
        each = min(seconds[batch] / batch for batch in seconds)
        self.samples_per_second = 1.0 / each if each > 0.0 else math.inf
        lines = []
        for (batch, one), (larger, other) in pairwise(convex_hull(sorted(seconds.items()))):
            slope = (other - one) / (larger - batch)
            if slope > 0.0 and one > slope * batch:
                lines.append((one - slope * batch, slope))
        self._lines = lines
        """Seconds of a pass beside its samples, and seconds of a sample."""
        self.latency = max((latency for latency, _ in lines), default=0.0)

    def samples_within(self, seconds: float) -> float:
        """At most so many samples."""
        if self.samples_per_second == math.inf:
            return math.inf
        most = self.samples_per_second * seconds
        for latency, slope in self._lines:
            most = min(most, (seconds - latency) / slope)
        return max(0.0, most)


def _least_seconds_by_batch(device: DeviceProfile, max_micro_batch: int) -> dict[int, float]:
    """The least seconds of a pass at any stage, whatever it recomputes; the curve is straight
    between these batches.
    """
    if device.recomputed_points:
        device = recomputing(device, again=0.0, saved=1.0)  # no part takes less time
    overhead = min(0.0, *device.pass_overhead_seconds)
    batches = {1, *(min(point.batch, max_micro_batch) for point in device.points)}
    return {batch: max(0.0, device.seconds(batch) + overhead) for batch in batches}


def _sets(
    cluster: ClusterProfile, groups: Sequence[Sequence[int]], rates: Sequence[float]
) -> Iterator[list[int]]:
    """Ranks that are active together: the first blocks of each chain of blocks of ranks."""
    of_rank = {rank: number for number, group in enumerate(groups) for rank in group}
    names = hosts_of(cluster)
    hosts, alike = defaultdict(list), defaultdict(list)
    for rank in sorted(range(cluster.world_size), key=lambda rank: -rates[rank]):
        hosts[names[rank]].append(rank)
        alike[names[rank], of_rank[rank]].append([rank])
    chains = list(alike.values())
    if math.prod(len(_counts(len(chain))) for chain in chains) > MOST_SETS:
        equal_hosts = defaultdict(list)
        for ranks in hosts.values():
            equal_hosts[tuple(of_rank[rank] for rank in ranks)].append(ranks)
        chains = list(equal_hosts.values())
    if math.prod(len(_counts(len(chain))) for chain in chains) > MOST_SETS:
        slowest = cluster.network.send_seconds_per_byte

        def value(ranks: Sequence[int]) -> float:
            return math.fsum(rates[r] for r in ranks) / (max(slowest[r] for r in ranks) or 1.0)

        chains = [sorted(hosts.values(), key=value, reverse=True)]
    for counts in product(*(_counts(len(chain)) for chain in chains)):
        firsts = (chain[:count] for chain, count in zip(chains, counts, strict=True))
        yield [rank for first in firsts for ranks in first for rank in ranks]


def _counts(blocks: int) -> Sequence[int]:
    """How many of these blocks may be active: with many, all but a few, and parts of them."""
    if blocks <= _PARTS:
        return range(blocks + 1)
    parts = {round(blocks * part / _PARTS) for part in range(_PARTS + 1)}
    return sorted({*parts, *range(blocks - _FEW, blocks)})


def _least_seconds(network: NetworkProfile, some: Sequence[int], ranks: int) -> tuple[float, float]:
    """A lower bound, under any shares, on `rate_seconds` of so many ranks alone, with these links.

    A link carries what its rank, or its host, does not own once, and what it owns once for each
    other one, in opposite directions of a reduce-scatter and of an all-gather.
    """
    others = len({network.hosts[rank] for rank in some} if network.hosts else range(ranks)) - 1
    if not others:
        return 0.0, 0.0
    shared = network.network_seconds_per_byte
    sending = shared or network.send_seconds_per_byte
    receiving = shared or network.receive_seconds_per_byte

    def least(leaving: Sequence[float], arriving: Sequence[float]) -> float:
        both = ((leaving[rank], others * arriving[rank]) for rank in some if leaving)
        return max(
            (out * into / (out + into) if out + into else 0.0 for out, into in both), default=0.0
        )

    return least(sending, receiving), least(receiving, sending)
