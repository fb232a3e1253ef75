"""One collective made of several works of torch.distributed, with one deadline for all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch.distributed as dist

from poplar.comm.group import Group
from poplar.errors import CollectiveTimeout

# Once one peer has timed out, the others are only checked for whether they have finished.
_CHECK_TIMEOUT = timedelta(milliseconds=50)


class ProcessGroupWork:
    """Issued works of torch.distributed; each knows the peers that it waits for."""

    def __init__(
        self,
        group: Group,
        start: Callable[[], Sequence[tuple[dist.Work, Sequence[int]]]],
        *,
        what: str,
        peers: Sequence[int],
        blocks_host: bool,
        before_wait: Callable[[], float] | None = None,
        finish: Callable[[], None] | None = None,
    ) -> None:
        """Start the collective.

        Args:
            group: the participating ranks.
            start: issues the works; returns each with the peers (group ranks) that it needs.
            what: the collective's name in errors.
            peers: the peers that errors name if the collective cannot be started.
            blocks_host: a wait blocks the calling thread, so it needs a deadline. Otherwise only a
                stream waits, and the backend's own watchdog limits it (NCCL).
            before_wait: called first in `wait`; returns the seconds that it waited.
            finish: called once, when all works have finished.

        Raises:
            CollectiveTimeout: the collective cannot be started because a connection is closed.
        """
        self._group, self._what = group, what
        self._before_wait, self._finish = before_wait, finish
        self._blocks_host = blocks_host
        try:
            self._works = list(start())
        except RuntimeError as error:
            raise self._timeout_error(peers, error) from error

    def wait(self) -> float:
        """As `Work.wait`."""
        waited = self._before_wait() if self._before_wait is not None else 0.0
        start = time.perf_counter()
        if self._blocks_host:
            self._wait_for_peers()
        else:
            for work, _ in self._works:
                work.wait()
        waited += time.perf_counter() - start
        self._group.trace.add("wait", self._what, start)
        if self._finish is not None:
            self._finish()
        self._works, self._before_wait, self._finish = [], None, None
        return waited

    def _wait_for_peers(self) -> None:
        deadline = time.monotonic() + self._group.timeout.total_seconds()
        missing: set[int] = set()
        cause: RuntimeError | None = None
        for work, peers in self._works:
            left = timedelta(seconds=max(deadline - time.monotonic(), 0.001))
            try:
                work.wait(min(left, _CHECK_TIMEOUT) if missing else left)
            except RuntimeError as error:
                missing.update(peers)
                cause = cause or error
        if missing:
            raise self._timeout_error(sorted(missing), cause) from cause

    def _timeout_error(self, peers: Sequence[int], cause: RuntimeError | None) -> CollectiveTimeout:
        reason = str(cause).splitlines()[0] if cause is not None and str(cause) else "unknown"
        return self._group.timeout_error(self._what, peers, reason)
