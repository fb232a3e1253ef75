"""Profiles of small clusters for tests of the planner, from few numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from poplar.values.profile import (
    BatchPoint,
    ClusterProfile,
    DeviceProfile,
    ModelProfile,
    NetworkProfile,
)


def device(
    speed: float = 1.0,
    *,
    memory: int = 10**9,
    latency: float = 0.02,
    sample: float = 0.01,
    largest: int = 16,
    batches: Sequence[int] = (),
    sample_bytes: int = 10**6,
    **changes: Any,
) -> DeviceProfile:
    """A device whose passes take a latency and time in proportion to the batch. It has points for
    powers of two up to the largest, or for these batches.
    """
    batches = batches or [2**power for power in range(largest.bit_length())]
    return DeviceProfile(
        **{
            "name": f"device of speed {speed}",
            "memory_bytes": memory,
            "points": tuple(
                BatchPoint(
                    batch=batch,
                    seconds=(latency + sample * batch) / speed,
                    activation_bytes=sample_bytes * batch,
                )
                for batch in batches
            ),
            "optimizer_seconds": 0.01,
            **changes,
        }
    )


def network_of(
    rates: Sequence[float], reduce: float, gather: float, **changes: Any
) -> NetworkProfile:
    """Links that send and receive with these seconds per byte."""
    return NetworkProfile(
        **{
            "reduce_scatter_seconds": reduce,
            "all_gather_seconds": gather,
            "send_seconds_per_byte": tuple(rates),
            "receive_seconds_per_byte": tuple(rates),
            **changes,
        }
    )


def cluster_of(
    *devices: DeviceProfile,
    communication: float = 0.01,
    gather: float | None = None,
    units: Sequence[int] = (10**6,) * 4,
    **changes: Any,
) -> ClusterProfile:
    """Equal links, with which a collective takes these seconds; `gather`: an all-gather."""
    gather = communication if gather is None else gather
    return ClusterProfile(
        **{
            "devices": devices,
            "model": ModelProfile(unit_numels=tuple(units)),
            "network": network_of((1e-9,) * len(devices), communication, gather),
            **changes,
        }
    )
