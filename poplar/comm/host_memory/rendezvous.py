"""The rendezvous of ranks that share memory: what each rank has posted, and how far it has read.

Ranks of one host issue the same collectives in the same order. For each collective every rank posts
where its data is, reads the others' data, and then marks the collective finished, so that the
memory can be reused. A wait is a futex wait on a counter; no messages are sent.
"""

from __future__ import annotations

import os
import platform
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from poplar import _core
from poplar.comm import host_topology
from poplar.comm.copies import copy_except
from poplar.comm.failure_reports import weak_call
from poplar.comm.group import Group
from poplar.comm.host_memory.segment import (
    CAN_SHARE,
    PAGE,
    Block,
    PeerSegment,
    Segment,
    SegmentPool,
    caches_memory,
    view,
)
from poplar.values.errors import CollectiveTimeout

T = TypeVar("T")

_ABORT_REASON = -(-_core.RENDEZVOUS_BYTES // PAGE) * PAGE
"""Offset of the page in which a rank that aborts writes the reason; it begins with the length."""
_FIRST_BLOCK = _ABORT_REASON + PAGE
"""Offset at which the memory to share begins."""
_TOKEN = _FIRST_BLOCK - 16
"""Offset of random bytes by which peers know a segment. Virtual machines that were started from one
snapshot look like one host, in which a process may have another one's number."""
_LENGTH_BYTES = 8
_POLL_SECONDS = 0.1
"""Interval at which a wait checks whether the peers' processes are alive."""
_PAGE_SHIFT = 17 * 64
"""Bytes by which each rank's blocks are shifted within a page, relative to the rank before it.
Equal elements of all ranks' data are read together. At equal page offsets they would evict each
other from the L1 cache.

Measured on an EPYC, reduce-scatter of 64 MiB: 8 ms without and 5 ms with the shift at 2 ranks, 15
and 10 ms at 4. Other odd multiples of a cache line were equally fast.
"""


class ExchangeObjects(Protocol):
    """Every rank's value (picklable), in rank order. Collective."""

    def __call__(self, value: T, /, *, what: str) -> list[T]:
        """`what` names the exchange in errors."""


class NotOneHost(RuntimeError):
    """The ranks cannot share memory: they are on several hosts, or isolated on one."""


class Rendezvous:
    """This rank's segment and those of its peers. All ranks post the same collectives in order."""

    def __init__(self, group: Group, exchange: ExchangeObjects, nbytes: int) -> None:
        """Open the segments of all ranks. Collective; all ranks succeed or all raise.

        Args:
            exchange: exchanges the segments' descriptors; must not use this rendezvous.
            nbytes: addresses to reserve for what this rank will share; memory is taken as needed.

        Raises:
            NotOneHost: the ranks cannot share memory.
        """
        self.group = group
        self._own, self._peers = _open_segments(group, exchange, nbytes)
        memories = [self._peers.get(rank, self._own).memory for rank in range(group.size)]
        self._counters = _core.Rendezvous(memories, group.rank)
        self._shift = group.rank * _PAGE_SHIFT
        self.unfinished: dict[int, Callable[[], float]] = {}
        """By posted but unfinished collective, the function that finishes it and returns the
        seconds that it waited.
        """
        self._pool = SegmentPool(_FIRST_BLOCK, nbytes, self._counters.is_over)
        self._has_published_failure = False
        self._process = os.getpid()
        self._caches_memory = caches_memory()
        stop = weak_call(self._stop)
        group.on_abort[stop] = stop
        self._free_unless_gone = weak_call(self.free)

    # Shared memory.

    def allocate(self, dtype: torch.dtype, numel: int) -> Tensor:
        """Uninitialized shared memory that no peer reads.

        It is taken back when the last tensor over it is deleted; peers may still read it then.
        """
        block = self._pool.allocate(numel * dtype.itemsize + self._shift)
        holder = memoryview(self._own.memory)[block.offset : block.offset + block.nbytes]
        # Tensors must not extend the rendezvous's lifetime.
        weakref.finalize(holder, self._free_unless_gone, block).atexit = False
        return view(holder, dtype, self._shift, numel)

    def free(self, block: Block) -> None:
        """Take back a block that this rank no longer uses."""
        if os.getpid() == self._process:  # a forked process must not change the parent's pool
            self._pool.free(block)
            self.trim()

    def wait_for_readers(self, data: Tensor) -> None:
        """Call before writing to `data`: waits until no peer reads what was posted from there."""
        block = self._block_of(data)
        if block is not None and block.last_collective is not None:
            self.wait_until_over(block.last_collective)
            block.last_collective = None

    def last_collective(self, data: Tensor) -> int | None:
        """The last collective in which peers read or wrote `data`; None if they never did."""
        block = self._block_of(data)
        return None if block is None else block.last_collective

    def _block_of(self, data: Tensor) -> Block | None:
        offset = data.data_ptr() - self._own.address
        inside = data.numel() and _FIRST_BLOCK <= offset < self._own.nbytes
        return self._pool.block_at(offset) if inside else None

    # Collectives.

    def post(
        self,
        data: Tensor,
        unread: tuple[int, int] = (0, 0),
        *,
        shares_work: bool = False,
        extra_bytes: int = 0,
    ) -> int:
        """Post `data` (copied unless it is shared already); returns the collective's number.

        Args:
            data: peers may read it until they have finished the collective.
            unread: elements that no peer reads; they are not copied.
            shares_work: peers may reduce chunks of this rank's slice; see `work_counters`.
            extra_bytes: shared memory directly behind `data` that peers write in that case.

        Raises:
            CollectiveTimeout: an earlier collective failed.
        """
        if data.numel() and self._block_of(data) is None:
            return self.post_copy(data, unread)
        return self._post(data, shares_work, extra_bytes)

    def post_copy(self, data: Tensor, unread: tuple[int, int] = (0, 0)) -> int:
        """As `post`, but `data` may be overwritten at once."""
        with self.abort_on_error("a collective"):  # peers may have posted theirs already
            copy = self.allocate(data.dtype, data.numel())
            copy_except(copy, data, *unread)
            return self._post(copy)

    def _post(self, data: Tensor, shares_work: bool = False, extra_bytes: int = 0) -> int:
        self._check_not_aborted()
        collective, begin = self._counters.posted, 0
        self.wait_until_over(collective - _core.SLOTS)
        block = self._block_of(data)
        if block is not None:
            block.last_collective = collective
            begin = data.data_ptr() - self._own.address
        nbytes = data.numel() * data.element_size() + extra_bytes
        return self._counters.post(begin, nbytes, shares_work)

    def wait_until_posted(self, collective: int, what: str) -> float:
        """Wait until every rank has posted; returns the seconds that it took.

        Raises:
            CollectiveTimeout: names the ranks that have not posted by the deadline or have exited.
        """
        return self._traced_wait(_core.Event.POSTED, collective, what)

    def peer_view(
        self,
        peer: int,
        collective: int,
        dtype: torch.dtype,
        first: int,
        numel: int,
        *,
        total: int | None = None,
        extra_bytes: int = 0,
    ) -> Tensor:
        """A view of elements that a peer has posted, valid until this rank finishes the collective.

        Args:
            total: number of elements that the peer must have posted; None: at least enough.
            extra_bytes: bytes that it may have posted behind them.

        Raises:
            RuntimeError: it has posted another size: the ranks are in different collectives.
        """
        begin, nbytes, _ = self._counters.posted_range(peer, collective)
        expected = (first + numel if total is None else total) * dtype.itemsize
        if nbytes < expected or (
            total is not None and nbytes not in (expected, expected + extra_bytes)
        ):
            raise RuntimeError(
                f"rank {self.group.name} expects {expected} bytes from rank "
                f"{self.group.names[peer]}, which shares {nbytes}: the two are at different "
                "collectives, or their tensors differ in size. "
                "All ranks must make the same calls in the same order"
            )
        return view(self._peers[peer].memory, dtype, begin + first * dtype.itemsize, numel)

    def peers_sharing_work(self, collective: int) -> list[int]:
        """The peers whose slices this rank may help to reduce."""
        return [peer for peer in self.peers() if self._counters.posted_range(peer, collective)[2]]

    def work_counters(self, rank: int, collective: int) -> Tensor:
        """The work-sharing counters of a rank's slice, for `ops.rank_sum_chunks_`."""
        memory = self._own.memory if rank == self.group.rank else self._peers[rank].memory
        return view(
            memory,
            torch.uint8,
            self._counters.work_counters_offset(collective),
            _core.WORK_COUNTERS_BYTES,
        )

    def wait_for_chunks(self, collective: int, numel: int, what: str) -> float:
        """Wait until all `numel` elements of this rank's slice have been reduced, by any rank.

        Returns the seconds that it took.

        Raises:
            CollectiveTimeout: as `wait_until_posted`; names the ranks that have not finished.
        """
        rank, chunks = self.group.rank, -(-numel // _core.CHUNK)

        def missing(seconds: float) -> list[int]:
            if self._counters.wait_for_chunks(rank, collective, chunks, seconds):
                return []
            return self._counters.wait(_core.Event.FINISHED, collective, 0.0)

        return self._wait_while(missing, what)

    def mark_written(self, collective: int) -> None:
        """Signal that this rank has written all it had to write into the peers' data."""
        self._counters.mark_written(collective)

    def wait_until_written(self, collective: int, what: str) -> float:
        """Wait until all ranks have called `mark_written`; returns the seconds that it took.

        Raises:
            CollectiveTimeout: as `wait_until_posted`.
        """
        return self._traced_wait(_core.Event.WRITTEN, collective, what)

    def finish(self, collective: int) -> None:
        """Signal that this rank no longer reads what peers have posted for this collective."""
        self.unfinished.pop(collective, None)
        self._counters.finish(collective)
        self.trim()

    def release_unused(self) -> None:
        """Return memory to the system that no peer reads and that was not used since the last
        call.
        """
        self._release(self._pool.release_idle(unused=True))

    def trim(self) -> None:
        """Return memory that no peer reads to the system, unless memory is cached."""
        if not self._caches_memory:
            self._release(self._pool.release_idle())

    def _release(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            self._own.release_memory(block.offset, block.nbytes)

    def idle_bytes(self) -> int:
        """Bytes of this rank's segment that are kept for the next collectives."""
        return self._pool.idle_bytes()

    def finish_earlier(self, collective: int) -> float:
        """Finish all unfinished collectives before this one; returns the seconds that it waited."""
        earlier = [number for number in sorted(self.unfinished) if number < collective]
        return sum(self.unfinished[number]() for number in earlier)

    def peers(self) -> list[int]:
        """The other ranks, next rank first, so that not all ranks read the same one first."""
        rank, size = self.group.rank, self.group.size
        return [(rank + step) % size for step in range(1, size)]

    def wait_until_over(self, collective: int | None) -> float:
        """Wait until every rank, this one included, has finished it; None returns at once.

        Earlier collectives that this rank has not waited for, as in an abandoned step, are finished
        first, because peers may need them. Returns the seconds that this rank waited.
        """
        if collective is None or collective < 0:
            return 0.0
        waited = self.finish_earlier(collective + 1)
        return waited + self._wait(
            _core.Event.FINISHED, collective, "the end of an earlier collective"
        )

    # Failures.

    @contextmanager
    def abort_on_error(self, what: str) -> Iterator[None]:
        """Abort this rendezvous on any exception, and notify the peers.

        If only some ranks finish a collective, the ranks no longer agree on what comes next; see
        `Group.failures`.
        """
        try:
            yield
        except CollectiveTimeout as failure:
            self._abort(str(failure))
            raise
        except BaseException as error:  # also an interrupt: a partial sum cannot be resumed
            self._abort(f"rank {self.group.name}: {what} failed: {error!r}", is_cause=True)
            raise

    def _abort(self, reason: str, *, is_cause: bool = False) -> None:
        """Refuse all later collectives, for this reason, and notify the peers.

        `is_cause`: this rank has failed itself, as in a `Report`.
        """
        if os.getpid() != self._process:
            return
        if not self.group.failures:
            self.group.note_failure(CollectiveTimeout(reason))
            self.group.report(reason, is_cause=is_cause)
        self._stop()

    def _stop(self) -> None:
        """Write the group's first failure, from whichever rendezvous, to this rank's segment."""
        self.unfinished.clear()
        if self._has_published_failure or os.getpid() != self._process:
            return
        self._has_published_failure = True
        reason = str(self.group.failures[0]).encode()[: _TOKEN - _ABORT_REASON - _LENGTH_BYTES]
        begin, memory = _ABORT_REASON + _LENGTH_BYTES, self._own.memory
        memory[begin : begin + len(reason)] = reason
        memory[_ABORT_REASON:begin] = len(reason).to_bytes(_LENGTH_BYTES, "little")

    def _abort_reason(self, peer: int) -> str:
        """Why a peer has aborted; empty if it has not."""
        begin, memory = _ABORT_REASON + _LENGTH_BYTES, self._peers[peer].memory
        length = int.from_bytes(memory[_ABORT_REASON:begin], "little")
        return memory[begin : begin + length].decode(errors="replace")

    def _check_not_aborted(self) -> None:
        if self.group.failures:
            self._stop()
        self.group.check()

    def _traced_wait(self, event: _core.Event, collective: int, what: str) -> float:
        """As `_wait`, recorded in the trace; for waits that every rank performs."""
        start = time.perf_counter()
        waited = self._wait(event, collective, what)
        self.group.trace.add("wait", what, start)
        return waited

    def _wait(self, event: _core.Event, collective: int, what: str) -> float:
        return self._wait_while(
            lambda seconds: self._counters.wait(event, collective, seconds), what
        )

    def _wait_while(self, missing_after: Callable[[float], list[int]], what: str) -> float:
        """Wait until no rank is missing; returns the seconds that it took.

        Args:
            missing_after: waits for at most so many seconds and returns the missing ranks.
        """
        self._check_not_aborted()
        start = time.perf_counter()
        deadline = time.monotonic() + self.group.timeout.total_seconds()
        while missing := missing_after(_POLL_SECONDS):
            self._check_not_aborted()  # by another rendezvous of this group, or another thread
            exited = [peer for peer in missing if self._peers[peer].has_exited()]
            aborted = [peer for peer in missing if self._abort_reason(peer)]
            # Check again: a peer may have got this far just before it exited.
            if (exited or aborted or time.monotonic() > deadline) and (
                missing := missing_after(0.0)
            ):
                raise self._timeout_error(what, missing, exited, aborted)
        return time.perf_counter() - start

    def _timeout_error(
        self, what: str, missing: Sequence[int], exited: Sequence[int], aborted: Sequence[int]
    ) -> CollectiveTimeout:
        """The error of a wait for missing ranks; some of them may have exited or aborted."""
        exited = [peer for peer in missing if peer in exited]
        aborted = [peer for peer in missing if peer in aborted]
        if exited:
            failure = self.group.timeout_error(what, exited, "its process has exited")
        elif aborted:
            reason = self._abort_reason(aborted[0])
            failure = self.group.timeout_error(what, missing, f"it aborted: {reason}")
        else:
            failure = self.group.timeout_error(what, missing, "no answer")
        self._abort(str(failure))
        return failure


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


def _open_segments(
    group: Group, exchange: ExchangeObjects, nbytes: int
) -> tuple[Segment, dict[int, PeerSegment]]:
    """Create this rank's segment and open those of its peers. Collective.

    Raises:
        NotOneHost: on all ranks, if one of them cannot open another's segment.
    """
    what = "looking for ranks on one host"
    own, error, token = None, "", os.urandom(_FIRST_BLOCK - _TOKEN)
    own_host: tuple[str, ...] = (platform.node(), str(os.getpid()))
    try:
        own_host = host_topology.host_id()
        if CAN_SHARE:
            own = Segment(nbytes)
            own.memory[_TOKEN:_FIRST_BLOCK] = token
    except OSError as cause:
        error = f"rank {group.name} cannot reserve {nbytes} bytes of addresses: {cause}"
    offer = (own_host, os.getpid(), own.descriptor if own else -1, nbytes, token)
    peers: dict[int, PeerSegment] = {}
    for rank, (host, pid, descriptor, size, known) in enumerate(exchange(offer, what=what)):
        if rank == group.rank or error:
            continue
        try:
            if host != own_host:
                raise OSError(f"it runs on {host}, rank {group.name} on {own_host}")
            peers[rank] = PeerSegment(pid, descriptor, size)
            if peers[rank].memory[_TOKEN:_FIRST_BLOCK] != known:
                raise OSError(f"process {pid} on this host is not that rank")
        except (OSError, ValueError) as cause:
            names = f"rank {group.name} cannot read the memory of rank {group.names[rank]}"
            error = f"{names}: {cause}"
    errors = [text for text in exchange(error, what=what) if text]
    if own is not None:
        own.close_descriptor()  # all peers have opened it
    if errors or own is None:
        raise NotOneHost(errors[0] if errors else "this system has no anonymous shared memory")
    return own, peers
