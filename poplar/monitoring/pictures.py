"""The pictures of a report: measured curves, traced steps, losses, predicted and measured steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from poplar.monitoring import style
from poplar.monitoring.activity import (
    ACTIVITIES,
    COMPUTE,
    OPTIMIZER,
    seconds_by_activity,
    stretches,
)
from poplar.monitoring.record import Run
from poplar.planner.cost_model import costs_of
from poplar.values.formatting import (
    byte_unit,
    format_percent,
    format_seconds,
    format_signed_percent,
)
from poplar.values.plan import Plan
from poplar.values.profile import ClusterProfile, DeviceProfile

_LINE_POINTS = 200
_MOST_LABELLED_RANKS = 16
_INCHES_OF_A_RANK = 0.34
_TALLEST_PANEL = 6.0
_TITLE_PAD = 20.0
"""Points: leaves space for the label of the prediction."""
_SEAM_POINTS = 0.25
"""Wide enough to hide the seam between adjacent stretches."""

_MEASURED: dict[str, Any] = {"linestyle": "none", "marker": "o", "markersize": 5}
_PLANNED: dict[str, Any] = {
    "linestyle": "none",
    "marker": "o",
    "markersize": 11,
    "markerfacecolor": "none",
    "markeredgewidth": 1.5,
}
_STEP: dict[str, Any] = {"marker": "o", "markersize": 4, "alpha": 0.45, "linestyle": "none"}
_MEDIAN: dict[str, Any] = {
    "marker": "|",
    "markersize": 15,
    "markeredgewidth": 3,
    "linestyle": "none",
}
_PREDICTED: dict[str, Any] = {
    "marker": "D",
    "markersize": 7,
    "markerfacecolor": "none",
    "linestyle": "none",
}


def draw_curves(profile: ClusterProfile, plan: Plan) -> Figure:
    """Draw time and memory of a pass: measured, interpolated, and at the batches of the plan."""
    unit, factor, _ = byte_unit(
        max(point.activation_bytes for device in profile.devices for point in device.points)
    )
    if any(unit_plan.recomputed_on for unit_plan in plan.units):
        profile = costs_of(profile, plan).cluster  # with the curves of these passes
    labels = _labels(profile)
    colors = {
        label: style.SERIES[number % len(style.SERIES)]
        for number, label in enumerate(dict.fromkeys(labels))
    }
    figure = style.new_figure(height=4.6)
    time, memory = figure.subplots(1, 2)
    time.set_title("Seconds of a pass, forward and backward")
    memory.set_title(f"Activation memory of a pass, {unit}")
    for rank, device in enumerate(profile.devices):
        color, sizes = colors[labels[rank]], plan.micro_batches[rank]
        _draw_device(time, device, sizes, color, "seconds", 1)
        _draw_device(memory, device, sizes, color, "activation_bytes", factor)
    for axes in (time, memory):
        axes.set(xlabel="samples in the pass", xlim=(0, None), ylim=(0, None))
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    figure.legend(
        handles=[
            Line2D([], [], color=style.MUTED, label="measured", **_MEASURED),
            Line2D([], [], color=style.MUTED, label="interpolated by the planner"),
            Line2D([], [], color=style.MUTED, label="used by the plan", **_PLANNED),
            *(Line2D([], [], color=color, label=label) for label, color in colors.items()),
        ],
        loc="outside upper left",
        ncols=3,
    )
    return figure


def _labels(profile: ClusterProfile) -> list[str]:
    """The label of each rank's curves; ranks share that of their device if colors are too few."""
    names = [device.name for device in profile.devices]
    if len(names) > len(style.SERIES):
        return [f"{names.count(name)} × {name}" for name in names]
    if len(set(names)) == 1:
        return [f"rank {rank}" for rank in range(len(names))]
    return [f"rank {rank} · {name}" for rank, name in enumerate(names)]


