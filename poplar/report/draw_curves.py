"""The measured curves of every rank: time and memory of a pass against its samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Text
from matplotlib.ticker import MaxNLocator

from poplar.formatting import byte_unit
from poplar.plan import Plan
from poplar.profile import ClusterProfile, DeviceProfile
from poplar.report import theme
from poplar.report.labels import spread

_LONGEST_LABEL = 24
_LINE_POINTS = 200
_EQUAL_WITHIN = 0.02


@dataclass(frozen=True, slots=True)
class _Series:
    """Curves that share a color and a label."""

    label: str
    color: str
    ranks: tuple[int, ...]


def draw_curves(profile: ClusterProfile, plan: Plan) -> Figure:
    """Draw measured points, the planner's interpolation, and the batches of the plan."""
    unit, factor = byte_unit(
        max(point.activation_bytes for device in profile.devices for point in device.points)
    )
    with theme.style():
        figure = theme.new_figure(height=4.3)
        left, right = figure.subplots(1, 2)
        left.set_title("Seconds of a pass, forward and backward")
        right.set_title(f"Activation memory of a pass, {unit}")
        _legend(figure)
        series = _series(profile)
        labels = [
            _panel(axes, profile, plan, series, value)
            for axes, value in (
                (left, _Value(lambda d, b: d.seconds(b), lambda d: [p.seconds for p in d.points])),
                (
                    right,
                    _Value(
                        lambda d, b: d.activation_bytes(b) / factor,
                        lambda d: [p.activation_bytes / factor for p in d.points],
                    ),
                ),
            )
        ]
        theme.settle(figure)
        for axes, texts in zip((left, right), labels, strict=True):
            _move_apart(axes, texts)
    return figure


@dataclass(frozen=True, slots=True)
class _Value:
    """What a panel shows of a device: the curve, and the measured points."""

    curve: Callable[[DeviceProfile, int], float]
    points: Callable[[DeviceProfile], list[float]]


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
    axes: Axes, profile: ClusterProfile, plan: Plan, series: Sequence[_Series], value: _Value
) -> list[Text]:
    """Draw one panel; return the labels at the ends of the curves, which may overlap."""
    texts = []
    highest = 0.0
    longest = max(device.max_batch for device in profile.devices)
    coincide = len(series) > 1 and _coincide(profile, value)
    for one in series:
        ends = []
        for rank in one.ranks:
            device = profile.devices[rank]
            ends.append(_draw_device(axes, device, plan.micro_batches[rank], one.color, value))
        highest = max(highest, *ends)
        if coincide:
            continue
        end = sorted(ends)[len(ends) // 2]
        last = max(profile.devices[rank].max_batch for rank in one.ranks)
        axes.plot([last, longest], [end, end], color=one.color, linewidth=0.8, linestyle=":")
        texts.append(_end_label(axes, end, one.label, one.color))
    if coincide:
        texts.append(_end_label(axes, highest, "all ranks", theme.INK))
    axes.set_xlabel("samples in the pass")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    return texts


def _draw_device(
    axes: Axes, device: DeviceProfile, sizes: Sequence[int], color: str, value: _Value
) -> float:
    """Draw the curve, the measured points and the batches of the plan; return the last value."""
    line = [value.curve(device, batch) for batch in _batches(device)]
    axes.plot(_batches(device), line, color=color, zorder=2)
    axes.plot(
        [point.batch for point in device.points],
        value.points(device),
        linestyle="none",
        marker="o",
        markersize=5,
        color=color,
        markeredgecolor=theme.PAPER,
        markeredgewidth=0.8,
        zorder=3,
    )
    used = sorted({size for size in sizes if size})
    axes.plot(
        used,
        [value.curve(device, size) for size in used],
        linestyle="none",
        color=color,
        marker="o",
        markersize=11,
        markerfacecolor="none",
        markeredgewidth=1.5,
        zorder=4,
    )
    return line[-1]


def _end_label(axes: Axes, height: float, label: str, color: str) -> Text:
    return axes.text(
        1.02,
        height,
        label,
        color=color,
        transform=axes.get_yaxis_transform(),
        verticalalignment="center",
        fontweight="bold",
    )


def _coincide(profile: ClusterProfile, value: _Value) -> bool:
    """Whether all curves lie on the longest one, so that one label is enough."""
    longest = max(profile.devices, key=lambda device: device.max_batch)
    return all(
        abs(value.curve(longest, batch) / value.curve(device, batch) - 1) <= _EQUAL_WITHIN
        for device in profile.devices
        for batch in (point.batch for point in device.points)
        if value.curve(device, batch) > 0
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
    for text, place in zip(texts, spread(preferred, gap, low, high), strict=True):
        text.set_y(place)


def _legend(figure: Figure) -> None:
    mark: dict[str, Any] = {"color": theme.MUTED, "marker": "o"}
    figure.legend(
        handles=[
            Line2D([], [], linestyle="none", markersize=5, label="measured", **mark),
            Line2D([], [], color=theme.MUTED, label="interpolated by the planner"),
            Line2D(
                [],
                [],
                linestyle="none",
                markersize=11,
                markerfacecolor="none",
                markeredgewidth=1.5,
                label="used by the plan",
                **mark,
            ),
        ],
        loc="outside upper left",
        ncols=3,
    )


def _shortened(label: str) -> str:
    for maker in ("NVIDIA GeForce ", "NVIDIA ", "Tesla "):
        label = label.replace(maker, "")
    return label if len(label) <= _LONGEST_LABEL else label[: _LONGEST_LABEL - 1] + "…"
