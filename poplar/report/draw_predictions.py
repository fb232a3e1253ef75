"""Predicted and measured steps, of the runs and of plans similar to the chosen one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from poplar.planner.prediction import predict
from poplar.report import theme
from poplar.report.differences import difference
from poplar.report.record import Run, SimilarPlan
from poplar.values.formatting import format_seconds, format_signed_percent
from poplar.values.plan import Plan
from poplar.values.profile import ClusterProfile

_PREDICTED: dict[str, Any] = {
    "marker": "D",
    "markersize": 7,
    "markerfacecolor": "none",
    "markeredgewidth": 1.4,
}


def draw_predictions(runs: Sequence[Run]) -> Figure:
    """Draw every measured step, the median, and the prediction."""
    with theme.style():
        figure = theme.new_figure(height=0.52 * len(runs) + 1.35)
        axes = figure.subplots()
        axes.set_title("Seconds of a step, predicted and measured")
        _legend(figure, single_steps=True)
        for row, run in enumerate(runs):
            color = theme.CHOSEN if row == len(runs) - 1 else theme.EVEN
            axes.plot(
                run.step_seconds,
                _jittered(row, len(run.step_seconds)),
                linestyle="none",
                marker="o",
                markersize=4,
                color=color,
                alpha=0.45,
                markeredgewidth=0,
            )
            _median_and_prediction(
                axes, row, run.measured_step_seconds, run.predicted_step_seconds, color
            )
            theme.write_beside(axes, row, _label(run), color=theme.INK)
        _rows(axes, [run.name for run in runs])
    return figure


def draw_similar_plans(
    similar_plans: Sequence[SimilarPlan], chosen: Plan, profile: ClusterProfile
) -> Figure | None:
    """Draw the chosen plan among similar plans, fastest first; None if there are none."""
    if not similar_plans:
        return None
    ordered = sorted(similar_plans, key=lambda near: near.step_seconds)
    with theme.style():
        figure = theme.new_figure(height=0.25 * len(ordered) + 1.35)
        axes = figure.subplots()
        axes.set_title("Plans similar to the chosen one: median seconds of a step, fastest first")
        _legend(figure, single_steps=False)
        for row, near in enumerate(ordered):
            color = theme.CHOSEN if near.plan == chosen else theme.EVEN
            _median_and_prediction(
                axes, row, near.step_seconds, _predicted(profile, near.plan), color
            )
        _rows(axes, [difference(near.plan, chosen) for near in ordered])
        for label, near in zip(axes.get_yticklabels(), ordered, strict=True):
            if near.plan == chosen:
                label.set(color=theme.CHOSEN, fontweight="bold")
    return figure


def _predicted(profile: ClusterProfile, plan: Plan) -> float | None:
    try:
        return predict(profile, plan).step_seconds
    except ValueError:
        return None  # beyond what was measured, or does not fit


def _median_and_prediction(
    axes: Axes, row: int, measured: float, predicted: float | None, color: str
) -> None:
    if predicted is not None:
        axes.plot([measured, predicted], [row, row], color=theme.GRID, linewidth=3, zorder=1)
        axes.plot(predicted, row, color=theme.INK, zorder=4, **_PREDICTED)
    axes.plot(measured, row, marker="|", markersize=15, markeredgewidth=3, color=color, zorder=3)


def _rows(axes: Axes, names: Sequence[str]) -> None:
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.tick_params(axis="y", labelcolor=theme.INK, length=0)
    axes.tick_params(axis="x", length=0)
    axes.spines["left"].set_visible(False)
    axes.grid(axis="y", visible=False)
    axes.margins(x=0.06)


def _legend(figure: Figure, *, single_steps: bool) -> None:
    common: dict[str, Any] = {"color": theme.MUTED, "linestyle": "none"}
    handles = [
        Line2D([], [], marker="o", markersize=4, alpha=0.6, label="one step", **common),
        Line2D([], [], marker="|", markersize=12, markeredgewidth=3, label="median step", **common),
        Line2D([], [], label="predicted", **_PREDICTED, **common),
    ]
    handles = handles if single_steps else handles[1:]
    figure.legend(handles=handles, loc="outside upper left", ncols=len(handles))


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
