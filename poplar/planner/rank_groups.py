"""Which ranks are equal: thousands of them are a handful of kinds, and searches count kinds.

Equal ranks may change places without changing what a plan costs, so whatever is computed of one
holds for all of its kind.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import groupby
from typing import TypeVar

_Value = TypeVar("_Value")
_Key = TypeVar("_Key", bound=Hashable)


def members(kinds: Iterable[Hashable]) -> list[list[int]]:
    """The positions of each kind, ascending; kinds by first appearance."""
    found: dict[Hashable, list[int]] = {}
    position = 0
    for kind, run in groupby(kinds):  # neighbours are mostly equal
        stop = position + len(list(run))
        found.setdefault(kind, []).extend(range(position, stop))
        position = stop
    return list(found.values())


def each(function: Callable[[_Key], _Value], keys: Sequence[_Key]) -> list[_Value]:
    """`function(key)` for each key, computed once for equal ones."""
    known = {key: function(key) for key in dict.fromkeys(keys)}
    return list(map(known.__getitem__, keys))
