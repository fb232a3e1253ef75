"""Unusual uses of a model or a step: the result is exact, or an error is clear.

If a step raises, nothing has been applied, and the next correct step equals the reference.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import models
import pytest
import ranks as harness
import reference
import safetensors.torch
import torch
import training
from communicators import memory_cache
from models import ModelSpec
from ranks import Failure, Pool
from reference import Recipe, Trajectory
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from training import (
    IDLE_RANK,
    STAGES,
    TWO_PASSES,
    UNEVEN,
    Answer,
    Run,
    assert_close,
    assert_exact,
    assert_raised,
    assert_same,
    assert_unchanged,
    optimizer_of,
    uneven,
)

import poplar
from poplar import HeteroZeroOptimizer, Plan, RankFailed, UnitPlan

RECIPE = Recipe(batches=(12, 12))
BAD = 2
"""The rank that differs, if only one does."""

Parameters = dict[str, Tensor]


def one_pass_each(stage: int) -> Plan:
    return Plan.manual("3,3,3,3", stage=stage, shares=UNEVEN)


def train_alone(
    model: nn.Module, recipe: Recipe, loss: Callable[[nn.Module, Any], Tensor]
) -> Parameters:
    """Train in one process on the global batch, for cases that a recipe does not cover."""
    optimizer = recipe.optimizer_class(model.parameters(), **dict(recipe.options))
    for step in range(len(recipe.batches)):
        optimizer.zero_grad()
        loss(model, recipe.batch(step)).backward()
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}


# Models


class StoresLoss(models.Block):
    """Uses a parameter after its output was computed, for a loss that it does not return."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        self.stored_loss = (self.norm1.weight * out).square().mean()
        return out


def add_stored_losses(run: Run, affected: tuple[int, ...]) -> Answer:
    model = models.build(run.recipe.spec).to(harness.device())
    for block in model.blocks:
        block.__class__ = StoresLoss
    optimizer = optimizer_of(model, run)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        value = models.mean_over_samples(model, batch)
        if harness.rank() in affected:
            value = value + sum(block.stored_loss for block in model.blocks)
        return value

    def act() -> None:
        optimizer.train_step(loss, training.batch_of(run, 1))

    return training.between_good_steps(run, model, optimizer, act)


@pytest.mark.parametrize("affected", [(0, 1, 2, 3), (BAD,)], ids=["all ranks", "one rank"])
def test_stage_3_stored_loss_raises_before_the_update(
    ranks: Pool, affected: tuple[int, ...]
) -> None:
    failures = assert_unchanged(
        ranks.run(add_stored_losses, Run(RECIPE, uneven(3)), affected), RECIPE
    )
    assert_raised(failures, kind=RuntimeError)
    for rank, failure in enumerate(failures):
        assert failure.is_a(RankFailed) == (rank not in affected), failure


