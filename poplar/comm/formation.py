"""Which ranks make a group now, agreed in the store of their process group.

A rank that makes a group joins: it writes a key of its own. Once all ranks have joined, the first
rank publishes the number of the group, with the joins that it is made of. So a group does not
depend on what its ranks have called before, and no collective is issued before all ranks are there.
A rank that waits in vain leaves nothing behind, and takes part in the next group. A rank that fails
itself ends the attempt: a rank that comes later first raises the reason, and joins the next attempt
with its next call.
"""

from __future__ import annotations

import contextlib
import pickle
import queue
import threading
import time
import uuid
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_process_group_store

from poplar.comm.deadline import NoAnswer, call_until
from poplar.comm.failure_reports import FailureReports, call_in_thread

_LOOK_SECONDS = (5e-4, 5e-2)
"""The first and the longest interval between two looks into the store."""
_ANSWER_SECONDS = 2.0
"""Time for the store to answer a rank that gives up."""


@dataclass(frozen=True)
class Join:
    """What a rank writes that makes a group."""

    token: str
    """Of this join alone."""
    attempt: tuple[int, int]
    """The number of the last group, and of the attempts since then in which a rank has failed."""
    subgroups: str
    """The name of the subgroups that it can use again; empty: it has none."""
    waits: bool = True
    """False: it has given up."""


@dataclass(frozen=True)
class Formed:
    """What the first rank publishes once all ranks have joined."""

    index: int
    """Counts the groups of the process group."""
    subgroups: str
    """The name of the subgroups, which the ranks have or make now."""
    tokens: tuple[str, ...]
    """Of the joins, by rank."""


class Formation:
    """An attempt of one rank to make a group of all ranks of a process group."""

    def __init__(self, process_group: dist.ProcessGroup, subgroups: str = "") -> None:
        """Join. `subgroups` is the name of those that this rank can use again."""
        self._process_group = process_group
        self._rank, self._size = process_group.rank(), process_group.size()
        self._store: Any = _get_process_group_store(process_group)
        self._prefix = f"poplar/groups/{process_group.group_name}"
        self._stopped = threading.Event()
        attempt: tuple[int, int] = self._last().index, 0
        before: Join | None = self._read(self._rank)
        if before is not None and before.attempt[0] == attempt[0]:
            attempt = before.attempt
            # A failure has ended the attempt that this rank was in: now it joins the next one.
            if self._reports(attempt).has_any():
                attempt = attempt[0], attempt[1] + 1
        self._join = Join(uuid.uuid4().hex, attempt, subgroups)
        self._write(self._rank, self._join)

    @property
    def name(self) -> str:
        """Of the attempt in failure reports. Ranks that have failed themselves report there."""
        return _name(self._join.attempt)

    def wait(self, timeout: timedelta, reports: FailureReports | None) -> Formed:
        """Wait until all ranks have joined.

        Raises:
            RuntimeError: some have not before the timeout, or one has failed.
        """
        return call_until(lambda: self._form(timeout.total_seconds()), timeout, reports)

    def leave(self) -> list[int]:
        """Give up. Returns the ranks that this one waited for, as far as the store answers."""
        self._stopped.set()
        with contextlib.suppress(queue.Empty):
            missing, _ = call_in_thread(self._withdraw).get(timeout=_ANSWER_SECONDS)
            return missing or []
        return []

    def fail(self, reason: str) -> None:
        """Give up, and let the other ranks raise `reason` in this attempt or in its group."""
        self._reports(self._join.attempt).publish(reason, is_cause=True)
        self.leave()

    def _form(self, seconds: float) -> Formed:
        end, interval = time.monotonic() + seconds, _LOOK_SECONDS[0]
        while not self._stopped.is_set() and time.monotonic() < end:
            last = self._last()
            if self._rank == 0 and self._join.token not in last.tokens:
                last = self._publish(last)
            if self._join.token in last.tokens:
                return last
            self._stopped.wait(interval)
            interval = min(2 * interval, _LOOK_SECONDS[1])
        raise NoAnswer("no answer")

    def _publish(self, last: Formed) -> Formed:
        """The next group, as the first rank publishes it; the last one if a rank is missing."""
        ranks = range(self._size)
        if not self._store.check([self._key(rank) for rank in ranks]):
            return last
        joins: list[Join] = [self._read(rank) for rank in ranks]
        if not all(join.waits and join.attempt == self._join.attempt for join in joins):
            return last
        names = {join.subgroups for join in joins}
        shared = names.pop() if len(names) == 1 else ""
        tokens = tuple(join.token for join in joins)
        formed = Formed(last.index + 1, shared or uuid.uuid4().hex, tokens)
        self._write("last", formed)
        return formed

    def _withdraw(self) -> list[int]:
        """Write that this rank has given up. Returns the ranks that it waited for."""
        self._write(self._rank, replace(self._join, waits=False))
        joins = {rank: self._read(rank) for rank in range(self._size) if rank != self._rank}
        here = [r for r, join in joins.items() if join and join.attempt == self._join.attempt]
        absent = [rank for rank in joins if rank not in here]
        # Ranks that have given up, too, were there.
        return absent or [r for r in here if not joins[r].waits] or [0] * (self._rank > 0)

    def _reports(self, attempt: tuple[int, int]) -> FailureReports:
        return FailureReports.of(self._process_group, _name(attempt))

    def _last(self) -> Formed:
        last: Formed | None = self._read("last")
        return last if last is not None else Formed(0, "", ())

    def _key(self, name: int | str) -> str:
        return f"{self._prefix}/{name}"

    def _read(self, name: int | str) -> Any:
        key = self._key(name)
        return pickle.loads(self._store.get(key)) if self._store.check([key]) else None

    def _write(self, name: int | str, value: Join | Formed) -> None:
        self._store.set(self._key(name), pickle.dumps(value))


def _name(attempt: tuple[int, int]) -> str:
    return f"{attempt[0]}.{attempt[1]}"
