"""What is sent: a flat buffer that packing writes into and the transport sends from.

The transport hands buckets out (`Communicator.buffer`), so that it can place them where sending is
free: a shared segment, a registered buffer. The codec decides how values travel: which dtype is on
the wire, how gradients enter the bucket, how the slices of all ranks become one.
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
    """Values travel in `wire_dtype`, rounded once when packed; sums are fp32, in rank order."""

    wire_dtype: torch.dtype = torch.float32

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

    def reduce_claimed(
        self, outs: Sequence[Tensor], received: Sequence[Tensor], claims: Tensor, squares: Tensor
    ) -> None:
        ops.rank_sum_claimed_(outs, received, claims, squares)

    def reduce_each(self, outs: Sequence[Tensor], received: Sequence[Tensor]) -> None:
        ops.rank_sum_each_(outs, received)


@dataclass(frozen=True, eq=False)
class Bucket:
    """One flat buffer of `layout.numel` elements in the codec's wire dtype."""

    data: Tensor
    layout: Layout
    codec: Codec
    before_writing: Callable[[], None] = field(default=lambda: None, repr=False)
    """Waits until nobody reads any more what was sent from here before."""
    squares: Tensor | None = None
    """Right behind `data`, for peers that help to reduce into it: block sums of squares, fp32, one
    for each 64 elements."""

    def pack(
        self,
        gradients: Sequence[Tensor],
        offsets: Sequence[int],
        weight: float,
        *,
        accumulate: bool = False,
    ) -> None:
        """Write `weight * gradients[i]` at `offsets[i]`; unless accumulating, zero elsewhere."""
        self.before_writing()
        self.codec.pack(self.data, gradients, offsets, weight, accumulate)