class Biased(nn.Module):
    """As in T5, the first block computes a bias, and all blocks use it and return it."""

    class Block(nn.Module):
        def __init__(self, first: bool):
            super().__init__()
            self.up, self.down = nn.Linear(13, 37), nn.Linear(37, 13)
            self.bias = nn.Linear(13, 13) if first else None

        def forward(self, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
            if self.bias is not None:
                bias = self.bias(x).tanh()
            return x + self.down(F.gelu(self.up(x))) * bias, bias

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(models.VOCABULARY, 13)
        self.blocks = nn.ModuleList(Biased.Block(index == 0) for index in range(4))
        self.head = nn.Linear(13, models.VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x, bias = self.embedding(tokens), None
        for block in self.blocks:
            x, bias = block(x, bias)
        return self.head(x)


class Layered(nn.Module):
    """As in models of lucidrains: a layer is a container, and the model calls its parts itself."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(models.VOCABULARY, 13)
        self.layers = nn.ModuleList(
            nn.ModuleList([nn.Sequential(nn.Linear(13, 37), nn.GELU()), nn.Linear(37, 13)])
            for _ in range(3)
        )
        self.head = nn.Linear(13, models.VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for up, down in self.layers:
            x = x + down(up(x))
        return self.head(x)


def seeded(build: Callable[[], nn.Module]) -> nn.Module:
    """Build with the same random numbers in every process."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return build()


def train_model(run: Run, build: Callable[[], nn.Module]) -> Parameters:
    model = seeded(build).to(harness.device())
    optimizer = optimizer_of(model, run)
    for step in range(len(run.recipe.batches)):
        training.take_step(run, model, optimizer, step)
    return training.whole_parameters(model, optimizer)


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("build", [Biased, Layered])
def test_models_of_unusual_structure_are_exact(
    ranks: Pool, build: Callable[[], nn.Module], stage: int
) -> None:
    expected = train_alone(seeded(build), RECIPE, models.mean_over_samples)
    for parameters in ranks.run(train_model, Run(RECIPE, uneven(stage)), build):
        assert_close(parameters, expected)


def train_with_different_seeds(run: Run) -> tuple[Parameters, Parameters]:
    model = models.build(run.recipe.spec, seed=harness.rank())
    model.register_buffer("noise", torch.full((61,), float(harness.rank())))
    model.blocks[0].register_buffer("count", torch.tensor(harness.rank()))
    optimizer = optimizer_of(model.to(harness.device()), run)
    for step in range(len(run.recipe.batches)):
        training.take_step(run, model, optimizer, step)
    buffers = {name: buffer.cpu() for name, buffer in model.named_buffers()}
    return training.whole_parameters(model, optimizer), buffers


@pytest.mark.parametrize("stage", STAGES)
def test_frozen_parameters_and_buffers_come_from_rank_0(ranks: Pool, stage: int) -> None:
    recipe = replace(RECIPE, spec=ModelSpec(frozen=True))
    answers = ranks.run(train_with_different_seeds, Run(recipe, uneven(stage)))
    start = dict(models.build(recipe.spec).named_parameters())
    for parameters, buffers in answers:
        assert_close(parameters, reference.train(recipe).parameters)
        assert_same(parameters, answers[0][0])
        for frozen in ("positions", "blocks.1.norm1.weight"):
            assert torch.equal(parameters[frozen], start[frozen])
        assert torch.equal(buffers["noise"], torch.zeros(61))
        assert buffers["blocks.0.count"] == 0


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(models.VOCABULARY, 13)
        self.blocks = nn.ModuleList(nn.Linear(13, 13) for _ in range(3))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x).tanh()
        return x


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(13, 13) for _ in range(2))
        self.head = nn.Linear(13, models.VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x).tanh()
        return self.head(x)


DECODER_RECIPE = replace(RECIPE, optimizer="SGD", options=(("lr", 0.1), ("momentum", 0.9)))


def train_two_models(run: Run) -> tuple[Parameters, Parameters]:
    """Train two models with two optimizers and one backward."""
    encoder, decoder = seeded(Encoder).to(harness.device()), seeded(Decoder).to(harness.device())
    first = optimizer_of(encoder, run)
    second = optimizer_of(decoder, replace(run, recipe=DECODER_RECIPE))
    both = nn.Sequential(encoder, decoder)
    for step in range(len(run.recipe.batches)):
        models.mean_over_samples(both, training.batch_of(run, step)).backward()
        for optimizer in (first, second):
            optimizer.step()
        for optimizer in (first, second):
            optimizer.zero_grad()
    return training.whole_parameters(encoder, first), training.whole_parameters(decoder, second)


