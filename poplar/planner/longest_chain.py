"""The longest chain of actions of a pass, each of which waits for the one before.

A pass takes as long as the longest of its chains. Which one that is depends on the ratio of
communication to compute.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple


class Event(NamedTuple):
    """What one rank does next."""

    what: Literal["compute", "gather", "reduce", "wait"]
    """Collectives run one after the other, beside compute."""
    amount: float
    """Of compute a fraction of a pass, of a collective its elements, and of a wait the number of
    the collective."""


class Chain(NamedTuple):
    """The sums over a chain."""

    seconds: float = 0.0
    """Where a pass computes for 1 second."""
    compute: float = 0.0
    """As a fraction of a pass."""
    gather: float = 0.0
    """Elements."""
    reduce: float = 0.0
    """Elements."""


def longest_chain(events: Iterable[Event], gather_each: float, reduce_each: float) -> Chain:
    """The longest chain of these events.

    Args:
        events: in the order in which a rank issues them.
        gather_each: seconds of an element in an all-gather.
        reduce_each: seconds of an element in a reduction.
    """
    compute = Chain()
    collectives = [Chain()]  # one that is complete before the pass
    for what, amount in events:
        if what == "wait":
            compute = max(compute, collectives[1 + int(amount)])
        elif what == "compute":
            seconds, computed, gathered, reduced = compute
            compute = Chain(seconds + amount, computed + amount, gathered, reduced)
        else:
            seconds, computed, gathered, reduced = max(compute, collectives[-1])
            if what == "gather":
                seconds, gathered = seconds + gather_each * amount, gathered + amount
            else:
                seconds, reduced = seconds + reduce_each * amount, reduced + amount
            collectives.append(Chain(seconds, computed, gathered, reduced))
    return max(compute, collectives[-1])
