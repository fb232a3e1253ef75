"""The streams of the engine's device: which work runs on which, what orders it, and waits for it.

[Note: streams]
*compute* is the caller's current stream: forward, backward, packing and the update. Unshards are
issued from it. *reduction* runs reductions and the sums over ranks, while the backward continues.
The backend runs each collective on a stream of its own, after the work of the stream that issued
it. A wait makes the issuing stream wait for the collective, never the host.

Every buffer is allocated and freed on one stream. If another stream uses it, the owner first waits
for an event of that use. So the allocator reuses memory in the order of the stream, without
`record_stream`, and memory does not depend on how far the host runs ahead:

    buffer                  owner      used by      freed after
    values of a unit        compute    backend      the wait of the unshard
    bucket, accumulator     compute    reduction    the event of its reduction
    received slices         reduction  backend      the wait of the reduction

[Note: two units]
The values of a unit are freed when its forward or backward has been issued, and then a later unit
is unsharded. Its all-gather is issued from the same stream, so it starts when the device has
finished the earlier unit, and takes over its memory. The values have a memory pool of their own, so
activations do not split their blocks.
"""

from __future__ import annotations

import math
import operator
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import torch

from poplar.comm import Group, Work
from poplar.system.trace import Trace


class Streams:
    """A device without streams, or a transport whose waits block the host: all work is in order."""

    asynchronous: ClassVar[bool] = False
    """A wait for a collective blocks a stream and not the host."""

    def timestamp(self) -> Any:
        """The time of the host, or an event on the compute stream that keeps that of the device."""
        return time.perf_counter()

    def allocate_unsharded(self, allocate: Callable[[], None]) -> None:
        """Call `allocate`, which allocates values of units, once or, if memory is short, twice."""
        allocate()


