"""Figures of a comparison: speeds by stage with the sum of speeds, and one step of each engine."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from head_to_head.outcome import Comparison, Outcome
from poplar.report import Run, theme
from poplar.report.draw_steps import draw_steps

_INCHES_OF_A_BAR = 0.27
_INCHES_AROUND = 1.5
_PANEL_PADDING = 0.9
"""In bars: a panel's title and the gap above it."""
_SUM_LINE = (0, (4, 3))
_SPEED_ENDS, _PERCENT_ENDS = 48.0, 90.0
"""Points right of the axes: columns of figures, flush right."""
_PART = theme.SERIES[5]


def draw_speeds(comparison: Comparison) -> Figure:
    """A panel per stage, a bar per configuration, and the sum of speeds as a line.

    Those that leave ranks out have a panel of their own; those that are absent have a place
    without a bar.
    """
    panels = _panels(comparison)
    with theme.style():
        heights = [len(outcomes) + _PANEL_PADDING for outcomes in panels.values()]
        figure = theme.new_figure(height=_INCHES_OF_A_BAR * sum(heights) + _INCHES_AROUND)
        grid = figure.subplots(len(panels), 1, sharex=True, squeeze=False, height_ratios=heights)
        figure.legend(
            handles=_legend(comparison), loc="outside upper left", ncols=4, handlelength=1.4
        )
        for axes, (title, outcomes) in zip(grid[:, 0], panels.items(), strict=True):
            axes.set_title(title)
            _bars(axes, comparison, outcomes)
        fastest = max(_speeds(outcome)[2] for outcome in comparison.outcomes)
        grid[-1, 0].set_xlim(0, 1.02 * max(comparison.sum_of_speeds, fastest))
        grid[-1, 0].set_xlabel("samples a second at the median step; thin lines from p20 to p80")
    return figure


def draw_timelines(comparison: Comparison, stage: int) -> Figure | None:
    """One step of every configuration of a stage, on one scale; None if none was traced.

    Those that leave ranks out are left out: they are no other engines, and may take many times as
    long.
    """
    traced = [outcome for outcome in by_stage(comparison).get(stage, []) if any(outcome.spans)]
    figure = draw_steps(
        [
            Run(
                name=outcome.configuration.name,
                plan=outcome.configuration.plan,
                losses=outcome.losses,
                step_seconds=outcome.step_seconds,
                predicted_step_seconds=outcome.predicted_seconds,
                spans=outcome.spans,
            )
            for outcome in traced
        ]
    )
    for axes, outcome in zip(figure.axes if figure else (), traced, strict=True):
        if not any(span.kind == "wait" for rank in outcome.spans for span in rank):
            _admit_waits(axes)
    return figure


def _admit_waits(axes: Axes) -> None:
    """Peers do not record waiting, so the busy fraction of their ranks is unknown."""
    for text in axes.texts:
        if text.get_text().startswith("busy"):
            text.set_text("with waits")


def by_stage(comparison: Comparison) -> dict[int, list[Outcome]]:
    """Outcomes that have a result and use all ranks, by ascending stage."""
    present = [o for o in comparison.outcomes if not o.absent and _takes_all_ranks(comparison, o)]
    return _grouped(present)


def _panels(comparison: Comparison) -> dict[str, list[Outcome]]:
    """All outcomes, absent ones included, by the title of their panel."""
    whole = [outcome for outcome in comparison.outcomes if _takes_all_ranks(comparison, outcome)]
    subsets = [
        outcome for outcome in comparison.outcomes if not _takes_all_ranks(comparison, outcome)
    ]
    panels = {f"stage {stage}": outcomes for stage, outcomes in _grouped(whole).items()}
    return {**panels, "parts of the cluster": subsets} if subsets else panels


def _grouped(outcomes: Iterable[Outcome]) -> dict[int, list[Outcome]]:
    groups: dict[int, list[Outcome]] = {}
    for outcome in sorted(outcomes, key=lambda outcome: outcome.configuration.stage):
        groups.setdefault(outcome.configuration.stage, []).append(outcome)
    return groups


def _takes_all_ranks(comparison: Comparison, outcome: Outcome) -> bool:
    return len(outcome.configuration.ranks) == len(comparison.before.speeds)


def _bars(axes: Axes, comparison: Comparison, outcomes: Sequence[Outcome]) -> None:
    """One panel, from top to bottom, with a column of figures to the right of the bars."""
    places = range(len(outcomes))
    speeds = [_speeds(outcome) for outcome in outcomes]
    colors = [_color(comparison, outcome) for outcome in outcomes]
    axes.barh(places, [median for _, median, _ in speeds], color=colors, height=0.7)
    slow, _, fast = zip(*speeds, strict=True)
    axes.hlines(places, slow, fast, color=theme.INK, linewidth=1.0)
    axes.axvline(comparison.sum_of_speeds, color=theme.INK, linewidth=1.2, linestyle=_SUM_LINE)
    for open_cluster, outcome, (_, median, _) in zip(places, outcomes, speeds, strict=True):
        if outcome.absent:
            _beside(axes, open_cluster, "absent", _PERCENT_ENDS)
            continue
        _beside(axes, open_cluster, f"{median:.1f}", _SPEED_ENDS)
        _beside(
            axes, open_cluster, f"{100 * median / comparison.sum_of_speeds:.0f} %", _PERCENT_ENDS
        )
    axes.set_yticks(places, [outcome.configuration.name for outcome in outcomes])
    axes.set_ylim(len(outcomes) - 0.5, -0.5)
    axes.grid(axis="y", visible=False)
    axes.tick_params(axis="both", length=0)


def _beside(axes: Axes, open_cluster: int, text: str, ends: float) -> None:
    """Text that ends this many points right of the axes."""
    axes.annotate(
        text,
        (1.0, open_cluster),
        xycoords=axes.get_yaxis_transform(),
        xytext=(ends, 0),
        textcoords="offset points",
        horizontalalignment="right",
        verticalalignment="center",
        color=theme.MUTED,
    )


def _speeds(outcome: Outcome) -> tuple[float, float, float]:
    """Samples per second: p20, median, p80; zeros without a result."""
    if outcome.absent:
        return 0.0, 0.0, 0.0
    speeds = [outcome.configuration.plan.global_batch / seconds for seconds in outcome.step_seconds]
    fifths = statistics.quantiles(speeds, n=5) if len(speeds) > 1 else speeds
    return fifths[0], outcome.samples_per_second, fifths[-1]


def _color(comparison: Comparison, outcome: Outcome) -> str:
    if not _takes_all_ranks(comparison, outcome):
        return _PART
    return theme.CHOSEN if outcome.configuration.provider == "poplar" else theme.EVEN


def _legend(comparison: Comparison) -> list[Patch | Line2D]:
    colors = {_color(comparison, outcome) for outcome in comparison.outcomes}
    names = {theme.CHOSEN: "Poplar", theme.EVEN: "peers", _PART: "Poplar on a part of the ranks"}
    handles: list[Patch | Line2D] = [
        Patch(color=color, label=name) for color, name in names.items() if color in colors
    ]
    label = f"sum of speeds: {comparison.sum_of_speeds:.1f} samples a second"
    return [*handles, Line2D([], [], color=theme.INK, linestyle=_SUM_LINE, label=label)]
