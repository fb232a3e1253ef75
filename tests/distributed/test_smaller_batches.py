"""A rank that runs out of memory in a step: all ranks run the step again, in smaller micro-batches.

The gradient stays that of one process on the global batch. Errors are raised where a smaller
micro-batch is needed; `test_out_of_memory.py` shows that real ones are recognized.
"""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import pytest
import ranks as harness
import reference
import torch
import training
from ranks import Failure, Pool
from reference import Recipe
from torch import Tensor, nn
from training import STAGES, Run

from poplar import HeteroZeroOptimizer, Plan, RankFailed
from poplar.zero.passes.collective_scheduler import CollectiveScheduler
from poplar.zero.stages.sharded_parameters import ShardedParameters
from poplar.zero.stages.strategy import Strategy
from poplar.zero.unit import Unit

RECIPE = Recipe(batches=(12, 12, 7), max_norm=0.5)
PLAN = Plan(
    stage=0, global_batch=12, micro_batches=((2, 3), (1, 4), (2, 0)), shares=(0.5, 0.2, 0.3)
)
RANKS = PLAN.world_size
ERRORS = (
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:118] DefaultCPUAllocator: can't allocate memory"),
    MemoryError("std::bad_alloc"),
)


@dataclass(frozen=True)
class Shortage:
    """Where ranks run out of memory, and the most samples that fit there."""

    place: str
    largest: Mapping[int, int]
    """By rank; other ranks have no limit."""
    step: int = 1
    """Steps before it have enough memory."""


# On ranks


