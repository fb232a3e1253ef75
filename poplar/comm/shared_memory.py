"""The transport between CPU ranks of one host: what is packed lies where peers read it.

Nothing is sent. A rank posts where its bucket lies; who needs a slice of it takes it from there,
adds in rank order, and says when it is done, so that the memory can be written again. Each rank has
a board of two counters and a ring of places; waiting for a counter sleeps in the kernel, because
ranks may outnumber cores.
"""

from __future__ import annotations

import os
import platform
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from poplar import _core
from poplar.comm.bucket import Bucket, Codec
from poplar.comm.communicator import Communicator, Pending, own_slice
from poplar.comm.control import Control
from poplar.comm.exchange import collective_timeout
from poplar.comm.group import Group
from poplar.comm.pool import Pool, Shared
from poplar.comm.process_group import ProcessGroupCommunicator
from poplar.comm.segment import PAGE, Peer, Segment, open_segment, view
from poplar.planning.layout import Layout

_POSTED, _FINISHED, _RING = 0, 64, 128
"""Bytes on a board: collectives posted, collectives finished, and where what was posted lies."""
_PLACE = struct.Struct("<qqq")
"""Number of a segment (-1: nothing was posted), its bytes, and where in it the data begins."""
_PLACES = (PAGE - _RING) // _PLACE.size
"""Collectives in flight at most."""
_SLICE_SECONDS = 0.1
"""After so long in one wait it is asked whether the peer's process is still there."""
_WRAP = 1 << 32


class NotOneHost(RuntimeError):
    """Ranks cannot share memory: on several hosts, or kept apart on one; says which."""


class SharedMemoryCommunicator(Communicator):
    """Uneven reduce-scatter and all-gather by reading each other's memory.

    What travels at start and on a change of plan goes through the process group.
    """

    reduction_order = "rank"

    def __init__(self, group: Group, control: Control) -> None:
        """Collective; all ranks succeed or all raise.

        Raises:
            NotOneHost: the ranks cannot share memory.
        """
        super().__init__(group)
        self._rare = ProcessGroupCommunicator(group)
        self._own = Segment(PAGE)
        self._peers, self._boards = _meet(control, self._own)
        self._posted = 0
        self._finished = 0
        self._ahead: set[int] = set()
        """Finished, though an earlier one is not yet."""
        self._pool = Pool(self._is_over, self._wait_until_over)
        self._shared: list[Shared] = []

    def buffer(
        self, layout: Layout, dtype: torch.dtype, device: torch.device, codec: Codec | None = None
    ) -> Bucket:
        codec = codec if codec is not None else Codec(dtype)
        if device.type != "cpu":
            return super().buffer(layout, dtype, device, codec)
        shared = self._take(layout.numel * codec.wire_dtype.itemsize)
        data = view(shared.segment.memory, codec.wire_dtype, 0, layout.numel)
        bucket = Bucket(data, layout, codec, before_writing=lambda: self._pool.guard(shared))
        self._pool.give_back_after(bucket, shared)
        return bucket

    def reduce_scatter(
        self, bucket: Bucket, out: Tensor, *, accumulate: bool, what: str
    ) -> Pending:
        rank, size, layout = self.group.rank, self.group.size, bucket.layout
        own, low = layout.size(rank), layout.bounds(rank)[0]
        collective = self._post(bucket.data)

        def add() -> None:
            if own == 0:
                return
            received = torch.empty(size * own, dtype=bucket.data.dtype)
            for peer in range(size):
                source = bucket.data[low : low + own]
                if peer != rank:
                    source = self._posted_by(peer, collective, bucket.data.dtype, low, own)
                received[peer * own : (peer + 1) * own].copy_(source)
            bucket.codec.reduce(out, received, size, accumulate)

        return _Read(self, collective, what, add)

    def all_gather(self, data: Tensor, layout: Layout, *, what: str) -> Pending:
        rank = self.group.rank
        # A copy: what is gathered may be changed as soon as this rank has all of it.
        own = own_slice(data, layout, rank)
        shared = self._take(own.numel() * own.element_size())
        copy = view(shared.segment.memory, data.dtype, 0, own.numel())
        copy.copy_(own)
        collective = self._post(copy)
        self._pool.give_back(shared)

        def place() -> None:
            for held in self._shared:
                if data.numel() and held.segment.holds(data):
                    self._pool.guard(held)
            for peer in self._others():
                count = layout.size(peer)
                if count:
                    source = self._posted_by(peer, collective, data.dtype, 0, count)
                    own_slice(data, layout, peer).copy_(source)

        return _Read(self, collective, what, place)

    def broadcast(self, data: Tensor, source: int, *, what: str) -> None:
        self._rare.broadcast(data, source, what=what)

    def reshard(self, shard: Tensor, old: Layout, new: Layout, *, what: str) -> Tensor:
        return self._rare.reshard(shard, old, new, what=what)

    # Posting and reading.

    def _take(self, nbytes: int) -> Shared:
        shared = self._pool.take(nbytes)
        shared.read_in = None
        if shared not in self._shared:
            self._shared.append(shared)
        return shared

    def _post(self, data: Tensor) -> int:
        """Say where what peers may read lies; returns the number of this collective."""
        collective = self._posted
        self._wait_until_over(collective - _PLACES)
        place = (-1, 0, 0)
        if data.numel():
            shared = next((held for held in self._shared if held.segment.holds(data)), None)
            if shared is None:
                shared = self._take(data.numel() * data.element_size())
                data = view(shared.segment.memory, data.dtype, 0, data.numel()).copy_(data)
                self._pool.give_back(shared)
            shared.read_in = collective
            segment = shared.segment
            place = (segment.number, segment.nbytes, data.data_ptr() - segment.address)
        _PLACE.pack_into(self._own.memory, _RING + collective % _PLACES * _PLACE.size, *place)
        self._posted = collective + 1
        _core.raise_counter(self._own.memory, _POSTED, self._posted % _WRAP)
        return collective

    def _posted_by(
        self, peer: int, collective: int, dtype: torch.dtype, first: int, numel: int
    ) -> Tensor:
        """Elements of what a peer has posted, where they lie."""
        at = _RING + collective % _PLACES * _PLACE.size
        number, nbytes, begin = _PLACE.unpack_from(self._boards[peer], at)
        assert number >= 0, f"rank {peer} posted nothing, though its slice has {numel} elements"
        memory = self._peers[peer].memory(number, nbytes)
        return view(memory, dtype, begin + first * dtype.itemsize, numel)

    def finish(self, collective: int) -> None:
        """This rank reads nothing any more of what peers posted for `collective`."""
        self._ahead.add(collective)
        while self._finished in self._ahead:
            self._ahead.remove(self._finished)
            self._finished += 1
        _core.raise_counter(self._own.memory, _FINISHED, self._finished % _WRAP)

    def wait_until_posted(self, collective: int, what: str) -> None:
        """Return when every rank has posted its part."""
        self._wait(_POSTED, collective + 1, what)

    def _is_over(self, collective: int) -> bool:
        for peer in self._others():
            at = _core.read_counter(self._boards[peer], _FINISHED)
            if (at - collective - 1) % _WRAP >= _WRAP // 2:
                return False
        return True

    def _wait_until_over(self, collective: int) -> None:
        if collective >= 0:
            self._wait(_FINISHED, collective + 1, "the end of an earlier collective")

    def _wait(self, counter: int, value: int, what: str) -> None:
        deadline = time.monotonic() + self.group.timeout.total_seconds()
        for peer in self._others():
            while not self._reached(peer, counter, value, _SLICE_SECONDS):
                ended = self._peers[peer].has_ended()
                if not ended and time.monotonic() < deadline:
                    continue
                missing = [p for p in self._others() if not self._reached(p, counter, value, 0.0)]
                if missing:
                    gone = [p for p in missing if self._peers[p].has_ended()]
                    cause = f"the process of rank(s) {gone} has ended" if gone else "no answer"
                    raise collective_timeout(self.group, what, missing, cause)

    def _reached(self, peer: int, counter: int, value: int, seconds: float) -> bool:
        return _core.wait_for_counter(self._boards[peer], counter, value % _WRAP, seconds)

    def _others(self) -> list[int]:
        rank, size = self.group.rank, self.group.size
        return [(rank + step) % size for step in range(1, size)]


