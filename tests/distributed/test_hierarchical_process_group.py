"""The hierarchical transport of devices, on gloo: the bits of the message path, by native calls."""

from __future__ import annotations

import random
from unittest import mock

import pytest
import ranks as harness
import torch
import torch.distributed as dist
from communicators import connect_natively
from native_calls import all_to_all_of_parts
from torch import Tensor

from poplar.comm import Bucket, Codec, Communicator, Group, stream_work
from poplar.comm.hierarchy.transport import HierarchicalCommunicator
from poplar.comm.host_topology import Hosts
from poplar.comm.shard_layout import Layout

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HOSTS = {
    "2+2": "aabb",
    "interleaved": "abab",
    "1+3": "abbb",
    "one host": "aaaa",
    "one rank each": "abcd",
    "2+1+3": "aabccc",
    "3+1+2 interleaved": "acabcc",
}


def random_layout(draw: random.Random, size: int) -> Layout:
    numel = 64 * draw.choice((0, 1, 3, 20, 200, 900))
    cuts = sorted(64 * draw.randint(0, numel // 64) for _ in range(size - 1))
    if draw.random() < 0.3:  # one rank owns everything
        owner = draw.randrange(size)
        cuts = [numel * (rank >= owner) for rank in range(size - 1)]
    return Layout((0, *cuts, numel))


def results(comm: Communicator, layout: Layout, dtype: torch.dtype, number: int) -> list[Tensor]:
    """Of one collective of each kind."""
    low, high = layout.bounds(comm.group.rank)
    generator = torch.Generator().manual_seed(100 * number + comm.group.rank)
    values = torch.randn(layout.numel, generator=generator).to(dtype)
    bucket = Bucket(values.clone(), layout, Codec(dtype))
    out, squares = torch.ones(high - low), torch.full(((high - low) // 64,), -1.0)
    comm.reduce_scatter(
        bucket, out, accumulate=number % 2 == 0, what="a reduction", squares=squares
    ).wait()
    assert torch.equal(bucket.data, values), "the bucket must stay as it was packed"
    in_place = torch.full_like(values, torch.nan)
    in_place[low:high] = values[low:high]
    comm.all_gather(in_place, layout, what="a gather in place").wait()
    given = torch.full_like(values, torch.nan)
    comm.all_gather(given, layout, what="a gather", own=values[low:high].clone()).wait()
    return [out, squares, in_place, given]


def compare(names: str, times: int) -> list[str]:
    """The random cases in which native calls and messages differ."""
    group, draw = Group.of(harness.group(), None), random.Random(7)
    hosts = Hosts.of(names)
    by_messages = HierarchicalCommunicator(group, hosts, group.split(hosts.members))
    natively = connect_natively(group, hosts)
    wrong = []
    with mock.patch.object(dist, "all_to_all", all_to_all_of_parts):
        for number in range(times):
            layout, dtype = random_layout(draw, group.size), draw.choice(DTYPES)
            found = results(natively, layout, dtype, number)
            expected = results(by_messages, layout, dtype, number)
            if not all(map(torch.equal, found, expected)):
                wrong.append(f"rank {group.rank}: {layout} {dtype}")
    return wrong


@pytest.mark.parametrize("names", HOSTS.values(), ids=HOSTS)
def test_native_calls_give_the_bits_of_the_message_path(names: str) -> None:
    for wrong in harness.one_off(len(names), compare, names, 25):
        assert wrong == []


def pending_steps(names: str) -> list[str]:
    """The collectives of which the device has not passed a wait, while the host went on."""
    group = Group.of(harness.group(), None)
    comm = connect_natively(group, Hosts.of(names))
    layout = Layout.even(64 * group.size, group.size)
    bucket = Bucket(torch.ones(layout.numel), layout, Codec())
    never = mock.Mock(query=lambda: False)
    with mock.patch.object(stream_work, "record", return_value=never):
        comm.reduce_scatter(
            bucket, torch.zeros(64), accumulate=False, what="a reduction", squares=None
        ).wait()
    pending = [issued for issued, _ in group.in_flight.values() if not issued.is_completed()]
    return [issued.what for issued in pending]


def test_each_step_counts_as_pending_until_the_device_has_passed_it() -> None:
    """So a deadline names a collective that hangs in the middle."""
    for found in harness.one_off(4, pending_steps, "aabb"):
        assert found == ["a reduction"] * 2, "on the host, and between hosts"
