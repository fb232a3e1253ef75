"""Pictures of a contest: speeds by stage under the sum of speeds, and one step of each entrant."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from contest.outcome import Contest, Outcome
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


def draw_speeds(contest: Contest) -> Figure:
    """A panel per stage, a bar per entrant, and the sum of speeds as a line through all of them.

    Those that leave ranks out have a panel of their own; those that are absent have a place
    without a bar.
    """
    panels = _panels(contest)
    with theme.style():
        heights = [len(outcomes) + _PANEL_PADDING for outcomes in panels.values()]
        figure = theme.new_figure(height=_INCHES_OF_A_BAR * sum(heights) + _INCHES_AROUND)
        grid = figure.subplots(len(panels), 1, sharex=True, squeeze=False, height_ratios=heights)
        figure.legend(handles=_legend(contest), loc="outside upper left", ncols=4, handlelength=1.4)
        for axes, (title, outcomes) in zip(grid[:, 0], panels.items(), strict=True):
            axes.set_title(title)
            _bars(axes, contest, outcomes)
        fastest = max(_speeds(outcome)[2] for outcome in contest.outcomes)
        grid[-1, 0].set_xlim(0, 1.02 * max(contest.sum_of_speeds, fastest))
        grid[-1, 0].set_xlabel("samples a second at the median step; thin lines from p20 to p80")
    return figure


def draw_timelines(contest: Contest, stage: int) -> Figure | None:
    """One step of every entrant of a stage, on one scale; None if none was traced.

    Those that leave ranks out are left out: they are no other engines, and may take many times as
    long.
    """
    traced = [outcome for outcome in by_stage(contest).get(stage, []) if any(outcome.spans)]
    figure = draw_steps(
        [
            Run(
                name=outcome.entrant.name,
                plan=outcome.entrant.plan,
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
    """Peers do not tell what they wait for; how busy their ranks are can't be said."""
    for text in axes.texts:
        if text.get_text().startswith("busy"):
            text.set_text("with waits")


def by_stage(contest: Contest) -> dict[int, list[Outcome]]:
    """Who has a result with all ranks, ascending by stage."""
    present = [o for o in contest.outcomes if not o.absent and _takes_all_ranks(contest, o)]
    return _grouped(present)


def _panels(contest: Contest) -> dict[str, list[Outcome]]:
    """Everybody, absent or not, under the title of their panel."""
    whole = [outcome for outcome in contest.outcomes if _takes_all_ranks(contest, outcome)]
    parts = [outcome for outcome in contest.outcomes if not _takes_all_ranks(contest, outcome)]
    panels = {f"stage {stage}": outcomes for stage, outcomes in _grouped(whole).items()}
    return {**panels, "parts of the cluster": parts} if parts else panels


def _grouped(outcomes: Iterable[Outcome]) -> dict[int, list[Outcome]]:
    groups: dict[int, list[Outcome]] = {}
    for outcome in sorted(outcomes, key=lambda outcome: outcome.entrant.stage):
        groups.setdefault(outcome.entrant.stage, []).append(outcome)
    return groups


def _takes_all_ranks(contest: Contest, outcome: Outcome) -> bool:
    return len(outcome.entrant.ranks) == len(contest.before.speeds)


def _bars(axes: Axes, contest: Contest, outcomes: Sequence[Outcome]) -> None:
    """One panel, from top to bottom; figures stand in a column, where no bar or line crosses."""
    places = range(len(outcomes))
    speeds = [_speeds(outcome) for outcome in outcomes]
    colours = [_colour(contest, outcome) for outcome in outcomes]
    axes.barh(places, [median for _, median, _ in speeds], color=colours, height=0.7)
    slow, _, fast = zip(*speeds, strict=True)
    axes.hlines(places, slow, fast, color=theme.INK, linewidth=1.0)
    axes.axvline(contest.sum_of_speeds, color=theme.INK, linewidth=1.2, linestyle=_SUM_LINE)
    for place, outcome, (_, median, _) in zip(places, outcomes, speeds, strict=True):
        if outcome.absent:
            _beside(axes, place, "absent", _PERCENT_ENDS)
            continue
        _beside(axes, place, f"{median:.1f}", _SPEED_ENDS)
        _beside(axes, place, f"{100 * median / contest.sum_of_speeds:.0f} %", _PERCENT_ENDS)
    axes.set_yticks(places, [outcome.entrant.name for outcome in outcomes])
    axes.set_ylim(len(outcomes) - 0.5, -0.5)
    axes.grid(axis="y", visible=False)
    axes.tick_params(axis="both", length=0)


def _beside(axes: Axes, place: int, text: str, ends: float) -> None:
    """Text that ends this many points right of the axes."""
    axes.annotate(
        text,
        (1.0, place),
        xycoords=axes.get_yaxis_transform(),
        xytext=(ends, 0),
        textcoords="offset points",
        horizontalalignment="right",
        verticalalignment="center",
        color=theme.MUTED,
    )


def _speeds(outcome: Outcome) -> tuple[float, float, float]:
    """Samples per second: p20, median, p80; zeros of who is absent."""
    if outcome.absent:
        return 0.0, 0.0, 0.0
    speeds = [outcome.entrant.plan.global_batch / seconds for seconds in outcome.step_seconds]
    fifths = statistics.quantiles(speeds, n=5) if len(speeds) > 1 else speeds
    return fifths[0], outcome.samples_per_second, fifths[-1]


def _colour(contest: Contest, outcome: Outcome) -> str:
    if not _takes_all_ranks(contest, outcome):
        return _PART
    return theme.CHOSEN if outcome.entrant.provider == "poplar" else theme.EVEN


def _legend(contest: Contest) -> list[Patch | Line2D]:
    colours = {_colour(contest, outcome) for outcome in contest.outcomes}
    names = {theme.CHOSEN: "Poplar", theme.EVEN: "peers", _PART: "Poplar on a part of the ranks"}
    handles: list[Patch | Line2D] = [
        Patch(color=colour, label=name) for colour, name in names.items() if colour in colours
    ]
    label = f"sum of speeds: {contest.sum_of_speeds:.1f} samples a second"
    return [*handles, Line2D([], [], color=theme.INK, linestyle=_SUM_LINE, label=label)]
