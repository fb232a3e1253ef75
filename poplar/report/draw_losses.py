"""The loss of every run, by step and by time."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import MaxNLocator

from poplar.report import theme
from poplar.report.record import Run


def draw_losses(runs: Sequence[Run]) -> Figure | None:
    """Draw the loss against steps and against seconds; None if no run has losses."""
    shown = [run for run in runs if run.losses]
    if not shown:
        return None
    with theme.style():
        figure = theme.new_figure(height=3.7)
        by_step, by_time = figure.subplots(1, 2, sharey=True)
        by_step.set_title("Loss of the global batch, by step")
        by_time.set_title("Loss of the global batch, by time")
        by_step.set_xlabel("step")
        by_time.set_xlabel("seconds of training")
        by_step.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True))
        labels = [
            _panel(by_step, shown, [range(1, len(run.losses) + 1) for run in shown]),
            _panel(by_time, shown, [_clock(run) for run in shown]),
        ]
        by_time.tick_params(labelleft=True)
        theme.settle(figure)
        for axes, texts in zip((by_step, by_time), labels, strict=True):
            _place(axes, texts)
    return figure


def _panel(axes: Axes, runs: Sequence[Run], places: Sequence[Sequence[float]]) -> list[Text]:
    """Draw the runs, later ones thinner, so that overlapping curves can both be seen."""
    texts = []
    for number, (run, xs) in enumerate(zip(runs, places, strict=True)):
        chosen = number == len(runs) - 1
        color = theme.CHOSEN if chosen else theme.EVEN
        axes.plot(xs, run.losses, color=color, linewidth=1.6 if chosen else 4.5, zorder=2 + number)
        axes.plot(xs[-1:], run.losses[-1:], color=color, marker="o", zorder=2 + number)
        texts.append(
            axes.annotate(
                run.name,
                (xs[-1], run.losses[-1]),
                xytext=(9, 0),
                textcoords="offset points",
                verticalalignment="center",
                color=color,
                fontweight="bold",
                annotation_clip=False,
            )
        )
    axes.set_xlim(left=0)
    axes.margins(y=0.14)
    return list(texts)


def _clock(run: Run) -> list[float]:
    """When each step ended. Steps before the timed ones count as the median step."""
    untimed = len(run.losses) - len(run.step_seconds)
    seconds = [run.measured_step_seconds] * max(0, untimed) + list(run.step_seconds)
    return list(accumulate(seconds[: len(run.losses)]))


def _place(axes: Axes, texts: Sequence[Text]) -> None:
    """Put labels beside the ends of their curves; below them if the curves end far apart."""
    width, height = theme.points_of(axes)
    low, high = axes.get_ylim()
    left, right = axes.get_xlim()
    ends = [(text.xy[0], (text.xy[1] - low) / (high - low) * height) for text in texts]  # type: ignore[attr-defined]
    near = 6 * theme.FONT_POINTS * (right - left) / width
    if any(abs(x - ends[0][0]) > near for x, _ in ends):
        for text in texts:  # below the ends: the slower run's curve passes above
            text.set(position=(4, -8), horizontalalignment="right", verticalalignment="top")
        return
    places = theme.spread([y for _, y in ends], 1.35 * theme.FONT_POINTS, 0.0, height)
    for text, (_, y), place in zip(texts, ends, places, strict=True):
        text.set_position((9, place - y))
