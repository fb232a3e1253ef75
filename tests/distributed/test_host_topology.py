"""Who carries what across hosts, as values."""

from __future__ import annotations

import random

import pytest

from poplar.comm import host_topology as hosts_module
from poplar.comm.host_topology import Hosts
from poplar.comm.shard_layout import Layout


def test_hosts_are_in_the_order_of_their_first_ranks():
    hosts = Hosts.of(["b", "a", "b", "c"])
    assert hosts.members == ((0, 2), (1,), (3,))
    assert [hosts.host_of(rank) for rank in range(4)] == [0, 1, 0, 2]


@pytest.mark.parametrize("seed", range(50))
def test_a_host_carries_what_is_not_its_own_once_and_evenly(seed, monkeypatch):
    draw = random.Random(seed)
    size = draw.randint(1, 9)
    hosts = Hosts.of([draw.randint(0, 3) for _ in range(size)])
    numel = 64 * draw.randint(0, 100)
    monkeypatch.setattr(hosts_module, "MOST", draw.choice((64, 640, 1 << 20)))
    cuts = sorted(64 * draw.randint(0, numel // 64) for _ in range(size - 1))
    layout = Layout((0, *cuts, numel))
    for host, ranks in enumerate(hosts.members):
        duties = hosts.duties(layout, host)
        assert len(duties) == len(ranks)
        carried = sorted(
            (piece.owner, place)
            for pieces in duties
            for piece in pieces
            for place in range(piece.start, piece.stop)
        )
        foreign = [
            (owner, place)
            for owner in range(size)
            if owner not in ranks
            for place in range(*layout.bounds(owner))
        ]
        assert carried == foreign
        loads = [sum(piece.numel for piece in pieces) for pieces in duties]
        assert max(loads) <= -(-len(foreign) // (64 * len(ranks))) * 64
        assert all(piece.start % 64 == piece.stop % 64 == 0 for p in duties for piece in p)
