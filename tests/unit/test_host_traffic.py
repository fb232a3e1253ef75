"""The formulas of links and networks are what the transports hand to the library."""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).parents[1]))

from communicators import NativeGroup
from issued_calls import Call, RecordCalls, fake_group, of_ranks

from poplar.comm import Bucket, Codec, Communicator, Group
from poplar.comm.hierarchy.transport import HierarchicalCommunicator
from poplar.comm.host_topology import Hosts
from poplar.comm.process_group import ProcessGroupCommunicator
from poplar.comm.shard_layout import Layout
from poplar.values.host_traffic import is_hierarchical, link_traffic, network_traffic

HOSTS = ["aabb", "abab", "aabccc", "abbb", "aaaa", "aaaabbbbcccc"]


class MessageGroup(Group):
    """A fake group that counts as gloo."""

    def is_on_host(self, device: torch.device) -> bool:
        return True


TRANSPORTS = {
    "flat": (MessageGroup, ProcessGroupCommunicator),
    "flat, native": (NativeGroup, ProcessGroupCommunicator),
    "hierarchical": (MessageGroup, HierarchicalCommunicator),
    "hierarchical, native": (NativeGroup, HierarchicalCommunicator),
}


def connected(transport: str, rank: int, hosts: Hosts) -> Iterator[Communicator]:
    kind, communicator = TRANSPORTS[transport]
    with fake_group(rank, sum(map(len, hosts.members)), kind) as group:
        if communicator is ProcessGroupCommunicator:
            yield ProcessGroupCommunicator(group)
        else:
            host_group = of_ranks(hosts.members[hosts.host_of(rank)], kind)
            yield communicator(group, hosts, host_group)


def issued(transport: str, operation: str, layout: Layout, hosts: Hosts) -> list[list[Call]]:
    """By rank, what one collective hands to the library."""
    found = []
    for rank in range(layout.world_size):
        for comm in connected(transport, rank, hosts):
            bucket = Bucket(torch.zeros(layout.numel), layout, Codec())
            out = torch.zeros(layout.size(rank))
            with RecordCalls() as recorded:
                if operation == "reduce_scatter":
                    comm.reduce_scatter(bucket, out, accumulate=False, what="it").wait()
                else:
                    comm.all_gather(bucket.data, layout, what="it").wait()
            found.append(recorded.calls)
    return found


def layouts(hosts: Hosts) -> list[Layout]:
    """Even shares, one owner, and shares of which one is 0; relays divide evenly."""
    size = sum(map(len, hosts.members))
    unit = 64 * 12
    return [
        Layout.even(unit * size, size),
        Layout((*(0,) * size, unit)),
        Layout((0, 0, *(unit * rank * rank for rank in range(1, size)))),
    ]


