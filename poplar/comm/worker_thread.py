"""Runs the collectives of one process group in order, in the caller's thread or in a worker thread.

A blocking call runs in the caller's thread, which saves a thread wake-up (about half of the time of
a small collective). An asynchronous call runs in the worker thread.
"""

from __future__ import annotations

import itertools
import pickle
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from poplar.comm.group import collective_timeout
from poplar.comm.rendezvous import Rendezvous
from poplar.comm.shared_memory import SharedMemoryCommunicator
from poplar.comm.shared_segment import segment_bytes
from poplar.system.trace import Trace
from poplar.values.errors import CollectiveTimeout

T = TypeVar("T")
_TorchWork: Any = dist.Work
"""`Any`: its type stubs have the methods that users call, not those that torch calls."""
_POLL_SECONDS = 0.002
_JOIN_SECONDS = 2.0
"""Time for the worker thread to leave its collective when the process group is destroyed."""


@dataclass(frozen=True, eq=False)
class StoreGroup:
    """A `RankGroup` whose ranks exchange values through a store, before a process group exists."""

    rank: int
    size: int
    timeout: timedelta
    store: Any
    failures: list[CollectiveTimeout] = field(default_factory=list)
    trace: Trace = field(default_factory=Trace)
    on_abort: dict[Any, Callable[[], None]] = field(default_factory=dict)
    _exchanges: Any = field(default_factory=itertools.count)

    def report(self, reason: str) -> None:
        """As `RankGroup.report`: there are no ranks on other hosts."""

    def abort(self, reason: str) -> None:
        """As `RankGroup.abort`."""
        if not self.failures:
            self.failures.append(CollectiveTimeout(reason))
        for stop in list(self.on_abort.values()):
            stop()

    def timeout_error(self, what: str, peers: Sequence[int], cause: str) -> CollectiveTimeout:
        """As `RankGroup.timeout_error`."""
        return collective_timeout(self.rank, self.timeout, what, peers, cause)

    def exchange(self, value: T, /, *, what: str) -> list[T]:
        """As `rendezvous.ExchangeObjects`."""
        number = next(self._exchanges)
        self.store.set(f"poplar/{number}/{self.rank}", pickle.dumps(value))
        deadline = time.monotonic() + self.timeout.total_seconds()
        keys = {rank: f"poplar/{number}/{rank}" for rank in range(self.size)}
        # Poll: `store.wait` would block the store for the caller's own thread.
        while missing := [rank for rank, key in keys.items() if not self.store.check([key])]:
            if self.failures:
                raise self.failures[0]
            if time.monotonic() > deadline:
                raise self.timeout_error(what, missing, "no answer")
            time.sleep(_POLL_SECONDS)
        return [pickle.loads(self.store.get(key)) for key in keys.values()]


