"""What schedulers, scalers, checkpoints, compilers and trainers expect of an optimizer."""

from __future__ import annotations

import copy
import gc
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import models
import pytest
import ranks as harness
import reference
import torch
import torch.distributed as dist
import training
from models import ModelSpec
from ranks import Pool
from reference import Recipe, Trajectory
from subset import choose
from torch import Tensor, nn
from training import (
    IDLE_RANK,
    STAGES,
    TWO_PASSES,
    UNEVEN,
    Run,
    assert_close,
    assert_exact,
    assert_raised,
    assert_same,
    uneven,
)

import poplar
from poplar import HeteroZeroOptimizer, Plan

OTHER_SHARES = (0.0, 0.3, 0.6, 0.1)
RECIPE = Recipe(batches=(12,) * 3)


# The torch.optim.Optimizer interface


def interface_errors(run: Run) -> list[str]:
    """Differences to what is expected of a `torch.optim.Optimizer`."""
    model, optimizer = training.prepare(run)
    wrong = []
    if not isinstance(optimizer, torch.optim.Optimizer):
        wrong.append("it is no torch.optim.Optimizer")
    held = [p for group in optimizer.param_groups for p in group["params"]]
    ours = [p for group in models.parameter_groups(run.recipe.spec, model) for p in group["params"]]
    if [id(p) for p in held] != [id(p) for p in ours]:
        wrong.append("param_groups do not hold the user's parameters")
    if [group["weight_decay"] for group in optimizer.param_groups] != [0.1, 0.0]:
        wrong.append("param_groups lost their options")
    if not all(isinstance(p, nn.Parameter) for p in model.parameters()):
        wrong.append("the model lost its parameters")
    if optimizer.plan != run.plan:
        wrong.append("plan")
    training.take_step(run, model, optimizer, 0)
    if any(p.grad is not None for p in model.parameters()):
        wrong.append("gradients outlive the step")
    return wrong


@pytest.mark.parametrize("stage", STAGES)
def test_optimizer_interface_with_the_users_parameters(ranks: Pool, stage: int) -> None:
    recipe = Recipe(spec=ModelSpec(two_groups=True), batches=(12,))
    assert ranks.run(interface_errors, Run(recipe, uneven(stage))) == [[]] * 4


OPTIMIZERS = {
    "SGD": (("lr", 0.1),),
    "SGD with momentum": (("lr", 0.1), ("momentum", 0.9), ("nesterov", True)),
    "Adam": (("lr", 1e-3), ("eps", 1e-5), ("amsgrad", True)),
    "NAdam": (("lr", 1e-3), ("eps", 1e-5)),
    "RMSprop": (("lr", 1e-3), ("eps", 1e-5)),
    "Adagrad": (("lr", 1e-3), ("eps", 1e-5)),
    "AdamW": (("lr", 1e-3), ("eps", 1e-5), ("foreach", True)),
}
SOME_OPTIMIZERS = choose(
    quick=("SGD with momentum", "Adam", "Adagrad", "AdamW"), full=tuple(OPTIMIZERS)
)


@pytest.mark.parametrize("stage", STAGES)
def test_every_elementwise_optimizer_is_exact(ranks: Pool, stage: int) -> None:
    recipes = {
        name: replace(RECIPE, optimizer=name.split()[0], options=OPTIMIZERS[name])
        for name in SOME_OPTIMIZERS
    }
    runs = [Run(recipe, uneven(stage)) for recipe in recipes.values()]
    trained = ranks.run(training.train_many, runs)
    for index, (name, recipe) in enumerate(recipes.items()):
        assert_exact([by_run[index] for by_run in trained], recipe, name)


@pytest.mark.parametrize("stage", STAGES)
def test_schedulers_change_the_learning_rate(ranks: Pool, stage: int) -> None:
    recipe = Recipe(decaying=True, spec=ModelSpec(two_groups=True))
    runs = [Run(recipe, uneven(stage), open_form) for open_form in (False, True)]
    trained = ranks.run(training.train_many, runs)
    for index in range(len(runs)):
        assert_exact([by_run[index] for by_run in trained], recipe)


def train_on_default_group(run: Run) -> Trajectory:
    """Train without a process_group argument."""
    model = models.build(run.recipe.spec).to(harness.device())
    optimizer = training.optimizer_of(model, run, process_group=None)
    for step in range(len(run.recipe.batches)):
        training.take_step(run, model, optimizer, step)
    return training.whole_parameters(model, optimizer)


