"""Divides flat parameters whose parameters may not be cut anywhere.

A flat parameter can then not follow the shares exactly. What a rank lacks, or has too much, is made
up for in the next ones, so that over the model it has its share but for one parameter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

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

    Only the points on both sides of each wanted boundary are candidates. Searched rank by rank: the
    best way to have given away all elements before a point.
    """
    points = {0, flat.numel}
    for boundary in accumulate(wanted):
        points.update(flat.cuts_around(boundary))
    cuts = sorted(points)
    best: list[tuple[float, tuple[int, ...]]] = [(0.0, (0,))]
    best += [(float("inf"), (0,))] * (len(cuts) - 1)
    for size, owns in zip(wanted, may_own, strict=True):
        best = [
            min(
                (cost + (size - (cuts[end] - cuts[start])) ** 2, (*offsets, cuts[end]))
                for start, (cost, offsets) in enumerate(best[: end + 1])
                if owns or start == end
            )
            for end in range(len(cuts))
        ]
    return Layout(best[-1][1])
