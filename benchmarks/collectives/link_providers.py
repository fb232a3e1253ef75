"""What fills a link: a plain TCP connection, and buffers in parts on one or more connections."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate

import torch
import torch.distributed as dist
from network import Hosts
from torch import Tensor

from collectives.case import Case
from collectives.provider import Prepared, Provider
from poplar.comm import Bucket, Codec, Communicator
from poplar.comm.communicator import Work
from poplar.comm.shard_layout import Layout

PARTS = 8
"""The engine sends a model in at least as many flat buffers between hosts."""
STREAMS = 4


class InParts(Provider):
    """`PARTS` buffers in flight, on these communicators in turns; each has a part of every slice.

    With one communicator this is what the engine does with the gradients of a model.
    """

    transport = "process_group"

    def __init__(self, comms: Sequence[Communicator]) -> None:
        streams = f", {len(comms)} streams" if len(comms) > 1 else ""
        self.name = f"poplar process_group, {PARTS} parts{streams}"
        self._comms, self._rank = comms, comms[0].group.rank

    def prepare(self, case: Case, mine: Tensor) -> Prepared | None:
        if case.operation == "all_reduce":
            return None
        cuts = [Layout.even(size, PARTS).sizes for size in case.layout.sizes]  # by owner and part
        layouts = [Layout((0, *accumulate(sizes))) for sizes in zip(*cuts, strict=True)]
        codec = Codec(case.torch_dtype)
        buckets = [Bucket(torch.empty(one.numel, dtype=mine.dtype), one, codec) for one in layouts]
        slices = [bucket.data.split(bucket.layout.sizes) for bucket in buckets]
        own_cut = cuts[self._rank]
        out = torch.empty(case.layout.size(self._rank))
        calls: list[Callable[[], Work]] = []
        if case.operation == "reduce_scatter":
            for owner, whole in enumerate(mine.split(case.layout.sizes)):
                for part, values in zip(slices, whole.split(cuts[owner]), strict=True):
                    part[owner].copy_(values)
        for number, bucket in enumerate(buckets):
            comm = self._comms[number % len(self._comms)]
            if case.operation == "reduce_scatter":
                own = out.split(own_cut)[number]
                call = partial(comm.reduce_scatter, bucket, own, accumulate=False)
            else:
                own = mine.split(own_cut)[number]
                call = partial(comm.all_gather, bucket.data, bucket.layout, own=own)
            calls.append(partial(call, what=f"{case}, {number}"))

        def run() -> None:
            for work in [call() for call in calls]:
                work.wait()

        def result() -> Tensor:
            if case.operation == "reduce_scatter":
                return out
            return torch.cat([part[owner] for owner in range(case.ranks) for part in slices])

        return Prepared(run, result)


class Sockets(Provider):
    """Two ranks on two emulated hosts gather through one TCP connection: the plain limit."""

    name = "TCP socket"
    transport = "tcp"

    def __init__(self, rank: int) -> None:
        """Connect. Collective."""
        self._rank = rank
        port = [0]
        if rank == 0:
            with socket.create_server((Hosts.address(0), 0)) as server:
                port[0] = server.getsockname()[1]
                dist.broadcast_object_list(port, 0)
                self._peer, _ = server.accept()
        else:
            dist.broadcast_object_list(port, 0)
            self._peer = socket.create_connection((Hosts.address(0), port[0]))

    def prepare(self, case: Case, mine: Tensor) -> Prepared | None:
        if case.operation != "all_gather":
            return None
        whole = torch.empty(case.layout.numel, dtype=mine.dtype)
        slices = whole.split(case.layout.sizes)
        slices[self._rank].copy_(mine)
        sent, received = (
            memoryview(slices[rank].view(torch.uint8).numpy())
            for rank in (self._rank, 1 - self._rank)
        )

        def run() -> None:
            sender = threading.Thread(target=self._peer.sendall, args=(sent,))
            sender.start()
            done = 0
            while done < len(received):
                done += self._peer.recv_into(received[done:])
            sender.join()

        return Prepared(run, lambda: whole)
