"""Measurements as values: each rank's device, the model, and the network between ranks.

A `ClusterProfile` is the input of the plan search: frozen, comparable, checked when it is created,
and convertible to JSON and back. All sizes are in bytes, all times in seconds. Tuples "by stage"
have one entry per ZeRO stage, 0 to 3.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

from poplar.curve import MonotoneCurve, pooled
from poplar.plan import STRATEGIES

_SCHEMA_VERSION = 2
_RENAMED_SINCE = {1: {"meeting_seconds": "synchronization_seconds"}}
"""By older schema version that can still be read: fields of `NetworkProfile` renamed since."""
_NO_RESIDUALS = (0.0,) * len(STRATEGIES)


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchPoint:
    """One measurement of one device: a pass (forward and backward) of `batch` samples."""

    batch: int
    seconds: float
    """Median over repetitions, without waiting for other ranks. If noise explains the distance of a
    curve's points to a straight line, the value on that line."""
    activation_bytes: int
    """Peak memory above the model state."""
    spread_seconds: float = 0.0
    """Standard error of `seconds`; 0 if unknown."""

    def __post_init__(self) -> None:
        _check_at_least(1, batch=self.batch)
        _check_at_least(0, activation_bytes=self.activation_bytes)
        if not (math.isfinite(self.seconds) and self.seconds > 0):
            raise ValueError(f"BatchPoint.seconds must be finite and above 0, got {self.seconds}")
        _check_seconds("BatchPoint.spread_seconds", self.spread_seconds)

    def times(self, factor: float) -> BatchPoint:
        """The same point on a device that takes `factor` times as long."""
        return dataclasses.replace(
            self, seconds=factor * self.seconds, spread_seconds=factor * self.spread_seconds
        )


@dataclass(frozen=True, kw_only=True)
class DeviceProfile:
    """One rank: time and memory of its passes, and its limits."""

    name: str
    """Product name, such as "NVIDIA GeForce RTX 4090"."""
    memory_bytes: int
    """What this rank may use: without what other processes hold."""
    points: tuple[BatchPoint, ...]
    """By ascending batch. The last one is the largest micro-batch that a plan may use."""
    optimizer_seconds: float
    """One optimizer step over the state of the whole model."""
    optimizer_latency_seconds: float = 0.0
    """The part of it that does not depend on the share (kernel launches, Python)."""
    held_bytes: int = 0
    """Memory besides model state and activations, such as a CUDA context."""
    peak_flops: float | None = None
    """FLOP/s by specification or by a matrix product; used by the `flops` policy."""
    pass_overhead_seconds: tuple[float, ...] = _NO_RESIDUALS
    """By stage: extra time of a pass in the engine over a plain pass."""
    step_overhead_seconds: tuple[float, ...] = _NO_RESIDUALS
    """By stage: time of a step outside passes and optimizer update."""
    uuid: str = ""
    host: str = ""
    throttled: str = ""
    """Why the device ran below its clock rate while it was measured; empty if it did not."""

    def __post_init__(self) -> None:
        if not self.points:
            raise ValueError(f"the profile of {self.name!r} has no points; measure at least one")
        freeze = object.__setattr__
        freeze(self, "points", tuple(self.points))
        batches = [point.batch for point in self.points]
        if batches != sorted(set(batches)):
            raise ValueError(
                f"the points of {self.name!r} must have ascending batches, got {batches}"
            )
        _check_at_least(0, memory_bytes=self.memory_bytes, held_bytes=self.held_bytes)
        for what in ("optimizer_seconds", "optimizer_latency_seconds"):
            _check_seconds(what, getattr(self, what))
        peak = self.peak_flops
        if peak is not None and not (math.isfinite(peak) and peak > 0):
            raise ValueError(f"peak_flops must be finite and above 0, or None, got {peak}")
        for what in ("pass_overhead_seconds", "step_overhead_seconds"):
            freeze(self, what, _checked_by_stage(what, getattr(self, what)))

    @property
    def costs(self) -> Hashable:
        """The fields that costs depend on: without names, specifications and standard errors."""
        return (
            self.memory_bytes,
            tuple((point.batch, point.seconds, point.activation_bytes) for point in self.points),
            self.optimizer_seconds,
            self.optimizer_latency_seconds,
            self.held_bytes,
            self.pass_overhead_seconds,
            self.step_overhead_seconds,
        )

    @property
    def max_batch(self) -> int:
        """The largest micro-batch that was measured."""
        return self.points[-1].batch

    def seconds(self, batch: int) -> float:
        """`t(batch)`: one pass, forward and backward; 0 for no samples, infinite past `max_batch`.

        Linear between the measured points. Adjacent points that noise has put out of order are
        replaced by their mean, so the curve never falls.
        """
        return self._seconds.at(batch)

    def activation_bytes(self, batch: int) -> float:
        """`a(batch)`: peak memory of a pass above the model state; infinite past `max_batch`.

        Never falls, and never lies below a measured point: peaks, unlike times, have no noise.
        """
        return self._bytes.at(batch)

    def optimizer_step_seconds(self, share: float) -> float:
        """`o(share)`: an optimizer step over this share of the state; a latency without any."""
        latency = min(self.optimizer_latency_seconds, self.optimizer_seconds)
        return latency + (self.optimizer_seconds - latency) * share

    @cached_property
    def _batches(self) -> tuple[int, ...]:
        return tuple(point.batch for point in self.points)

    @cached_property
    def _seconds(self) -> MonotoneCurve:
        return MonotoneCurve(self._batches, tuple(pooled([p.seconds for p in self.points])))

    @cached_property
    def _bytes(self) -> MonotoneCurve:
        peaks = (float(point.activation_bytes) for point in self.points)
        return MonotoneCurve(self._batches, tuple(accumulate(peaks, max)))


