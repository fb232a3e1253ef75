"""A collective through shared memory, from posting this rank's data until reading the peers'."""

from __future__ import annotations

from collections.abc import Callable

from poplar.comm.host_memory.rendezvous import Rendezvous


class SharedMemoryWork:
    """A posted collective; `wait` waits for the peers' posts and then reads them."""

    def __init__(
        self, rendezvous: Rendezvous, collective: int, what: str, read: Callable[[], float | None]
    ) -> None:
        """`read` reads the peers' data and returns the seconds that it waited, if any."""
        self._rendezvous, self._collective, self._what = rendezvous, collective, what
        self._read: Callable[[], float | None] | None = read
        rendezvous.unfinished[collective] = self.wait

    def wait(self) -> float:
        """As `Work.wait`."""
        if self._read is None:
            return 0.0
        rendezvous, collective = self._rendezvous, self._collective
        # In the order of issue, independent of the order of waits: peers may be in an earlier
        # collective that only progresses while all ranks wait for it.
        waited = rendezvous.finish_earlier(collective)
        with rendezvous.abort_on_error(self._what):
            waited += rendezvous.wait_until_posted(collective, self._what)
            waited += self._read() or 0.0
        self._read = None
        rendezvous.finish(collective)
        return waited