def train_two_models_alone() -> tuple[Parameters, Parameters]:
    pair = seeded(Encoder), seeded(Decoder)
    optimizers = [
        recipe.optimizer_class(model.parameters(), **dict(recipe.options))
        for recipe, model in zip((RECIPE, DECODER_RECIPE), pair, strict=True)
    ]
    for step in range(len(RECIPE.batches)):
        models.mean_over_samples(nn.Sequential(*pair), RECIPE.batch(step)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    encoder, decoder = (
        {name: p.detach() for name, p in model.named_parameters()} for model in pair
    )
    return encoder, decoder


@pytest.mark.parametrize("stage", STAGES)
def test_two_optimizers_with_one_backward(ranks: Pool, stage: int) -> None:
    expected = train_two_models_alone()
    for trained in ranks.run(train_two_models, Run(RECIPE, one_pass_each(stage))):
        for parameters, wanted in zip(trained, expected, strict=True):
            assert_close(parameters, wanted)


# Batches and scales


def train_in_fp16(run: Run) -> tuple[list[float], list[bool], Parameters]:
    model, optimizer = training.prepare(run)
    results = [
        optimizer.train_step(training.loss_of(run.recipe), training.batch_of(run, step))
        for step in range(len(run.recipe.batches))
    ]
    losses, skipped = [result.loss for result in results], [result.skipped for result in results]
    return losses, skipped, training.whole_parameters(model, optimizer)


@pytest.mark.parametrize("stage", [1, 3])
def test_fp16_on_rank_without_samples(ranks: Pool, stage: int) -> None:
    recipe = replace(RECIPE, batches=(12,) * 4)
    run = Run(recipe, uneven(stage, IDLE_RANK), engine={"compute_dtype": torch.float16})
    answers = ranks.run(train_in_fp16, run)
    start = dict(models.build(recipe.spec).half().named_parameters())
    for losses, skipped, parameters in answers:
        assert losses == answers[0][0]
        assert losses[0] == pytest.approx(reference.train(recipe).losses[0], rel=1e-2)
        assert skipped == answers[0][1]
        assert not skipped[-1]
        assert_same(parameters, answers[0][2])
        assert all(p.isfinite().all() for p in parameters.values())
        assert any(not torch.equal(p, start[name]) for name, p in parameters.items())


def all_ignored(batch: dict[str, Any], start: int, stop: int) -> dict[str, Any]:
    """The batch without counted tokens in some of its samples."""
    targets = batch["targets"].clone()
    targets[start:stop] = models.IGNORED
    return {**batch, "targets": targets}


def train_with_empty_micro_batch(run: Run) -> Parameters:
    """The first pass of rank 3 counts no token, so its loss is 0 / 0."""
    model, optimizer = training.prepare(run)
    for step in range(len(run.recipe.batches)):
        batch = training.batch_of(run, step)
        if harness.rank() == 3:
            batch = all_ignored(batch, 0, 3)
        if run.open_form:
            for micro_batch in optimizer.micro_batches(batch, weight=models.counted_tokens):
                models.mean_over_tokens(model, micro_batch).backward()
            optimizer.step()
        else:
            result = optimizer.train_step(
                models.mean_over_tokens, batch, weight=models.counted_tokens
            )
            assert math.isfinite(result.loss)
    return training.whole_parameters(model, optimizer)


@pytest.mark.parametrize(("stage", "open_form"), [(0, False), (1, True), (2, True), (3, False)])
def test_micro_batch_without_counted_tokens(ranks: Pool, open_form: bool, stage: int) -> None:
    recipe = replace(RECIPE, loss="tokens")
    expected = train_alone(
        models.build(recipe.spec),
        recipe,
        lambda model, batch: models.mean_over_tokens(model, all_ignored(batch, 6, 9)),
    )
    run = Run(recipe, uneven(stage), open_form)
    for parameters in ranks.run(train_with_empty_micro_batch, run):
        assert_close(parameters, expected)


def weight_raises_json_error(run: Run) -> Answer:
    model, optimizer = training.prepare(run)

    def weight(batch: Any) -> float:
        return float(json.loads("{" if harness.rank() == BAD else "1"))

    def act() -> None:
        optimizer.train_step(models.mean_over_samples, training.batch_of(run, 1), weight=weight)

    return training.between_good_steps(run, model, optimizer, act)


def test_error_with_custom_constructor_in_weight(ranks: Pool) -> None:
    failures = assert_unchanged(ranks.run(weight_raises_json_error, Run(RECIPE, uneven(2))), RECIPE)
    for rank, failure in enumerate(failures):
        assert failure.is_a(json.JSONDecodeError if rank == BAD else RankFailed), failure
        assert rank == BAD or f"rank {BAD}" in failure.message, failure


# Inside contexts


def evaluated_loss(optimizer: HeteroZeroOptimizer, run: Run) -> float:
    batches = [training.on_device(run.recipe.batch(1))]
    return optimizer.evaluate(models.mean_over_samples, batches)


def evaluation(
    model: nn.Module, optimizer: HeteroZeroOptimizer, run: Run
) -> tuple[float, Parameters]:
    """The loss in evaluation, and a copy of the parameters."""
    mean = evaluated_loss(optimizer, run)
    return mean, {name: p.detach().cpu().clone() for name, p in model.named_parameters()}


def use_full_parameters(
    run: Run, path: str, writeback: bool
) -> tuple[list[float], list[Parameters], Parameters]:
    model, optimizer = training.prepare(run)
    training.take_step(run, model, optimizer, 0)
    means = [evaluated_loss(optimizer, run)]
    seen = []
    with optimizer.full_parameters():
        for act in (lambda: None, lambda: optimizer.save_model(path)):
            act()
            mean, parameters = evaluation(model, optimizer, run)
            means.append(mean)
            seen.append(parameters)
        with optimizer.full_parameters(writeback=writeback):
            seen.append(evaluation(model, optimizer, run)[1])
            if writeback:
                with torch.no_grad():
                    model.blocks[1].up.weight.mul_(2)
        seen.append(evaluation(model, optimizer, run)[1])
    return means, seen, training.whole_parameters(model, optimizer)


@pytest.mark.parametrize("writeback", [False, True])
def test_evaluate_and_save_inside_full_parameters(
    ranks: Pool, writeback: bool, tmp_path: Path
) -> None:
    path = tmp_path / "model.safetensors"
    answers = ranks.run(use_full_parameters, Run(RECIPE, uneven(3)), str(path), writeback)
    expected = reference.train(replace(RECIPE, batches=(12,))).parameters
    doubled = {**expected, "blocks.1.up.weight": expected["blocks.1.up.weight"] * 2}
    for means, seen, left in answers:
        assert means == pytest.approx(means[:1] * 3, rel=1e-6)
        for parameters in seen[:-1]:
            assert_close(parameters, expected)
        for parameters in (seen[-1], left):
            assert_close(parameters, doubled if writeback else expected)
    assert_close(safetensors.torch.load_file(path), expected)


def step_in_the_last_iteration(run: Run) -> Parameters:
    model, optimizer = training.prepare(run)
    passes = sum(size > 0 for size in run.plan.micro_batches[harness.rank()])
    for step in range(len(run.recipe.batches)):
        batch = training.batch_of(run, step)
        for index, micro_batch in enumerate(optimizer.micro_batches(batch)):
            models.mean_over_samples(model, micro_batch).backward()
            if index == passes - 1:
                optimizer.step()
                optimizer.zero_grad()
        if passes == 0:
            optimizer.step()
            optimizer.zero_grad()
    return training.whole_parameters(model, optimizer)


@pytest.mark.parametrize(
    ("stage", "micro_batches"),
    [(0, ((2, 3), (), (1, 2), (4,))), (0, TWO_PASSES), (2, TWO_PASSES)],
    ids=["an idle rank", "stage 0", "stage 2"],
)
def test_step_inside_the_last_iteration(ranks: Pool, stage: int, micro_batches: tuple) -> None:
    run = Run(RECIPE, uneven(stage, micro_batches))
    for parameters in ranks.run(step_in_the_last_iteration, run):
        assert_close(parameters, reference.train(RECIPE).parameters)


def evaluate_inside_pass(run: Run) -> tuple[list[Failure], Parameters]:
    model, optimizer = training.prepare(run)
    failures = []
    for step in range(len(run.recipe.batches)):
        for micro_batch in optimizer.micro_batches(training.batch_of(run, step)):
            with harness.catching() as caught:
                optimizer.evaluate(models.mean_over_samples, [micro_batch])
            failures += caught
            models.mean_over_samples(model, micro_batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return failures, training.whole_parameters(model, optimizer)


@pytest.mark.parametrize("stage", [0, 3])
def test_evaluate_inside_a_pass_raises_and_changes_nothing(ranks: Pool, stage: int) -> None:
    for failures, left in ranks.run(evaluate_inside_pass, Run(RECIPE, one_pass_each(stage))):
        assert len(failures) == 2
        assert_raised(failures, "evaluate()", kind=RuntimeError)
        assert_close(left, reference.train(RECIPE).parameters)


# Changes without the optimizer


def swap_in_average(run: Run) -> tuple[float, float, Parameters]:
    """Between steps, replace the data of every parameter and then restore it."""
    model, optimizer = training.prepare(run)
    training.take_step(run, model, optimizer, 0)
    batch = training.on_device(run.recipe.batch(1))
    backup = {name: p.data.clone() for name, p in model.named_parameters()}
    for p in model.parameters():
        p.data = p.data * 0.9
    with torch.no_grad():
        averaged = float(models.mean_over_samples(model, batch))
    evaluated = optimizer.evaluate(models.mean_over_samples, [batch])
    for name, p in model.named_parameters():
        p.data = backup[name]
    training.take_step(run, model, optimizer, 1)
    return averaged, evaluated, training.whole_parameters(model, optimizer)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_parameter_data_may_be_swapped_and_restored(ranks: Pool, stage: int) -> None:
    for averaged, evaluated, parameters in ranks.run(swap_in_average, Run(RECIPE, uneven(stage))):
        assert evaluated == pytest.approx(averaged, rel=1e-6)
        assert_close(parameters, reference.train(RECIPE).parameters)


def swap_data_and_step(run: Run) -> None:
    model, optimizer = training.prepare(run)
    training.take_step(run, model, optimizer, 0)
    for p in model.parameters():
        p.data = torch.ones_like(p)
    training.take_step(run, model, optimizer, 1)


def test_stage_3_swapped_data_raises(ranks: Pool) -> None:
    failures = ranks.run_expecting_errors(swap_data_and_step, Run(RECIPE, uneven(3)))
    assert_raised(failures, "was replaced", "full_parameters", kind=RuntimeError)


def clip_with_torch(run: Run) -> tuple[list[float], Parameters]:
    model, optimizer = training.prepare(run)
    scaler = poplar.GradScaler(harness.device().type, init_scale=1024.0, growth_interval=1000)
    norms = []
    for step in range(len(run.recipe.batches)):
        for micro_batch in optimizer.micro_batches(training.batch_of(run, step)):
            scaler.scale(models.mean_over_samples(model, micro_batch)).backward()
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), run.recipe.max_norm)
        norms.append(float(norm))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return norms, training.whole_parameters(model, optimizer)


