"""What happens if one rank fails between the collectives of a programme."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from poplar.comm.communicator import Communicator
from poplar.errors import CollectiveTimeout


@contextmanager
def abort_on_error(comm: Communicator, what: str) -> Iterator[None]:
    """Report any exception raised inside to the other ranks, whose collectives then raise.

    On gloo they find out at the latest at their deadline. A `CollectiveTimeout` has been reported
    already.
    """
    try:
        yield
    except CollectiveTimeout:
        raise
    except BaseException as error:  # also an interrupt: the other ranks cannot continue either
        comm.abort(f"rank {comm.group.rank}: {what} failed: {error!r}")
        raise
