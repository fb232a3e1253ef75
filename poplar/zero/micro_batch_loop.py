"""The micro-batches of one step, for a user's own loop.

Leaving the loop before its end abandons the step, so that the other ranks raise and do not wait. As
a context manager it notices an exception at once. Without, CPython drops the iterator of a `for`
loop when an exception leaves it; if the user has another reference, the next step does it.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from types import TracebackType
from typing import Any, Protocol

from poplar.values.errors import CollectiveTimeout, PoplarError
from poplar.zero.micro_batches import MicroBatch


class UserPasses(Protocol):
    """What runs the passes of a step around the body of a `MicroBatchLoop`."""

    @property
    def left_early(self) -> str:
        """What the other ranks are told if the loop was left before its end."""

    @property
    def has_open_pass(self) -> bool:
        """Whether a pass has begun without which the step is not complete."""

    def enter_user_loop(self, loop: MicroBatchLoop) -> None:
        """The step has been opened, and its passes are those of `loop`."""

    def begin_user_pass(self, micro_batch: MicroBatch, rest: Sequence[MicroBatch]) -> bool:
        """Run a pass up to where the body starts; False if the body has no part in it."""

    def end_user_pass(self, rest: Sequence[MicroBatch]) -> None:
        """End the pass of the body, if there is one; on an error, abandon the step and raise."""

    def finish_user_passes(self) -> None:
        """All passes have ended."""

    def abandon(self, rest: Sequence[MicroBatch], reason: Exception) -> None:
        """End the step without a result, and report `reason` to all ranks."""


class MicroBatchLoop(Iterator[Any]):
    """Yields the micro-batches of this rank; the user runs a backward for each. Collective."""

    def __init__(
        self,
        passes: UserPasses,
        start: Callable[[], Sequence[MicroBatch]],
        call: Callable[[], AbstractContextManager[None]],
        begin: Callable[[], UserPasses | None] | None = None,
    ) -> None:
        """
        Args:
            passes: runs the passes.
            start: opens the step and returns this rank's micro-batches. Collective.
            call: a context for what the loop does around its body, which is collective.
            begin: begins the step before, and returns what runs the passes then; None: the plan
                leaves this rank out, so there is nothing to iterate over. Collective.
        """
        self._passes, self._start, self._call, self._begin = passes, start, call, begin
        self._rest: deque[MicroBatch] | None = None
        """Micro-batches whose passes have not begun; None before the step is opened."""
        self._ended = False
        self._why_ended = ""

    def __enter__(self) -> MicroBatchLoop:
        if self._takes_part():
            with self._call():
                self._open()
        return self

    def _takes_part(self) -> bool:
        """Begin the step, once; whether this rank takes part in it."""
        begin, self._begin = self._begin, None
        if begin is not None:
            self._ended = True
            if (passes := begin()) is not None:
                self._passes, self._ended = passes, False
        return not self._ended

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with suppress(CollectiveTimeout) if error is not None else nullcontext():
            self.close("" if error is None else f"{type(error).__name__}: {error}")

    def __next__(self) -> Any:
        if self._why_ended:
            raise RuntimeError(self._why_ended)
        if self._ended or not self._takes_part():
            raise StopIteration
        # An error before the call begins leaves the loop running: `close` abandons the step.
        with self._call():
            try:
                rest = self._open()
                self._passes.end_user_pass(rest)
                while rest:
                    micro_batch = rest.popleft()
                    if self._passes.begin_user_pass(micro_batch, rest):
                        return micro_batch.batch
                self._passes.finish_user_passes()
            except BaseException:
                self._ended = True
                raise
        self._ended = True
        raise StopIteration

    @property
    def is_running(self) -> bool:
        """Whether the step has been opened, and the loop has not ended."""
        return self._rest is not None and not self._ended

    @property
    def is_open(self) -> bool:
        """Whether it is running, and passes of its step remain or one is open."""
        return self.is_running and (bool(self._rest) or self._passes.has_open_pass)

    def end(self) -> None:
        """Yield nothing more."""
        self._ended = True

    def close(self, reason: str = "", *, why: str = "") -> None:
        """End the loop. Abandon the step on all ranks, if passes remain. Collective then.

        Args:
            reason: what the other ranks are told.
            why: what a later iteration raises.
        """
        if not self.is_running:
            self._why_ended, self._ended = self._why_ended or why, True
            return
        with self._call():
            is_open = self.is_open
            self._why_ended, self._ended = self._why_ended or why, True
            if is_open and self._rest is not None:
                why = f": {reason}" if reason else " (an exception in its body, or break)"
                self._passes.abandon(self._rest, PoplarError(f"{self._passes.left_early}{why}"))
            else:
                self._passes.finish_user_passes()

    def __del__(self, _is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not _is_finalizing():  # module globals may be None by then
            with suppress(CollectiveTimeout):  # all ranks have been stopped
                self.close()

    def _open(self) -> deque[MicroBatch]:
        if self._rest is None:
            micro_batches = self._start()
            self._rest = deque(micro_batches)
            self._passes.enter_user_loop(self)
        return self._rest
