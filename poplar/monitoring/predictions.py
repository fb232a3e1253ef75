"""Predicted and measured steps, of the runs and of plans similar to the chosen one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from poplar.monitoring import style
from poplar.monitoring.differences import difference
from poplar.monitoring.reasons import predicted
from poplar.monitoring.record import Run, SimilarPlan
from poplar.values.formatting import format_seconds, format_signed_percent
from poplar.values.plan import Plan
from poplar.values.profile import ClusterProfile

_STEP: dict[str, Any] = {"marker": "o", "markersize": 4, "alpha": 0.45, "linestyle": "none"}
_MEDIAN: dict[str, Any] = {"marker": "|", "markersize": 15, "markeredgewidth": 3}
_PREDICTED: dict[str, Any] = {"marker": "D", "markersize": 7, "markerfacecolor": "none"}


def draw_predictions(runs: Sequence[Run]) -> Figure:
    """Draw every measured step, the median, and the prediction."""
    with style.applied():
        figure = style.new_figure(height=0.52 * len(runs) + 1.35)
        axes = figure.subplots()
        axes.set_title("Seconds of a step, predicted and measured")
        for row, run in enumerate(runs):
            color = style.CHOSEN if row == len(runs) - 1 else style.EVEN
            axes.plot(run.step_seconds, _jittered(row, len(run.step_seconds)), color=color, **_STEP)
            _row(axes, row, run.measured_step_seconds, run.predicted_step_seconds, color)
            style.write_beside(axes, row, _label(run), style.INK)
        _finish(figure, axes, [run.name for run in runs], {"one step": _STEP})
    return figure


def draw_similar_plans(
    similar_plans: Sequence[SimilarPlan], chosen: Plan, profile: ClusterProfile
) -> Figure | None:
    """Draw the chosen plan among similar plans, fastest first; None if there are none."""
    if not similar_plans:
        return None
    ordered = sorted(similar_plans, key=lambda near: near.step_seconds)
    with style.applied():
        figure = style.new_figure(height=0.25 * len(ordered) + 1.35)
        axes = figure.subplots()
        axes.set_title("Plans similar to the chosen one: median seconds of a step, fastest first")
        for row, near in enumerate(ordered):
            color = style.CHOSEN if near.plan == chosen else style.EVEN
            found = predicted(profile, near.plan)
            prediction = None if found is None else found.step_seconds
            _row(axes, row, near.step_seconds, prediction, color)
        _finish(figure, axes, [difference(near.plan, chosen) for near in ordered], {})
        for label, near in zip(axes.get_yticklabels(), ordered, strict=True):
            if near.plan == chosen:
                label.set(color=style.CHOSEN, fontweight="bold")
    return figure


def _row(axes: Axes, row: int, measured: float, prediction: float | None, color: str) -> None:
    """Draw the median, and the prediction with the distance between both."""
    if prediction is not None:
        axes.plot([measured, prediction], [row, row], color=style.GRID, linewidth=3, zorder=1)
        axes.plot(prediction, row, color=style.INK, zorder=4, **_PREDICTED)
    axes.plot(measured, row, color=color, zorder=3, **_MEDIAN)


def _finish(
    figure: Figure, axes: Axes, names: Sequence[str], more_markers: dict[str, dict[str, Any]]
) -> None:
    """Name the rows, and add the legend of the markers."""
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.tick_params(axis="both", length=0)
    axes.tick_params(axis="y", labelcolor=style.INK)
    axes.grid(axis="y", visible=False)
    markers = {**more_markers, "median step": _MEDIAN, "predicted": _PREDICTED}
    figure.legend(
        handles=[
            Line2D([], [], color=style.MUTED, label=label, **{**marker, "linestyle": "none"})
            for label, marker in markers.items()
        ],
        loc="outside upper left",
        ncols=len(markers),
    )


def _label(run: Run) -> str:
    measured = f"measured {format_seconds(run.measured_step_seconds)}"
    if run.predicted_step_seconds is None or run.prediction_error is None:
        return measured
    return (
        f"{measured}\npredicted {format_seconds(run.predicted_step_seconds)} "
        f"({format_signed_percent(run.prediction_error)})"
    )


def _jittered(row: int, many: int) -> list[float]:
    """Deterministic offsets around a row, so that equal steps do not cover each other."""
    golden = 0.6180339887
    return [row + 0.44 * ((i * golden) % 1.0 - 0.5) for i in range(many)]
