"""One progress line on stderr of rank 0, if stderr is a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec

Tell = Callable[[str], None]


@contextmanager
def progress(enabled: bool) -> Iterator[Tell]:
    """A function that shows what is being measured.

    Args:
        enabled: show on this rank, if there is a terminal and rich is installed.
    """
    if not (enabled and sys.stderr.isatty() and find_spec("rich")):
        yield lambda text: None
        return
    from rich.console import Console

    with Console(stderr=True).status("profiling") as status:
        yield lambda text: status.update(f"profiling: {text}")
