"""Progress of a measurement on stderr of rank 0: a bar on a terminal, else one line each."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress

Report = Callable[[str], None]


@contextmanager
def show_progress(enabled: bool, seconds: float) -> Iterator[Report]:
    """A function that shows what is being measured.

    Args:
        seconds: that the measurement takes, about. On a terminal the bar shows how much is left.
    """
    if not enabled:
        yield lambda text: None
        return
    if not sys.stderr.isatty():
        yield lambda text: print(f"profiling: {text}", file=sys.stderr, flush=True)
        return
    with _clock() as clock:
        task = clock.add_task("", total=seconds)
        yield lambda text: clock.update(task, description=text)


def _clock() -> Progress:
    """A bar that fills with time, because steps of a measurement are not equally long."""
    from rich.console import Console, RenderableType
    from rich.progress import BarColumn, Progress, TextColumn

    class Clock(Progress):
        def get_renderables(self) -> Iterator[RenderableType]:
            for task in self.tasks:
                task.completed = min(task.elapsed or 0.0, task.total or 0.0)
            yield from super().get_renderables()

    columns = (
        BarColumn(),
        TextColumn("{task.remaining:.0f} s left, profiling: {task.description}"),
    )
    return Clock(*columns, console=Console(stderr=True), transient=True)
