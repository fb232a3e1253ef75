"""Splits of a global batch over ranks that synchronize once end, whatever rounding does to sums."""

from __future__ import annotations

import math
import random
from itertools import islice

from clusters import cluster_of, device

from poplar.planner.batch_allocation import BatchAllocator, kth_smallest
from poplar.planner.communication_schedule import CommunicationSeconds
from poplar.planner.cost_model import StageCosts
from poplar.planner.memory_model import Caps

MOST_SPLITS = 200


def test_values_that_descend_by_rounding_are_counted():
    values = [1.0, math.nextafter(1.0, 0.0), math.nextafter(1.0, 0.0)]
    assert kth_smallest([lambda number: values[number - 1]], [3], [1], 1) <= 1.0


def test_every_split_of_a_batch_has_earlier_gradients_than_the_one_before():
    for seed in range(30):
        draw = random.Random(seed)
        devices = [
            device(draw.choice((0.7, 1.1, 1.3)), latency=0.0, largest=8)
            for _ in range(draw.randint(1, 3))
        ]
        costs = StageCosts(cluster_of(*devices, overlap=0.6, communication=0.3), 1)
        caps = tuple(Caps(draw.randint(1, 8), draw.randint(1, 8)) for _ in devices)
        solver = BatchAllocator(costs, draw.randint(20, 60)).under(caps)
        splits = solver.splits(CommunicationSeconds(0.0, 0.3), limit=lambda: math.inf)
        starts = [one.synchronization.reducible for one in islice(splits, MOST_SPLITS)]
        assert 0 < len(starts) < MOST_SPLITS, seed
        assert all(map(float.__gt__, starts, starts[1:])), seed
