"""The hierarchical transport of GPUs: native collectives within each host and between hosts.

The ranks of a host add their values first, and share received values, so each slice crosses the
network once per host. Sums are taken on each host in rank order, rounded to the wire dtype, and
added in host order: the same bits as `hierarchical` and as `hierarchical_messages`.

Each collective is one native call within the host and one between hosts. Both are issued at once,
on a stream of the transport: neither the host nor the caller's stream waits between them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from poplar.comm.bucket import Bucket
from poplar.comm.collective_queue import CollectiveQueue
from poplar.comm.communicator import CachedBytes, Communicator, Work, own_slice
from poplar.comm.group import Group
from poplar.comm.host_routes import Bounds, Route
from poplar.comm.host_topology import Hosts
from poplar.comm.process_group import ProcessGroupCommunicator
from poplar.comm.shard_layout import Layout
from poplar.comm.step_stream import StepStream


class HierarchicalProcessGroupCommunicator(Communicator):
    """Uneven collectives over several hosts, with any number of devices on each."""

    name = "hierarchical:process_group"
    reduction_order = "host"

    def __init__(self, group: Group, hosts: Hosts, host_group: Group) -> None:
        """`host_group`: the ranks of this host, ascending."""
        super().__init__(group)
        self._group, self._hosts, self.hosts = group, hosts, hosts.by_rank
        self._host = hosts.host_of(group.rank)
        self._routes: dict[Layout, Route] = {}
        self._queue = CollectiveQueue(group)
        self._all_hosts = ProcessGroupCommunicator(group)
        self._own_host = ProcessGroupCommunicator(host_group)
        # Two streams, so that the copies of an unshard do not wait for the sums of earlier
        # reductions. Exchanges between hosts follow one another: they share a process group.
        self._reductions, self._gathers = StepStream(), StepStream()
        self.waits_on_stream = group.supports(torch.device("cuda"))

    def reduce_scatter(
        self,
        bucket: Bucket,
        out: Tensor,
        *,
        accumulate: bool,
        what: str,
        squares: Tensor | None = None,
    ) -> Work:
        with self._reductions.steps(out.device, bucket, out, squares) as work:
            self._reduce(bucket, out, accumulate, squares, what)
        return work

    def all_gather(
        self, data: Tensor, layout: Layout, *, what: str, own: Tensor | None = None
    ) -> Work:
        with self._gathers.steps(data.device, data, own) as work:
            own = own_slice(data, layout, self.group.rank) if own is None else own
            self._gather(data, own, layout, what)
        return work

    def broadcast(self, data: Tensor, source: int, *, what: str) -> None:
        self._all_hosts.broadcast(data, source, what=what)

    def all_to_all(
        self,
        received: Tensor,
        sent: Tensor,
        received_sizes: Sequence[int],
        sent_sizes: Sequence[int],
        *,
        what: str,
    ) -> Work:
        sizes = received_sizes, sent_sizes
        return self._all_hosts.all_to_all(received, sent, *sizes, what=what)

    def reshard(self, shard: Tensor, old: Layout, new: Layout, *, what: str) -> Tensor:
        return self._all_hosts.reshard(shard, old, new, what=what)

    def cached_bytes(self) -> CachedBytes:
        return self._own_host.cached_bytes()

    def trim(self) -> None:
        self._own_host.trim()

    def _reduce(
        self, bucket: Bucket, out: Tensor, accumulate: bool, squares: Tensor | None, what: str
    ) -> None:
        """Reduce on the host what each rank owns and relays; send it; add the sums of all hosts."""
        data, own = bucket.data, out.numel()
        if not data.numel():
            return
        route = self._route(bucket.layout)
        # Allocate before sending: if memory runs out, the collective can be issued again.
        ordered = Bucket(_join(data, route.parts), route.host_layout, bucket.codec)
        host_sum = data.new_empty(own + sum(route.relayed), dtype=out.dtype)
        rounded, received = data.new_empty(host_sum.numel()), data.new_empty(sum(route.relays))
        parts = [[received[slice(*bounds)] for bounds in of_host] for of_host in route.by_host]
        sums = [part[0] if len(part) == 1 else data.new_empty(own) for part in parts]
        sums[self._host] = rounded[:own]
        self._own_host.reduce_scatter(ordered, host_sum, accumulate=False, what=what).wait()
        rounded.copy_(host_sum)
        self._exchange(received, rounded[own:], route.relays, route.relayed, what)
        if own:
            for host, part in enumerate(parts):
                if host != self._host and len(part) > 1:
                    torch.cat(part, out=sums[host])
            bucket.codec.reduce(out, sums, accumulate, squares)

    def _gather(self, data: Tensor, own: Tensor, layout: Layout, what: str) -> None:
        """Send each slice to the ranks that relay it, then gather within every host."""
        if not data.numel():
            return
        route = self._route(layout)
        gathered = data.new_empty(layout.numel)
        shared = own_slice(gathered, route.host_layout, self._own_host.group.rank)
        shared[: own.numel()].copy_(own)
        sent = _join(own, route.sent)
        self._exchange(shared[own.numel() :], sent, route.relayed, route.relays, what)
        self._own_host.all_gather(gathered, route.host_layout, what=what).wait()
        sizes = [stop - start for start, stop in route.parts]
        places = [data[start:stop] for start, stop in route.parts]
        torch._foreach_copy_(places, gathered.split(sizes))

    def _exchange(
        self,
        received: Tensor,
        sent: Tensor,
        received_sizes: Sequence[int],
        sent_sizes: Sequence[int],
        what: str,
    ) -> None:
        """One all-to-all of all hosts, with the number of elements of each rank."""
        if len(self._hosts.members) == 1:
            return
        group, sizes = self._group.process_group, (received_sizes, sent_sizes)

        def start() -> list[dist.Work | None]:
            return [dist.all_to_all_single(received, sent, *sizes, group=group, async_op=True)]

        self._queue.issue(start, sent.device, what).wait()

    def _route(self, layout: Layout) -> Route:
        if layout not in self._routes:
            self._routes[layout] = Route.of(self._hosts, layout, self.group.rank)
        return self._routes[layout]


def _join(data: Tensor, parts: Sequence[Bounds]) -> Tensor:
    """These parts of `data`, one behind the other; a view if it is one part."""
    if len(parts) == 1:
        return data[slice(*parts[0])]
    return torch.cat([data[start:stop] for start, stop in parts]) if parts else data[:0]