def _draw_device(
    axes: Axes, device: DeviceProfile, sizes: Sequence[int], color: str, quantity: str, factor: int
) -> None:
    """Draw a curve of `quantity`: a field of `BatchPoint`, interpolated by `DeviceProfile`."""

    def draw(batches: Sequence[int], **options: Any) -> None:
        heights = [getattr(device, quantity)(batch) / factor for batch in batches]
        axes.plot(batches, heights, color=color, **options)

    measured = [point.batch for point in device.points]
    stride = max(1, device.max_batch // _LINE_POINTS)
    draw(sorted({*measured, *range(measured[0], device.max_batch + 1, stride)}))
    heights = [getattr(point, quantity) / factor for point in device.points]
    axes.plot(measured, heights, color=color, markeredgecolor=style.PAPER, **_MEASURED)
    draw(sorted({size for size in sizes if size}), **_PLANNED)


def draw_steps(runs: Sequence[Run]) -> Figure | None:
    """Draw one panel per traced run, on one time scale; None if no run was traced."""
    traced = [run for run in runs if any(run.spans)]
    if not traced:
        return None
    panels = [min(_TALLEST_PANEL, _INCHES_OF_A_RANK * len(run.spans) + 0.45) for run in traced]
    figure = style.new_figure(height=sum(panels) + 0.7 * len(traced) + 0.75)
    grid = figure.subplots(len(traced), 1, sharex=True, squeeze=False, height_ratios=panels)
    figure.legend(
        handles=[Patch(color=style.ACTIVITY[name], label=name) for name in ACTIVITIES],
        loc="outside upper left",
        ncols=len(ACTIVITIES),
    )
    ends = [_draw_step(axes, run) for axes, run in zip(grid[:, 0], traced, strict=True)]
    grid[-1, 0].set(xlim=(0.0, 1.03 * max(ends)), xlabel="seconds since the step began")
    return figure


def _draw_step(axes: Axes, run: Run) -> float:
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


def draw_losses(runs: Sequence[Run]) -> Figure | None:
    """Draw the loss against steps and against seconds; None if no run has losses."""
    shown = [run for run in runs if run.losses]
    if not shown:
        return None
    figure = style.new_figure(height=3.7)
    by_step, by_time = figure.subplots(1, 2, sharey=True)
    end = 0.0
    for run in shown:
        chosen = run is shown[-1]
        color, width = (style.CHOSEN, 1.6) if chosen else (style.EVEN, 4.5)
        steps = range(run.first_step, run.first_step + len(run.losses))
        # A run of later steps continues the training of the run before.
        seconds = _clock(run, began=end if run.first_step > shown[0].first_step else 0.0)
        end = seconds[-1]
        losses = [math.nan if loss is None else loss for loss in run.losses]  # a gap
        for axes, places in ((by_step, steps), (by_time, seconds)):
            axes.plot(places, losses, color=color, linewidth=width, label=run.name)
    by_step.set(title="Loss of the global batch, by step", xlabel="step")
    by_time.set(title="Loss of the global batch, by time", xlabel="seconds of training")
    by_step.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True))
    for axes in (by_step, by_time):
        axes.set_xlim(left=0)
        axes.legend(loc="upper right")
    by_time.tick_params(labelleft=True)
    return figure


def _clock(run: Run, began: float) -> list[float]:
    """When each step ended. Steps that were not timed count as the median step, at the start."""
    untimed = len(run.losses) - len(run.step_seconds)
    seconds = [run.measured_step_seconds] * max(0, untimed) + list(run.step_seconds)
    return list(accumulate(seconds[: len(run.losses)], initial=began))[1:]


def draw_predictions(runs: Sequence[Run]) -> Figure:
    """Draw every measured step, the median, and the prediction."""
    figure = style.new_figure(height=0.52 * len(runs) + 1.35)
    axes = figure.subplots()
    axes.set_title("Seconds of a step, predicted and measured")
    for row, run in enumerate(runs):
        color = style.CHOSEN if run is runs[-1] else style.EVEN
        measured, predicted = run.measured_step_seconds, run.predicted_step_seconds
        axes.plot(run.step_seconds, _jittered(row, len(run.step_seconds)), color=color, **_STEP)
        label = f"measured {format_seconds(measured)}"
        if predicted is not None and run.prediction_error is not None:
            axes.plot([measured, predicted], [row, row], color=style.GRID, linewidth=3, zorder=1)
            axes.plot(predicted, row, color=style.INK, zorder=4, **_PREDICTED)
            error = format_signed_percent(run.prediction_error)
            label += f"\npredicted {format_seconds(predicted)} ({error})"
        axes.plot(measured, row, color=color, zorder=3, **_MEDIAN)
        style.write_beside(axes, row, label, style.INK)
    axes.set_yticks(range(len(runs)), [run.name for run in runs])
    axes.set_ylim(len(runs) - 0.4, -0.6)
    axes.tick_params(axis="both", length=0)
    axes.tick_params(axis="y", labelcolor=style.INK)
    axes.grid(axis="y", visible=False)
    markers = {"one step": _STEP, "median step": _MEDIAN, "predicted": _PREDICTED}
    figure.legend(
        handles=[
            Line2D([], [], color=style.MUTED, label=label, **marker)
            for label, marker in markers.items()
        ],
        loc="outside upper left",
        ncols=len(markers),
    )
    return figure


def _jittered(row: int, many: int) -> list[float]:
    """Deterministic offsets around a row, so that equal steps do not cover each other."""
    golden = 0.6180339887
    return [row + 0.44 * ((i * golden) % 1.0 - 0.5) for i in range(many)]
