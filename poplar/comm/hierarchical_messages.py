"""The hierarchical transport over gloo: messages within each host and between hosts.

As in `hierarchical`, the ranks of a host add their values on the host first, and share received
values. It gives the same bits, without shared memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from poplar.comm.algorithms import gather_direct
from poplar.comm.bucket import Bucket
from poplar.comm.collective_queue import CollectiveQueue
from poplar.comm.communicator import CachedBytes, CallbackWork, Communicator, Work, own_slice
from poplar.comm.group import Group
from poplar.comm.host_topology import Hosts, Piece
from poplar.comm.point_to_point import Message
from poplar.comm.process_group import ProcessGroupCommunicator, all_to_all, reshard
from poplar.comm.shard_layout import Layout


class HierarchicalMessageCommunicator(Communicator):
    """Uneven collectives over several hosts, with any number of CPU ranks on each."""

    name = "hierarchical:process_group"
    reduction_order = "host"

    def __init__(self, group: Group, hosts: Hosts, host_group: Group) -> None:
        """`host_group`: the ranks of this host, ascending."""
        super().__init__(group)
        self._hosts, self.hosts = hosts, hosts.by_rank
        self._host = hosts.host_of(group.rank)
        self._host_ranks = hosts.members[self._host]
        self._inter_queue, self._intra_queue = CollectiveQueue(group), CollectiveQueue(host_group)
        self._intra_host = ProcessGroupCommunicator(host_group)

    def reduce_scatter(
        self,
        bucket: Bucket,
        out: Tensor,
        *,
        accumulate: bool,
        what: str,
        squares: Tensor | None = None,
    ) -> Work:
        return self._reduce(bucket, out, accumulate, squares, what)

    def all_gather(
        self, data: Tensor, layout: Layout, *, what: str, own: Tensor | None = None
    ) -> Work:
        if own is not None:
            own_slice(data, layout, self.group.rank).copy_(own)
        return self._gather(data, layout, what)

    def cached_bytes(self) -> CachedBytes:
        return self._intra_host.cached_bytes()

    def broadcast(self, data: Tensor, source: int, *, what: str) -> None:
        flat, source_host = data.view(-1), self._hosts.host_of(source)
        leaders = [
            ranks[0] for host, ranks in enumerate(self._hosts.members) if host != source_host
        ]
        if self.group.rank == source:
            messages = [Message(leader, flat, incoming=False) for leader in leaders]
        elif self.group.rank in leaders:
            messages = [Message(source, flat, incoming=True)]
        else:
            messages = []
        self._inter_queue.exchange(messages, what).wait()
        leader = source if source_host == self._host else self._host_ranks[0]
        self._intra_host.broadcast(flat, self._host_ranks.index(leader), what=what)

    def all_to_all(
        self,
        received: Tensor,
        sent: Tensor,
        received_sizes: Sequence[int],
        sent_sizes: Sequence[int],
        *,
        what: str,
    ) -> Work:
        return all_to_all(self._inter_queue, received, sent, received_sizes, sent_sizes, what)

    def reshard(self, shard: Tensor, old: Layout, new: Layout, *, what: str) -> Tensor:
        return reshard(self._inter_queue, shard, old, new, what)

    def _reduce(
        self,
        bucket: Bucket,
        out: Tensor,
        accumulate: bool,
        squares: Tensor | None,
        what: str,
    ) -> Work:
        """Reduce on the host what each rank owns and relays; send it; add the sums of all hosts."""
        layout, data, rank = bucket.layout, bucket.data, self.group.rank
        parts = self._slices_and_relays(layout)
        host_layout = _layout([sum(piece.numel for piece in pieces) for pieces in parts])
        ordered = torch.cat([data[p.start : p.stop] for pieces in parts for p in pieces])
        own = parts[self._host_ranks.index(rank)]
        host_sum = data.new_empty(sum(piece.numel for piece in own), dtype=out.dtype)
        low, high = layout.bounds(rank)
        by_host = [
            data.new_empty(0 if host == self._host else high - low)  # this host's is `host_sum`
            for host in range(len(self._hosts.members))
        ]
        reduction = self._intra_host.reduce_scatter(
            Bucket(ordered, host_layout, bucket.codec), host_sum, accumulate=False, what=what
        )
        # After all allocations: if memory runs out, the collective can be issued again.
        position = self._inter_queue.reserve()

        def exchange() -> Work:
            rounded = host_sum.to(data.dtype)
            by_host[self._host] = rounded[: high - low]
            messages = [
                Message(sender, by_host[host][piece.start - low : piece.stop - low], incoming=True)
                for host, sender, piece in self._hosts.relays_of_other_hosts(layout, self._host)
                if piece.owner == rank
            ]
            begin = high - low
            for piece in own[1:]:
                part = rounded[begin : begin + piece.numel]
                messages.append(Message(piece.owner, part, incoming=False))
                begin += piece.numel
            return self._inter_queue.exchange(messages, what, add_hosts, position=position)

        def add_hosts() -> None:
            if low < high:
                bucket.codec.reduce(out, by_host, accumulate, squares)

        return self._inter_queue.chain(reduction, exchange, position)

    def _gather(self, data: Tensor, layout: Layout, what: str) -> Work:
        """Send each slice to the ranks that relay it, then gather within every host."""
        rank = self.group.rank
        parts = self._slices_and_relays(layout)
        host_layout = _layout([sum(piece.numel for piece in pieces) for pieces in parts])
        gathered = data.new_empty(host_layout.numel)
        inter, intra = self._inter_queue.reserve(), self._intra_queue.reserve()
        index = self._host_ranks.index(rank)
        own = own_slice(gathered, host_layout, index)
        low, high = layout.bounds(rank)
        own[: high - low].copy_(data[low:high])
        begin, messages = high - low, []
        for piece in parts[index][1:]:
            part = own[begin : begin + piece.numel]
            messages.append(Message(piece.owner, part, incoming=True))
            begin += piece.numel
        for _, relay, piece in self._hosts.relays_of_other_hosts(layout, self._host):
            if piece.owner == rank:
                part = data[piece.start : piece.stop]
                messages.append(Message(relay, part, incoming=False))
        exchange = self._inter_queue.exchange(messages, what, position=inter)

        def copy_out() -> None:
            begin = 0
            for piece in (piece for pieces in parts for piece in pieces):
                data[piece.start : piece.stop].copy_(gathered[begin : begin + piece.numel])
                begin += piece.numel

        def gather_on_host() -> Work:
            work = gather_direct(self._intra_queue, gathered, host_layout, what, intra)
            return CallbackWork(work, copy_out)

        return self._inter_queue.chain(exchange, gather_on_host, inter)

    def _slices_and_relays(self, layout: Layout) -> list[list[Piece]]:
        """For each rank of this host: its slice, followed by the pieces that it relays."""
        assignments = self._hosts.relay_assignments(layout, self._host)
        return [
            [Piece(rank, *layout.bounds(rank)), *pieces]
            for rank, pieces in zip(self._host_ranks, assignments, strict=True)
        ]


def _layout(sizes: list[int]) -> Layout:
    return Layout((0, *accumulate(sizes)))
