"""The transport between CPU ranks of one host: buckets are in memory that all ranks can read.

Nothing is sent. Each rank posts the location of its bucket, and the owner of a slice reads that
slice of every bucket and adds them in rank order. `rendezvous` defines how ranks wait.
"""

from __future__ import annotations

import itertools
from functools import partial

import torch
from torch import Tensor

from poplar import _core, ops
from poplar.comm.bucket import Bucket, Codec, Reduction
from poplar.comm.communicator import CachedBytes, Communicator, Splits, Work, own_slice
from poplar.comm.copies import copy
from poplar.comm.host_memory.rendezvous import Rendezvous, SharedMemoryWork
from poplar.comm.shard_layout import ALIGNMENT, Layout

_MIN_SHARED_NUMEL = 2 * _core.CHUNK
"""Elements of a slice from which on several ranks may reduce chunks of it."""
_SQUARE_BYTES = 4
_HEADER_ALIGNMENT = 64
"""Bytes. Headers are padded to a multiple of this, so that tensors of any dtype can follow."""


class SharedMemoryCommunicator(Communicator):
    """Uneven collectives in which ranks read each other's memory."""

    name = "shared_memory"
    takes_memory = False

    def __init__(self, rendezvous: Rendezvous) -> None:
        super().__init__(rendezvous.group)
        self._rendezvous = rendezvous

    def buffer(
        self, layout: Layout, dtype: torch.dtype, device: torch.device, codec: Codec | None = None
    ) -> Bucket:
        codec, _ = self.codecs(codec if codec is not None else Codec(dtype))
        rendezvous, wire = self._rendezvous, codec.wire_dtype
        numel = codec.wire_layout(layout).numel
        # Peers write fp32 sums in place, which only fp32 buckets can hold.
        blocks = numel // ALIGNMENT if wire is torch.float32 and _is_aligned(layout) else 0
        memory = rendezvous.allocate(wire, numel + blocks)
        data, squares = memory[:numel], memory[numel:] if blocks else None
        wait = partial(rendezvous.wait_for_readers, memory)
        return Bucket(data, layout, codec, wait_until_writable=wait, squares=squares)

    def share(self, data: Tensor) -> Tensor:
        shared = self._rendezvous.allocate(data.dtype, data.numel())
        return shared.view(data.shape).copy_(data)

    def wait_for_readers(self, data: Tensor) -> None:
        self._rendezvous.wait_for_readers(data)

    def reduce(self, reduction: Reduction) -> Work:
        bucket, squares = reduction.bucket, reduction.squares
        rank, rendezvous = self.group.rank, self._rendezvous
        low, high = bounds = bucket.wire_layout.bounds(rank)
        own = high - low
        # Peers can write sums of this rank's slice only into its bucket.
        begin = bucket.data.data_ptr() + low * bucket.data.element_size()
        in_place = not reduction.accumulate and reduction.out.data_ptr() == begin
        shares_work = (
            in_place and own >= _MIN_SHARED_NUMEL and ops.native and bucket.squares is not None
        )
        collective = rendezvous.post(
            bucket.data,
            unread=bounds,
            shares_work=shares_work,
            extra_bytes=_extra_bytes(bucket) if shares_work else 0,
        )

        def read() -> float:
            waited = 0.0
            if shares_work:
                self._reduce_chunks(rank, collective, bucket)
            elif own:
                reduction.add(self.slices(collective, bucket.data, low, own))
            if ops.native:
                for peer in rendezvous.peers_sharing_work(collective):
                    self._reduce_chunks(peer, collective, bucket)
            if shares_work:
                waited = rendezvous.wait_for_chunks(collective, own, reduction.what)
                if squares is not None:
                    squares.copy_(self._squares(rank, collective, bucket))
            return waited

        return SharedMemoryWork(rendezvous, collective, reduction.what, read)

    def _reduce_chunks(self, rank: int, collective: int, bucket: Bucket) -> None:
        """Reduce the chunks of a rank's slice that no other rank has taken, in its own bucket."""
        low, high = bucket.layout.bounds(rank)
        parts = self.slices(collective, bucket.data, low, high - low)
        counters = self._rendezvous.work_counters(rank, collective)
        squares = self._squares(rank, collective, bucket)
        ops.rank_sum_chunks_(parts[rank], parts, counters, squares)

    def _squares(self, rank: int, collective: int, bucket: Bucket) -> Tensor:
        """Where the block sums of squares of a rank's slice are written."""
        low, high = (boundary // ALIGNMENT for boundary in bucket.layout.bounds(rank))
        if rank == self.group.rank:
            assert bucket.squares is not None
            return bucket.squares[low:high]
        first = bucket.layout.numel + low
        return self._rendezvous.peer_view(rank, collective, torch.float32, first, high - low)

    def all_gather(
        self, data: Tensor, layout: Layout, *, what: str, own: Tensor | None = None
    ) -> Work:
        rendezvous = self._rendezvous
        target = own_slice(data, layout, self.group.rank)
        last_collective = rendezvous.last_collective(data)
        # A copy if the slice is part of `data`, which may change as soon as this rank has finished.
        collective = rendezvous.post(own) if own is not None else rendezvous.post_copy(target)

        def gather() -> float:
            waited = rendezvous.wait_until_over(last_collective)
            if own is not None and own.data_ptr() != target.data_ptr():
                copy(target, own)
            for peer in rendezvous.peers():
                count = layout.size(peer)
                part = rendezvous.peer_view(peer, collective, data.dtype, 0, count, total=count)
                copy(own_slice(data, layout, peer), part)
            return waited

        return SharedMemoryWork(rendezvous, collective, what, gather)

    def all_to_all(self, received: Tensor, sent: Tensor, sizes: Splits, *, what: str) -> Work:
        rendezvous, names, rank = self._rendezvous, self.group.names, self.group.rank
        step = sent.element_size()
        begins = (0, *itertools.accumulate(sizes.sent))
        # Only the sender knows where each rank's part begins, so it posts that in a header.
        header = _HEADER_ALIGNMENT * -(-8 * len(begins) // _HEADER_ALIGNMENT)
        posted = rendezvous.allocate(torch.uint8, header + sent.numel() * step)
        posted[: 8 * len(begins)].view(torch.int64).copy_(torch.tensor(begins, device="cpu"))
        copy(posted[header:].view(sent.dtype), sent)
        collective = rendezvous.post(posted)

        def read() -> None:
            own = sent[begins[rank] : begins[rank + 1]]
            for peer, part in enumerate(received.split(list(sizes.received))):
                if peer == rank:
                    copy(part, own)
                    continue
                begin, end = rendezvous.peer_view(peer, collective, torch.int64, rank, 2).tolist()
                if end - begin != part.numel():
                    raise RuntimeError(
                        f"rank {names[rank]} expects {part.numel()} elements from rank "
                        f"{names[peer]}, which sends {end - begin}: the splits of the two "
                        "ranks must match"
                    )
                source = rendezvous.peer_view(
                    peer, collective, torch.uint8, header + begin * step, part.numel() * step
                )
                copy(part, source.view(part.dtype))

        return SharedMemoryWork(rendezvous, collective, what, read)

    def slices(self, collective: int, own: Tensor, low: int, numel: int) -> list[Tensor]:
        """`numel` elements from `low` on of every rank's post, in rank order.

        `own` is what this rank has posted.
        """
        rendezvous = self._rendezvous
        slices = [own[low : low + numel]] * self.group.size
        for peer in rendezvous.peers():
            slices[peer] = rendezvous.peer_view(
                peer,
                collective,
                own.dtype,
                low,
                numel,
                total=own.numel(),
                extra_bytes=_SQUARE_BYTES * (own.numel() // ALIGNMENT),
            )
        return slices

    def cached_bytes(self) -> CachedBytes:
        return CachedBytes(shared=self._rendezvous.idle_bytes())

    def trim(self) -> None:
        self._rendezvous.trim()

    def end_step(self) -> None:
        self._rendezvous.release_unused()


def _extra_bytes(bucket: Bucket) -> int:
    """Bytes that peers write behind a bucket: its block sums of squares."""
    return 0 if bucket.squares is None else _SQUARE_BYTES * bucket.squares.numel()


def _is_aligned(layout: Layout) -> bool:
    return all(offset % ALIGNMENT == 0 for offset in layout.offsets)
