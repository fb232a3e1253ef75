"""Failures that ranks report through the store of their process group.

A rank whose wait fails only knows that some rank is missing. It reports this, and the other ranks
then do the same: their waits fail too, or they see the report. Ranks that report are alive, so the
error names the others. The store may not answer, so every access runs in a thread of its own,
if there is memory for one.
"""

from __future__ import annotations

import _thread
import atexit
import contextlib
import os
import pickle
import queue
import threading
import time
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar, cast

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_process_group_store

P = ParamSpec("P")
T = TypeVar("T")

GRACE_SECONDS = 1.5
"""Time for the other ranks to report, after a rank has."""
_WATCH_SECONDS = 0.5
_READ_SECONDS = 0.05
_ANSWER_SECONDS = 2.0
"""Time for the store to answer."""


class StoreUnavailable(RuntimeError):
    """The store has failed or does not answer in time."""


@dataclass(frozen=True)
class Report:
    """What one rank has reported."""

    reason: str
    is_cause: bool
    """This rank has failed itself; otherwise it waited for others."""


def call_in_thread(call: Callable[[], T]) -> queue.SimpleQueue[tuple[T | None, Exception | None]]:
    """Where the result or the error of a call will be. The thread does not keep the process alive.

    The caller waits as long as it wants, and the call then goes on in vain.
    """
    answers: queue.SimpleQueue[tuple[T | None, Exception | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            answers.put((call(), None))
        except Exception as error:
            answers.put((None, error))

    try:
        # `Thread.start` would wait for ever for a thread that has no memory to begin.
        _thread.start_new_thread(run, ())
    except RuntimeError:  # out of memory, which has to be reported, if need be late
        run()
    return answers


def weak_call(method: Callable[P, None]) -> Callable[P, None]:
    """A function that calls a bound method while its object lives, and does not keep it alive."""
    weak = weakref.WeakMethod(method)

    def call(*arguments: P.args, **options: P.kwargs) -> None:
        alive = weak()
        if alive is not None:
            alive(*arguments, **options)

    return call


class FailureReports:
    """The reports of all ranks of a group, as one of its ranks sees them."""

    def __init__(
        self, store: Any, prefix: str, rank: int, size: int, outer: Sequence[str] = ()
    ) -> None:
        """
        Args:
            prefix: of the keys; the same on all ranks, and used by no other group.
            outer: the prefixes of the groups of the calls that this group is made in. A rank that
                fails there does not come as far as this group.
        """
        self.rank, self.size = rank, size
        self._store, self.prefixes = store, (prefix, *outer)
        self._is_watching = self._is_cause = False
        self.seen = threading.Event()
        """Set once any rank has reported a failure, if `watch` was called."""

    @classmethod
    def of(
        cls, process_group: dist.ProcessGroup, name: str, outer: Sequence[str] = ()
    ) -> FailureReports:
        """The reports of the group with this name in a process group, in its store."""
        prefix = f"poplar/failures/{process_group.group_name}/{name}"
        store = _get_process_group_store(process_group)
        return cls(store, prefix, process_group.rank(), process_group.size(), outer)

    def publish(self, reason: str, *, is_cause: bool = False) -> None:
        """Report a failure of this rank, as far as the store answers.

        It replaces an earlier report, but a wait does not replace a cause, from which it follows.
        """
        if self._is_cause and not is_cause:
            return
        self._is_cause = is_cause
        value = pickle.dumps(Report(reason, is_cause))

        def write(store: Any) -> None:
            store.set(f"{self.prefixes[0]}/{self.rank}", value)
            store.set(f"{self.prefixes[0]}/any", b"1")

        with contextlib.suppress(StoreUnavailable):  # `collect` tells
            self._access(write, _ANSWER_SECONDS)

    def collect(self, expected: Collection[int]) -> dict[int, Report]:
        """The reports by rank, once all expected ranks have reported or the grace time is over.

        Raises:
            StoreUnavailable: the store has failed or does not answer.
        """

        def read(store: Any) -> dict[int, Report]:
            found: dict[int, Report] = {}
            deadline = time.monotonic() + GRACE_SECONDS
            while True:
                for rank in set(range(self.size)) - found.keys():
                    keys = [f"{prefix}/{rank}" for prefix in self.prefixes]
                    own = [pickle.loads(store.get(key)) for key in keys if store.check([key])]
                    if own:  # a rank that failed in one group may have waited in another since
                        found[rank] = max(own, key=lambda report: report.is_cause)
                if set(expected) <= found.keys() or time.monotonic() > deadline:
                    return found
                time.sleep(_READ_SECONDS)

        return self._access(read, GRACE_SECONDS + _ANSWER_SECONDS)

    def has_any(self) -> bool:
        """Whether a rank has reported a failure in this group."""
        return bool(self._store.check([f"{self.prefixes[0]}/any"]))

    def causes(self) -> dict[int, str]:
        """The reasons of other ranks that have failed themselves, as far as the store answers."""
        with contextlib.suppress(StoreUnavailable):
            return {
                rank: report.reason
                for rank, report in sorted(self.collect(()).items())
                if report.is_cause and rank != self.rank
            }
        return {}

    def diagnose(self, suspects: Collection[int], cause: str, what: str) -> tuple[list[int], str]:
        """The ranks that are the cause of a failed wait, and a description of it.

        All ranks in the wait, or in a later one, must call this or `publish` about the same time.

        Args:
            suspects: the other ranks that this rank waited for.
            what: the collective; other ranks may have waited in another one.
        """
        self.publish(f"rank {self.rank} waited for other ranks in {what!r} ({cause})")
        peers = {rank for rank in range(self.size) if rank != self.rank}
        try:
            reports = self.collect(peers - set(suspects) or peers)
        except StoreUnavailable as error:
            return sorted(suspects), (
                f"{cause}; nor can the ranks' store be read ({error}): the process that serves it, "
                "usually rank 0's, may have ended"
            )
        failed = sorted(rank for rank in peers & reports.keys() if reports[rank].is_cause)
        if failed:
            return failed, "; ".join(reports[rank].reason for rank in failed)
        silent = peers - reports.keys()
        if silent:
            return sorted(silent & set(suspects) or silent), cause
        return sorted(suspects), f"they had stopped waiting: {_summary(reports, sorted(peers))}"

    def watch(
        self, notify: Callable[[], None] | None = None, look: Callable[[], None] | None = None
    ) -> None:
        """Start to look for reports of other ranks.

        Args:
            notify: a bound method that the looking thread calls at the first report.
            look: a bound method that it calls regularly until then.

        The thread ends with this object, and keeps neither it nor the methods' objects alive.
        """
        if not self._is_watching:
            calls = [weak_call(call) if call else lambda: None for call in (notify, look)]
            with contextlib.suppress(RuntimeError):  # out of memory: there are deadlines only
                keys = [f"{prefix}/any" for prefix in self.prefixes]
                _Watch(weakref.ref(self), self._store, keys, *calls).start()
                self._is_watching = True

    def _access(self, access: Callable[[Any], T], seconds: float) -> T:
        try:
            value, error = call_in_thread(lambda: access(self._store)).get(timeout=seconds)
        except queue.Empty:
            raise StoreUnavailable(f"no answer in {seconds:g} s") from None
        if error is not None:
            raise StoreUnavailable(str(error).partition("\n")[0]) from error
        return cast("T", value)


def _summary(reports: Mapping[int, Report], ranks: Sequence[int]) -> str:
    """What the ranks have reported; ranks in the same collective once, and at most three."""
    first: dict[str, str] = {}
    for rank in ranks:
        reason = reports[rank].reason
        first.setdefault(reason.removeprefix(f"rank {rank}"), reason)
    return "; ".join(list(first.values())[:3])


class _Watch:
    """Polls the store until a rank has reported a failure or the reports are no longer needed."""

    def __init__(
        self,
        reports: weakref.ref[FailureReports],
        store: Any,
        keys: Sequence[str],
        notify: Callable[[], None],
        look: Callable[[], None],
    ) -> None:
        self._reports, self._store, self._keys = reports, store, keys
        self._notify, self._look = notify, look
        self._stopped, self._ended = threading.Event(), threading.Event()

    def start(self) -> None:
        """Begin to poll, in a thread that does not keep the process alive."""
        _thread.start_new_thread(self._run, ())
        _WATCHES.add(self)

    def _run(self) -> None:
        try:
            self._poll()
        finally:
            self._ended.set()

    def _poll(self) -> None:
        while self._reports() is not None:
            found = False
            with contextlib.suppress(Exception):  # without a store there are deadlines only
                found = any(self._store.check([key]) for key in self._keys)
            if found:
                self._see()
                return
            self._look()
            if self._stopped.wait(_WATCH_SECONDS):
                return

    def _see(self) -> None:
        reports = self._reports()
        if reports is not None:
            reports.seen.set()
        self._notify()

    def stop(self) -> None:
        self._stopped.set()
        self._ended.wait(1.0)


_WATCHES: weakref.WeakSet[_Watch] = weakref.WeakSet()
os.register_at_fork(after_in_child=_WATCHES.clear)  # threads are not forked


@atexit.register
def _stop_watches() -> None:
    # A thread that returns from the store while the interpreter exits would abort the process.
    for watch in list(_WATCHES):
        watch.stop()
