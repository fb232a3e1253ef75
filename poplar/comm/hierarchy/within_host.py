"""What the hierarchical transport does within a host: sums of its ranks, and gathers among them.

The two ways of it differ in when their steps run. Messages on the host and shared memory progress
in waits, in the order of issue. Native calls are issued at once, one behind the other.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from poplar.comm.bucket import Bucket, Reduction
from poplar.comm.collective_queue import CollectiveQueue
from poplar.comm.communicator import CallbackWork, Communicator, Work, own_slice
from poplar.comm.copies import copy
from poplar.comm.group import Group
from poplar.comm.host_memory.rendezvous import Rendezvous, SharedMemoryWork
from poplar.comm.host_memory.transport import SharedMemoryCommunicator
from poplar.comm.host_topology import Route
from poplar.comm.process_group import ProcessGroupCommunicator, gather
from poplar.comm.shard_layout import Bounds


class ExchangeSums(Protocol):
    """The exchange of sums between hosts, at a reserved position: both ways, or one way each."""

    def __call__(self, position: int, receives: bool = True, sends: bool = True) -> Work: ...


class WithinHost(ABC):
    """The ranks of one host. All methods are collective over them, unless it says local."""

    name: str
    """The transport's name if it uses this."""
    comm: Communicator
    """The transport among the ranks of the host; rank `i` is the `i`-th one of the host."""

    @abstractmethod
    def reduce(
        self, reduction: Reduction, route: Route, total: Tensor, exchange: ExchangeSums
    ) -> Work:
        """`total` = the host's sum of the parts that this rank owns and relays.

        Args:
            total: in the wire dtype; the own slice and, behind it, what this rank relays.
            exchange: sends what this rank relays, and receives the sums of other hosts. The own
                slice must be in `total` before the wait for what is sent.
        """

    @abstractmethod
    def gather(
        self,
        data: Tensor,
        own: Tensor,
        route: Route,
        what: str,
        receive: Callable[[Tensor, int], Work],
    ) -> Work:
        """Fill `data` from what each rank of the host owns and relays.

        Args:
            own: this rank's slice, in `data` or elsewhere.
            receive: issues the exchange between hosts, into memory for what this rank relays, at a
                reserved position.
        """

    def between_hosts(self, issue: Callable[[], Work], what: str) -> Work:
        """Issue work between hosts. Its errors stop the ranks of the host that wait for this one.

        Native calls need nothing for that.
        """
        return issue()


class SharedHostMemory(WithinHost):
    """CPU ranks that read each other's memory."""

    name = "hierarchical"

    def __init__(self, between: CollectiveQueue, rendezvous: Rendezvous) -> None:
        """`rendezvous`: of the ranks of the host; `between`: of all ranks."""
        self.comm: SharedMemoryCommunicator = SharedMemoryCommunicator(rendezvous)
        self._between, self._rendezvous = between, rendezvous

    def between_hosts(self, issue: Callable[[], Work], what: str) -> Work:
        with self._rendezvous.abort_on_error(what):
            work = issue()
        collective = self._rendezvous.post(torch.empty(0, device="cpu"))
        return SharedMemoryWork(self._rendezvous, collective, what, work.wait)

    def reduce(
        self, reduction: Reduction, route: Route, total: Tensor, exchange: ExchangeSums
    ) -> Work:
        bucket, own_parts = reduction.bucket, route.by_rank[self._rendezvous.group.rank]
        collective = self._rendezvous.post(bucket.data, unread=own_parts[0])
        position = self._between.reserve()
        # Received from the start: a rank of another host sends as soon as it has its sums.
        with self._rendezvous.abort_on_error(reduction.what):
            incoming = exchange(position, sends=False)

        def add_and_send() -> float:
            sums = total.split(sizes_of(own_parts))

            def add(number: int) -> None:
                start, stop = own_parts[number]
                if start < stop:
                    values = self.comm.slices(collective, bucket.data, start, stop - start)
                    sent = sums[number]
                    is_wide = sent.dtype is torch.float32
                    out = sent if is_wide else sent.new_empty(sent.numel(), dtype=torch.float32)
                    bucket.codec.reduce(out, values, accumulate=False)
                    if not is_wide:
                        sent.copy_(out)

            for number in range(1, len(own_parts)):
                add(number)
            outgoing = exchange(position, receives=False)
            add(0)  # the own slice, while what this rank relays is sent
            return incoming.wait() + outgoing.wait()

        return SharedMemoryWork(self._rendezvous, collective, reduction.what, add_and_send)

    def gather(
        self,
        data: Tensor,
        own: Tensor,
        route: Route,
        what: str,
        receive: Callable[[Tensor, int], Work],
    ) -> Work:
        rendezvous, rank = self._rendezvous, self._rendezvous.group.rank
        target = data[slice(*route.by_rank[rank][0])]
        last_collective = rendezvous.last_collective(data)
        if own.data_ptr() != target.data_ptr():
            copy(target, own)
        shared = rendezvous.allocate(data.dtype, route.host_layout.size(rank))
        copy(shared[: own.numel()], own)
        with rendezvous.abort_on_error(what):
            exchange = receive(shared[own.numel() :], self._between.reserve())
        collective = rendezvous.post(shared)

        def read() -> float:
            waited = rendezvous.wait_until_over(last_collective)
            waited += exchange.wait()
            rendezvous.mark_written(collective)
            waited += rendezvous.wait_until_written(collective, what)
            for peer, parts in enumerate(route.by_rank):
                size = route.host_layout.size(peer)
                if peer == rank:  # its slice is in `data` already
                    values, parts = shared[own.numel() :], parts[1:]
                else:
                    values = rendezvous.peer_view(peer, collective, data.dtype, 0, size, total=size)
                for (start, stop), part in zip(parts, values.split(sizes_of(parts)), strict=True):
                    copy(data[start:stop], part)
            return waited

        return SharedMemoryWork(rendezvous, collective, what, read)


