"""`evaluate` gives the mean, keeps all modes, and waits for ranks with more batches."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from datetime import timedelta

import pytest
import ranks as harness
import reference
import torch
import training
from communicators import on_host
from models import ModelSpec
from ranks import Pool
from reference import Recipe
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from training import STAGES, Run

from poplar import HeteroBatchSampler, HeteroZeroOptimizer, Plan


class Merging(nn.Linear):
    """A layer whose `train` does more than set a flag, as adapters that merge their weights."""

    merged = False

    def train(self, mode: bool = True) -> Merging:
        self.merged = not mode
        return super().train(mode)


def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def evaluate_once(stage: int) -> list[tuple[bool, bool]]:
    shared = nn.Dropout(0.5)
    model = nn.Sequential(
        Merging(8, 8), nn.Sequential(shared, nn.Dropout(0.5)), nn.Sequential(shared, Merging(8, 8))
    ).to(harness.device())
    model[1].eval()
    model[2][1].eval()
    optimizer = HeteroZeroOptimizer(
        model, torch.optim.SGD, stage=stage, process_group=harness.group(), lr=0.1
    )
    before = modes(model)
    optimizer.evaluate(loss_fn, [torch.ones(2, 8, device=harness.device())])
    assert modes(model) == before
    return before


def modes(model: nn.Module) -> list[tuple[bool, bool]]:
    return [(module.training, getattr(module, "merged", False)) for module in model.modules()]


@pytest.mark.parametrize("stage", [0, 3])
def test_every_module_has_its_mode_afterwards(ranks: Pool, stage: int) -> None:
    ranks.run(evaluate_once, stage, ranks=2)


def evaluate_on_one_rank(stage: int) -> tuple[float, float]:
    """The loss, and the seconds of waiting that count for a step."""
    model = nn.Linear(8, 8).to(harness.device())
    optimizer = HeteroZeroOptimizer(
        model,
        torch.optim.SGD,
        stage=stage,
        process_group=harness.group(),
        timeout=timedelta(seconds=2),
        lr=0.1,
    )

    def slow(model: nn.Module, batch: Tensor) -> Tensor:
        time.sleep(0.4)
        return loss_fn(model, batch)

    batches = [torch.ones(2, 8, device=harness.device())] * (8 if harness.rank() == 0 else 0)
    loss = optimizer.evaluate(slow, batches)
    return loss, optimizer._training.engine.strategy.timing.step.waited_seconds()


@pytest.mark.parametrize("stage", STAGES)
def test_a_rank_without_batches_waits_longer_than_the_deadline(ranks: Pool, stage: int) -> None:
    (first, *waits), (second, *others) = ranks.run(evaluate_on_one_rank, stage, ranks=2)
    assert first == second
    assert waits == others == [0.0]  # of no step; on a GPU they would be those of the last one


def evaluate_with_a_fault(stage: int, place: str) -> str:
    """Rank 1 fails at its second batch or in its first loss; returns what a rank raises."""
    model = nn.Sequential(nn.Linear(8, 8), Merging(8, 8)).to(harness.device())
    group = harness.group()
    optimizer = HeteroZeroOptimizer(
        model, torch.optim.SGD, stage=stage, process_group=group, lr=0.1
    )
    batch, before = torch.ones(2, 8, device=harness.device()), modes(model)
    fails = harness.rank() == 1

    def loader() -> Iterator[Tensor]:
        yield batch
        if fails and place == "loader":
            raise KeyError("lost")
        yield from [batch] * 2

    def faulty(model: nn.Module, batch: Tensor) -> Tensor:
        if fails and place == "loss":
            raise KeyError("lost")
        return loss_fn(model, batch)

    with harness.catching() as caught:
        optimizer.evaluate(faulty, loader())
    assert modes(model) == before
    optimizer.evaluate(loss_fn, [batch])
    return caught[0].type


@pytest.mark.parametrize("place", ["loader", "loss"])
@pytest.mark.parametrize("stage", [0, 3])
def test_a_rank_that_fails_in_evaluate_does_not_leave_the_others_waiting(
    ranks: Pool, stage: int, place: str
) -> None:
    """Every module has its mode afterwards, and the optimizer can be used again."""
    assert ranks.run(evaluate_with_a_fault, stage, place, ranks=2) == ["RankFailed", "KeyError"]


def evaluate_by(plan: Plan, weights: Sequence[float] | None) -> tuple[float, int]:
    """The mean over a dataset whose samples are 0 to 11, and the next epoch of its sampler.

    Args:
        plan: divides the samples among the ranks.
        weights: of the samples; None: no `weight=`.
    """
    model = nn.Linear(1, 1).to(harness.device())
    optimizer = HeteroZeroOptimizer(
        model, torch.optim.SGD, plan=plan, process_group=harness.group(), lr=0.1
    )
    samples = torch.arange(12.0, device=harness.device())
    sampler = HeteroBatchSampler(12, plan, rank=harness.rank(), shuffle=False)
    loader = DataLoader(TensorDataset(samples), batch_sampler=sampler)
    counted = samples if weights is None else torch.tensor(weights, device=samples.device)

    def weight(batch: Sequence[Tensor]) -> Tensor:
        return counted[batch[0].long()].sum()

    def loss(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        model(batch[0][:, None])
        if weights is None:
            return batch[0].mean()
        return (batch[0] * counted[batch[0].long()]).sum() / weight(batch)

    mean = optimizer.evaluate(loss, loader, weight=None if weights is None else weight)
    next(iter(sampler))
    return mean, sampler.epoch


@pytest.mark.parametrize("stage", STAGES)
def test_a_rank_without_samples_in_the_plan_counts_none(ranks: Pool, stage: int) -> None:
    plan = Plan(
        stage=stage, global_batch=4, micro_batches=((2, 1), (0, 0), (1, 0)), shares=(0.5, 0.3, 0.2)
    )
    for mean, epoch in ranks.run(evaluate_by, plan, None, ranks=3):
        assert mean == pytest.approx(5.5)
        assert epoch == 1


def test_batches_of_weight_0_count_nothing(ranks: Pool) -> None:
    plan = Plan.even(2, 4, 2, stage=1)
    weights = [0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 3.0]
    for mean, _ in ranks.run(evaluate_by, plan, weights, ranks=2):
        assert mean == pytest.approx((2 + 3 + 8 + 3 * 11) / 6)


def evaluate_wrongly(plan: Plan, weight: float) -> str:
    with pytest.raises(ValueError, match="weight") as raised:
        evaluate_by(plan, [weight] + [1.0] * 11)
    return str(raised.value)


@pytest.mark.parametrize("weight", [-5.0, float("nan"), float("inf")])
def test_a_weight_that_is_none_raises_on_all_ranks(ranks: Pool, weight: float) -> None:
    for message in ranks.run(evaluate_wrongly, Plan.even(2, 4, 2, stage=1), weight, ranks=2):
        assert "negative or not finite" in message


def train_after_an_evaluation_in_inference_mode(run: Run) -> dict[str, Tensor]:
    with on_host(harness.rank() // 2):
        model, optimizer = training.prepare(run)
    with torch.inference_mode():
        optimizer.evaluate(training.loss_of(run.recipe), [training.batch_of(run, 0)])
    training.take_step(run, model, optimizer, 0)
    return training.whole_parameters(model, optimizer)


@pytest.mark.parametrize("transport", ["hierarchical:process_group", "staged"])
def test_training_goes_on_after_an_evaluation_in_inference_mode(
    ranks: Pool, transport: str
) -> None:
    """These transports keep host memory, which the evaluation takes first."""
    recipe = Recipe(spec=ModelSpec(blocks=2), batches=(12,))
    run = Run(recipe, training.uneven(3), engine={"communicator": transport})
    for parameters in ranks.run(train_after_an_evaluation_in_inference_mode, run):
        training.assert_close(parameters, reference.train(recipe).parameters)


def evaluate_trained_statistics(stage: int) -> tuple[float, float]:
    """The mean of `evaluate`, and that of a plain model with the weights and buffers of rank 0."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).to(harness.device())
    plan = Plan(stage=stage, global_batch=4, micro_batches=((4,), (0,)), shares=(0.5, 0.5))
    optimizer = HeteroZeroOptimizer(
        model,
        torch.optim.SGD,
        plan=plan,
        process_group=harness.group(),
        allow_forward_state=True,
        lr=0.1,
    )
    values = torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(1)).to(harness.device())
    for _ in range(3):
        optimizer.train_step(loss_fn, values[0] if harness.rank() == 0 else None)
    found = optimizer.evaluate(loss_fn, [values[1 + harness.rank()]])
    with optimizer.full_parameters(), torch.no_grad():
        whole = loss_fn(model.eval(), values[1:].flatten(0, 1)).item()
    return found, whole


