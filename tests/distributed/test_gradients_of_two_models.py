"""The loss in a step of one optimizer also has gradients of a model that another one trains.

Those have the weight 1 / ranks. So they are right if every rank runs one pass in that step, with
the same number of samples. Else all ranks raise, without waiting for each other.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import pytest
import ranks as harness
import torch
from ranks import Failure, Pool
from torch import Tensor, nn
from training import STAGES, assert_raised

from poplar import HeteroZeroOptimizer, Plan

RANKS = 2
SAMPLES = 8
FORMS = ("train_step", "own loop")

Sizes = tuple[tuple[int, ...], ...]
Parameters = list[list[Tensor]]


class Network(nn.Module):
    """Two units, and a head in the root unit."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.blocks = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)])
        self.head = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x))


class Generator(Network):
    pass


class Discriminator(Network):
    pass


def plan_of(stage: int, sizes: Sizes) -> Plan:
    return Plan(stage=stage, global_batch=SAMPLES, micro_batches=sizes, shares=(0.7, 0.3))


def batch_of(step: int, sizes: Sizes) -> Tensor | None:
    """This rank's part of a global batch."""
    whole = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(step))
    parts = whole.split([sum(passes) for passes in sizes])
    return parts[harness.rank()].to(harness.device()) if sum(sizes[harness.rank()]) else None


def optimizer_of(model: nn.Module, stage: int, sizes: Sizes | None) -> HeteroZeroOptimizer:
    plan = {"stage": stage} if sizes is None else {"plan": plan_of(stage, sizes)}
    options = {"process_group": harness.group(), "timeout": timedelta(seconds=30), "lr": 0.1}
    units = ["blocks.0", "blocks.1"]
    return HeteroZeroOptimizer(model, torch.optim.SGD, units=units, **plan, **options)


class Pair:
    """A generator and a discriminator with their optimizers on this rank."""

    def __init__(
        self,
        stage: int,
        sizes: Sizes,
        *,
        planned: bool = True,
        other: Sizes | None = None,
        other_stage: int | None = None,
    ) -> None:
        """
        Args:
            sizes: of the passes of the generator's steps, by rank.
            planned: the generator's optimizer has a plan of these.
            other: those in the plan of the discriminator's optimizer; None: it has no plan.
            other_stage: of the discriminator's optimizer; default: the same.
        """
        self.sizes = sizes
        self.generator = Generator(0).to(harness.device())
        self.discriminator = Discriminator(1).to(harness.device())
        self.of_generator = optimizer_of(self.generator, stage, sizes if planned else None)
        other_stage = stage if other_stage is None else other_stage
        self.of_discriminator = optimizer_of(self.discriminator, other_stage, other)

    def loss_of(self, generator: nn.Module, x: Tensor) -> Tensor:
        return self.discriminator(generator(x)).square().mean()

    def take_step(self, form: str, step: int, **weight: Any) -> None:
        batch = batch_of(step, self.sizes)
        if form == "train_step":
            self.of_generator.train_step(self.loss_of, batch, **weight)
            return
        with self.of_generator.micro_batches(batch, **weight) as micro_batches:
            for micro_batch in micro_batches:
                self.loss_of(self.generator, micro_batch).backward()
        self.of_generator.step()

    @contextlib.contextmanager
    def frozen_discriminator(self) -> Iterator[None]:
        self.discriminator.requires_grad_(False)
        try:
            with self.of_discriminator.full_parameters():
                yield
        finally:
            self.discriminator.requires_grad_(True)

    def parameters(self) -> Parameters:
        with self.of_generator.full_parameters(), self.of_discriminator.full_parameters():
            models = (self.generator, self.discriminator)
            return [[p.detach().cpu().clone() for p in model.parameters()] for model in models]


def trained_with_torch(*, steps: int, trains_discriminator: bool) -> Parameters:
    models = Generator(0), Discriminator(1)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    for step in range(steps):
        batch = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(step))
        nn.Sequential(*models)(batch).square().mean().backward()
        for optimizer in optimizers if trains_discriminator else optimizers[:1]:
            optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()
    return [[p.detach() for p in model.parameters()] for model in models]


EVEN = ((4,), (4,))


def train_both(stage: int, form: str, other: Sizes | None) -> Parameters:
    pair = Pair(stage, EVEN, other=other)
    for step in range(3):
        pair.take_step(form, step)
        pair.of_discriminator.step()
    return pair.parameters()