class Failing:
    """Raises where the shortage is, in passes that are larger than this rank's limit."""

    def __init__(self, shortage: Shortage) -> None:
        self.shortage = shortage
        self.active = False
        self.samples = 0
        """Of the current micro-batch."""
        self.raised = 0
        self.activations: list[weakref.ref[Tensor]] = []
        self.leaked = 0
        """Passes whose activations were still held when the next one began."""

    def check(self, place: str, *_: Any) -> None:
        most = self.shortage.largest.get(harness.rank())
        is_here = self.active and place == self.shortage.place
        if is_here and most is not None and self.samples > most:
            self.raised += 1
            self.samples = 0  # the failed pass has freed its memory
            raise ERRORS[self.raised % len(ERRORS)]

    def loss(self, loss_fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def failing(model: nn.Module, batch: Any) -> Tensor:
            self.samples = len(batch["tokens"])
            self.leaked += sum(earlier() is not None for earlier in self.activations)
            activations = torch.ones((), requires_grad=True)
            self.activations = [weakref.ref(activations)]
            value = loss_fn(model, batch) + 0.0 * activations
            self.check("loss")
            return value

        return failing

    @contextmanager
    def installed(self, model: nn.Module) -> Iterator[None]:
        """Hooks in the model, and in the allocation of gradients."""
        block, ensure = model.blocks[1], Strategy.ensure_gradient

        def watch(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
            if output.requires_grad:
                output.register_hook(lambda _: self.check("backward"))

        def allocate(strategy: Strategy, flat: Any, *options: Any) -> None:
            self.check("allocation")
            ensure(strategy, flat, *options)

        weight = next(block.parameters())
        handles = [
            block.register_forward_pre_hook(lambda *_: self.check("forward")),
            block.register_forward_hook(watch),
            weight.register_post_accumulate_grad_hook(lambda _: self.check("gradient hook")),
        ]
        with mock.patch.object(Strategy, "ensure_gradient", allocate):
            yield
        for handle in handles:
            handle.remove()


@dataclass
class Outcome:
    """What one rank has seen."""

    losses: list[float | None] = field(default_factory=list)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    plan: Plan | None = None
    largest: dict[int, int] = field(default_factory=dict)
    raised: int = 0
    """Times that this rank ran out of memory."""
    leaked: int = 0
    """Passes whose memory was not freed at once."""
    warnings: list[str] = field(default_factory=list)
    failure: Failure | None = None
    """Of the step with the shortage; the step is then repeated with enough memory."""


def train(run: Run, shortage: Shortage) -> Outcome:
    """Train the recipe; memory is short from one step on."""
    outcome = Outcome()
    model, optimizer = training.prepare(run)
    optimizer._training.expect_artificial_data()  # the check of the first loss calls it in a pass
    failing = Failing(shortage)
    loss_fn = training.loss_of(run.recipe)
    failing_loss = mock.patch.object(training, "loss_of", return_value=failing.loss(loss_fn))
    gc.disable()  # memory must not wait for it
    with failing.installed(model), warnings.catch_warnings(record=True) as caught, failing_loss:
        warnings.simplefilter("always")
        for step in range(len(run.recipe.batches)):
            failing.active = step >= shortage.step and outcome.failure is None
            with harness.catching() as errors:
                outcome.losses.append(take_step(run, model, optimizer, step))
            if errors:
                outcome.failure, failing.active = errors[0], False
                outcome.losses.append(take_step(run, model, optimizer, step))
    gc.enable()
    outcome.warnings = [str(each.message) for each in caught]
    outcome.parameters = training.whole_parameters(model, optimizer)
    outcome.plan, outcome.largest = optimizer.plan, optimizer.largest_batches
    outcome.raised, outcome.leaked = failing.raised, failing.leaked
    return outcome


def take_step(
    run: Run, model: nn.Module, optimizer: HeteroZeroOptimizer, step: int
) -> float | None:
    return training.take_step(run, model, optimizer, step)[0]


# In the test process


def assert_undisturbed(outcomes: list[Outcome], recipe: Recipe = RECIPE) -> None:
    """Losses and parameters are those of one process, with the same bits on all ranks."""
    expected = reference.train(recipe)
    for rank, outcome in enumerate(outcomes):
        training.assert_close(outcome.parameters, expected.parameters, f"rank {rank}")
        training.assert_same(outcome.parameters, outcomes[0].parameters)
        for loss, wanted in zip(outcome.losses, expected.losses, strict=True):
            assert loss == pytest.approx(wanted, rel=training.RELATIVE)
        assert outcome.plan == outcomes[0].plan
        assert outcome.largest == outcomes[0].largest


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("place", ["forward", "backward", "loss", "gradient hook", "allocation"])
@pytest.mark.parametrize(
    "largest", [{0: 1}, {1: 2}, {0: 2, 1: 1, 2: 1}], ids=["first pass", "last pass", "all ranks"]
)
@pytest.mark.parametrize("step", [0, 1])
def test_step_runs_again_in_smaller_micro_batches(
    ranks: Pool, stage: int, place: str, largest: dict[int, int], step: int
) -> None:
    run = Run(RECIPE, replace(PLAN, stage=stage))
    shortage = Shortage(place, largest, step)
    outcomes = ranks.run(train, run, shortage, ranks=RANKS)
    assert_undisturbed(outcomes)
    for rank, outcome in enumerate(outcomes):
        assert outcome.failure is None
        assert outcome.leaked == 0
        assert bool(outcome.raised) == (rank in largest)
        assert outcome.plan.stage == stage
        assert max(outcome.plan.micro_batches[rank]) <= largest.get(rank, 4)
        assert outcome.plan.samples(rank) == PLAN.samples(rank)
        assert outcome.largest.keys() == largest.keys()
        warned = rank == 0 or rank in largest
        assert any("out of memory" in text for text in outcome.warnings) == warned


def test_failed_pass_holds_one_unit_at_a_time(ranks: Pool) -> None:
    """It is finished where memory is so short that another unit fits only after the last one."""
    run = Run(RECIPE, replace(PLAN, stage=3))
    for place in ("forward", "backward"):
        outcomes = ranks.run(train_with_memory_for_one_unit, run, Shortage(place, {1: 2}), ranks=3)
        assert_undisturbed(outcomes)
        assert all(outcome.failure is None for outcome in outcomes)
        assert outcomes[1].raised == 1


def train_with_memory_for_one_unit(run: Run, shortage: Shortage) -> Outcome:
    """As `train`; while a failed pass is finished, a second unit has no memory."""
    held: set[Unit] = set()
    finishing = False
    finish, unshard = CollectiveScheduler.finish, ShardedParameters.unshard
    reshard = ShardedParameters.reshard

    def finish_short(scheduler: CollectiveScheduler, *, failed: bool = False) -> None:
        nonlocal finishing
        finishing = failed
        finish(scheduler, failed=failed)
        finishing = False

    def unshard_if_alone(strategy: ShardedParameters, unit: Unit, **options: Any) -> None:
        if finishing and held - {unit}:
            raise ERRORS[1]
        unshard(strategy, unit, **options)
        held.add(unit)

    def reshard_and_note(strategy: ShardedParameters, unit: Unit) -> None:
        reshard(strategy, unit)
        held.discard(unit)

    with (
        mock.patch.object(CollectiveScheduler, "finish", finish_short),
        mock.patch.object(ShardedParameters, "unshard", unshard_if_alone),
        mock.patch.object(ShardedParameters, "reshard", reshard_and_note),
    ):
        return train(run, shortage)


def test_step_without_a_plan_runs_again_in_smaller_micro_batches(ranks: Pool) -> None:
    for stage in STAGES:
        outcomes = ranks.run(train_without_plan, stage, Shortage("forward", {1: 2}), ranks=RANKS)
        assert_undisturbed(outcomes)
        for outcome in outcomes:
            assert outcome.failure is None
            assert outcome.largest == {1: 2}


def train_without_plan(stage: int, shortage: Shortage) -> Outcome:
    """As `train`; the optimizer gets batches of any size instead of a plan."""
    plan, prepare = replace(PLAN, stage=stage), training.prepare

    def without_plan(run: Run) -> tuple[nn.Module, HeteroZeroOptimizer]:
        return prepare(replace(run, plan=None, engine={**run.engine, "stage": stage}))

    with mock.patch.object(training, "prepare", without_plan):
        return train(Run(RECIPE, plan), shortage)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    ("most", "choice"), [(2, "raise"), (0, "retry")], ids=["raise", "one sample does not fit"]
)
def test_all_ranks_raise_if_smaller_micro_batches_cannot_help(
    ranks: Pool, stage: int, most: int, choice: str
) -> None:
    run = Run(RECIPE, replace(PLAN, stage=stage), engine={"on_out_of_memory": choice})
    outcomes = ranks.run(train, run, Shortage("forward", {1: most}), ranks=RANKS)
    assert_raised_once(outcomes)
    samples = "1 sample," if most == 0 else "4 samples,"
    for rank, outcome in enumerate(outcomes):
        assert outcome.failure.is_a(torch.OutOfMemoryError if rank == 1 else RankFailed)
        for text in ("rank 1 ran out of memory", samples, "parameters", "What helps", "share"):
            assert text in outcome.failure.message, outcome.failure


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("place", ["forward", "backward"])
def test_own_loop_raises_on_all_ranks(ranks: Pool, stage: int, place: str) -> None:
    run = Run(RECIPE, replace(PLAN, stage=stage), open_form=True)
    outcomes = ranks.run(train, run, Shortage(place, {1: 2}), ranks=RANKS)
    assert_raised_once(outcomes)
    for rank, outcome in enumerate(outcomes):
        assert "rank 1" in outcome.failure.message or rank == 1, outcome.failure


def assert_raised_once(outcomes: list[Outcome]) -> None:
    """All ranks raised in one step; training then went on as if that step had not begun."""
    expected = reference.train(RECIPE)
    for rank, outcome in enumerate(outcomes):
        assert outcome.failure is not None, f"rank {rank}"
        assert len(outcome.losses) == len(expected.losses)
        for loss, wanted in zip(outcome.losses, expected.losses, strict=True):
            # A loop of the user does not sum the losses of the ranks.
            assert loss is None or loss == pytest.approx(wanted, rel=training.RELATIVE)
        training.assert_close(outcome.parameters, expected.parameters, f"rank {rank}")


def test_ranks_must_choose_alike(ranks: Pool) -> None:
    failures = ranks.run_expecting_errors(choose_unlike, ranks=2)
    training.assert_raised(failures, "on_out_of_memory", "retry", "raise", kind=ValueError)


def choose_unlike() -> None:
    choice = "retry" if harness.rank() else "raise"
    training.prepare(Run(RECIPE, Plan.manual("6,6", stage=0), engine={"on_out_of_memory": choice}))
