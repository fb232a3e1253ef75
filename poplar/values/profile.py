"""Measurements as values: each rank's device, the model, and the network between ranks.

A `ClusterProfile` is the input of the plan search: frozen, comparable, checked when it is created,
and convertible to JSON and back. All sizes are in bytes, all times in seconds. Tuples "by stage"
have one entry per ZeRO stage, 0 to 3.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import accumulate
from statistics import fmean, median
from typing import Annotated

from poplar.values.communication import BITS, EXACT, Communication
from poplar.values.curve import MonotoneCurve, pooled
from poplar.values.plan import STRATEGIES, Stage
from poplar.values.schema import (
    ALL_DIFFERENT,
    Count,
    Document,
    Finite,
    Fraction,
    NonNegative,
    Positive,
    PositiveCount,
    Rule,
    check_fields,
    checked,
)

MEMORY_RESERVE = 0.05
"""Part of a rank's memory that plans leave free."""
_NO_RESIDUALS = (0.0,) * len(STRATEGIES)
_ByStage = Annotated[
    tuple[Finite, ...],
    Rule("one finite number per stage", lambda values: len(values) == len(STRATEGIES)),
]
_Latencies = Annotated[
    tuple[NonNegative, ...], Rule("2 numbers or none", lambda values: len(values) in (0, 2))
]
_ByPrecision = Annotated[
    tuple[NonNegative, ...],
    Rule(f"{len(BITS)} numbers or none", lambda values: len(values) in (0, len(BITS))),
]
_RECEIVE_BUFFERS = Rule("freed, step or kept", lambda kept: kept in ("freed", "step", "kept"))
_COSTS = (
    "memory_bytes",
    "optimizer_seconds",
    "optimizer_latency_seconds",
    "held_bytes",
    "host_optimizer_seconds",
    "host_memory_bytes",
    "state_on_host",
    "encode_seconds",
    "decode_seconds",
    "pass_overhead_seconds",
    "step_overhead_seconds",
)
"""Fields of a device, beside its points, that times and memory depend on."""


