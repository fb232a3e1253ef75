"""Memory and order on the streams of a device, checked on a simulated device.

The simulated device runs nothing: the host is as far ahead as it can be. Every operation gets a
vector clock, so a test can tell whether an operation is certain to be over when another one starts.
"""

from __future__ import annotations

import copy
import math
import pickle
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from poplar.comm import Bucket, Codec
from poplar.comm.shard_layout import Layout
from poplar.system.trace import Trace
from poplar.values.errors import CollectiveTimeout
from poplar.zero.factors.parameter import FactoredParameter
from poplar.zero.flat_parameter import FlatParameter
from poplar.zero.stages.reduction import StreamReductions
from poplar.zero.stages.replicated import Replicated
from poplar.zero.stages.sharded_gradients import ShardedGradients
from poplar.zero.stages.sharded_optimizer import ShardedOptimizer
from poplar.zero.stages.sharded_parameters import ShardedParameters
from poplar.zero.stages.strategy import Strategy
from poplar.zero.steps.step_result import StepResult, Stopwatch
from poplar.zero.streams import (
    DeviceClock,
    DeviceStreams,
    PassWork,
    RankTimes,
    Streams,
    Timing,
    with_communication,
)
from poplar.zero.unit import Unit

Clock = dict[str, int]
RANKS = 2


def merge(clock: Clock, other: Clock) -> None:
    for stream, tick in other.items():
        clock[stream] = max(clock.get(stream, 0), tick)


def is_over(operation: tuple[str, int], clock: Clock) -> bool:
    """Whether an operation has ended before anything that is issued with this clock starts."""
    stream, tick = operation
    return clock.get(stream, 0) >= tick


class Device:
    """The clocks of the streams "compute", "reduction" and "backend"."""

    def __init__(self) -> None:
        self.clocks: dict[str, Clock] = {name: {} for name in ("compute", "reduction", "backend")}
        self.current = "compute"

    def issue(self, stream: str | None = None) -> tuple[str, int]:
        """Issue an operation on a stream; the current one by default."""
        name = stream or self.current
        clock = self.clocks[name]
        clock[name] = clock.get(name, 0) + 1
        return name, clock[name]

    def collective(self) -> tuple[str, int]:
        """As NCCL: on its own stream, after the current one."""
        merge(self.clocks["backend"], self.clocks[self.current])
        return self.issue("backend")


class SimulatedStreams(DeviceStreams):
    allocate_unsharded = Streams.allocate_unsharded  # there is no memory pool

    def __init__(self, device: Device) -> None:
        self.device = device

    @contextmanager
    def reduction(self) -> Iterator[None]:
        merge(self.device.clocks["reduction"], self.device.clocks["compute"])
        before, self.device.current = self.device.current, "reduction"
        yield
        self.device.current = before

    def record_reduction(self) -> Any:
        return dict(self.device.clocks["reduction"])

    def wait_for_reduction(self, event: Any) -> None:
        merge(self.device.clocks["compute"], event)

    def timestamp(self) -> Any:
        return mock.Mock(query=lambda: False)


class SimulatedWork:
    def __init__(self, device: Device, operation: tuple[str, int], finish: Any = None) -> None:
        self.device, self.operation, self.finish = device, operation, finish

    def wait(self) -> float:
        stream, tick = self.operation
        merge(self.device.clocks[self.device.current], {stream: tick})
        if self.finish is not None:
            self.finish()
        return 0.0


