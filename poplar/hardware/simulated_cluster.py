"""Estimated profiles of a described cluster: `ClusterProfile`s of devices that were not measured.

There is a middle, an optimistic and a pessimistic profile, and for each type of device a profile in
which it is slower and the others are faster. All have the same batches, so a plan of the middle
profile can be estimated as an interval.

[Note: estimated collectives]
The transport is the one that `communicator="auto"` takes: hierarchical if some of several hosts
have several ranks. The busiest link within a host and the busiest network between hosts take their
time one after the other; `host_traffic` has what they carry. Each native call has a latency: one
call per unit and level.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from poplar.hardware.cluster_file import ClusterFile, HostEntry
from poplar.hardware.gpu_specifications import Specification
from poplar.hardware.model_shapes import TrainingJob
from poplar.hardware.roofline import SPREAD, device_profile, spread
from poplar.values.host_traffic import is_hierarchical, link_traffic, network_traffic
from poplar.values.profile import ClusterProfile, ModelProfile, NetworkProfile

OVERLAP = 0.6
"""Default overlap; assumed."""
LINK_EFFICIENCY = 0.75
"""Fraction of the specified bandwidth that collectives reach; assumed."""
_CALL_SECONDS = 50e-6
"""Launch and latency of one native call; assumed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulatedCluster:
    """Profiles of a described cluster and their uncertainty. Nothing was measured."""

    described: ClusterFile
    job: TrainingJob
    middle: ClusterProfile
    """The profile for the search."""
    optimistic: ClusterProfile
    pessimistic: ClusterProfile
    tilted: tuple[ClusterProfile, ...]
    """One profile for each type of device: it is slower, the others faster. Empty with one type."""
    spreads: Mapping[str, float]
    """The assumed relative error of the speed of each type of device."""

    @property
    def outlooks(self) -> tuple[ClusterProfile, ...]:
        """All profiles that intervals span."""
        return (self.middle, self.optimistic, self.pessimistic, *self.tilted)


def simulated_cluster(
    described: ClusterFile, job: TrainingJob, *, vary: Sequence[Specification] = ()
) -> SimulatedCluster:
    """The profiles of a cluster.

    Args:
        vary: types of device to vary; empty: those of this cluster. For a part of a cluster pass
            the types of the whole, so that both have the same outlooks.
    """
    types = vary or described.device_types
    spreads = {one.gpu: spread(one) for one in types}

    def all_at(outlook: int) -> ClusterProfile:
        speeds = {gpu: 1 + outlook * error for gpu, error in spreads.items()}
        return _profile(described, job, speeds, outlook)

    def tilted(slower: str) -> ClusterProfile:
        speeds = {gpu: 1 - e if gpu == slower else 1 + e for gpu, e in spreads.items()}
        return _profile(described, job, speeds)

    return SimulatedCluster(
        described=described,
        job=job,
        middle=all_at(0),
        optimistic=all_at(1),
        pessimistic=all_at(-1),
        tilted=tuple(map(tilted, spreads)) if len(spreads) > 1 else (),
        spreads=spreads,
    )


def _profile(
    described: ClusterFile, job: TrainingJob, speeds: Mapping[str, float], outlook: int = 0
) -> ClusterProfile:
    """One profile: `speeds` are factors by type of device; links and activations are better than
    estimated by `outlook` times their spread.
    """
    shape = job.architecture
    # 16-bit training with AdamW: fp32 master weights, moments and reductions.
    model = ModelProfile(
        unit_numels=tuple(shape.units.values()),
        unit_names=tuple(shape.units),
        param_bytes=2,
        grad_bytes=2,
        optimizer_bytes=12,
    )
    return ClusterProfile(
        devices=tuple(
            device_profile(
                entry.specification,
                job,
                speed=speeds[entry.specification.gpu],
                activations=1 - outlook * SPREAD,
                memory_gib=entry.memory_gib,
                host=host.name,
            )
            for host, entry in described.devices
        ),
        model=model,
        network=network_profile(described.host, model, faster=1 + outlook * SPREAD),
        overlap=OVERLAP + outlook * SPREAD if described.overlap is None else described.overlap,
        backward_fraction=3 / 4 if job.checkpointing else 2 / 3,
        identity={"simulated": "middle", "cluster": described.name, "model": shape.name},
        notes=("simulated: no device of this cluster was measured",),
    )


def network_profile(
    hosts: Sequence[HostEntry], model: ModelProfile, *, faster: float = 1.0
) -> NetworkProfile:
    """The collectives of a model between hosts; `faster` scales the bandwidth.

    See [Note: estimated collectives].
    """
    efficiency = LINK_EFFICIENCY * faster
    ranks_by_host = [host.ranks for host in hosts]
    ranks, several = sum(ranks_by_host), len(hosts) > 1
    hierarchical = is_hierarchical(ranks_by_host)
    even = [[1 / ranks] * own for own in ranks_by_host]
    within = max(
        own[0].busiest / host.link_bytes_per_s
        for host, own in zip(hosts, link_traffic(even, hierarchical=True), strict=True)
    )
    between = max(
        one.busiest / host.network_bytes_per_s
        for host, one in zip(hosts, network_traffic(even, hierarchical=True), strict=True)
    )
    seconds_per_byte = (within + between) / efficiency
    calls = (0 if ranks == 1 else 2 if hierarchical else 1) * len(model.unit_numels)
    links: list[float] = []
    networks: list[float] = []
    for host in hosts:
        network = 1 / host.network_bytes_per_s / efficiency if several else 0.0
        link = 1 / host.link_bytes_per_s / efficiency if host.ranks > 1 or not several else 0.0
        networks += [network] * host.ranks
        links += [link + network] * host.ranks
    return NetworkProfile(
        reduce_scatter_seconds=model.wire_bytes * model.numel * seconds_per_byte
        + calls * _CALL_SECONDS,
        all_gather_seconds=model.param_bytes * model.numel * seconds_per_byte
        + calls * _CALL_SECONDS,
        send_seconds_per_byte=tuple(links),
        receive_seconds_per_byte=tuple(links),
        hosts=tuple(i for i, host in enumerate(hosts) if hierarchical for _ in range(host.ranks)),
        network_seconds_per_byte=tuple(networks) if hierarchical else (),
    )
