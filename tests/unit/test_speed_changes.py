"""Speeds that change on simulated ranks: what is noticed, when, and what is planned then."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import median
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from records import cluster

from poplar.drift import idle_speed, speed_follower
from poplar.drift.replanning import WARM_UP, Replan, Replanner
from poplar.drift.speed_follower import STEPS_PER_LOOK, SpeedFollower
from poplar.drift.speed_levels import Row, SpeedLevels
from poplar.planner.cost_model import costs_of
from poplar.planner.prediction import predict
from poplar.planner.search import search
from poplar.planner.what_if import with_slower_devices
from poplar.values.plan import Plan
from poplar.zero.streams import RankTimes

JITTER = 0.1
SPIKES = 0.02
LENGTHS = 4.0
SPEEDS = (100.0, 100.0, 50.0, 50.0)
PROFILE = cluster(SPEEDS, ("one", "two", "three", "four"))

Changes = Sequence[tuple[int, int, float]]
"""Step, rank, and how many times slower than its profile it is from then on."""


def steps(noise: random.Random, changes: Changes, number: int) -> Iterator[list[float]]:
    """By step and rank, measured seconds over expected ones, without the effect of lengths."""
    slower = [1.0] * len(SPEEDS)
    for step in range(number):
        for at, rank, factor in changes:
            if at == step:
                slower[rank] = factor
        yield [
            factor * math.exp(noise.gauss(0.0, JITTER)) * (5.0 if noise.random() < SPIKES else 1.0)
            for factor in slower
        ]


def row(noise: random.Random, ratio: float, expected: float) -> Row:
    """Samples of random length, whose seconds grow a little faster than their length."""
    length = LENGTHS ** noise.uniform(-0.5, 0.5)
    return Row(ratio * expected * length**1.1, expected, 512.0 * length)


def replans(seed: int, changes: Changes, number: int, stage: int) -> list[tuple[int, Replan]]:
    """The plans that are found in so many steps, each of which is applied after the next step."""
    noise = random.Random(seed)
    plan = search(PROFILE, global_batch=96, stages=(stage,))
    replanner = Replanner(PROFILE, leave_out="auto")
    found: list[tuple[int, Replan]] = []
    unread: list[list[Row]] = []
    new: Replan | None = None
    for step, ratios in enumerate(steps(noise, changes, number)):
        costs = costs_of(PROFILE, plan)
        rows = []
        for rank, ratio in enumerate(ratios):
            expected = sum(costs.pass_seconds(rank, size) for size in plan.micro_batches[rank])
            rows.append(row(noise, ratio, expected))
        if new is not None:
            plan = new.plan
            new = None
        unread.append(rows)
        if len(unread) == STEPS_PER_LOOK:
            new = replanner.add(unread, plan, steps_left=1000)
            unread = []
        if new is not None:
            found.append((step, new))
    return found


def found_within(events: int, factor: float, after: int) -> int:
    """In how many events the level of a slower rank is nearer to the new than to the old one."""
    found = 0
    for event in range(events):
        noise = random.Random(f"{factor} {event}")
        start, rank = noise.randrange(40, 80), noise.randrange(len(SPEEDS))
        levels = SpeedLevels([0.0] * len(SPEEDS))
        noticed = False
        for step, ratios in enumerate(steps(noise, [(start, rank, factor)], start + after)):
            rows = [row(noise, ratio, 0.2) for ratio in ratios]
            if step < WARM_UP:
                levels.add_lengths(rows)
                continue
            levels.add(rows)
            if step % STEPS_PER_LOOK == 0:
                levels.look_for_changes()
            others = median(level for at, level in enumerate(levels.levels) if at != rank)
            above = levels.levels[rank] - others
            noticed |= step >= start and above > math.log(factor) / 2
        found += noticed
    return found


def test_slower_ranks_are_noticed_within_20_steps():
    found = {factor: found_within(50, factor, after=20) for factor in (2.0, 1.3, 1.15)}
    assert found[2.0] == found[1.3] == 50, found
    assert sum(found.values()) >= 0.99 * 3 * 50, found


def test_a_plan_follows_a_slightly_slower_rank_within_40_steps():
    followed = 0
    for event in range(80):
        start, rank = 40 + event % 40, event % 4
        found = replans(event, [(start, rank, 1.15)], start + 40, stage=event % 3)
        followed += bool(found) and found[0][0] >= start and rank in found[0][1].slowdowns
    assert followed >= 0.98 * 80


@pytest.mark.parametrize("stage", [0, 3])
def test_jitter_spikes_and_lengths_are_no_reason_for_a_new_plan(stage):
    assert replans(stage, [], 1000, stage) == []


@pytest.mark.parametrize("stage", range(4))
def test_the_plan_follows_a_slower_rank_and_its_recovery(stage):
    slowed, recovered = replans(stage, [(60, 2, 2.0), (120, 2, 1.0)], 180, stage)
    assert 60 < slowed[0] <= 80
    assert 120 < recovered[0] <= 140
    assert list(slowed[1].slowdowns) == [2] == list(recovered[1].slowdowns)
    assert slowed[1].slowdowns[2] == pytest.approx(2.0, rel=0.15)
    assert recovered[1].slowdowns[2] == pytest.approx(0.5, rel=0.15)
    now = with_slower_devices(PROFILE, (1.0, 1.0, 2.0, 1.0))
    best = predict(now, search(now, global_batch=96, stages=(stage,))).step_seconds
    assert predict(now, slowed[1].plan).step_seconds < 1.1 * best
    assert slowed[1].gain > 0.3


def named(speeds: Sequence[float], slower: Sequence[int], spread: Sequence[float]) -> list[Replan]:
    """The plans that are found if ranks become 2x slower in step 60, and recover in step 120.

    Args:
        spread: by rank, the standard deviation of the logarithms of its seconds.
    """
    noise, names = random.Random(0), ("one", "two", "three", "four")
    replanner = Replanner(cluster(speeds, names[: len(speeds)]))
    plan, found, rows = Plan.proportional(speeds, 96, 1, 20), [], []
    for step in range(180):
        seconds = [math.exp(noise.gauss(0.0, each)) for each in spread]
        for rank in slower:
            seconds[rank] *= 2.0 if 60 <= step < 120 else 1.0
        rows.append([Row(each, 1.0, 512.0) for each in seconds])
        if len(rows) == STEPS_PER_LOOK:
            if (new := replanner.add(rows, plan, steps_left=1000)) is not None:
                plan = new.plan
                found.append(new)
            rows = []
    return found


@pytest.mark.parametrize("noisy", [0, 1])
@pytest.mark.parametrize("slower", [0, 1])
def test_the_rank_of_a_pair_that_has_changed_is_named(slower, noisy):
    """Whichever of the two levels is known better."""
    spread = [0.2 if rank == noisy else 0.02 for rank in (0, 1)]
    slowed, recovered = named(SPEEDS[1:3], [slower], spread)
    assert list(slowed.slowdowns) == [slower] == list(recovered.slowdowns)
    assert slowed.slowdowns[slower] == pytest.approx(2.0, rel=0.15)
    assert recovered.slowdowns[slower] == pytest.approx(0.5, rel=0.15)


def test_all_ranks_of_the_half_that_has_changed_are_named():
    slowed, recovered = named(SPEEDS, [2, 3], (0.2, 0.2, 0.02, 0.02))
    assert list(slowed.slowdowns) == [2, 3] == list(recovered.slowdowns)


def test_a_slowdown_that_all_ranks_share_changes_no_plan():
    assert replans(1, [(60, rank, 1.5) for rank in range(4)], 160, stage=1) == []


@pytest.mark.parametrize("measured", [True, False])
def test_a_rank_whose_level_is_not_known_changes_as_the_others_do(measured):
    """Rank 1 is slower; rank 2 has just had a few slow steps, or has no samples at all."""
    noise, rows = random.Random(0), []
    for step in range(80):
        factors = [1.3, 1.3, 1.3, 1.3] if step >= WARM_UP else [1.0] * 4
        factors[1] *= 1.5 if step >= 60 else 1.0
        factors[2] *= 1.1 if step >= 76 else 1.0
        seconds = [0.2 * factor * math.exp(noise.gauss(0.0, 0.03)) for factor in factors]
        rows.append([Row(each, 0.2, 512.0) for each in seconds])
        if not measured:
            rows[-1][2] = Row(seconds[2], 0.0, 512.0)
    replanner, plan = Replanner(PROFILE), Plan.proportional(SPEEDS, 96, 1, 20)
    found = replanner.add(rows, plan, steps_left=1000)
    assert replanner._speeds.errors[2] == math.inf
    assert list(found.slowdowns) == [1]
    assert replanner.levels[2] == replanner.levels[0] == pytest.approx(math.log(1.3), abs=0.03)


UNKNOWN = Row(math.nan, 0.0, 1.0)
"""A rank without samples, or a step of which a device has not finished any pass."""


@pytest.mark.parametrize("samples", [(True,) * 4, (True, True, True, False)])
def test_lengths_that_are_not_known_do_not_count(samples):
    noise, plan = random.Random(0), Plan.proportional(SPEEDS, 96, 1, 20)
    rows = [
        [
            row(noise, ratio, 0.2) if has else UNKNOWN
            for ratio, has in zip(each, samples, strict=True)
        ]
        for each in steps(noise, [], 60)
    ]
    replanner = Replanner(PROFILE)
    assert replanner.add([[UNKNOWN] * 4, *rows], plan, steps_left=1000) is None
    assert max(map(abs, replanner._speeds.levels)) < 0.3


def test_a_plan_that_is_rejected_is_found_again():
    replanner, noise = Replanner(PROFILE), random.Random(0)
    plan = Plan.proportional(SPEEDS, 96, 1, 20)
    rows = [[row(noise, ratio, 0.2) for ratio in each] for each in steps(noise, [(40, 0, 2.0)], 62)]
    found = replanner.add(rows[:60], plan, steps_left=1000)
    assert found.compared_with == plan
    assert replanner.add(rows[60:61], plan, steps_left=1000) is None
    replanner.reject()
    again = replanner.add(rows[61:], plan, steps_left=1000)
    assert again.slowdowns == pytest.approx(found.slowdowns, rel=0.05)


class ActiveRank:
    """What a follower reads of an optimizer on the first rank."""

    is_active, pending_plan, largest_batches = True, None, {}

    def __init__(self, plan, replies):
        self.plan = plan
        announcements = SimpleNamespace(replies=replies)
        ranks = SimpleNamespace(left_out=plan.left_out, is_active=True, announcements=announcements)
        self._training = SimpleNamespace(ranks=ranks)
        self._changes = SimpleNamespace(ranks_may_change=True)
        self.control = SimpleNamespace(group=SimpleNamespace(rank=0))


def test_reports_of_a_rank_that_is_left_out_count_in_long_steps_until_it_ends(monkeypatch):
    seconds, replies, now, seen = 300.0, {}, [0.0], []
    plan = Plan.proportional(SPEEDS[:3], 96, 1, 20).beside((3,))
    clock = SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr(speed_follower, "time", clock)
    optimizer = ActiveRank(plan, replies)
    follower = SpeedFollower(optimizer, PROFILE, applies=True, steps=None, leave_out="auto")
    follower._replanner.add = lambda *_, idle, **__: seen.append(idle)

    def train(steps, *, reports):
        for step in range(steps):
            if reports:
                replies[3] = now[0] + 1.0, 0.0
            now[0] += seconds
            follower.add([RankTimes(math.nan, math.nan)] * 3, step=step, agree=False)

    train(6, reports=True)
    assert seen == [{3: 0.0}] * 3
    train(6, reports=False)
    assert seen[-1] == {}


def found_plans(
    replanner: Replanner, plan: Plan, changes: Changes, *, steps_left: int = 10_000, **idle: Any
) -> Iterator[Replan]:
    """The plans that are found in 60 steps, none of which is applied."""
    noise = random.Random(0)
    for ratios in steps(noise, changes, 60):
        rows = [row(noise, ratios[rank], 0.2) for rank in plan.active_ranks]
        found = replanner.add([rows], plan, steps_left=steps_left, **idle)
        if found is not None:
            yield found


def test_a_change_does_not_pay_in_the_last_steps():
    plan = Plan.proportional(SPEEDS, 96, 1, 20)
    changes = [(20, 0, 2.0)]
    assert [*found_plans(Replanner(PROFILE), plan, changes)]
    assert not [*found_plans(Replanner(PROFILE), plan, changes, steps_left=0)]


def test_rows_of_passes_that_were_not_profiled_are_not_used():
    levels, noise = SpeedLevels([0.0, 0.0]), random.Random(0)
    for ratios in steps(noise, [], 40):
        levels.add([row(noise, ratios[0], 0.2), Row(ratios[1], math.inf, 512.0)])
    levels.look_for_changes()
    assert [error < math.inf for error in levels.errors] == [True, False]


SLOW_LINKS = replace(
    PROFILE,
    network=replace(PROFILE.network, reduce_scatter_seconds=0.1, all_gather_seconds=0.1),
)


def first_plan(
    plan: Plan, levels: Sequence[float] | None, slower: float, idle: dict[int, float]
) -> tuple[Replan | None, Sequence[float]]:
    """The first plan that is found if rank 3 becomes slower; the levels after it."""
    replanner = Replanner(SLOW_LINKS, left_out=plan.left_out, levels=levels, leave_out="auto")
    found = next(found_plans(replanner, plan, [(20, 3, slower)], idle=idle), None)
    return found, replanner.levels


@pytest.mark.parametrize("stage", range(3))
def test_a_plan_leaves_out_a_rank_until_it_has_recovered(stage):
    plan = search(SLOW_LINKS, global_batch=96, stages=(stage,))
    assert not plan.left_out
    left, levels = first_plan(plan, None, 30.0, {})
    assert left.plan.left_out == (3,)
    assert left.slowdowns[3] == pytest.approx(30.0, rel=0.15)
    without = left.plan
    assert first_plan(without, levels, 1.0, {})[0] is None, "nothing is known of it"
    for still in (0.02, -0.02, -0.3):
        assert first_plan(without, levels, 1.0, {3: still})[0] is None
    back, _ = first_plan(without, levels, 1.0, {3: -math.log(30.0)})
    assert not back.plan.left_out
    since = Replanner(SLOW_LINKS, left_out=(2, 3), levels=(0.0,) * 4, since={3: 1.0, 0: 2.0}).since
    assert since == {2: 0.0, 3: 1.0}, "rank 3 has stayed left out"
    assert list(back.slowdowns) == [3]
    assert abs(back.plan.samples(3) - plan.samples(3)) <= 3


def test_a_rank_that_is_left_out_again_must_be_fast_for_longer(monkeypatch):
    measured: list[float] = []
    monkeypatch.setattr(idle_speed, "seconds_of_work", lambda _: measured.pop(0))
    monkeypatch.setattr(idle_speed, "REST_SECONDS", 0.0)
    for times, needed in ((1, 3), (2, 6), (3, 12)):
        speed = idle_speed.IdleSpeed(torch.device("cpu"), times)
        measured[:] = [2.2, 2.0, 2.1, *(needed - 1) * [1.0], 4.0, *needed * [1.0]]
        changes = [speed.change() for _ in range(2 * needed)]
        assert changes[: needed - 1] == [None] * (needed - 1)
        assert changes[needed - 1 : -1] == pytest.approx([math.log(2.0)] * needed)
        assert changes[-1] == pytest.approx(math.log(0.5))


def test_a_rank_whose_memory_another_job_has_reports_nothing(monkeypatch):
    outcomes, error = [1.0] * 6, torch.OutOfMemoryError("CUDA out of memory")
    monkeypatch.setattr(
        idle_speed, "seconds_of_work", mock.Mock(side_effect=[*outcomes, error, *outcomes])
    )
    monkeypatch.setattr(idle_speed, "REST_SECONDS", 0.0)
    speed = idle_speed.IdleSpeed(torch.device("cpu"), 1)
    assert [speed.change() for _ in range(7)] == [None, None, 0.0, None, None, None, 0.0]


def test_a_rank_of_which_nothing_is_known_stays_left_out():
    """Also if others have become so much slower that it would be worth to have."""
    plan = Plan.proportional(SPEEDS[:2], 96, 1, 20).beside((2, 3))
    for idle, left_out in (({}, {2, 3}), ({3: 0.0}, {2})):
        replanner = Replanner(PROFILE, left_out=plan.left_out, leave_out="auto")
        first = next(found_plans(replanner, plan, [(20, 1, 40.0)], idle=idle))
        assert set(first.plan.left_out) - {1} == left_out


@pytest.mark.parametrize("leave_out", ["auto", "never"])
def test_a_rank_without_samples_is_left_out(leave_out):
    """Its links cost nothing here, but it could not be measured otherwise."""
    replanner = Replanner(PROFILE, leave_out=leave_out)
    plan = search(PROFILE, global_batch=96, stages=(1,))
    (new,) = found_plans(replanner, plan, [(20, 3, 60.0)])
    assert new.plan.samples(3) == 0
    assert new.plan.left_out == ((3,) if leave_out == "auto" else ())
