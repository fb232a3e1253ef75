"""The measured curves of every rank: time and memory of a pass against its samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from poplar.monitoring import style
from poplar.planner.cost_model import costs_of
from poplar.values.formatting import byte_unit
from poplar.values.plan import Plan
from poplar.values.profile import ClusterProfile, DeviceProfile

_LINE_POINTS = 200
_MEASURED: dict[str, Any] = {"linestyle": "none", "marker": "o", "markersize": 5}
_PLANNED: dict[str, Any] = {
    "linestyle": "none",
    "marker": "o",
    "markersize": 11,
    "markerfacecolor": "none",
    "markeredgewidth": 1.5,
}


def draw_curves(profile: ClusterProfile, plan: Plan) -> Figure:
    """Draw measured points, the planner's interpolation, and the batches of the plan."""
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
    with style.applied():
        figure = style.new_figure(height=4.6)
        time, memory = figure.subplots(1, 2)
        time.set_title("Seconds of a pass, forward and backward")
        memory.set_title(f"Activation memory of a pass, {unit}")
        for rank, device in enumerate(profile.devices):
            color, sizes = colors[labels[rank]], plan.micro_batches[rank]
            _draw_device(time, device, sizes, color, "seconds", 1)
            _draw_device(memory, device, sizes, color, "activation_bytes", factor)
        for axes in (time, memory):
            axes.set_xlabel("samples in the pass")
            axes.set_xlim(left=0)
            axes.set_ylim(bottom=0)
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
    """Draw the curve, the measured points and the batches of the plan.

    Args:
        axes: where to draw.
        device: measured.
        sizes: micro-batches of the plan.
        color: of the curve.
        quantity: a field of `BatchPoint`, and the method of `DeviceProfile` that interpolates it.
        factor: the unit that is drawn.
    """

    def draw(batches: Sequence[int], **options: Any) -> None:
        heights = [getattr(device, quantity)(batch) / factor for batch in batches]
        axes.plot(batches, heights, color=color, **options)

    measured = [point.batch for point in device.points]
    stride = max(1, device.max_batch // _LINE_POINTS)
    draw(sorted({*measured, *range(measured[0], device.max_batch + 1, stride)}))
    heights = [getattr(point, quantity) / factor for point in device.points]
    axes.plot(measured, heights, color=color, markeredgecolor=style.PAPER, **_MEASURED)
    draw(sorted({size for size in sizes if size}), **_PLANNED)
