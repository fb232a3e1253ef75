"""The micro-batches of one step, for a user's own loop.

Leaving the loop before its end abandons the step, so that the other ranks raise and do not wait. As
a context manager it notices an exception at once. Without, CPython drops the iterator of a `for`
loop when an exception leaves it; if the user has another reference, the next step does it.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from poplar.errors import PoplarError
from poplar.zero.micro_batches import MicroBatch

if TYPE_CHECKING:
    from poplar.zero.step import Step


class MicroBatchLoop(Iterator[Any]):
    """Yields the micro-batches that have samples; the user runs a backward for each. Collective."""

    def __init__(self, step: Step, start: Callable[[], Sequence[MicroBatch]]) -> None:
        """`start`: opens the step and returns this rank's micro-batches. Collective."""
        self._step, self._start = step, start
        self._rest: deque[MicroBatch] | None = None
        """Micro-batches whose passes have not begun; None before the step is opened."""
        self._ended = False
        self._why_ended = ""

    def __enter__(self) -> MicroBatchLoop:
        self._open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close("" if error is None else f"{type(error).__name__}: {error}")

    def __next__(self) -> Any:
        if self._why_ended:
            raise RuntimeError(self._why_ended)
        if self._ended:
            raise StopIteration
        try:
            rest = self._open()
            self._step.end_user_pass(rest)
            while rest:
                micro_batch = rest.popleft()
                if self._step.begin_pass(micro_batch):
                    if micro_batch.samples:
                        return micro_batch.batch
                    self._step.end_user_pass(rest)
            self._step.finish_user_passes()
        except BaseException:
            self._ended = True
            raise
        self._ended = True
        raise StopIteration

    @property
    def is_open(self) -> bool:
        """Whether the step has been opened, and passes of it remain or one is open."""
        if self._ended or self._rest is None:
            return False
        return bool(self._rest) or self._step.has_open_pass

    def close(self, reason: str = "", *, why: str = "") -> None:
        """Abandon the step on all ranks, if passes remain. Collective then.

        Args:
            reason: what the other ranks are told.
            why: what a later iteration raises.
        """
        was_open = self.is_open
        self._why_ended = self._why_ended or why
        self._ended = True
        if was_open and self._rest is not None:
            text = f"{_LEFT_EARLY}: {reason}" if reason else f"{_LEFT_EARLY} ({_CAUSES})"
            self._step.abandon(self._rest, PoplarError(text))

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self.close()

    def _open(self) -> deque[MicroBatch]:
        if self._rest is None:
            micro_batches = self._start()
            self._rest = deque(micro_batches)
            self._step.enter_user_loop(self)
        return self._rest


_LEFT_EARLY = "the micro_batches loop was left early"
_CAUSES = "an exception in its body, or break"
