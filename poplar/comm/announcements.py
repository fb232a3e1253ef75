"""Messages of one rank to ranks that take no part in its collectives.

They go through the store of the process group, so the sender never waits: a thread writes the
messages, and computes them before. A message may need values of a device that come later. The
thread and the readers sleep between two looks, so short steps share one write. While there is
nothing to send, the thread writes now and then that its process lives: a reader's deadline counts
the silence of the sender, however long a call of it takes.
"""

from __future__ import annotations

import _thread
import atexit
import math
import os
import pickle
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from torch.distributed.distributed_c10d import _get_process_group_store

from poplar.comm.deadline import NoAnswer, wait_until
from poplar.comm.failure_reports import StoreUnavailable
from poplar.comm.group import Group
from poplar.values.errors import CollectiveTimeout

MOST_KEPT = 1 << 15
"""Writes that a reader may be behind: those of 27 minutes or more, as there are at most 20 a second
of 1 KB. The store keeps them only until all readers have read them."""
_LOOK_SECONDS = 0.05
"""Between two looks, at messages or at the store. A write for each step made steps of 12 ms 6 %
longer."""
_REPLY_SECONDS = 0.4
"""Between two looks of the sender at what readers have written, after a write."""
_ALIVE_PART = 0.1
"""Part of the deadline after which a sender without messages writes that it lives."""
_EXIT_SECONDS = 5.0
"""How long a sender that ends waits for readers that do not go on reading."""


@dataclass(frozen=True)
class _Place:
    """Where the messages are: a store, and the keys in it."""

    store: Any
    prefix: str

    def write(self, number: int) -> str:
        """Of a write, which count from 1."""
        return f"{self.prefix}/{number}"

    @property
    def first_kept(self) -> str:
        """Of the number of the first write that is kept, if earlier ones were not read."""
        return f"{self.prefix}/first kept"

    def read_by(self, rank: int) -> str:
        """Of the number of the last write that a reader has read."""
        return f"{self.prefix}/read by {rank}"

    def reply(self, number: int, rank: int) -> str:
        """Of a reply of a reader, which count from 1."""
        return f"{self.prefix}/reply {number} of {rank}"


class Announcements:
    """Numbered messages of the first active rank to the ranks that are left out.

    The sender's thread does not keep this object alive. It ends after it, once all is read.
    """

    def __init__(self, group: Group, readers: tuple[int, ...], number: int) -> None:
        """
        Args:
            group: the sender and the readers, and any other ranks.
            readers: their ranks. Any other rank is the sender.
            number: of these messages, among all in the group.
        """
        self._group = group
        name = group.process_group.group_name
        prefix = f"poplar/announcements/{name}/{group.index}/{number}"
        self._place = place = _Place(_get_process_group_store(group.process_group), prefix)
        self._received: deque[Any] = deque()
        """Messages that were read, and not returned yet."""
        self._reads = self._replies = 0
        if group.rank not in readers:
            self._writer = _Writer(place, readers, group.timeout.total_seconds())
            weakref.finalize(self, self._writer.close).atexit = False

    def send(self, message: Callable[[], Any]) -> None:
        """Send what a function returns, which is called in another thread; do not wait for it."""
        self._writer.send(message)

    @property
    def replies(self) -> dict[int, tuple[float, Any]]:
        """On the sender, by reader, its latest reply, after the `time.monotonic` of its arrival."""
        return self._writer.replies

    def reply(self, value: Any) -> None:
        """Give the sender a value, as a reader; do not wait for it."""
        key = self._place.reply(self._replies + 1, self._group.rank)
        with suppress(Exception):  # the ranks' store does not answer, which `next` reports
            self._place.store.set(key, pickle.dumps(value))
            self._replies += 1

    def next(self, what: str) -> Any:
        """The next message; waits for it.

        Args:
            what: what the sender does meanwhile, for errors.

        Raises:
            CollectiveTimeout: the sender was silent until the deadline, an active rank has failed,
                or this rank has not read for so long that what it needs is not kept any more.
        """
        group = self._group
        try:
            while not self._received:
                self._read()
        except Exception as error:
            raise CollectiveTimeout(
                f"rank {group.name}, which the plan leaves out, waited for the active ranks in "
                f"{what} (deadline {group.timeout.total_seconds():g} s). Cause: "
                f"{self._cause(error)}"
            ) from error
        return self._received.popleft()

    def _read(self) -> None:
        """Wait for the next write, and read it."""
        group, place, number = self._group, self._place, self._reads + 1

        def is_written() -> bool:
            if place.store.check([place.write(number)]):
                return True
            if place.store.check([place.first_kept]):
                missed = int(place.store.get(place.first_kept)) - number
                if missed > 0:
                    raise NoAnswer(
                        f"this rank was stopped or slow for so long that it is "
                        f"{missed + MOST_KEPT} messages behind, of which {MOST_KEPT} are kept"
                    )
            return False

        def pause(seconds: float) -> None:
            time.sleep(min(seconds, _LOOK_SECONDS))

        wait_until(is_written, group.timeout, group.reports, pause)
        messages = pickle.loads(place.store.get(place.write(number)))
        self._reads = number
        self._received.extend(messages)
        place.store.set(place.read_by(group.rank), str(number))
        if not messages and group.reports is not None:
            group.reports.watch()  # as `wait_until` does if nothing is written for a while

    def _cause(self, error: Exception) -> str:
        """Why a wait failed: what the active ranks have reported, if they have."""
        reports = self._group.reports
        if not isinstance(error, NoAnswer):
            return f"the ranks' store does not answer ({error}); rank 0 may have ended"
        if reports is None or not reports.seen.is_set():
            return str(error)
        # So that the others do not take this rank for the one that failed.
        reports.publish(f"rank {self._group.name} waited for other ranks")
        with suppress(StoreUnavailable):
            found = reports.collect([r for r in range(self._group.size) if r != self._group.rank])
            causes = [one for one in found.values() if one.is_cause] or list(found.values())
            return "; ".join(dict.fromkeys(one.reason for one in causes))
        return str(error)


