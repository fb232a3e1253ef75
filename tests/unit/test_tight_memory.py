"""`search` where memory binds: a step with one pass needs less of it than one with several."""

from __future__ import annotations

import math
import random

import planning_oracle
from all_ranks import search
from planning_oracle import STAGES, Oracle
from subset import choose

from poplar.planner.prediction import fits
from poplar.planner.search import NoPlanFits

CLUSTERS = choose(quick=40, full=300)
LARGEST_GLOBAL_BATCH = {1: 8, 2: 6, 3: 4}
SHARE_STEPS = {1: 1, 2: 12, 3: 5}


def reachable_shares(oracle: Oracle, global_batch: int, draw: random.Random):
    """A grid of shares, and shares at which a rank is full with some pass of a step."""
    if oracle.stage == 0:
        return [(1 / oracle.n,) * oracle.n]
    shares = planning_oracle.share_grid(oracle.n, SHARE_STEPS[oracle.n])
    critical = planning_oracle.critical_shares(oracle, global_batch)
    return shares + draw.sample(critical, min(25, len(critical)))


def test_search_equals_exhaustive_search_in_tight_memory():
    """The regret is at most the reported gap, and no plan fits where the search says so."""
    found = {"none": 0, "one pass": 0, "several passes": 0}
    for seed in range(CLUSTERS):
        draw = random.Random(seed)
        stage, ranks = draw.choice(STAGES), draw.choice((1, 2, 2, 2, 3, 3))
        global_batch = draw.randint(1, LARGEST_GLOBAL_BATCH[ranks])
        cluster = planning_oracle.random_cluster(draw, ranks, stage, tight=True)
        oracle = Oracle(cluster, stage)
        shares = reachable_shares(oracle, global_batch, draw)
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