class _Read:
    """A collective that has been posted here; waiting for it reads what the peers have posted."""

    def __init__(
        self,
        comm: SharedMemoryCommunicator,
        collective: int,
        what: str,
        read: Callable[[], None],
    ) -> None:
        self._comm, self._collective, self._what = comm, collective, what
        self._read: Callable[[], None] | None = read

    def wait(self) -> float:
        """As `Pending.wait`."""
        if self._read is None:
            return 0.0
        began = time.perf_counter()
        self._comm.wait_until_posted(self._collective, self._what)
        held_up = time.perf_counter() - began
        self._comm.group.trace.add("wait", self._what, began)
        self._read()
        self._read = None
        self._comm.finish(self._collective)
        return held_up


def _meet(control: Control, own: Segment) -> tuple[dict[int, Peer], dict[int, Any]]:
    """Exchange boards with all ranks. Collective.

    Raises:
        NotOneHost: on all ranks, if one of them cannot read another's board.
    """
    what = "looking for ranks on one host"
    everyones = control.exchange_objects((_place(), os.getpid(), own.number), what=what)
    peers: dict[int, Peer] = {}
    boards: dict[int, Any] = {}
    trouble = ""
    for rank, (place, pid, number) in enumerate(everyones):
        if rank == control.group.rank:
            continue
        try:
            if place != _place():
                raise OSError(f"it runs at {place}, rank {control.group.rank} at {_place()}")
            peers[rank] = Peer(pid)
            boards[rank] = open_segment(pid, number, PAGE)
        except OSError as error:
            trouble = f"rank {control.group.rank} cannot read the memory of rank {rank}: {error}"
            break
    troubles = [text for text in control.exchange_objects(trouble, what=what) if text]
    if troubles:
        raise NotOneHost(troubles[0])
    return peers, boards


def _place() -> tuple[str, ...]:
    """The host, and the namespaces within which processes and sockets of it see each other.

    Ranks in different network namespaces are told apart because whoever made these wants the
    network between them to be used.
    """
    try:
        host = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return (host, *(os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "net")))
    except OSError:  # not Linux: nobody to share with
        return (platform.node(), str(os.getpid()))
