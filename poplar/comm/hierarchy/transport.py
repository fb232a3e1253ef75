"""The transport across hosts: values are added on each host, and each byte sent between hosts once.

The ranks of a host add their values first, and share received values. So each slice crosses the
network once per host instead of once per rank. The relaying between hosts is split evenly over the
ranks of a host (`Route`). `WithinHost` is shared memory, or the process group of the host; between
hosts it is one all-to-all of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from poplar.comm.bucket import Bucket, Codec, Reduction
from poplar.comm.collective_queue import CollectiveQueue
from poplar.comm.communicator import (
    CachedBytes,
    CallbackWork,
    Communicator,
    Splits,
    Work,
    own_slice,
)
from poplar.comm.group import Group
from poplar.comm.hierarchy.within_host import ProcessGroupOfHost, SharedHostMemory, WithinHost, join
from poplar.comm.host_memory.rendezvous import Rendezvous
from poplar.comm.host_topology import Hosts, Route
from poplar.comm.process_group import all_to_all
from poplar.comm.shard_layout import Layout


class HierarchicalCommunicator(Communicator):
    """Uneven collectives over several hosts, with any number of ranks on each.

    Sums are taken on each host in rank order, rounded to the wire dtype, and added in host order.
    So the bits depend on which ranks share a host, and not on how the ranks of a host exchange
    data. On devices each collective is one native call within the host and one between hosts. Both
    are issued at once, on a stream of the transport: neither the host nor the caller's stream waits
    between them.
    """

    def __init__(self, group: Group, hosts: Hosts, on_host: Rendezvous | Group) -> None:
        """`on_host`: the memory that CPU ranks of this host share, or the group of its ranks."""
        super().__init__(group)
        self._between = between = CollectiveQueue(group)
        self._within: WithinHost = (
            SharedHostMemory(between, on_host)
            if isinstance(on_host, Rendezvous)
            else ProcessGroupOfHost(between, on_host)
        )
        self.name, self.waits_on_stream = self._within.name, self._within.comm.waits_on_stream
        self._hosts, self.hosts = hosts, hosts.by_rank
        self._routes: dict[Layout, Route] = {}
        # Two streams, so that the copies of an unshard do not wait for the sums of earlier
        # reductions. Exchanges between hosts follow one another: they share a process group.
        self._reductions, self._gathers = StepStream(), StepStream()

    def buffer(
        self, layout: Layout, dtype: torch.dtype, device: torch.device, codec: Codec | None = None
    ) -> Bucket:
        codec, between_hosts = self.codecs(codec if codec is not None else Codec(dtype))
        bucket = self._within.comm.buffer(layout, dtype, device, codec)
        return replace(bucket, between_hosts=between_hosts)

    def codecs(self, codec: Codec) -> tuple[Codec, Codec | None]:
        own_host, is_one_host = self._hosts.host_of(self.group.rank), len(self._hosts.members) == 1
        return codec.on_host, None if is_one_host else codec.of_sender(own_host)

    def share(self, data: Tensor) -> Tensor:
        return self._within.comm.share(data)

    def wait_for_readers(self, data: Tensor) -> None:
        self._within.comm.wait_for_readers(data)

    def cached_bytes(self) -> CachedBytes:
        between = CachedBytes(private=self._between.buffers.idle_bytes())
        return self._within.comm.cached_bytes().plus(between)

    def trim(self) -> None:
        self._within.comm.trim()
        self._between.buffers.trim()

    def end_step(self) -> None:
        self._within.comm.end_step()
        self._between.buffers.release_unused()

    def reduce(self, reduction: Reduction) -> Work:
        bucket, out = reduction.bucket, reduction.out
        used = bucket, out, reduction.squares
        return self._issue(self._reductions, lambda: self._reduce(reduction), out.device, *used)

    def all_gather(
        self, data: Tensor, layout: Layout, *, what: str, own: Tensor | None = None
    ) -> Work:
        mine = own_slice(data, layout, self.group.rank) if own is None else own

        def steps() -> Work:
            return self._gather(data, mine, layout, what)

        return self._issue(self._gathers, steps, data.device, data, own)

    def all_to_all(self, received: Tensor, sent: Tensor, sizes: Splits, *, what: str) -> Work:
        def exchange() -> Work:
            return all_to_all(self._between, received, sent, sizes, what)

        return self._within.between_hosts(exchange, what)

    def _issue(
        self, stream: StepStream, steps: Callable[[], Work], device: torch.device, *used: object
    ) -> Work:
        """Issue the steps of a collective; `used` must live until the wait."""
        if self.group.is_on_host(device):
            return steps()
        with stream.steps(device, *used) as work:
            last = steps()
            with self._between.after_a_call():
                last.wait()
        return work

    def _reduce(self, reduction: Reduction) -> Work:
        """Add on the host what each rank owns and relays; send it; add the sums of all hosts."""
        bucket, own = reduction.bucket, reduction.out.numel()
        data, codec = bucket.data, bucket.between_hosts or bucket.codec
        if not data.numel():
            return StepsWork()
        route, on_wire = self._route(bucket.layout), codec.wire_numel
        relays, relayed = list(map(on_wire, route.relays)), list(map(on_wire, route.relayed))
        own_parts = route.by_rank[self._within.comm.group.rank]
        # Allocate before sending: if memory runs out, the collective can be issued again.
        total = self._between.take(own + sum(route.relayed), data)
        received = self._between.take(sum(relays), data, codec.wire_dtype)
        encoded = self._between.take(
            on_wire(total.numel()) if codec.encodes else 0, data, codec.wire_dtype
        )
        parts = [
            [received[on_wire(start) : on_wire(stop)] for start, stop in of_host]
            for of_host in route.by_host
        ]
        sums = [
            part[0] if len(part) == 1 else received.new_empty(on_wire(own) if part else 0)
            for part in parts
        ]
        own_host = self._hosts.host_of(self.group.rank)

        def add_hosts() -> None:
            sums[own_host] = codec.of_sums(total[:own], own_parts[:1], encoded[: on_wire(own)])
            for host, part in enumerate(parts):
                if host != own_host and len(part) > 1:
                    torch.cat(part, out=sums[host])
            replace(reduction, bucket=replace(bucket, codec=codec)).add(sums)
            self._between.put_back(data, total, received, encoded)

        def exchange(position: int, receives: bool = True, sends: bool = True) -> Work:
            none, what = [0] * self.group.size, reduction.what
            sizes = Splits(relays if receives else none, relayed if sends else none)
            incoming = received[: sum(sizes.received)]
            outgoing = received[:0]
            if sends:
                outgoing = codec.of_sums(total[own:], own_parts[1:], encoded[on_wire(own) :])
            work = self._exchange(incoming, outgoing, sizes, what, position)
            return CallbackWork(work, add_hosts) if sends else work

        return self._within.reduce(reduction, route, total, exchange)

    def _gather(self, data: Tensor, own: Tensor, layout: Layout, what: str) -> Work:
        """Send each slice to the ranks that relay it, then gather within every host."""
        if not data.numel():
            return StepsWork()
        route = self._route(layout)

        def receive(relayed: Tensor, position: int) -> Work:
            sizes = Splits(received=route.relayed, sent=route.relays)
            return self._exchange(relayed, join(own, route.sent), sizes, what, position)

        return self._within.gather(data, own, route, what, receive)

    def _exchange(
        self, received: Tensor, sent: Tensor, sizes: Splits, what: str, position: int
    ) -> Work:
        """One all-to-all of all hosts, with the number of elements of each rank."""
        if len(self._hosts.members) == 1:
            return StepsWork()
        return all_to_all(self._between, received, sent, sizes, what, position)

    def _route(self, layout: Layout) -> Route:
        if layout not in self._routes:
            self._routes[layout] = Route.of(self._hosts, layout, self.group.rank)
        return self._routes[layout]


class StepsWork:
    """Steps that have been issued. It keeps the tensors that they read and write until the wait."""

    def __init__(self, *tensors: object) -> None:
        self._tensors = tensors
        self._done: torch.cuda.Event | None = None
        self._device: torch.device | None = None

    def record(self, stream: torch.cuda.Stream) -> None:
        """All steps have been issued on this stream."""
        self._device = stream.device
        self._done = torch.cuda.Event()
        self._done.record(stream)

    def wait(self) -> float:
        """As `Work.wait`: only the current stream waits."""
        if self._done is not None:
            torch.cuda.current_stream(self._device).wait_event(self._done)
        self._tensors, self._done = (), None
        return 0.0


class StepStream:
    """A stream of each CUDA device, on which the steps of a collective follow one another.

    So the caller's stream does not wait between them. On other devices they run when issued.
    """

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    @contextmanager
    def steps(self, device: torch.device, *tensors: object) -> Iterator[StepsWork]:
        """A context in which steps are issued, and the work to wait for.

        Tensors that the steps allocate belong to their stream, so they can be freed while the steps
        run. The others must live until the wait.
        """
        work = StepsWork(*tensors)
        if device.type != "cuda":
            yield work
            return
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device, priority=-1)
        stream = self._streams[device]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            yield work
        work.record(stream)