class SimulatedTransport:
    """Records what uses each bucket, and how many buckets and received slices are alive."""

    takes_memory, waits_on_stream = True, True

    def __init__(self, device: Device) -> None:
        self.device = device
        self.group = mock.Mock(rank=0, size=RANKS, trace=Trace())
        self.numbers: dict[int, int] = {}
        self.uses: dict[int, list[tuple[str, int]]] = {}
        self.sums: dict[int, tuple[str, int]] = {}
        self.copies: list[tuple[str, int]] = []
        """Out of buffers that all-gathers have received into."""
        self.row_uses: list[tuple[str, int]] = []
        self.alive: set[int] = set()
        self.most_alive = 0
        self.freed_in_use: list[int] = []

    def buffer(
        self, layout: Layout, dtype: torch.dtype, device: torch.device, codec: Codec | None = None
    ) -> Bucket:
        del dtype, device
        bucket = Bucket(torch.zeros(layout.numel), layout, codec or Codec())
        number = self.numbers[bucket.data.data_ptr()] = len(self.uses)
        self.uses[number] = []
        self.alive.add(number)
        self.most_alive = max(self.most_alive, len(self.alive))
        weakref.finalize(bucket, self.free, number)
        return bucket

    def free(self, number: int) -> None:
        clock = self.device.clocks["compute"]
        if not all(is_over(use, clock) for use in self.uses[number]):
            self.freed_in_use.append(number)
        self.alive.discard(number)

    def reduce_scatter(self, bucket: Bucket, out: Tensor, **_options: Any) -> SimulatedWork:
        number = self.numbers[bucket.data.data_ptr()]
        self.uses[number].append(self.device.collective())

        def add() -> None:
            assert self.device.current == "reduction", "sums must not run on the compute stream"
            use = self.device.issue()
            self.uses[number].append(use)  # this rank's own slice is read from the bucket
            self.sums[out.data_ptr()] = use

        return SimulatedWork(self.device, self.uses[number][-1], add)

    def all_gather(self, data: Tensor, layout: Layout, **_options: Any) -> SimulatedWork:
        del data, layout
        issued_on = self.device.current

        def copy_out() -> None:
            assert self.device.current == issued_on, "its buffers belong to the issuing stream"
            self.copies.append(self.device.issue())

        return SimulatedWork(self.device, self.device.collective(), copy_out)

    def all_to_all(self, received: Tensor, *_arguments: Any, **_options: Any) -> SimulatedWork:
        assert self.device.current == "reduction", "its buffers belong to the reduction stream"
        received.zero_()
        self.row_uses.append(self.device.issue())  # this rank's rows are copied from there
        return SimulatedWork(
            self.device,
            self.device.collective(),
            lambda: self.row_uses.append(self.device.issue()),
        )

    def share(self, data: Tensor) -> Tensor:
        return data.clone()

    def trim(self) -> None: ...

    def broadcast(self, data: Tensor, source: int, *, what: str) -> None: ...


def simulated(
    kind: type[Strategy], count: int, control: Any = None
) -> tuple[Strategy, SimulatedTransport, list[Unit]]:
    """A strategy and its units; with a control channel, gradients are sent as factors."""
    device = Device()
    transport = SimulatedTransport(device)
    with mock.patch(
        "poplar.zero.stages.strategy.streams_of", return_value=SimulatedStreams(device)
    ):
        strategy = kind(transport, torch.float32, torch.device("cpu"))  # type: ignore[arg-type]
    units = []
    for index in range(count):
        layer, name = nn.Linear(16, 16, bias=False), f"unit {index}"
        make: Any = FlatParameter
        weight = nn.Parameter(torch.zeros(256))
        if control is not None:
            make, weight = partial(FactoredParameter, layer=layer, control=control), layer.weight
        flat = make(name, [("weight", weight)], dtype=torch.float32, trained=True, groups=[0])
        units.append(Unit(index, f"unit {index}", (), (flat,), resident=False))
    strategy.prepare(units)
    layouts = strategy.layouts({unit.flats[0]: (0.5, 0.5) for unit in units})
    for unit in units:
        strategy.allocate(unit.flats[0], layouts[unit.flats[0]])
        strategy.bind_parameters(unit.flats[0])
    return strategy, transport, units


def backward(device: Device, flat: FlatParameter) -> None:
    device.issue("compute")
    flat.parameters[0].grad = torch.ones(256)


def flats_of(units: Sequence[Unit]) -> list[FlatParameter]:
    return [flat for unit in units for flat in unit.flats]


@pytest.mark.parametrize("kind", [ShardedGradients, ShardedOptimizer])
def test_buckets_are_freed_after_their_reduction_only(kind: type[Strategy]) -> None:
    """However far the host runs ahead, and without `record_stream`."""
    strategy, transport, units = simulated(kind, 12)
    for _ in range(3):
        strategy.begin_step()
        with mock.patch.object(Tensor, "record_stream", side_effect=AssertionError):
            for flat in reversed(flats_of(units)):
                backward(transport.device, flat)
                strategy.reduce(flat, 0.5)
            strategy.wait_for_reductions()
        compute = transport.device.clocks["compute"]
        assert all(is_over(transport.sums[f.gradient.data_ptr()], compute) for f in flats_of(units))
        for flat in flats_of(units):
            strategy.free_gradient(flat)
    assert transport.freed_in_use == []
    assert transport.alive == set()


def test_two_buckets_are_in_flight_at_most() -> None:
    strategy, transport, units = simulated(ShardedGradients, 12)
    strategy.begin_step()
    for flat in reversed(flats_of(units)):
        backward(transport.device, flat)
        strategy.reduce(flat, 0.5)
    strategy.wait_for_reductions()
    assert transport.most_alive == strategy.reductions.limit == 2


