"""Groups of equal ranks: large clusters have few different devices, so searches count groups.

Exchanging equal ranks does not change the cost of a plan.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

_Value = TypeVar("_Value")
_Key = TypeVar("_Key", bound=Hashable)


def group_equal(values: Iterable[Hashable]) -> list[list[int]]:
    """The positions of each distinct value, ascending; values by first appearance."""
    found: dict[Hashable, list[int]] = {}
    for position, value in enumerate(values):
        found.setdefault(value, []).append(position)
    return list(found.values())


def map_distinct(function: Callable[[_Key], _Value], keys: Sequence[_Key]) -> list[_Value]:
    """`function(key)` for each key, computed once for equal keys."""
    known = {key: function(key) for key in dict.fromkeys(keys)}
    return list(map(known.__getitem__, keys))