class QueuedWork(_TorchWork):  # type: ignore[misc]
    """A queued collective, as a `dist.Work`. A work made from a future would hide its errors."""

    def __init__(
        self,
        what: str,
        run: Callable[[SharedMemoryCommunicator], None],
        results: Sequence[Tensor],
    ) -> None:
        super().__init__()
        self._what, self._run, self._results = what, run, list(results)
        self._is_over = threading.Event()
        self._error: BaseException | None = None
        self._future_lock = threading.Lock()
        self._completion: Any = None
        self._future: Any = None

    def run(self, connect: Callable[[], SharedMemoryCommunicator]) -> None:
        """Run the collective in this thread and complete the work."""
        try:
            # Results may be inference tensors, which can only be written in inference mode.
            with torch.inference_mode():
                comm = connect()
                # Also covers errors before the post, or the next collective would take this place.
                with comm.abort_on_error(self._what):
                    self._run(comm)
        except BaseException as error:
            self.complete(error)
            if not isinstance(error, Exception):
                raise
        else:
            self.complete(None)

    def complete(self, error: BaseException | None) -> None:
        """Complete the work and wake its waiters."""
        with self._future_lock:
            self._error = error
            self._is_over.set()
            completion = self._completion
        if completion is not None:
            # In a thread: callbacks may wait for collectives that this thread has to run.
            threading.Thread(target=completion.set_result, args=(None,), daemon=True).start()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return when the collective is over; the group's own deadline applies too.

        Raises:
            CollectiveTimeout: names the ranks that did not take part, or the collective is not
                over after `timeout`.
        """
        seconds = timeout.total_seconds() if timeout is not None else 0.0
        if not self._is_over.wait(seconds if seconds > 0 else None):
            raise CollectiveTimeout(f"a collective on cpu:poplar is not over after {seconds:g} s")
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        return self._is_over.is_set()

    def is_success(self) -> bool:
        return self._is_over.is_set() and self._error is None

    def exception(self) -> BaseException | None:
        return self._error

    def get_future(self) -> Any:
        """A future whose callbacks run in a separate thread.

        Callbacks may wait for collectives. If several threads issue collectives at the same time,
        ranks may issue them in different orders, as with any backend.
        """
        with self._future_lock:
            if self._future is None:
                self._completion = torch.futures.Future()
                # C++ would take an error set on the future for a value, so a callback raises it.
                self._future = self._completion.then(self._outcome)
                if self._is_over.is_set():
                    self._completion.set_result(None)
        return self._future

    def _outcome(self, _: object) -> list[Tensor]:
        if self._error is not None:
            raise self._error
        return self._results


class WorkerThread:
    """Runs collectives in the order of submission. The first one connects the ranks."""

    def __init__(self, group: StoreGroup) -> None:
        self._group = group
        self._queue: deque[QueuedWork] = deque()
        self._run_lock = threading.Lock()
        """Held by the thread that runs collectives."""
        self._running_thread: int | None = None
        """The thread that holds the lock."""
        self._submitted = threading.Semaphore(0)
        self._is_stopped = False
        self._communicator: SharedMemoryCommunicator | None = None
        self._connect_error: Exception | None = None
        self._thread = threading.Thread(target=self._run_loop, daemon=True)
        self._thread.start()

    def submit(self, work: QueuedWork, *, wait: bool) -> None:
        """Queue a collective. With `wait`, run it and all earlier ones in this thread.

        Raises:
            RuntimeError: the process group was destroyed, or this thread is already running a
                collective of it.
        """
        if self._is_stopped:
            raise RuntimeError(
                f"rank {self._group.rank}: this process group of cpu:poplar was destroyed; make a "
                "new one before the next collective"
            )
        if wait and self._running_thread == threading.get_ident():
            raise RuntimeError(
                f"rank {self._group.rank}: a collective inside another one of the same process "
                "group; a signal handler must not issue any"
            )
        self._queue.append(work)
        if wait or self._is_stopped:  # after a stop, the worker thread may have ended
            self._run_until(work)
        else:
            self._submitted.release()

    def stop(self) -> None:
        """Make running and later collectives fail, and end the worker thread."""
        if self._is_stopped:
            return
        self._is_stopped = True
        self._group.abort(f"rank {self._group.rank}: the process group was destroyed")
        self._submitted.release()
        if threading.current_thread() is not self._thread:
            # A thread inside a collective would abort the interpreter when it exits.
            self._thread.join(_JOIN_SECONDS)

    def _run_loop(self) -> None:
        while not self._is_stopped:
            self._submitted.acquire()
            self._run_until(None)
        self._run_until(None)  # submitted while stopping

    def _run_until(self, last: QueuedWork | None) -> None:
        """Run the queued collectives up to and including `last`; all of them if it is None."""
        with self._run_lock:
            self._running_thread = threading.get_ident()
            try:
                while self._queue and not (last is not None and last.is_completed()):
                    self._queue.popleft().run(self._connect)
            finally:
                self._running_thread = None

    def _connect(self) -> SharedMemoryCommunicator:
        """The communicator. Collective in the first call.

        Raises:
            NotOneHost: as `Rendezvous`.
            CollectiveTimeout: a rank has not issued its first collective.
        """
        if self._connect_error is not None:
            raise self._connect_error
        if self._communicator is None:
            try:
                rendezvous = Rendezvous(
                    self._group, self._group.exchange, segment_bytes(self._group.size)
                )
            except Exception as error:
                self._connect_error = error
                raise
            self._communicator = SharedMemoryCommunicator(rendezvous)
        return self._communicator
