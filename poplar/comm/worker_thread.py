"""Collectives of one process group, one after the other, in the caller's thread or beside it.

Who waits at once runs them itself, which saves waking another thread (about half of the time of a
small one). What shall go on while the caller does other things is run by a thread of this queue.
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
from poplar.comm.shared_segment import addresses
from poplar.errors import CollectiveTimeout
from poplar.system.trace import Trace

T = TypeVar("T")
_Work: Any = dist.Work
"""Its type stubs show methods as users call them; torch calls them in another way."""
_POLL_SECONDS = 0.002
_LAST_SECONDS = 2.0
"""For the thread to leave what it is at, once its process group is destroyed."""


@dataclass(frozen=True, eq=False)
class Ranks:
    """As `Members`; these know each other by a store, before there is a process group."""

    rank: int
    size: int
    timeout: timedelta
    store: Any
    failures: list[CollectiveTimeout] = field(default_factory=list)
    trace: Trace = field(default_factory=Trace)
    _turns: Any = field(default_factory=itertools.count)

    def failure(self, what: str, peers: Sequence[int], cause: str) -> CollectiveTimeout:
        """As `Members.failure`."""
        return collective_timeout(self.rank, self.timeout, what, peers, cause)

    def exchange(self, value: T, /, *, what: str) -> list[T]:
        """As `board.Exchange`."""
        turn = next(self._turns)
        self.store.set(f"poplar/{turn}/{self.rank}", pickle.dumps(value))
        deadline = time.monotonic() + self.timeout.total_seconds()
        keys = {rank: f"poplar/{turn}/{rank}" for rank in range(self.size)}
        # Asking again and again, since `wait` would keep the store from the caller's own thread.
        while missing := [rank for rank, key in keys.items() if not self.store.check([key])]:
            if self.failures:
                raise self.failures[0]
            if time.monotonic() > deadline:
                raise self.failure(what, missing, "no answer")
            time.sleep(_POLL_SECONDS)
        return [pickle.loads(self.store.get(key)) for key in keys.values()]


class Job(_Work):  # type: ignore[misc]
    """A collective, and the work that torch waits for: one made of a future hides its errors."""

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
        self._futures = threading.Lock()
        self._ended: Any = None
        self._future: Any = None

    def run(self, meet: Callable[[], SharedMemoryCommunicator]) -> None:
        """Here and now; whoever waits is told how it ended."""
        try:
            # Results may be inference tensors, which nothing else may write to.
            with torch.inference_mode():
                comm = meet()
                # What fails before it has been posted counts too: the next would take its place.
                with comm.or_give_up(self._what):
                    self._run(comm)
        except BaseException as error:
            self.end(error)
            if not isinstance(error, Exception):
                raise
        else:
            self.end(None)

    def end(self, error: BaseException | None) -> None:
        """Tell whoever waits."""
        with self._futures:
            self._error = error
            self._is_over.set()
            ended = self._ended
        if ended is not None:
            # Callbacks may wait for collectives, which nobody else would run.
            threading.Thread(target=ended.set_result, args=(None,), daemon=True).start()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return when it is over, which the group's own deadline limits too.

        Raises:
            CollectiveTimeout: names the ranks that did not take part; or it is not over yet after
                `timeout`.
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
        """Its callbacks run in a thread of their own.

        They may wait for collectives. Where several issue some at the same time, or the caller does
        beside them, ranks may do so in different orders, as on any backend.
        """
        with self._futures:
            if self._future is None:
                self._ended = torch.futures.Future()
                # C++ takes an error that is set for a value; one raised in a callback it knows.
                self._future = self._ended.then(self._outcome)
                if self._is_over.is_set():
                    self._ended.set_result(None)
        return self._future

    def _outcome(self, _: object) -> list[Tensor]:
        if self._error is not None:
            raise self._error
        return self._results


class WorkerThread:
    """Runs collectives in the order in which they come. The ranks meet at the first one."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._queue: deque[Job] = deque()
        self._turn = threading.Lock()
        """Held by whoever runs jobs."""
        self._runner: int | None = None
        """The thread that holds it."""
        self._wanted = threading.Semaphore(0)
        self._is_stopped = False
        self._communicator: SharedMemoryCommunicator | None = None
        self._trouble: Exception | None = None
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def put(self, job: Job, *, wait: bool) -> None:
        """Run it: now, after all that came before, if the caller waits; else beside the caller.

        Raises:
            RuntimeError: the process group was destroyed, or this thread is inside a collective of
                it already.
        """
        if self._is_stopped:
            raise RuntimeError(
                f"rank {self._ranks.rank}: this process group of cpu:poplar was destroyed; make a "
                "new one before the next collective"
            )
        if wait and self._runner == threading.get_ident():
            raise RuntimeError(
                f"rank {self._ranks.rank}: a collective inside another one of the same process "
                "group; a signal handler must not issue any"
            )
        self._queue.append(job)
        if wait or self._is_stopped:  # nobody else may be there to run it
            self._run_until(job)
        else:
            self._wanted.release()

    def stop(self) -> None:
        """What is under way, or comes later, fails."""
        if self._is_stopped:
            return
        self._is_stopped = True
        why = f"rank {self._ranks.rank}: the process group was destroyed"
        if self._communicator is not None:
            self._communicator.give_up(why)
        elif not self._ranks.failures:
            self._ranks.failures.append(CollectiveTimeout(why))
        self._wanted.release()
        if threading.current_thread() is not self._thread:
            # A thread that is inside a collective when the interpreter ends would abort it.
            self._thread.join(_LAST_SECONDS)

    def _serve(self) -> None:
        while not self._is_stopped:
            self._wanted.acquire()
            self._run_until(None)
        self._run_until(None)  # what came in between

    def _run_until(self, last: Job | None) -> None:
        """Run what is queued, up to a job; what comes after it is not this caller's to wait for."""
        with self._turn:
            self._runner = threading.get_ident()
            try:
                while self._queue and not (last is not None and last.is_completed()):
                    self._queue.popleft().run(self._meet)
            finally:
                self._runner = None

    def _meet(self) -> SharedMemoryCommunicator:
        """What ranks talk through; collective for the first job.

        Raises:
            NotOneHost: as `Board`.
            CollectiveTimeout: a rank has not come to its first collective.
        """
        if self._trouble is not None:
            raise self._trouble
        if self._communicator is None:
            try:
                board = Rendezvous(self._ranks, self._ranks.exchange, addresses(self._ranks.size))
            except Exception as error:
                self._trouble = error
                raise
            self._communicator = SharedMemoryCommunicator(board)
        return self._communicator
