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
      gpu = "A100-SXM-80"                 # see `device_catalog.find_device`
      count = 4                           # optional: 1
      memory_gib = 79                     # optional: default as specified
      price_per_hour = 2.5                # optional: of each device; added to the host's

Ranks are numbered in file order. The default link of a host is the slowest one of its devices. A
host without a price needs one for all of its devices or for none. Estimates include prices only if
every host has one.

A file and a model give a `SimulatedCluster`: a middle, an optimistic and a pessimistic
`ClusterProfile`, and for each kind of device a profile in which it is slower and the others are
faster. All have the same batches, so a plan of the middle profile can be estimated as an interval.
"""

from __future__ import annotations

import dataclasses
import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from poplar.hardware.device_catalog import (
    MEASURED_SPREAD,
    MIDDLE,
    OPTIMISTIC,
    PESSIMISTIC,
    SPREAD,
    Outlook,
    device_profile,
    find_device,
    measured_curve,
)
from poplar.hardware.gpu_specifications import Specification
from poplar.hardware.interconnect import HostLinks, network_profile
from poplar.hardware.model_shapes import TrainingJob
from poplar.profile import ClusterProfile, ModelProfile

OVERLAP = 0.6
"""Default overlap; assumed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceEntry:
    """Equal devices in one host."""

    specification: Specification
    count: int = 1
    memory_gib: float | None = None
    price_per_hour: float | None = None
    """Of each device."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostEntry:
    """One host."""

    name: str
    devices: tuple[DeviceEntry, ...]
    link_gb_per_s: float
    network_gbit_per_s: float
    price_per_hour: float | None = None

    @property
    def ranks(self) -> int:
        """Number of devices."""
        return sum(entry.count for entry in self.devices)

    @property
    def whole_price_per_hour(self) -> float | None:
        """Price with its devices; None unless the host or each device has a price."""
        if self.price_per_hour is None and self.unpriced:
            return None
        return (self.price_per_hour or 0.0) + sum(
            entry.price_per_hour * entry.count
            for entry in self.devices
            if entry.price_per_hour is not None
        )

    @property
    def unpriced(self) -> tuple[int, ...]:
        """Indices of devices without a price."""
        return tuple(
            index for index, entry in enumerate(self.devices) if entry.price_per_hour is None
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulatedCluster:
    """Profiles of a described cluster and their uncertainty. Nothing was measured."""

    middle: ClusterProfile
    """The profile for the search."""
    optimistic: ClusterProfile
    pessimistic: ClusterProfile
    tilted: tuple[ClusterProfile, ...]
    """For each kind of device: this kind slower, the others faster. Empty with one kind."""
    job: TrainingJob
    calculated: tuple[str, ...]
    """Kinds of device estimated by the roofline alone."""
    measured: tuple[str, ...]
    """Kinds of device with a published curve of this model."""
    price_per_hour: float | None
    currency: str

    @property
    def outlooks(self) -> tuple[ClusterProfile, ...]:
        """All profiles that intervals span."""
        return (self.middle, self.optimistic, self.pessimistic, *self.tilted)


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterFile:
    """A described cluster."""

    name: str
    hosts: tuple[HostEntry, ...]
    overlap: float | None = None
    """None: `OVERLAP`, varied with the outlook."""
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
        table = _Table(content, source, "")
        network = table.positive("network_gbit_per_s")
        name, currency = table.text("name", Path(source).stem), table.text("currency", "")
        overlap = table.number("overlap", _fraction, "a number from 0 to 1")
        described = table.tables("host")
        table.check_no_keys_left()
        copies = [_host(one, f"host{index}", network) for index, one in enumerate(described)]
        hosts = [host for several in copies for host in several]
        names = Counter(host.name for host in hosts)
        repeated = next((name for name, count in names.items() if count > 1), None)
        if repeated is not None:
            raise ValueError(f"{source}: two hosts have the name {repeated!r}; use unique names")
        if len(hosts) > 1:
            for host in hosts:
                if not host.network_gbit_per_s:
                    table.fail(
                        "network_gbit_per_s",
                        f"nothing for host {host.name!r}",
                        f"Gbit/s between the {len(hosts)} hosts, as in network_gbit_per_s = 100",
                    )
        return cls(name=name, hosts=tuple(hosts), overlap=overlap, currency=currency)

    @property
    def devices(self) -> tuple[tuple[HostEntry, DeviceEntry], ...]:
        """Host and device of each rank."""
        return tuple(
            (host, entry)
            for host in self.hosts
            for entry in host.devices
            for _ in range(entry.count)
        )

    @property
    def price_per_hour(self) -> float | None:
        """Price of the cluster; None unless every host has a price."""
        prices = [host.whole_price_per_hour for host in self.hosts]
        known = [price for price in prices if price is not None]
        return sum(known) if len(known) == len(prices) else None

    @property
    def kinds(self) -> tuple[Specification, ...]:
        """Each kind of device once, in file order."""
        return tuple(dict.fromkeys(entry.specification for _, entry in self.devices))

    def alone(self, kind: Specification) -> ClusterFile:
        """The part of the cluster with the devices of one kind, with the same links."""
        hosts = [
            dataclasses.replace(
                host, devices=tuple(e for e in host.devices if e.specification == kind)
            )
            for host in self.hosts
        ]
        return dataclasses.replace(self, hosts=tuple(host for host in hosts if host.devices))

    def simulated(
        self, job: TrainingJob, *, kinds: Sequence[Specification] = ()
    ) -> SimulatedCluster:
        """The profiles of this cluster.

        Args:
            job: the model, and how it is trained.
            kinds: kinds of device to vary; empty: those of this cluster. For a part of a cluster
                pass the kinds of the whole, so that both have the same outlooks.
        """
        kinds = kinds or self.kinds
        measured = tuple(kind.gpu for kind in kinds if measured_curve(kind, job) is not None)
        calculated = tuple(kind.gpu for kind in kinds if kind.gpu not in measured)
        return SimulatedCluster(
            middle=self._profile(job, lambda gpu: MIDDLE, MIDDLE),
            optimistic=self._profile(job, lambda gpu: OPTIMISTIC, OPTIMISTIC),
            pessimistic=self._profile(job, lambda gpu: PESSIMISTIC, PESSIMISTIC),
            tilted=tuple(
                self._profile(job, _tilt(kind.gpu, measured), MIDDLE)
                for kind in kinds
                if len(kinds) > 1
            ),
            job=job,
            calculated=calculated,
            measured=measured,
            price_per_hour=self.price_per_hour,
            currency=self.currency,
        )

    def _profile(
        self, job: TrainingJob, outlook_of: Callable[[str], Outlook], between: Outlook
    ) -> ClusterProfile:
        shape = job.architecture
        # 16-bit training with AdamW: fp32 master weights, moments and reductions.
        model = ModelProfile(
            unit_numels=shape.unit_numels,
            unit_names=shape.unit_names,
            param_bytes=2,
            grad_bytes=2,
            optimizer_bytes=12,
        )
        links = [
            HostLinks(
                ranks=host.ranks,
                link_bytes_per_second=host.link_gb_per_s * 1e9,
                network_bytes_per_second=host.network_gbit_per_s * 1e9 / 8,
            )
            for host in self.hosts
        ]
        return ClusterProfile(
            devices=tuple(
                device_profile(
                    entry.specification,
                    job,
                    outlook_of(entry.specification.gpu),
                    memory_gib=entry.memory_gib,
                    host=host.name,
                )
                for host, entry in self.devices
            ),
            model=model,
            network=network_profile(links, model, faster=1 + SPREAD * between.links),
            overlap=self.overlap if self.overlap is not None else OVERLAP + SPREAD * between.links,
            backward_fraction=3 / 4 if job.checkpointing else 2 / 3,
            identity={"simulated": between.name, "cluster": self.name, "model": shape.name},
            notes=("simulated: no device of this cluster was measured",),
        )


def _tilt(slower: str, measured: Sequence[str]) -> Callable[[str], Outlook]:
    """One kind slower and the others faster, each by the spread of its ratio to other devices."""

    def outlook(gpu: str) -> Outlook:
        spreads = MEASURED_SPREAD / SPREAD if gpu in measured else 1.0
        return Outlook(name=f"{slower} slower", speed=-spreads if gpu == slower else spreads)

    return outlook


def _host(table: _Table, default_name: str, network: float | None) -> list[HostEntry]:
    """The hosts of one `[[host]]` table."""
    name = table.text("name", default_name)
    count = table.count("count")
    devices = tuple(_device(one) for one in table.tables("device"))
    link = table.positive("link_gb_per_s")
    if link is None:
        link = min(entry.specification.link_gb_per_s_one_way for entry in devices)
    host = HostEntry(
        name=name,
        devices=devices,
        link_gb_per_s=link,
        network_gbit_per_s=table.positive("network_gbit_per_s") or network or 0.0,
        price_per_hour=table.price("price_per_hour"),
    )
    table.check_no_keys_left()
    if host.price_per_hour is None and 0 < len(host.unpriced) < len(devices):
        without = ", ".join(f"device[{i}] ({devices[i].specification.gpu})" for i in host.unpriced)
        table.fail(
            "price_per_hour",
            f"no price for {without}",
            "a price of the whole host, of each of its devices, or none at all",
        )
    if count == 1:
        return [host]
    return [dataclasses.replace(host, name=f"{name}-{number}") for number in range(count)]


def _device(table: _Table) -> DeviceEntry:
    gpu = table.text("gpu")
    try:
        known = find_device(gpu)
    except ValueError as error:
        raise ValueError(f"{table.location('gpu')}: {error}") from error
    entry = DeviceEntry(
        specification=known,
        count=table.count("count"),
        memory_gib=table.positive("memory_gib"),
        price_per_hour=table.price("price_per_hour"),
    )
    table.check_no_keys_left()
    return entry


class _Table:
    """One TOML table: each known key is read once, and remaining keys are errors."""

    def __init__(self, content: Mapping[str, Any], source: str, path: str) -> None:
        self._rest = dict(content)
        self._known: list[str] = []
        self._source, self._path = source, path

    def location(self, key: str) -> str:
        """`cluster.toml: host[0].device[1].gpu`."""
        return f"{self._source}: {self._path}{key}"

    def fail(self, key: str, given: object, expected: str) -> NoReturn:
        raise ValueError(f"{self.location(key)}: expected {expected}; got {given}")

    def text(self, key: str, default: str | None = None) -> str:
        value = self._take(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, str) or not value.strip():
            self.fail(key, _given(value), 'a quoted string, as in gpu = "A100-SXM-80"')
        return value

    def count(self, key: str) -> int:
        value = self._take(key)
        if value is None:
            return 1
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 65536:
            self.fail(key, _given(value), "a whole number from 1 to 65536")
        return value

    def number(self, key: str, is_valid: Callable[[float], bool], expected: str) -> float | None:
        value = self._take(key)
        if value is None:
            return None
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or not is_valid(value):
            self.fail(key, _given(value), expected)
        return float(value)

    def positive(self, key: str) -> float | None:
        return self.number(key, lambda value: value > 0, "a number above 0")

    def price(self, key: str) -> float | None:
        return self.number(key, lambda value: value >= 0, "a number of at least 0")

    def tables(self, key: str) -> list[_Table]:
        value = self._take(key)
        header = "[[" + re.sub(r"\[\d+\]", "", f"{self._path}{key}") + "]]"
        is_list = isinstance(value, list) and value
        if not is_list or not all(isinstance(entry, dict) for entry in value):
            self.fail(key, _given(value), f"at least one table {header}")
        return [
            _Table(entry, self._source, f"{self._path}{key}[{index}].")
            for index, entry in enumerate(value)
        ]

    def check_no_keys_left(self) -> None:
        """Raise for the first unknown key."""
        for key in self._rest:
            self.fail(key, "an unknown key", f"one of {', '.join(self._known)}")

    def _take(self, key: str) -> Any:
        self._known.append(key)
        return self._rest.pop(key, None)


def _fraction(value: float) -> bool:
    return 0 <= value <= 1


def _given(value: object) -> str:
    return "nothing" if value is None else repr(value)


def _toml(text: str) -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    content: dict[str, Any] = tomllib.loads(text)
    return content