class DeviceStreams(Streams):
    """A CUDA device with a transport that waits on streams."""

    asynchronous = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._reduction = torch.cuda.Stream(device, priority=-1)

    @cached_property
    def _pool(self) -> torch.cuda.MemPool | None:
        """For unsharded values; None: torch's allocator was replaced by one without pools."""
        if torch.cuda.get_allocator_backend() != "native":
            return None
        with torch.cuda.device(self._device):  # a pool belongs to the device that is current
            return torch.cuda.MemPool(use_on_oom=True)

    @contextmanager
    def reduction(self) -> Iterator[None]:
        """A context on the reduction stream, after all work issued on the compute stream so far."""
        self._reduction.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._reduction):
            yield

    def record_reduction(self) -> Any:
        """An event after all work issued on the reduction stream so far."""
        return self._reduction.record_event()

    def wait_for_reduction(self, event: Any) -> None:
        """Make the compute stream wait for an event of the reduction stream."""
        torch.cuda.current_stream(self._device).wait_event(event)

    def timestamp(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def allocate_unsharded(self, allocate: Callable[[], None]) -> None:
        pool = self._pool
        if pool is None:
            allocate()
            return
        try:
            with torch.cuda.use_mem_pool(pool, self._device):
                allocate()
        except torch.OutOfMemoryError:
            # Inside a pool torch's allocator does not return what it caches outside of it.
            torch.cuda.empty_cache()
            with torch.cuda.use_mem_pool(pool, self._device):
                allocate()


class HostCopies:
    """Copies of tensors in host memory; those that are there are their own copies."""

    def __init__(
        self, values: Sequence[torch.Tensor], streams: Streams, group: Group, what: str
    ) -> None:
        """Start to copy. Errors say that the host waits for `what`."""
        self._group, self._what = group, what
        is_later = streams.asynchronous  # torch copies to pinned memory then
        self._copies = [value.to("cpu", non_blocking=is_later) for value in values]
        self._event = streams.timestamp() if streams.asynchronous else None

    def wait(self) -> list[torch.Tensor]:
        """Wait until the device has written them."""
        event, self._event = self._event, None
        if event is not None:
            self._group.wait_for_event(event, self._what)
        return self._copies


class DeviceClock:
    """The time of the device at points of the compute stream: a `poplar.system.trace.Clock`."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._origin: Any = None
        self._began = 0.0

    def start(self) -> None:
        """Relate the two clocks. Synchronizes with the device."""
        self._origin = self._streams.timestamp()
        self._origin.synchronize()
        self._began = time.perf_counter()

    def mark(self) -> Any:
        return self._streams.timestamp()

    def seconds(self, mark: Any) -> float:
        """The time of an event, or of a host's wait. Synchronizes with the device."""
        if isinstance(mark, float):
            return mark
        mark.synchronize()
        return self._began + float(self._origin.elapsed_time(mark)) / 1e3


def streams_of(device: torch.device, *, waits_on_stream: bool) -> Streams:
    """The streams for a device and a transport."""
    return DeviceStreams(device) if device.type == "cuda" and waits_on_stream else Streams()


class ComputeSpan:
    """A part of a step in which this rank computes, apart from its waits."""

    def __init__(self, step: StepTiming, mark: Callable[[], Any]) -> None:
        self._step, self._mark = step, mark
        self._before = mark()
        self.end: Any = None
        """The mark at its end."""
        self._waited, self._stalls = step.host_seconds, len(step.stalls)

    def stop(self) -> ComputeSpan:
        """The part ends here."""
        self.end = self._mark()
        self._waited = self._step.host_seconds - self._waited
        self._inside = self._step.stalls[self._stalls :]
        return self

    def seconds(self) -> float:
        """Seconds without the waits inside."""
        stalled = sum(seconds_between(*stall) for stall in self._inside)
        return max(0.0, seconds_between(self._before, self.end) - stalled - self._waited)


def seconds_between(before: Any, after: Any) -> float:
    """Between two times of the host, or two events that the device has passed."""
    if isinstance(before, float):
        return float(after - before)
    return float(before.elapsed_time(after)) / 1e3


class PassWork(NamedTuple):
    """What passes compute, if a profile is followed."""

    expected_seconds: float = 0.0
    """By the profile; infinite if it does not have such passes."""
    samples: float = 0.0
    elements: float = 0.0
    """Of the tensors of their micro-batches."""


class RankTimes(NamedTuple):
    """What one rank did in one step. On GPUs, in the latest one that its device had finished."""

    compute_seconds: float
    """In forward and backward, without waits; NaN if unknown."""
    waiting_seconds: float
    """For other ranks, until the last one is ready; NaN if unknown."""
    communication_seconds: float = 0.0
    """Exposed: the least that any rank has waited, because no rank waits for the slowest one."""
    work: PassWork = PassWork()

    def after(self, seconds: float) -> RankTimes:
        """The same after so many more seconds of waiting."""
        return self._replace(waiting_seconds=self.waiting_seconds + seconds)


def with_communication(times: Sequence[RankTimes]) -> tuple[RankTimes, ...]:
    """The times of all ranks, of whose waits the part that all of them have is communication."""
    least = min(rank.waiting_seconds for rank in times)
    return tuple(
        rank._replace(waiting_seconds=rank.waiting_seconds - least, communication_seconds=least)
        for rank in times
    )


class StepTiming:
    """The passes and waits of one step."""

    def __init__(self) -> None:
        self.host_seconds = 0.0
        """Seconds that the host has waited."""
        self.stalls: list[tuple[Any, Any]] = []
        """Waits of a stream, each between two events."""
        self._spans: list[ComputeSpan] = []
        self._work = PassWork()

    def add(self, seconds: float) -> None:
        """Add a wait of the host."""
        self.host_seconds += seconds

    def add_span(self, span: ComputeSpan) -> None:
        """Add a part in which this rank computed."""
        self._spans.append(span)

    def add_work(self, work: PassWork) -> None:
        """Add what a pass computes."""
        self._work = PassWork(*map(operator.add, self._work, work))

    @property
    def last_events(self) -> list[Any]:
        """What the device passes last: after a wait, and after a pass."""
        ends = [after for _, after in self.stalls[-1:]] + [span.end for span in self._spans[-1:]]
        return [end for end in ends if not isinstance(end, float)]

    @property
    def is_known(self) -> bool:
        """Whether the device has passed all of them."""
        return all(event.query() for event in self.last_events)

    def waited_seconds(self) -> float:
        """Seconds waited so far. Synchronizes with the device unless `is_known`."""
        for event in self.last_events:
            event.synchronize()
        return self.host_seconds + sum(seconds_between(*stall) for stall in self.stalls)

    def times(self) -> RankTimes:
        """The times so far. Synchronizes with the device unless `is_known`."""
        waited = self.waited_seconds()
        return RankTimes(sum(span.seconds() for span in self._spans), waited, work=self._work)


class Timing:
    """The passes and waits of the current step, and what is known of earlier ones.

    A wait that blocks the host is timed by the host's clock. A wait that blocks a stream is the
    time between two events around it, which is known when the device has passed them. The same
    holds for passes.
    """

    def __init__(self, streams: Streams, trace: Trace) -> None:
        self._streams, self._trace = streams, trace
        self.step = StepTiming()
        self._unread: deque[StepTiming] = deque()
        self._latest = RankTimes(math.nan, math.nan)

    def begin_step(self) -> None:
        """Start to time a step. What came since the last one, or was abandoned, is of no step."""
        self.step = StepTiming()

    def end_step(self) -> None:
        """The step has been applied or skipped."""
        if self.step.last_events:
            self._unread.append(self.step)
        self.step = StepTiming()

    def start_span(self) -> ComputeSpan:
        """This rank computes from here on, until `stop()` of the result. Add it to a step then."""
        return ComputeSpan(self.step, self._streams.timestamp)

    def wait_for(self, work: Work, what: str) -> None:
        """Wait for a collective before the compute stream continues."""
        if self._streams.asynchronous:
            with self.stall(what):
                work.wait()
        else:
            self.step.add(work.wait())

    @contextmanager
    def stall(self, what: str) -> Iterator[None]:
        """A context that makes the compute stream of a device wait for `what`."""
        before = self._streams.timestamp()
        with self._trace.span("wait", what):
            yield
        self.step.stalls.append((before, self._streams.timestamp()))

    def latest(self) -> RankTimes:
        """The times of the latest step that is known without a synchronization.

        That is the current step if waits block the host. On a device it is an earlier one; NaN if
        the device has finished none.
        """
        if not self._streams.asynchronous:
            return self.step.times()
        while self._unread and self._unread[0].is_known:
            self._latest = self._unread.popleft().times()
        return self._latest