def test_stage_0_torch_may_clip(ranks: Pool) -> None:
    recipe = replace(RECIPE, max_norm=0.1, optimizer="SGD", options=(("lr", 0.5),))
    expected = reference.train(recipe)
    for norms, parameters in ranks.run(clip_with_torch, Run(recipe, uneven(0))):
        assert norms == pytest.approx(expected.norms, rel=1e-5)
        assert_close(parameters, expected.parameters)


def keep_gradients(run: Run, cache: str) -> list[str]:
    """`zero_grad` must not change tensors that the user keeps. Returns what changed."""
    with memory_cache(cache):
        model, optimizer = training.prepare(run)
        stored: dict[str, Tensor] = {}
        for step in range(len(run.recipe.batches)):
            for micro_batch in optimizer.micro_batches(training.batch_of(run, step)):
                models.mean_over_samples(model, micro_batch).backward()
            stored |= {f"{step} {name}": p.grad for name, p in model.named_parameters()}
            if step == 0:
                copies = {name: gradient.clone() for name, gradient in stored.items()}
            optimizer.step()
            optimizer.zero_grad()
        return [name for name, copy in copies.items() if not torch.equal(stored[name], copy)]


@pytest.mark.parametrize("cache", ["on", "off"])
def test_stage_0_gradients_kept_by_the_user_do_not_change(ranks: Pool, cache: str) -> None:
    recipe = replace(RECIPE, batches=(12, 12, 12))
    for changed in ranks.run(keep_gradients, Run(recipe, uneven(0)), cache):
        assert changed == []


