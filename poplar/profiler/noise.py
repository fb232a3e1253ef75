"""Whether the devices were too hot or unsteady for their times to be trusted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from poplar.values.profile import DeviceProfile

MOST_SPREAD = 0.03
"""Relative standard error of a median pass time above which a profile says that it is uncertain:
about as much as good plans differ by."""


def noise_notes(profiles: Sequence[DeviceProfile]) -> Iterable[str]:
    """Sentences for `ClusterProfile.notes` on devices that were throttled or unsteady.

    Args:
        profiles: by rank.
    """
    for rank, device in enumerate(profiles):
        if device.throttled:
            yield (
                f"rank {rank} was throttled while it was measured ({device.throttled}): its times "
                "are those of a hot or capped device"
            )
    for rank, device in enumerate(profiles):
        spread, batch = max((p.spread_seconds / p.seconds, p.batch) for p in device.points)
        if spread > MOST_SPREAD:
            yield (
                f"the times of rank {rank} are noisy: the median time of {batch} samples has a "
                f"standard error of {spread:.1%} (more than {MOST_SPREAD:.0%}), so predictions may "
                "be off by as much; profile again on a quieter machine or with a larger seconds="
            )
