"""The sampler, or the stream, follows a change of plan at a batch that it has not drawn."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
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
    sizes += [len(batch) for batch in drawn]
    assert sizes == [4] * 4 + [1] * 6
    assert [(schedule.is_due, schedule.begin_step(), schedule.version) for _ in range(4)] == [
        (False, None, 1),
        (False, None, 1),
        (False, None, 1),
        (True, None, 2),
    ]


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


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("stop", [1, 9, 13])
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


def three_steps_per_batch(sampler: HeteroBatchSampler, workers: int) -> tuple[PlanSchedule, Any]:
    """After three batches, as PPO takes steps; with the iterator, which has more batches."""
    schedule = PlanSchedule()
    loader = iter(
        DataLoader(Indices(), batch_sampler=sampler, num_workers=workers, collate_fn=list)
    )
    for _ in islice(loader, 3):
        for _ in range(3):
            schedule.begin_step()
    return schedule, loader


def test_several_steps_per_batch_are_counted_without_workers() -> None:
    sampler = HeteroBatchSampler(60, OLD, rank=0)
    schedule, _loader = three_steps_per_batch(sampler, 0)
    assert sampler.state_dict()["step"] == 3
    assert schedule.first_step(NEW) == 9


def test_several_steps_per_batch_are_not_guessed_with_workers() -> None:
    sampler = HeteroBatchSampler(60, OLD, rank=0)
    schedule, _loader = three_steps_per_batch(sampler, 1)
    with pytest.raises(RuntimeError, match=r"more steps than .*state_dict\(steps_done=\)"):
        sampler.state_dict()
    with pytest.raises(ValueError, match="more steps than"):
        schedule.first_step(NEW)
    assert sampler.state_dict(steps_done=3)["step"] == 3
    del _loader
    sampler.set_epoch(1)
    three_steps_per_batch(sampler, 0)
    assert (sampler.state_dict()["epoch"], sampler.state_dict()["step"]) == (1, 3)


def test_state_counts_a_batch_that_no_step_has_taken_once_a_later_one_is_taken() -> None:
    sampler, schedule = HeteroBatchSampler(60, OLD, rank=0), PlanSchedule()
    found = []
    for number, _ in enumerate(sampler):
        if number % 3 != 1:  # the loop skips each third batch
            schedule.begin_step()
        found.append(sampler.state_dict()["step"])
    assert found[:9] == [1, 1, 3, 4, 4, 6, 7, 7, 9]


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


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("dropped", [{3}, {0, 1, 5}, {6, 7}])
def test_a_change_of_plan_follows_batches_that_were_skipped(
    workers: int, dropped: set[int]
) -> None:
    sampler, schedule, plan = HeteroBatchSampler(120, OLD, rank=0), PlanSchedule(), OLD
    loader = DataLoader(Indices(), batch_sampler=sampler, num_workers=workers, collate_fn=list)
    for number, batch in enumerate(loader):
        if number in dropped:
            sampler.skip(1)
            continue
        plan = schedule.due() or plan
        schedule.begin_step()
        assert len(batch) == plan.samples(0), f"batch {number}"
        if number == 8:
            schedule.add(schedule.first_step(NEW), NEW, schedule.changes)
    assert plan == NEW


def test_batches_of_an_evaluation_or_of_a_loop_that_was_left_delay_nothing() -> None:
    sampler, schedule = HeteroBatchSampler(60, OLD, rank=0), PlanSchedule()
    for _ in sampler:
        schedule.begin_step()
        break
    assert schedule.first_step(NEW) == schedule.steps == 1
    evaluated = HeteroBatchSampler(40, OLD, rank=0)
    with schedule.evaluation():
        assert len(list(evaluated)) == 6
        assert schedule.first_step(NEW) == 1
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


def test_a_stream_that_workers_read_is_known_after_an_evaluation() -> None:
    stream, schedule = split_stream(range(60), OLD, rank=0), PlanSchedule()
    evaluated = HeteroBatchSampler(40, OLD, rank=0)
    for _ in DataLoader(stream, batch_size=None, collate_fn=list, num_workers=1):
        schedule.begin_step()
        with schedule.evaluation():
            assert len(list(evaluated)) == 6
        with pytest.raises(ValueError, match="DataLoader workers read a split_stream"):
            schedule.first_step(NEW)


# Several samplers


def loader_of(sampler: HeteroBatchSampler, workers: int = 0, **given: Any) -> Any:
    return DataLoader(
        Indices(), batch_sampler=sampler, num_workers=workers, collate_fn=list, **given
    )


def in_turns(*loaders: Any) -> Iterator[Any]:
    iterators = [iter(loader) for loader in loaders]
    for _ in range(10):
        for iterator in iterators:
            yield next(iterator)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("steps", [zip, in_turns])
def test_no_plan_is_changed_beside_a_second_sampler(
    steps: Callable[..., Iterator[Any]], workers: int
) -> None:
    samplers = [HeteroBatchSampler(60, OLD, rank=0, seed=seed) for seed in range(2)]
    schedule = PlanSchedule()
    for step, _ in enumerate(steps(*(loader_of(sampler, workers) for sampler in samplers))):
        schedule.begin_step()
        if step >= 4:
            with pytest.raises(ValueError, match="batches of several samplers"):
                schedule.first_step(NEW)
    samplers.clear()
    assert schedule.first_step(NEW) == schedule.steps, "they were deleted"


@pytest.mark.parametrize("steps", [zip, in_turns])
def test_a_plan_with_the_same_micro_batches_is_changed_beside_a_second_sampler(
    steps: Callable[..., Iterator[Any]],
) -> None:
    samplers = [HeteroBatchSampler(60, OLD, rank=0, seed=seed) for seed in range(2)]
    schedule, same = PlanSchedule(), replace(OLD, stage=2, shares=(0.25, 0.75))
    for step, _ in enumerate(steps(*map(loader_of, samplers))):
        schedule.begin_step()
        if step == 4:
            schedule.add(schedule.first_step(same), same, schedule.changes)
        if step > 4:
            assert schedule.first_step(OLD) >= schedule.steps
            with pytest.raises(ValueError, match=r"evaluate\(loss_fn, islice\(val, 1\)\)"):
                schedule.first_step(NEW)


def evaluate_all(loader: Any) -> None:
    for _ in loader:
        pass


def evaluate_some(loader: Any) -> None:
    for _ in islice(loader, 2):
        pass


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("stays", [False, True], ids=["", "with an iterator that stays"])
@pytest.mark.parametrize("evaluate", [evaluate_all, evaluate_some])
def test_a_loop_that_evaluates_is_no_second_sampler(
    evaluate: Callable[[Any], None], stays: bool, workers: int
) -> None:
    """As with `persistent_workers=True`, where the iterator stays if the loop is left."""
    sampler, evaluated = (HeteroBatchSampler(60, OLD, rank=0, seed=seed) for seed in range(2))
    schedule, loader = PlanSchedule(), loader_of(evaluated)
    held: list[Any] = []
    for step, _ in enumerate(loader_of(sampler, workers)):
        schedule.begin_step()
        if step % 3 == 1:
            held[:] = [iter(loader)] if stays else []
            evaluate(held[0] if stays else loader)
        state = sampler.state_dict()
        assert 10 * state["epoch"] + state["step"] == step + 1
        assert schedule.first_step(NEW) == schedule.steps + sampler.ahead


@pytest.mark.parametrize("workers", [0, 2])
def test_an_evaluation_of_a_plain_loader_before_the_first_step_leaves_its_batches(
    workers: int,
) -> None:
    sampler, schedule = HeteroBatchSampler(60, OLD, rank=0), PlanSchedule()
    for step, _ in enumerate(loader_of(sampler, workers)):
        if not step:
            with schedule.evaluation():
                evaluate_all(DataLoader(Indices(), sampler=range(4)))
        schedule.begin_step()
        assert sampler.state_dict()["step"] == (step + 1) % 10
        assert schedule.first_step(NEW) == schedule.steps + sampler.ahead
        assert sampler.ahead == min(2 * workers, 9 - step)


def test_evaluations_that_go_on_with_an_iterator_are_no_second_sampler() -> None:
    sampler, evaluated = (HeteroBatchSampler(60, OLD, rank=0, seed=seed) for seed in range(2))
    schedule, batches = PlanSchedule(), iter(evaluated)
    for _ in sampler:
        schedule.begin_step()
        with schedule.evaluation():
            next(batches)
        assert schedule.first_step(NEW) == schedule.steps


@pytest.mark.parametrize("workers", [0, 2])
def test_a_plan_changes_if_the_steps_go_on_with_another_sampler(workers: int) -> None:
    samplers = [HeteroBatchSampler(60, OLD, rank=0, seed=seed) for seed in range(2)]
    schedule, plan = PlanSchedule(), OLD
    for number, sampler in enumerate(samplers):
        for step, batch in enumerate(loader_of(sampler, workers)):
            plan = schedule.due() or plan
            schedule.begin_step()
            assert len(batch) == plan.samples(0)
            if number and step == 2:
                schedule.add(schedule.first_step(NEW), NEW, schedule.changes)
    assert plan is NEW


def test_samplers_of_two_optimizers_follow() -> None:
    samplers = [HeteroBatchSampler(60, OLD, rank=0, seed=seed) for seed in range(2)]
    schedules = PlanSchedule(), PlanSchedule()
    batches = in_turns(*samplers)
    for _ in range(10):
        for schedule in schedules:
            next(batches)
            schedule.begin_step()
            assert schedule.first_step(NEW) == schedule.steps
