"""The control channel: small host values exchanged between ranks, separate from tensors.

It uses shared memory or gloo on the CPU, so an exchange needs no GPU synchronization and works
while tensors are in flight. All ranks call `exchange` and `exchange_objects` in the same order, and
with the same `what`: every rank sends it along, and ranks with different ones raise.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import pickle
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions

from poplar.comm.copies import to_bytes
from poplar.comm.deadline import NoAnswer, wait_until
from poplar.comm.frame import (
    FRAME_SIZE,
    HEADER_SIZE,
    Frame,
    announced_bytes,
    describe_calls,
    fits,
    header_of,
)
from poplar.comm.group import Group
from poplar.comm.host_memory.rendezvous import Rendezvous, SharedMemoryWork
from poplar.comm.point_to_point import Channel, Exchange, Message, close_when_aborted
from poplar.values.errors import CollectiveTimeout

T = TypeVar("T")

_BROADCAST = "the broadcast of the collective order"
_HOST = torch.device("cpu")
_DEVICE_FLAT_BYTES = 1 << 30
"""A device backend splits a large collective into chunks itself: each call costs the host time."""
_PARTS_BETWEEN_HOSTS = 8
"""Flat parameters of a model between hosts, at least: gradients are sent while the backward
computes the next ones, and only the last flat parameter is sent after it."""
_SMALLEST_BETWEEN_HOSTS = 1 << 20
"""Smaller ones are not worth a collective: it costs 1 ms of CPU time on gloo, and 1 MiB takes 8 ms
at 1 Gbit/s."""


class _HostPickler(pickle.Pickler):
    """Pickles tensors as they are on the CPU: another rank may not have or use their device."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Tensor) and value.device.type not in ("cpu", "meta"):
            return value.detach().cpu().__reduce_ex__(pickle.DEFAULT_PROTOCOL)
        return NotImplemented


