"""The style of all pictures: colors that are safe for color-blind readers, and plain axes.

Pictures are SVG whose colors are CSS variables, for the light, dark and print styles of the page.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from poplar.monitoring.activity import COMMUNICATION, COMPUTE, OPTIMIZER, WAITING

WIDTH = 10.0
"""Inches: 960 pixels of the page, so that font sizes match the text of the page."""
FONT_POINTS = 10.0

INK, MUTED, GRID, PAPER = "#1c2024", "#60656c", "#dfe2e6", "#fefefe"

SERIES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#3a9bdc", "#b8860b", "#7a5195", "#5b6770")
"""By rank or device: the palette of Okabe and Ito, the last three darker."""

ACTIVITY = {
    COMPUTE: "#0b6fb0",
    OPTIMIZER: "#0a9a70",
    COMMUNICATION: "#e69f00",
    WAITING: "#c9cdd2",
}
EVEN, CHOSEN = "#8a9099", "#0d71b4"
"""Earlier runs are gray; the last one, with the chosen plan, stands out."""

CSS_VARIABLES = {
    INK: "ink",
    MUTED: "muted",
    GRID: "grid",
    PAPER: "paper",
    EVEN: "even",
    CHOSEN: "chosen",
    **{color: f"series-{number}" for number, color in enumerate(SERIES)},
    **{color: f"activity-{name}" for name, color in ACTIVITY.items()},
}
"""The CSS variable of each color; all colors are different."""

_STYLE: Any = {
    "font.family": "DejaVu Sans",
    "font.size": FONT_POINTS,
    "axes.titlesize": FONT_POINTS + 1,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 10.0,
    "axes.titlecolor": INK,
    "axes.labelcolor": MUTED,
    "axes.edgecolor": GRID,
    "axes.facecolor": PAPER,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "xtick.color": GRID,
    "ytick.color": GRID,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "text.color": INK,
    "figure.facecolor": PAPER,
    "lines.linewidth": 1.8,
    "legend.frameon": False,
    "legend.labelcolor": MUTED,
    "svg.fonttype": "path",
    "svg.hashsalt": "poplar",
}


@contextmanager
def applied() -> Iterator[None]:
    """A context for drawing that neither uses nor changes the caller's matplotlib settings."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_STYLE)
        yield


def new_figure(height: float) -> Figure:
    """An empty figure of this height in inches, which pyplot does not keep."""
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def write_beside(axes: Axes, height: float, text: str, color: str) -> None:
    """Write at the right edge of the axes, centered at `height` in data coordinates."""
    place = axes.get_yaxis_transform()
    axes.text(1.012, height, text, transform=place, verticalalignment="center", color=color)


def to_svg(figure: Figure, name: str) -> str:
    """An `<svg>` element whose colors are CSS variables and whose ids begin with `name`."""
    buffer = io.StringIO()
    with applied():
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'\b(id="|href="#|url\(#)', rf"\g<1>{name}-", text)
    for size in ("width", "height"):
        text = re.sub(rf'<svg([^>]*?) {size}="[^"]*"', r"<svg\1", text, count=1)
    for color, variable in CSS_VARIABLES.items():
        text = text.replace(color, f"var(--{variable})")
    return text
