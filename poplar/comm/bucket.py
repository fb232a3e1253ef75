"""Buckets: the flat buffers that gradients are packed into and the transport sends from.

The transport allocates them (`Communicator.buffer`), so it can place them in memory that it sends
from without a copy, such as a shared segment. The codec defines the dtype on the wire, how
gradients are packed into the bucket and how the ranks' slices are reduced.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from poplar import ops
from poplar.comm.shard_layout import ALIGNMENT, Bounds, Layout
from poplar.ops.codec import encoded_bytes


@dataclass(frozen=True)
class Codec:
    """Values are rounded to `wire_dtype` once, when packed; sums are fp32, in rank order."""

    wire_dtype: torch.dtype = torch.float32

    def wire_numel(self, numel: int) -> int:
        """Elements of `wire_dtype` for `numel` elements, a multiple of `ALIGNMENT`."""
        return numel

    def wire_layout(self, layout: Layout) -> Layout:
        """The layout of a bucket's data."""
        return layout

    def of_sender(self, sender: int) -> Codec:
        """The codec for what one rank or host sends."""
        return self

    @property
    def on_host(self) -> Codec:
        """The codec in which the ranks of a host add what the host then sends."""
        return self

    encodes: ClassVar[bool] = False
    """What is sent takes memory beside the sums that were taken by `on_host`."""

    def of_sums(self, sums: Tensor, parts: Sequence[Bounds], target: Tensor) -> Tensor:
        """What is sent of sums that were taken by `on_host`.

        Args:
            sums: the elements of `parts`, one behind the other.
            parts: of the whole buffer.
            target: memory for it, if the codec `encodes`; else unused.
        """
        return sums

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


@dataclass(frozen=True)
class Encoded(Codec):
    """Values are encoded once, at 8 or 4 bits: see `csrc/include/poplar/codec.h`.

    Sums are fp32, in rank order, of coefficients, and transformed back once.
    """

    wire_dtype: torch.dtype = torch.uint8
    bits: int = 8
    key: int = 0
    """Seed of the rounding; another one for each reduction."""

    def wire_numel(self, numel: int) -> int:
        return encoded_bytes(numel, self.bits)

    def wire_layout(self, layout: Layout) -> Layout:
        return _encoded_layout(layout, self.bits)

    def of_sender(self, sender: int) -> Codec:
        return replace(self, key=self.key + sender)

    @property
    def on_host(self) -> Codec:
        return Codec()

    encodes: ClassVar[bool] = True

    def of_sums(self, sums: Tensor, parts: Sequence[Bounds], target: Tensor) -> Tensor:
        begin = 0
        for start, stop in parts:
            end = begin + stop - start
            codes = target[self.wire_numel(begin) : self.wire_numel(end)]
            self.encode(codes, [sums[begin:end]], [0], start)
            begin = end
        return target

    def pack(
        self,
        data: Tensor,
        gradients: Sequence[Tensor],
        offsets: Sequence[int],
        weight: float,
        accumulate: bool,
    ) -> None:
        assert not accumulate  # what is encoded already would be rounded again
        ops.encode_(data, gradients, offsets, weight, self.bits, first=0, key=self.key)

    def encode(
        self, target: Tensor, values: Sequence[Tensor], offsets: Sequence[int], first: int
    ) -> None:
        """Write the codes of a slice from element `first` of the whole buffer on.

        Args:
            offsets: of the values in the slice; what is between them is 0.
        """
        ops.encode_(target, values, offsets, 1.0, self.bits, first=first, key=self.key)

    def decode(self, out: Tensor, encoded: Tensor, *, accumulate: bool = False) -> None:
        """Write the values that were encoded, or add them."""
        ops.decode_sum_(out, [encoded], self.bits, accumulate)

    def reduce(
        self,
        out: Tensor,
        received: Sequence[Tensor],
        accumulate: bool,
        squares: Tensor | None = None,
    ) -> None:
        ops.decode_sum_(out, received, self.bits, accumulate, squares)


@lru_cache(maxsize=1024)
def _encoded_layout(layout: Layout, bits: int) -> Layout:
    if any(offset % ALIGNMENT for offset in layout.offsets):
        raise ValueError(f"values are encoded in groups of {ALIGNMENT}, but cut at {layout}")
    return Layout(tuple(encoded_bytes(offset, bits) for offset in layout.offsets))


@dataclass(frozen=True, eq=False)
class Bucket:
    """One flat buffer, as its codec sends it."""

    data: Tensor
    """In the codec's `wire_dtype`, under `wire_layout`."""
    layout: Layout
    """Of the values."""
    codec: Codec
    wait_until_writable: Callable[[], None] = field(default=lambda: None, repr=False)
    """Returns when no peer reads what was sent from this memory before."""
    between_hosts: Codec | None = None
    """The codec of what hosts send, if the ranks of a host add `data` first."""
    squares: Tensor | None = None
    """fp32 sums of squares of each 64-element block. They lie directly behind `data`, where peers
    that help with the reduction can write them."""

    @property
    def wire_layout(self) -> Layout:
        """The layout of `data`."""
        return self.codec.wire_layout(self.layout)

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
