"""A collective on boards, from when this rank has posted its part until it has read the others'."""

from __future__ import annotations

from collections.abc import Callable

from poplar.comm.rendezvous import Rendezvous


class SharedMemoryWork:
    """A collective that has been posted here; waiting for it reads what the peers have posted."""

    def __init__(
        self, board: Rendezvous, collective: int, what: str, read: Callable[[], float | None]
    ) -> None:
        """`read` returns seconds for which it was held up itself, if it was."""
        self._board, self._collective, self._what = board, collective, what
        self._read: Callable[[], float | None] | None = read
        board.reads[collective] = self.wait

    def wait(self) -> float:
        """As `Pending.wait`."""
        if self._read is None:
            return 0.0
        board, collective = self._board, self._collective
        # In the order of issue, in whatever order callers wait: peers may be at an earlier one that
        # goes on only while all ranks wait for it.
        held_up = board.finish_before(collective)
        with board.or_give_up(self._what):
            held_up += board.wait_until_posted(collective, self._what)
            held_up += self._read() or 0.0
        self._read = None
        board.finish(collective)
        return held_up
