"""The sampler, or the stream, follows a change of plan at a batch that it has not drawn."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest
from torch.utils.data import DataLoader

from poplar import HeteroBatchSampler, Plan, split_stream
from poplar.training.plan_schedule import PlanSchedule

OLD = Plan(stage=1, global_batch=6, micro_batches=((4,), (2,)), shares=(0.5, 0.5))
NEW = Plan(stage=2, global_batch=6, micro_batches=((1,), (5,)), shares=(0.5, 0.5))


@pytest.mark.parametrize("is_stream", [False, True])
def test_change_takes_effect_after_batches_that_were_drawn(is_stream: bool) -> None:
    source: Any = (
        split_stream(range(60), OLD, rank=0) if is_stream else HeteroBatchSampler(60, OLD, rank=0)
    )
    schedule, drawn = PlanSchedule(), iter(source)
    sizes = [len(batch) for batch in islice(drawn, 3)]
    schedule.begin_step()
    assert schedule.first_step(NEW) == 3
    schedule.add(4, NEW, schedule.changes)
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


def test_a_stream_that_workers_read_cannot_follow_but_a_new_one_can() -> None:
    stream, schedule = split_stream(range(60), OLD, rank=0), PlanSchedule()
    for _ in DataLoader(stream, batch_size=None, collate_fn=list, num_workers=1):
        schedule.begin_step()
        break
    with pytest.raises(ValueError, match="use num_workers=0, or leave the loop, split the stream"):
        schedule.first_step(NEW)
    again = split_stream(range(60), NEW, rank=0)
    assert schedule.first_step(NEW) == 1
    assert next(iter(again)) == [0]


def test_sampler_keeps_its_global_batch() -> None:
    sampler, schedule = HeteroBatchSampler(60, OLD, rank=0), PlanSchedule()
    next(iter(sampler))
    drawn = iter(sampler)
    next(drawn)
    with pytest.raises(ValueError, match="global batches of 8 samples"):
        schedule.first_step(Plan.even(2, 8, 4, stage=1))
