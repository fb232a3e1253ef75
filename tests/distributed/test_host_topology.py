"""Host topology and the relay assignments between hosts."""

from __future__ import annotations

import random

import pytest
from subset import choose

from poplar.comm.host_topology import Hosts
from poplar.comm.shard_layout import Layout


def test_hosts_are_ordered_by_their_first_rank():
    hosts = Hosts.of(["b", "a", "b", "c"])
    assert hosts.members == ((0, 2), (1,), (3,))
    assert [hosts.host_of(rank) for rank in range(4)] == [0, 1, 0, 2]
    assert hosts.by_rank == (0, 1, 0, 2)


@pytest.mark.parametrize("seed", range(choose(quick=15, full=50)))
def test_each_remote_element_is_relayed_once_and_evenly(seed):
    draw = random.Random(seed)
    size = draw.randint(1, 9)
    hosts = Hosts.of([draw.randint(0, 3) for _ in range(size)])
    numel = 64 * draw.randint(0, 100)
    cuts = sorted(64 * draw.randint(0, numel // 64) for _ in range(size - 1))
    layout = Layout((0, *cuts, numel))
    for host, ranks in enumerate(hosts.members):
        relay_assignments = hosts.relay_assignments(layout, host)
        assert len(relay_assignments) == len(ranks)
        relayed = sorted(
            (piece.owner, element)
            for pieces in relay_assignments
            for piece in pieces
            for element in range(piece.start, piece.stop)
        )
        remote = [
            (owner, element)
            for owner in range(size)
            if owner not in ranks
            for element in range(*layout.bounds(owner))
        ]
        assert relayed == remote
        loads = [sum(piece.numel for piece in pieces) for pieces in relay_assignments]
        assert max(loads) <= -(-len(remote) // (64 * len(ranks))) * 64
        assert all(
            piece.start % 64 == piece.stop % 64 == 0 for p in relay_assignments for piece in p
        )
