"""Compressed sums over hosts: a host adds exactly, and what it sends is encoded once."""

from __future__ import annotations

import random
from unittest import mock

import pytest
import ranks as harness
import torch
import torch.distributed as dist
from communicators import connect_natively
from native_calls import all_to_all_of_parts
from test_hierarchical_process_group import HOSTS, random_layout
from torch import Tensor

from poplar import ops
from poplar.comm import Communicator, Encoded, Group, connect, host_topology
from poplar.comm.hierarchy.transport import HierarchicalCommunicator
from poplar.comm.host_topology import Hosts
from poplar.comm.shard_layout import Layout
from poplar.ops import codec

KEY = 12345 << 12


def values_of(rank: int, number: int, numel: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * number + rank)
    return torch.randn(numel, generator=generator)


def expected_sum(names: str, number: int, layout: Layout, bits: int, rank: int) -> Tensor:
    """The sum over hosts of what each has encoded of its exact sum, by the plain operators."""
    low, high = layout.bounds(rank)
    hosts = Hosts.of(names).members
    sums = []
    for ranks in hosts:
        total = torch.zeros(layout.numel)
        for peer in ranks:
            total += values_of(peer, number, layout.numel)
        sums.append(total)
    if len(hosts) == 1:
        return sums[0][low:high]
    encoded = [
        codec.encode(total.view(-1, 64), bits, 0, KEY + number + host)
        for host, total in enumerate(sums)
    ]
    rows = slice(low // 64, high // 64)
    return codec.decode_sum([part[rows] for part in encoded], bits).flatten()


def compare(names: str, transport: str, times: int) -> list[str]:
    """The random cases with another result than the plain operators'."""
    group, draw = Group.of(harness.group(), None), random.Random(3)
    if transport == "direct":  # every rank is a sender of its own
        names = "abcdefgh"[: group.size]
        comm: Communicator = connect(group, "process_group")
    elif transport == "staged":
        with mock.patch.object(host_topology, "host_id", return_value=names[group.rank]):
            comm = connect(group, "staged")
        if len(set(names)) == 1:  # over shared memory: every rank is a sender of its own
            names = "abcdefgh"[: group.size]
    elif transport == "native calls":
        comm = connect_natively(group, Hosts.of(names))
    else:
        hosts = Hosts.of(names)
        members = group.split(hosts.members)
        comm = HierarchicalCommunicator(group, hosts, members)
    wrong = []
    with mock.patch.object(dist, "all_to_all", all_to_all_of_parts):
        for number in range(times):
            layout, bits = random_layout(draw, group.size), draw.choice((8, 4))
            own = layout.size(group.rank)
            encoded = Encoded(bits=bits, key=KEY + number)
            bucket = comm.buffer(layout, torch.float32, torch.device("cpu"), encoded)
            bucket.pack([values_of(group.rank, number, layout.numel)], [0], 1.0)
            out, squares = torch.ones(own), torch.full((own // 64,), -1.0)
            comm.reduce_scatter(
                bucket, out, accumulate=number % 2 == 0, what="a reduction", squares=squares
            ).wait()
            total = expected_sum(names, number, layout, bits, group.rank)
            expected = total + (number % 2 == 0)
            right = torch.equal(out, expected)
            if not right or not torch.equal(squares, ops.block_sums_of_squares(expected)):
                wrong.append(f"rank {group.rank}: {layout}, {bits} bits, case {number}")
    return wrong


@pytest.mark.parametrize("transport", ["messages", "native calls", "staged", "direct"])
@pytest.mark.parametrize("names", HOSTS.values(), ids=HOSTS)
def test_sums_are_those_of_the_plain_operators(names: str, transport: str) -> None:
    for wrong in harness.one_off(len(names), compare, names, transport, 20):
        assert wrong == []
