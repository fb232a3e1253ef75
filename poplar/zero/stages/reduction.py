"""Reductions in flight: when each is waited for, and when its bucket may be freed.

At most `limit` buckets are in flight, so that gradients do not pile up behind a slow network.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from poplar.comm import Bucket, Work
from poplar.zero.streams import Streams
from poplar.zero.waiting import WaitingTime


class Reductions:
    """Reductions whose waits block the host, oldest first."""

    def __init__(self, waiting: WaitingTime) -> None:
        self.limit = 2
        """Maximum number of concurrent reductions; each holds a bucket and received slices."""
        self._waiting = waiting
        self._issued: deque[tuple[Work, Bucket | None]] = deque()

    def make_room(self) -> None:
        """Wait for the oldest reductions before the next one allocates memory."""
        self._wait_for_all_but(self.limit - 1)

    def start(self, issue: Callable[[], Work], bucket: Bucket | None = None) -> None:
        """Issue a reduction. Collective.

        Args:
            issue: issues it.
            bucket: memory of the compute stream that is held until it has been sent.
        """
        self._issued.append((issue(), bucket))

    def finish(self) -> None:
        """Wait until the sums of all reductions are final."""
        self._wait_for_all_but(0)

    def finish_following(self, works: Sequence[Work], what: str) -> None:
        """Wait for collectives that were issued when a reduction had been waited for."""
        for work in works:
            self._waiting.wait_for(work, what)

    def buckets(self) -> list[Bucket]:
        """The buckets that are held now."""
        return [bucket for _, bucket in self._issued if bucket is not None]

    def _wait_for_all_but(self, leave: int) -> None:
        while len(self._issued) > leave:
            work, _ = self._issued.popleft()
            self._waiting.wait_for(work, "reductions")


class StreamReductions(Reductions):
    """Reductions on the reduction stream; the host never waits. See [Note: streams].

    Each is summed when the next one has been issued: one is sent while another is added.
    """

    def __init__(self, waiting: WaitingTime, streams: Streams) -> None:
        super().__init__(waiting)
        self._streams = streams
        self._unsummed: tuple[Work, Bucket | None] | None = None
        self._buckets: deque[tuple[Bucket, Any]] = deque()
        """Buckets with an event after their sums."""

    def make_room(self) -> None:
        while len(self._buckets) + self._holds_bucket() > self.limit - 1:
            if not self._buckets:
                with self._streams.reduction():
                    self._sum()
            _, event = self._buckets.popleft()
            with self._waiting.stall("reductions"):
                self._streams.wait_for_reduction(event)

    def start(self, issue: Callable[[], Work], bucket: Bucket | None = None) -> None:
        with self._streams.reduction():
            work = issue()
            self._sum()
        self._unsummed = (work, bucket)

    def finish(self) -> None:
        with self._streams.reduction():
            self._sum()
        with self._waiting.stall("reductions"):
            self._streams.wait_for_reduction(self._streams.record_reduction())
        self._buckets.clear()

    def finish_following(self, works: Sequence[Work], what: str) -> None:
        # A collective is waited for on the stream that issued it, which owns its buffers.
        with self._streams.reduction():
            for work in works:
                work.wait()
        with self._waiting.stall(what):
            self._streams.wait_for_reduction(self._streams.record_reduction())

    def buckets(self) -> list[Bucket]:
        unsummed = self._unsummed[1] if self._unsummed is not None else None
        held = [bucket for bucket, _ in self._buckets]
        return held if unsummed is None else [*held, unsummed]

    def _sum(self) -> None:
        """Wait, on the reduction stream, for the reduction that was issued last and sum it."""
        if self._unsummed is not None:
            (work, bucket), self._unsummed = self._unsummed, None
            work.wait()
            if bucket is not None:
                self._buckets.append((bucket, self._streams.record_reduction()))

    def _holds_bucket(self) -> bool:
        return self._unsummed is not None and self._unsummed[1] is not None


def reductions_on(streams: Streams, waiting: WaitingTime) -> Reductions:
    """The reductions of a device and transport."""
    if streams.asynchronous:
        return StreamReductions(waiting, streams)
    return Reductions(waiting)