def test_default_process_group_is_the_world(ranks: Pool) -> None:
    for parameters in ranks.run(train_on_default_group, Run(RECIPE, uneven(3))):
        assert_close(parameters, reference.train(RECIPE).parameters)


def accumulate_with_sync_switched_off(run: Run) -> dict[str, Tensor]:
    """Two backwards per step."""
    model, optimizer = training.prepare(run)
    loss = training.loss_of(run.recipe)
    for step in range(len(run.recipe.batches)):
        last = step % 2 == 1
        optimizer.set_requires_gradient_sync(last)
        loss(model, training.batch_of(run, step)).backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()
    return training.whole_parameters(model, optimizer)


def accumulate_alone(recipe: Recipe) -> dict[str, Tensor]:
    model = models.build(recipe.spec)
    optimizer = recipe.optimizer_class(model.parameters(), **dict(recipe.options))
    for step in range(len(recipe.batches)):
        models.mean_over_samples(model, recipe.batch(step)).backward()
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
    return dict(model.named_parameters())


@pytest.mark.parametrize("stage", STAGES)
def test_backward_without_gradient_sync_accumulates(ranks: Pool, stage: int) -> None:
    recipe = Recipe(batches=(12,) * 4, optimizer="SGD", options=(("lr", 0.1), ("momentum", 0.9)))
    run = Run(recipe, Plan.manual("3,3,3,3", stage=stage, shares=UNEVEN))
    for parameters in ranks.run(accumulate_with_sync_switched_off, run):
        assert_close(parameters, accumulate_alone(recipe))


def gradients_before_the_step(run: Run) -> dict[str, Tensor]:
    model, optimizer = training.prepare(run)
    for micro_batch in optimizer.micro_batches(training.batch_of(run, 0)):
        training.loss_of(run.recipe)(model, micro_batch).backward()
    return {name: p.grad.cpu().clone() for name, p in model.named_parameters()}


def test_stage_0_grad_is_the_mean_over_the_global_batch(ranks: Pool) -> None:
    model = models.build(RECIPE.spec)
    models.mean_over_samples(model, RECIPE.batch(0)).backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    for gradients in ranks.run(gradients_before_the_step, Run(RECIPE, uneven(0))):
        assert_close(gradients, expected)


def norms_of_other_types(run: Run) -> list[float]:
    model, optimizer = training.prepare(run)
    norms = []
    for norm_type in (1.0, 2.0, 3.0, math.inf):
        for micro_batch in optimizer.micro_batches(training.batch_of(run, 0)):
            training.loss_of(run.recipe)(model, micro_batch).backward()
        norms.append(float(optimizer.clip_grad_norm_(1e9, norm_type=norm_type)))
        optimizer.zero_grad()
    return norms


@pytest.mark.parametrize("stage", STAGES)
def test_norms_of_other_types(ranks: Pool, stage: int) -> None:
    model = models.build(RECIPE.spec)
    models.mean_over_samples(model, RECIPE.batch(0)).backward()
    expected = [
        float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9, norm_type))
        for norm_type in (1.0, 2.0, 3.0, math.inf)
    ]
    for norms in ranks.run(norms_of_other_types, Run(RECIPE, uneven(stage))):
        assert norms == pytest.approx(expected, rel=1e-5)


# Compilers


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_blocks_traced_by_dynamo_are_exact(ranks: Pool, stage: int, checkpointing: bool) -> None:
    spec = ModelSpec(compiled="aot_eager", checkpointing=checkpointing, blocks=2)
    recipe = replace(RECIPE, spec=spec)
    plan = Plan.manual("8,4", stage=stage, shares=(0.3, 0.7))
    assert_exact(ranks.run(training.train, Run(recipe, plan), ranks=2), recipe)


def train_compiled(run: Run) -> Trajectory:
    from torch._inductor import config

    # Compiling processes and headers would take longer than the few kernels here.
    with config.patch(compile_threads=1, cpp_cache_precompile_headers=False):
        return training.train(run)


