"""What rank 0 shows while it measures: one line on stderr, where somebody watches."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec

Tell = Callable[[str], None]


@contextmanager
def progress(enabled: bool) -> Iterator[Tell]:
    """A function that says what is being measured now.

    Args:
        enabled: on this rank. Without a terminal, or without rich, nothing is shown.
    """
    if not (enabled and sys.stderr.isatty() and find_spec("rich")):
        yield lambda text: None
        return
    from rich.console import Console

    with Console(stderr=True).status("profiling") as status:
        yield lambda text: status.update(f"profiling: {text}")
