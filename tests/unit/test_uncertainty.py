"""A plan that rests on what nobody measured is found out, and one point, or a few, settles it.

Clusters here are known at every batch; what is measured of them are powers of two. *Regret* is how
much longer than the best plan of the known cluster a plan takes on it, as a part of that.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import pytest

from poplar.plan import Plan
from poplar.planner.prediction import DoesNotFit, predict
from poplar.planner.search import search
from poplar.planner.uncertainty import TOLERANCE, Question, asks_for, doubts, safest
from poplar.profile import BatchPoint, ClusterProfile, DeviceProfile, ModelProfile, NetworkProfile

NOISE = 0.004
"""Standard error of a median, as a part of it."""

Seconds = Callable[[int], float]


def tiled(tile: int, sample: float = 0.01, latency: float = 0.0) -> Seconds:
    return lambda batch: latency + sample * math.ceil(batch / tile) * tile


def straight(sample: float = 0.01, latency: float = 0.02) -> Seconds:
    return lambda batch: latency + sample * batch


def point(batch: int, seconds: float, spread: float = 0.0) -> BatchPoint:
    return BatchPoint(
        batch=batch, seconds=seconds, activation_bytes=batch << 20, spread_seconds=spread
    )


def device(name: str, points: Sequence[BatchPoint]) -> DeviceProfile:
    return DeviceProfile(
        name=name, memory_bytes=2**40, points=tuple(points), optimizer_seconds=0.01
    )


def cluster(devices: Sequence[DeviceProfile]) -> ClusterProfile:
    rates = (1e-9,) * len(devices)
    return ClusterProfile(
        devices=tuple(devices),
        model=ModelProfile(unit_numels=(1000,) * 4),
        network=NetworkProfile(
            reduce_scatter_seconds=0.01,
            all_gather_seconds=0.01,
            send_seconds_per_byte=rates,
            receive_seconds_per_byte=rates,
        ),
    )


class Ranks(NamedTuple):
    """Of which everything is known."""

    seconds: tuple[Seconds, ...]
    kinds: tuple[str, ...]
    largest: tuple[int, ...] = ()
    """Batches that were measured; empty: 64."""

    def known(self) -> ClusterProfile:
        return cluster(
            [
                device(kind, [point(b, own(b)) for b in range(1, self.most(rank) + 1)])
                for rank, (own, kind) in enumerate(zip(self.seconds, self.kinds, strict=True))
            ]
        )

    def measured(self, draw: random.Random | None = None) -> ClusterProfile:
        return cluster(
            [
                device(kind, [self.point(rank, batch, draw) for batch in self.rungs(rank)])
                for rank, kind in enumerate(self.kinds)
            ]
        )

    def most(self, rank: int) -> int:
        return self.largest[rank] if self.largest else 64

    def rungs(self, rank: int) -> list[int]:
        most = self.most(rank)
        return [*(1 << power for power in range((most - 1).bit_length())), most]

    def point(self, rank: int, batch: int, draw: random.Random | None = None) -> BatchPoint:
        seconds = self.seconds[rank](batch)
        if draw is None:
            return point(batch, seconds)
        return point(batch, seconds * draw.gauss(1.0, NOISE), NOISE * seconds)

    def answered(
        self,
        before: ClusterProfile,
        questions: Sequence[Question],
        draw: random.Random | None = None,
    ) -> ClusterProfile:
        devices = list(before.devices)
        for question in questions:
            for rank in question.ranks:
                points = {own.batch: own for own in devices[rank].points}
                points[question.batch] = self.point(rank, question.batch, draw)
                ordered = tuple(points[batch] for batch in sorted(points))
                devices[rank] = replace(devices[rank], points=ordered)
        return replace(before, devices=tuple(devices))

    def regret(self, plan: Plan) -> float:
        known = self.known()
        best = search(known, global_batch=plan.global_batch, stages=(plan.stage,))
        return predict(known, plan).step_seconds / predict(known, best).step_seconds - 1.0


def best_plan(profile: ClusterProfile, global_batch: int, stage: int = 0) -> Plan:
    return search(profile, global_batch=global_batch, stages=(stage,))


# One plan


TILES = Ranks((tiled(8), tiled(8)), ("a card", "a card"))


@pytest.mark.parametrize(
    ("tiles", "global_batch"), [((8, 16), 51), ((8, 16), 57), ((12, 16), 48), ((12, 16), 39)]
)
def test_a_plan_on_the_wrong_side_of_a_step_is_settled_by_one_question(tiles, global_batch):
    """17 samples look cheaper than 32 on a device that takes as long for both."""
    ranks = Ranks((tiled(tiles[0]), tiled(tiles[1], 0.02)), ("a card", "a slower one"))
    measured = ranks.measured()
    plan = best_plan(measured, global_batch)
    assert ranks.regret(plan) > 0.1
    again = ranks.answered(measured, [asks_for(measured, plan)])
    assert ranks.regret(best_plan(again, global_batch)) < 0.01


def test_ranks_with_devices_that_are_alike_are_asked_together():
    plan = best_plan(TILES.measured(), 42)
    question = asks_for(TILES.measured(), plan)
    assert question.ranks == (0, 1)
    assert question.batch == 21
    assert question.planned
    assert question.seconds == pytest.approx((0.21, 0.24))


def test_a_question_says_in_words_what_is_at_stake():
    question = Question(
        ranks=(0, 1),
        device="a card",
        batch=21,
        seconds=(0.21, 0.24),
        stake=0.105,
        planned=True,
    )
    assert str(question) == (
        "21 samples on ranks 0-1 (a card) take between 0.21 and 0.24 s by the points around them; "
        "the plan has it, and another may be 10.5 % faster"
    )
    assert "a plan that has it may be 10.5 % faster" in str(replace(question, planned=False))


def test_a_plan_on_measured_batches_of_a_known_cluster_is_settled():
    known = TILES.known()
    assert asks_for(known, best_plan(known, 42)) is None
    assert safest(known, best_plan(known, 42)) == best_plan(known, 42)


def test_a_line_is_believed():
    """However far apart its points are, if there are a few."""
    ranks = Ranks((straight(), straight(0.02)), ("a card", "a slower one"))
    for global_batch in (20, 50, 75, 100):
        plan = best_plan(ranks.measured(), global_batch)
        assert asks_for(ranks.measured(), plan) is None
        assert safest(ranks.measured(), plan) == plan


def test_what_is_not_worth_the_tolerance_is_not_asked():
    measured = TILES.measured()
    plan = best_plan(measured, 42)
    stake = asks_for(measured, plan).stake
    assert stake > TOLERANCE
    assert asks_for(measured, plan, tolerance=1.01 * stake) is None


def test_only_what_is_not_measured_is_asked_and_of_each_kind_once():
    ranks = Ranks((tiled(8), tiled(12), tiled(8)), ("a card", "another", "a card"))
    measured = ranks.measured()
    found = doubts(measured, best_plan(measured, 100))
    assert sorted(rank for question in found for rank in question.ranks) == [0, 1, 2]
    assert [question.stake for question in found] == sorted(
        (question.stake for question in found), reverse=True
    )
    for question in found:
        assert question.batch & (question.batch - 1)  # no power of two


def test_many_noisy_ranks_are_a_few_kinds_and_their_safest_plan_fits():
    makes, names = (tiled(8), tiled(16, 0.02)), ("a card", "a slower one")
    ranks = Ranks(tuple(makes[r % 2] for r in range(40)), tuple(names[r % 2] for r in range(40)))
    measured = ranks.measured(random.Random(0))
    plan = best_plan(measured, 20 * 51)
    question = asks_for(measured, plan)
    assert question.ranks in (tuple(range(0, 40, 2)), tuple(range(1, 40, 2)))
    assert ranks.regret(safest(measured, plan)) < ranks.regret(plan)


def test_the_same_question_for_the_same_arguments():
    measured = Ranks((tiled(8), tiled(12)), ("a card", "another")).measured(random.Random(1))
    plan = best_plan(measured, 70, 2)
    first = doubts(measured, plan, stages=(0, 2))
    again = ClusterProfile.from_dict(measured.to_dict())
    assert doubts(again, best_plan(again, 70, 2), stages=(0, 2)) == first


def test_the_safest_plan_keeps_to_what_can_be_no_worse_than_thought():
    ranks = Ranks((tiled(8), tiled(12)), ("a card", "another"))
    plan = best_plan(ranks.measured(), 42)
    assert ranks.regret(plan) > 0.2
    assert ranks.regret(safest(ranks.measured(), plan)) < 0.01


def test_a_cluster_of_one_point_each_has_a_plan_and_perhaps_a_question():
    single = cluster([device("a card", [point(8, 0.1)]) for _ in range(2)])
    plan = best_plan(single, 10)
    question = asks_for(single, plan)
    assert question is None or question.batch < 8


@pytest.mark.parametrize("tolerance", [-0.1, math.nan, math.inf])
def test_a_tolerance_that_cannot_be_is_refused(tolerance):
    with pytest.raises(ValueError, match="tolerance must be finite and 0 or more, got"):
        asks_for(TILES.measured(), best_plan(TILES.measured(), 42), tolerance=tolerance)


def test_a_plan_that_the_cluster_cannot_run_is_refused():
    with pytest.raises(DoesNotFit, match="the largest that was measured is 64"):
        asks_for(TILES.measured(), Plan.manual("65,1", stage=0))
    with pytest.raises(ValueError, match="a plan for 3 ranks"):
        asks_for(TILES.measured(), Plan.manual("2,1,1", stage=0))


# Many clusters


CLUSTERS = 20


class Story(NamedTuple):
    """What became of one cluster, before any question and after each turn of them."""

    regrets: tuple[float, ...]
    """Of the better of the plan that was searched and the safest one: trials tell which it is."""
    searched: tuple[float, ...]
    turns: int


def told(make: Callable[[random.Random], Seconds], seed: int, turns: int = 3) -> Story:
    """Two kinds of devices, two to four ranks."""
    draw = random.Random(seed)
    kinds = [make(draw), make(draw)]
    size = draw.randint(2, 4)
    most = [draw.choice((32, 40, 64)) for _ in kinds]
    ranks = Ranks(
        tuple(kinds[rank % 2] for rank in range(size)),
        tuple(f"kind {rank % 2}" for rank in range(size)),
        tuple(most[rank % 2] for rank in range(size)),
    )
    global_batch, stage = draw.randint(20, 150), draw.choice((0, 3))
    measured = ranks.measured(draw)
    regrets, searched, asked = [], [], 0
    for turn in range(turns + 1):
        plan = best_plan(measured, global_batch, stage)
        searched.append(ranks.regret(plan))
        regrets.append(min(searched[-1], ranks.regret(safest(measured, plan))))
        if turn < turns and asks_for(measured, plan) is not None:
            measured = ranks.answered(measured, doubts(measured, plan), draw)
            asked += 1
    return Story(tuple(regrets), tuple(searched), asked)


def any_tiles(draw: random.Random) -> Seconds:
    sample = draw.choice((0.01, 0.015, 0.02, 0.03, 0.04))
    return tiled(draw.choice((4, 6, 8, 12, 16)), sample, draw.choice((0, 1, 4)) * sample)


def any_line(draw: random.Random) -> Seconds:
    sample = draw.choice((0.01, 0.015, 0.02, 0.03, 0.04))
    return straight(sample, draw.choice((0, 4, 16)) * sample)


def test_three_turns_take_most_of_what_steps_cost():
    stories = [told(any_tiles, seed) for seed in range(CLUSTERS)]
    before = sum(story.searched[0] for story in stories) / CLUSTERS
    after = [sum(regrets) / CLUSTERS for regrets in zip(*(s.regrets for s in stories), strict=True)]
    assert before > 0.05
    assert after[0] < 0.6 * before  # the safest plan alone
    assert after[1] < 0.4 * before
    assert after[3] < 0.2 * before


def test_lines_with_noise_are_asked_little_and_lose_nothing():
    stories = [told(any_line, seed) for seed in range(CLUSTERS)]
    assert sum(story.turns for story in stories) / CLUSTERS < 1.0
    assert max(story.regrets[0] for story in stories) < 0.01
    assert max(story.regrets[-1] for story in stories) < 0.01
