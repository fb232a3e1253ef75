"""Timing of collectives, and the buffers that transports keep."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sessions import fake_session

from poplar.comm.host_buffers import HostBuffers
from poplar.planner.collective_costs import CollectiveCosts
from poplar.profiler.collectives import Collectives
from poplar.values.host_traffic import Traffic, link_traffic, network_traffic
from poplar.values.profile import NetworkProfile

CPU = torch.device("cpu")


def test_receive_buffers_are_cached_while_their_size_is_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool, size = HostBuffers(), (100, torch.float32, CPU)
    first = pool.take(*size)
    pool.put_back(first)
    assert pool.take(*size).data_ptr() == first.data_ptr()
    pool.put_back(first)
    pool.release_unused()
    assert pool.take(*size).data_ptr() == first.data_ptr(), "it was used since the last call"
    pool.put_back(first)
    pool.release_unused()
    for _ in range(3):  # as the beginning of a step does
        pool.trim()
    assert pool._idle
    pool.release_unused()
    assert not pool._idle
    pool.put_back(pool.take(*size))
    monkeypatch.setenv("POPLAR_MEMORY_CACHE", "off")
    pool.trim()
    assert not pool._idle


class Network:
    """Collectives that are bound by the links of ranks or, over hosts, by those of hosts."""

    def __init__(self, *rates: tuple[float, float], ranks: Sequence[int] = ()) -> None:
        """Args: seconds per byte of sending and of receiving, by link; ranks of each host."""
        self.rates, self.ranks = rates, ranks
        self.hosts = tuple(host for host, number in enumerate(ranks) for _ in range(number))

    def traffic(self, shares: Sequence[float]) -> list[Traffic]:
        if not self.hosts:
            return [one for (one,) in link_traffic([[s] for s in shares], hierarchical=False)]
        own = [
            [s for s, h in zip(shares, self.hosts, strict=True) if h == host]
            for host in range(len(self.ranks))
        ]
        return network_traffic(own, hierarchical=True)

    def element_seconds(self, issue: Any, shares: Sequence[float], dtype: torch.dtype) -> float:
        both = zip(self.rates, self.traffic(shares), strict=True)
        if issue is Collectives.reduce_scatter:
            return 4 * max(max(s * t.leaving, r * t.arriving) for (s, r), t in both)
        return dtype.itemsize * max(max(r * t.leaving, s * t.arriving) for (s, r), t in both)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "network",
    [
        Network(*[(1.0, 1.0)] * 4),
        Network((1.0, 1.0), (3.0, 1.0), (1.0, 2.0)),
        Network((1.0, 1.0), (1.0, 1.0), (4.0, 4.0), ranks=(8, 8, 2)),
        Network((1.0, 2.0), (3.0, 3.0), ranks=(2, 3)),
    ],
    ids=["equal links", "unequal links", "a slow host", "two hosts"],
)
def test_the_cost_model_returns_what_was_measured(
    monkeypatch: pytest.MonkeyPatch, network: Network, dtype: torch.dtype
) -> None:
    """And what these links take for other shares."""
    measured = []

    def seconds(self: Collectives, issue: Any, shares: Sequence[float], budget: float) -> float:
        found = network.element_seconds(issue, shares, dtype)
        measured.append((issue, tuple(shares), found))
        return found * sum(self.numels)

    monkeypatch.setattr(Collectives, "seconds", seconds)
    ranks = len(network.hosts or network.rates)
    owners = [(rank,) for rank in range(ranks)]
    if ranks > 8:
        firsts = [network.hosts.index(host) for host in range(len(network.ranks))]
        owners = [tuple(range(a, a + n)) for a, n in zip(firsts, network.ranks, strict=True)]
    comm: Any = SimpleNamespace(hosts=network.hosts)
    measuring = Collectives(fake_session(ranks, compute_dtype=dtype), comm, [1 << 20])
    rates = measuring.rates(owners, 0.5, 1.0)
    reducing, gathering = measuring.both_seconds((1 / ranks,) * ranks, 1.0)
    costs = CollectiveCosts.of(
        NetworkProfile(
            reduce_scatter_seconds=reducing,
            all_gather_seconds=gathering,
            receive_seconds_per_byte=tuple(receive for receive, _ in rates),
            send_seconds_per_byte=tuple(send for _, send in rates),
            hosts=network.hosts,
        )
    )
    others = [(0.55, *(0.45 / (ranks - 1),) * (ranks - 1)), (*(1 / (ranks - 1),) * (ranks - 1), 0)]
    for shares in others:
        measuring.both_seconds(shares, 1.0)
    for issue, shares, taken in measured:
        is_reduction = issue is Collectives.reduce_scatter
        cost = costs.reduce_scatter if is_reduction else costs.all_gather
        assert cost.seconds(shares) / (1 << 20) == pytest.approx(taken), (issue, shares)