@pytest.mark.parametrize("stage", STAGES)
def test_a_rank_without_samples_evaluates_with_the_trained_buffers(ranks: Pool, stage: int) -> None:
    (first, expected), (second, _) = ranks.run(evaluate_trained_statistics, stage, ranks=2)
    assert first == second
    assert first == pytest.approx(expected, rel=1e-5)


def forces(model: nn.Module, batch: Tensor) -> Tensor:
    """The mean square of the gradient of an energy with respect to its inputs."""
    x = batch.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    return gradient.square().sum(1).mean()


def evaluate_forces(stage: int) -> tuple[str, float, float]:
    """The error without gradients; the mean with them, and that of one process."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)).to(harness.device())
    batches = torch.randn(3, 4, 8).to(harness.device())
    expected = float(torch.stack([forces(model, batch) for batch in batches]).mean())
    optimizer = HeteroZeroOptimizer(
        model, torch.optim.SGD, stage=stage, process_group=harness.group(), lr=0.1
    )
    own = batches[:1] if harness.rank() else batches[1:]
    with harness.catching() as caught:
        optimizer.evaluate(forces, own)

    def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
        with torch.enable_grad():
            return forces(model, batch)

    return caught[0].message, optimizer.evaluate(loss_fn, own), expected


@pytest.mark.parametrize("stage", STAGES)
def test_a_loss_that_computes_gradients_enables_them(ranks: Pool, stage: int) -> None:
    for error, mean, expected in ranks.run(evaluate_forces, stage, ranks=2):
        assert "`with torch.enable_grad():`" in error
        assert mean == pytest.approx(expected, rel=1e-5)
