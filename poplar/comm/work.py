"""Works of torch.distributed that make one collective, with one deadline for all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch.distributed as dist

from poplar.comm.group import Group
from poplar.errors import CollectiveTimeout

# Once one peer has been found missing, the others are only asked whether they are there.
_LAST_CALL = timedelta(milliseconds=50)


class InFlight:
    """What has been issued, and knows whom each part of it waits for."""

    def __init__(
        self,
        group: Group,
        start: Callable[[], Sequence[tuple[dist.Work, Sequence[int]]]],
        *,
        what: str,
        peers: Sequence[int],
        holds_up: bool,
        before: Callable[[], float] | None = None,
        finish: Callable[[], None] | None = None,
    ) -> None:
        """Start it.

        Args:
            group: who takes part.
            start: issues it; returns works, each with the peers (group ranks) that it needs.
            what: names it in errors.
            peers: whom errors name if it can't be started.
            holds_up: waits hold the caller up, so they need a deadline; else they are for a stream,
                and the backend's own watchdog holds it (NCCL).
            before: called when somebody waits, first; returns seconds of being held up.
            finish: called once, when all works are over.

        Raises:
            CollectiveTimeout: it can't be started: a connection is gone.
        """
        self._group, self._what = group, what
        self._before, self._finish = before, finish
        self._holds_up = holds_up
        try:
            self._works = list(start())
        except RuntimeError as error:
            raise self._failure(peers, error) from error

    def wait(self) -> float:
        """As `Pending.wait`."""
        held_up = self._before() if self._before is not None else 0.0
        began = time.perf_counter()
        if self._holds_up:
            self._wait_for_peers()
        else:
            for work, _ in self._works:
                work.wait()
        held_up += time.perf_counter() - began
        self._group.trace.add("wait", self._what, began)
        if self._finish is not None:
            self._finish()
        self._works, self._before, self._finish = [], None, None
        return held_up

    def _wait_for_peers(self) -> None:
        deadline = time.monotonic() + self._group.timeout.total_seconds()
        missing: set[int] = set()
        cause: RuntimeError | None = None
        for work, peers in self._works:
            left = timedelta(seconds=max(deadline - time.monotonic(), 0.001))
            try:
                work.wait(min(left, _LAST_CALL) if missing else left)
            except RuntimeError as error:
                missing.update(peers)
                cause = cause or error
        if missing:
            raise self._failure(sorted(missing), cause) from cause

    def _failure(self, peers: Sequence[int], cause: RuntimeError | None) -> CollectiveTimeout:
        said = str(cause).splitlines()[0] if cause is not None and str(cause) else "unknown"
        return self._group.failure(self._what, peers, said)
