"""A board per rank, in shared memory: where what it offers lies, and how far it has read.

Ranks of one host that take part in the same collectives in the same order each post their part,
read the others', and say when they are done, so that the memory can be written again. Nothing is
sent, and nobody is asked: a wait is for a counter, and sleeps in the kernel.
"""

from __future__ import annotations

import os
import platform
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from poplar import _core
from poplar.comm import host_topology
from poplar.comm.copies import copy_around
from poplar.comm.group import Members
from poplar.comm.segment_pool import Pool, Shared, keeps_memory
from poplar.comm.shared_segment import CAN_SHARE, PAGE, Peer, Segment, view
from poplar.errors import CollectiveTimeout

T = TypeVar("T")

_LAST_WORDS = -(-_core.RENDEZVOUS_BYTES // PAGE) * PAGE
"""Where a rank that gives up says why: a page after its board, which begins with a length."""
_FIRST = _LAST_WORDS + PAGE
"""Where the memory to share begins."""
_LENGTH_BYTES = 8
_SLICE_SECONDS = 0.1
"""After so long in one wait it is asked whether the peer's process is still there."""
_SHIFT = 17 * 64
"""Bytes by which each rank's memory begins later in its page than that of the rank before it. Equal
places in all parts are read together; at equal places of a page they would drive each other out of
the first-level cache (reduce-scatter of 64 MiB on an EPYC: 8 ms without, 5 ms with this at 2 ranks,
15 and 10 at 4; other odd multiples of a line did as well)."""


class Exchange(Protocol):
    """Every rank's value, which can be pickled, in rank order. Collective."""

    def __call__(self, value: T, /, *, what: str) -> list[T]:
        """`what` names it in errors."""


class NotOneHost(RuntimeError):
    """Ranks cannot share memory: on several hosts, or kept apart on one; says which."""


class Rendezvous:
    """This rank's board and the others'. All ranks post the same collectives in the same order."""

    def __init__(self, group: Members, exchange: Exchange, nbytes: int) -> None:
        """Meet the other ranks. Collective; all ranks succeed or all raise.

        Args:
            group: the ranks.
            exchange: to meet by; not through a board itself.
            nbytes: addresses to set aside for what this rank will share; memory only as needed.

        Raises:
            NotOneHost: the ranks cannot share memory.
        """
        self.group = group
        self._own, self._peers = _meet(group.rank, exchange, nbytes)
        memories = [self._peers.get(rank, self._own).memory for rank in range(group.size)]
        self._counters = _core.Rendezvous(memories, group.rank)
        self._shift = group.rank * _SHIFT
        self.reads: dict[int, Callable[[], float]] = {}
        """What finishes each collective that this rank has posted and not finished, and returns the
        seconds for which it was held up."""
        is_over = weakref.WeakMethod(self._is_over)  # a cycle would keep memory until a collection
        self._pool = Pool(_FIRST, nbytes, lambda collective: _called(is_over, collective))
        self._has_said_why = False
        self._process = os.getpid()
        self._keeps_memory = keeps_memory()

    # Memory to share.

    def take(self, dtype: torch.dtype, numel: int) -> tuple[Tensor, Shared]:
        """Shared memory that nobody reads any more, not initialised."""
        part = self._pool.take(numel * dtype.itemsize + self._shift)
        return view(self._own.memory, dtype, part.offset + self._shift, numel), part

    def give_back(self, part: Shared) -> None:
        """This rank needs it no more; peers may still read it."""
        if os.getpid() == self._process:  # a fork knows nothing of what is in use now
            self._pool.give_back(part)
            self.trim()

    def lend(self, dtype: torch.dtype, numel: int) -> Tensor:
        """As `take`, until the last tensor that shows this memory is gone: then it comes back."""
        part = self._pool.take(numel * dtype.itemsize + self._shift)
        holder = memoryview(self._own.memory)[part.offset : part.offset + part.nbytes]
        # The board itself must not be kept by what it has lent.
        weakref.finalize(holder, _come_back, weakref.ref(self), part).atexit = False
        return view(holder, dtype, self._shift, numel)

    def guard(self, data: Tensor) -> None:
        """Before `data` is written: wait until no peer reads what was posted from there."""
        part = self._holder_of(data)
        if part is not None and part.read_in is not None:
            self.wait_until_over(part.read_in)
            part.read_in = None

    def holds(self, data: Tensor) -> bool:
        """Whether peers can read `data` where it lies."""
        return self._holder_of(data) is not None

    def read_in(self, data: Tensor) -> int | None:
        """The last collective in which peers read or wrote `data`; None if they never did."""
        part = self._holder_of(data)
        return None if part is None else part.read_in

    def _holder_of(self, data: Tensor) -> Shared | None:
        offset = data.data_ptr() - self._own.address
        inside = data.numel() and _FIRST <= offset < self._own.nbytes
        return self._pool.holder_of(offset) if inside else None

    # Collectives.

    def post(
        self,
        data: Tensor,
        unread: tuple[int, int] = (0, 0),
        *,
        is_open: bool = False,
        behind: int = 0,
    ) -> int:
        """Offer `data` (copied unless it is shared already); returns the collective's number.

        Args:
            data: what peers may read until they have finished.
            unread: elements that no peer reads, and that are not copied therefore.
            is_open: peers may help with this rank's slice: see `claims`.
            behind: bytes of shared memory right behind `data` that they write then.

        Raises:
            CollectiveTimeout: an earlier one came to no end.
        """
        part = self._holder_of(data)
        if part is None and data.numel():
            return self.post_copy(data, unread)
        return self._offer(data, part, is_open, behind)

    def post_copy(self, data: Tensor, unread: tuple[int, int] = (0, 0)) -> int:
        """As `post`, but `data` may be written again at once."""
        with self.or_give_up("a collective"):  # which peers may have posted already
            copy, part = self.take(data.dtype, data.numel())
            copy_around(copy, data, *unread)
            collective = self._offer(copy, part)
            self.give_back(part)
            return collective

    def _offer(
        self, data: Tensor, part: Shared | None, is_open: bool = False, behind: int = 0
    ) -> int:
        self._refuse_after_a_failure()
        collective = self._counters.posted
        self.wait_until_over(collective - _core.PLACES)
        begin = 0
        if part is not None:
            part.read_in = collective
            begin = data.data_ptr() - self._own.address
        nbytes = data.numel() * data.element_size() + behind
        return self._counters.post(begin, nbytes, is_open)

    def wait_until_posted(self, collective: int, what: str) -> float:
        """Return when every rank has posted its part, with the seconds that it took.

        Raises:
            CollectiveTimeout: names the ranks that have not by the deadline, or that are gone.
        """
        return self._traced(_core.Event.POSTED, collective, what)

    def posted_by(
        self,
        peer: int,
        collective: int,
        dtype: torch.dtype,
        first: int,
        numel: int,
        *,
        of: int | None = None,
        behind: int = 0,
    ) -> Tensor:
        """Elements of what a peer has posted, where they lie; until this rank has finished.

        Args:
            peer: who has posted.
            collective: for which.
            dtype: of the elements.
            first: the first one.
            numel: how many.
            of: elements that the peer must have posted in all; None: enough of them.
            behind: bytes that it may have posted behind them.

        Raises:
            RuntimeError: it has posted another number: ranks are not at the same collective.
        """
        begin, nbytes, _ = self._counters.part_of(peer, collective)
        wanted = (first + numel if of is None else of) * dtype.itemsize
        if nbytes < wanted or (of is not None and nbytes not in (wanted, wanted + behind)):
            raise RuntimeError(
                f"rank {self.group.rank} takes rank {peer} to share {wanted} bytes, and it shares "
                f"{nbytes}: the two are at different collectives, or their tensors differ in size. "
                "All ranks must make the same calls in the same order"
            )
        return view(self._peers[peer].memory, dtype, begin + first * dtype.itemsize, numel)

    def open_to_help(self, collective: int) -> list[int]:
        """The peers whose slice others may work on."""
        return [peer for peer in self.others() if self._counters.part_of(peer, collective)[2]]

    def claims(self, rank: int, collective: int) -> Tensor:
        """Of the work on a rank's slice, as `ops.rank_sum_claimed_` takes them."""
        memory = self._own.memory if rank == self.group.rank else self._peers[rank].memory
        return view(memory, torch.uint8, self._counters.claims_at(collective), _core.CLAIMS_BYTES)

    def wait_until_done(self, collective: int, numel: int, what: str) -> float:
        """Return when all `numel` elements of this rank's slice are done, by whomever.

        Returns the seconds that it took.

        Raises:
            CollectiveTimeout: as `wait_until_posted`; those that have not finished may be at it.
        """
        rank, chunks = self.group.rank, -(-numel // _core.CHUNK)

        def late(seconds: float) -> list[int]:
            if self._counters.wait_for_chunks(rank, collective, chunks, seconds):
                return []
            return self._counters.late(_core.Event.FINISHED, collective, 0.0)

        return self._wait_while(late, what)

    def mark(self, collective: int) -> None:
        """This rank has written into peers' parts what it had to."""
        self._counters.mark(collective)

    def wait_until_marked(self, collective: int, what: str) -> float:
        """Return when all ranks have, with the seconds that it took.

        Raises:
            CollectiveTimeout: as `wait_until_posted`.
        """
        return self._traced(_core.Event.MARKED, collective, what)

    def finish(self, collective: int) -> None:
        """This rank reads nothing any more of what peers posted for `collective`."""
        self.reads.pop(collective, None)
        self._counters.finish(collective)
        self.trim()

    def trim(self) -> None:
        """Give memory that nobody reads any more to the system, unless it is to be kept."""
        if not self._keeps_memory:
            for part in self._pool.blank():
                self._own.give_back(part.offset, part.nbytes)

    def finish_before(self, collective: int) -> float:
        """Finish what this rank has not finished yet of all that came before `collective`.

        Returns the seconds for which it was held up.
        """
        earlier = [unfinished for unfinished in sorted(self.reads) if unfinished < collective]
        return sum(self.reads[unfinished]() for unfinished in earlier)

    def others(self) -> list[int]:
        """The other ranks, the nearest successor first, so that no rank is read by all at once."""
        rank, size = self.group.rank, self.group.size
        return [(rank + step) % size for step in range(1, size)]

    def _is_over(self, collective: int) -> bool:
        return self._counters.is_over(collective)

    def wait_until_over(self, collective: int | None) -> float:
        """Return when every rank has finished it, this one included; at once if there is none.

        What nobody here has waited for (in a step that was given up, say) is finished first: every
        rank may be standing here. Returns the seconds that this rank was held up.
        """
        if collective is None or collective < 0:
            return 0.0
        held_up = self.finish_before(collective + 1)
        return held_up + self._wait(
            _core.Event.FINISHED, collective, "the end of an earlier collective"
        )

    @contextmanager
    def or_give_up(self, what: str) -> Iterator[None]:
        """Whatever goes wrong inside is the end of this board, and peers are told.

        A collective that some ranks finish and others don't leaves them without an order to go on
        in: see `Members.failures`.
        """
        try:
            yield
        except CollectiveTimeout as failure:
            self.give_up(str(failure))
            raise
        except BaseException as error:  # an interrupted sum must not be taken up again either
            self.give_up(f"rank {self.group.rank}: {what} failed: {error!r}")
            raise

    def give_up(self, why: str) -> None:
        """No collective comes after this, for the reason given; peers are told."""
        self.reads.clear()
        if not self.group.failures:
            self.group.failures.append(CollectiveTimeout(why))
        self._say_why()

    def _say_why(self) -> None:
        """On this board too, if the failure was another's."""
        if self._has_said_why:
            return
        self._has_said_why = True
        said = str(self.group.failures[0]).encode()[: PAGE - _LENGTH_BYTES]
        begin, memory = _LAST_WORDS + _LENGTH_BYTES, self._own.memory
        memory[begin : begin + len(said)] = said
        memory[_LAST_WORDS:begin] = len(said).to_bytes(_LENGTH_BYTES, "little")

    def _last_words(self, peer: int) -> str:
        """Why a peer has given up; empty if it has not."""
        begin, memory = _LAST_WORDS + _LENGTH_BYTES, self._peers[peer].memory
        length = int.from_bytes(memory[_LAST_WORDS:begin], "little")
        return memory[begin : begin + length].decode(errors="replace")

    def _refuse_after_a_failure(self) -> None:
        if self.group.failures:
            self._say_why()
            raise CollectiveTimeout(
                f"rank {self.group.rank}: an earlier collective came to no end, and ranks no "
                "longer agree on what comes next; build the optimizer anew on all ranks, or start "
                f"again from a checkpoint. It was: {self.group.failures[0]}"
            )

    def _traced(self, event: _core.Event, collective: int, what: str) -> float:
        """As `_wait`; for what every rank waits for, so that all traces show the same."""
        began = time.perf_counter()
        held_up = self._wait(event, collective, what)
        self.group.trace.add("wait", what, began)
        return held_up

    def _wait(self, event: _core.Event, collective: int, what: str) -> float:
        return self._wait_while(
            lambda seconds: self._counters.late(event, collective, seconds), what
        )

    def _wait_while(self, late: Callable[[float], list[int]], what: str) -> float:
        """Wait until nobody is late; returns the seconds that it took.

        Args:
            late: waits for so many seconds at most, and returns who was not there in time.
            what: names the collective in errors.
        """
        self._refuse_after_a_failure()
        began = time.perf_counter()
        deadline = time.monotonic() + self.group.timeout.total_seconds()
        while missing := late(_SLICE_SECONDS):
            self._refuse_after_a_failure()  # of another board, or on another thread
            gone = [peer for peer in missing if self._peers[peer].has_ended()]
            silent = [peer for peer in missing if self._last_words(peer)]
            # Asked once more: it may have come so far just before its end.
            if (gone or silent or time.monotonic() > deadline) and (missing := late(0.0)):
                raise self._failure(what, missing, gone, silent)
        return time.perf_counter() - began

    def _failure(
        self, what: str, missing: Sequence[int], gone: Sequence[int], silent: Sequence[int]
    ) -> CollectiveTimeout:
        """Of a wait for ranks that are missing, some of which have ended or given up."""
        ended = [peer for peer in missing if peer in gone]
        gave_up = [peer for peer in missing if peer in silent]
        if ended:
            failure = self.group.failure(what, ended, "its process has ended")
        elif gave_up:
            failure = self.group.failure(
                what, missing, f"it gave up, and said: {self._last_words(gave_up[0])}"
            )
        else:
            failure = self.group.failure(what, missing, "no answer")
        self.give_up(str(failure))
        return failure


def _meet(me: int, exchange: Exchange, nbytes: int) -> tuple[Segment, dict[int, Peer]]:
    """Open each other's segments. Collective.

    Raises:
        NotOneHost: on all ranks, if one of them cannot read another's.
    """
    what = "looking for ranks on one host"
    own, trouble = None, ""
    here: tuple[str, ...] = (platform.node(), str(os.getpid()))
    try:
        here = host_topology.place()
        own = Segment(nbytes) if CAN_SHARE else None
    except OSError as error:
        trouble = f"rank {me} cannot set {nbytes} bytes of addresses aside: {error}"
    mine = (here, os.getpid(), own.number if own else -1, nbytes)
    peers: dict[int, Peer] = {}
    for rank, (place, pid, number, size) in enumerate(exchange(mine, what=what)):
        if rank == me or trouble:
            continue
        try:
            if place != mine[0]:
                raise OSError(f"it runs at {place}, rank {me} at {mine[0]}")
            peers[rank] = Peer(pid, number, size)
        except OSError as error:
            trouble = f"rank {me} cannot read the memory of rank {rank}: {error}"
    troubles = [text for text in exchange(trouble, what=what) if text]
    if own is not None:
        own.shut()  # everybody has it who shall
    if troubles or own is None:
        raise NotOneHost(troubles[0] if troubles else "this system has no anonymous shared memory")
    return own, peers


def _come_back(board: weakref.ref[Rendezvous], part: Shared) -> None:
    alive = board()
    if alive is not None:
        alive.give_back(part)


def _called(is_over: weakref.WeakMethod[Any], collective: int) -> bool:
    alive = is_over()
    return alive is None or bool(alive(collective))
