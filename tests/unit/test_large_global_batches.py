"""Planning takes no longer where a step has many equal passes."""

from __future__ import annotations

import pytest
from all_ranks import search
from clusters import cluster_of, device

from poplar.planner.explain import NEEDED, explain
from poplar.planner.search import POLICIES


def large(batch, stages=(0, 1, 2, 3), policy="exact"):
    devices = [
        device(speed, largest=128, memory=10**11, peak_flops=1e12 * speed) for speed in (1.0, 2.0)
    ]
    return search(cluster_of(*devices), global_batch=batch, stages=stages, policy=policy)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_global_batch_of_hundreds_of_thousands_is_planned(policy):
    plan = large(300_000, policy=policy)
    assert sum(map(sum, plan.micro_batches)) == 300_000


@pytest.mark.parametrize("policy", POLICIES)
def test_a_global_batch_with_too_many_passes_to_list_is_refused(policy):
    with pytest.raises(ValueError, match="needs at least 3906250 passes on a rank"):
        large(10**9, policy=policy)


def test_a_plan_that_needs_too_many_passes_without_a_rank_is_explained():
    cluster = cluster_of(device(name="A", largest=1), device(name="B", largest=2))
    plan = search(cluster, global_batch=12_000, stages=(0,))
    found = explain(cluster, plan, stages=(0,))
    needed = {one.ranks: one.verdict == NEEDED for one in found.contributions}
    assert needed == {(0,): False, (1,): True}
