"""Poplar's own errors, which all ranks raise together.

Invalid arguments raise `ValueError`, `TypeError` or `RuntimeError`, as in torch. The errors here
are raised on every surviving rank and name the rank at fault, so that the log of one rank is enough
to find the cause.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from poplar.values.formatting import printable

E = TypeVar("E", bound=BaseException)

_AGREED = "_poplar_agreed"


class PoplarError(RuntimeError):
    """Base class of Poplar's own errors."""


class RankFailed(PoplarError):
    """Another rank failed inside a step. No rank applied the step; training may continue."""


class OutOfOrder(PoplarError):
    """The model of a rank used its units in another order than the agreed one."""


class ReplicasDiffer(PoplarError):
    """Parameters that every rank updates by itself do not have the same bits on all ranks."""


class NotExportable(PoplarError):
    """A model's forward pass cannot be planned by tensors. Its plan by batches is not affected."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(
            f"{reason}. This model can only be trained with a plan without a programme"
        )


class CollectiveTimeout(PoplarError):
    """A rank did not join a collective: it missed the deadline, ended, or is in another call."""


class DamagedCheckpoint(PoplarError):
    """A file of a checkpoint is missing, incomplete or changed. Nothing was loaded."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(
            printable(f"{path}: {reason}; nothing was loaded from this checkpoint. ")
            + "Restore the file, or load an earlier checkpoint"
        )
        self.path = path


def check_class(name: str, value: object, expected: type) -> None:
    """Raise TypeError if the argument `name` is no instance of a public class."""
    if not isinstance(value, expected):
        home = "torch.nn" if expected.__module__.startswith("torch.nn") else "poplar"
        raise TypeError(f"{name} must be a {home}.{expected.__name__}, got {type(value).__name__}")


def agreed(error: E) -> E:
    """Note that this error leaves no rank waiting: all ranks raise, or this one may go on."""
    setattr(error, _AGREED, True)
    return error


@contextmanager
def equal_on_all_ranks() -> Iterator[None]:
    """A context for checks of values that are equal on all ranks: all of them raise, or none."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise agreed(error)  # noqa: B904 (it is the same error)


def is_agreed(error: BaseException) -> bool:
    """Whether `agreed` was called for this error."""
    return getattr(error, _AGREED, False)


def take_agreed(error: BaseException) -> bool:
    """Whether `agreed` was called; drops the note, as the program may raise the error again."""
    return bool(vars(error).pop(_AGREED, False))