class _Writer:
    """Writes the messages of a sender, in a thread, until it is closed and readers have read all.

    Then it waits only for readers that go on reading.
    """

    def __init__(self, place: _Place, readers: tuple[int, ...], silence: float) -> None:
        """`silence`: seconds after which a rank that writes nothing is lost."""
        self._place, self._silence = place, silence
        self._messages: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        """To write, as functions; None is the end."""
        self._pause = silence * _ALIVE_PART
        self._writes, self._last_message, self._deleted = 0, 0, 0
        """Numbers of writes: of the latest one, the latest with messages, and the last deleted."""
        self._read_by = dict.fromkeys(readers, 0)
        """By reader, the last write that it has read."""
        self._reply_counts = dict.fromkeys(readers, 0)
        self.replies: dict[int, tuple[float, Any]] = {}
        self._ended = threading.Event()
        _WRITERS.add(self)
        _thread.start_new_thread(self._run, ())

    def send(self, message: Callable[[], Any]) -> None:
        """As `Announcements.send`."""
        self._messages.put(message)

    def close(self) -> None:
        """Send nothing after what was sent; do not wait for it."""
        self._messages.put(None)

    def finish(self) -> None:
        """Close, and wait for the end of the thread; the store may end after it."""
        self.close()
        before: tuple[int, ...] | None = None
        while before != (before := (self._writes, *self._read_by.values())):
            if self._ended.wait(_EXIT_SECONDS):
                return
        self._silence = 0.0
        self._ended.wait(1.0)

    def _run(self) -> None:
        with suppress(Exception):  # of the ranks' failure, or of their store, as at their end
            self._write_all()
            self._wait_for_readers()
        # Nothing is left that this thread would free while the process ends, which aborts then.
        _WRITERS.discard(self)
        self._ended.set()

    def _write_all(self) -> None:
        looked, is_open = -math.inf, True
        while is_open:
            taken = self._taken()
            functions = [function for function in taken if function is not None]
            is_open = len(functions) == len(taken)
            if functions or is_open:
                self._write([function() for function in functions])
            if time.monotonic() >= looked + _REPLY_SECONDS:
                self._look()
                looked = time.monotonic()
            time.sleep(_LOOK_SECONDS)

    def _taken(self) -> list[Callable[[], Any] | None]:
        """What there is to write; empty if there is nothing for a while."""
        taken = []
        with suppress(queue.Empty):
            taken.append(self._messages.get(timeout=self._pause))
            while True:
                taken.append(self._messages.get_nowait())
        return taken

    def _write(self, messages: list[Any]) -> None:
        """Write messages; none says that this process lives."""
        self._place.store.set(self._place.write(self._writes + 1), pickle.dumps(messages))
        self._writes += 1
        if messages:
            self._last_message = self._writes

    def _look(self) -> None:
        """Note the replies and what has been read, which is then deleted."""
        store, place = self._place.store, self._place
        for rank in self._read_by:
            while store.check([key := place.reply(self._reply_counts[rank] + 1, rank)]):
                self.replies[rank] = time.monotonic(), pickle.loads(store.get(key))
                store.delete_key(key)
                self._reply_counts[rank] += 1
            if store.check([key := place.read_by(rank)]):
                self._read_by[rank] = int(store.get(key))
        read, too_many = min(self._read_by.values()), self._writes - MOST_KEPT
        if too_many > read:
            store.set(place.first_kept, str(too_many + 1))
        while self._deleted < max(read, too_many):
            store.delete_key(place.write(self._deleted + 1))
            self._deleted += 1

    def _wait_for_readers(self) -> None:
        """Wait until all messages have been read, while a reader goes on reading."""
        before, since = dict(self._read_by), time.monotonic()
        while min(before.values()) < self._last_message:
            if time.monotonic() >= since + self._silence:
                return
            time.sleep(_LOOK_SECONDS)
            self._look()
            if self._read_by != before:
                before, since = dict(self._read_by), time.monotonic()


_WRITERS: set[_Writer] = set()
os.register_at_fork(after_in_child=_WRITERS.clear)  # threads are not forked


@atexit.register
def _finish_all() -> None:
    for writer in list(_WRITERS):
        writer.finish()