def _check_entries(owner: object, entries: int, *names: str) -> None:
    """Raise if one of these fields has neither so many entries nor none, for unknown."""
    for name in names:
        found = len(getattr(owner, name))
        if found not in (0, entries):
            raise ValueError(f"{name} must have {entries} entries or none, got {found}")


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchPoint:
    """One measurement of one device: a pass (forward and backward) of `batch` samples."""

    batch: PositiveCount
    seconds: Positive
    """Mean over repetitions without outliers, without waiting for other ranks; on the curve that
    all points of the rank show together."""
    activation_bytes: Count
    """Peak memory above the model state."""
    spread_seconds: NonNegative = 0.0
    """Standard error of `seconds`, with how much the rank's speed changes; 0 if unknown."""
    unit_bytes: tuple[Count, ...] = ()
    """The most activation bytes of each unit from the end of the backward before to the end of its
    own. Resident units share the end of the pass. A gradient that is not complete counts as far
    as it is more than the unit's and the resident units' gradients together. Empty: unknown."""
    bytes_after_unit: tuple[Count, ...] = ()
    """Activation bytes when each unit's gradients are complete, of which none counts."""

    def __post_init__(self) -> None:
        check_fields(self)
        if len(self.unit_bytes) != len(self.bytes_after_unit):
            raise ValueError("unit_bytes and bytes_after_unit must have the same number of entries")

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
    memory_bytes: Count
    """What this rank may use: without what other processes hold."""
    points: Annotated[tuple[BatchPoint, ...], Rule("at least one measurement", bool)]
    """Measurements by ascending batch. The last one is the largest micro-batch of a plan."""
    recomputed_points: tuple[BatchPoint, ...] = ()
    """Measurements by ascending batch of passes in which all units but the root are recomputed in
    the backward. They may be larger than `points`. Empty: not measured."""
    optimizer_seconds: NonNegative
    """One optimizer step over the state of the whole model."""
    optimizer_latency_seconds: NonNegative = 0.0
    """The part of it that does not depend on the share (kernel launches, Python)."""
    held_bytes: Count = 0
    """Memory besides model state and activations, such as a CUDA context."""
    host_optimizer_seconds: NonNegative | None = None
    """The part of `optimizer_seconds` that depends on the share, if the state of the whole model is
    in host memory: copies, and the update by the host's processor, with all ranks at once. None:
    not measured."""
    host_memory_bytes: Count = 0
    """Host memory for optimizer state of this rank. 0: none beside `memory_bytes`, as on a CPU."""
    state_on_host: Fraction = 0.0
    """The part of its optimizer state that the rank keeps in host memory, under a plan."""
    encode_seconds: _ByPrecision = ()
    """In which it packs an element of a gradient: as it is, with 8 and with 4 bits. Empty: not
    measured."""
    decode_seconds: _ByPrecision = ()
    """In which it adds an element that one rank has sent, likewise."""
    peak_flops: Positive | None = None
    """FLOP/s by specification or by a matrix product; used by the `flops` policy."""
    pass_overhead_seconds: _ByStage = _NO_RESIDUALS
    """Extra time by stage of a pass in the engine over a plain pass."""
    step_overhead_seconds: _ByStage = _NO_RESIDUALS
    """Time by stage of a step outside passes and optimizer update."""
    uuid: str = ""
    host: str = ""
    throttled: str = ""
    """Why the device ran below its clock rate while it was measured; empty if it did not."""
    multiplication: str = ""
    """What decides the bits of a matrix product: kernels, precisions, threads. Empty: unknown."""

    def __post_init__(self) -> None:
        check_fields(self)
        for what in ("points", "recomputed_points"):
            batches = [point.batch for point in getattr(self, what)]
            if batches != sorted(set(batches)):
                raise ValueError(
                    f"the {what} of {self.name!r} must have ascending batches, got {batches}"
                )

    @property
    def costs(self) -> Hashable:
        """The fields that costs depend on: without names, specifications and standard errors."""
        curves = (
            (p.batch, p.seconds, p.activation_bytes, p.unit_bytes, p.bytes_after_unit)
            for p in (*self.points, *self.recomputed_points)
        )
        return (len(self.points), *curves, *(getattr(self, name) for name in _COSTS))

    @property
    def noise(self) -> float:
        """The relative standard error of its pass times."""
        return median(point.spread_seconds / point.seconds for point in self.points)

    @property
    def interpolation_error(self) -> float:
        """The relative error of the pass times of batches between the points.

        It is how far the points are from the line through their neighbours (root mean square).
        """
        missed = []
        for low, point, high in zip(self.points, self.points[1:], self.points[2:], strict=False):
            part = (point.batch - low.batch) / (high.batch - low.batch)
            expected = low.seconds + part * (high.seconds - low.seconds)
            missed.append(point.seconds / expected - 1.0)
        return math.sqrt(fmean(m * m for m in missed)) if missed else 0.0

    @property
    def max_batch(self) -> int:
        """The largest micro-batch that was measured without recomputation."""
        return self.points[-1].batch

    def with_largest_batch(self, batch: int) -> DeviceProfile:
        """The same device, on which no plan uses a larger micro-batch than this one."""

        def up_to_batch(device: DeviceProfile) -> Sequence[BatchPoint]:
            if batch >= device.max_batch:
                return device.points
            smaller = [point for point in device.points if point.batch <= batch]
            if smaller and smaller[-1].batch == batch:
                return smaller
            return [*smaller, device.point(batch)]

        return self.with_points(up_to_batch)

    def point(self, batch: int) -> BatchPoint:
        """The interpolated point of a batch."""
        during, after = self.unit_bytes(batch)
        return BatchPoint(
            batch=batch,
            seconds=self.seconds(batch),
            activation_bytes=round(self.activation_bytes(batch)),
            unit_bytes=tuple(map(round, during)),
            bytes_after_unit=tuple(map(round, after)),
        )

    def with_points(self, of: Callable[[DeviceProfile], Iterable[BatchPoint]]) -> DeviceProfile:
        """The device with other points on both curves: those of the device, and those of one whose
        only curve is the one with recomputation.
        """
        recomputed: Iterable[BatchPoint] = ()
        if self.recomputed_points:
            fully = dataclasses.replace(self, points=self.recomputed_points, recomputed_points=())
            recomputed = of(fully)
        return dataclasses.replace(
            self, points=tuple(of(self)), recomputed_points=tuple(recomputed)
        )

    def seconds(self, batch: int) -> float:
        """`t(batch)`: one pass, forward and backward; 0 for no samples, infinite past `max_batch`.

        Linear between the measured points. Adjacent points that noise has put out of order are
        replaced by their mean, so the curve never falls.
        """
        return self._seconds.at(batch)

    def seconds_up_to(self, most: int) -> list[float]:
        """`seconds` of 0, 1, ... `most` samples, which is at most `max_batch`."""
        return self._seconds.up_to(most)

    def activation_bytes(self, batch: int) -> float:
        """`a(batch)`: peak memory of a pass above the model state; infinite past `max_batch`.

        Never falls, and never lies below a measured point: peaks, unlike times, have no noise.
        """
        return self._bytes.at(batch)

    def unit_bytes(self, batch: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Activation bytes of each unit during and after its backward; empty if not measured."""
        during, after = self._unit_curves
        return tuple(one.at(batch) for one in during), tuple(one.at(batch) for one in after)

    def optimizer_step_seconds(self, share: float) -> float:
        """`o(share)`: an optimizer step over this share of the state; a latency without any."""
        latency = min(self.optimizer_latency_seconds, self.optimizer_seconds)
        seconds, on_host = self.optimizer_seconds - latency, self.state_on_host
        if on_host:
            seconds = (1.0 - on_host) * seconds + on_host * (self.host_optimizer_seconds or 0.0)
        return latency + seconds * share

    @cached_property
    def _batches(self) -> tuple[int, ...]:
        return tuple(point.batch for point in self.points)

    @cached_property
    def _seconds(self) -> MonotoneCurve:
        return MonotoneCurve(self._batches, tuple(pooled([p.seconds for p in self.points])))

    @cached_property
    def _bytes(self) -> MonotoneCurve:
        return self._bytes_curve(point.activation_bytes for point in self.points)

    @cached_property
    def _unit_curves(self) -> tuple[list[MonotoneCurve], list[MonotoneCurve]]:
        """Curves of `unit_bytes` and `bytes_after_unit`; none unless all points have them."""
        if not all(point.unit_bytes for point in self.points):
            return [], []
        during = zip(*(point.unit_bytes for point in self.points), strict=True)
        after = zip(*(point.bytes_after_unit for point in self.points), strict=True)
        return list(map(self._bytes_curve, during)), list(map(self._bytes_curve, after))

    def _bytes_curve(self, values: Iterable[int]) -> MonotoneCurve:
        return MonotoneCurve(self._batches, tuple(map(float, accumulate(values, max))))


@dataclass(frozen=True, kw_only=True)
class LinearLayer:
    """A plain `nn.Linear`, whose weight gradient can be sent as factors (`Plan.factored`)."""

    name: str
    """Its name in `named_modules()`."""
    unit: Count
    """The number of its unit."""
    outputs: PositiveCount
    inputs: PositiveCount
    rows_per_sample: NonNegative
    """Rows of its input, such as the tokens of a sample."""

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def numel(self) -> int:
        """Elements of the weight."""
        return self.outputs * self.inputs


@dataclass(frozen=True, kw_only=True)
class ModelProfile:
    """The trained model, in elements and bytes per element."""

    unit_numels: Annotated[tuple[Count, ...], Rule("at least one trained element", any)]
    """Trained elements of each unit, which is unsharded and reduced as one buffer."""
    unit_names: Annotated[tuple[str, ...], ALL_DIFFERENT] = ()
    """Names of the units at stage 3, for `UnitPlan.name`. Empty: unknown."""
    param_bytes: NonNegative = 4.0
    """Bytes of a parameter in the compute dtype."""
    grad_bytes: NonNegative = 4.0
    """Bytes of a gradient as the backward returns it."""
    optimizer_bytes: NonNegative = 8.0
    """Bytes of optimizer state, an fp32 master included."""
    wire_bytes: NonNegative = 4.0
    """Bytes of a gradient in a reduce-scatter."""
    frozen_bytes: Count = 0
    """Memory that is never sharded, such as buffers."""
    unit_frozen_bytes: tuple[Count, ...] = ()
    """Bytes of the frozen parameters of each unit, quantised or not, which are sharded and
    unsharded with its trained ones. Empty: none."""
    resident_units: Annotated[tuple[Count, ...], ALL_DIFFERENT] = ()
    """Units that stay unsharded until a pass is over, usually those outside of all blocks."""
    unit_buffers: tuple[tuple[PositiveCount, ...], ...] = ()
    """Elements of each buffer of each unit that is reduced at once at stage 3. Empty: buffers have
    up to 32 MiB."""
    merged_buffers: tuple[tuple[PositiveCount, ...], ...] = ()
    """The same at stages 0 to 2, where small units are merged: by merged unit, in the order of the
    units, resident ones first. Empty: units are merged up to 32 MiB."""
    saved_without_last_unit: Fraction | None = None
    """The part of the activation bytes saved by recomputing all units but resident ones that is
    saved if the last one is not recomputed. None: in proportion to its elements."""
    unit_forward_fraction: tuple[NonNegative, ...] = ()
    """The part of a pass of each unit until the next unit's forward. What is outside of all blocks
    counts where it runs: with the first unit or, after the last block, with the last one. Sums to 1
    with `unit_backward_fraction`. Empty: unknown, and in proportion to the elements."""
    unit_backward_fraction: tuple[NonNegative, ...] = ()
    """The part of a pass of each unit from the end of the backward before to its last gradient."""
    linear_layers: tuple[LinearLayer, ...] = ()
    """Layers that can be factored. Empty: there are none, or they are unknown."""

    def __post_init__(self) -> None:
        check_fields(self)
        units = len(self.unit_numels)
        _check_entries(self, units, "unit_names", "unit_frozen_bytes", "unit_forward_fraction")
        _check_entries(self, len(self.unit_forward_fraction), "unit_backward_fraction")
        frozen = self.unit_frozen_bytes or (0,) * units
        if not all(map(max, zip(self.unit_numels, frozen, strict=True))):
            raise ValueError(f"unit_numels {self.unit_numels}: a unit has no parameters at all")
        for what, numbers in (
            ("linear_layers", [layer.unit for layer in self.linear_layers]),
            ("resident_units", self.resident_units),
        ):
            if max(numbers, default=0) >= units:
                raise ValueError(f"{what} must be of units 0 to {units - 1}, got {numbers}")
        forward = math.fsum(self.unit_forward_fraction)
        backward = math.fsum(self.unit_backward_fraction)
        is_sound = min(forward, backward) > 0.0 and abs(forward + backward - 1.0) < 1e-6
        if self.unit_forward_fraction and not is_sound:
            raise ValueError(
                "unit_forward_fraction and unit_backward_fraction must sum to 1 together, each to "
                f"more than 0, got {forward:.9g} and {backward:.9g}"
            )
        sums = tuple(map(sum, self.unit_buffers))
        if sums not in ((), self.unit_numels):
            raise ValueError(f"unit_buffers must have the elements of their units, got {sums}")
        merged = sum(map(sum, self.merged_buffers))
        if merged not in (0, self.numel):
            raise ValueError(
                f"merged_buffers must have the {self.numel} elements of the units, got {merged}"
            )

    @property
    def host_state_bytes(self) -> float:
        """Host memory for each element whose state is there: with fp32 values in any case, and with
        copies of its gradient and its value.
        """
        masters = self.optimizer_bytes + (4.0 if self.param_bytes >= 4.0 else 0.0)
        return masters + 4.0 + self.param_bytes

    @property
    def numel(self) -> int:
        """Trained elements of the whole model."""
        return sum(self.unit_numels)

    @property
    def recomputable_units(self) -> list[int]:
        """Units that can be recomputed, in the order of their forward; empty without names.

        What recomputation takes is estimated by trained elements, so each has some.
        """
        units = range(len(self.unit_names))
        return [u for u in units if self.unit_numels[u] and u not in self.resident_units]

    @property
    def parameter_bytes(self) -> tuple[float, ...]:
        """By unit, bytes of its trained and frozen parameters in the compute dtype."""
        frozen = self.unit_frozen_bytes or (0,) * len(self.unit_numels)
        both = zip(self.unit_numels, frozen, strict=True)
        return tuple(self.param_bytes * numel + own for numel, own in both)


@dataclass(frozen=True, kw_only=True)
class NetworkProfile:
    """Times of the collectives, measured with the transport that training will use."""

    reduce_scatter_seconds: NonNegative
    """Gradients of the whole model, unit by unit, even shares, packing and summation included."""
    all_gather_seconds: NonNegative
    """Parameters of the whole model, unit by unit, even shares."""
    send_seconds_per_byte: tuple[NonNegative, ...]
    """Rates of each rank, or of its host's network if the transport is hierarchical. Only ratios
    matter, those to `receive_seconds_per_byte` too: they determine times under uneven shares."""
    receive_seconds_per_byte: tuple[NonNegative, ...]
    """As above."""
    receive_buffers: Annotated[str, _RECEIVE_BUFFERS] = "freed"
    """What becomes of the memory that reductions receive into. "freed" when they are over, as on
    devices; "step": kept until the end of the step, as on the host; "kept" for later steps too."""
    synchronization_seconds: _ByStage = _NO_RESIDUALS
    """Time by stage of a synchronization beyond its collectives. May be negative."""
    step_seconds: _ByStage = _NO_RESIDUALS
    """Time by stage of a step that nothing else explains. May be negative."""
    hosts: tuple[Count, ...] = ()
    """The number of each rank's host, if the transport is hierarchical. Empty: it is not."""
    network_seconds_per_byte: tuple[NonNegative, ...] = ()
    """The part of each rank's rates that is the network between hosts, which the ranks of its host
    share. Empty: not known, and all of them if the transport is hierarchical."""
    transport: str | None = None
    """The transport that was measured, as `Plan.transport`. None: not known."""
    collective_latency_seconds: _Latencies = ()
    """Seconds of a small reduce-scatter and of a small all-gather. Empty: not measured."""
    within_host_seconds: _Latencies = ()
    """Both collectives as above, but among the ranks of each host alone, on the slowest host.
    Empty: there is one host, or each has one rank."""

    def times(self, reduce_scatter: float, all_gather: float) -> NetworkProfile:
        """The network with collectives that take so many times as long."""
        return dataclasses.replace(
            self,
            reduce_scatter_seconds=reduce_scatter * self.reduce_scatter_seconds,
            all_gather_seconds=all_gather * self.all_gather_seconds,
        )

    def with_residuals(self, stage: int, *, synchronization: float, step: float) -> NetworkProfile:
        """The network with these residuals of a stage."""

        def replaced(values: Sequence[float], value: float) -> tuple[float, ...]:
            return (*values[:stage], value, *values[stage + 1 :])

        return dataclasses.replace(
            self,
            synchronization_seconds=replaced(self.synchronization_seconds, synchronization),
            step_seconds=replaced(self.step_seconds, step),
        )

    def __post_init__(self) -> None:
        check_fields(self)
        ranks = len(self.send_seconds_per_byte)
        if len(self.receive_seconds_per_byte) != ranks:
            raise ValueError("send_ and receive_seconds_per_byte must have one entry per rank")
        _check_entries(self, ranks, "hosts")
        _check_entries(self, len(self.hosts), "network_seconds_per_byte")


@dataclass(frozen=True, kw_only=True)
class ClusterProfile(Document):
    """The input of the plan search."""

    _noun = "profile"
    _version = 3
    _remedy = "measure again"

    devices: Annotated[tuple[DeviceProfile, ...], Rule("at least one device", bool)]
    """One per rank."""
    model: ModelProfile
    network: NetworkProfile
    communication: Communication = EXACT
    """How exactly the ranks send, under a plan. What was measured is exact."""
    overlap: Fraction = 0.0
    """Part of communication that runs under compute, 0 to 1; about 0 if both use the same cores."""
    backward_fraction: Fraction = 2 / 3
    """Part of a pass that the backward takes."""
    memory_reserve: Fraction = MEMORY_RESERVE
    """Part of each rank's memory that a plan leaves free, for fragmentation."""
    observed_stages: Annotated[tuple[Stage, ...], ALL_DIFFERENT] = ()
    """ZeRO stages of the steps that ran; empty: none ran. Steps of other stages are predicted
    without what only a step shows, so they look faster."""
    failed_stages: Annotated[tuple[Stage, ...], ALL_DIFFERENT] = ()
    """ZeRO stages at which a step failed on all ranks, not for lack of memory: they cannot train
    this model with this loss, as stage 3 with second-order gradients. No plan of them is searched
    for; `notes` has the errors."""
    identity: Mapping[str, str] = field(default_factory=dict, hash=False)
    """What was measured: model, dtype, versions, devices. A cached profile is used only if all
    entries are the same."""
    budget_seconds: Positive | None = None
    """Time budget of the measurement; None: not known, or not measured."""
    notes: tuple[str, ...] = ()
    """Warnings about the measurement, such as a throttled rank or a noisy machine."""

    def __post_init__(self) -> None:
        check_fields(self)
        links = len(self.network.send_seconds_per_byte)
        if links != self.world_size:
            raise ValueError(
                f"the network profile is for {links} ranks, but there are {self.world_size} devices"
            )
        for device in self.devices:
            for point in (*device.points, *device.recomputed_points):
                _check_entries(point, len(self.model.unit_numels), "unit_bytes")

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.devices)

    @property
    def even_shares(self) -> tuple[float, ...]:
        """Equal shares of all ranks."""
        return (1.0 / self.world_size,) * self.world_size

    def with_devices(
        self,
        change: Callable[[DeviceProfile], DeviceProfile],
        ranks: Iterable[int] | None = None,
    ) -> ClusterProfile:
        """The cluster with changed devices of these ranks; None: of all ranks."""
        change = cache(change)  # large clusters repeat few devices
        devices = list(self.devices)
        for rank in range(len(devices)) if ranks is None else ranks:
            devices[rank] = change(devices[rank])
        return dataclasses.replace(self, devices=tuple(devices))

    def with_largest_batches(self, batches: Mapping[int, int]) -> ClusterProfile:
        """A profile under which no plan uses larger micro-batches than these.

        Args:
            batches: by rank, the most samples of one pass, such as
                `HeteroZeroOptimizer.largest_batches`; other ranks are unchanged.

        Raises:
            ValueError: a rank that the profile does not have, or a limit below 1.
        """
        devices = list(self.devices)
        for rank, batch in batches.items():
            if not 0 <= rank < self.world_size:
                raise ValueError(f"rank {rank}: this profile has ranks 0 to {self.world_size - 1}")
            batch = checked(PositiveCount, batch, f"batches[{rank}]")
            devices[rank] = devices[rank].with_largest_batch(batch)
        return dataclasses.replace(self, devices=tuple(devices))

    @cached_property
    def device_group_indices(self) -> list[int]:
        """A number for each rank: equal for ranks whose devices have equal costs."""
        return _numbered(device.costs for device in self.devices)

    @cached_property
    def rank_group_indices(self) -> list[int]:
        """A number for each rank: equal for ranks with equal devices and links, on equal hosts."""
        network = self.network
        rates = [network.send_seconds_per_byte, network.receive_seconds_per_byte]
        if network.network_seconds_per_byte:
            rates.append(network.network_seconds_per_byte)
        equal = _numbered(zip(self.device_group_indices, *rates, strict=True))
        return _numbered(zip(equal, host_compositions(network.hosts, equal), strict=True))

    @cached_property
    def exchangeable_groups(self) -> list[int]:
        """A number for each rank: equal for ranks that may be exchanged alone, on the same host."""
        hosts = self.network.hosts or (0,) * self.world_size
        return _numbered(zip(self.rank_group_indices, hosts, strict=True))


def host_compositions(hosts: Sequence[int], keys: Sequence[Hashable]) -> list[Hashable]:
    """For each rank, the number of ranks with each key on its host; None without hosts."""
    if not hosts:
        return [None] * len(keys)
    ranks: dict[int, Counter[Hashable]] = {}
    for host, key in zip(hosts, keys, strict=True):
        ranks.setdefault(host, Counter())[key] += 1
    compositions = {host: frozenset(counts.items()) for host, counts in ranks.items()}
    return [compositions[host] for host in hosts]


def _numbered(keys: Iterable[Hashable]) -> list[int]:
    """Number the different keys in order of first appearance, such as 0, 0, 1, 0, 2."""
    numbers: dict[Hashable, int] = {}
    return [numbers.setdefault(key, len(numbers)) for key in keys]
