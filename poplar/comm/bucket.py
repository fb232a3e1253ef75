"""Buckets: the flat buffers that gradients are packed into and the transport sends from.

The transport allocates them (`Communicator.buffer`), so it can place them in memory that it sends
from without a copy, such as a shared segment. The codec defines the dtype on the wire, how
gradients are packed into the bucket and how the ranks' slices are reduced.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from poplar import ops
from poplar.comm.shard_layout import Layout


@dataclass(frozen=True)
class Codec:
    """Values are rounded to `wire_dtype` once, when packed; sums are fp32, in rank order."""

    wire_dtype: torch.dtype = torch.float32

    @property
    def sum_dtype(self) -> torch.dtype:
        """The dtype of the result of a reduction."""
        return torch.float32

    def pack(
        self,
        data: Tensor,
        gradients: Sequence[Tensor],
        offsets: Sequence[int],
        weight: float,
        accumulate: bool,
    ) -> None:
        ops.pack_(data, list(gradients), list(offsets), weight, accumulate)

    def reduce(
        self,
        out: Tensor,
        received: Sequence[Tensor],
        accumulate: bool,
        squares: Tensor | None = None,
    ) -> None:
        ops.rank_sum_(out, received, accumulate, squares)

    def reduce_chunks(
        self, out: Tensor, received: Sequence[Tensor], work_counters: Tensor, squares: Tensor
    ) -> None:
        ops.rank_sum_chunks_(out, received, work_counters, squares)


@dataclass(frozen=True)
class WideCodec(Codec):
    """float64 or integers, and sums of the same dtype, in rank order.

    Plain PyTorch: such values are few, or compared exactly in tests. Callers copy into the bucket's
    data; it is not packed with weights.
    """

    @property
    def sum_dtype(self) -> torch.dtype:
        return self.wire_dtype

    @torch.no_grad()
    def reduce(
        self,
        out: Tensor,
        received: Sequence[Tensor],
        accumulate: bool,
        squares: Tensor | None = None,
    ) -> None:
        assert squares is None  # only norms of gradients need them
        total = received[0].clone()
        for part in received[1:]:
            total += part
        if accumulate:
            out += total
        else:
            out.copy_(total)


@dataclass(frozen=True, eq=False)
class Bucket:
    """One flat buffer of `layout.numel` elements in the codec's wire dtype."""

    data: Tensor
    layout: Layout
    codec: Codec
    wait_until_writable: Callable[[], None] = field(default=lambda: None, repr=False)
    """Returns when no peer reads what was sent from this memory before."""
    squares: Tensor | None = None
    """fp32 sums of squares of each 64-element block. They lie directly behind `data`, where peers
    that help with the reduction can write them."""

    def pack(
        self,
        gradients: Sequence[Tensor],
        offsets: Sequence[int],
        weight: float,
        *,
        accumulate: bool = False,
    ) -> None:
        """Write `weight * gradients[i]` at `offsets[i]`; unless accumulating, zero the gaps."""
        self.wait_until_writable()
        self.codec.pack(self.data, gradients, offsets, weight, accumulate)


@dataclass(frozen=True)
class Reduction:
    """One reduce-scatter; the arguments of `Communicator.reduce_scatter`."""

    bucket: Bucket
    out: Tensor
    accumulate: bool
    what: str
    squares: Tensor | None = None

    def add(self, parts: Sequence[Tensor]) -> None:
        """`out` = (or +=) the sum of these parts, by rank."""
        if self.out.numel():
            self.bucket.codec.reduce(self.out, parts, self.accumulate, self.squares)
