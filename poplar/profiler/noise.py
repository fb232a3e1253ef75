"""Whether the devices were too hot, busy or unsteady for their times to be trusted."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from poplar.system import host_limits
from poplar.values.profile import DeviceProfile

MOST_SPREAD = 0.03
"""Relative standard error of a median pass time above which a profile says that it is uncertain:
about as much as good plans differ by."""
MOST_OTHER_USE = 0.1
"""Part of the ranks' cores that other processes may use before a profile says so."""


class CpuUse(NamedTuple):
    """Seconds of processor time, in all or between two moments."""

    seconds: float
    """Wall time."""
    own: float
    """Processor time of this process."""
    busy: Mapping[int, float]
    """Time in which each core of this process was busy or taken by another guest."""

    @classmethod
    def now(cls) -> CpuUse:
        """Use since the start of the process and of the host."""
        return cls(time.perf_counter(), time.process_time(), host_limits.busy_seconds())

    def since(self, before: CpuUse) -> CpuUse:
        """What was used since an earlier moment."""
        busy = {core: used - before.busy.get(core, used) for core, used in self.busy.items()}
        return CpuUse(self.seconds - before.seconds, self.own - before.own, busy)


def other_use(uses: Sequence[CpuUse]) -> float:
    """Part of their cores that processes other than these ranks used, 0 to 1; 0 if unknown.

    Args:
        uses: of the ranks of one host, over about the same time.
    """
    cores = {core: used for use in uses for core, used in use.busy.items()}
    available = len(cores) * max((use.seconds for use in uses), default=0.0)
    others = sum(cores.values()) - sum(use.own for use in uses)
    return min(max(others / available, 0.0), 1.0) if available else 0.0


def noise_notes(profiles: Sequence[DeviceProfile], uses: Sequence[CpuUse | None]) -> Iterable[str]:
    """Sentences for `ClusterProfile.notes` on devices that were throttled, busy or unsteady.

    Args:
        profiles: by rank.
        uses: by rank, processor time while passes were timed; None if not looked at.
    """
    for rank, device in enumerate(profiles):
        if device.throttled:
            yield (
                f"rank {rank} was throttled while it was measured ({device.throttled}): its times "
                "are those of a hot or capped device"
            )
    hosts = [device.host for device in profiles]
    for host in dict.fromkeys(hosts):
        others = other_use([use for use, at in zip(uses, hosts, strict=True) if at == host and use])
        if others > MOST_OTHER_USE:
            yield (
                f"the machine {host} was busy: other processes used {others:.0%} of the ranks' "
                f"processor cores during the measurement (more than {MOST_OTHER_USE:.0%}), so the "
                "measured times are too long; stop them and profile again"
            )
    for rank, device in enumerate(profiles):
        spread, batch = max((p.spread_seconds / p.seconds, p.batch) for p in device.points)
        if spread > MOST_SPREAD:
            yield (
                f"the times of rank {rank} are noisy: the median time of {batch} samples has a "
                f"standard error of {spread:.1%} (more than {MOST_SPREAD:.0%}), so predictions may "
                "be off by as much; profile again on a quieter machine or with a larger seconds="
            )
