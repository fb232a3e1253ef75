"""What Poplar raises when ranks have to agree that something went wrong.

Mistakes of one call are `ValueError`, `TypeError` or `RuntimeError`, as everywhere in torch. The
types here are for what only several ranks can know: each is raised on every surviving rank, and
says which rank it is about, so that one log is enough to find the cause.
"""

from __future__ import annotations


class PoplarError(RuntimeError):
    """Base of the errors that concern more than the rank that raises them."""


class RankFailed(PoplarError):
    """Another rank failed inside a step, so the step was applied by nobody; training may go on."""


class OutOfOrder(PoplarError):
    """A rank's model reached its units in another order than the one the ranks agreed on."""


class CollectiveTimeout(PoplarError):
    """A peer did not take part in a collective before its deadline, or its process is gone."""