def train_without_a_cache(run: Run) -> Trajectory:
    with memory_cache("off"):
        return training.train(run)


@pytest.mark.parametrize("stage", STAGES)
def test_training_without_memory_cache(ranks: Pool, stage: int) -> None:
    run = Run(replace(RECIPE, batches=(12, 12, 12)), uneven(stage))
    assert_exact(ranks.run(train_without_a_cache, run), run.recipe)


def clip_replaced_gradients(run: Run) -> tuple[float, float, float, float]:
    """The norm of gradients of 3 and none, as clipping, `full_gradients` and `.grad` have it after
    clipping to 0.5, and of the update.
    """
    model, optimizer = training.prepare(run)
    before = training.whole_parameters(model, optimizer)
    for micro_batch in optimizer.micro_batches(training.batch_of(run, 0)):
        models.mean_over_samples(model, micro_batch).backward()
    first, *others = model.parameters()
    first.grad = torch.full_like(first, 3.0)
    for parameter in others:
        parameter.grad = None
    gradients = optimizer.full_gradients()
    norm = float(optimizer.clip_grad_norm_(0.5))
    clipped = float(first.grad.norm())
    optimizer.step()
    after = training.whole_parameters(model, optimizer)
    update = sum(float((after[name] - value).square().sum()) for name, value in before.items())
    full = sum(float(gradient.square().sum()) for gradient in gradients.values())
    return norm, full**0.5, clipped, update**0.5