def test_backward_does_not_wait_for_the_latest_reduction() -> None:
    """The compute stream waits only for the reduction whose bucket it reuses."""
    strategy, transport, units = simulated(ShardedGradients, 6)
    strategy.begin_step()
    for number, flat in enumerate(flats_of(units)):
        backward(transport.device, flat)
        strategy.reduce(flat, 0.5)
        latest = transport.uses[number][0]
        assert not is_over(latest, transport.device.clocks["compute"])
    strategy.wait_for_reductions()


def test_accumulators_are_reduced_without_a_wait_of_the_backward() -> None:
    """At stage 1 a rank's last pass does not wait for ranks that are still at earlier passes."""
    strategy, transport, units = simulated(ShardedOptimizer, 6)
    strategy.begin_step()
    for flat in flats_of(units):
        backward(transport.device, flat)
        strategy.reduce(flat, 0.5)
    assert "backend" not in transport.device.clocks["compute"]
    strategy.wait_for_reductions()
    assert transport.device.clocks["compute"]["backend"] == len(units)


@pytest.mark.parametrize("kind", [Replicated, ShardedOptimizer, ShardedGradients])
def test_rows_are_sent_without_a_wait_of_the_backward(kind: type[Strategy]) -> None:
    """Neither the host nor the compute stream waits for the number of rows of other ranks."""
    control, counts, freed = mock.Mock(), mock.Mock(), []
    counts.return_value = [torch.tensor([3])] * RANKS
    control.exchange.return_value = counts
    strategy, transport, units = simulated(kind, 4, control)
    defer = strategy.reductions.defer

    def freed_after_use() -> None:
        clock = transport.device.clocks["compute"]
        freed.append(all(is_over(use, clock) for use in transport.row_uses))

    def watched(reduction: Any) -> None:
        weakref.finalize(reduction, freed_after_use)
        defer(reduction)

    strategy.begin_step()
    with mock.patch.object(strategy.reductions, "defer", watched):
        for flat in flats_of(units):
            transport.device.issue("compute")
            flat.forward.capture(torch.ones(3, 16), torch.ones(3, 16))
            flat.reduce(strategy, 0.5)
    assert counts.call_count == 0
    assert transport.row_uses == []
    strategy.wait_for_reductions()
    assert counts.call_count == len(units)
    assert freed == [True] * len(units)
    assert "backend" in transport.device.clocks["compute"]


def test_gathered_gradients_are_copied_on_the_stream_that_gathers_them() -> None:
    """At stage 0 an all-gather follows each reduction; the user reads its result."""
    strategy, transport, units = simulated(Replicated, 6)
    strategy.begin_step()
    for flat in flats_of(units):
        backward(transport.device, flat)
        strategy.reduce(flat, 0.5)
    strategy.wait_for_reductions()
    strategy.finish_gradients(units)
    assert len(transport.copies) == len(units)
    assert all(is_over(copy, transport.device.clocks["compute"]) for copy in transport.copies)


def test_unshard_starts_after_the_unit_whose_memory_it_takes() -> None:
    strategy, transport, units = simulated(ShardedParameters, 6)
    device = transport.device
    computed: list[tuple[str, int]] = []
    strategy.unshard(units[0], in_step=True)
    for unit in units:
        strategy.wait_for_unshard(unit)
        if unit.index >= 1:
            strategy.reshard(units[unit.index - 1])
        if unit.index + 1 < len(units):
            strategy.unshard(units[unit.index + 1], in_step=True)
            assert all(is_over(before, device.clocks["backend"]) for before in computed)
        computed.append(device.issue("compute"))
        held = sum(flat.values.untyped_storage().nbytes() > 0 for flat in flats_of(units))
        assert held <= 2


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is called on the allocator of CUDA device 3, while another device is current."""
    calls: list[str] = []
    current = ["cuda:0"]

    @contextmanager
    def inside(enter: str) -> Iterator[None]:
        calls.append(enter)
        yield

    @contextmanager
    def device(chosen: torch.device) -> Iterator[None]:
        current[0], before = str(chosen), current[0]
        yield
        current[0] = before

    def new_pool(**_options: Any) -> str:
        return f"pool of {current[0]}"

    monkeypatch.setattr(torch.cuda, "Stream", mock.Mock())
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "MemPool", new_pool)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    monkeypatch.setattr(
        torch.cuda, "use_mem_pool", lambda pool, device: inside(f"enter the {pool} on {device}")
    )
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("empty the cache"))
    return calls


def test_unsharded_values_have_a_pool_on_the_device_of_the_model(pools: list[str]) -> None:
    """A pool of another device would be dropped by torch after its first use."""
    streams = DeviceStreams(torch.device("cuda", 3))
    streams.allocate_unsharded(lambda: pools.append("allocate"))
    assert pools == ["enter the pool of cuda:3 on cuda:3", "allocate"]


@pytest.mark.parametrize("in_step", [True, False])
def test_passes_of_every_mode_take_unsharded_values_from_the_pool(in_step: bool) -> None:
    """Also evaluation and the profiler's, whose memory then includes the pool."""
    strategy, _, units = simulated(ShardedParameters, 1)
    with mock.patch.object(strategy.streams, "allocate_unsharded") as allocate:
        strategy.unshard(units[0], in_step=in_step)
    assert allocate.call_count == 1


