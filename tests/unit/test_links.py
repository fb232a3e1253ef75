"""Links between hosts: which pairs are measured when, at which sizes, and what they give."""

from __future__ import annotations

from collections import Counter
from itertools import combinations, pairwise
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from poplar.comm.host_topology import Hosts
from poplar.profiler import links as measuring
from poplar.profiler.collectives import rates_of_hosts
from poplar.profiler.links import (
    FIRST_BYTES,
    LEAST_BYTES,
    MOST_BYTES,
    REPETITIONS,
    Messages,
    measure_pairs,
    tournament,
)
from poplar.values.profile import LinkProfile


@given(st.integers(0, 65))
def test_every_pair_of_hosts_is_measured_once_and_no_host_twice_in_a_round(hosts):
    rounds = tournament(hosts)
    pairs = Counter(frozenset(pair) for pairs in rounds for pair in pairs)
    assert pairs == Counter(map(frozenset, combinations(range(hosts), 2)))
    for of_round in rounds:
        players = [host for pair in of_round for host in pair]
        assert len(set(players)) == len(players)
    assert len(rounds) <= max(0, hosts)


class Network:
    """Pairs of ranks with known links; `swap` is called for rank 0 and answers for all ranks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, links: list[tuple[float, float]]) -> None:
        self.now = 0.0
        self.links = links
        self.sizes: list[int] = []
        self.exchanges = 0
        monkeypatch.setattr(measuring, "time", self)

    def perf_counter(self) -> float:
        return self.now

    def swap(self, size: int) -> float:
        self.sizes.append(size)
        self.now += max(latency + size * rate for latency, rate in self.links)
        return float("nan")  # of this rank; `exchange` knows that of all ranks

    def exchange(self, value: float) -> list[float]:
        self.exchanges += 1
        if isinstance(value, bool):
            return [value] * (2 * len(self.links))
        seconds = [latency + self.sizes[-1] * rate for latency, rate in self.links]
        return [0.9 * each for each in seconds] + seconds  # the partner is the slower one

    def pairs(self) -> list[tuple[int, int]]:
        return [(rank, len(self.links) + rank) for rank in range(len(self.links))]

    def measured(self, budget: float = 1e9) -> list[tuple[float, float]]:
        return measure_pairs(self.swap, self.exchange, self.pairs(), budget)


@pytest.mark.parametrize("latency", [1e-6, 1e-4, 1e-2])
@pytest.mark.parametrize("bandwidth", [1e8, 12.5e9, 450e9])
def test_messages_grow_until_they_show_bandwidth(monkeypatch, latency, bandwidth):
    network = Network(monkeypatch, [(latency, 1 / bandwidth)])
    ((found, rate),) = network.measured()
    assert found == pytest.approx(latency, rel=0.1)
    if network.sizes[-1] < MOST_BYTES:
        assert rate == pytest.approx(1 / bandwidth, rel=0.01)
    assert network.sizes[:2] == [LEAST_BYTES] * 2
    assert network.sizes[2] == FIRST_BYTES
    assert all(after == 2 * size for size, after in pairwise(network.sizes[2:]))


def test_slowest_pair_decides_how_far_messages_grow(monkeypatch):
    fast, slow = (1e-5, 1e-9), (5e-3, 1e-9)
    alone = Network(monkeypatch, [fast])
    alone.measured()
    both = Network(monkeypatch, [fast, slow])
    found = both.measured()
    assert both.sizes[-1] > alone.sizes[-1]
    assert [rate for _, rate in found] == pytest.approx([1e-9, 1e-9], rel=0.01)
    assert [latency for latency, _ in found] == pytest.approx([1e-5, 5e-3], rel=0.01)


def test_budget_ends_the_growth(monkeypatch):
    network = Network(monkeypatch, [(1.0, 1e-6)])
    ((latency, rate),) = network.measured(budget=0.0)
    assert network.sizes == [LEAST_BYTES, LEAST_BYTES, FIRST_BYTES]
    assert (latency, rate) == (pytest.approx(1.0, rel=1e-3), pytest.approx(0.5 / FIRST_BYTES, 0.1))


def test_exchanged_bytes_are_bounded_whatever_the_link(monkeypatch):
    network = Network(monkeypatch, [(100.0, 1e-12)])
    network.measured()
    assert max(network.sizes) == MOST_BYTES
    assert sum(network.sizes) < 2 * MOST_BYTES + FIRST_BYTES
    assert network.exchanges <= 2 * len(network.sizes)


def test_ranks_share_the_links_of_their_host():
    hosts = Hosts(((0, 1), (2,), (3, 4, 5, 6)))
    pairs = [pair for pairs in tournament(3) for pair in pairs]
    rates = {frozenset((0, 1)): 1.0, frozenset((0, 2)): 3.0, frozenset((1, 2)): 5.0}
    links = [
        LinkProfile(hosts=("a", "b"), seconds_per_byte=rates[frozenset(pair)], latency_seconds=0.0)
        for pair in pairs
    ]
    assert rates_of_hosts(hosts, links) == [4.0, 4.0, 3.0, 16.0, 16.0, 16.0, 16.0]
    over_hosts = rates_of_hosts(hosts, links, shared=False)
    assert over_hosts == [2.0, 2.0, 3.0, 4.0, 4.0, 4.0, 4.0], "each byte leaves a host once"
    assert rates_of_hosts(Hosts(((0, 1, 2),)), ()) == [1.0] * 3


def test_messages_between_devices_are_waited_for_on_the_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """NCCL's wait with a timeout looks once a millisecond, which would be the measured latency."""
    work, sent = mock.Mock(), []

    def all_to_all_single(received, given, *splits, group, async_op):
        sent.append((given.numel(), splits))
        return work

    monkeypatch.setattr(dist, "all_to_all_single", all_to_all_single)
    group = mock.Mock(rank=0, size=3, reports=None, in_flight={})
    group.supports.return_value, group.is_on_host.return_value = True, False
    session = mock.Mock(group=group, device=torch.device("cpu"))
    assert Messages(session, [(0, 2)]).seconds(64) > 0.0
    assert sent == [(64, ([0, 0, 64], [0, 0, 64]))] * REPETITIONS
    assert work.wait.mock_calls == [mock.call()] * REPETITIONS
