"""The seam between the engine and the transports: collectives over uneven layouts.

Each is issued by every rank of the group, in the same order, and returns at once; `Pending.wait`
ends it, within the group's deadline. Every transport declares the order in which it adds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from poplar.comm.bucket import Bucket, Codec
from poplar.comm.group import Members
from poplar.comm.shard_layout import Layout


class Pending(Protocol):
    """A collective that has been issued."""

    def wait(self) -> float:
        """Finish it, for the current stream; returns the seconds that this rank was held up.

        Raises:
            CollectiveTimeout: names the ranks that did not take part before the deadline.
        """
        ...


class Communicator(ABC):
    """A transport. All methods are collective over `group`; `what` names the call in errors."""

    name: str
    """By which `connect` makes it."""
    takes_memory: bool = True
    """Whether a reduction holds memory besides its bucket until it has been waited for."""
    waits_on_stream: bool = False
    """Whether a wait for CUDA tensors holds up the current stream alone, and never the caller."""
    reduction_order: str
    """`"rank"`: ((r0 + r1) + r2) + ...; equal declared orders give equal bits. `"library"`: as NCCL
    or gloo adds, which may be another way each time."""

    def __init__(self, group: Members) -> None:
        self.group = group

    def buffer(
        self, layout: Layout, dtype: torch.dtype, device: torch.device, codec: Codec | None = None
    ) -> Bucket:
        """A bucket for one flat buffer, not initialised, where this transport sends from best."""
        codec = codec if codec is not None else Codec(dtype)
        data = torch.empty(layout.numel, dtype=codec.wire_dtype, device=device)
        return Bucket(data=data, layout=layout, codec=codec)

    def share(self, data: Tensor) -> Tensor:
        """A copy of `data` where this transport sends from best; on this rank alone."""
        return data.clone()

    def guard(self, data: Tensor) -> None:
        """Before shared `data` is written: wait until no peer reads what was sent from there."""

    @abstractmethod
    def reduce_scatter(
        self,
        bucket: Bucket,
        out: Tensor,
        *,
        accumulate: bool,
        what: str,
        squares: Tensor | None = None,
    ) -> Pending:
        """`out` = (or +=) the sum over ranks of this rank's slice of their buckets.

        Args:
            bucket: packed; must stay unchanged until the wait is over.
            out: fp32, `bucket.layout.size(rank)` elements; may be that very slice of `bucket.data`.
            squares: takes `ops.block_sums_of_squares(out)` as it is then; nobody reads `out` again
                for it.
        """

    @abstractmethod
    def all_reduce(self, bucket: Bucket, *, what: str) -> Pending:
        """`bucket.data` = the sum over ranks of their buckets, on every rank.

        fp32 and in rank order, rounded once to the bucket's dtype. The layout says who adds which
        part; it changes no bits. It goes on while ranks wait, for it or for whatever was issued
        after it.
        """

    @abstractmethod
    def all_gather(
        self, data: Tensor, layout: Layout, *, what: str, own: Tensor | None = None
    ) -> Pending:
        """Complete `data` in place, of which each rank has filled its slice under `layout`.

        Args:
            data: `layout.numel` elements; not to be touched until the wait is over.
            own: this rank's slice, where it lies elsewhere; `data` is then filled here too. It
                must stay unchanged until the wait is over and, if shared, `guard` has returned.
        """

    def trim(self) -> None:
        """Between steps: memory that is kept for nobody goes back to the system."""

    @abstractmethod
    def broadcast(self, data: Tensor, source: int, *, what: str) -> None:
        """Make `data` equal to group rank `source`'s on every rank; returns when it is."""

    @abstractmethod
    def reshard(self, shard: Tensor, old: Layout, new: Layout, *, what: str) -> Tensor:
        """This rank's slice under `new`, from everybody's slices under `old`."""


class Finished:
    """A collective after whose end something is done, once."""

    def __init__(self, pending: Pending, finish: Callable[[], None]) -> None:
        self._pending = pending
        self._finish: Callable[[], None] | None = finish

    def wait(self) -> float:
        """As `Pending.wait`."""
        held_up = self._pending.wait()
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()
        return held_up


def own_slice(data: Tensor, layout: Layout, rank: int) -> Tensor:
    """The view of `data` that `rank` owns under `layout`."""
    low, high = layout.bounds(rank)
    return data[low:high]
