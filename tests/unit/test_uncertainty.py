"""Measuring the planned batches that a profile lacks leads to the best plan.

Pass times of the clusters are known for every batch; their profiles have powers of two. *Regret* is
how much longer a plan takes than the best plan of the known cluster, as a fraction.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import clusters
import pytest
from all_ranks import search
from clusters import cluster_of

from poplar.planner.prediction import predict, unmeasured_batches
from poplar.planner.what_if import at_worst
from poplar.profiler.batch_curves import with_measured
from poplar.tuning.autotune import ROUNDS
from poplar.values.plan import Plan
from poplar.values.profile import BatchPoint, ClusterProfile, DeviceProfile

NOISE = 0.004
"""Relative standard error of a median."""

Seconds = Callable[[int], float]


def tiled(tile: int, sample: float = 0.01, latency: float = 0.0) -> Seconds:
    return lambda batch: latency + sample * math.ceil(batch / tile) * tile


def straight(sample: float = 0.01, latency: float = 0.02) -> Seconds:
    return lambda batch: latency + sample * batch


def point(batch: int, seconds: float, spread: float = 0.0) -> BatchPoint:
    return BatchPoint(
        batch=batch, seconds=seconds, activation_bytes=batch << 20, spread_seconds=spread
    )


def device_of(name: str, points: Sequence[BatchPoint]) -> DeviceProfile:
    return clusters.device(name=name, memory=2**40, points=tuple(points))


cluster = partial(cluster_of, units=(1000,) * 4)


class Ranks(NamedTuple):
    """Ranks whose pass times are known for every batch."""

    seconds: tuple[Seconds, ...]
    names: tuple[str, ...]
    largest: tuple[int, ...] = ()
    """By rank, the largest measured batch; empty: 64."""

    def known(self) -> ClusterProfile:
        return cluster(
            *(
                device_of(name, [point(b, own(b)) for b in range(1, self.most(rank) + 1)])
                for rank, (own, name) in enumerate(zip(self.seconds, self.names, strict=True))
            )
        )

    def measured(self, draw: random.Random | None = None) -> ClusterProfile:
        """What a profile has: powers of two and the largest batch."""
        return cluster(
            *(
                device_of(name, [self.point(rank, batch, draw) for batch in self.sizes(rank)])
                for rank, name in enumerate(self.names)
            )
        )

    def most(self, rank: int) -> int:
        return self.largest[rank] if self.largest else 64

    def sizes(self, rank: int) -> list[int]:
        most = self.most(rank)
        return [*(1 << power for power in range((most - 1).bit_length())), most]

    def point(self, rank: int, batch: int, draw: random.Random | None = None) -> BatchPoint:
        seconds = self.seconds[rank](batch)
        if draw is None:
            return point(batch, seconds)
        return point(batch, seconds * draw.gauss(1.0, NOISE), NOISE * seconds)

    def with_planned_batches(
        self, before: ClusterProfile, plan: Plan, draw: random.Random | None = None
    ) -> ClusterProfile:
        """One round of the rule: measure what the plan uses and the profile lacks."""
        points = [
            [self.point(rank, batch, draw) for batch in batches]
            for rank, batches in enumerate(unmeasured_batches(before, plan))
        ]
        return with_measured(before, points)

    def regret(self, plan: Plan) -> float:
        known = self.known()
        best = search(known, global_batch=plan.global_batch, stages=(plan.stage,))
        return predict(known, plan).step_seconds / predict(known, best).step_seconds - 1.0


def best_plan(profile: ClusterProfile, global_batch: int, stage: int = 0) -> Plan:
    return search(profile, global_batch=global_batch, stages=(stage,))


TILES = Ranks((tiled(8), tiled(8)), ("a card", "a card"))


def test_unmeasured_batches_are_those_of_the_plan_without_a_point():
    plan = Plan(stage=0, global_batch=42, micro_batches=((21, 16), (5, 0)), shares=(0.5, 0.5))
    assert unmeasured_batches(TILES.measured(), plan) == ((21,), (5,))
    assert unmeasured_batches(TILES.known(), plan) == ((), ())


@pytest.mark.parametrize(
    ("tiles", "global_batch"), [((8, 16), 51), ((8, 16), 57), ((12, 16), 48), ((12, 16), 39)]
)
def test_measuring_planned_batches_finds_the_best_plan(tiles, global_batch):
    """17 samples look cheaper than 32 on a device that takes as long for both."""
    ranks = Ranks((tiled(tiles[0]), tiled(tiles[1], 0.02)), ("a card", "a slower one"))
    measured = ranks.measured()
    plan = best_plan(measured, global_batch)
    assert ranks.regret(plan) > 0.1
    for _ in range(ROUNDS):
        measured = ranks.with_planned_batches(measured, best_plan(measured, global_batch))
    assert ranks.regret(best_plan(measured, global_batch)) < 0.01


def test_worst_case_is_an_upper_bound_that_is_exact_at_measured_batches():
    measured = Ranks((tiled(8), tiled(12)), ("a card", "another")).measured()
    worst = at_worst(measured)
    for device, bound in zip(measured.devices, worst.devices, strict=True):
        known = [point.batch for point in device.points]
        for batch in range(1, 65):
            following = min(size for size in known if size >= batch)
            assert bound.seconds(batch) == pytest.approx(device.seconds(following))
            assert bound.activation_bytes(batch) == pytest.approx(device.activation_bytes(batch))
            assert device.seconds(batch) <= bound.seconds(batch) * (1 + 1e-9)


def test_best_plan_of_the_worst_case_takes_no_longer_than_predicted():
    ranks = Ranks((tiled(8), tiled(12)), ("a card", "another"))
    for global_batch in (30, 42, 57, 90):
        safe = best_plan(at_worst(ranks.measured()), global_batch)
        promised = safe.prediction["step_seconds"]
        assert predict(ranks.known(), safe).step_seconds <= promised * (1 + 1e-9)


def test_cluster_with_one_point_per_rank_has_a_worst_case():
    single = cluster(*[device_of("a card", [point(8, 0.1)])] * 2)
    worst = at_worst(single)
    assert [worst.devices[0].seconds(batch) for batch in (1, 4, 8)] == [0.1, 0.1, 0.1]
    assert best_plan(worst, 10).global_batch == 10


# Many clusters


CLUSTERS = 20


def regrets(make: Callable[[random.Random], Seconds], seed: int) -> list[float]:
    """Regret before and after each round, of the better candidate: trial runs tell which it is."""
    draw = random.Random(seed)
    makes = [make(draw), make(draw)]
    size = draw.randint(2, 4)
    most = [draw.choice((32, 40, 64)) for _ in makes]
    ranks = Ranks(
        tuple(makes[rank % 2] for rank in range(size)),
        tuple(f"device {rank % 2}" for rank in range(size)),
        tuple(most[rank % 2] for rank in range(size)),
    )
    global_batch, stage = draw.randint(20, 150), draw.choice((0, 3))
    measured = ranks.measured(draw)
    found = [ranks.regret(best_plan(measured, global_batch, stage))]
    for turn in range(ROUNDS + 1):
        plan = best_plan(measured, global_batch, stage)
        candidates = [plan]
        if any(unmeasured_batches(measured, plan)):
            candidates.append(best_plan(at_worst(measured), global_batch, stage))
        found.append(min(map(ranks.regret, candidates)))
        if turn < ROUNDS:
            measured = ranks.with_planned_batches(measured, plan, draw)
    return found


def any_tiles(draw: random.Random) -> Seconds:
    sample = draw.choice((0.01, 0.015, 0.02, 0.03, 0.04))
    return tiled(draw.choice((4, 6, 8, 12, 16)), sample, draw.choice((0, 1, 4)) * sample)


def any_line(draw: random.Random) -> Seconds:
    sample = draw.choice((0.01, 0.015, 0.02, 0.03, 0.04))
    return straight(sample, draw.choice((0, 4, 16)) * sample)


def test_rounds_remove_most_of_the_regret_of_stepped_curves():
    before, without_rounds, *_, after = (
        sum(each) / CLUSTERS
        for each in zip(*(regrets(any_tiles, seed) for seed in range(CLUSTERS)), strict=True)
    )
    assert before > 0.05
    assert without_rounds < 0.4 * before
    assert after < 0.15 * before


def test_noisy_lines_have_little_regret():
    found = [regrets(any_line, seed) for seed in range(CLUSTERS)]
    assert max(own[0] for own in found) < 0.02
    assert max(own[-1] for own in found) < 0.02
