"""Progress of a measurement on stderr of rank 0: a live line on a terminal, else one line each."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Report = Callable[[str], None]


@contextmanager
def show_progress(enabled: bool) -> Iterator[Report]:
    """A function that shows what is being measured.

    Args:
        enabled: show on this rank.
    """
    if not enabled:
        yield lambda text: None
        return
    if not sys.stderr.isatty():
        yield lambda text: print(f"profiling: {text}", file=sys.stderr, flush=True)
        return
    from rich.console import Console

    with Console(stderr=True).status("profiling") as status:
        yield lambda text: status.update(f"profiling: {text}")
