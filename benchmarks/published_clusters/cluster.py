"""Clusters that were published with a system, described by specifications. Nothing is measured.

Training is in fp32, as in the public code of both systems, so peaks are those of fp32. A device is
estimated as in `poplar.hardware.roofline`: matrix products by a part of the peak, everything else
by memory bandwidth.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from poplar.hardware.roofline import DEFAULT_EFFICIENCY, UNCALIBRATED_SPREAD

LINK_SPREAD = 0.3
"""Assumed relative error of links, as in `poplar.hardware.roofline`."""
RATIO_SPREAD = 0.2
"""Assumed relative error of each type of device if one is slower and the others are faster."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """One GPU model."""

    name: str
    fp32_tflops: float
    """Peak without tensor cores."""
    memory_gib: float
    memory_gb_per_s: float
    link_gb_per_s: float
    """Each way, within the host."""
    efficiency: float = DEFAULT_EFFICIENCY
    """Part of the peak that matrix products reach."""

    @property
    def flops_per_s(self) -> float:
        """Of matrix products."""
        return self.efficiency * self.fp32_tflops * 1e12

    @property
    def bytes_per_s(self) -> float:
        """Of memory."""
        return 1e9 * self.memory_gb_per_s

    def times(self, speed: float) -> Device:
        """The same device with another speed."""
        return dataclasses.replace(
            self, efficiency=speed * self.efficiency, memory_gb_per_s=speed * self.memory_gb_per_s
        )


V100_SXM2 = Device(
    name="V100-SXM2-16", fp32_tflops=15.7, memory_gib=16, memory_gb_per_s=900, link_gb_per_s=150
)
V100_PCIE = Device(
    name="V100-PCIe-16", fp32_tflops=14.0, memory_gib=16, memory_gb_per_s=900, link_gb_per_s=16
)
P100_PCIE_16 = Device(
    name="P100-PCIe-16", fp32_tflops=9.3, memory_gib=16, memory_gb_per_s=732, link_gb_per_s=16
)
P100_PCIE_12 = Device(
    name="P100-PCIe-12", fp32_tflops=9.3, memory_gib=12, memory_gb_per_s=549, link_gb_per_s=16
)
GTX_1080_TI = Device(
    name="GTX-1080-Ti", fp32_tflops=11.3, memory_gib=11, memory_gb_per_s=484, link_gb_per_s=16
)
"""NVIDIA's data sheets; recalled, not looked up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """Equal devices in one machine, which share its network."""

    device: Device
    ranks: int
    network_bytes_per_s: float
    """Each way, of the whole host."""

    @property
    def link_bytes_per_s(self) -> float:
        """Of each device, each way, within the host."""
        return 1e9 * self.device.link_gb_per_s


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Hosts and what is assumed about them."""

    name: str
    hosts: tuple[Host, ...]
    overlap: float
    """Speed of compute during communication, relative to its speed alone."""

    @cached_property
    def devices(self) -> tuple[Device, ...]:
        """By rank."""
        return tuple(host.device for host in self.hosts for _ in range(host.ranks))

    @cached_property
    def host_of(self) -> tuple[int, ...]:
        """By rank, the number of its host."""
        return tuple(number for number, host in enumerate(self.hosts) for _ in range(host.ranks))

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.devices)

    def by_host(self, values: tuple[float, ...]) -> list[list[float]]:
        """Values of the ranks, by host."""
        left = iter(values)
        return [[next(left) for _ in range(host.ranks)] for host in self.hosts]

    def outlooks(self) -> Iterator[Cluster]:
        """This cluster, and those between which its figures are assumed to be.

        All devices and links are faster or slower than estimated, or one type of device is slower
        and the others are faster.
        """
        yield self
        names = list(dict.fromkeys(device.name for device in self.devices))
        for sign in (1.0, -1.0):
            speeds = dict.fromkeys(names, 1.0 + sign * UNCALIBRATED_SPREAD)
            yield self._varied(speeds, links=1.0 + sign * LINK_SPREAD)
        for slower in names if len(names) > 1 else ():
            speeds = {
                name: 1.0 - RATIO_SPREAD if name == slower else 1.0 + RATIO_SPREAD for name in names
            }
            yield self._varied(speeds)

    def _varied(self, speeds: dict[str, float], links: float = 1.0) -> Cluster:
        hosts = [
            dataclasses.replace(
                host,
                device=dataclasses.replace(
                    host.device.times(speeds[host.device.name]),
                    link_gb_per_s=links * host.device.link_gb_per_s,
                ),
                network_bytes_per_s=links * host.network_bytes_per_s,
            )
            for host in self.hosts
        ]
        return dataclasses.replace(self, hosts=tuple(hosts))
