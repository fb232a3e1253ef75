"""Which part of the suite `make test` runs: how many random cases, which parameter combinations."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import TypeVar

T = TypeVar("T")

FULL_VARIABLE = "POPLAR_FULL_TESTS"
"""Environment variable, 1 for the full suite: worker processes inherit it."""


def choose(*, quick: T, full: T) -> T:
    """`full` with `--full` (as `make test-all` passes), else `quick`: a number of random cases."""
    return full if os.environ.get(FULL_VARIABLE) == "1" else quick


def pairwise_subset(cases: Sequence[Mapping[str, int]]) -> set[int]:
    """Positions of a few cases in which every pair of parameter values of `cases` still occurs.

    Args:
        cases: index of each parameter's value, by the parameter's name.

    Greedy: the case with the most new pairs comes next, the first one where several have as many.
    With one parameter, every case is kept.
    """
    pairs = [set(combinations(sorted(case.items()), min(2, len(case)))) for case in cases]
    missing = set().union(*pairs)
    kept: set[int] = set()
    while missing:
        best = max(range(len(cases)), key=lambda number: (len(pairs[number] & missing), -number))
        kept.add(best)
        missing -= pairs[best]
    return kept
