"""The measured curves of every rank: time and memory of a pass against its samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Text
from matplotlib.ticker import MaxNLocator

from poplar.planner.cost_model import costs_of
from poplar.report import theme
from poplar.values.formatting import byte_unit
from poplar.values.plan import Plan
from poplar.values.profile import BatchPoint, ClusterProfile, DeviceProfile

_LONGEST_LABEL = 24
_LINE_POINTS = 200
_EQUAL_WITHIN = 0.02
_MEASURED: dict[str, Any] = {"linestyle": "none", "marker": "o", "markersize": 5}
_PLANNED: dict[str, Any] = {
    "linestyle": "none",
    "marker": "o",
    "markersize": 11,
    "markerfacecolor": "none",
    "markeredgewidth": 1.5,
}


@dataclass(frozen=True, slots=True)
class _Series:
    """Curves that share a color and a label."""

    label: str
    color: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Quantity:
    """What a panel shows: the field of `BatchPoint` that `DeviceProfile` interpolates, scaled."""

    name: str
    unit: float = 1.0

    def at(self, device: DeviceProfile, batch: int) -> float:
        return float(getattr(device, self.name)(batch)) / self.unit

    def measured(self, point: BatchPoint) -> float:
        return float(getattr(point, self.name)) / self.unit


def draw_curves(profile: ClusterProfile, plan: Plan) -> Figure:
    """Draw measured points, the planner's interpolation, and the batches of the plan."""
    unit, factor, _ = byte_unit(
        max(point.activation_bytes for device in profile.devices for point in device.points)
    )
    with theme.style():
        figure = theme.new_figure(height=4.3)
        left, right = figure.subplots(1, 2)
        left.set_title("Seconds of a pass, forward and backward")
        right.set_title(f"Activation memory of a pass, {unit}")
        _legend(figure)
        if any(unit.recomputed_on for unit in plan.units):
            profile = costs_of(profile, plan).cluster  # with the curves of these passes
        series = _series(profile)
        quantities = (_Quantity("seconds"), _Quantity("activation_bytes", factor))
        labels = [
            _panel(axes, profile, plan, series, quantity)
            for axes, quantity in zip((left, right), quantities, strict=True)
        ]
        theme.settle(figure)
        for axes, texts in zip((left, right), labels, strict=True):
            _move_apart(axes, texts)
    return figure


def _series(profile: ClusterProfile) -> list[_Series]:
    """One per rank; one per device name if there are more ranks than colors."""
    names = [device.name for device in profile.devices]
    if len(names) <= len(theme.SERIES):
        labels = [f"rank {rank}" for rank in range(len(names))]
        if len(set(names)) > 1:
            labels = [f"{label} · {name}" for label, name in zip(labels, names, strict=True)]
        return [
            _Series(_shortened(label), theme.SERIES[rank], (rank,))
            for rank, label in enumerate(labels)
        ]
    distinct = list(dict.fromkeys(names))
    return [
        _Series(
            _shortened(f"{names.count(own)} × {own}"),
            theme.SERIES[number % len(theme.SERIES)],
            tuple(rank for rank, name in enumerate(names) if name == own),
        )
        for number, own in enumerate(distinct)
    ]


def _panel(
    axes: Axes, profile: ClusterProfile, plan: Plan, series: Sequence[_Series], quantity: _Quantity
) -> list[Text]:
    """Draw one panel; return the labels at the ends of the curves, which may overlap."""
    texts = []
    highest = 0.0
    longest = max(device.max_batch for device in profile.devices)
    coincide = len(series) > 1 and _coincide(profile, quantity)
    for one in series:
        ends = []
        for rank in one.ranks:
            device = profile.devices[rank]
            ends.append(_draw_device(axes, device, plan.micro_batches[rank], one.color, quantity))
        highest = max(highest, *ends)
        if coincide:
            continue
        end = sorted(ends)[len(ends) // 2]
        last = max(profile.devices[rank].max_batch for rank in one.ranks)
        axes.plot([last, longest], [end, end], color=one.color, linewidth=0.8, linestyle=":")
        style = {"color": one.color, "fontweight": "bold"}
        texts.append(theme.write_beside(axes, end, one.label, **style))
    if coincide:
        style = {"color": theme.INK, "fontweight": "bold"}
        texts.append(theme.write_beside(axes, highest, "all ranks", **style))
    axes.set_xlabel("samples in the pass")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    return texts


def _draw_device(
    axes: Axes, device: DeviceProfile, sizes: Sequence[int], color: str, quantity: _Quantity
) -> float:
    """Draw the curve, the measured points and the batches of the plan; return the last value."""
    batches, used = _batches(device), sorted({size for size in sizes if size})
    line = [quantity.at(device, batch) for batch in batches]
    axes.plot(batches, line, color=color, zorder=2)
    axes.plot(
        [point.batch for point in device.points],
        list(map(quantity.measured, device.points)),
        color=color,
        markeredgecolor=theme.PAPER,
        markeredgewidth=0.8,
        zorder=3,
        **_MEASURED,
    )
    heights = [quantity.at(device, size) for size in used]
    axes.plot(used, heights, color=color, zorder=4, **_PLANNED)
    return line[-1]


def _coincide(profile: ClusterProfile, quantity: _Quantity) -> bool:
    """Whether all curves lie on the longest one, so that one label is enough."""
    longest = max(profile.devices, key=lambda device: device.max_batch)
    return all(
        abs(quantity.at(longest, batch) / quantity.at(device, batch) - 1) <= _EQUAL_WITHIN
        for device in profile.devices
        for batch in (point.batch for point in device.points)
        if quantity.at(device, batch) > 0
    )


def _batches(device: DeviceProfile) -> list[int]:
    """Where the curve is drawn: at evenly spaced batches and at the measured points."""
    stride = max(1, device.max_batch // _LINE_POINTS)
    first = device.points[0].batch
    measured = {point.batch for point in device.points}
    return sorted(measured | set(range(first, device.max_batch + 1, stride)))


def _move_apart(axes: Axes, texts: Sequence[Text]) -> None:
    low, high = axes.get_ylim()
    gap = 1.35 * theme.FONT_POINTS * (high - low) / theme.points_of(axes)[1]
    preferred = [float(text.get_position()[1]) for text in texts]
    for text, place in zip(texts, theme.spread(preferred, gap, low, high), strict=True):
        text.set_y(place)


def _legend(figure: Figure) -> None:
    figure.legend(
        handles=[
            Line2D([], [], color=theme.MUTED, label="measured", **_MEASURED),
            Line2D([], [], color=theme.MUTED, label="interpolated by the planner"),
            Line2D([], [], color=theme.MUTED, label="used by the plan", **_PLANNED),
        ],
        loc="outside upper left",
        ncols=3,
    )


def _shortened(label: str) -> str:
    for maker in ("NVIDIA GeForce ", "NVIDIA ", "Tesla "):
        label = label.replace(maker, "")
    return label if len(label) <= _LONGEST_LABEL else label[: _LONGEST_LABEL - 1] + "…"
