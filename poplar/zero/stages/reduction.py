"""Reductions in flight: when each is waited for, and when its bucket may be freed.

At most `limit` buckets are in flight, so that gradients do not pile up behind a slow network.

[Note: deferred reductions]
How much the ranks send in some reductions is known when all of them have got there. A rank that is
ahead must not wait for that in its backward. So the reduction is sent just before this rank waits
for one that was started later, for which all ranks must have got there too, or in `finish`. All
ranks wait at the same places, so they send at the same place in the collective order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

from poplar.comm import Work
from poplar.system.out_of_memory import is_out_of_memory
from poplar.zero.streams import DeviceStreams, Streams, Timing


class Held(Protocol):
    """Memory of the compute stream that a reduction sends from, such as a bucket."""

    @property
    def data(self) -> Tensor: ...


class Deferred(Held, Protocol):
    """A reduction that is sent later: [Note: deferred reductions]."""

    def send(self) -> Work:
        """Send it. Collective. After an error it may be called again."""
        ...


class Reductions:
    """Reductions whose waits block the host, oldest first."""

    def __init__(self, timing: Timing) -> None:
        self.limit = 2
        """Maximum number of concurrent reductions; each holds a bucket and received slices."""
        self._timing = timing
        self._issued: deque[tuple[Work, Held | None]] = deque()
        self._deferred: deque[tuple[int, Deferred]] = deque()
        """With the number of reductions that were started before."""
        self._started = self._finished = 0

    def allow(self, concurrent: int) -> None:
        """Allow at least so many concurrent reductions."""
        self.limit = max(self.limit, concurrent)

    def make_room(self) -> None:
        """Wait for the oldest reductions before the next one allocates memory."""
        self._wait_for_all_but(self.limit - 1)

    def start(self, issue: Callable[[], Work], bucket: Held | None = None) -> None:
        """Issue a reduction. Collective. The bucket is held until it has been sent."""
        self._issued.append((issue(), bucket))
        self._started += 1

    def defer(self, reduction: Deferred) -> None:
        """Send a reduction later: [Note: deferred reductions]."""
        self._deferred.append((self._started, reduction))

    def finish(self) -> None:
        """Wait until the sums of all reductions are final."""
        self._send_deferred(before=self._started + 1)
        self._wait_for_all_but(0)

    def finish_following(self, works: Sequence[Work], what: str) -> None:
        """Wait for collectives that were issued when a reduction had been waited for."""
        for work in works:
            self._timing.wait_for(work, what)

    def buckets(self) -> list[Held]:
        """The buckets that are held now."""
        deferred = [reduction for _, reduction in self._deferred]
        return [*deferred, *(bucket for _, bucket in self._issued if bucket is not None)]

    def _wait_for_all_but(self, leave: int) -> None:
        while len(self._issued) > leave:
            self._send_deferred(before=self._finished + 1)
            work, bucket = self._issued.popleft()
            try:
                self._timing.wait_for(work, "reductions")
            except Exception as error:
                if is_out_of_memory(error):  # it is waited for again
                    self._issued.appendleft((work, bucket))
                raise
            self._finished += 1

    def _send_deferred(self, *, before: int) -> None:
        """Send those that were deferred before reduction number `before - 1` was started."""
        while self._deferred and self._deferred[0][0] < before:
            _, reduction = self._deferred[0]
            self.start(reduction.send, reduction)
            self._deferred.popleft()


class StreamReductions(Reductions):
    """Reductions on the reduction stream; the host never waits. See [Note: streams].

    Each is summed when the next one has been issued: one is sent while another is added. If memory
    runs out in the sum, it is repeated before the next one is issued; what was issued stays issued.
    """

    def __init__(self, timing: Timing, streams: DeviceStreams) -> None:
        super().__init__(timing)
        self._streams = streams
        self._unsummed: deque[tuple[Work, Held | None]] = deque()
        self._buckets: deque[tuple[Held, Any]] = deque()
        """Buckets with an event after their sums."""
        self._outstanding = False
        """A reduction was issued that the compute stream has not waited for."""

    def make_room(self) -> None:
        while len(self._buckets) + len(self._unsummed_buckets()) > self.limit - 1:
            while not self._buckets:
                with self._streams.reduction():
                    self._sum_oldest()
            _, event = self._buckets.popleft()
            with self._timing.stall("reductions"):
                self._streams.wait_for_reduction(event)

    def start(self, issue: Callable[[], Work], bucket: Held | None = None) -> None:
        self._outstanding = True
        with self._streams.reduction():
            self._sum_all_but(1)
            self._unsummed.append((issue(), bucket))
            try:
                self._sum_all_but(1)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise

    def finish(self) -> None:
        # The host does not wait for earlier reductions, so these are sent last.
        self._send_deferred(before=self._started + 1)
        if not self._outstanding:
            return
        with self._streams.reduction():
            self._sum_all_but(0)
        with self._timing.stall("reductions"):
            self._streams.wait_for_reduction(self._streams.record_reduction())
        self._buckets.clear()
        self._outstanding = False

    def finish_following(self, works: Sequence[Work], what: str) -> None:
        # A collective is waited for on the stream that issued it, which owns its buffers.
        with self._streams.reduction():
            for work in works:
                work.wait()
        with self._timing.stall(what):
            self._streams.wait_for_reduction(self._streams.record_reduction())

    def buckets(self) -> list[Held]:
        held = [bucket for bucket, _ in self._buckets]
        held += [reduction for _, reduction in self._deferred]
        return held + self._unsummed_buckets()

    def _sum_all_but(self, leave: int) -> None:
        while len(self._unsummed) > leave:
            self._sum_oldest()

    def _sum_oldest(self) -> None:
        """Wait, on the reduction stream, for a reduction and sum it."""
        work, bucket = self._unsummed[0]
        work.wait()  # again, if memory runs out in it
        self._unsummed.popleft()
        if bucket is not None:
            self._buckets.append((bucket, self._streams.record_reduction()))

    def _unsummed_buckets(self) -> list[Held]:
        return [bucket for _, bucket in self._unsummed if bucket is not None]


def reductions_on(streams: Streams, timing: Timing) -> Reductions:
    """The reductions of a device and transport."""
    if isinstance(streams, DeviceStreams):
        return StreamReductions(timing, streams)
    return Reductions(timing)