@pytest.mark.slow
def test_blocks_compiled_by_inductor_are_exact(ranks: Pool) -> None:
    if shutil.which("c++") is None and shutil.which("g++") is None:
        pytest.skip("torch.compile needs a C++ compiler")
    kind = choose(quick="mlp", full="transformer")
    recipe = Recipe(batches=(4, 4), spec=ModelSpec(compiled="inductor", blocks=2, kind=kind))
    plan = Plan.manual("2,2", stage=3, shares=(0.7, 0.3))
    assert_exact(ranks.run(train_compiled, Run(recipe, plan), ranks=2, timeout=300), recipe)


# Gradient scaling


def train_with_scaler(run: Run) -> tuple[dict[str, Tensor], list[float]]:
    model, optimizer = training.prepare(run)
    scaler = poplar.GradScaler(harness.device().type, init_scale=1024.0, growth_interval=1000)
    scales = []
    for step in range(len(run.recipe.batches)):
        loss, batch = training.loss_of(run.recipe), training.batch_of(run, step)
        if run.open_form:
            for micro_batch in optimizer.micro_batches(batch):
                scaler.scale(loss(model, micro_batch)).backward()
            scaler.unscale_(optimizer)
            if run.recipe.max_norm is not None:
                optimizer.clip_grad_norm_(run.recipe.max_norm)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        else:
            optimizer.train_step(loss, batch, max_norm=run.recipe.max_norm, scaler=scaler)
        scales.append(scaler.get_scale())
    return training.whole_parameters(model, optimizer), scales


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("open_form", [False, True], ids=["train_step", "own loop"])
@pytest.mark.parametrize(("micro_batches", "max_norm"), [(TWO_PASSES, 0.1), (IDLE_RANK, None)])
def test_scaled_gradients_are_exact(
    ranks: Pool, micro_batches: tuple, max_norm: float | None, open_form: bool, stage: int
) -> None:
    recipe = replace(RECIPE, max_norm=max_norm)
    results = ranks.run(train_with_scaler, Run(recipe, uneven(stage, micro_batches), open_form))
    for parameters, scales in results:
        assert scales == [1024.0] * 3
        assert_close(parameters, reference.train(recipe).parameters)


def train_on_a_small_loss(run: Run, way: str) -> tuple[dict[str, Tensor], float]:
    """The parameters, and the part of the elements of the head that changed."""
    model, optimizer = training.prepare(run)
    before = training.whole_parameters(model, optimizer)
    scaler = poplar.GradScaler(harness.device().type, enabled=way != "disabled scaler")

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return models.mean_over_samples(model, batch).float() * 1e-7

    for step in range(len(run.recipe.batches)):
        batch = training.batch_of(run, step)
        if way != "own loop":
            optimizer.train_step(loss, batch, scaler=None if way == "train_step" else scaler)
            continue
        for micro_batch in optimizer.micro_batches(batch):
            scaler.scale(loss(model, micro_batch)).backward()
        scaler.step(optimizer)
        scaler.update()
    after = training.whole_parameters(model, optimizer)
    changed = after["head.weight"] != before["head.weight"]
    return after, float(changed.float().mean())


@pytest.mark.every_combination
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["cast", "fp16 model"])
def test_small_gradients_in_fp16_are_not_lost(ranks: Pool, dtype: torch.dtype) -> None:
    """They would be 0 without a loss scale."""
    options = (("lr", 1e-2), ("eps", 1e-12), ("weight_decay", 0.0))
    recipe = Recipe(spec=ModelSpec(kind="mlp", dtype=dtype), options=options, batches=(12,) * 2)
    engine = {"compute_dtype": "auto" if dtype is torch.float16 else torch.float16}
    run = Run(recipe, uneven(1), engine=engine)
    expected, _ = ranks.run(train_on_a_small_loss, run, "train_step")[0]
    for way in ("train_step", "disabled scaler", "own loop"):
        for parameters, changed in ranks.run(train_on_a_small_loss, run, way):
            assert changed > 0.9
            assert_same(parameters, expected)


