"""Trials compare plans over shared turns and pool their observations."""

from __future__ import annotations

from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poplar import Plan
from poplar.values.observation import Observation, Trials

PLANS = [Plan.manual(sizes, stage=1) for sizes in ((5, 3), (6, 2), (7, 1))]
FAST, MIDDLE, SLOW = PLANS
SECONDS = {FAST: 1.0, MIDDLE: 1.02, SLOW: 1.05}


def ran(plan: Plan, seconds: float) -> Observation:
    return Observation(
        plan=plan,
        step_seconds=seconds,
        pass_seconds=((0.8 * seconds,), (0.6 * seconds,)),
        other_seconds=(0.1 * seconds, 0.2 * seconds),
    )


@given(st.lists(st.floats(0.5, 2.0), min_size=1, max_size=6), st.permutations(PLANS))
def test_ranking_ignores_speed_changes_between_turns(luck, plans):
    trials = Trials()
    for factor in luck:
        trials.add([ran(plan, factor * SECONDS[plan]) for plan in plans])
    assert trials.ranking(plans) == PLANS
    assert trials.ratio(SLOW, FAST) == pytest.approx(1.05)


def test_plans_are_compared_over_shared_turns():
    trials = Trials()
    trials.add([ran(FAST, 1.0), ran(SLOW, 1.05)])
    for _ in range(3):  # the machine has become slower meanwhile
        trials.add([ran(FAST, 1.5), ran(MIDDLE, 1.53)])
    assert trials.ratio(MIDDLE, FAST) == pytest.approx(1.02)
    assert trials.ranking([MIDDLE, FAST]) == [FAST, MIDDLE]
    assert [trials.turns(plan) for plan in PLANS] == [4, 3, 1]


def test_one_fast_turn_does_not_change_the_ranking():
    trials = Trials()
    trials.add([ran(FAST, 1.0), ran(SLOW, 0.5)])
    for _ in range(2):
        trials.add([ran(FAST, 1.0), ran(SLOW, 1.05)])
    assert trials.ranking([SLOW, FAST]) == [FAST, SLOW]


@given(st.lists(st.floats(0.5, 2.0), min_size=1, max_size=6))
def test_observations_are_medians_in_order_of_first_appearance(seconds):
    trials = Trials()
    trials.add([ran(SLOW, 3.0)])
    for each in seconds:
        trials.add([ran(FAST, each)])
    middle = median(seconds)
    slow, fast = trials.observations()
    assert slow == ran(SLOW, 3.0)
    assert (fast.plan, fast.step_seconds) == (FAST, middle)
    assert fast.pass_seconds == (
        (pytest.approx(0.8 * middle),),
        (pytest.approx(0.6 * middle),),
    )
    assert fast.other_seconds == pytest.approx((0.1 * middle, 0.2 * middle))


def test_rank_without_samples_has_no_passes():
    plan = Plan.manual((8, 0), stage=0)
    seen = Observation(
        plan=plan, step_seconds=1.0, pass_seconds=((0.9,), ()), other_seconds=(0.0, 0.0)
    )
    trials = Trials()
    trials.add([seen])
    trials.add([seen])
    assert trials.observations() == (seen,)
