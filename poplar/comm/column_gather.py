"""Gathers the rows of a matrix where ranks need different columns of it: an uneven all-to-all.

A rank gets only the columns that it needs. On devices it is one native call, on gloo messages.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from poplar.comm.collective_queue import CollectiveQueue
from poplar.comm.communicator import Work
from poplar.comm.point_to_point import Message
from poplar.comm.shard_layout import Layout


def gather_columns(
    queue: CollectiveQueue,
    data: Tensor,
    rows: Layout,
    columns: Sequence[tuple[int, int]],
    what: str,
) -> Work:
    """As `Communicator.gather_columns`."""
    if queue.calls_natively(data.device):
        return _gather_natively(queue, data, rows, columns, what)
    rank, (first, last) = queue.group.rank, columns[queue.group.rank]
    of_rank, peers = data.split(rows.sizes), queue.peers()
    has_whole_rows = last - first == data.shape[1]
    received = {
        peer: of_rank[peer] if has_whole_rows else data.new_empty(rows.size(peer), last - first)
        for peer in peers
    }
    messages = []
    for peer in peers:
        part = of_rank[rank][:, slice(*columns[peer])].contiguous()
        messages.append(Message(peer, part, incoming=False))
        messages.append(Message(peer, received[peer], incoming=True))

    def copy_in() -> None:
        for peer in () if has_whole_rows else peers:
            of_rank[peer][:, first:last].copy_(received[peer])

    return queue.exchange(messages, what, copy_in)


def _gather_natively(
    queue: CollectiveQueue,
    data: Tensor,
    rows: Layout,
    columns: Sequence[tuple[int, int]],
    what: str,
) -> Work:
    rank, (first, last) = queue.group.rank, columns[queue.group.rank]
    own, others = data[slice(*rows.bounds(rank))], data[:, first:last]
    parts = [own[:, slice(*needed)].reshape(-1) for needed in columns]
    parts[rank] = parts[rank][:0]
    received_rows = [0 if peer == rank else size for peer, size in enumerate(rows.sizes)]
    received = data.new_empty(sum(received_rows), last - first)
    sizes = [count * (last - first) for count in received_rows], [part.numel() for part in parts]
    sent = torch.cat(parts)

    def start() -> list[dist.Work | None]:
        group = queue.group.process_group
        flat = received.view(-1)
        return [dist.all_to_all_single(flat, sent, *sizes, group=group, async_op=True)]

    def copy_in() -> None:
        before, after = rows.bounds(rank)
        others[:before].copy_(received[:before])
        others[after:].copy_(received[before:])

    return queue.issue(start if data.numel() else list, data.device, what, copy_in)
