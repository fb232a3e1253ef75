"""The largest size for which a trial succeeds, from a guess and few trials."""

from __future__ import annotations

from collections.abc import Callable

FIRST_STEP = 1 / 16
"""First step away from the guess, as a part of it; doubled until both ends are known."""


def largest_that_fits(fits: Callable[[int], bool], guess: int, tolerance: float = 0.0) -> int:
    """The largest size that fits, or 0 if not even size 1 does.

    Args:
        fits: the trial; if a size fits, all smaller ones do.
        guess: the first size to try.
        tolerance: stop when the size that fits is within this fraction of one that does not.
    """
    fitting, failing = 0, None
    size, step = max(1, guess), max(1, round(guess * FIRST_STEP))
    while failing is None or fitting == 0 or failing - fitting > max(1, tolerance * failing):
        if failing is not None and failing <= 1:
            return 0
        if fits(size):
            fitting = size
        else:
            failing = size
        if failing is None:
            size, step = size + step, 2 * step
        elif fitting == 0:
            size, step = max(1, size - step), 2 * step
        else:
            size = (fitting + failing) // 2
    return fitting
