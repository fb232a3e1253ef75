"""Divides flat parameters whose parameters may not be cut anywhere.

A flat parameter can then not follow the shares exactly. What a rank lacks, or has too much, is made
up for in the next ones, so that over the model it has its share but for one parameter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from poplar.comm.shard_layout import Layout
from poplar.zero.flat_parameter import FlatParameter

Shares = Sequence[float]


def layouts_under(flats: Mapping[FlatParameter, Shares]) -> dict[FlatParameter, Layout]:
    """The layout of each flat parameter under its shares.

    Args:
        flats: in the agreed order. A rank with the share 0 owns nothing.
    """
    layouts: dict[FlatParameter, Layout] = {}
    owed: list[float] = []
    for flat, shares in flats.items():
        owed = owed or [0.0] * len(shares)
        if flat.is_cut_anywhere and not any(owed):
            layouts[flat] = flat.layout_under(shares)
            continue
        wanted = [flat.numel * share + debt for share, debt in zip(shares, owed, strict=True)]
        layout = layouts[flat] = _nearest_layout(flat, wanted, [share > 0 for share in shares])
        owed = [size - own for size, own in zip(wanted, layout.sizes, strict=True)]
    return layouts


def _nearest_layout(
    flat: FlatParameter, wanted: Sequence[float], may_own: Sequence[bool]
) -> Layout:
    """The layout with the least sum of squared differences from the wanted sizes.

    A boundary is one of the two points around the wanted one. Searched rank by rank: the best way
    to have given away all elements before a point.
    """
    last = max(rank for rank, owns in enumerate(may_own) if owns)
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, (0,))}
    boundary = 0.0
    for rank, (size, owns) in enumerate(zip(wanted, may_own, strict=True)):
        boundary = max(boundary, boundary + size) if rank < last else flat.numel
        if owns:
            best = {
                end: min(
                    (cost + (size - (end - start)) ** 2, (*offsets, end))
                    for start, (cost, offsets) in best.items()
                    if start <= end
                )
                for end in set(flat.cuts_around(boundary))
                if end >= min(best)
            }
        else:
            best = {end: (cost, (*offsets, end)) for end, (cost, offsets) in best.items()}
    return Layout(min(found for end, found in best.items() if end == flat.numel)[1])