def overflow_on_one_rank(
    run: Run, bad: int, good_steps: int
) -> tuple[bool, list[str], float, dict[str, Tensor]]:
    """Some correct steps, one with an infinite loss on one rank, then the other correct steps."""
    model, optimizer = training.prepare(run)
    scaler = poplar.GradScaler(harness.device().type, init_scale=1024.0, growth_interval=1000)
    loss = training.loss_of(run.recipe)
    for step in range(good_steps):
        optimizer.train_step(loss, training.batch_of(run, step), scaler=scaler)
    before = training.whole_parameters(model, optimizer)
    factor = math.inf if harness.rank() == bad else 1.0
    result = optimizer.train_step(
        lambda model, batch: loss(model, batch) * factor,
        training.batch_of(run, 1),
        scaler=scaler,
        max_norm=1.0,
    )
    after = training.whole_parameters(model, optimizer)
    changed = [name for name, value in before.items() if not torch.equal(after[name], value)]
    for step in range(good_steps, len(run.recipe.batches)):
        optimizer.train_step(loss, training.batch_of(run, step), scaler=scaler)
    left = training.whole_parameters(model, optimizer)
    return result.skipped, changed, scaler.get_scale(), left


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("good_steps", [0, 1], ids=["first step", "second step"])
@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        ("AdamW", RECIPE.options),
        ("Adam", (("lr", 1e-3), ("amsgrad", True))),
        ("SGD", (("lr", 0.1),)),
        ("SGD", (("lr", 0.1), ("momentum", 0.9))),
        ("RMSprop", (("lr", 1e-3), ("eps", 1e-2))),  # has no fused implementation in torch
    ],
    ids=["AdamW", "amsgrad", "SGD", "momentum", "RMSprop"],
)
def test_overflow_on_one_rank_skips_the_step_on_all(
    ranks: Pool, optimizer: str, options: tuple, good_steps: int, stage: int
) -> None:
    recipe = replace(RECIPE, batches=(12, 12), optimizer=optimizer, options=options)
    run = Run(recipe, uneven(stage))
    for answer in ranks.run(overflow_on_one_rank, run, 2, good_steps):
        skipped, changed, scale, left = answer
        assert skipped
        assert not changed
        assert scale == 512.0
        assert_close(left, reference.train(recipe).parameters)


class OwnStep(torch.optim.SGD):
    """Has a fused base class but its own `step`."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-group["lr"])


def train_with_custom_step(run: Run) -> tuple[bool, dict[str, Tensor]]:
    model = models.build(run.recipe.spec)
    optimizer = HeteroZeroOptimizer(
        model, OwnStep, plan=run.plan, process_group=harness.group(), **dict(run.recipe.options)
    )
    scaler = poplar.GradScaler(harness.device().type, init_scale=1024.0, growth_interval=1000)
    loss = training.loss_of(run.recipe)
    for step in range(len(run.recipe.batches)):
        batch = training.batch_of(run, step)
        optimizer.train_step(loss, batch, max_norm=run.recipe.max_norm, scaler=scaler)
    result = optimizer.train_step(
        lambda model, batch: loss(model, batch) * math.inf, batch, scaler=scaler
    )
    return result.skipped, training.whole_parameters(model, optimizer)


@pytest.mark.parametrize("stage", STAGES)
def test_custom_step_gets_scaled_and_clipped_gradients(ranks: Pool, stage: int) -> None:
    recipe = replace(RECIPE, max_norm=0.1, optimizer="SGD", options=(("lr", 0.5),))
    for skipped, parameters in ranks.run(train_with_custom_step, Run(recipe, uneven(stage))):
        assert skipped
        assert_close(parameters, reference.train(recipe).parameters)


# Checkpoints


def read_state_on_one_rank(run: Run) -> tuple[bool, dict[str, Tensor]]:
    """As trainers do: after construction, on rank 0 alone, without communication."""
    model, optimizer = training.prepare(run)
    good = True
    if harness.rank() == 0:
        state = optimizer.state_dict()
        good = {"state", "param_groups"} <= state.keys()
    training.take_step(run, model, optimizer, 0)
    return good, training.whole_parameters(model, optimizer)


@pytest.mark.parametrize("stage", STAGES)
def test_state_dict_on_one_rank_needs_no_other(ranks: Pool, stage: int) -> None:
    recipe = replace(RECIPE, batches=(12,))
    for good, parameters in ranks.run(read_state_on_one_rank, Run(recipe, uneven(stage))):
        assert good
        assert_close(parameters, reference.train(recipe).parameters)


def save_and_continue(run: Run, folder: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Continue training, or stop half-way, load into new objects, and continue."""
    model, optimizer = training.prepare(run)
    half = len(run.recipe.batches) // 2
    for step in range(half):
        training.take_step(run, model, optimizer, step)
    whole = training.whole_parameters(model, optimizer)
    path = Path(folder) / f"rank-{harness.rank()}.pt"
    torch.save(optimizer.state_dict(), path)
    for step in range(half, len(run.recipe.batches)):
        training.take_step(run, model, optimizer, step)
    straight = training.whole_parameters(model, optimizer)

    model = models.build(run.recipe.spec)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(whole[name])
    model.to(harness.device())
    optimizer = training.optimizer_of(model, run)
    optimizer.load_state_dict(torch.load(path, weights_only=False))
    for step in range(half, len(run.recipe.batches)):
        training.take_step(run, model, optimizer, step)
    return straight, training.whole_parameters(model, optimizer)


