"""How uneven collectives are made of what NCCL and gloo offer, which is even ones and messages.

*direct*: every rank sends every other what that one needs, at once. Moves the bytes of a ring for
even shares, and any shares as they are.
*padded*: the library's own collective, on chunks as large as the largest slice. It knows the
topology (rings, trees, switches that add), and carries `n * largest` elements.
*grouped*: a broadcast from, or a reduction to, each owner, so that a skewed slice travels along the
library's trees. As much as is needed travels, in one operation for each owner.

Gathers have no arithmetic, so their bits are the same by all. Reductions either add in rank order
here, or as the library does, whose order is its own (`"library"`); then 16-bit values travel the
way that keeps rank order, as the library would round every addition.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from poplar.comm.bucket import Bucket
from poplar.comm.collective_queue import CollectiveQueue
from poplar.comm.communicator import Pending, own_slice
from poplar.comm.point_to_point import Message
from poplar.comm.shard_layout import Layout

# torch 2.13 renamed them, and 2.10 to 2.12 know only the old names.
_gather_chunks: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_chunks: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class ReduceScatter:
    """One way; `run` is as `Communicator.reduce_scatter`."""

    reduction_order: str
    run: Callable[[CollectiveQueue, Bucket, Tensor, bool, str, Tensor | None], Pending]


def _reduce_directly(
    link: CollectiveQueue,
    bucket: Bucket,
    out: Tensor,
    accumulate: bool,
    what: str,
    squares: Tensor | None,
) -> Pending:
    rank, size, layout = link.group.rank, link.group.size, bucket.layout
    own = layout.size(rank)
    received = link.spare.take((size - 1) * own, bucket.data)
    parts = list(received.view(size - 1, own).unbind())
    parts.insert(rank, own_slice(bucket.data, layout, rank))
    messages = []
    for peer in link.peers():
        messages.append(Message(peer, own_slice(bucket.data, layout, peer), incoming=False))
        messages.append(Message(peer, parts[peer], incoming=True))

    def add() -> None:
        if own:
            bucket.codec.reduce(out, parts, accumulate, squares)
        link.spare.give_back(received)

    return link.exchange(messages, what, add)


def _reduce_padded(
    link: CollectiveQueue,
    bucket: Bucket,
    out: Tensor,
    accumulate: bool,
    what: str,
    squares: Tensor | None,
) -> Pending:
    """All-to-all of equal chunks, and a sum here."""
    layout, own = bucket.layout, bucket.layout.size(link.group.rank)
    sent = _in_chunks(bucket.data, layout)
    received = link.spare.take(sent.numel(), sent)

    def start() -> list[dist.Work | None]:
        group = link.group.process_group
        return [dist.all_to_all_single(received, sent, group=group, async_op=True)]

    def add() -> None:
        if own:
            chunks = received.view(link.group.size, -1)
            bucket.codec.reduce(out, [chunk[:own] for chunk in chunks], accumulate, squares)
        link.spare.give_back(received)

    return link.call(start if sent.numel() else list, sent.device, what, add)


def _reduce_by_library(
    link: CollectiveQueue,
    bucket: Bucket,
    out: Tensor,
    accumulate: bool,
    what: str,
    squares: Tensor | None,
) -> Pending:
    """The library's reduce-scatter of equal chunks."""
    if bucket.data.dtype is not torch.float32:
        return _reduce_padded(link, bucket, out, accumulate, what, squares)
    layout, own = bucket.layout, bucket.layout.size(link.group.rank)
    sent = _in_chunks(bucket.data, layout)
    total = sent.new_empty(sent.numel() // link.group.size)

    def start() -> list[dist.Work | None]:
        return [_reduce_chunks(total, sent, group=link.group.process_group, async_op=True)]

    def take() -> None:
        bucket.codec.reduce(out, [total[:own]], accumulate, squares)

    return link.call(start if sent.numel() else list, sent.device, what, take if own else None)


def _reduce_grouped(
    link: CollectiveQueue,
    bucket: Bucket,
    out: Tensor,
    accumulate: bool,
    what: str,
    squares: Tensor | None,
) -> Pending:
    """A reduction to each owner."""
    if bucket.data.dtype is not torch.float32:
        return _reduce_directly(link, bucket, out, accumulate, what, squares)
    layout, rank = bucket.layout, link.group.rank
    # Reductions write into what is sent, and the bucket is not theirs.
    slices = [own_slice(bucket.data, layout, owner).clone() for owner in range(layout.world_size)]

    def start() -> list[dist.Work | None]:
        group = link.group.process_group
        return [
            dist.reduce(part, group=group, group_dst=owner, async_op=True)
            for owner, part in enumerate(slices)
            if part.numel()
        ]

    def take() -> None:
        bucket.codec.reduce(out, [slices[rank]], accumulate, squares)

    return link.call(start, out.device, what, take if layout.size(rank) else None)


def gather_directly(
    link: CollectiveQueue, data: Tensor, layout: Layout, what: str, place: int | None = None
) -> Pending:
    """As `Communicator.all_gather`; at a reserved place of the order, if there is one."""
    mine = own_slice(data, layout, link.group.rank)
    messages = []
    for peer in link.peers():
        messages.append(Message(peer, mine, incoming=False))
        messages.append(Message(peer, own_slice(data, layout, peer), incoming=True))
    return link.exchange(messages, what, place=place)


def _gather_padded(link: CollectiveQueue, data: Tensor, layout: Layout, what: str) -> Pending:
    """The library's gather of equal chunks."""
    mine = own_slice(data, layout, link.group.rank)
    most = max(layout.sizes)
    chunk = mine.new_zeros(most)
    chunk[: mine.numel()].copy_(mine)
    gathered = mine.new_empty(link.group.size * most)

    def start() -> list[dist.Work | None]:
        return [_gather_chunks(gathered, chunk, group=link.group.process_group, async_op=True)]

    def place() -> None:
        for peer in link.peers():
            part = own_slice(data, layout, peer)
            part.copy_(gathered[peer * most : peer * most + part.numel()])

    return link.call(start if most else list, data.device, what, place)


def _gather_grouped(link: CollectiveQueue, data: Tensor, layout: Layout, what: str) -> Pending:
    """A broadcast from each owner."""

    def start() -> list[dist.Work | None]:
        group = link.group.process_group
        return [
            dist.broadcast(part, group=group, group_src=owner, async_op=True)
            for owner in range(layout.world_size)
            if (part := own_slice(data, layout, owner)).numel()
        ]

    return link.call(start, data.device, what)


REDUCE_SCATTERS = {
    "direct": ReduceScatter("rank", _reduce_directly),
    "padded": ReduceScatter("rank", _reduce_padded),
    "grouped": ReduceScatter("library", _reduce_grouped),
    "library": ReduceScatter("library", _reduce_by_library),
}
ALL_GATHERS: dict[str, Callable[[CollectiveQueue, Tensor, Layout, str], Pending]] = {
    "direct": gather_directly,
    "padded": _gather_padded,
    "grouped": _gather_grouped,
}


def _in_chunks(data: Tensor, layout: Layout) -> Tensor:
    """Every slice at the beginning of a chunk as large as the largest; even ones are so already."""
    most = max(layout.sizes)
    if data.numel() == most * layout.world_size:
        return data
    chunks = data.new_zeros(layout.world_size, most)
    for rank, chunk in enumerate(chunks):
        part = own_slice(data, layout, rank)
        chunk[: part.numel()].copy_(part)
    return chunks.view(-1)
