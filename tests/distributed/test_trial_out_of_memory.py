"""A plan that runs out of memory in a trial: all ranks learn of it, and the next plan can run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest import mock

import models
import pytest
import ranks as harness
import torch
from models import ModelSpec
from ranks import Failure, Pool, one_off
from sessions import session_on_meta
from subset import choose
from torch import Tensor, nn

from poplar import HeteroZeroOptimizer, Plan
from poplar.profiler import trial_runs
from poplar.profiler.trial_runs import OutOfMemoryInTrial, run_plan
from poplar.values.errors import CollectiveTimeout, PoplarError
from poplar.zero.collective_calls import new_group
from poplar.zero.stages.sharded_parameters import ShardedParameters

SHORT = 1
"""The rank that runs out of memory."""
PLAN = Plan.even(3, 6, 2, stage=3)
MESSAGE = "DefaultCPUAllocator: can't allocate memory"


class Shortage:
    """A loss that raises on one rank, and leaves a reference cycle that holds its graph."""

    active = True

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        loss = models.mean_over_samples(model, batch)
        if self.active and harness.rank() == SHORT:
            cycle: list[Any] = [loss]
            cycle.append(cycle)
            raise RuntimeError(MESSAGE)
        return loss


def run_twice() -> tuple[tuple[int, ...], bool, int]:
    """The ranks that ran out of memory; whether the model was on meta then; passes of the next."""
    loss_fn = Shortage()
    session = session_on_meta(loss_fn)
    with new_group(harness.group(), None, "a test"), session.measuring():
        try:
            run_plan(session, PLAN, steps=1, report=lambda text: None)
        except OutOfMemoryInTrial as error:
            short = error.ranks
        on_meta = all(parameter.is_meta for parameter in session.job.model.parameters())
        loss_fn.active = False
        seen = run_plan(session, PLAN, steps=1, report=lambda text: None)
    return short, on_meta, len(seen.pass_seconds)


def test_model_on_meta_is_put_back_on_meta(ranks: Pool) -> None:
    assert ranks.run(run_twice, ranks=3) == [((SHORT,), True, 3)] * 3


def run_with_a_failing_call(name: str, failing: int) -> tuple[bool, bool, int]:
    """Whether memory ran out; whether the model was on meta then; passes of the next trial."""
    method, calls, ran_out = getattr(ShardedParameters, name), 0, False

    def limited(strategy: ShardedParameters, *args: Any, **options: Any) -> None:
        nonlocal calls
        calls += 1
        if harness.rank() == SHORT and calls == failing:
            raise RuntimeError(MESSAGE)
        method(strategy, *args, **options)

    session = session_on_meta(models.mean_over_samples)
    with new_group(harness.group(), None, "a test"), session.measuring():
        try:
            with mock.patch.object(ShardedParameters, name, limited):
                run_plan(session, PLAN, steps=1, report=lambda text: None)
        except OutOfMemoryInTrial:
            ran_out = True
        on_meta = all(parameter.is_meta for parameter in session.job.model.parameters())
        seen = run_plan(session, PLAN, steps=1, report=lambda text: None)
    return ran_out, on_meta, len(seen.pass_seconds)


@pytest.mark.parametrize(
    ("name", "failing"),
    [*(("unshard", call) for call in (1, 4, 8)), *(("reduce", call) for call in (1, 3, 6))],
)
def test_no_graph_of_a_failed_trial_remains(ranks: Pool, name: str, failing: int) -> None:
    assert ranks.run(run_with_a_failing_call, name, failing, ranks=3) == [(True, True, 3)] * 3


@contextmanager
def no_unit_fits(*, beside_state: bool) -> Iterator[None]:
    """On one rank, unsharding raises from when the optimizer has state, or only while it has."""
    build, unshard = trial_runs.built_optimizer, ShardedParameters.unshard
    states: list[Any] = []
    had_state = False

    @contextmanager
    def building(*args: Any) -> Iterator[Any]:
        with build(*args) as optimizer:
            states.append(optimizer._training.update.inners[0].state)
            yield optimizer
            states.pop()

    def limited(strategy: ShardedParameters, *args: Any, **options: Any) -> None:
        nonlocal had_state
        has_state = any(states)
        had_state = had_state or has_state
        if harness.rank() == SHORT and (has_state if beside_state else had_state):
            raise RuntimeError(MESSAGE)
        unshard(strategy, *args, **options)

    with (
        mock.patch.object(trial_runs, "built_optimizer", building),
        mock.patch.object(ShardedParameters, "unshard", limited),
    ):
        yield


def run_without_memory_for_a_pass() -> tuple[tuple[int, ...], int]:
    """The ranks that ran out of memory, and passes of the same plan with enough memory."""
    session = session_on_meta(models.mean_over_samples)
    with new_group(harness.group(), None, "a test"), session.measuring():
        try:
            with no_unit_fits(beside_state=True):
                run_plan(session, PLAN, steps=1, report=lambda text: None)
        except OutOfMemoryInTrial as error:
            short = error.ranks
        seen = run_plan(session, PLAN, steps=1, report=lambda text: None)
    return short, len(seen.pass_seconds)


def test_state_is_dropped_to_complete_a_pass_with_the_other_ranks(ranks: Pool) -> None:
    assert ranks.run(run_without_memory_for_a_pass, ranks=3) == [((SHORT,), 3)] * 3


def run_without_any_memory() -> Failure | None:
    session = session_on_meta(models.mean_over_samples)
    with (
        harness.catching() as caught,
        session.measuring(),
        no_unit_fits(beside_state=False),
    ):
        run_plan(session, PLAN, steps=1, report=lambda text: None)
    return caught[0] if caught else None


def test_a_trial_ends_on_all_ranks_if_dropping_the_state_is_not_enough() -> None:
    for failure in one_off(3, run_without_any_memory):
        assert isinstance(failure, Failure), failure
        assert failure.is_a(CollectiveTimeout), failure
        assert f"rank {SHORT} is out of memory and cannot complete a pass" in failure.message


def train_until_a_pass_cannot_be_completed(communicator: str) -> Failure | None:
    """The error of this rank; the deadline of collectives is longer than that of the test."""
    model = models.build(ModelSpec(kind="mlp", blocks=2))
    optimizer = HeteroZeroOptimizer(
        model,
        torch.optim.AdamW,
        plan=PLAN,
        process_group=harness.group(),
        communicator=communicator,
        timeout=timedelta(minutes=10),
    )
    unshard = ShardedParameters.unshard

    def limited(strategy: ShardedParameters, *args: Any, **options: Any) -> None:
        if harness.rank() == SHORT:
            raise RuntimeError(MESSAGE)
        unshard(strategy, *args, **options)

    batch = models.data(2, seed=1)
    optimizer.train_step(models.mean_over_samples, batch)
    with (
        harness.catching() as caught,
        mock.patch.object(ShardedParameters, "unshard", limited),
    ):
        optimizer.train_step(models.mean_over_samples, batch)
    return caught[0] if caught else None


@pytest.mark.parametrize(
    "communicator", choose(quick=["process_group"], full=["process_group", "shared_memory"])
)
def test_all_ranks_learn_before_the_deadline_that_a_pass_cannot_be_completed(
    communicator: str,
) -> None:
    for rank, failure in enumerate(
        one_off(3, train_until_a_pass_cannot_be_completed, communicator)
    ):
        assert failure is not None, "the step returned"
        assert failure.is_a(PoplarError if rank == SHORT else CollectiveTimeout), failure
        assert f"rank {SHORT} is out of memory and cannot complete a pass" in failure.message
