"""`cluster.toml`: the description of a cluster that was not measured, for simulation.

    name = "two kinds of A100"            # optional
    currency = "USD"                      # optional; of all prices
    network_gbit_per_s = 100              # between hosts; required with several hosts
    overlap = 0.6                         # optional: how much communication runs under compute

    [[host]]
    name = "big"                          # optional
    count = 1                             # optional: number of such hosts
    link_gb_per_s = 300                   # optional: between this host's devices, each way
    network_gbit_per_s = 200              # optional: this host's own
    price_per_hour = 12.5                 # optional: of the whole host

      [[host.device]]
      gpu = "A100-SXM-80"                 # see `gpu_specifications.find_device`
      count = 4                           # optional: 1
      memory_gib = 79                     # optional: default as specified
      price_per_hour = 2.5                # optional: of each device; added to the host's

Ranks are numbered in file order. The default link of a host is the slowest one of its devices. A
host without a price needs one for all of its devices or for none. Estimates include prices only if
every host has one.
"""

from __future__ import annotations

import dataclasses
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from poplar.hardware.gpu_specifications import Specification, find_device
from poplar.schema import Fraction, NonNegative, Positive, Rule, check_fields, from_fields

_Multiple = Annotated[int, Rule("from 1 to 65536", lambda count: 1 <= count <= 65536)]
_ONE_TABLE = Rule("at least one table", bool)


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceEntry:
    """A table `[[host.device]]`: equal devices in one host."""

    gpu: str
    count: _Multiple = 1
    memory_gib: Positive | None = None
    price_per_hour: NonNegative | None = None
    """Of each device."""

    def __post_init__(self) -> None:
        check_fields(self)
        find_device(self.gpu)  # raises if it is unknown

    @property
    def specification(self) -> Specification:
        """Figures of the device."""
        return find_device(self.gpu)


@dataclass(frozen=True, kw_only=True, slots=True)
class HostEntry:
    """A table `[[host]]`. The hosts of a `ClusterFile` have a name, links and a count of 1."""

    device: Annotated[tuple[DeviceEntry, ...], _ONE_TABLE]
    name: str = ""
    count: _Multiple = 1
    link_gb_per_s: Positive | None = None
    network_gbit_per_s: Positive | None = None
    price_per_hour: NonNegative | None = None
    """Without devices that have their own price."""

    def __post_init__(self) -> None:
        check_fields(self)
        unpriced = [
            f"device[{index}] ({entry.specification.gpu})"
            for index, entry in enumerate(self.device)
            if entry.price_per_hour is None
        ]
        if self.price_per_hour is None and 0 < len(unpriced) < len(self.device):
            raise ValueError(
                f"no price for {', '.join(unpriced)}; give a price_per_hour of the whole host, of "
                "each of its devices, or none at all"
            )

    @property
    def ranks(self) -> int:
        """Number of devices."""
        return sum(entry.count for entry in self.device)

    @property
    def link_bytes_per_s(self) -> float:
        """Between a rank and the other ranks of the host, each way."""
        assert self.link_gb_per_s is not None, "filled in by `copies`"
        return self.link_gb_per_s * 1e9

    @property
    def network_bytes_per_s(self) -> float:
        """Between the host and other hosts, each way."""
        assert self.network_gbit_per_s is not None, "checked for clusters of several hosts"
        return self.network_gbit_per_s * 1e9 / 8

    @property
    def whole_price_per_hour(self) -> float | None:
        """Price with its devices; None if there is none."""
        prices = [
            entry.price_per_hour * entry.count
            for entry in self.device
            if entry.price_per_hour is not None
        ]
        if self.price_per_hour is not None:
            prices.append(self.price_per_hour)
        return sum(prices) if prices else None

    def copies(self, index: int, network_gbit_per_s: float | None) -> list[HostEntry]:
        """The hosts that this table describes, with defaults filled in."""
        links = (entry.specification.link_gb_per_s_one_way for entry in self.device)
        host = dataclasses.replace(
            self,
            name=self.name or f"host{index}",
            count=1,
            link_gb_per_s=self.link_gb_per_s or min(links),
            network_gbit_per_s=self.network_gbit_per_s or network_gbit_per_s,
        )
        if self.count == 1:
            return [host]
        return [dataclasses.replace(host, name=f"{host.name}-{i}") for i in range(self.count)]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Description:
    """The top level of the file."""

    host: Annotated[tuple[HostEntry, ...], _ONE_TABLE]
    name: str = ""
    currency: str = ""
    network_gbit_per_s: Positive | None = None
    overlap: Fraction | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterFile:
    """A described cluster."""

    name: str
    hosts: tuple[HostEntry, ...]
    overlap: float | None = None
    """None: the default, varied with the outlook."""
    currency: str = ""

    @classmethod
    def read(cls, path: str | Path) -> ClusterFile:
        """Read a `cluster.toml` in the format of the module's docstring.

        Raises:
            ValueError: an invalid file; the message has the file, the key and what was expected.
            OSError: the file cannot be read.
        """
        try:
            content = _toml(Path(path).read_text(encoding="utf-8"))
        except ValueError as error:  # TOMLDecodeError and UnicodeDecodeError are both
            raise ValueError(f"{path} is not valid TOML: {error}") from error
        return cls.from_dict(content, source=str(path))

    @classmethod
    def from_dict(cls, content: Mapping[str, Any], *, source: str = "cluster") -> ClusterFile:
        """Create a description from TOML types; `source` is its name in errors."""
        try:
            table = from_fields(_Description, content)
        except ValueError as error:
            raise ValueError(f"{source}: {error}") from error
        hosts = [
            host
            for index, entry in enumerate(table.host)
            for host in entry.copies(index, table.network_gbit_per_s)
        ]
        names = Counter(host.name for host in hosts)
        repeated = next((name for name, count in names.items() if count > 1), None)
        if repeated is not None:
            raise ValueError(f"{source}: two hosts have the name {repeated!r}; use unique names")
        isolated = next((host.name for host in hosts if host.network_gbit_per_s is None), None)
        if len(hosts) > 1 and isolated is not None:
            raise ValueError(
                f"{source}: network_gbit_per_s is missing for host {isolated!r}; give the Gbit/s "
                f"between the {len(hosts)} hosts, as in network_gbit_per_s = 100"
            )
        return cls(
            name=table.name or Path(source).stem,
            hosts=tuple(hosts),
            overlap=table.overlap,
            currency=table.currency,
        )

    @property
    def devices(self) -> tuple[tuple[HostEntry, DeviceEntry], ...]:
        """Host and device of each rank."""
        return tuple(
            (host, entry)
            for host in self.hosts
            for entry in host.device
            for _ in range(entry.count)
        )

    @property
    def price_per_hour(self) -> float | None:
        """Price of the cluster; None unless every host has a price."""
        prices = [host.whole_price_per_hour for host in self.hosts]
        known = [price for price in prices if price is not None]
        return sum(known) if len(known) == len(prices) else None

    @property
    def device_types(self) -> tuple[Specification, ...]:
        """Each type of device once, in file order."""
        return tuple(dict.fromkeys(entry.specification for _, entry in self.devices))

    def only(self, device_type: Specification) -> ClusterFile:
        """The part of the cluster with the devices of one type, with the same links."""
        hosts = []
        for host in self.hosts:
            left = tuple(entry for entry in host.device if entry.specification == device_type)
            if left:
                hosts.append(dataclasses.replace(host, device=left))
        return dataclasses.replace(self, hosts=tuple(hosts))


def _toml(text: str) -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    content: dict[str, Any] = tomllib.loads(text)
    return content
