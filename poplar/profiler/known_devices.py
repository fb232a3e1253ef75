"""Reuses what was measured of single devices when other hosts were lost or have joined.

The profile of one device is a `ClusterProfile` of one rank, without a network and without residuals
of stages. Both depend on all ranks and are measured again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

from poplar.profiler.model_profile import model_profile
from poplar.profiler.noise import noise_notes
from poplar.profiler.session import Session
from poplar.profiler.unit_seconds import UnitFractions, mean_of
from poplar.values.profile import ClusterProfile, NetworkProfile


def own_device(session: Session, profile: ClusterProfile) -> ClusterProfile:
    """The profile of this rank's device, of a profile without residuals."""
    own = profile.devices[session.group.rank]
    return replace(
        profile,
        devices=(own,),
        network=no_network(1),
        identity=session.device_identity,
        notes=(),
    )


def all_devices(session: Session, known: Sequence[ClusterProfile]) -> ClusterProfile:
    """The profile of all ranks, as `Profiler.measure_devices` returns it.

    Args:
        session: of this rank.
        known: by rank, the profile of its device.
    """
    profiles = [each.devices[0] for each in known]
    model, saved = known[0].model, [each.model.saved_without_last_unit for each in known]
    forward, backward = mean_of(
        [
            UnitFractions(each.model.unit_forward_fraction, each.model.unit_backward_fraction)
            for each in known
        ]
    )
    return ClusterProfile(
        devices=tuple(profiles),
        model=replace(
            model_profile(session, 0.0),
            optimizer_bytes=model.optimizer_bytes,
            saved_without_last_unit=min((part for part in saved if part is not None), default=None),
            linear_layers=model.linear_layers,
            unit_forward_fraction=forward,
            unit_backward_fraction=backward,
        ),
        network=no_network(len(known)),
        backward_fraction=fmean(each.backward_fraction for each in known),
        memory_reserve=known[0].memory_reserve,
        identity=session.identity,
        notes=tuple(noise_notes(profiles, [None] * len(profiles))),
    )


def no_network(ranks: int) -> NetworkProfile:
    """A network that was not measured."""
    return NetworkProfile(
        reduce_scatter_seconds=0.0,
        all_gather_seconds=0.0,
        send_seconds_per_byte=(0.0,) * ranks,
        receive_seconds_per_byte=(0.0,) * ranks,
    )
