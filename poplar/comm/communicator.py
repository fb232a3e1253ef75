"""The interface between the engine and the transports: collectives over uneven layouts.

All ranks of the group issue the same collectives in the same order. Each returns at once, and
`Work.wait` finishes it within the group's deadline. Sums are taken in rank order, or on each host
first (`Communicator.hosts`): transports with equal orders give equal bits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from poplar.comm.bucket import Bucket, Codec, Reduction
from poplar.comm.group import Group
from poplar.comm.shard_layout import Layout, transfers


class Work(Protocol):
    """A collective that has been issued."""

    def wait(self) -> float:
        """Finish it, for the current stream; returns the seconds that this rank waited.

        Raises:
            CollectiveTimeout: names the ranks that did not take part before the deadline.
        """
        ...


class CachedBytes(NamedTuple):
    """Memory that a transport keeps for its next collectives."""

    private: int = 0
    """Of this process."""
    shared: int = 0
    """In this rank's shared segments."""

    def plus(self, other: CachedBytes) -> CachedBytes:
        """The sums."""
        return CachedBytes(self.private + other.private, self.shared + other.shared)


class Splits(NamedTuple):
    """How an all-to-all divides its tensors: elements by rank."""

    received: list[int]
    """Must equal the sizes that the peers send."""
    sent: list[int]


class Communicator(ABC):
    """A transport. All methods are collective over `group`; `what` names the call in errors."""

    name: str
    """The name under which `connect` creates it."""
    takes_memory: bool = True
    """Whether a reduction holds memory besides its bucket until it has been waited for."""
    waits_on_stream: bool = False
    """Whether a wait for CUDA tensors blocks only the current stream and never the host."""
    hosts: tuple[int, ...] = ()
    """By rank, the number of its host, if values are added on each host first."""

    def __init__(self, group: Group) -> None:
        self.group = group

    def buffer(
        self, layout: Layout, dtype: torch.dtype, device: torch.device, codec: Codec | None = None
    ) -> Bucket:
        """An uninitialized bucket in memory from which this transport sends without a copy."""
        codec, between_hosts = self.codecs(codec if codec is not None else Codec(dtype))
        numel = codec.wire_layout(layout).numel
        data = torch.empty(numel, dtype=codec.wire_dtype, device=device)
        return Bucket(data=data, layout=layout, codec=codec, between_hosts=between_hosts)

    def codecs(self, codec: Codec) -> tuple[Codec, Codec | None]:
        """The codec of this rank's buckets, and that of what its host sends: None if the ranks of a
        host do not add values first.
        """
        return codec.of_sender(self.group.rank), None

    def share(self, data: Tensor) -> Tensor:
        """A copy of `data` in memory from which this transport sends without a copy. Local."""
        return data.clone()

    def wait_for_readers(self, data: Tensor) -> None:
        """Call before writing to shared `data`: waits until no peer reads from it."""

    def reduce_scatter(
        self,
        bucket: Bucket,
        out: Tensor,
        *,
        accumulate: bool,
        what: str,
        squares: Tensor | None = None,
    ) -> Work:
        """`out` = (or +=) the sum over ranks of this rank's slice of their buckets.

        Args:
            bucket: packed; must stay unchanged until the wait returns.
            out: fp32, `bucket.layout.size(rank)` elements; may be that very slice of
                `bucket.data`.
            squares: receives `ops.block_sums_of_squares(out)` of the result, without another read
                of `out`.
        """
        return self.reduce(Reduction(bucket, out, accumulate, what, squares))

    @abstractmethod
    def reduce(self, reduction: Reduction) -> Work:
        """Do what `reduce_scatter` says, which every transport does in its own way."""

    @abstractmethod
    def all_gather(
        self, data: Tensor, layout: Layout, *, what: str, own: Tensor | None = None
    ) -> Work:
        """Fill `data` in place; each rank provides its slice under `layout`.

        Args:
            data: `layout.numel` elements; must not be read or written until the wait returns.
            own: this rank's slice if it is not in `data` yet; it is then copied there too. It must
                stay unchanged until the wait returns and, if shared, `wait_for_readers` returns.
        """

    @abstractmethod
    def all_to_all(self, received: Tensor, sent: Tensor, sizes: Splits, *, what: str) -> Work:
        """Send the next `sizes.sent[r]` elements of `sent` to each rank `r`, this one included.

        Args:
            received: 1-D; `sizes.received[r]` elements from each rank `r`, concatenated. Must not
                be read or written until the wait returns.
            sent: 1-D, contiguous, of the same dtype; must stay unchanged until the wait returns.
            sizes: of the parts of both.
        """

    def abort(self, reason: str) -> None:
        """Call if this rank cannot issue its collectives any more. Local.

        Later collectives raise on this rank. On the others, those that wait for it raise `reason`.
        """
        self.group.abort(reason)

    def cached_bytes(self) -> CachedBytes:
        """Memory that is kept for the next collectives; what callers hold does not count."""
        return CachedBytes()

    def trim(self) -> None:
        """Return memory that is not in use to the system, unless memory is cached."""

    def end_step(self) -> None:
        """Return memory that was not used since the last call, as of a layout of before."""

    def broadcast(self, data: Tensor, source: int, *, what: str) -> None:
        """Copy `data` of group rank `source` to every rank; returns when this rank has it."""
        flat = data.view(-1)  # a gather of which `source` provides everything
        ends = (flat.numel() * (rank >= source) for rank in range(self.group.size))
        self.all_gather(flat, Layout((0, *ends)), what=what).wait()

    def reshard(self, shard: Tensor, old: Layout, new: Layout, *, what: str) -> Tensor:
        """This rank's slice under `new`, from all ranks' slices under `old`."""
        rank, result = self.group.rank, shard.new_empty(new.size(self.group.rank))
        sizes = Splits([0] * self.group.size, [0] * self.group.size)
        for move in transfers(old, new):  # at most one for each pair of ranks
            if move.source == rank:
                sizes.sent[move.target] = move.stop - move.start
            if move.target == rank:
                sizes.received[move.source] = move.stop - move.start
        self.all_to_all(result, shard, sizes, what=what).wait()
        return result


class CallbackWork:
    """A collective with a function that is called once, after it has finished."""

    def __init__(self, work: Work, finish: Callable[[], None]) -> None:
        self._work = work
        self._finish: Callable[[], None] | None = finish

    def wait(self) -> float:
        """As `Work.wait`."""
        waited = self._work.wait()
        if self._finish is not None:
            self._finish()  # again, if memory runs out in it
            self._finish = None
        return waited


def own_slice(data: Tensor, layout: Layout, rank: int) -> Tensor:
    """The view of `data` that `rank` owns under `layout`."""
    low, high = layout.bounds(rank)
    return data[low:high]
