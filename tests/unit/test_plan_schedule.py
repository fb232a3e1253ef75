"""The sampler, or the stream, follows a change of plan at a batch that it has not drawn."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any

import pytest
from torch.utils.data import DataLoader, Dataset

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
    found = []
    for batch in drawn:
        sizes.append(len(batch))
        found.append((schedule.is_due, schedule.begin_step(), schedule.version))
    assert sizes == [4] * 4 + [1] * 6
    assert found[:4] == [(False, None, 1), (False, None, 1), (False, None, 1), (True, None, 2)]


class Indices(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index


def steps_of(sampler: HeteroBatchSampler, workers: int, most: int) -> Iterator[list[int]]:
    """The batches of at most so many steps, in a loop that may end in an epoch."""
    schedule = PlanSchedule()
    while most:
        loader = DataLoader(Indices(), batch_sampler=sampler, num_workers=workers, collate_fn=list)
        for batch in loader:
            schedule.begin_step()
            yield batch
            most -= 1
            if not most:
                break


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("stop", [1, 4, 8, 9, 10, 13])
def test_state_counts_the_batches_that_an_optimizer_has_taken(workers: int, stop: int) -> None:
    """At every step, and also after a loop that was left."""
    whole = list(steps_of(HeteroBatchSampler(60, OLD, rank=0), 0, 20))
    sampler = HeteroBatchSampler(60, OLD, rank=0)
    for step, batch in enumerate(steps_of(sampler, workers, stop)):
        assert batch == whole[step]
        state = sampler.state_dict()
        assert (state["epoch"], state["step"]) == divmod(step + 1, 10)
    assert sampler.state_dict() == state
    resumed = HeteroBatchSampler(60, OLD, rank=0)
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    assert list(steps_of(resumed, workers, 20 - stop)) == whole[stop:]


def test_state_counts_a_batch_that_no_step_has_taken_once_a_later_one_is_taken() -> None:
    sampler, schedule = HeteroBatchSampler(60, OLD, rank=0), PlanSchedule()
    found = []
    for number, _ in enumerate(sampler):
        if number % 3 != 1:  # the loop skips each third batch
            schedule.begin_step()
        found.append(sampler.state_dict()["step"])
    assert found[:9] == [1, 1, 3, 4, 4, 6, 7, 7, 9]


def train(
    sampler: HeteroBatchSampler,
    batches: Iterable[list[int]],
    *,
    dropped: Collection[int] = (),
    change_after: int,
    steps_ahead: int = 0,
) -> int:
    """Train an epoch in which the plan changes, and compare each batch with the plan in force.

    Args:
        dropped: numbers of batches that the loop drops.
        change_after: the number of the batch after which the plan is changed.
        steps_ahead: how many steps after the first possible one.

    Returns:
        Steps under the new plan.
    """
    schedule, plan, changed = PlanSchedule(), OLD, 0
    for number, batch in enumerate(batches):
        if number not in dropped:
            plan = schedule.due() or plan
            schedule.begin_step()
            assert len(batch) == plan.samples(0), f"batch {number}"
            state = sampler.state_dict()
            assert (state["epoch"], state["step"]) == divmod(number + 1, len(sampler))
            changed += plan == NEW
        elif not schedule.steps:
            sampler.skip(1)
        if number == change_after:
            schedule.add(schedule.first_step(NEW) + steps_ahead, NEW, schedule.changes)
    return changed


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("dropped", [{3}, {4, 5, 15}, {0, 1, 2}, {0, 1, 5}])
@pytest.mark.parametrize("change_after", [6, 8])
def test_dropped_batches_do_not_move_a_change_of_plan(
    workers: int, dropped: set[int], change_after: int
) -> None:
    sampler = HeteroBatchSampler(120, OLD, rank=0)
    loader = DataLoader(Indices(), batch_sampler=sampler, num_workers=workers, collate_fn=list)
    assert train(sampler, loader, dropped=dropped, change_after=change_after) > 5


def test_batches_dropped_before_a_later_change_do_not_move_it() -> None:
    sampler = HeteroBatchSampler(120, OLD, rank=0)
    assert train(sampler, sampler, dropped={5, 6, 9}, change_after=4, steps_ahead=3) == 9


def test_an_iteration_that_ends_after_the_next_one_has_begun_leaves_its_batches() -> None:
    sampler, schedule = HeteroBatchSampler(120, OLD, rank=0), PlanSchedule()
    loader = DataLoader(Indices(), batch_sampler=sampler, num_workers=2, collate_fn=list)
    batches = iter(loader)
    for _ in range(3):
        next(batches)
        schedule.begin_step()
    batches = iter(loader)  # has drawn 4 batches before the former iterator is deleted
    assert sampler.ahead == 4
    next(batches)
    schedule.begin_step()
    assert schedule.first_step(NEW) == 4 + 4
    assert sampler.state_dict()["step"] == 1


def test_an_iteration_of_a_stream_leaves_the_batches_of_the_next_one() -> None:
    stream = split_stream(range(120), OLD, rank=0)
    former, later = iter(stream), iter(stream)
    next(former)
    next(later)
    del former
    assert stream.ahead == 1


def test_batches_drawn_in_a_thread_or_by_twos_are_not_dropped() -> None:
    """How far they are drawn ahead of a step varies."""
    sampler = HeteroBatchSampler(120, OLD, rank=0)

    def by_twos() -> Iterator[list[int]]:
        drawn = iter(sampler)
        for first in drawn:
            yield from (first, next(drawn))

    assert train(sampler, by_twos(), change_after=6) == 20 - 8

    def by_a_thread() -> Iterator[list[int]]:
        with ThreadPoolExecutor(1) as thread:
            drawn, ahead = iter(sampler), []
            for number in range(20):
                wanted = min(number % 4 + 1, 20 - number)
                while len(ahead) < wanted:
                    ahead.append(thread.submit(next, drawn).result())
                yield ahead.pop(0)

    sampler = HeteroBatchSampler(120, OLD, rank=0)
    assert train(sampler, by_a_thread(), change_after=6) > 5


def test_state_is_the_next_epoch_if_the_last_batch_was_dropped() -> None:
    sampler, schedule = HeteroBatchSampler(60, OLD, rank=0), PlanSchedule()
    for number, _ in enumerate(sampler):
        if number < 8:
            schedule.begin_step()
    state = sampler.state_dict()
    assert (state["epoch"], state["step"]) == (1, 0)


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
