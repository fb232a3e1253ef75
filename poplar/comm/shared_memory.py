"""The transport between CPU ranks of one host: what is packed lies where peers read it.

Nothing is sent. A rank posts where its bucket lies; who needs a slice of it takes it from there and
adds in rank order. See `board.py` for how ranks wait for each other.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from poplar.comm.board import Board
from poplar.comm.bucket import Bucket, Codec
from poplar.comm.communicator import Communicator, Pending, own_slice
from poplar.comm.process_group import ProcessGroupCommunicator
from poplar.planning.layout import Layout


class SharedMemoryCommunicator(Communicator):
    """Uneven reduce-scatter and all-gather by reading each other's memory.

    What travels at start and on a change of plan goes through the process group.
    """

    reduction_order = "rank"

    def __init__(self, board: Board) -> None:
        super().__init__(board.group)
        self._board = board
        self._rare = ProcessGroupCommunicator(board.group)

    def buffer(
        self, layout: Layout, dtype: torch.dtype, device: torch.device, codec: Codec | None = None
    ) -> Bucket:
        codec = codec if codec is not None else Codec(dtype)
        board = self._board
        data = board.lend(codec.wire_dtype, layout.numel)
        return Bucket(data, layout, codec, before_writing=lambda: board.guard(data))

    def share(self, data: Tensor) -> Tensor:
        shared = self._board.lend(data.dtype, data.numel())
        return shared.view(data.shape).copy_(data)

    def guard(self, data: Tensor) -> None:
        self._board.guard(data)

    def reduce_scatter(
        self, bucket: Bucket, out: Tensor, *, accumulate: bool, what: str
    ) -> Pending:
        rank, size, board = self.group.rank, self.group.size, self._board
        own, low = bucket.layout.size(rank), bucket.layout.bounds(rank)[0]
        collective = board.post(bucket.data)

        def add() -> None:
            if own == 0:
                return
            parts = [bucket.data[low : low + own]] * size
            for peer in board.others():
                parts[peer] = board.posted_by(peer, collective, bucket.data.dtype, low, own)
            bucket.codec.reduce(out, parts, accumulate)

        return _Read(board, collective, what, add)

    def all_gather(
        self, data: Tensor, layout: Layout, *, what: str, own: Tensor | None = None
    ) -> Pending:
        board = self._board
        mine = own_slice(data, layout, self.group.rank)
        # A copy: what is gathered may be changed as soon as this rank has all of it.
        collective = board.post(own) if own is not None else board.post_copy(mine)

        def place() -> None:
            board.guard(data)
            if own is not None:
                mine.copy_(own)
            for peer in board.others():
                count = layout.size(peer)
                if count:
                    part = board.posted_by(peer, collective, data.dtype, 0, count)
                    own_slice(data, layout, peer).copy_(part)

        return _Read(board, collective, what, place)

    def trim(self) -> None:
        self._board.trim()

    def broadcast(self, data: Tensor, source: int, *, what: str) -> None:
        self._rare.broadcast(data, source, what=what)

    def reshard(self, shard: Tensor, old: Layout, new: Layout, *, what: str) -> Tensor:
        return self._rare.reshard(shard, old, new, what=what)


class _Read:
    """A collective that has been posted here; waiting for it reads what the peers have posted."""

    def __init__(self, board: Board, collective: int, what: str, read: Callable[[], None]) -> None:
        self._board, self._collective, self._what = board, collective, what
        self._read: Callable[[], None] | None = read
        board.reads[collective] = self.wait

    def wait(self) -> float:
        """As `Pending.wait`."""
        if self._read is None:
            return 0.0
        held_up = self._board.wait_until_posted(self._collective, self._what)
        # Whatever was posted before is there as well: read it, so that its memory is free again.
        self._board.finish_before(self._collective)
        self._read()
        self._read = None
        self._board.finish(self._collective)
        return held_up
