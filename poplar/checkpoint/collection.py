"""Saving and loading make so many objects that Python would look for garbage among all it has."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Without automatic garbage collection.

    Each one takes 0.3 s with the objects of PyTorch, and a save of 1,000 tensors makes two.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
