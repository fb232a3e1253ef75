"""A plot of the rows: seconds against size, one panel per collective and number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes

from collectives.case import OPERATIONS, size_of
from collectives.row import Row
from poplar.report import theme

_INCHES_OF_A_PANEL = 3.2
_FLOOR = "minimum bytes at copy bandwidth"


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw the rows with even shares of the first dtype; the others have one size only. Writes a
    PNG.
    """
    shown = [
        row
        for row in rows
        if row.case.is_even and row.dtype == rows[0].dtype and row.link_gigabits is None
    ]
    if not shown:
        raise ValueError("there is nothing to draw: no row has even shares on one host")
    operations = [name for name in OPERATIONS if any(row.operation == name for row in shown)]
    ranks = sorted({row.ranks for row in shown})
    providers = list(dict.fromkeys(row.provider for row in shown))
    colors = dict(zip(providers, theme.SERIES * len(providers), strict=False))
    with theme.style():
        height = _INCHES_OF_A_PANEL * len(operations) + 1.0
        figure = theme.new_figure(height=height)
        grid = figure.subplots(len(operations), len(ranks), sharex=True, sharey=True, squeeze=False)
        for axes, operation in zip(grid, operations, strict=True):
            for panel, size in zip(axes, ranks, strict=True):
                own = [r for r in shown if (r.operation, r.ranks) == (operation, size)]
                panel.set_title(f"{operation}, {size} ranks")
                _lines(panel, own, colors)
        seen: dict[str, object] = {}
        for panel in grid.flat:
            handles, labels = panel.get_legend_handles_labels()
            seen.update(zip(labels, handles, strict=True))
        figure.legend(seen.values(), seen.keys(), loc="outside upper left", ncols=3)
        grid[0, 0].set_ylabel("milliseconds, slowest rank")
        theme.write_png(figure, path)


def _lines(axes: Axes, rows: Sequence[Row], colors: dict[str, str]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    sizes = sorted({row.bytes for row in rows})
    for provider in dict.fromkeys(row.provider for row in rows):
        own = sorted((r for r in rows if r.provider == provider), key=lambda row: row.bytes)
        axes.plot(
            [row.bytes for row in own],
            [1e3 * row.p50_seconds for row in own],
            color=colors[provider],
            linestyle="--" if own[0].zero_copy else "-",
            marker="o",
            markersize=3,
            label=provider,
        )
    floor = {row.bytes: row.case.least_bytes / row.copy_bandwidth for row in rows}
    axes.plot(
        sizes,
        [1e3 * floor[nbytes] for nbytes in sizes],
        color=theme.MUTED,
        linestyle=":",
        label=_FLOOR,
    )
    axes.set_xticks(sizes, [size_of(nbytes) for nbytes in sizes], fontsize=8)