@pytest.mark.parametrize("names", HOSTS)
@pytest.mark.parametrize("operation", ["reduce_scatter", "all_gather"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_networks_carry_what_the_formulas_say(transport: str, operation: str, names: str) -> None:
    hosts = Hosts.of(names)
    for layout in layouts(hosts):
        leaving, arriving = Counter[int](), Counter[int]()
        for rank, calls in enumerate(issued(transport, operation, layout, hosts)):
            for peer, numel in (item for call in calls for item in call.sent.items()):
                if hosts.host_of(rank) != hosts.host_of(peer):
                    leaving[hosts.host_of(rank)] += numel
                    arriving[hosts.host_of(peer)] += numel
        sizes = [[layout.size(rank) for rank in ranks] for ranks in hosts.members]
        expected = network_traffic(sizes, hierarchical="hierarchical" in transport)
        found = [(leaving[host], arriving[host]) for host in range(len(sizes))]
        if operation == "all_gather":  # the opposite direction
            found = [(out, into) for into, out in found]
        assert found == [(one.leaving, one.arriving) for one in expected], layout


@pytest.mark.parametrize("names", HOSTS)
@pytest.mark.parametrize("transport", ["flat, native", "hierarchical, native"])
def test_links_carry_what_the_formulas_say(transport: str, names: str) -> None:
    hosts, hierarchical = Hosts.of(names), "hierarchical" in transport
    for layout in layouts(hosts):
        leaving, arriving = Counter[int](), Counter[int]()
        for rank, calls in enumerate(issued(transport, "reduce_scatter", layout, hosts)):
            for peer, numel in (item for call in calls for item in call.sent.items()):
                if not hierarchical or hosts.host_of(rank) == hosts.host_of(peer):
                    leaving[rank] += numel
                    arriving[peer] += numel
        sizes = [[layout.size(rank) for rank in ranks] for ranks in hosts.members]
        expected = link_traffic(sizes, hierarchical=hierarchical)
        for ranks, own in zip(hosts.members, expected, strict=True):
            assert [leaving[rank] for rank in ranks] == [one.leaving for one in own]
            assert [arriving[rank] for rank in ranks] == [one.arriving for one in own]


@pytest.mark.parametrize("names", HOSTS)
@pytest.mark.parametrize("operation", ["reduce_scatter", "all_gather"])
def test_devices_make_one_native_call_per_level_of_hosts(operation: str, names: str) -> None:
    hosts = Hosts.of(names)
    for layout in layouts(hosts):
        for calls in issued("flat, native", operation, layout, hosts):
            assert len(calls) == 1
        for rank, calls in enumerate(issued("hierarchical, native", operation, layout, hosts)):
            has_peers = len(hosts.members[hosts.host_of(rank)]) > 1
            assert len(calls) == has_peers + (len(hosts.members) > 1)
            names_found = {call.name for call in calls}
            # All-gathers of unequal slices are all-to-alls of lists.
            assert names_found <= {"alltoall_base_", "_allgather_base_", "alltoall_"}


@given(st.lists(st.lists(st.floats(0.0, 1.0), min_size=1, max_size=4), min_size=1, max_size=5))
def test_hierarchical_is_chosen_where_it_relieves_a_network(shares: list[list[float]]) -> None:
    over_hosts = network_traffic(shares, hierarchical=True)
    flat = network_traffic(shares, hierarchical=False)
    for one, other in zip(over_hosts, flat, strict=True):
        assert one.leaving <= other.leaving * (1 + 1e-9)
        assert one.arriving <= other.arriving * (1 + 1e-9)
    if not is_hierarchical([len(ranks) for ranks in shares]):
        assert over_hosts == flat
    elif min(map(min, shares)) > 0.0:
        assert over_hosts != flat


def test_a_host_of_eight_sends_an_eighth_of_what_a_flat_transport_sends() -> None:
    shares = [[1 / 16] * 8] * 2
    flat, over_hosts = (network_traffic(shares, hierarchical=way)[0] for way in (False, True))
    assert flat.leaving == 8 * over_hosts.leaving == 4.0
    assert flat.arriving == 8 * over_hosts.arriving == 4.0


class RecordTensors(TorchDispatchMode):
    """Knows the tensors that operators have made, as long as they live."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[weakref.ref[torch.Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        if isinstance(result, torch.Tensor):
            self.made.append(weakref.ref(result))
        return result

    @property
    def alive(self) -> int:
        return sum(tensor() is not None for tensor in self.made)


@pytest.mark.parametrize("operation", ["reduce_scatter", "all_gather"])
def test_collectives_in_flight_hold_no_memory_of_the_transport(
    operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the steps allocate belongs to their stream, so one collective's worth serves all."""
    monkeypatch.setenv("POPLAR_MEMORY_CACHE", "off")
    hosts = Hosts.of("aabb")
    layout = Layout.even(64 * 12 * 4, 4)
    for comm in connected("hierarchical, native", 0, hosts):
        bucket = Bucket(torch.zeros(layout.numel), layout, Codec())
        out = torch.zeros(layout.size(0))
        with RecordTensors() as tensors:
            if operation == "reduce_scatter":
                work = comm.reduce_scatter(bucket, out, accumulate=False, what="it")
            else:
                work = comm.all_gather(bucket.data, layout, what="it")
        comm.trim()  # receive buffers of the CPU, which stands in for a device
        assert len(tensors.made) > 3
        assert tensors.alive == 0
        work.wait()