@pytest.mark.parametrize("other", [None, EVEN, ((6,), (2,))], ids=["no plan", "even", "uneven"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("stage", STAGES)
def test_one_even_pass_trains_both(ranks: Pool, stage: int, form: str, other: Sizes | None) -> None:
    expected = trained_with_torch(steps=3, trains_discriminator=True)
    for trained in ranks.run(train_both, stage, form, other, ranks=RANKS):
        torch.testing.assert_close(trained, expected, rtol=1e-5, atol=1e-6)


MORE_PASSES = "a rank with more passes"
CASES: dict[str, dict[str, Any]] = {
    "uneven": {"sizes": ((6,), (2,))},
    "several passes": {"sizes": ((2, 2), (2, 2))},
    MORE_PASSES: {"sizes": ((4,), (2, 2))},
    "a rank without samples": {"sizes": ((8,), (0,))},
    "a rank without samples, sharded discriminator": {"sizes": ((8,), (0,)), "other_stage": 3},
    "a pass without samples": {"sizes": ((4, 2), (2, 0))},
    "uneven, no plan": {"sizes": ((6,), (2,)), "planned": False},
}


def train_wrongly(
    stage: int, form: str, case: dict[str, Any], weight: dict[str, Any]
) -> tuple[Failure | None, Parameters]:
    """What is raised in the second of three steps, in which the discriminator is not frozen."""
    pair = Pair(stage, **case)
    with pair.frozen_discriminator():
        pair.take_step(form, 0)
    with harness.catching() as caught:
        pair.take_step(form, 1, **weight)
        pair.of_discriminator.step()
    with pair.frozen_discriminator():
        pair.take_step(form, 1)
    return (caught or [None])[0], pair.parameters()


def assert_named(answers: Sequence[tuple[Failure | None, Parameters]]) -> None:
    """All ranks have raised without a wait; the error names both models and what to do."""
    failures = [failure for failure, _ in answers]
    assert_raised(failures)
    assert not any("Timeout" in failure.type for failure in failures), failures
    for text in (
        "gradients of Discriminator from a step of the optimizer of another model, Generator",
        "Freeze this model, Discriminator, in that step: its requires_grad_(False) before it",
    ):
        assert any(text in failure.message for failure in failures), failures
    expected = trained_with_torch(steps=2, trains_discriminator=False)
    for _, trained in answers:
        torch.testing.assert_close(trained, expected, rtol=1e-5, atol=1e-6)


STEPS = [(stage, case) for stage in STAGES for case in CASES if stage < 2 or case != MORE_PASSES]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("stage", "case"), STEPS)
def test_other_steps_raise_on_all_ranks(ranks: Pool, stage: int, form: str, case: str) -> None:
    assert_named(ranks.run(train_wrongly, stage, form, CASES[case], {}, ranks=RANKS))


def count_rows(x: Tensor) -> float:
    return float(len(x))


@pytest.mark.parametrize(
    "weight", [{"weight": count_rows}, {"loss": "sum"}], ids=["weight", "loss"]
)
def test_other_weights_raise_on_all_ranks(ranks: Pool, weight: dict[str, Any]) -> None:
    assert_named(ranks.run(train_wrongly, 2, "train_step", {"sizes": EVEN}, weight, ranks=RANKS))


def weighted_step_of_one_rank() -> Parameters:
    generator, discriminator = Generator(0), Discriminator(1)
    options: dict[str, Any] = {"process_group": harness.group(), "stage": 0, "lr": 0.1}
    optimizers = [
        HeteroZeroOptimizer(model.to(harness.device()), torch.optim.SGD, **options)
        for model in (generator, discriminator)
    ]
    batch = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(0))
    optimizers[0].train_step(
        lambda model, x: discriminator(model(x)).square().mean(),
        batch.to(harness.device()),
        weight=lambda x: 3.0 * len(x),
    )
    optimizers[1].step()
    return [[p.detach().cpu() for p in m.parameters()] for m in (generator, discriminator)]


def test_one_rank_has_all_of_the_weight(ranks: Pool) -> None:
    found = ranks.run(weighted_step_of_one_rank, ranks=1)[0]
    expected = trained_with_torch(steps=1, trains_discriminator=True)
    for own, others in zip(found, expected, strict=True):
        torch.testing.assert_close(own, others)


def generate_in_a_step(
    stage: int, form: str, sizes: Sizes
) -> tuple[Failure | None, list[list[Tensor]]]:
    """Call the sharded generator without gradients in two steps of the discriminator.

    Returns what the first raises; the second runs in `full_parameters()`.
    """
    pair = Pair(3, EVEN, other=sizes, other_stage=stage)

    def loss_fn(discriminator: nn.Module, x: Tensor) -> Tensor:
        with torch.no_grad():
            made = pair.generator(x)
        return discriminator(made).square().mean()

    def take_step() -> None:
        optimizer, batch = pair.of_discriminator, batch_of(0, sizes)
        if form == "train_step":
            optimizer.train_step(loss_fn, batch)
            return
        with optimizer.micro_batches(batch) as micro_batches:
            for micro_batch in micro_batches:
                loss_fn(pair.discriminator, micro_batch).backward()
        optimizer.step()

    with harness.catching() as caught:
        take_step()
    with pair.of_generator.full_parameters():
        take_step()
    return (caught or [None])[0], pair.parameters()


NOT_ON_ALL_RANKS = {
    "a rank without samples": ((8,), (0,)),
    "a pass without samples": ((4, 2), (2, 0)),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("case", NOT_ON_ALL_RANKS)
def test_a_sharded_model_is_not_called_where_ranks_would_wait(
    ranks: Pool, stage: int, form: str, case: str
) -> None:
    answers = ranks.run(generate_in_a_step, stage, form, NOT_ON_ALL_RANKS[case], ranks=RANKS)
    failures = [failure for failure, _ in answers]
    assert_raised(failures)
    assert not any("Timeout" in failure.type for failure in failures), failures
    for text in ("parameters of Generator are sharded", "with optimizer.full_parameters():"):
        assert any(text in failure.message for failure in failures), failures
    generator, discriminator = Generator(0), Discriminator(1)
    whole = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.SGD(discriminator.parameters(), lr=0.1)
    discriminator(generator(whole).detach()).square().mean().backward()
    optimizer.step()
    expected = [[p.detach() for p in model.parameters()] for model in (generator, discriminator)]
    for _, trained in answers:
        torch.testing.assert_close(trained, expected, rtol=1e-5, atol=1e-6)
