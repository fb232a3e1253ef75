"""`search` where memory binds: a step with one pass needs less of it than one with several."""

from __future__ import annotations

import dataclasses
import math
import random

import planning_oracle
import pytest
from all_ranks import search
from planning_oracle import STAGES, Oracle
from subset import choose
from test_search import LARGEST_GLOBAL_BATCH, some_shares

from poplar.planner.memory_model import Caps, rank_memory
from poplar.planner.prediction import fits
from poplar.planner.search import NoPlanFits
from poplar.values.plan import Plan
from poplar.values.profile import ClusterProfile

CLUSTERS = choose(quick=40, full=300)


def test_search_equals_exhaustive_search_in_tight_memory():
    """The regret is at most the reported gap, and no plan fits where the search says so."""
    found = {"none": 0, "one pass": 0, "several passes": 0}
    for seed in range(CLUSTERS):
        draw = random.Random(seed)
        stage, ranks = draw.choice(STAGES), draw.choice((1, 2, 2, 2, 3, 3))
        global_batch = draw.randint(1, LARGEST_GLOBAL_BATCH[ranks])
        cluster = planning_oracle.random_cluster(draw, ranks, stage, tight=True)
        oracle = Oracle(cluster, stage)
        shares = some_shares(oracle, global_batch, draw)
        try:
            plan = search(cluster, global_batch=global_batch, stages=(stage,), preference=0.0)
        except NoPlanFits:
            assert oracle.best(global_batch, shares) == math.inf, f"seed {seed}: a plan fits"
            found["none"] += 1
            continue
        found["one pass" if max(map(len, plan.micro_batches)) == 1 else "several passes"] += 1
        assert fits(cluster, plan), seed
        seconds, gap = (plan.prediction[key] for key in ("step_seconds", "optimality_gap"))
        least = oracle.best(global_batch, [*shares, plan.shares])
        assert seconds * (1.0 - gap) <= least * (1.0 + 1e-9), f"seed {seed}, stage {stage}"
    assert min(found.values()) > 0


class OverHosts(Oracle):
    """Two hosts of two equal ranks. Bytes are those of the product: the oracle has no relays."""

    def needed(self, rank: int, samples: int, share: float, *, later: bool = True) -> float:
        caps = Caps(samples, samples if later else -1)
        return rank_memory(self.cluster, self.stage, rank).needed(caps, share)


def equal_ranks_on_two_hosts(draw: random.Random, stage: int) -> ClusterProfile:
    """A rank that runs a sample owns little of the state."""
    cluster = planning_oracle.random_cluster(draw, 4, stage, tight=True)
    link, between = draw.choice((0.0, 0.3)), 1.0
    network = dataclasses.replace(
        cluster.network,
        reduce_scatter_seconds=draw.choice((0.1, 1.0)),
        all_gather_seconds=draw.choice((0.1, 1.0)),
        send_seconds_per_byte=(link + between,) * 4,
        receive_seconds_per_byte=(link + between,) * 4,
        hosts=draw.choice(((0, 0, 1, 1), (0, 1, 1, 0))),
        network_seconds_per_byte=(between,) * 4,
    )
    point = dataclasses.replace(
        cluster.devices[0].points[0],
        batch=1,
        activation_bytes=10**12,
        unit_bytes=(),
        bytes_after_unit=(),
    )
    device = dataclasses.replace(cluster.devices[0], points=(point,), memory_bytes=10**15)
    ample = dataclasses.replace(cluster, devices=(device,) * 4, network=network, memory_reserve=0.0)
    oracle = OverHosts(ample, stage)
    room = oracle.needed(0, 0, draw.choice((0.5, 0.625, 0.75)))
    more = oracle.needed(0, 1, 0.125) - room
    point = dataclasses.replace(point, activation_bytes=max(0, int(10**12 - more) - 8))
    device = dataclasses.replace(device, points=(point,), memory_bytes=math.ceil(room))
    return dataclasses.replace(ample, devices=(device,) * 4)


def test_search_equals_exhaustive_search_over_hosts():
    """Equal ranks of different hosts must not be exchanged: what their hosts own matters."""
    found = 0
    for seed in range(choose(quick=12, full=100)):
        draw = random.Random(seed)
        stage = draw.choice((1, 2, 3))
        cluster = equal_ranks_on_two_hosts(draw, stage)
        oracle = OverHosts(cluster, stage)
        try:
            plan = search(cluster, global_batch=2, stages=(stage,), preference=0.0)
        except NoPlanFits:
            continue
        found += 1
        shares = [*planning_oracle.share_grid(4, 8), plan.shares]
        seconds, gap = (plan.prediction[key] for key in ("step_seconds", "optimality_gap"))
        batches = plan.micro_batches
        assert abs(oracle.seconds(batches, plan.shares) - seconds) <= 1e-9 * seconds, seed
        least = oracle.best(2, shares)
        assert seconds * (1.0 - gap) <= least * (1.0 + 1e-9), f"seed {seed}, stage {stage}"
    assert found > 0


def test_replicated_state_over_hosts_needs_the_memory_of_even_shares():
    """At stage 0 all shares are even: a rank receives its part of the sums of other hosts."""
    draw = random.Random(0)
    cluster = planning_oracle.random_cluster(draw, 3, 0)
    network = dataclasses.replace(
        cluster.network,
        hosts=(0, 1, 2),
        receive_buffers="freed",
        network_seconds_per_byte=(1.0,) * 3,
        send_seconds_per_byte=(1.0,) * 3,
        receive_seconds_per_byte=(1.0,) * 3,
    )
    cluster = dataclasses.replace(cluster, network=network, memory_reserve=0.0).with_devices(
        lambda device: dataclasses.replace(device, memory_bytes=10**15)
    )
    least = [rank_memory(cluster, 0, 0).needed(Caps(0), share) for share in (0.0, 1 / 3)]
    assert least[1] > least[0] + 100

    def plan_with(memory_bytes: float) -> Plan:
        first, *others = cluster.devices
        first = dataclasses.replace(first, memory_bytes=math.ceil(memory_bytes))
        limited = dataclasses.replace(cluster, devices=(first, *others))
        return search(limited, global_batch=4, stages=(0,))

    assert plan_with(least[1]).micro_batches[0] in ((), (0,))
    with pytest.raises(NoPlanFits, match=r"rank 0 .* needs at least"):
        plan_with(sum(least) / 2)
