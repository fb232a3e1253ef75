"""The loss of every run, by step and by time."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from poplar.monitoring import style
from poplar.monitoring.record import Run


def draw_losses(runs: Sequence[Run]) -> Figure | None:
    """Draw the loss against steps and against seconds; None if no run has losses."""
    shown = [run for run in runs if run.losses]
    if not shown:
        return None
    with style.applied():
        figure = style.new_figure(height=3.7)
        by_step, by_time = figure.subplots(1, 2, sharey=True)
        for number, run in enumerate(shown):
            chosen = number == len(shown) - 1
            for axes, places in ((by_step, range(1, len(run.losses) + 1)), (by_time, _clock(run))):
                axes.plot(
                    places,
                    run.losses,
                    color=style.CHOSEN if chosen else style.EVEN,
                    linewidth=1.6 if chosen else 4.5,
                    label=run.name,
                )
        by_step.set(title="Loss of the global batch, by step", xlabel="step")
        by_time.set(title="Loss of the global batch, by time", xlabel="seconds of training")
        by_step.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True))
        for axes in (by_step, by_time):
            axes.set_xlim(left=0)
            axes.legend(loc="upper right")
        by_time.tick_params(labelleft=True)
    return figure


def _clock(run: Run) -> list[float]:
    """When each step ended. Steps before the timed ones count as the median step."""
    untimed = len(run.losses) - len(run.step_seconds)
    seconds = [run.measured_step_seconds] * max(0, untimed) + list(run.step_seconds)
    return list(accumulate(seconds[: len(run.losses)]))
