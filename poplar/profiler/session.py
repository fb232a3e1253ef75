"""One profiling request on one rank: device, control channel, and how the ranks exchange results.

Every method that communicates is collective: all ranks call it, and all of them get the same result
or an error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

from poplar.comm import Group, connect_control
from poplar.profiler.passes import Passes
from poplar.profiler.request import Request, agree_on
from poplar.zero.agreement import run_on_all_ranks
from poplar.zero.micro_batches import BatchSplitter

T = TypeVar("T")


class Session:
    """What every instrument of the profiler needs."""

    def __init__(self, request: Request, group: Group) -> None:
        self.request = request
        self.group = group
        self.control = connect_control(group)
        self.agreed = agree_on(request, self.control)
        self.device = self.agreed.device
        self.asynchronous = self.device.type == "cuda"
        """The device computes while the host goes on."""

    def passes(self) -> Passes:
        """Plain passes of the model, on samples in the dtype of compute."""
        example = self.request.example
        if self.agreed.dtype is not None:
            example = BatchSplitter(None, False, self.agreed.dtype).cast(example)
        return Passes(self.request.model, self.request.loss_fn, example, self.device)

    def on_all_ranks(self, work: Callable[[], T], doing: str) -> list[T]:
        """The results of `work` by rank.

        Args:
            work: runs on this rank; may fail.
            doing: what it does, for the error message on the other ranks.

        Raises:
            Exception: whatever `work` raised on this rank.
            RankFailed: it failed on another rank.
        """
        return self.exchange(run_on_all_ranks(self.control, work, doing=doing))

    def on_first_rank(self, work: Callable[[], T], doing: str) -> T:
        """The result of `work` on rank 0, or its error, on all ranks."""
        answer: T | Exception | None = None
        if self.group.rank == 0:
            try:
                answer = work()
            except Exception as error:
                answer = error
        answer = self.control.exchange_objects(answer, what=doing)[0]
        if isinstance(answer, Exception):
            raise answer
        return cast("T", answer)

    def exchange(self, value: T) -> list[T]:
        """The values of all ranks."""
        return self.control.exchange_objects(value, what="exchanging measurements")

    def from_first_rank(self, value: T) -> T:
        """The value of rank 0."""
        return self.exchange(value)[0]