def test_stage_0_replaced_gradients_are_clipped(ranks: Pool) -> None:
    recipe = replace(RECIPE, optimizer="SGD", options=(("lr", 1.0),))
    numel = next(models.build(recipe.spec).parameters()).numel()
    for found in ranks.run(clip_replaced_gradients, Run(recipe, uneven(0))):
        assert found == pytest.approx((3.0 * numel**0.5, 3.0 * numel**0.5, 0.5, 0.5), rel=1e-4)


def apply_replaced_nan(run: Run) -> tuple[str, bool]:
    model, optimizer = training.prepare(run)
    for micro_batch in optimizer.micro_batches(training.batch_of(run, 0)):
        models.mean_over_samples(model, micro_batch).backward()
    for parameter in model.parameters():
        parameter.grad = parameter.grad * float("nan")
    with pytest.raises(RuntimeError) as raised:
        optimizer.step()
    return str(raised.value), all(bool(p.isfinite().all()) for p in model.parameters())


def test_stage_0_replaced_gradients_are_checked(ranks: Pool) -> None:
    for message, is_finite in ranks.run(apply_replaced_nan, Run(RECIPE, uneven(0))):
        assert "finite" in message
        assert is_finite


# The plain loop


def call_a_block(run: Run, model: nn.Module) -> None:
    with torch.no_grad():
        model.blocks[0](torch.ones(2, models.LENGTH, models.WIDTH, device=harness.device()))


def call_block_between_backwards(run: Run) -> Parameters:
    """Two backwards per step, with a call of one block in between, for its output only."""
    model, optimizer = training.prepare(run)
    for step in range(0, len(run.recipe.batches), 2):
        with optimizer.no_sync():
            models.mean_over_samples(model, training.batch_of(run, step)).backward()
        call_a_block(run, model)
        models.mean_over_samples(model, training.batch_of(run, step + 1)).backward()
        optimizer.step()
    return training.whole_parameters(model, optimizer)


@pytest.mark.parametrize("persistent", [(), ("blocks.0", "blocks.2")])
def test_calling_a_block_between_backwards_keeps_gradients(
    ranks: Pool, persistent: tuple[str, ...]
) -> None:
    """At stage 3 that call unshards the block, which must be resharded again."""
    recipe = Recipe(batches=(12,) * 4, optimizer="SGD", options=(("lr", 0.1), ("momentum", 0.9)))
    units = [UnitPlan(name, persistent=True) for name in persistent]
    plan = replace(one_pass_each(3), units=tuple(units))
    model = models.build(recipe.spec)
    alone = recipe.optimizer_class(model.parameters(), **dict(recipe.options))
    for step in range(len(recipe.batches)):
        models.mean_over_samples(model, recipe.batch(step)).backward()
        if step % 2:
            alone.step()
            alone.zero_grad()
    for parameters in ranks.run(call_block_between_backwards, Run(recipe, plan)):
        assert_close(parameters, dict(model.named_parameters()))


