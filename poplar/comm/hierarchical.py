"""The transport across hosts: shared memory on each host, and each byte sent between hosts once.

The ranks of a host add their values on the host first, and share received values. So each slice
crosses the network once per host instead of once per rank. The relaying between hosts
is split evenly over the ranks of a host (`Hosts.relay_assignments`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from poplar.comm.bucket import Bucket, Codec
from poplar.comm.collective_queue import CollectiveQueue
from poplar.comm.communicator import CachedBytes, Communicator, Work, own_slice
from poplar.comm.copies import copy
from poplar.comm.group import Group
from poplar.comm.host_topology import Hosts, Piece
from poplar.comm.point_to_point import Exchange, Message
from poplar.comm.process_group import all_to_all, reshard
from poplar.comm.rendezvous import Rendezvous
from poplar.comm.shard_layout import Layout
from poplar.comm.shared_memory import SharedMemoryCommunicator
from poplar.comm.shared_memory_work import SharedMemoryWork
from poplar.system.trace import Trace
from poplar.values.errors import CollectiveTimeout

_EXTRA_TIMEOUT = timedelta(seconds=2)


@dataclass(frozen=True, eq=False)
class HostGroup:
    """The ranks of one host as a group of their own; errors use the ranks of the whole group."""

    group: Group
    ranks: tuple[int, ...]

    @property
    def rank(self) -> int:
        return self.ranks.index(self.group.rank)

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def timeout(self) -> timedelta:
        # A rank that waits for another host must time out first, and notify the ranks of its host.
        return self.group.timeout + _EXTRA_TIMEOUT

    @property
    def failures(self) -> list[CollectiveTimeout]:
        return self.group.failures

    @property
    def on_abort(self) -> dict[Any, Callable[[], None]]:
        return self.group.on_abort

    def abort(self, reason: str) -> None:
        self.group.abort(reason)

    @property
    def trace(self) -> Trace:
        return self.group.trace

    def report(self, reason: str) -> None:
        self.group.report(reason)

    def timeout_error(self, what: str, peers: Sequence[int], cause: str) -> CollectiveTimeout:
        return self.group.timeout_error(what, [self.ranks[peer] for peer in peers], cause)


class HierarchicalCommunicator(Communicator):
    """Uneven collectives over several hosts, with any number of CPU ranks on each.

    Sums are taken on each host in rank order, rounded to the wire dtype, and added in host order.
    So the bits depend on which ranks share a host.
    """

    name = "hierarchical"
    reduction_order = "host"

    def __init__(self, group: Group, hosts: Hosts, rendezvous: Rendezvous) -> None:
        """`rendezvous`: of the ranks of this host, a `HostGroup`."""
        super().__init__(group)
        self._rendezvous = rendezvous
        self._intra_host = SharedMemoryCommunicator(rendezvous)
        self._queue = CollectiveQueue(group)
        self._hosts, self.hosts = hosts, hosts.by_rank
        self._host = hosts.host_of(group.rank)
        self._host_ranks = hosts.members[self._host]

    def buffer(
        self, layout: Layout, dtype: torch.dtype, device: torch.device, codec: Codec | None = None
    ) -> Bucket:
        return self._intra_host.buffer(layout, dtype, device, codec)

    def share(self, data: Tensor) -> Tensor:
        return self._intra_host.share(data)

    def wait_for_readers(self, data: Tensor) -> None:
        self._intra_host.wait_for_readers(data)

    def cached_bytes(self) -> CachedBytes:
        return self._intra_host.cached_bytes()

    def trim(self) -> None:
        self._intra_host.trim()

    def reduce_scatter(
        self,
        bucket: Bucket,
        out: Tensor,
        *,
        accumulate: bool,
        what: str,
        squares: Tensor | None = None,
    ) -> Work:
        rank, layout, data = self.group.rank, bucket.layout, bucket.data
        low, high = layout.bounds(rank)
        # Allocate before posting: if memory runs out, the collective can be issued again.
        by_host = [
            torch.empty(high - low, dtype=data.dtype, device="cpu") for _ in self._hosts.members
        ]
        collective = self._rendezvous.post(data, unread=(low, high))
        messages = [
            Message(sender, by_host[host][piece.start - low : piece.stop - low], incoming=True)
            for host, sender, piece in self._hosts.relays_of_other_hosts(layout, self._host)
            if piece.owner == rank
        ]
        position = self._queue.reserve()
        incoming = self._exchange(messages, what, position)

        def reduce() -> float:
            outgoing = []
            for piece in self._relay_assignment(layout):
                total = torch.empty(piece.numel, dtype=data.dtype, device="cpu")
                self._sum_on_host(bucket, collective, total, piece.start)
                message = Message(piece.owner, total, incoming=False)
                outgoing.append(self._exchange([message], what, position))
            self._sum_on_host(bucket, collective, by_host[self._host], low)
            waited = incoming.wait()
            if low < high:
                bucket.codec.reduce(out, by_host, accumulate, squares)
            return waited + sum(exchange.wait() for exchange in outgoing)

        return SharedMemoryWork(self._rendezvous, collective, what, reduce)

    def all_gather(
        self, data: Tensor, layout: Layout, *, what: str, own: Tensor | None = None
    ) -> Work:
        target = own_slice(data, layout, self.group.rank)
        last_collective = self._rendezvous.last_collective(data)
        if own is not None and own.data_ptr() != target.data_ptr():
            copy(target, own)
        shared = self._allocate_shared(layout, data.dtype)
        copy(shared[: target.numel()], target)
        position = self._queue.reserve()
        incoming = self._receive_assigned(shared, layout, what, position)
        outgoing = self._send_slice(target, layout, what, position)
        collective = self._rendezvous.post(shared)

        def gather() -> float:
            waited = self._rendezvous.wait_until_over(last_collective)
            waited += self._complete_gather(collective, data, shared, layout, incoming, what)
            return waited + outgoing.wait()

        return SharedMemoryWork(self._rendezvous, collective, what, gather)

    def broadcast(self, data: Tensor, source: int, *, what: str) -> None:
        flat = data.view(-1)
        source_host = self._hosts.host_of(source)
        leaders = [
            ranks[0] for host, ranks in enumerate(self._hosts.members) if host != source_host
        ]
        if self.group.rank == source:
            messages = [Message(leader, flat, incoming=False) for leader in leaders]
        elif self.group.rank in leaders:
            messages = [Message(source, flat, incoming=True)]
        else:
            messages = []
        with self._rendezvous.abort_on_error(what):
            self._queue.exchange(messages, what).wait()
        leader = source if source_host == self._host else self._host_ranks[0]
        self._intra_host.broadcast(data, self._host_ranks.index(leader), what=what)

    def all_to_all(
        self,
        received: Tensor,
        sent: Tensor,
        received_sizes: Sequence[int],
        sent_sizes: Sequence[int],
        *,
        what: str,
    ) -> Work:
        sizes = received_sizes, sent_sizes
        with self._rendezvous.abort_on_error(what):
            exchange = all_to_all(self._queue, received, sent, *sizes, what)
        collective = self._rendezvous.post(received[:0])
        return SharedMemoryWork(self._rendezvous, collective, what, exchange.wait)

    def reshard(self, shard: Tensor, old: Layout, new: Layout, *, what: str) -> Tensor:
        with self._rendezvous.abort_on_error(what):
            return reshard(self._queue, shard, old, new, what)

    # Between hosts.

    def _exchange(self, messages: list[Message], what: str, position: int) -> Exchange:
        """Start an exchange; if it cannot be started, abort, so that the host's ranks raise.

        Its wait runs within a `SharedMemoryWork`, which aborts on errors in the same way.
        """
        with self._rendezvous.abort_on_error(what):
            return self._queue.exchange(messages, what, position=position)

    def _relay_assignment(self, layout: Layout) -> list[Piece]:
        """The pieces that this rank relays for its host."""
        index = self._host_ranks.index(self.group.rank)
        return self._hosts.relay_assignments(layout, self._host)[index]

    def _send_slice(self, own: Tensor, layout: Layout, what: str, position: int) -> Exchange:
        """Send this rank's slice to the ranks that relay it to their hosts."""
        rank, low = self.group.rank, layout.bounds(self.group.rank)[0]
        messages = [
            Message(relay, own[piece.start - low : piece.stop - low], incoming=False)
            for _, relay, piece in self._hosts.relays_of_other_hosts(layout, self._host)
            if piece.owner == rank
        ]
        return self._exchange(messages, what, position)

    def _receive_assigned(
        self, shared: Tensor, layout: Layout, what: str, position: int
    ) -> Exchange:
        """Receive the pieces that this rank relays, behind its own slice."""
        begin = layout.size(self.group.rank)
        messages = []
        for piece in self._relay_assignment(layout):
            part = shared[begin : begin + piece.numel]
            messages.append(Message(piece.owner, part, incoming=True))
            begin += piece.numel
        return self._exchange(messages, what, position)

    # Within this host.

    def _sum_on_host(self, bucket: Bucket, collective: int, out: Tensor, low: int) -> None:
        """The sum over this host's ranks of their elements from `low` on, in the wire dtype."""
        if out.numel():
            parts = self._intra_host.slices(collective, bucket.data, low, out.numel())
            bucket.codec.reduce_each([out], parts)

    def _allocate_shared(self, layout: Layout, dtype: torch.dtype) -> Tensor:
        """Shared memory for this rank's slice and, behind it, the pieces that it relays."""
        numel = layout.size(self.group.rank)
        relayed = sum(piece.numel for piece in self._relay_assignment(layout))
        return self._rendezvous.allocate_tensor(dtype, numel + relayed)

    def _complete_gather(
        self,
        collective: int,
        data: Tensor,
        shared: Tensor,
        layout: Layout,
        incoming: Exchange,
        what: str,
    ) -> float:
        """Fill `data` from what this rank has received and what the host's other ranks share."""
        waited = incoming.wait()
        self._rendezvous.mark_written(collective)
        waited += self._rendezvous.wait_until_written(collective, what)
        assignments = self._hosts.relay_assignments(layout, self._host)
        for index, (rank, pieces) in enumerate(zip(self._host_ranks, assignments, strict=True)):
            own = [] if rank == self.group.rank else [Piece(rank, *layout.bounds(rank))]
            begin = layout.size(rank) - sum(piece.numel for piece in own)
            for piece in (*own, *pieces):
                if piece.numel:
                    part = (
                        shared[begin : begin + piece.numel]
                        if rank == self.group.rank
                        else self._rendezvous.peer_view(
                            index, collective, data.dtype, begin, piece.numel
                        )
                    )
                    copy(data[piece.start : piece.stop], part)
                begin += piece.numel
        return waited