@pytest.mark.parametrize("stage", STAGES)
def test_training_resumes_with_the_same_bits(ranks: Pool, stage: int, tmp_path: Path) -> None:
    recipe = Recipe(batches=(12,) * 4, spec=ModelSpec(two_groups=True, unused=True))
    run = Run(recipe, uneven(stage))
    for straight, resumed in ranks.run(save_and_continue, run, str(tmp_path)):
        assert_close(straight, reference.train(recipe).parameters)
        assert_same(resumed, straight)


def load_mismatched_state(run: Run, what: str) -> None:
    _, optimizer = training.prepare(run)
    state = optimizer.state_dict()
    if what == "rank":
        states: list = [None] * harness.size()
        dist.all_gather_object(states, state, group=harness.group())
        state = states[(harness.rank() + 1) % harness.size()]
    else:
        other = replace(run, plan=uneven(run.plan.stage, shares=OTHER_SHARES))
        _, optimizer = training.prepare(other)
    optimizer.load_state_dict(state)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("what", ["rank", "plan"])
def test_mismatched_state_raises(ranks: Pool, what: str, stage: int) -> None:
    failures = ranks.run_expecting_errors(load_mismatched_state, Run(RECIPE, uneven(stage)), what)
    assert_raised(failures, what)
    assert all(f.is_a(ValueError) or f.is_a(RuntimeError) for f in failures)


def consolidate_half_way(run: Run, to: int) -> tuple[dict | None, dict[str, Tensor]]:
    model, optimizer = training.prepare(run)
    for step in range(2):
        training.take_step(run, model, optimizer, step)
    state = optimizer.full_state_dict(to=to)
    return copy.deepcopy(state), training.whole_parameters(model, optimizer)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    "spec", [ModelSpec(), ModelSpec(two_groups=True, tied=True, frozen=True, unused=True)]
)
def test_consolidated_state_continues_in_plain_pytorch(
    ranks: Pool, spec: ModelSpec, stage: int
) -> None:
    recipe = Recipe(batches=(12,) * 4, spec=spec)
    results = ranks.run(consolidate_half_way, Run(recipe, uneven(stage)), 1)
    assert [state is not None for state, _ in results] == [False, True, False, False]
    state, parameters = results[1]
    model = models.build(spec)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(parameters[name])
    groups = models.parameter_groups(spec, model) or model.parameters()
    optimizer = torch.optim.AdamW(groups, **dict(recipe.options))
    optimizer.load_state_dict(state)
    for step in (2, 3):
        models.mean_over_samples(model, recipe.batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_close(dict(model.named_parameters()), reference.train(recipe).parameters)


# Parameters and evaluation


def evaluate_between_steps(
    run: Run, counts: tuple[int, ...], weight: Callable | None, loss: Callable
) -> tuple[float, float, dict[str, Tensor], bool]:
    model, optimizer = training.prepare(run)
    start = sum(counts[: harness.rank()])
    loader = [
        training.on_device(models.data(1 + index % 3, seed=500 + index, masked=True))
        for index in range(start, start + counts[harness.rank()])
    ]
    first = optimizer.evaluate(loss, loader, weight=weight)
    training.take_step(run, model, optimizer, 0)
    second = optimizer.evaluate(loss, loader, weight=weight)
    training.take_step(run, model, optimizer, 1)
    return first, second, training.whole_parameters(model, optimizer), model.training


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    ("counts", "by_tokens"), [((3, 1, 2, 5), True), ((0, 4, 0, 1), True), ((0, 4, 0, 1), False)]
)
def test_evaluation_is_the_mean_over_all_batches(
    ranks: Pool, by_tokens: bool, counts: tuple[int, ...], stage: int
) -> None:
    recipe = replace(RECIPE, batches=(12, 12))
    loss = models.mean_over_tokens if by_tokens else models.mean_over_samples
    weight = models.counted_tokens if by_tokens else None
    size = models.counted_tokens if by_tokens else lambda batch: len(batch["tokens"])

    def mean(model: nn.Module) -> float:
        batches = [models.data(1 + i % 3, seed=500 + i, masked=True) for i in range(sum(counts))]
        with torch.no_grad():
            total = sum(loss(model, batch).item() * size(batch) for batch in batches)
        return total / sum(map(size, batches))

    model = models.build(recipe.spec)
    expected = [mean(model)]
    after_one = reference.train(replace(recipe, batches=(12,))).parameters
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(after_one[name])
    expected.append(mean(model))
    run = Run(recipe, uneven(stage))
    for first, second, parameters, training_mode in ranks.run(
        evaluate_between_steps, run, counts, weight, loss
    ):
        assert [first, second] == pytest.approx(expected, rel=1e-5)
        assert training_mode, "evaluate left the model in another mode"
        assert_close(parameters, reference.train(recipe).parameters)


