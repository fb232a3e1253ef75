"""What happens if one rank fails between the collectives of a programme."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from poplar.comm.communicator import Communicator
from poplar.values.errors import CollectiveTimeout


@contextmanager
def abort_on_error(comm: Communicator, what: str) -> Iterator[None]:
    """Report any exception raised inside to the other ranks, whose collectives then raise.

    On gloo they find out at the latest at their deadline. A `CollectiveTimeout` is not reported:
    all ranks have it.
    """
    try:
        yield
    except BaseException as error:  # also an interrupt: the other ranks cannot continue either
        report(comm, what, error)
        raise


def report(comm: Communicator, what: str, error: BaseException) -> None:
    """Make the collectives of the other ranks raise, because of this error."""
    if not isinstance(error, CollectiveTimeout):
        comm.abort(f"rank {comm.group.rank}: {what} failed: {error!r}")