def test_an_allocator_without_pools_is_used_as_it_is(
    pools: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
    streams = DeviceStreams(torch.device("cuda", 3))
    streams.allocate_unsharded(lambda: pools.append("allocate"))
    assert pools == ["allocate"]


def test_an_unshard_that_finds_no_memory_empties_the_cache_first(pools: list[str]) -> None:
    """Inside a pool, torch's allocator does not return what it has cached for activations."""
    streams = DeviceStreams(torch.device("cuda", 3))

    def allocate() -> None:
        pools.append("allocate")
        if "empty the cache" not in pools:
            raise torch.OutOfMemoryError("CUDA out of memory")

    streams.allocate_unsharded(allocate)
    enter = "enter the pool of cuda:3 on cuda:3"
    assert pools == [enter, "allocate", "empty the cache", enter, "allocate"]
    full = mock.Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory"))
    with pytest.raises(torch.OutOfMemoryError):
        streams.allocate_unsharded(full)
    assert full.call_count == 2


class Event:
    """A CUDA event that the device passes at `milliseconds`, once it gets there."""

    reached = 0.0

    def __init__(self, milliseconds: float) -> None:
        self.milliseconds = milliseconds

    def query(self) -> bool:
        return self.milliseconds <= Event.reached

    def synchronize(self) -> None:
        Event.reached = max(Event.reached, self.milliseconds)

    def elapsed_time(self, end: Event) -> float:
        assert end.query(), "CUDA raises for events that are not over"
        return end.milliseconds - self.milliseconds


class TimedStreams(Streams):
    asynchronous = True

    def __init__(self) -> None:
        self.time = 0.0

    def timestamp(self) -> Event:
        return Event(self.time)


@pytest.fixture
def streams() -> TimedStreams:
    Event.reached = 0.0
    return TimedStreams()


def test_waits_of_the_host_are_one_number() -> None:
    """Evaluation may wait any number of times between two steps."""
    timing = Timing(Streams(), Trace())
    for _ in range(3):
        timing.wait_for(mock.Mock(wait=lambda: 0.5), "a collective")
    assert timing.step.stalls == []
    assert timing.latest().waiting_seconds == 1.5


def test_waits_of_a_device_are_read_when_it_has_passed_them(streams: TimedStreams) -> None:
    timing = Timing(streams, Trace())
    for milliseconds in (30.0, 50.0):
        with timing.stall("a collective"):
            streams.time += milliseconds
        streams.time += 100.0
        timing.end_step()
        with timing.stall("a collective between two steps, as of a load"):
            streams.time += 500.0
        timing.begin_step()
    assert math.isnan(timing.latest().waiting_seconds)  # the device is still in the first step
    Event.reached = 100.0
    assert timing.latest().waiting_seconds == pytest.approx(0.030)
    Event.reached = 1000.0
    assert timing.latest().waiting_seconds == pytest.approx(0.050)


def test_latest_wait_is_that_of_a_step_and_not_of_the_reset_after_it(
    streams: TimedStreams,
) -> None:
    timing = Timing(streams, Trace())
    reductions = StreamReductions(timing, mock.MagicMock())
    strategy = mock.Mock(timing=timing, reductions=reductions, steps=0)
    for _ in range(2):
        Strategy.begin_step(strategy)
        reductions.start(lambda: mock.Mock(wait=lambda: 0.0))
        with timing.stall("a collective"):
            streams.time += 30.0
        streams.time += 100.0
        reductions.finish()
        Strategy.end_step(strategy)
        Strategy.begin_step(strategy)  # frees what the step has used
    Strategy.begin_step(strategy)
    Event.reached = 1000.0
    assert timing.latest().waiting_seconds == pytest.approx(0.030)


def test_waits_of_the_current_step_can_be_read_with_a_synchronization(
    streams: TimedStreams,
) -> None:
    timing = Timing(streams, Trace())
    with timing.stall("a collective"):
        streams.time += 20.0
    step = timing.step
    timing.begin_step()
    assert step.waited_seconds() == step.waited_seconds() == pytest.approx(0.020)


def test_compute_seconds_of_a_device_exclude_its_waits_and_are_known_when_it_is_done(
    streams: TimedStreams,
) -> None:
    timing = Timing(streams, Trace())
    early = timing.start_span()  # the first forward, before the step begins
    streams.time += 5.0
    early.stop()
    streams.time += 100.0  # for the other ranks to open the step
    timing.begin_step()
    timing.step.add_span(early)
    span = timing.start_span()
    streams.time += 30.0
    with timing.stall("a collective"):
        streams.time += 7.0
    timing.step.add_span(span.stop())
    with timing.stall("a reduction"):
        streams.time += 2.0
    timing.step.add_work(PassWork(0.03, 4.0, 64.0))
    timing.end_step()
    Event.reached = streams.time - 1.0
    assert math.isnan(timing.latest().compute_seconds)
    Event.reached = streams.time
    known = timing.latest()
    assert known.compute_seconds == pytest.approx(0.035)
    assert known.waiting_seconds == pytest.approx(0.009)
    assert known.work == PassWork(0.03, 4.0, 64.0)


def test_what_all_ranks_wait_is_communication() -> None:
    times = with_communication([RankTimes(1.0, 0.5), RankTimes(1.2, 0.2), RankTimes(0.7, 0.9)])
    assert [rank.communication_seconds for rank in times] == [0.2] * 3
    assert [rank.waiting_seconds for rank in times] == pytest.approx([0.3, 0.0, 0.7])


def test_spans_of_a_device_have_its_times(streams: TimedStreams) -> None:
    trace = Trace()
    trace.clock = DeviceClock(streams)
    with trace.record() as spans:
        start = trace.now()
        streams.time += 40.0
        with trace.span("wait", "a collective"):
            streams.time += 10.0
        trace.add("pass", "a pass of 2 samples", start)
    wait, whole = spans
    assert wait.seconds == pytest.approx(0.010)
    assert whole.seconds == pytest.approx(0.050)
    assert whole.start < wait.start < wait.stop == whole.stop


def pickled(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


def result_of(streams: TimedStreams, group: Any) -> StepResult:
    stopwatch = Stopwatch(streams, group)
    streams.time += 250.0
    stopwatch.stop()
    return StepResult(
        samples=8,
        waiting_on=None,
        skipped=False,
        losses=torch.tensor([0.5, 0.25]),
        norm=torch.tensor(3.0),
        stopwatch=stopwatch,
        waiting_seconds=lambda: 0.05,
    )


def test_result_of_a_step_waits_for_the_device_when_it_is_read(streams: TimedStreams) -> None:
    group = mock.Mock(wait_for_event=lambda event, what: event.synchronize())
    result = result_of(streams, group)
    assert Event.reached == 0.0, "train_step must not wait"
    assert result.loss == 0.75
    assert Event.reached == 250.0
    assert (result.grad_norm, result.seconds, result.waiting_seconds) == (3.0, 0.25, 0.05)


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickled])
def test_a_copy_of_a_result_has_its_values(streams: TimedStreams, duplicate: Any) -> None:
    group = mock.Mock(wait_for_event=lambda event, what: event.synchronize())
    result = result_of(streams, group)
    twin = duplicate(result)
    assert repr(twin) == repr(result)
    assert (twin.loss, twin.grad_norm, twin.samples, twin.skipped) == (0.75, 3.0, 8, False)
    assert (float(twin.loss_on_device), float(twin.grad_norm_on_device)) == (0.75, 3.0)


def test_reading_a_result_fails_at_the_deadline(streams: TimedStreams) -> None:
    late = mock.Mock(side_effect=CollectiveTimeout("rank 1 is missing"))
    result = result_of(streams, mock.Mock(wait_for_event=late))
    with pytest.raises(CollectiveTimeout, match="rank 1"):
        _ = result.loss


def test_a_repeated_allocation_keeps_the_values_that_have_memory() -> None:
    """As after memory ran out for a later flat parameter of the unit."""
    strategy, _, (unit,) = simulated(ShardedParameters, 1)
    (flat,) = unit.flats
    seen: list[int] = []

    def twice(allocate: Any) -> None:
        for _ in range(2):
            allocate()
            seen.append(flat.values.untyped_storage().data_ptr())

    with mock.patch.object(strategy.streams, "allocate_unsharded", twice):
        strategy.unshard(unit, in_step=True)
    assert seen[0] == seen[1] != 0
