"""One traced step of each run: what each rank did when."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from poplar.monitoring import style
from poplar.monitoring.activity import (
    ACTIVITIES,
    COMPUTE,
    OPTIMIZER,
    seconds_by_activity,
    stretches,
)
from poplar.monitoring.record import Run
from poplar.values.formatting import format_percent, format_seconds

_MOST_LABELLED_RANKS = 16
_INCHES_OF_A_RANK = 0.34
_TALLEST_PANEL = 6.0
_TITLE_PAD = 20.0
"""Points: leaves space for the label of the prediction."""
_SEAM_POINTS = 0.25
"""Wide enough to hide the seam between adjacent stretches."""


def draw_steps(runs: Sequence[Run]) -> Figure | None:
    """Draw one panel per traced run, on one time scale; None if no run was traced."""
    traced = [run for run in runs if any(run.spans)]
    if not traced:
        return None
    with style.applied():
        panels = [min(_TALLEST_PANEL, _INCHES_OF_A_RANK * len(run.spans) + 0.45) for run in traced]
        figure = style.new_figure(height=sum(panels) + 0.7 * len(traced) + 0.75)
        grid = figure.subplots(len(traced), 1, sharex=True, squeeze=False, height_ratios=panels)
        figure.legend(
            handles=[Patch(color=style.ACTIVITY[name], label=name) for name in ACTIVITIES],
            loc="outside upper left",
            ncols=len(ACTIVITIES),
        )
        ends = [_panel(axes, run) for axes, run in zip(grid[:, 0], traced, strict=True)]
        grid[-1, 0].set_xlim(0.0, 1.03 * max(ends))
        grid[-1, 0].set_xlabel("seconds since the step began")
    return figure


def _panel(axes: Axes, run: Run) -> float:
    """Draw one run; return the least extent of its time axis, in seconds."""
    rows = stretches(run.spans)
    end = max((row[-1].stop for row in rows if row), default=0.0)
    axes.set_title(f"{run.name}: {format_seconds(end)} in this step", pad=_TITLE_PAD)
    for rank, row in enumerate(rows):
        for activity in ACTIVITIES:
            axes.broken_barh(
                [(part.start, part.seconds) for part in row if part.activity == activity],
                (rank - 0.36, 0.72),
                color=style.ACTIVITY[activity],
                linewidth=_SEAM_POINTS,
            )
    shown = range(0, len(rows), -(-len(rows) // _MOST_LABELLED_RANKS))
    axes.set_yticks(list(shown), [f"rank {rank}" for rank in shown])
    for rank in shown:
        totals = seconds_by_activity(rows[rank])
        busy = (totals[COMPUTE] + totals[OPTIMIZER]) / end if end else 0.0
        style.write_beside(axes, rank, f"busy {format_percent(busy)}", style.MUTED)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.grid(axis="y", visible=False)
    axes.tick_params(axis="both", length=0, labelbottom=True)
    predicted = run.predicted_step_seconds
    if predicted is not None:
        axes.axvline(predicted, color=style.INK, linewidth=1.2, linestyle=(0, (4, 3)), zorder=5)
        axes.annotate(
            f"predicted {format_seconds(predicted)}",
            (predicted, 1),
            xycoords=axes.get_xaxis_transform(),
            xytext=(0, 3),
            textcoords="offset points",
            horizontalalignment="center",
        )
    return max(end, predicted or 0.0)
