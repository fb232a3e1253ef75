"""Pictures of a contest: speeds by stage under the sum of speeds, and one step of each entrant."""

from __future__ import annotations

from matplotlib.figure import Figure

from contest.outcome import Contest, Outcome
from poplar.report import Run, theme
from poplar.report.draw_steps import draw_steps

_INCHES_OF_A_BAR = 0.27
_INCHES_BETWEEN = 1.1


def draw_speeds(contest: Contest) -> Figure:
    """A panel per stage, a bar per entrant, and the sum of speeds as a line through all of them."""
    panels = by_stage(contest)
    with theme.style():
        heights = [len(outcomes) + 0.8 for outcomes in panels.values()]
        figure = theme.new_figure(height=_INCHES_OF_A_BAR * sum(heights) + _INCHES_BETWEEN)
        grid = figure.subplots(len(panels), 1, sharex=True, squeeze=False, height_ratios=heights)
        for axes, (stage, outcomes) in zip(grid[:, 0], panels.items(), strict=True):
            speeds = [outcome.samples_per_second for outcome in outcomes]
            ours = [outcome.entrant.provider == "poplar" for outcome in outcomes]
            colours = [theme.CHOSEN if own else theme.EVEN for own in ours]
            axes.barh(range(len(outcomes)), speeds, color=colours, height=0.7)
            axes.set_yticks(range(len(outcomes)), [o.entrant.name for o in outcomes])
            axes.invert_yaxis()
            axes.grid(axis="y", visible=False)
            axes.set_title(f"stage {stage}")
            axes.axvline(
                contest.sum_of_speeds, color=theme.INK, linewidth=1.2, linestyle=(0, (4, 3))
            )
            for place, speed in enumerate(speeds):
                axes.annotate(
                    f"{speed:.1f}",
                    (speed, place),
                    xytext=(4, 0),
                    textcoords="offset points",
                    verticalalignment="center",
                    color=theme.MUTED,
                )
        grid[-1, 0].set_xlim(0, 1.12 * contest.sum_of_speeds)
        grid[-1, 0].set_xlabel(
            f"samples a second; the dashed line is the sum of speeds, {contest.sum_of_speeds:.1f}"
        )
    return figure


def draw_timelines(contest: Contest, stage: int) -> Figure | None:
    """One step of every entrant of a stage, on one scale."""
    runs = [
        Run(
            name=outcome.entrant.name,
            plan=outcome.entrant.plan,
            losses=outcome.losses,
            step_seconds=outcome.step_seconds,
            predicted_step_seconds=outcome.predicted_seconds,
            spans=outcome.spans,
        )
        for outcome in by_stage(contest)[stage]
    ]
    return draw_steps(runs)


def by_stage(contest: Contest) -> dict[int, list[Outcome]]:
    """Who has a result, ascending by stage; the others are in the table."""
    present = [outcome for outcome in contest.outcomes if not outcome.absent]
    stages = sorted({outcome.entrant.stage for outcome in present})
    return {stage: [o for o in present if o.entrant.stage == stage] for stage in stages}