def double_a_parameter(run: Run, writeback: bool) -> tuple[dict[str, Tensor], Tensor]:
    model, optimizer = training.prepare(run)
    training.take_step(run, model, optimizer, 0)
    with optimizer.full_parameters(writeback=writeback), torch.no_grad():
        model.blocks[1].up.weight.mul_(2)
        batch = training.on_device(run.recipe.batch(1))
        logits = model(batch["tokens"]).cpu()
    return training.whole_parameters(model, optimizer), logits


@pytest.mark.parametrize("stage", STAGES)
def test_writeback_keeps_changes_of_full_parameters(ranks: Pool, stage: int) -> None:
    recipe = replace(RECIPE, batches=(12, 12))
    expected = dict(reference.train(replace(recipe, batches=(12,))).parameters)
    expected["blocks.1.up.weight"] = expected["blocks.1.up.weight"] * 2
    model = models.build(recipe.spec)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(expected[name])
        logits = model(recipe.batch(1)["tokens"])
    for parameters, computed in ranks.run(double_a_parameter, Run(recipe, uneven(stage)), True):
        assert_close(parameters, expected)
        torch.testing.assert_close(computed, logits, rtol=1e-4, atol=1e-5)


def test_stage_3_drops_changes_without_writeback(ranks: Pool) -> None:
    recipe = replace(RECIPE, batches=(12,))
    for parameters, _ in ranks.run(
        double_a_parameter, Run(replace(RECIPE, batches=(12, 12)), uneven(3)), False
    ):
        assert_close(parameters, reference.train(recipe).parameters)


def result_of_step(run: Run) -> tuple[float, float | None, int, float, float, bool]:
    _, optimizer = training.prepare(run)
    made = optimizer.train_step(training.loss_of(run.recipe), training.batch_of(run, 0))
    return (
        made.loss,
        made.grad_norm,
        made.samples,
        made.seconds,
        made.waiting_seconds,
        made.skipped,
    )


@pytest.mark.parametrize("stage", STAGES)
def test_step_result(ranks: Pool, stage: int) -> None:
    recipe = replace(RECIPE, batches=(12,))
    expected = reference.train(recipe)
    for loss, norm, samples, seconds, waiting, skipped in ranks.run(
        result_of_step, Run(recipe, uneven(stage))
    ):
        assert loss == pytest.approx(expected.losses[0], rel=1e-5)
        assert norm is None or math.isfinite(norm)
        assert samples == 12
        assert 0 <= waiting <= seconds
        assert not skipped


def train_with_second_optimizer(run: Run) -> tuple[dict[str, Tensor] | None, str]:
    """Train after the first optimizer is deleted; at stage 3 the parameters are then gone."""
    model, first = training.prepare(run)
    del first
    gc.collect()
    try:
        optimizer = training.optimizer_of(model, run)
    except ValueError as error:
        return None, str(error)
    for step in range(len(run.recipe.batches)):
        training.take_step(run, model, optimizer, step)
    return training.whole_parameters(model, optimizer), ""


@pytest.mark.parametrize("stage", STAGES)
def test_deleted_optimizer_leaves_no_hooks(ranks: Pool, stage: int) -> None:
    for parameters, message in ranks.run(train_with_second_optimizer, Run(RECIPE, uneven(stage))):
        if stage == 3:
            assert "sharded by an optimizer that no longer exists" in message
        else:
            assert_close(parameters, reference.train(RECIPE).parameters)