@dataclass(frozen=True, kw_only=True)
class ModelProfile:
    """The trained model, in elements and bytes per element."""

    unit_numels: tuple[int, ...]
    """Trained elements of each unit, which is unsharded and reduced as one buffer."""
    unit_names: tuple[str, ...] = ()
    """Names of the units at stage 3, for `UnitPlan.name`. Empty: unknown."""
    param_bytes: float = 4.0
    """Bytes of a parameter in the compute dtype."""
    grad_bytes: float = 4.0
    """Bytes of a gradient as the backward returns it."""
    optimizer_bytes: float = 8.0
    """Bytes of optimizer state, an fp32 master included."""
    wire_bytes: float = 4.0
    """Bytes of a gradient in a reduce-scatter."""
    frozen_bytes: int = 0
    """Memory that is never sharded, such as buffers."""
    unit_frozen_numels: tuple[int, ...] = ()
    """Frozen elements of each unit, sharded and unsharded with its parameters. Empty: none."""
    resident_units: tuple[int, ...] = ()
    """Units that stay unsharded until a pass is over, usually those outside of all blocks."""
    largest_flat_numels: tuple[int, ...] = ()
    """By stage, elements of the largest buffer that is reduced at once. At stages 0 to 2
    small units share a buffer of up to 32 MiB; a larger parameter has its own. Empty: units are
    reduced in buffers of 32 MiB."""

    def __post_init__(self) -> None:
        for what in (
            "unit_numels",
            "unit_names",
            "unit_frozen_numels",
            "resident_units",
            "largest_flat_numels",
        ):
            object.__setattr__(self, what, tuple(getattr(self, what)))
        if not self.unit_numels:
            raise ValueError("unit_numels must have at least one entry, got none")
        for numel in self.unit_numels:
            _check_at_least(1, unit_numels=numel)
        for what in ("param_bytes", "grad_bytes", "optimizer_bytes", "wire_bytes", "frozen_bytes"):
            _check_at_least(0, **{what: getattr(self, what)})
        for numel in self.largest_flat_numels:
            _check_at_least(1, largest_flat_numels=numel)
        for numel in self.unit_frozen_numels:
            _check_at_least(0, unit_frozen_numels=numel)
        if len(self.largest_flat_numels) not in (0, len(STRATEGIES)):
            raise ValueError(
                f"largest_flat_numels must have one entry per stage, got {self.largest_flat_numels}"
            )
        units = len(self.unit_numels)
        if self.unit_frozen_numels and len(self.unit_frozen_numels) != units:
            raise ValueError(
                f"unit_frozen_numels must have one entry for each of the {units} units, got "
                f"{len(self.unit_frozen_numels)}"
            )
        self._check_unit_names()
        known = set(range(units))
        if not set(self.resident_units) <= known or len(set(self.resident_units)) < len(
            self.resident_units
        ):
            raise ValueError(
                f"resident_units must be different numbers from 0 to {units - 1}, got "
                f"{self.resident_units}"
            )

    def _check_unit_names(self) -> None:
        names = self.unit_names
        wrong = [name for name in names if not isinstance(name, str)]
        if wrong:
            raise ValueError(f"unit_names must be strings, got {wrong[0]!r}")
        if names and len(names) != len(self.unit_numels):
            raise ValueError(
                f"unit_names must have one entry for each of the {len(self.unit_numels)} units, or "
                f"none, got {len(names)}"
            )
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise ValueError(f"unit_names must be unique, but {repeated} are repeated")

    @property
    def numel(self) -> int:
        """Trained elements of the whole model."""
        return sum(self.unit_numels)

    @property
    def frozen_numel(self) -> int:
        """Frozen elements of the whole model."""
        return sum(self.unit_frozen_numels)


