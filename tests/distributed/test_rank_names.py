"""Messages and results name ranks by their numbers in the job, also beside ranks left out.

Rank 0 is left out, so the number of each active rank in their process group is another one.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import ranks as harness
import torch
import training
from ranks import Failure, Pool
from reference import Recipe
from torch import Tensor, nn
from training import Run

import poplar
from poplar import HeteroBatchSampler, HeteroZeroOptimizer, Plan
from poplar.monitoring import Monitor
from poplar.zero.streams import StepTiming

RECIPE = Recipe(batches=(12, 12))
WRONG = 2
"""The rank at fault; its number in the group of the active ranks is 1."""
RANKS = 4


def plan_of(stage: int, *left_out: int) -> Plan:
    active = Plan(
        stage=stage,
        global_batch=12,
        micro_batches=((2, 2), (2, 2), (2, 2)),
        shares=(0.6, 0.3, 0.1),
    )
    return active.beside(left_out)


@dataclass
class Case:
    """What the rank at fault does, as a user of the optimizer."""

    model: nn.Module
    optimizer: HeteroZeroOptimizer
    batch: Any
    loss: Callable[[nn.Module, Any], Tensor]
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def is_wrong(self) -> bool:
        return harness.rank() == WRONG

    def step(self) -> Any:
        return self.optimizer.train_step(self.loss, self.batch, **self.options)


def fail_in_loss(case: Case) -> None:
    """And all ranks go on with the next step."""
    loss = case.loss

    def failing(model: nn.Module, batch: Any) -> Tensor:
        if case.is_wrong:
            raise OverflowError("planted")
        return loss(model, batch)

    case.loss = failing
    try:
        case.step()
    finally:
        case.loss = loss
        case.step()


def return_a_vector(case: Case) -> None:
    loss = case.loss
    case.loss = lambda model, batch: loss(model, batch).expand(2 if case.is_wrong else ())
    case.step()


def give_too_large_a_batch(case: Case) -> None:
    if case.is_wrong:
        case.batch = training.on_device(RECIPE.part(0, 0, 9))
    case.step()


def give_too_small_a_batch(case: Case) -> None:
    if case.is_wrong:
        case.batch = training.on_device(RECIPE.part(0, 0, 3))
    case.step()


def mean_another_loss(case: Case) -> None:
    case.options["loss"] = "sum" if case.is_wrong else "mean"
    case.step()


def set_another_rate(case: Case) -> None:
    if case.is_wrong:
        case.optimizer.param_groups[0]["lr"] = 0.5
    case.step()


def give_a_loss_that_is_not_finite(case: Case) -> None:
    loss = case.loss
    case.loss = lambda model, batch: loss(model, batch) * (torch.inf if case.is_wrong else 1.0)
    case.step()


def run_out_of_memory(case: Case) -> None:
    loss = case.loss

    def short(model: nn.Module, batch: Any) -> Tensor:
        if case.is_wrong:
            raise torch.OutOfMemoryError("planted")
        return loss(model, batch)

    case.loss = short
    case.step()


def leave_a_loop(case: Case) -> None:
    for micro_batch in case.optimizer.micro_batches(case.batch):
        case.loss(case.model, micro_batch).backward()
        if case.is_wrong:
            break
    case.optimizer.step()


def change_a_parameter(case: Case) -> None:
    if case.is_wrong:
        with torch.no_grad():
            next(case.model.parameters()).flatten()[0] += 1.0
    case.optimizer.verify_replicas()


def sample_in_another_order(case: Case) -> None:
    plan = case.optimizer.plan
    if case.optimizer.is_active and plan is not None:
        seed = 1 if case.is_wrong else 0
        sampler = HeteroBatchSampler(12, plan, seed=seed, rank=harness.rank())
        next(iter(sampler))
    case.step()


def save_another_state(case: Case, folder: Path) -> None:
    poplar.save_checkpoint(folder / "saved", case.optimizer, state={"wrong": case.is_wrong})


def ask_for_the_state_on_different_ranks(case: Case) -> None:
    case.optimizer.full_state_dict(to=WRONG if case.is_wrong else 3)


def load_the_state_of_another_step(case: Case) -> None:
    case.step()
    if not case.optimizer.is_active:
        case.optimizer.load_state_dict({})
        return
    state = case.optimizer.state_dict()
    for entry in state["state"].values():
        entry["step"] = torch.tensor(9.0 if case.is_wrong else 1.0)
    case.optimizer.load_state_dict(state)


CASES: dict[str, tuple[Callable[..., None], int, str]] = {
    "loss_fn": (fail_in_loss, 2, "rank 2: overflowerror: planted"),
    "loss is no scalar": (return_a_vector, 2, "rank 2:"),
    "too large": (give_too_large_a_batch, 2, "rank 2: this batch has 9 samples"),
    "too small": (give_too_small_a_batch, 2, "rank 2: this batch has 3 samples"),
    "kind of loss": (mean_another_loss, 2, "loss='sum' without weight= on rank(s) [2]"),
    "lr": (set_another_rate, 2, "0.5 on rank(s) [2]"),
    "not finite": (give_a_loss_that_is_not_finite, 2, "rank 2: the loss is inf"),
    "memory": (run_out_of_memory, 2, "rank 2 ran out of memory"),
    "left loop": (leave_a_loop, 2, "rank 2: poplarerror: the micro_batches loop was left"),
    "replicas": (change_a_parameter, 0, "on rank(s) [2]"),
    "sampler": (sample_in_another_order, 2, "rank 1 has"),
    "state to": (ask_for_the_state_on_different_ranks, 2, "they gave {1: 3, 2: 2, 3: 3}"),
    "step of state": (load_the_state_of_another_step, 1, "2: {'step': 9.0}"),
}


def run_case(name: str, folder: Path) -> list[Failure]:
    make, stage, _ = CASES.get(name, (save_another_state, 2, ""))
    run = Run(RECIPE, plan_of(stage, 0))
    model, optimizer = training.prepare(run)
    case = Case(model, optimizer, training.batch_of(run, 0), training.loss_of(RECIPE))
    with harness.catching() as caught:
        make(case, folder) if make is save_another_state else make(case)
    return caught


@pytest.mark.every_combination
@pytest.mark.parametrize("name", [*CASES, "state"])
def test_errors_name_the_rank_at_fault(ranks: Pool, name: str, tmp_path: Path) -> None:
    wanted = CASES[name][2] if name in CASES else "of rank 2 is not that of rank 1"
    failures = [(caught or [None])[0] for caught in ranks.run(run_case, name, tmp_path)]
    at_fault = failures.pop(WRONG)
    assert at_fault is not None
    training.assert_raised(failures, wanted)
    if name == "loss_fn":
        assert all(failure.is_a(poplar.RankFailed) for failure in failures)


@dataclass
class Seen:
    """What a rank saw of three steps."""

    warned: list[list[str]] = field(default_factory=list)
    """By step."""
    waiting_on: list[int | None] = field(default_factory=list)
    computed: list[list[float]] = field(default_factory=list)
    """By step and rank, seconds."""
    waiting: tuple[float, ...] = ()
    """By rank, as loggers get it."""
    largest: dict[int, int] = field(default_factory=dict)
    plans: list[Plan | None] = field(default_factory=list)


def train_with_faults(then_left_out: int) -> Seen:
    """A rank runs out of memory, and its next loss is not finite. Then another rank is left out."""
    run = Run(RECIPE, plan_of(1, 0), engine={"on_nonfinite": "skip"})
    _, optimizer = training.prepare(run)
    optimizer._training.expect_artificial_data()  # the check of the first loss calls it in a pass
    monitor = Monitor(optimizer, [], every=100)
    loss, times, is_wrong = training.loss_of(RECIPE), StepTiming.times, harness.rank() == WRONG
    step, seen = 0, Seen()

    def failing(model: nn.Module, micro_batch: Any) -> Tensor:
        if is_wrong and step == 0 and len(micro_batch["tokens"]) > 1:
            raise torch.OutOfMemoryError("planted")
        return loss(model, micro_batch) * (torch.inf if is_wrong and step == 1 else 1.0)

    def measured(timing: StepTiming) -> Any:
        waiting = 0.0 if is_wrong else 1.0
        return times(timing)._replace(compute_seconds=harness.rank(), waiting_seconds=waiting)

    def take_step() -> None:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            batch = training.batch_of(replace(run, plan=optimizer.plan), 0)
            result = optimizer.train_step(failing, batch)
        seen.warned.append([str(each.message) for each in caught])
        seen.waiting_on.append(result.waiting_on)
        seen.computed.append([each.compute_seconds for each in result.rank_times])
        seen.plans.append(optimizer.plan)
        monitor(result)

    with mock.patch.object(StepTiming, "times", measured):
        for step in range(2):  # noqa: B007 (`failing` reads it)
            take_step()
        progress = monitor.report()
        assert progress is not None
        seen.waiting = progress.waiting_seconds
        optimizer.apply_plan(plan_of(1, then_left_out))
        step = 2
        take_step()
    seen.largest = optimizer.largest_batches
    return seen


def test_results_and_warnings_name_ranks_of_the_job(ranks: Pool) -> None:
    by_rank = ranks.run(train_with_faults, 1)
    for rank, seen in enumerate(by_rank):
        assert seen.waiting_on == [WRONG] * 3
        assert seen.computed == [[0.0, 1.0, 2.0, 3.0]] * 2 + [[0.0, 0.0, 2.0, 3.0]]
        # Rank 0, which is left out, knows the times that all ranks are told.
        assert [bool(seconds) for seconds in seen.waiting] == (
            [False, True, False, True] if rank == 0 else [False, True, True, True]
        )
    memory, skipped, _ = by_rank[1].warned
    assert "rank 2 in a pass of 2 samples" in memory[0]
    assert "the loss of rank(s) [2] was not finite" in skipped[0]


@pytest.mark.parametrize("then_left_out", [1, 3])
def test_largest_batches_stay_those_of_the_rank(ranks: Pool, then_left_out: int) -> None:
    for rank, seen in enumerate(ranks.run(train_with_faults, then_left_out)):
        assert rank == 0 or seen.largest == {WRONG: 1}  # rank 0 was left out, and comes back
        plan = plan_of(1, 0).with_largest_batches({WRONG: 1})
        assert rank == 0 or seen.plans[:2] == [plan, plan]
