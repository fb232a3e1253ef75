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
from torch._C._distributed_c10d import AllgatherOptions

from poplar.comm.copies import to_bytes
from poplar.comm.group import Group
from poplar.comm.point_to_point import (
    Channel,
    Exchange,
    Message,
    close_connections,
    message_tag,
)
from poplar.comm.rendezvous import Rendezvous
from poplar.comm.shared_memory_work import SharedMemoryWork
from poplar.comm.work import wait_for_all_ranks

T = TypeVar("T")

_HOST = torch.device("cpu")
_DEVICE_FLAT_BYTES = 1 << 30
"""A device backend splits a large collective into chunks itself: each call costs the host time."""
_PARTS_BETWEEN_HOSTS = 8
"""Flat parameters of a model between hosts, at least: gradients are sent while the backward
computes the next ones, and only the last flat parameter is sent after it."""
_SMALLEST_BETWEEN_HOSTS = 1 << 20
"""Smaller ones are not worth a collective: it costs 1 ms of CPU time on gloo, and 1 MiB takes 8 ms
at 1 Gbit/s."""


class Control:
    """The control channel of one group."""

    def __init__(
        self, group: Group, rendezvous: Rendezvous | None = None, *, spans_hosts: bool = False
    ) -> None:
        """With a rendezvous, which must not be used otherwise, exchanges use shared memory."""
        self.group = group
        self.spans_hosts = spans_hosts
        self._rendezvous = rendezvous
        self._broadcasts = itertools.count()
        self._unflushed: list[Exchange] = []

    def max_flat_bytes(self, device: torch.device, numel: int) -> int | None:
        """The size in fp32 up to which one collective is faster than several; None: no preference.

        Args:
            device: of the tensors that are sent.
            numel: elements of the whole model.
        """
        if self.group.supports(device) and not self.group.is_on_host(device):
            return _DEVICE_FLAT_BYTES
        if not self.spans_hosts:
            return None
        return max(4 * numel // _PARTS_BETWEEN_HOSTS, _SMALLEST_BETWEEN_HOSTS)

    def exchange(self, values: Tensor, *, what: str) -> Callable[[], list[Tensor]]:
        """Start to exchange 1-D `values` of equal length; call the result to get all of them.

        Raises:
            CollectiveTimeout: also the result; names the ranks that are missing.
        """
        own = values.contiguous()
        if self.group.size == 1:
            return lambda: [own]
        if self._rendezvous is not None:
            return self._exchange_in_memory(self._rendezvous, own, what)
        return self._exchange_natively(own, what)

    def exchange_objects(self, value: T, *, what: str) -> list[T]:
        """Every rank's `value` (picklable), in rank order. Collective."""
        payload = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        length = torch.tensor([payload.numel()], device=_HOST)
        sizes = [int(size) for size in self.exchange(length, what=what)()]
        if self._rendezvous is not None:
            received = self._exchange_in_memory(self._rendezvous, payload, what, sizes)()
        else:
            padded = torch.zeros(max(sizes), dtype=torch.uint8, device=_HOST)
            padded[: payload.numel()] = payload
            received = self.exchange(padded, what=what)()
        objects: list[Any] = [
            pickle.loads(to_bytes(data[:size])) for data, size in zip(received, sizes, strict=True)
        ]
        return objects

    def broadcast_integer(self, value: int) -> None:
        """Send one integer to every other rank without waiting.

        Each of them calls `receive_integer` with this rank; this rank calls `flush` at the end.
        """
        tag, message = self._next_broadcast(), torch.tensor([value], device=_HOST)
        self._forward(message, self.group.rank, tag)

    def flush(self) -> None:
        """Wait until all integers that this rank has broadcast or passed on have been sent."""
        while self._unflushed:
            self._unflushed.pop(0).wait()

    def receive_integer(self, source: int) -> int:
        """The next integer that group rank `source` broadcasts. It is passed on to other ranks."""
        group, tag = self.group, self._next_broadcast()
        value = torch.zeros(1, dtype=torch.int64, device=_HOST)
        sender = broadcast_parent(group.rank, source, group.size)
        self._start([Message(sender, value, incoming=True)], tag).wait()
        self._forward(value, source, tag)
        return int(value)

    def abort(self, reason: str) -> None:
        """As `Communicator.abort`."""
        self.group.abort(reason)
        close_connections(self.group, self.group.control_group)
        if self._rendezvous is not None:
            self._rendezvous.abort(reason)

    def _exchange_natively(self, own: Tensor, what: str) -> Callable[[], list[Tensor]]:
        """One all-gather of bytes, because gloo does not gather all dtypes."""
        group = self.group
        received = own.new_empty(group.size, own.numel())
        options = AllgatherOptions()
        options.timeout, options.asyncOp = group.timeout, True
        group.check()
        try:
            work = group.control_group.allgather(
                [list(received.view(torch.uint8).unbind())], [own.view(torch.uint8)], options
            )
        except RuntimeError as error:
            raise group.fail(what, group.peers(), error) from error

        def collect() -> list[Tensor]:
            self.flush()  # the other ranks need what this one passes on before they get here
            group.check()
            wait_for_all_ranks(group, work, what)
            return list(received.unbind())

        return collect

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

    def _next_broadcast(self) -> int:
        return message_tag(self.group, Channel.BROADCASTS, next(self._broadcasts))

    def _forward(self, value: Tensor, source: int, tag: int) -> None:
        children = broadcast_children(self.group.rank, source, self.group.size)
        messages = [Message(child, value, incoming=False) for child in children]
        self._unflushed.append(self._start(messages, tag))

    def _start(self, messages: Sequence[Message], tag: int) -> Exchange:
        what = "the broadcast of the collective order"
        return Exchange(self.group, self.group.control_group, messages, tag=tag, what=what)


def broadcast_parent(rank: int, source: int, size: int) -> int:
    """The rank from which `rank` receives what `source` broadcasts: a binomial tree."""
    position = (rank - source) % size
    return (source + (position & (position - 1))) % size  # without its lowest bit


def broadcast_children(rank: int, source: int, size: int) -> list[int]:
    """The ranks to which `rank` passes on what `source` broadcasts, the largest subtree first."""
    position = (rank - source) % size
    lowest = position & -position if position else 1 << (size - 1).bit_length()
    steps = [1 << bit for bit in reversed(range(lowest.bit_length() - 1))]
    return [(source + position + step) % size for step in steps if position + step < size]
