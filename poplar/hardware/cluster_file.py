"""`cluster.toml`: the description of a cluster that was not measured, for simulation.

`docs/guides/simulate.md` has an example and all keys. Ranks are numbered in file order.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from poplar.hardware.gpu_specifications import Specification, find_device
from poplar.values.regular_files import read_regular
from poplar.values.schema import Fraction, Positive, Rule, from_fields

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_Multiple = Annotated[int, Rule("from 1 to 65536", lambda count: 1 <= count <= 65536)]
_ONE_TABLE = Rule("at least one table", bool)


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceEntry:
    """A table `[[host.device]]`: equal devices in one host."""

    gpu: str
    count: _Multiple = 1
    memory_gib: Positive | None = None

    def __post_init__(self) -> None:
        find_device(self.gpu)  # raises if it is unknown

    @property
    def specification(self) -> Specification:
        """Figures of the device."""
        return find_device(self.gpu)


@dataclass(frozen=True, kw_only=True, slots=True)
class HostEntry:
    """A table `[[host]]`."""

    device: Annotated[tuple[DeviceEntry, ...], _ONE_TABLE]
    name: str = ""
    count: _Multiple = 1
    link_gb_per_s: Positive | None = None
    network_gbit_per_s: Positive | None = None

    @property
    def ranks(self) -> int:
        """Number of devices."""
        return sum(entry.count for entry in self.device)

    @property
    def link_bytes_per_s(self) -> float:
        """The rate between a rank and the other ranks of the host, each way."""
        slowest = min(entry.specification.link_gb_per_s_one_way for entry in self.device)
        return 1e9 * (self.link_gb_per_s or slowest)

    @property
    def network_bytes_per_s(self) -> float:
        """The rate between the host and other hosts, each way."""
        return 1e9 / 8 * (self.network_gbit_per_s or math.inf)


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterFile:
    """A described cluster."""

    host: Annotated[tuple[HostEntry, ...], _ONE_TABLE]
    """Tables with a count become several hosts; all get a name and the cluster's network."""
    name: str = ""
    network_gbit_per_s: Positive | None = None
    overlap: Fraction | None = None
    """None: the default, varied with the outlook."""

    def __post_init__(self) -> None:
        hosts: list[HostEntry] = []
        for index, host in enumerate(self.host):
            name = host.name or f"host{index}"
            names = [f"{name}-{copy}" for copy in range(host.count)] if host.count > 1 else [name]
            network = host.network_gbit_per_s or self.network_gbit_per_s
            hosts += (
                dataclasses.replace(host, name=name, count=1, network_gbit_per_s=network)
                for name in names
            )
        object.__setattr__(self, "host", tuple(hosts))
        name, uses = Counter(host.name for host in hosts).most_common(1)[0]
        if uses > 1:
            raise ValueError(f"two hosts have the name {name!r}; use unique names")
        isolated = [host.name for host in hosts if host.network_gbit_per_s is None]
        if len(hosts) > 1 and isolated:
            raise ValueError(
                f"network_gbit_per_s is missing for host {isolated[0]!r}; give the Gbit/s between "
                f"the {len(hosts)} hosts, as in network_gbit_per_s = 100"
            )

    @classmethod
    def read(cls, path: str | Path) -> ClusterFile:
        """Read a `cluster.toml`.

        Raises:
            ValueError: an invalid file; the message has the file, the key and what was expected.
            OSError: the file cannot be read.
        """
        try:
            content = tomllib.loads(read_regular(path).decode())
        except (ValueError, RecursionError) as error:  # errors of TOML and Unicode are values
            raise ValueError(f"{path} is not valid TOML: {error}") from error
        return cls.from_dict(content, source=str(path))

    @classmethod
    def from_dict(cls, content: Mapping[str, Any], *, source: str = "cluster") -> ClusterFile:
        """Create a description from TOML types; `source` is its name in errors."""
        try:
            return from_fields(cls, {"name": Path(source).stem, **content})
        except ValueError as error:
            raise ValueError(f"{source}: {error}") from error

    @property
    def devices(self) -> tuple[tuple[HostEntry, DeviceEntry], ...]:
        """Host and device of each rank."""
        return tuple(
            (host, entry) for host in self.host for entry in host.device for _ in range(entry.count)
        )

    @property
    def device_types(self) -> tuple[Specification, ...]:
        """Each type of device once, in file order."""
        return tuple(dict.fromkeys(entry.specification for _, entry in self.devices))

    def only(self, device_type: Specification) -> ClusterFile:
        """The part of the cluster with the devices of one type, with the same links."""
        hosts = []
        for host in self.host:
            left = tuple(entry for entry in host.device if entry.specification == device_type)
            if left:
                link = host.link_bytes_per_s / 1e9
                hosts.append(dataclasses.replace(host, device=left, link_gb_per_s=link))
        return dataclasses.replace(self, host=tuple(hosts))