@dataclass(frozen=True, kw_only=True)
class NetworkProfile:
    """Times of the collectives, measured with the transport that training will use."""

    reduce_scatter_seconds: float
    """Gradients of the whole model, unit by unit, even shares, packing and summation included."""
    all_gather_seconds: float
    """Parameters of the whole model, unit by unit, even shares."""
    send_seconds_per_byte: tuple[float, ...]
    """By rank. Only ratios matter: they determine times under uneven shares."""
    receive_seconds_per_byte: tuple[float, ...]
    """By rank."""
    synchronization_seconds: tuple[float, ...] = _NO_RESIDUALS
    """By stage: time of a synchronization beyond its collectives. May be negative."""
    step_seconds: tuple[float, ...] = _NO_RESIDUALS
    """By stage: time of a step that nothing else explains. May be negative."""
    transports: tuple[tuple[str, float], ...] = ()
    """Transports to choose from, by name and seconds of sample collectives, fastest first. The
    first one was measured here. Empty: there was no choice."""

    @property
    def transport(self) -> str | None:
        """The transport that was measured; None if there was no choice."""
        return self.transports[0][0] if self.transports else None

    def __post_init__(self) -> None:
        freeze = object.__setattr__
        for what in ("reduce_scatter_seconds", "all_gather_seconds"):
            _check_seconds(what, getattr(self, what))
        for what in ("send_seconds_per_byte", "receive_seconds_per_byte"):
            rates = tuple(getattr(self, what))
            for rate in rates:
                _check_seconds(what, rate)
            freeze(self, what, rates)
        if len(self.send_seconds_per_byte) != len(self.receive_seconds_per_byte):
            raise ValueError("send_ and receive_seconds_per_byte must have one entry per rank")
        freeze(self, "transports", tuple((str(name), float(s)) for name, s in self.transports))
        for what in ("synchronization_seconds", "step_seconds"):
            freeze(self, what, _checked_by_stage(what, getattr(self, what)))


