"""The sampler follows a change of plan at a batch that it has not drawn."""

from __future__ import annotations

from itertools import islice

import pytest

from poplar import HeteroBatchSampler, Plan
from poplar.zero.plan_schedule import PlanSchedule

OLD = Plan(stage=1, global_batch=6, micro_batches=((4,), (2,)), shares=(0.5, 0.5))
NEW = Plan(stage=2, global_batch=6, micro_batches=((1,), (5,)), shares=(0.5, 0.5))


def test_change_takes_effect_after_batches_that_were_drawn() -> None:
    sampler, schedule = HeteroBatchSampler(60, OLD, rank=0), PlanSchedule()
    drawn = iter(sampler)
    sizes = [len(batch) for batch in islice(drawn, 3)]
    schedule.begin_step()
    assert schedule.first_step(NEW) == 3
    schedule.add(4, NEW)
    sizes += [len(batch) for batch in drawn]
    assert sizes == [4] * 4 + [1] * 6
    assert [(schedule.is_due, schedule.begin_step(), schedule.version) for _ in range(4)] == [
        (False, None, 1),
        (False, None, 1),
        (False, None, 1),
        (True, None, 2),
    ]


def test_batches_of_an_evaluation_or_of_a_loop_that_was_left_delay_nothing() -> None:
    sampler, schedule = HeteroBatchSampler(60, OLD, rank=0), PlanSchedule()
    for _ in sampler:
        schedule.begin_step()
        break
    assert schedule.first_step(NEW) == schedule.steps == 1
    evaluated = HeteroBatchSampler(40, OLD, rank=0)
    assert len(list(evaluated)) == 6
    assert schedule.first_step(NEW) == 1
    schedule.end_evaluation()
    assert evaluated.ahead == 0


def test_sampler_keeps_its_global_batch() -> None:
    sampler, schedule = HeteroBatchSampler(60, OLD, rank=0), PlanSchedule()
    next(iter(sampler))
    drawn = iter(sampler)
    next(drawn)
    with pytest.raises(ValueError, match="global batches of 8 samples"):
        schedule.first_step(Plan.even(2, 8, 4, stage=1))
