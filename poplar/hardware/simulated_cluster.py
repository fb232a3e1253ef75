"""Estimated profiles of a described cluster: `ClusterProfile`s of devices that were not measured.

There is a middle, an optimistic and a pessimistic profile, and for each type of device a profile in
which it is slower and the others are faster. All have the same batches, so a plan of the middle
profile can be estimated as an interval.

[Note: estimated collectives]
The transport is the hierarchical one: the ranks of a host reduce first, so each host sends one copy
of the gradients. With `M` bytes, `g` ranks on a host and `n` ranks on `H` hosts,

    within a host     M (g - 1) / g, by each rank's link
    between hosts     leaving M (1 - g / n), arriving (H - 1) M g / n, by each host's network

and the busiest host counts. `collective_costs` models uneven shares with each rank's links in
series, which is not tested for extreme shares.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from poplar.hardware.cluster_file import ClusterFile, HostEntry
from poplar.hardware.device_catalog import (
    MEASURED_SPREAD,
    MIDDLE,
    OPTIMISTIC,
    PESSIMISTIC,
    SPREAD,
    Outlook,
    device_profile,
    measured_curve,
)
from poplar.hardware.gpu_specifications import Specification
from poplar.hardware.model_shapes import TrainingJob
from poplar.profile import ClusterProfile, ModelProfile, NetworkProfile

OVERLAP = 0.6
"""Default overlap; assumed."""
LINK_EFFICIENCY = 0.75
"""Fraction of the specified bandwidth that collectives reach; assumed."""
_UNIT_SECONDS = 50e-6
"""Launch and latency of one unit's collective, per level; assumed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulatedCluster:
    """Profiles of a described cluster and their uncertainty. Nothing was measured."""

    middle: ClusterProfile
    """The profile for the search."""
    optimistic: ClusterProfile
    pessimistic: ClusterProfile
    tilted: tuple[ClusterProfile, ...]
    """For each type of device: this type slower, the others faster. Empty with one type."""
    job: TrainingJob
    calculated: tuple[str, ...]
    """Types of device estimated by the roofline alone."""
    measured: tuple[str, ...]
    """Types of device with a published curve of this model."""
    price_per_hour: float | None
    currency: str

    @property
    def outlooks(self) -> tuple[ClusterProfile, ...]:
        """All profiles that intervals span."""
        return (self.middle, self.optimistic, self.pessimistic, *self.tilted)


def simulated_cluster(
    described: ClusterFile, job: TrainingJob, *, vary: Sequence[Specification] = ()
) -> SimulatedCluster:
    """The profiles of a cluster.

    Args:
        described: the cluster.
        job: the model, and how it is trained.
        vary: types of device to vary; empty: those of this cluster. For a part of a cluster pass
            the types of the whole, so that both have the same outlooks.
    """
    vary = vary or described.device_types
    measured = tuple(one.gpu for one in vary if measured_curve(one, job) is not None)
    tilts = [_tilt(one.gpu, measured) for one in vary] if len(vary) > 1 else []

    def uniform(outlook: Outlook) -> ClusterProfile:
        return _profile(described, job, lambda gpu: outlook, outlook)

    return SimulatedCluster(
        middle=uniform(MIDDLE),
        optimistic=uniform(OPTIMISTIC),
        pessimistic=uniform(PESSIMISTIC),
        tilted=tuple(_profile(described, job, tilt, MIDDLE) for tilt in tilts),
        job=job,
        calculated=tuple(one.gpu for one in vary if one.gpu not in measured),
        measured=measured,
        price_per_hour=described.price_per_hour,
        currency=described.currency,
    )


def _tilt(slower: str, measured: Sequence[str]) -> Callable[[str], Outlook]:
    """One type slower and the others faster, each by the spread of its ratio to other devices."""

    def outlook(gpu: str) -> Outlook:
        spreads = MEASURED_SPREAD / SPREAD if gpu in measured else 1.0
        return Outlook(name=f"{slower} slower", speed=-spreads if gpu == slower else spreads)

    return outlook


def _profile(
    described: ClusterFile,
    job: TrainingJob,
    outlook_of: Callable[[str], Outlook],
    between: Outlook,
) -> ClusterProfile:
    """One profile: an outlook for each type of device, and one for everything between devices."""
    shape = job.architecture
    # 16-bit training with AdamW: fp32 master weights, moments and reductions.
    model = ModelProfile(
        unit_numels=shape.unit_numels,
        unit_names=shape.unit_names,
        param_bytes=2,
        grad_bytes=2,
        optimizer_bytes=12,
    )
    faster = SPREAD * between.links
    return ClusterProfile(
        devices=tuple(
            device_profile(
                entry.specification,
                job,
                outlook_of(entry.specification.gpu),
                memory_gib=entry.memory_gib,
                host=host.name,
            )
            for host, entry in described.devices
        ),
        model=model,
        network=network_profile(described.hosts, model, faster=1 + faster),
        overlap=OVERLAP + faster if described.overlap is None else described.overlap,
        backward_fraction=3 / 4 if job.checkpointing else 2 / 3,
        identity={"simulated": between.name, "cluster": described.name, "model": shape.name},
        notes=("simulated: no device of this cluster was measured",),
    )


def network_profile(
    hosts: Sequence[HostEntry], model: ModelProfile, *, faster: float = 1.0
) -> NetworkProfile:
    """The collectives of a model between hosts; `faster` scales the bandwidth."""
    efficiency = LINK_EFFICIENCY * faster
    rates = tuple(
        _seconds_per_byte(host, len(hosts)) / efficiency
        for host in hosts
        for _ in range(host.ranks)
    )
    levels = 1 + (len(hosts) > 1)
    latency = levels * _UNIT_SECONDS * len(model.unit_numels) if len(rates) > 1 else 0.0
    reduced, gathered = model.wire_bytes * model.numel, model.param_bytes * model.numel
    return NetworkProfile(
        reduce_scatter_seconds=_seconds(hosts, reduced) / efficiency + latency,
        all_gather_seconds=_seconds(hosts, gathered) / efficiency + latency,
        send_seconds_per_byte=rates,
        receive_seconds_per_byte=rates,
    )


def _seconds(hosts: Sequence[HostEntry], size: float) -> float:
    """See [Note: estimated collectives]."""
    within = max(size * (host.ranks - 1) / host.ranks / host.link_bytes_per_s for host in hosts)
    if len(hosts) == 1:
        return within
    ranks = sum(host.ranks for host in hosts)
    between = max(
        size
        * max(1 - host.ranks / ranks, (len(hosts) - 1) * host.ranks / ranks)
        / host.network_bytes_per_s
        for host in hosts
    )
    return within + between


def _seconds_per_byte(host: HostEntry, hosts: int) -> float:
    within = 1.0 / host.link_bytes_per_s if host.ranks > 1 or hosts == 1 else 0.0
    return within + (1.0 / host.network_bytes_per_s if hosts > 1 else 0.0)