@dataclass(frozen=True, kw_only=True)
class ClusterProfile:
    """The input of the plan search."""

    devices: tuple[DeviceProfile, ...]
    """One per rank."""
    model: ModelProfile
    network: NetworkProfile
    overlap: float = 0.0
    """Part of communication that runs under compute, 0 to 1; about 0 if both use the same cores."""
    backward_fraction: float = 2 / 3
    """Part of a pass that the backward takes."""
    memory_reserve: float = 0.05
    """Part of each rank's memory that a plan leaves free, for fragmentation."""
    identity: Mapping[str, str] = field(default_factory=dict, hash=False)
    """What was measured: model, dtype, versions, devices. A cached profile is used only if all
    entries are the same."""
    notes: tuple[str, ...] = ()
    """Warnings about the measurement, such as a throttled rank or a noisy machine."""

    def __post_init__(self) -> None:
        freeze = object.__setattr__
        freeze(self, "devices", tuple(self.devices))
        freeze(self, "identity", dict(self.identity))
        freeze(self, "notes", tuple(self.notes))
        if not self.devices:
            raise ValueError("a cluster needs at least one device")
        if len(self.network.send_seconds_per_byte) != self.world_size:
            raise ValueError(
                f"the network profile is for {len(self.network.send_seconds_per_byte)} ranks, but "
                f"there are {self.world_size} devices"
            )
        for what in ("overlap", "backward_fraction", "memory_reserve"):
            value = getattr(self, what)
            if not 0.0 <= value <= 1.0:
                raise ValueError(f"{what} must lie between 0 and 1, got {value}")

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.devices)

    @cached_property
    def device_kinds(self) -> list[int]:
        """By rank, a number: equal for ranks whose devices have equal costs."""
        return _numbered(device.costs for device in self.devices)

    @cached_property
    def rank_kinds(self) -> list[int]:
        """By rank, a number: equal for ranks with equal devices and equal links."""
        rates = (self.network.send_seconds_per_byte, self.network.receive_seconds_per_byte)
        return _numbered(zip(self.device_kinds, *rates, strict=True))

    def to_dict(self) -> dict[str, Any]:
        """This profile in JSON types, for `from_dict`."""
        return {"version": _SCHEMA_VERSION, **dataclasses.asdict(self)}

    @classmethod
    def from_dict(cls, content: Any) -> ClusterProfile:
        """The profile that `to_dict` of this or an older version wrote.

        Raises:
            ValueError: unknown schema version, unknown or missing fields, or invalid values.
        """
        if not isinstance(content, Mapping) or "version" not in content:
            raise ValueError("this is not a profile written by ClusterProfile.to_json")
        for key, what in (("micro_batches", "a plan"), ("runs", "a recorded run")):
            if key in content:
                raise ValueError(f"this is {what}, not a profile, which profile_cluster() makes")
        version = content["version"]
        if version not in (_SCHEMA_VERSION, *_RENAMED_SINCE):
            raise ValueError(
                f"profile format {version!r}, but this version of Poplar reads formats "
                f"1 to {_SCHEMA_VERSION}; measure again"
            )
        fields = {key: value for key, value in content.items() if key != "version"}
        try:
            devices = []
            for device in fields["devices"]:
                points = tuple(_build(BatchPoint, point) for point in device["points"])
                devices.append(_build(DeviceProfile, {**device, "points": points}))
            fields["devices"] = tuple(devices)
            fields["model"] = _build(ModelProfile, fields["model"])
            renamed = _RENAMED_SINCE.get(version, {})
            network = {renamed.get(key, key): value for key, value in fields["network"].items()}
            fields["network"] = _build(NetworkProfile, network)
            profile: ClusterProfile = _build(cls, fields)
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(
                f"not a profile of format {version}: {error}; measure again"
            ) from error
        return profile

    def to_json(self, path: str | Path) -> None:
        """Write this profile to a file that `from_json` reads."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def from_json(cls, path: str | Path) -> ClusterProfile:
        """Read a profile that `to_json` wrote.

        Raises:
            ValueError: the file is damaged or not a profile; names the file and the problem.
        """
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
        except ValueError as error:  # JSONDecodeError and UnicodeDecodeError are both
            raise ValueError(f"{path} is damaged or not JSON ({error}); measure again") from error
        try:
            return cls.from_dict(content)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error


def _build(kind: type[Any], content: Mapping[str, Any]) -> Any:
    """Create a value from JSON types: lists become tuples, unknown fields are errors."""
    values = {k: tuple(v) if isinstance(v, list) else v for k, v in content.items()}
    hints = {member.name: str(member.type) for member in dataclasses.fields(kind)}
    unknown = sorted(set(values) - set(hints))
    if unknown:
        raise ValueError(f"{kind.__name__} has no fields {unknown}")
    expected = {"int": (int,), "str": (str,), "float": (int, float)}
    for name, value in values.items():
        allowed = expected.get(hints[name])
        if allowed and (isinstance(value, bool) or not isinstance(value, allowed)):
            raise ValueError(f"{kind.__name__}.{name} must be {hints[name]}, got {value!r}")
    return kind(**values)


def _check_at_least(minimum: int, **values: float) -> None:
    for what, value in values.items():
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or value < minimum:
            raise ValueError(f"{what} must be at least {minimum}, got {value!r}")


def _check_seconds(what: str, value: float) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{what} must be finite and 0 or more, got {value}")


def _checked_by_stage(what: str, values: Iterable[float]) -> tuple[float, ...]:
    checked = tuple(float(value) for value in values)
    if len(checked) != len(STRATEGIES) or not all(map(math.isfinite, checked)):
        raise ValueError(f"{what} must have one finite number per stage, got {checked}")
    return checked


def _numbered(keys: Iterable[Hashable]) -> list[int]:
    """Number the different keys in order of first appearance, such as 0, 0, 1, 0, 2."""
    numbers: dict[Hashable, int] = {}
    return [numbers.setdefault(key, len(numbers)) for key in keys]