class Adapted(nn.Module):
    """Adapters on a frozen base whose layers are recomputed, as PEFT and transformers do it.

    With reentrant checkpointing, each layer's backward is one of its own inside of the outer one;
    `nested` layers are two, in one another. The embedding gets no gradient, so the outer backward
    reaches no parameter.
    """

    def __init__(self, *, nested: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(37, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.requires_grad_(False)
        self.adapters = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(3))
        self.nested = nested

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens).requires_grad_(True)  # enable_input_require_grads of PEFT
        for layer, adapter in zip(self.layers, self.adapters, strict=True):

            def run(x: Tensor, layer: nn.Module = layer, adapter: nn.Module = adapter) -> Tensor:
                return x + torch.tanh(layer(x) + adapter(x))

            def recomputed(x: Tensor, run: Callable[[Tensor], Tensor] = run) -> Tensor:
                return checkpoint(run, x, use_reentrant=True)

            x = checkpoint(recomputed, x, use_reentrant=True) if self.nested else recomputed(x)
        return x

    def loss(self, batch: Any) -> Tensor:
        return self(batch["tokens"]).square().mean()


def train_adapted_in_loops(run: Run, loop: str, nested: bool) -> Parameters:
    model = Adapted(nested=nested).to(harness.device())
    optimizer = optimizer_of(model, run, params=None)
    for step in range(0, len(run.recipe.batches), 2):
        batches = [training.batch_of(run, at) for at in (step, step + 1)]
        if loop == "micro_batches":
            both = {key: torch.cat([one[key] for one in batches]) for key in batches[0]}
            for micro_batch in optimizer.micro_batches(both):
                model.loss(micro_batch).backward()
        else:
            with optimizer.no_sync():
                (model.loss(batches[0]) / 2).backward()
            (model.loss(batches[1]) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return training.whole_parameters(model, optimizer)


@pytest.mark.parametrize("nested", [False, True], ids=["", "nested"])
@pytest.mark.parametrize("loop", ["plain", "micro_batches"])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_layers_with_backwards_of_their_own(
    ranks: Pool, stage: int, loop: str, nested: bool
) -> None:
    recipe = Recipe(batches=(12,) * 4)
    alone = Adapted(nested=False)
    optimizer = recipe.optimizer_class(alone.adapters.parameters(), **dict(recipe.options))
    for step in range(0, len(recipe.batches), 2):
        for at in (step, step + 1):
            (alone.loss(recipe.batch(at)) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    plan = one_pass_each(stage)
    if loop == "micro_batches":
        passes = ((3, 3),) * 4
        plan = replace(plan, global_batch=24, micro_batches=passes)
    run = Run(recipe, plan)
    for parameters in ranks.run(train_adapted_in_loops, run, loop, nested):
        assert_close(parameters, dict(alone.named_parameters()))


def create_state_like_checkpointing(
    run: Run, steps_before: int
) -> tuple[list[Parameters], list[dict], Parameters]:
    """Zero gradients and a step at learning rate 0, as `torch.distributed.checkpoint` takes."""
    model, optimizer = training.prepare(run)
    for step in range(steps_before):
        training.take_step(run, model, optimizer, step)
    parameters = [training.whole_parameters(model, optimizer)]
    states = [copy.deepcopy(optimizer.full_state_dict())]
    rates = [group["lr"] for group in optimizer.param_groups]
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    optimizer.zero_grad()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    parameters.append(training.whole_parameters(model, optimizer))
    states.append(optimizer.full_state_dict())
    for step in range(steps_before, len(run.recipe.batches)):
        training.take_step(run, model, optimizer, step)
    return parameters, states, training.whole_parameters(model, optimizer)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("steps_before", [0, 1])
def test_zero_step_of_checkpointing_changes_nothing(
    ranks: Pool, steps_before: int, stage: int
) -> None:
    run = Run(RECIPE, uneven(stage))
    answers = ranks.run(create_state_like_checkpointing, run, steps_before)
    before, after = answers[0][1]
    assert bool(before["state"]) == bool(steps_before)
    if steps_before:
        assert after["state"].keys() == before["state"].keys()
    for key, state in before["state"].items():
        assert_same(after["state"][key], state)
    for (before, after), _, parameters in answers:
        assert_same(after, before)
        assert_close(parameters, reference.train(RECIPE).parameters)
