"""Units are used several times, skipped, or reached in another order than agreed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta

import pytest
import ranks as harness
import reference
import torch
import training
from communicators import on_host
from models import ModelSpec
from ranks import Failure, Pool
from reference import Recipe, Steering
from torch import Tensor, nn
from training import STAGES, Run, assert_exact, assert_same

from poplar import HeteroZeroOptimizer, Plan, PoplarError
from poplar.values.errors import OutOfOrder

SHARES = (0.55, 0.25, 0.0, 0.2)


def plan_of(stage: int, *samples: int, passes: int = 1) -> Plan:
    return Plan.manual(samples, stage=stage, passes=passes, shares=SHARES)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_unit_may_be_used_several_times(ranks: Pool, stage: int, checkpointing: bool) -> None:
    recipe = Recipe(spec=ModelSpec(kind="albert", checkpointing=checkpointing), batches=(12,) * 4)
    plan = plan_of(stage, 1, 2, 3, 0, passes=2)
    assert_exact(ranks.run(training.train, Run(recipe, plan)), recipe)


LAYER_DROP = {
    "one rank skips a block": (Steering(0, 4, "skip", 1), Steering(4, 12, "skip", None)),
    "each rank skips another": (
        Steering(0, 4, "skip", 0),
        Steering(4, 7, "skip", 1),
        Steering(7, 10, "skip", 2),
        Steering(10, 12, "skip", None),
    ),
    "one rank skips a block in some steps": (
        Steering(0, 4, "skip", None),
        Steering(4, 7, "skip", 2, steps=(1, 3)),
        Steering(7, 12, "skip", None),
    ),
    "no rank uses a block": (Steering(0, 12, "skip", 1),),
    "no rank uses a block in some steps": (Steering(0, 12, "skip", 1, steps=(1, 2)),),
    "all ranks use the blocks in reverse order": (Steering(0, 12, "order", "reversed"),),
}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("case", LAYER_DROP)
def test_ranks_may_skip_units(ranks: Pool, stage: int, case: str) -> None:
    open_form = (stage + list(LAYER_DROP).index(case)) % 2 == 1  # alternate between the two APIs
    recipe = Recipe(steering=LAYER_DROP[case], batches=(12,) * 4, max_norm=0.2)
    run = Run(recipe, plan_of(stage, 4, 3, 3, 2), open_form)
    assert_exact(ranks.run(training.train, run), recipe)


def use_another_order(run: Run, rank: int, first: int) -> tuple[Failure | None, bool, dict]:
    """From step `first` on, one rank runs its blocks in reverse order; then a correct step."""
    model, optimizer = training.prepare(run)
    for step in range(first):
        training.take_step(run, model, optimizer, step)
    before = training.whole_parameters(model, optimizer)
    batch = training.batch_of(run, first)
    if harness.rank() == rank:
        batch["order"] = "reversed"
    with harness.catching() as caught:
        optimizer.train_step(training.loss_of(run.recipe), batch)
    after = training.whole_parameters(model, optimizer)
    same = all(after[name].equal(value) for name, value in before.items())
    if caught:
        training.take_step(run, model, optimizer, first)
    return (caught or [None])[0], same, training.whole_parameters(model, optimizer)


@pytest.mark.parametrize("rank", [0, 1])
def test_different_order_raises_and_names_the_unit(ranks: Pool, rank: int) -> None:
    """Where parameters are sharded, all ranks raise and no state is lost."""
    recipe = Recipe(batches=(12,) * 3)
    run = Run(recipe, plan_of(3, 4, 3, 3, 2))
    results = ranks.run(use_another_order, run, rank, 2)
    training.assert_raised([failure for failure, _, _ in results], "blocks.", f"rank {rank}")
    for failure, same, parameters in results:
        assert failure.is_a(OutOfOrder) or failure.is_a(PoplarError), failure
        assert same, "the failed step changed parameters"
        training.assert_close(parameters, reference.train(recipe).parameters)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_order_is_free_or_raises_where_parameters_are_replicated(ranks: Pool, stage: int) -> None:
    """All ranks raise, or the gradient is exact; never a hang."""
    recipe = Recipe(batches=(12,) * 3)
    steered = replace(
        recipe,
        steering=(
            Steering(0, 4, "order", "forward"),
            Steering(4, 7, "order", "reversed", steps=(2,)),
            Steering(7, 12, "order", "forward"),
        ),
    )
    results = ranks.run(use_another_order, Run(recipe, plan_of(stage, 4, 3, 3, 2)), 1, 2)
    failures = [failure for failure, _, _ in results if failure is not None]
    expected = reference.train(recipe if failures else steered).parameters
    assert len(failures) in (0, len(results)), failures
    for failure, same, parameters in results:
        assert same == (failure is not None)
        training.assert_close(parameters, expected)


@pytest.mark.parametrize("stage", STAGES)
def test_named_and_found_units_train_equally(ranks: Pool, stage: int) -> None:
    recipe = Recipe(batches=(12,) * 2, max_norm=0.1)
    plan = plan_of(stage, 4, 3, 3, 2)
    given = Run(recipe, plan, engine={"units": ["blocks.0", "blocks.2", "norm"]})
    assert_exact(ranks.run(training.train, given), recipe)


def count_passes(run: Run) -> int:
    """Number of micro-batches that the loop yields."""
    model, optimizer = training.prepare(run)
    loss = training.loss_of(run.recipe)
    yielded = 0
    for micro_batch in optimizer.micro_batches(training.batch_of(run, 0)):
        yielded += 1
        assert len(micro_batch["tokens"]) > 0
        loss(model, micro_batch).backward()
    optimizer.step()
    optimizer.zero_grad()
    return yielded


@pytest.mark.parametrize("stage", STAGES)
def test_empty_passes_run_without_the_user(ranks: Pool, stage: int) -> None:
    micro_batches = ((0, 1, 2), (0, 0, 0), (3, 3, 3), (0, 0, 1))
    plan = Plan(stage=stage, global_batch=13, micro_batches=micro_batches, shares=SHARES)
    run = Run(Recipe(batches=(13,)), plan)
    assert ranks.run(count_passes, run) == [2, 0, 3, 1]


def train_twice(run: Run) -> bool:
    """Two trainings in one process do not affect each other."""
    first, second = training.train(run), training.train(run)
    assert_same(first.parameters, second.parameters)
    return first.losses == second.losses


@pytest.mark.parametrize("stage", STAGES)
def test_repeated_runs_give_the_same_bits(ranks: Pool, stage: int) -> None:
    run = Run(Recipe(batches=(12,) * 2), plan_of(stage, 4, 3, 3, 2))
    assert all(ranks.run(train_twice, run))


class Detaching(nn.Module):
    """Blocks whose outputs may be detached, after a first call without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))

    def forward(self, x: Tensor, detached: int | None) -> Tensor:
        for index, block in enumerate(self.blocks):
            x = x + torch.tanh(block(x).detach() if index == detached else block(x))
        return x


