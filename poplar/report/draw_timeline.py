"""A simulated step: the compute and communication stream of each rank."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from poplar.formatting import format_percent, format_seconds
from poplar.report import theme
from poplar.report.activity import COMMUNICATION, COMPUTE, OPTIMIZER, WAITING
from poplar.simulator.timeline import Span, Timeline

_MOST_LABELLED_RANKS = 16
_INCHES_OF_A_RANK = 0.5
_TALLEST_PANEL = 8.0
_SEAM_POINTS = 0.25
"""Wide enough to hide the seam between adjacent spans."""
_STREAM_HEIGHT = 0.36
_LOOKS = {
    "forward": (COMPUTE, 1.0),
    "backward": (COMPUTE, 0.7),
    "optimizer": (OPTIMIZER, 1.0),
    "communication": (COMMUNICATION, 1.0),
    "waiting for other ranks": (WAITING, 1.0),
}
"""The activity, which gives the color, and the opacity."""


def draw_timeline(timeline: Timeline) -> Figure:
    """Draw two lanes per rank, compute above communication; gray is waiting for other ranks."""
    ranks = timeline.world_size
    with theme.style():
        figure = theme.new_figure(height=min(_TALLEST_PANEL, _INCHES_OF_A_RANK * ranks + 0.6) + 1.0)
        axes = figure.subplots()
        axes.set_title(
            f"Simulated step at stage {timeline.stage}: {format_seconds(timeline.step_seconds)}"
        )
        figure.legend(
            handles=[
                Patch(color=theme.ACTIVITY[activity], alpha=alpha, label=name)
                for name, (activity, alpha) in _LOOKS.items()
            ],
            loc="outside upper left",
            ncols=len(_LOOKS),
            handlelength=1.2,
        )
        for rank, spans in enumerate(timeline.spans):
            _lanes(axes, rank, spans, timeline.step_seconds)
        _label_ranks(axes, timeline)
        axes.set_xlim(0.0, 1.01 * timeline.step_seconds or 1.0)
        axes.set_xlabel("seconds since the step began")
    return figure


def _lanes(axes: Axes, rank: int, spans: Sequence[Span], step: float) -> None:
    waits = [(begin, end - begin) for begin, end in _gaps(spans, step)]
    _bars(axes, waits, "waiting for other ranks", rank - _STREAM_HEIGHT, 2 * _STREAM_HEIGHT)
    for what in ("forward", "backward", "optimizer"):
        own = [(span.begin, span.seconds) for span in spans if span.what == what]
        _bars(axes, own, what, rank - _STREAM_HEIGHT, _STREAM_HEIGHT)
    carried = [(span.begin, span.seconds) for span in spans if span.stream == "communication"]
    _bars(axes, carried, "communication", rank, _STREAM_HEIGHT)


def _bars(
    axes: Axes, stretches: Sequence[tuple[float, float]], what: str, low: float, height: float
) -> None:
    activity, alpha = _LOOKS[what]
    axes.broken_barh(
        stretches,
        (low, height),
        facecolor=theme.ACTIVITY[activity],
        edgecolor=theme.ACTIVITY[activity],
        linewidth=_SEAM_POINTS,
        alpha=alpha,
    )


def _gaps(spans: Sequence[Span], step: float) -> list[tuple[float, float]]:
    """When neither stream is busy, as (begin, end)."""
    gaps = []
    end = 0.0
    for span in sorted(spans, key=lambda span: span.begin):
        if span.begin > end:
            gaps.append((end, span.begin))
        end = max(end, span.end)
    return [*gaps, (end, step)] if step > end else gaps


def _label_ranks(axes: Axes, timeline: Timeline) -> None:
    stride = -(-timeline.world_size // _MOST_LABELLED_RANKS)
    shown = range(0, timeline.world_size, stride)
    axes.set_yticks(list(shown), [f"rank {rank}" for rank in shown])
    axes.set_ylim(timeline.world_size - 0.5, -0.5)
    axes.grid(axis="y", visible=False)
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="both", length=0)
    for rank in shown:
        axes.text(
            1.012,
            rank,
            f"busy {format_percent(timeline.busy_fraction[rank])}",
            transform=axes.get_yaxis_transform(),
            verticalalignment="center",
            color=theme.MUTED,
        )
