"""The transport between CPU ranks of one host: what is packed lies where peers read it.

Nothing is sent. A rank posts where its bucket lies; who needs a slice of it takes it from there and
adds in rank order. See `board.py` for how ranks wait for each other.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial

import torch
from torch import Tensor

from poplar import _core, ops
from poplar.comm.bucket import Bucket, Codec
from poplar.comm.communicator import Communicator, Pending, own_slice
from poplar.comm.copies import copy, copy_around
from poplar.comm.rendezvous import Rendezvous
from poplar.comm.shard_layout import ALIGNMENT, Layout, transfers
from poplar.comm.shared_memory_work import SharedMemoryWork

_LEAST_TO_SHARE = 2 * _core.CHUNK
"""Elements of a slice on which more than one rank may work."""
_SQUARE_BYTES = 4
_HEAD = 64
"""Bytes; what comes before tensors takes a multiple, so that any dtype is aligned after it."""


class SharedMemoryCommunicator(Communicator):
    """Uneven collectives by reading each other's memory."""

    name = "shared_memory"
    takes_memory = False
    reduction_order = "rank"

    def __init__(self, board: Rendezvous) -> None:
        super().__init__(board.group)
        self._board = board

    def buffer(
        self, layout: Layout, dtype: torch.dtype, device: torch.device, codec: Codec | None = None
    ) -> Bucket:
        codec = codec if codec is not None else Codec(dtype)
        board, wire, numel = self._board, codec.wire_dtype, layout.numel
        # Sums end in fp32 buckets alone, so only there peers may help with them.
        blocks = numel // ALIGNMENT if wire is torch.float32 and _is_aligned(layout) else 0
        room = board.lend(wire, numel + blocks)
        data, squares = room[:numel], room[numel:] if blocks else None
        guard = partial(board.guard, room)
        return Bucket(data, layout, codec, before_writing=guard, squares=squares)

    def or_give_up(self, what: str) -> AbstractContextManager[None]:
        """Whatever goes wrong inside is the end of this transport, on all ranks."""
        return self._board.or_give_up(what)

    def give_up(self, why: str) -> None:
        """No collective comes after this; peers are told."""
        self._board.give_up(why)

    def share(self, data: Tensor) -> Tensor:
        shared = self._board.lend(data.dtype, data.numel())
        return shared.view(data.shape).copy_(data)

    def guard(self, data: Tensor) -> None:
        self._board.guard(data)

    def reduce_scatter(
        self,
        bucket: Bucket,
        out: Tensor,
        *,
        accumulate: bool,
        what: str,
        squares: Tensor | None = None,
    ) -> Pending:
        rank, board = self.group.rank, self._board
        own, low = bucket.layout.size(rank), bucket.layout.bounds(rank)[0]
        # Others may write the sum of this rank's slice only where they can reach it.
        in_place = not accumulate and out.data_ptr() == bucket.data.data_ptr() + (
            low * bucket.data.element_size()
        )
        is_open = in_place and own >= _LEAST_TO_SHARE and ops.native and bucket.squares is not None
        collective = board.post(
            bucket.data,
            unread=bucket.layout.bounds(rank),
            is_open=is_open,
            behind=_behind(bucket) if is_open else 0,
        )

        def add() -> float:
            held_up = 0.0
            if is_open:
                self._help(rank, collective, bucket)
            elif own:
                parts = self.parts(collective, bucket.data, low, own)
                bucket.codec.reduce(out, parts, accumulate, squares)
            if ops.native:
                for peer in board.open_to_help(collective):
                    self._help(peer, collective, bucket)
            if is_open:
                held_up = board.wait_until_done(collective, own, what)
                if squares is not None:
                    squares.copy_(self._squares(rank, collective, bucket))
            return held_up

        return SharedMemoryWork(board, collective, what, add)

    def _help(self, rank: int, collective: int, bucket: Bucket) -> None:
        """Add up what nobody has claimed yet of a rank's slice, into its own buffer."""
        low, high = bucket.layout.bounds(rank)
        parts = self.parts(collective, bucket.data, low, high - low)
        claims = self._board.claims(rank, collective)
        squares = self._squares(rank, collective, bucket)
        bucket.codec.reduce_claimed([parts[rank]], parts, claims, squares)

    def _squares(self, rank: int, collective: int, bucket: Bucket) -> Tensor:
        """Where whoever adds up a rank's slice leaves its block sums of squares."""
        low, high = (place // ALIGNMENT for place in bucket.layout.bounds(rank))
        if rank == self.group.rank:
            assert bucket.squares is not None
            return bucket.squares[low:high]
        first = bucket.layout.numel + low
        return self._board.posted_by(rank, collective, torch.float32, first, high - low)

    def all_reduce(self, bucket: Bucket, *, what: str) -> Pending:
        """Whoever owns a slice adds it up and writes the sum into everybody's buffer."""
        board, data = self._board, bucket.data
        low, high = bucket.layout.bounds(self.group.rank)
        is_shared = board.holds(data)
        mine, part = (data, None) if is_shared else board.take(data.dtype, data.numel())
        if not is_shared:
            copy_around(mine, data, low, high)
        collective = board.post(mine)

        def add() -> float:
            # Nobody may read what this writes over for the sake of an earlier collective.
            held_up = board.wait_until_over(collective - 1)
            if low < high:
                parts = self.parts(collective, data, low, high - low)
                bucket.codec.reduce_each(parts, parts)
            board.mark(collective)
            held_up += board.wait_until_marked(collective, what)
            if part is not None:
                copy_around(data, mine, low, high)
                board.give_back(part)
            return held_up

        return SharedMemoryWork(board, collective, what, add)

    def all_gather(
        self, data: Tensor, layout: Layout, *, what: str, own: Tensor | None = None
    ) -> Pending:
        board = self._board
        mine = own_slice(data, layout, self.group.rank)
        read_in = board.read_in(data)
        # A copy: what is gathered may be changed as soon as this rank has all of it.
        collective = board.post(own) if own is not None else board.post_copy(mine)

        def place() -> float:
            held_up = board.wait_until_over(read_in)
            if own is not None and own.data_ptr() != mine.data_ptr():
                copy(mine, own)
            for peer in board.others():
                count = layout.size(peer)
                part = board.posted_by(peer, collective, data.dtype, 0, count, of=count)
                copy(own_slice(data, layout, peer), part)
            return held_up

        return SharedMemoryWork(board, collective, what, place)

    def all_to_all(
        self, received: Tensor, mine: Tensor, arriving: Sequence[int], leaving: Sequence[int]
    ) -> None:
        """Each rank's next `leaving[r]` elements go to rank `r`; returns when they have arrived.

        Args:
            received: 1-D; `arriving[r]` elements from rank `r`, one after the other.
            mine: 1-D, of the same dtype.
            arriving: what peers say that leaves for this rank.
            leaving: elements, by rank.
        """
        board, rank, step = self._board, self.group.rank, mine.element_size()
        begins = (0, *itertools.accumulate(leaving))
        # Where each rank's part begins is known to the sender alone, so it goes ahead.
        head = _HEAD * -(-8 * len(begins) // _HEAD)
        posted, shared = board.take(torch.uint8, head + mine.numel() * step)
        posted[: 8 * len(begins)].view(torch.int64).copy_(torch.tensor(begins))
        copy(posted[head:].view(mine.dtype), mine)
        collective = board.post(posted)
        board.give_back(shared)

        def place() -> None:
            own = mine[begins[rank] : begins[rank + 1]]
            for peer, part in enumerate(received.split(list(arriving))):
                if peer == rank:
                    copy(part, own)
                    continue
                begin, end = board.posted_by(peer, collective, torch.int64, rank, 2).tolist()
                if end - begin != part.numel():
                    raise RuntimeError(
                        f"rank {rank} takes rank {peer} to send {part.numel()} elements, and it "
                        f"sends {end - begin}: what arrives here must be what leaves there"
                    )
                sent = board.posted_by(
                    peer, collective, torch.uint8, head + begin * step, part.numel() * step
                )
                copy(part, sent.view(part.dtype))

        SharedMemoryWork(board, collective, "all_to_all", place).wait()

    def barrier(self) -> None:
        """Return when every rank is here."""
        board = self._board
        SharedMemoryWork(board, board.post(torch.empty(0)), "barrier", lambda: None).wait()

    def parts(self, collective: int, mine: Tensor, low: int, numel: int) -> list[Tensor]:
        """Everybody's elements from `low` on, in rank order; this rank's are `mine`."""
        board = self._board
        parts = [mine[low : low + numel]] * self.group.size
        for peer in board.others():
            parts[peer] = board.posted_by(
                peer,
                collective,
                mine.dtype,
                low,
                numel,
                of=mine.numel(),
                behind=_SQUARE_BYTES * (mine.numel() // ALIGNMENT),
            )
        return parts

    def trim(self) -> None:
        self._board.trim()

    def broadcast(self, data: Tensor, source: int, *, what: str) -> None:
        board, flat = self._board, data.view(-1)
        # A copy: the source may go on, and write, before everybody has read it.
        collective = board.post_copy(flat if self.group.rank == source else flat[:0])

        def take_over() -> None:
            if self.group.rank != source:
                count = flat.numel()
                copy(flat, board.posted_by(source, collective, flat.dtype, 0, count, of=count))

        SharedMemoryWork(board, collective, what, take_over).wait()

    def reshard(self, shard: Tensor, old: Layout, new: Layout, *, what: str) -> Tensor:
        board, rank = self._board, self.group.rank
        result = torch.empty(new.size(rank), dtype=shard.dtype, device=shard.device)
        collective = board.post_copy(shard)

        def take_over() -> None:
            first = new.bounds(rank)[0]
            for move in transfers(old, new):
                if move.target != rank:
                    continue
                begin, count = move.start - old.bounds(move.source)[0], move.stop - move.start
                total = old.size(move.source)
                part = (
                    shard[begin : begin + count]
                    if move.source == rank
                    else board.posted_by(
                        move.source, collective, shard.dtype, begin, count, of=total
                    )
                )
                copy(result[move.start - first : move.stop - first], part)

        SharedMemoryWork(board, collective, what, take_over).wait()
        return result


def _behind(bucket: Bucket) -> int:
    """Bytes that peers write behind a bucket."""
    return 0 if bucket.squares is None else _SQUARE_BYTES * bucket.squares.numel()


def _is_aligned(layout: Layout) -> bool:
    return all(cut % ALIGNMENT == 0 for cut in layout.offsets)