class ProcessGroupOfHost(WithinHost):
    """Ranks with any devices, over the process group of their host."""

    name = "hierarchical:process_group"

    def __init__(self, between: CollectiveQueue, host_group: Group) -> None:
        """`host_group`: the ranks of the host, ascending; `between`: of all ranks."""
        self.comm: ProcessGroupCommunicator = ProcessGroupCommunicator(host_group)
        self._between = between

    def reduce(
        self, reduction: Reduction, route: Route, total: Tensor, exchange: ExchangeSums
    ) -> Work:
        # Allocate before sending: if memory runs out, the collective can be issued again.
        bucket, between = reduction.bucket, self._between
        taken: list[Tensor] = []
        data, sums = bucket.data, total
        if len(route.parts) > 1:
            taken.append(between.take(route.host_layout.numel, data))
            data = torch.cat([data[start:stop] for start, stop in route.parts], out=taken[-1])
        if total.dtype is not torch.float32:
            sums = between.take(total.numel(), total, torch.float32)
            taken.append(sums)
        ordered = Bucket(data, route.host_layout, bucket.codec)
        work = self.comm.reduce_scatter(ordered, sums, accumulate=False, what=reduction.what)

        def round_sums() -> None:
            if sums is not total:
                total.copy_(sums)
            between.put_back(total, *taken)

        rounded, position = CallbackWork(work, round_sums), self._between.reserve()
        if self.comm.group.size == 1:  # no call yet: if memory runs out, all can be issued again
            rounded.wait()
            return exchange(position)
        return self._between.chain(rounded, lambda: exchange(position), total.device, position)

    def gather(
        self,
        data: Tensor,
        own: Tensor,
        route: Route,
        what: str,
        receive: Callable[[Tensor, int], Work],
    ) -> Work:
        gathered = self._between.take(route.host_layout.numel, data)
        shared = own_slice(gathered, route.host_layout, self.comm.group.rank)
        shared[: own.numel()].copy_(own)
        between, within = self._between.reserve(), self.comm.queue.reserve()
        exchange = receive(shared[own.numel() :], between)

        def copy_out() -> None:
            places = [data[start:stop] for start, stop in route.parts]
            torch._foreach_copy_(places, gathered.split(sizes_of(route.parts)))
            self._between.put_back(data, gathered)

        def gather_on_host() -> Work:
            work = gather(self.comm.queue, gathered, route.host_layout, what, within)
            return CallbackWork(work, copy_out)

        return self._between.chain(exchange, gather_on_host, data.device, between)


def join(data: Tensor, parts: Sequence[Bounds]) -> Tensor:
    """These parts of `data`, one behind the other; a view if it is one part."""
    if len(parts) == 1:
        return data[slice(*parts[0])]
    return torch.cat([data[start:stop] for start, stop in parts]) if parts else data[:0]


def sizes_of(parts: Sequence[Bounds]) -> list[int]:
    """The number of elements of each part."""
    return [stop - start for start, stop in parts]
