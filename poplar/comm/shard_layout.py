"""Shard layouts: which rank owns which elements of a flat buffer, and the transfers between
layouts.

A `Layout` gives each rank one contiguous slice, in rank order, without gaps. Re-planning and
checkpoints both move state by the list of `transfers` between two layouts. All numbers are
elements, never bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from poplar import _core

Bounds = tuple[int, int]
"""Elements `[start, stop)`."""

ALIGNMENT = 64
"""Boundaries are multiples of this many elements, so that vector kernels and block sums see whole
blocks and their results do not depend on the boundaries (`AdamW(fused=True)` gives other bits at
boundaries of 4 elements, the same from 8 on).
"""


@dataclass(frozen=True, slots=True)
class Layout:
    """One flat buffer cut into one contiguous slice per rank; slices may be empty."""

    offsets: tuple[int, ...]
    """`world_size + 1` boundaries: rank `r` owns `[offsets[r], offsets[r + 1])`."""
    sizes: tuple[int, ...] = field(init=False, repr=False, compare=False)
    """Elements owned by each rank."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "offsets", tuple(int(offset) for offset in self.offsets))
        if len(self.offsets) < 2:
            raise ValueError(
                f"Layout.offsets must have at least 2 boundaries, one more than ranks, got "
                f"{self.offsets}"
            )
        if self.offsets[0] != 0:
            raise ValueError(f"Layout.offsets must start at 0, got {self.offsets[0]}")
        for rank, (start, stop) in enumerate(pairwise(self.offsets)):
            if stop < start:
                raise ValueError(
                    f"Layout.offsets must not decrease, but rank {rank} would own [{start}, {stop})"
                )
        sizes = tuple(stop - start for start, stop in pairwise(self.offsets))
        object.__setattr__(self, "sizes", sizes)

    @classmethod
    def from_shares(cls, numel: int, shares: Sequence[float], alignment: int = ALIGNMENT) -> Layout:
        """Cut `numel` elements according to `shares`, at multiples of `alignment`.

        Args:
            numel: elements in the buffer, padding included: a multiple of `alignment`.
            shares: fraction owned by each rank; non-negative, sums to 1. Zero gives an empty slice.
            alignment: every boundary inside the buffer is a multiple of this many elements.

        Raises:
            ValueError: shares that are negative, not finite, or do not sum to 1; a buffer that is
                not padded.
        """
        return cls(tuple(_core.shard_boundaries(numel, shares, alignment)))

    @classmethod
    def even(cls, numel: int, world_size: int) -> Layout:
        """Cut `numel` elements into slices that differ by at most one `ALIGNMENT`."""
        if world_size < 1:
            raise ValueError(f"world_size must be at least 1, got {world_size}")
        return cls.from_shares(numel, (1.0 / world_size,) * world_size)

    @property
    def numel(self) -> int:
        """Elements in the whole buffer."""
        return self.offsets[-1]

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return len(self.offsets) - 1

    @property
    def is_even(self) -> bool:
        """Whether all ranks own the same number of elements."""
        return self.sizes.count(self.sizes[0]) == len(self.sizes)

    def bounds(self, rank: int) -> tuple[int, int]:
        """The first element of `rank` and the one after its last."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank}: this layout is for ranks 0 to {self.world_size - 1}")
        return self.offsets[rank], self.offsets[rank + 1]

    def part(self, start: int, numel: int) -> Layout:
        """The layout of `numel` elements from `start` on."""
        return Layout(tuple(min(max(offset - start, 0), numel) for offset in self.offsets))

    def size(self, rank: int) -> int:
        """Elements owned by `rank`."""
        start, stop = self.bounds(rank)
        return stop - start


class Transfer(NamedTuple):
    """Elements `[start, stop)` move from rank `source` of the old layout to `target` of the new."""

    source: int
    target: int
    start: int
    stop: int


def transfers(old: Layout, new: Layout) -> tuple[Transfer, ...]:
    """The transfers that change a buffer's layout from `old` to `new`.

    Args:
        old: the current layout.
        new: the layout afterwards; the number of ranks may differ.

    Returns:
        Ascending and without gaps: together they cover every element exactly once. Elements that
        stay on their rank (`source == target`) are included, so that a rank can build its new slice
        from this list alone.

    Raises:
        ValueError: the layouts have different numbers of elements.
    """
    if old.numel != new.numel:
        raise ValueError(
            f"cannot turn a layout of {old.numel} elements into one of {new.numel}: both must "
            "describe the same buffer; was the model changed, or padded for another alignment?"
        )
    return tuple(Transfer(*moved) for moved in _core.transfers(old.offsets, new.offsets))
