"""The order of the collectives of one process group, and the messages of those on the host."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from poplar.comm.communicator import Work
from poplar.comm.group import Group
from poplar.comm.host_buffers import HostBuffers
from poplar.comm.point_to_point import Channel, Exchange, Message, close_when_aborted


class CollectiveQueue:
    """Numbers the collectives of a group. All ranks must issue them in the same order."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.buffers = HostBuffers()
        self._positions = itertools.count()
        self._unfinished: dict[int, _ChainedWork] = {}
        if group.is_on_host(torch.device("cpu")):
            close_when_aborted(group, group.process_group)

    def calls_natively(self, device: torch.device) -> bool:
        """Whether each collective is one native call; otherwise it is made of messages.

        One rank alone exchanges no messages, so it needs no call either.
        """
        return self.group.size > 1 and not self.group.is_on_host(device)

    def take(self, numel: int, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """An uninitialized buffer on the device of `like`; reused if the backend is on the host."""
        dtype = dtype if dtype is not None else like.dtype
        if self.group.is_on_host(like.device):
            return self.buffers.take(numel, dtype, like.device)
        return like.new_empty(numel, dtype=dtype)

    def put_back(self, like: Tensor, *buffers: Tensor) -> None:
        """Return what `take` gave. Devices reuse memory once it is free."""
        for buffer in buffers if self.group.is_on_host(like.device) else ():
            self.buffers.put_back(buffer)

    def reserve(self) -> int:
        """Reserve a position in the order for an exchange that is issued later. Collective."""
        return next(self._positions)

    def exchange(
        self,
        received: Sequence[Tensor],
        sent: Sequence[Tensor],
        what: str,
        *,
        position: int | None = None,
    ) -> Exchange:
        """Send `sent[r]` to every other rank `r`, and receive `received[r]` from it, on the host.

        Collective if `position`, which several exchanges may share, is not reserved already.
        """
        group, rank, size = self.group, self.group.rank, self.group.size
        position = self.reserve() if position is None else position
        messages = []
        for step in range(1, size):  # next rank first, so that not all send to the same one first
            peer = (rank + step) % size
            messages.append(Message(peer, sent[peer], incoming=False))
            messages.append(Message(peer, received[peer], incoming=True))
        return Exchange(
            group,
            group.process_group,
            messages,
            channel=Channel.TENSORS,
            number=position,
            what=what,
            before_wait=lambda: self._finish_earlier(position),
        )

    @contextmanager
    def after_a_call(self) -> Iterator[None]:
        """A context for the rest of a collective of several calls, once the first has been made.

        After an error, as of a sum that runs out of memory, the collective cannot be issued again:
        the other ranks would take its first call for the next one.
        """
        try:
            yield
        except BaseException as error:
            rank = self.group.name
            self.group.abort(f"rank {rank} failed between two calls of one collective: {error!r}")
            raise

    def chain(
        self, first: Work, then: Callable[[], Work], device: torch.device, position: int
    ) -> Work:
        """Combine two collectives: `then` is issued, at `position`, when `first` has finished.

        On devices that is at once, because only the current stream waits.
        """
        if not self.group.is_on_host(device):
            with self.after_a_call():
                first.wait()
                return then()
        chained = _ChainedWork(first, then, lambda: self._finish_earlier(position + 1))
        self._unfinished[position] = chained
        return chained

    def _finish_earlier(self, position: int) -> float:
        """Finish earlier chained work: it only progresses in a wait, and peers may need it now."""
        waited = 0.0
        for earlier in [number for number in self._unfinished if number < position]:
            waited += self._unfinished[earlier].finish()
            del self._unfinished[earlier]  # stays if it raised: later waits raise the same error
        return waited


class _ChainedWork:
    def __init__(
        self, first: Work, then: Callable[[], Work], finish_in_order: Callable[[], float]
    ) -> None:
        """`finish_in_order` calls `finish` of this work, after that of all earlier chained work."""
        self._first, self._then, self._finish_in_order = first, then, finish_in_order
        self._error: Exception | None = None

    def wait(self) -> float:
        """As `Work.wait`."""
        return self._finish_in_order()

    def finish(self) -> float:
        """Wait for the first collective, issue the second and wait for it."""
        if self._error is not None:
            raise self._error
        try:
            return self._first.wait() + self._then().wait()
        except Exception as error:
            self._error = error
            raise
