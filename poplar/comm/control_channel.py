"""The control channel: small host values exchanged between ranks, separate from tensors.

It uses shared memory or gloo on the CPU, so an exchange needs no GPU synchronization and works
while tensors are in flight. All ranks call `exchange` and `exchange_objects` in the same order.
"""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from poplar.comm.copies import to_bytes
from poplar.comm.group import Group
from poplar.comm.point_to_point import Channel, Exchange, Message, message_tag
from poplar.comm.rendezvous import Rendezvous
from poplar.comm.shared_memory_work import SharedMemoryWork

T = TypeVar("T")


class Control:
    """The control channel of one group."""

    def __init__(self, group: Group, rendezvous: Rendezvous | None = None) -> None:
        """With a rendezvous, which must not be used otherwise, exchanges use shared memory."""
        self.group = group
        self._rendezvous = rendezvous
        self._exchanges = itertools.count()
        self._broadcasts = itertools.count()
        self._unflushed: list[Exchange] = []

    def exchange(self, values: Tensor, *, what: str) -> Callable[[], list[Tensor]]:
        """Start to exchange 1-D `values` of equal length; call the result to get all of them."""
        group = self.group
        own = values.contiguous()
        if self._rendezvous is not None:
            return self._exchange_in_memory(self._rendezvous, own, what)
        received = [torch.empty_like(own) for _ in range(group.size)]
        received[group.rank] = own
        work = self._exchange_messages(own, received, what)

        def collect() -> list[Tensor]:
            work.wait()
            return received

        return collect

    def exchange_objects(self, value: T, *, what: str) -> list[T]:
        """Every rank's `value` (picklable), in rank order. Collective."""
        payload = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        sizes = [
            int(size)
            for size in self.exchange(torch.tensor([payload.numel()], device="cpu"), what=what)()
        ]
        received = [torch.empty(size, dtype=torch.uint8, device="cpu") for size in sizes]
        received[self.group.rank] = payload
        if self._rendezvous is not None:
            received = self._exchange_in_memory(self._rendezvous, payload, what, sizes)()
        else:
            self._exchange_messages(payload, received, what).wait()
        objects: list[Any] = [pickle.loads(to_bytes(data)) for data in received]
        return objects

    def broadcast_integer(self, value: int) -> None:
        """Send one integer to every other rank without waiting.

        Each of them calls `receive_integer` with this rank; this rank calls `flush` at the end.
        """
        message = torch.tensor([value], device="cpu")
        self._unflushed.append(self._broadcast(message, incoming=False, peers=self._peers()))

    def flush(self) -> None:
        """Wait until all broadcast integers of this rank have been sent."""
        while self._unflushed:
            self._unflushed.pop(0).wait()

    def receive_integer(self, source: int) -> int:
        """The next integer that group rank `source` broadcasts."""
        value = torch.zeros(1, dtype=torch.int64, device="cpu")
        self._broadcast(value, incoming=True, peers=[source]).wait()
        return int(value)

    def _exchange_in_memory(
        self, rendezvous: Rendezvous, own: Tensor, what: str, sizes: Sequence[int] | None = None
    ) -> Callable[[], list[Tensor]]:
        numels = [own.numel()] * self.group.size if sizes is None else sizes
        collective = rendezvous.post(own)
        received: list[Tensor] = []

        def read() -> None:
            for peer, numel in enumerate(numels):
                if peer == self.group.rank:
                    received.append(own)
                else:
                    view = rendezvous.peer_view(peer, collective, own.dtype, 0, numel, total=numel)
                    received.append(view.clone())

        work = SharedMemoryWork(rendezvous, collective, what, read)

        def collect() -> list[Tensor]:
            work.wait()
            return received

        return collect

    def _peers(self) -> list[int]:
        return [peer for peer in range(self.group.size) if peer != self.group.rank]

    def _exchange_messages(self, own: Tensor, received: list[Tensor], what: str) -> Exchange:
        messages = [Message(peer, own, incoming=False) for peer in self._peers()]
        messages += [Message(peer, received[peer], incoming=True) for peer in self._peers()]
        tag = message_tag(self.group, Channel.EXCHANGES, next(self._exchanges))
        return Exchange(self.group, self.group.control_group, messages, tag=tag, what=what)

    def _broadcast(self, value: Tensor, *, incoming: bool, peers: list[int]) -> Exchange:
        tag = message_tag(self.group, Channel.BROADCASTS, next(self._broadcasts))
        messages = [Message(peer, value, incoming=incoming) for peer in peers]
        what = "the broadcast of the collective order"
        return Exchange(self.group, self.group.control_group, messages, tag=tag, what=what)
