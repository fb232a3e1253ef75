"""Which part of the suite `make test` runs: how many random cases, which parameter combinations."""

from __future__ import annotations

import os
import zlib
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from itertools import combinations
from typing import TypeVar

T = TypeVar("T")

FULL_VARIABLE = "POPLAR_FULL_TESTS"
"""Environment variable, 1 for the full suite: worker processes inherit it."""


def choose(*, quick: T, full: T) -> T:
    """`full` with `--full` (as `make test-all` passes), else `quick`: a number of random cases."""
    return full if os.environ.get(FULL_VARIABLE) == "1" else quick


def stage_of(test: str, stages: Collection[int]) -> int:
    """The stage that the subset covers of a test, which its name chooses.

    Half of the names choose the highest stage, at which most is sharded, and others evenly, so the
    tests of one subject together cover all stages.
    """
    *others, highest = sorted(stages)
    choices = [*others, *[highest] * max(1, len(others))]
    return choices[zlib.crc32(test.encode()) % len(choices)]


def covering_subset(
    cases: Sequence[Mapping[str, int]], optional: Collection[tuple[str, int]] = ()
) -> set[int]:
    """Positions of a few cases that still cover the values of all parameters.

    Args:
        cases: a number for each parameter's value, by the parameter's name.
        optional: names and values that need not be covered.

    With three parameters or more, every pair of values that occurs in `cases` occurs in the subset;
    with two, every value; with one, all cases are selected. Greedy: the case that adds most comes
    next; among several, the one whose values were used least, so that two parameters are paired
    evenly.
    """
    cases = _without_duplicates(cases)
    strength = min(2, max(1, len(cases[0]) - 1))
    parts = [set(combinations(sorted(case.items()), strength)) for case in cases]
    missing = {part for part in set().union(*parts) if not any(v in optional for v in part)}
    used: Counter[tuple[str, int]] = Counter()
    selected: set[int] = set()
    while missing:
        added = [len(part & missing) for part in parts]
        best = max(
            range(len(cases)),
            key=lambda number: (added[number], -sum(used[v] for v in cases[number].items())),
        )
        selected.add(best)
        missing -= parts[best]
        used.update(cases[best].items())
    return selected


def _without_duplicates(cases: Sequence[Mapping[str, int]]) -> list[dict[str, int]]:
    """The cases without parameters that only change together with an earlier one.

    That is so for the names of one `parametrize`.
    """
    columns = {}
    for name in cases[0]:
        first_seen: dict[int, int] = {}
        columns[name] = tuple(first_seen.setdefault(c[name], len(first_seen)) for c in cases)
    names = {column: name for name, column in reversed(columns.items())}.values()
    return [{name: case[name] for name in names} for case in cases]