def distance_to_a_target_without_gradient(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    detached = int(batch["detached"][0])
    with torch.no_grad():
        target = model(3 * batch["x"], None)
    return (model(batch["x"], None if detached < 0 else detached) - target).square().mean()


def train_detaching(
    stage: int, detached: Sequence[int], frozen: Sequence[int] = ()
) -> list[Tensor]:
    """`frozen`: these blocks are frozen in the first step."""
    torch.manual_seed(0)
    model = Detaching()
    inputs = torch.randn(3, len(detached), 2, 5)
    rank = harness.rank()
    plan = Plan.even(len(detached), 2 * len(detached), 2, stage)
    optimizer = HeteroZeroOptimizer(
        model, torch.optim.SGD, plan=plan, process_group=harness.group(), lr=0.1
    )
    for number, step in enumerate(inputs):
        for index in frozen:
            model.blocks[index].requires_grad_(number > 0)
        batch = {"x": step[rank], "detached": torch.full((2,), detached[rank])}
        optimizer.train_step(distance_to_a_target_without_gradient, batch)
    with optimizer.full_parameters():
        return [parameter.detach().clone() for parameter in model.parameters()]


def detaching_alone(detached: Sequence[int], frozen: Sequence[int] = ()) -> list[Tensor]:
    torch.manual_seed(0)
    model = Detaching()
    inputs = torch.randn(3, len(detached), 2, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number, step in enumerate(inputs):
        for index in frozen:
            model.blocks[index].requires_grad_(number > 0)
        for x, index in zip(step, detached, strict=True):
            batch = {"x": x, "detached": torch.full((2,), index)}
            (distance_to_a_target_without_gradient(model, batch) / len(detached)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("detached", [(1, -1, -1, -1), (-1, 0, 2, 1), (2, 1, -1, 0)])
@pytest.mark.parametrize("stage", [2, 3])
def test_gradients_may_stop_at_another_unit_on_each_rank(
    ranks: Pool, stage: int, detached: tuple[int, ...]
) -> None:
    expected = detaching_alone(detached)
    for trained in ranks.run(train_detaching, stage, detached):
        for mine, theirs in zip(trained, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("frozen", "detached"),
    [((0, 1), (-1,) * 4), ((1, 2), (-1,) * 4), ((0, 1), (1, -1, 0, -1)), ((1, 2), (2, 1, -1, -1))],
)
@pytest.mark.parametrize("stage", [2, 3])
def test_blocks_may_be_unfrozen(
    ranks: Pool, stage: int, frozen: tuple[int, ...], detached: tuple[int, ...]
) -> None:
    expected = detaching_alone(detached, frozen)
    for trained in ranks.run(train_detaching, stage, detached, frozen):
        for mine, theirs in zip(trained, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


class WithAnAdapter(nn.Module):
    """Its adapter belongs to no block, so to the root unit."""

    def __init__(self) -> None:
        super().__init__()
        self.adapter = nn.Linear(64, 64)
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))


def adapted_first_on_rank_0(model: WithAnAdapter, batch: dict[str, Tensor]) -> Tensor:
    x, is_first = batch["x"], harness.rank() == 0
    if is_first:
        x = model.adapter(x)
    for block in model.blocks:
        x = block(x)
    if not is_first:
        x = model.adapter(x)
    return x.square().mean()


def take_a_first_step(communicator: str) -> float:
    with on_host("aabb"[harness.rank()]):
        optimizer = HeteroZeroOptimizer(
            WithAnAdapter(),
            torch.optim.SGD,
            plan=Plan.even(4, 4, 1, 3),
            process_group=harness.group(),
            communicator=communicator,
            units=["blocks.0", "blocks.1", "blocks.2"],
            timeout=timedelta(seconds=10),
            lr=0.1,
        )
    batch = {"x": torch.randn(1, 64)}
    return float(optimizer.train_step(adapted_first_on_rank_0, batch).loss)


@pytest.mark.parametrize("communicator", ["hierarchical", "hierarchical:process_group", "staged"])
def test_the_root_unit_may_be_needed_before_or_after_the_blocks(communicator: str) -> None:
    """In the first pass rank 0 waits for it while the others have not reached it."""
    losses = harness.one_off(4, take_a_first_step, communicator)
    assert len(set(losses)) == 1, losses


class Decoder(nn.Linear):
    """A block of the language model."""


class WithATower(nn.Module):
    """Its tower, which only batches with images use, runs first and is registered last."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Decoder(6, 6) for _ in range(3))
        self.tower = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))

    def forward(self, x: Tensor, image: Tensor | None) -> Tensor:
        for layer in self.tower if image is not None else ():
            image = torch.tanh(layer(image))
        x = x if image is None else x + image
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return x


RANKS_WITH_IMAGES: tuple[Sequence[int], ...] = ((1,), (0, 2), (), (1, 3))
"""By step. The leader has none in the first."""


def loss_with_images(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    image = batch["image"] if bool(batch["has_image"][0]) else None
    return model(batch["x"], image).square().mean()


def batches_with_images() -> list[list[dict[str, Tensor]]]:
    """By step and rank."""
    generator = torch.Generator().manual_seed(1)
    return [
        [
            {
                "x": torch.randn(2, 6, generator=generator),
                "image": torch.randn(2, 6, generator=generator),
                "has_image": torch.full((2,), rank in having),
            }
            for rank in range(4)
        ]
        for having in RANKS_WITH_IMAGES
    ]


def train_with_images(unit: type[nn.Module]) -> tuple[list[Failure], list[Tensor]]:
    torch.manual_seed(0)
    model = WithATower().to(harness.device())
    optimizer = HeteroZeroOptimizer(
        model,
        torch.optim.SGD,
        plan=Plan.even(4, 8, 2, 3),
        process_group=harness.group(),
        compute_dtype=torch.float32,
        units=[unit],
        lr=0.1,
    )
    with harness.catching() as caught:
        for step in batches_with_images():
            optimizer.train_step(loss_with_images, training.on_device(step[harness.rank()]))
    with optimizer.full_parameters():
        return caught, [parameter.detach().cpu().clone() for parameter in model.parameters()]


def test_a_module_that_runs_first_for_some_data_may_belong_to_the_root(ranks: Pool) -> None:
    torch.manual_seed(0)
    model = WithATower()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in batches_with_images():
        for batch in step:
            (loss_with_images(model, batch) / 4).backward()
        optimizer.step()
        optimizer.zero_grad()
    for caught, trained in ranks.run(train_with_images, Decoder):
        assert not caught
        for mine, theirs in zip(trained, model.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs.detach(), rtol=1e-5, atol=1e-6)


def test_a_unit_that_runs_first_for_some_data_is_an_error_that_names_the_remedy(
    ranks: Pool,
) -> None:
    failures = [caught[0] for caught, _ in ranks.run(train_with_images, nn.Linear)]
    training.assert_raised(failures, "leave it out of the units", "rank 1")
