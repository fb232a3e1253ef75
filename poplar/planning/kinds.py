"""Which ranks are equal: thousands of them are a handful of kinds, and searches count kinds.

Equal ranks may change places without changing what a plan costs, so whatever is computed of one
holds for all of its kind.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

_Value = TypeVar("_Value")
_Key = TypeVar("_Key", bound=Hashable)


def numbered(keys: Iterable[Hashable]) -> list[int]:
    """For each key the number of its first appearance among the different ones: 0, 0, 1, 0, 2."""
    numbers: dict[Hashable, int] = {}
    return [numbers.setdefault(key, len(numbers)) for key in keys]


def members(kinds: Iterable[Hashable]) -> list[list[int]]:
    """The positions of each kind, ascending; kinds by first appearance."""
    found: dict[Hashable, list[int]] = {}
    for position, kind in enumerate(kinds):
        known = found.get(kind)
        if known is None:
            found[kind] = [position]
        else:
            known.append(position)
    return list(found.values())


def each(function: Callable[[_Key], _Value], keys: Sequence[_Key]) -> list[_Value]:
    """`function(key)` for each key, computed once for equal ones."""
    known: dict[_Key, _Value] = {}
    for key in keys:
        if key not in known:
            known[key] = function(key)
    return [known[key] for key in keys]
