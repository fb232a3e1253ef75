"""Messages of one rank to ranks that take no part in its collectives.

They go through the store of the process group, so the sender never waits: a thread writes the
messages, and computes them before. A message may need values of a device that come later. The
thread and the readers sleep between two looks, so short steps share one write.
"""

from __future__ import annotations

import _thread
import atexit
import pickle
import queue
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from torch.distributed.distributed_c10d import _get_process_group_store

from poplar.comm.deadline import NoAnswer, wait_until
from poplar.comm.failure_reports import StoreUnavailable
from poplar.comm.group import Group
from poplar.values.errors import CollectiveTimeout

MOST_KEPT = 4096
"""Writes that a reader may be behind."""
_LOOK_SECONDS = 0.05
"""Between two looks, at messages or at the store. A write for each step made steps of 12 ms 6 %
longer."""
_REPLY_SECONDS = 0.4
"""Between two looks of the sender at replies, after a write."""
_EXIT_SECONDS = 5.0
"""How long a sender that ends waits for readers to read its last message."""


class Announcements:
    """Numbered messages of the first active rank to the ranks that are left out."""

    def __init__(self, group: Group, readers: tuple[int, ...], number: int) -> None:
        """
        Args:
            group: the sender and the readers, and any other ranks.
            readers: their ranks.
            number: of these messages, among all in the group.
        """
        self._group, self._readers = group, readers
        self._store: Any = _get_process_group_store(group.process_group)
        self._prefix = (
            f"poplar/announcements/{group.process_group.group_name}/{group.index}/{number}"
        )
        self._writes = 0
        """That were made, or read."""
        self._messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
        """To write, as functions; or read, and not returned yet."""
        self._sent = self._written = 0
        self._reply_counts = dict.fromkeys(readers, 0)
        self.replies: dict[int, tuple[float, Any]] = {}
        """On the sender, by reader, its latest reply, after the `time.monotonic` of its arrival."""

    def send(self, message: Callable[[], Any]) -> None:
        """Send what a function returns, which is called in another thread; do not wait for it."""
        self._messages.put(message)
        self._sent += 1
        if self._sent == 1:
            _SENDERS.append(self)
            _thread.start_new_thread(self._write_all, ())

    def _write_all(self) -> None:
        looked = time.monotonic()
        with suppress(Exception):  # of the ranks' failure, or of their store, as at their end
            while True:
                functions = [self._messages.get()]
                while not self._messages.empty():
                    functions.append(self._messages.get())
                written = pickle.dumps([function() for function in functions])
                self._store.set(f"{self._prefix}/{self._writes + 1}", written)
                self._writes += 1
                self._written += len(functions)
                if self._writes > MOST_KEPT:
                    self._store.delete_key(f"{self._prefix}/{self._writes - MOST_KEPT}")
                if time.monotonic() >= looked + _REPLY_SECONDS:
                    self._read_replies()
                    looked = time.monotonic()
                time.sleep(_LOOK_SECONDS)

    def _read_replies(self) -> None:
        for rank in self._readers:
            while self._store.check([key := self._reply_key(rank)]):
                self.replies[rank] = time.monotonic(), pickle.loads(self._store.get(key))
                self._store.delete_key(key)
                self._reply_counts[rank] += 1

    def reply(self, value: Any) -> None:
        """Give the sender a value, as a reader; do not wait for it."""
        rank = self._group.rank
        with suppress(Exception):  # the ranks' store does not answer, which `next` reports
            self._store.set(self._reply_key(rank), pickle.dumps(value))
            self._reply_counts[rank] += 1

    def next(self, what: str) -> Any:
        """The next message; waits for it.

        Args:
            what: what the sender does meanwhile, for errors.

        Raises:
            CollectiveTimeout: it did not come before the deadline, or an active rank has failed.
        """
        if not self._messages.empty():
            return self._messages.get()
        self._writes += 1
        group, key = self._group, f"{self._prefix}/{self._writes}"

        def pause(seconds: float) -> None:
            time.sleep(min(seconds, _LOOK_SECONDS))

        try:
            wait_until(lambda: self._store.check([key]), group.timeout, group.reports, pause)
            for message in pickle.loads(self._store.get(key)):
                self._messages.put(message)
            self._store.set(self._seen_key(group.rank), str(self._writes))
        except Exception as error:
            raise CollectiveTimeout(
                f"rank {group.name}, which the plan leaves out, waited for the active ranks in "
                f"{what} (deadline {group.timeout.total_seconds():g} s). Cause: "
                f"{self._cause(error)}"
            ) from error
        return self._messages.get()

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

    def _reply_key(self, rank: int) -> str:
        """Of the next reply of a rank."""
        return f"{self._prefix}/reply {self._reply_counts[rank] + 1} of {rank}"

    def _seen_key(self, rank: int) -> str:
        return f"{self._prefix}/read by {rank}"

    def finish(self, deadline: float) -> None:
        """Wait, as the sender, until the last message has been read. The store may end after it."""
        with suppress(Exception):
            keys = [self._seen_key(rank) for rank in self._readers]

            def is_read() -> bool:
                last = str(self._writes).encode()
                return self._written == self._sent and all(
                    self._store.check([key]) and self._store.get(key) == last for key in keys
                )

            while time.monotonic() < deadline and not is_read():
                time.sleep(_LOOK_SECONDS)


_SENDERS: list[Announcements] = []


@atexit.register
def _finish_all() -> None:
    deadline = time.monotonic() + _EXIT_SECONDS
    for sender in _SENDERS:
        sender.finish(deadline)