class Control:
    """The control channel of one group."""

    def __init__(
        self, group: Group, rendezvous: Rendezvous | None = None, *, spans_hosts: bool = False
    ) -> None:
        """With a rendezvous, which must not be used otherwise, exchanges use shared memory."""
        self.group = group
        self.spans_hosts = spans_hosts
        self._rendezvous = rendezvous
        self._exchanges, self._broadcasts = itertools.count(), itertools.count()
        self._unflushed: list[Exchange] = []
        close_when_aborted(group, group.control_group)

    def max_flat_bytes(self, device: torch.device, numel: int) -> int | None:
        """Bytes in fp32 up to which one collective is faster than several; None: no preference.

        `numel` is that of the whole model.
        """
        if self.group.supports(device) and not self.group.is_on_host(device):
            return _DEVICE_FLAT_BYTES
        if not self.spans_hosts:
            return None
        return max(4 * numel // _PARTS_BETWEEN_HOSTS, _SMALLEST_BETWEEN_HOSTS)

    def exchange(self, values: Tensor, *, what: str) -> Callable[[], list[Tensor]]:
        """Start to exchange 1-D `values` of equal length; call the result to get all of them.

        Args:
            values: on the CPU.
            what: the call; equal on all ranks.

        Raises:
            CollectiveTimeout: also the result; names the ranks that are missing, or the calls of
                all ranks if they differ.
        """
        own = values.contiguous()
        if self.group.size == 1:
            return lambda: [own]
        collect = self._start_exchange(own, f"{own.numel()} x {own.dtype}"[:32], what)
        return lambda: [data.view(own.dtype) for data in collect()]

    def exchange_objects(self, value: T, *, what: str) -> list[T]:
        """Every rank's `value` (picklable), in rank order. Collective; `what` as in `exchange`.

        Tensors arrive on the CPU, also this rank's own.
        """
        pickled = io.BytesIO()
        _HostPickler(pickled).dump(value)
        payload = torch.frombuffer(pickled.getbuffer(), dtype=torch.uint8)
        if self.group.size == 1:
            received = [payload]
        else:
            received = self._start_exchange(payload, "an object", what)()
        objects: list[Any] = [pickle.loads(to_bytes(data)) for data in received]
        return objects

    def send_and_receive(self, messages: Sequence[Message], *, what: str) -> None:
        """Send tensors on the CPU to some ranks and receive from others, and wait for all of them.

        Collective. Each message is known to both of its ranks; there is at most one of a size from
        one rank to another.
        """
        self._send(messages, Channel.VALUES, next(self._exchanges), what).wait()

    def broadcast_integer(self, value: int) -> None:
        """Send one integer to every other rank without waiting.

        Each of them calls `receive_integer` with this rank; this rank calls `flush` at the end.
        """
        message = torch.tensor([value], device=_HOST)
        messages = [Message(peer, message, incoming=False) for peer in self.group.peers()]
        self._unflushed.append(self._start_broadcast(messages))

    def flush(self) -> None:
        """Wait until all integers that this rank has broadcast have been sent."""
        while self._unflushed:
            self._unflushed.pop(0).wait()

    def receive_integer(self, source: int) -> int:
        """The next integer that group rank `source` broadcasts."""
        value = torch.zeros(1, dtype=torch.int64, device=_HOST)
        self._start_broadcast([Message(source, value, incoming=True)]).wait()
        return int(value)

    def abort(self, reason: str) -> None:
        """As `Communicator.abort`."""
        self.group.abort(reason)

    def _start_exchange(self, own: Tensor, form: str, what: str) -> Callable[[], list[Tensor]]:
        """Start to exchange frames; call the result to get the values of all ranks as bytes."""
        frame = Frame.of(own, form=form, index=self.group.index, what=what)
        if self._rendezvous is not None:
            return self._exchange_in_memory(self._rendezvous, frame, what)
        return self._exchange_natively(frame, what)

    def _check_calls(self, frame: Frame, headers: Sequence[bytes]) -> None:
        """Raise on all ranks if some are in another call; they have all got these headers."""
        if all(map(frame.is_same_call, headers)):
            return
        reason = describe_calls(self.group.names, headers)
        self.group.abort(reason)  # ranks may wait for this one in a collective of their call
        raise CollectiveTimeout(reason)

    def _exchange_natively(self, frame: Frame, what: str) -> Callable[[], list[Tensor]]:
        """One all-gather of frames, and messages from the ranks whose values do not fit."""
        group, number = self.group, next(self._exchanges)
        received = torch.empty(group.size, FRAME_SIZE, dtype=torch.uint8, device=_HOST)
        options = AllgatherOptions()
        options.timeout, options.asyncOp = group.timeout, True
        group.check()
        try:
            work = group.control_group.allgather([list(received.unbind())], [frame.first], options)
        except RuntimeError as error:
            raise group.fail(what, group.peers(), error) from error

        def collect() -> list[Tensor]:
            self.flush()  # raises what a broadcast of this rank failed with
            group.check()
            wait_for_all_ranks(group, work, what)
            headers = [header_of(row) for row in received]
            self._check_calls(frame, headers)
            sizes = [announced_bytes(header) for header in headers]
            values = [
                row[HEADER_SIZE:][:size] if fits(size) else row.new_empty(size)
                for row, size in zip(received, sizes, strict=True)
            ]
            values[group.rank] = frame.values
            if not all(map(fits, sizes)):
                self._exchange_long_values(values, number, what)
            return values

        return collect

    def _exchange_long_values(self, values: Sequence[Tensor], number: int, what: str) -> None:
        """Send this rank's values, and receive those of other ranks, if they are announced only."""
        group, is_long = self.group, [not fits(data.numel()) for data in values]
        messages = []
        for peer in group.peers():
            if is_long[peer]:
                messages.append(Message(peer, values[peer], incoming=True))
            if is_long[group.rank]:
                messages.append(Message(peer, values[group.rank], incoming=False))
        self._send(messages, Channel.VALUES, number, what).wait()

    def _exchange_in_memory(
        self, rendezvous: Rendezvous, frame: Frame, what: str
    ) -> Callable[[], list[Tensor]]:
        """One post of the whole frame."""
        own_rank, collective = self.group.rank, rendezvous.post(frame.data)
        received: list[Tensor] = []

        def read() -> None:
            def part(peer: int, first: int, size: int) -> Tensor:
                return rendezvous.peer_view(peer, collective, torch.uint8, first, size)

            ranks = range(self.group.size)
            headers = [
                frame.header if peer == own_rank else header_of(part(peer, 0, HEADER_SIZE))
                for peer in ranks
            ]
            self._check_calls(frame, headers)
            for peer, header in enumerate(headers):
                size = announced_bytes(header)
                own = peer == own_rank
                received.append(frame.values if own else part(peer, HEADER_SIZE, size).clone())

        work = SharedMemoryWork(rendezvous, collective, what, read)

        def collect() -> list[Tensor]:
            work.wait()
            return received

        return collect

    def _start_broadcast(self, messages: Sequence[Message]) -> Exchange:
        return self._send(messages, Channel.BROADCASTS, next(self._broadcasts), _BROADCAST)

    def _send(
        self, messages: Sequence[Message], channel: Channel, number: int, what: str
    ) -> Exchange:
        group = self.group.control_group
        return Exchange(self.group, group, messages, channel=channel, number=number, what=what)


def wait_for_all_ranks(group: Group, work: dist.Work, what: str) -> None:
    """Wait on the host for a native collective.

    It ends early if another rank reports a failure.

    Raises:
        CollectiveTimeout: names the ranks that did not take part before the deadline.
    """

    def pause(seconds: float) -> None:
        with contextlib.suppress(RuntimeError):  # a timeout of the wait raises, too
            work.wait(timedelta(seconds=seconds))

    try:
        wait_until(work.get_future().done, group.timeout, group.reports, pause)
    except NoAnswer as error:
        raise group.fail(what, group.peers()) from error
    try:
        work.wait(group.timeout)  # it is over: this raises its error
    except RuntimeError as error:
        raise group.fail(what, group.peers(), error) from error
