"""What a loop does to `.grad` between its passes and the update counts as in plain PyTorch, or is
an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any
from unittest import mock

import models
import pytest
import ranks as harness
import torch
import training
from models import ModelSpec
from ranks import Failure, Pool
from reference import Recipe
from torch import Tensor, nn
from training import IDLE_RANK, STAGES, UNEVEN, Run, assert_close, assert_raised, uneven

import poplar
from poplar import HeteroZeroOptimizer, Plan
from poplar.comm import Control

RECIPE = Recipe(spec=ModelSpec(blocks=2, kind="mlp"), batches=(12,) * 4, max_norm=0.05)
REMOVED_IN = (0, 2)
"""The steps in which the gradient of the head is removed."""
LAST = 3

Steps = tuple[list[float], dict[str, Tensor]]
"""The norms and the parameters after all steps."""

loss_fn = models.mean_over_samples


def set_to_none(model: nn.Module) -> None:
    """As DINO freezes its last layer in the first epoch."""
    for parameter in model.head.parameters():
        parameter.grad = None


def zero_grad_of_a_layer(model: nn.Module) -> None:
    model.head.zero_grad()


def passes(run: Run, model: nn.Module, optimizer: HeteroZeroOptimizer, step: int) -> None:
    for micro_batch in optimizer.micro_batches(training.batch_of(run, step)):
        loss_fn(model, micro_batch).backward()


# A step, in which `change` is called before or after clipping. On ranks and in one process.

Change = Callable[[nn.Module], None]
Clip = Callable[[], Tensor]


def clip_last(change: Change, model: nn.Module, clip: Clip) -> Tensor:
    change(model)
    return clip()


def clip_first(change: Change, model: nn.Module, clip: Clip) -> Tensor:
    norm = clip()
    change(model)
    return norm


def clip_twice(change: Change, model: nn.Module, clip: Clip) -> Tensor:
    clip()
    change(model)
    return clip()


ORDERS = (clip_last, clip_first, clip_twice)


def change_in(step: int, change: Change) -> Change:
    return change if step in REMOVED_IN else lambda _model: None


def train_alone(recipe: Recipe, order: Callable[..., Tensor], change: Change) -> Steps:
    model = models.build(recipe.spec)
    optimizer = recipe.optimizer_class(model.parameters(), **dict(recipe.options))
    norms = []
    for step in range(len(recipe.batches)):
        loss_fn(model, recipe.batch(step)).backward()

        def clip() -> Tensor:
            return torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.max_norm)

        norms.append(float(order(change_in(step, change), model, clip)))
        optimizer.step()
        optimizer.zero_grad()
    return norms, {name: p.detach() for name, p in model.named_parameters()}


def train_in_loops(
    run: Run, order: Callable[..., Tensor], change: Change, loop: str, scaled: bool = False
) -> Steps:
    model, optimizer = training.prepare(run)
    scaler = poplar.GradScaler(harness.device().type, init_scale=64.0, enabled=scaled)
    norms = []
    for step in range(len(run.recipe.batches)):
        batch = training.batch_of(run, step)
        if loop == "plain":
            scaler.scale(loss_fn(model, batch)).backward()
        else:
            for micro_batch in optimizer.micro_batches(batch):
                scaler.scale(loss_fn(model, micro_batch)).backward()
        scaler.unscale_(optimizer)

        def clip() -> Tensor:
            return optimizer.clip_grad_norm_(run.recipe.max_norm)

        norms.append(float(order(change_in(step, change), model, clip)))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return norms, training.whole_parameters(model, optimizer)


def assert_steps(found: Iterable[Steps], expected: Steps) -> None:
    for norms, parameters in found:
        assert norms == pytest.approx(expected[0], rel=1e-5)
        assert_close(parameters, expected[1])


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("order", ORDERS)
def test_removed_gradient_leaves_its_parameters_out(
    ranks: Pool, order: Callable[..., Tensor], stage: int
) -> None:
    """A rank has no samples, and a rank owns nothing."""
    run = Run(RECIPE, uneven(stage, IDLE_RANK))
    answers = ranks.run(train_in_loops, run, order, set_to_none, "micro_batches")
    assert_steps(answers, train_alone(RECIPE, order, set_to_none))


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(("loop", "scaled"), [("plain", False), ("micro_batches", True)])
def test_removed_gradient_in_plain_loops_and_after_unscaling(
    ranks: Pool, loop: str, scaled: bool, stage: int
) -> None:
    run = Run(RECIPE, Plan.manual("3,3,3,3", stage=stage, shares=UNEVEN))
    answers = ranks.run(train_in_loops, run, clip_last, zero_grad_of_a_layer, loop, scaled)
    assert_steps(answers, train_alone(RECIPE, clip_last, zero_grad_of_a_layer))


def train_with_hooks(run: Run) -> Steps:
    model, optimizer = training.prepare(run)
    step, norms = 0, []
    optimizer.register_step_pre_hook(lambda *_: change_in(step, set_to_none)(model))
    for step in range(len(run.recipe.batches)):
        norms.append(training.take_step(run, model, optimizer, step)[1])
    return norms, training.whole_parameters(model, optimizer)


@pytest.mark.parametrize("stage", STAGES)
def test_hooks_of_a_step_may_remove_gradients(ranks: Pool, stage: int) -> None:
    answers = ranks.run(train_with_hooks, Run(RECIPE, uneven(stage)))
    assert_steps(answers, train_alone(RECIPE, clip_first, set_to_none))


def remove_nan(run: Run) -> Steps:
    model, optimizer = training.prepare(run)
    model.head.bias.register_hook(lambda gradient: gradient * float("nan"))
    passes(run, model, optimizer, 0)
    set_to_none(model)
    norm = float(optimizer.clip_grad_norm_(run.recipe.max_norm))
    optimizer.step()
    return [norm], training.whole_parameters(model, optimizer)


@pytest.mark.parametrize("stage", STAGES)
def test_removed_nan_neither_raises_nor_skips_the_step(ranks: Pool, stage: int) -> None:
    """At stage 3 the weight of the head is reduced as factors; the last rank is left out."""
    factored = ("head",) if stage == 3 else ()
    given: dict[str, Any] = {"factored": factored, "left_out": (LAST,)}
    plan = uneven(stage, ((2, 3), (0, 3), (0, 4), ()), (0.5, 0.3, 0.2, 0.0), **given)
    recipe = replace(RECIPE, batches=(12,))
    answers = ranks.run(remove_nan, Run(recipe, plan))
    assert_steps(answers, train_alone(recipe, clip_last, set_to_none))


def remove_all(run: Run) -> tuple[float, bool]:
    """The norm of no gradients, and whether a step with them changes a parameter."""
    model, optimizer = training.prepare(run)
    before = training.whole_parameters(model, optimizer)
    passes(run, model, optimizer, 0)
    model.zero_grad()
    norm = float(optimizer.clip_grad_norm_(1.0))
    optimizer.step()
    after = training.whole_parameters(model, optimizer)
    return norm, all(torch.equal(after[name], value) for name, value in before.items())


@pytest.mark.parametrize("stage", STAGES)
def test_zero_grad_of_the_model_before_the_update_leaves_all_out(ranks: Pool, stage: int) -> None:
    assert set(ranks.run(remove_all, Run(RECIPE, uneven(stage)))) == {(0.0, True)}


def evaluate_before_the_update(run: Run) -> Steps:
    model, optimizer = training.prepare(run)
    norms = []
    for step in range(len(run.recipe.batches)):
        passes(run, model, optimizer, step)
        optimizer.evaluate(loss_fn, [run.recipe.batch(step)])
        change_in(step, set_to_none)(model)
        norms.append(float(optimizer.clip_grad_norm_(run.recipe.max_norm)))
        optimizer.step()
    return norms, training.whole_parameters(model, optimizer)


@pytest.mark.parametrize("stage", STAGES)
def test_evaluation_before_the_update_keeps_what_is_removed(ranks: Pool, stage: int) -> None:
    answers = ranks.run(evaluate_before_the_update, Run(RECIPE, uneven(stage)))
    assert_steps(answers, train_alone(RECIPE, clip_last, set_to_none))


# Ranks that differ


def remove_on_one_rank(run: Run) -> training.Answer:
    model, optimizer = training.prepare(run)

    def act() -> None:
        passes(run, model, optimizer, 1)
        if harness.rank() == LAST:
            set_to_none(model)
        optimizer.step()

    return training.between_good_steps(run, model, optimizer, act)


@pytest.mark.parametrize("stage", STAGES)
def test_gradient_removed_on_one_rank_is_an_error_on_all(ranks: Pool, stage: int) -> None:
    recipe = replace(RECIPE, batches=(12, 12))
    answers = ranks.run(remove_on_one_rank, Run(recipe, uneven(stage)))
    failures = training.assert_unchanged(answers, recipe)
    named = "['head.weight', 'head.bias'] on rank(s) [3]"
    advice = "give all ranks the same"
    assert_raised(failures, "whose .grad is None", named, advice, kind=ValueError)


def remove_on_one_rank_after_clipping(run: Run, clips_again: bool) -> list[Failure]:
    model, optimizer = training.prepare(run)
    passes(run, model, optimizer, 0)
    optimizer.clip_grad_norm_(1.0)
    if harness.rank() == LAST:
        set_to_none(model)
    if clips_again:
        optimizer.clip_grad_norm_(1.0)
    optimizer.step()
    with harness.catching() as caught:
        training.take_step(run, model, optimizer, 1)
    return caught


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("clips_again", [False, True], ids=["", "clips again"])
def test_gradient_removed_on_one_rank_after_clipping_is_an_error_of_the_next_step(
    ranks: Pool, clips_again: bool, stage: int
) -> None:
    run = Run(RECIPE, uneven(stage))
    answers = ranks.run(remove_on_one_rank_after_clipping, run, clips_again)
    assert_raised(
        [failure for (failure,) in answers], "head.weight", "load a checkpoint on all ranks"
    )


# Gradients of several tasks, at stage 0


class Tasks(nn.Module):
    """Two heads, of which each task uses one, and perhaps a layer that none uses."""

    def __init__(self, with_spare: bool) -> None:
        super().__init__()
        self.trunk = nn.Linear(6, 8)
        self.heads = nn.ModuleList([nn.Linear(8, 1), nn.Linear(8, 1)])
        self.spare = nn.Linear(2, 2) if with_spare else None

    def forward(self, x: Tensor, task: int) -> Tensor:
        return self.heads[task](self.trunk(x).tanh()).square().mean()


def add_gradients_of_tasks(
    model: Tasks,
    optimizer: torch.optim.Optimizer,
    batches: Iterable[Tensor],
    order: Callable[..., Tensor],
    clip: Clip,
    in_place: bool,
) -> list[float]:
    """As PCGrad does by hand: the gradients of each task, and then their sum in `.grad`.

    `in_place`: it is written into `.grad` where there is one.
    """
    norms = []
    for batch in batches:
        by_task = []
        for task in range(2):
            optimizer.zero_grad()
            model(batch, task).backward()
            by_task.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])

        def change(model: nn.Module, by_task: Any = by_task) -> None:
            for parameter, own in zip(model.parameters(), zip(*by_task, strict=True), strict=True):
                found = [gradient for gradient in own if gradient is not None]
                if in_place and parameter.grad is not None:
                    parameter.grad.copy_(sum(found))
                else:
                    parameter.grad = sum(found) if found else None

        norms.append(float(order(change, model, clip)))
        optimizer.step()
        optimizer.zero_grad()
    return norms


def build_tasks(dtype: torch.dtype, with_spare: bool = True) -> tuple[Tasks, list[Tensor]]:
    torch.manual_seed(3)
    return Tasks(with_spare).to(dtype), [torch.randn(12, 6, dtype=dtype) for _ in range(3)]


def add_gradients_on_ranks(
    dtype: torch.dtype,
    order: Callable[..., Tensor],
    with_spare: bool = True,
    in_place: bool = False,
) -> Steps:
    model, batches = build_tasks(dtype, with_spare)
    optimizer = HeteroZeroOptimizer(
        model.to(harness.device()),
        torch.optim.AdamW,
        plan=Plan.manual("3,3,3,3", stage=0),
        process_group=harness.group(),
        compute_dtype=dtype,
        lr=1e-2,
        weight_decay=0.1,
    )
    own = [batch.split(3)[harness.rank()].to(harness.device()) for batch in batches]
    norms = add_gradients_of_tasks(
        model, optimizer, own, order, lambda: optimizer.clip_grad_norm_(0.05), in_place
    )
    return norms, training.whole_parameters(model, optimizer)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("with_spare", [True, False])
@pytest.mark.parametrize("order", ORDERS)
def test_gradients_of_tasks_that_are_added_by_hand_update_all_heads(
    ranks: Pool, order: Callable[..., Tensor], with_spare: bool, in_place: bool
) -> None:
    """Also the head that the last backward has not used; the spare layer does not decay."""
    model, batches = build_tasks(torch.float32, with_spare)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    norms = add_gradients_of_tasks(
        model,
        optimizer,
        batches,
        order,
        lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05),
        in_place,
    )
    expected = {name: p.detach() for name, p in model.named_parameters()}
    changed = {n.partition(".")[0] for n, p in expected.items() if not torch.equal(p, before[n])}
    assert changed == {"trunk", "heads"}
    found = ranks.run(add_gradients_on_ranks, torch.float32, order, with_spare, in_place)
    assert_steps(found, (norms, expected))


def heads_after_bf16(order: Callable[..., Tensor]) -> tuple[bool, bool]:
    """Whether both heads, and whether the spare layer, have changed."""
    before, _ = build_tasks(torch.bfloat16)
    _, after = add_gradients_on_ranks(torch.bfloat16, order)
    changed = {n for n, p in before.named_parameters() if not torch.equal(p, after[n])}
    return {"heads.0.weight", "heads.1.weight"} <= changed, "spare.weight" in changed


def test_gradients_in_fp32_may_be_set_of_bf16_parameters(ranks: Pool) -> None:
    assert set(ranks.run(heads_after_bf16, clip_last)) == {(True, False)}


WITH_UNUSED = ModelSpec(blocks=2, unused=True)


def shown_gradients(open_form: bool) -> set[str]:
    """The parameters whose `.grad` is None after the passes, or in a hook of `train_step`."""
    run = Run(replace(RECIPE, spec=WITH_UNUSED), uneven(0, IDLE_RANK))
    model, optimizer = training.prepare(run)

    def hidden() -> set[str]:
        return {name for name, p in model.named_parameters() if p.grad is None}

    found: list[set[str]] = []
    if open_form:
        passes(run, model, optimizer, 0)
        found.append(hidden())
    else:
        optimizer.register_step_pre_hook(lambda *_: found.append(hidden()))
        training.take_step(run, model, optimizer, 0)
    return found[0]


@pytest.mark.parametrize("open_form", [True, False])
def test_stage_0_shows_no_gradient_of_what_no_rank_has_used(ranks: Pool, open_form: bool) -> None:
    """A rank has no samples, and sees the gradients of the others."""
    unused = {"never.weight", "never.bias", "blocks.1.never"}
    assert all(found == unused for found in ranks.run(shown_gradients, open_form))


def exchanges_by_step(spec: ModelSpec) -> list[list[str]]:
    """What the ranks exchange in each step, before its update, in a loop of the user."""
    run = Run(replace(RECIPE, spec=spec, batches=(12,) * 3), uneven(0))
    model, optimizer = training.prepare(run)
    found: list[list[str]] = []
    exchange = Control.exchange

    def noted(control: Control, values: Tensor, *, what: str) -> Any:
        found[-1].append(what)
        return exchange(control, values, what=what)

    with mock.patch.object(Control, "exchange", noted):
        for step in range(3):
            found.append([])
            passes(run, model, optimizer, step)
            optimizer.step()
    return found


def test_a_step_in_which_all_parameters_are_used_exchanges_nothing_more(ranks: Pool) -> None:
    what = "the parameters that a step uses"
    for used, unused in zip(
        ranks.run(exchanges_by_step, ModelSpec(blocks=2)),
        ranks.run(exchanges_by_step, WITH_UNUSED),
        strict=True,
    ):
        assert [step.count(what) for step in used] == [1, 0, 0], "not known in the first step"
        assert [step.count(what) for step in unused] == [1, 1, 1]
        assert used[1:] == [[name for name in step if name != what] for step in unused[1:]]


def set_on_one_rank(run: Run) -> training.Answer:
    model, optimizer = training.prepare(run)

    def act() -> None:
        passes(run, model, optimizer, 1)
        if harness.rank() == LAST:
            model.never.bias.grad = torch.ones_like(model.never.bias)
        optimizer.step()

    return training.between_good_steps(run, model, optimizer, act)


def test_stage_0_gradient_of_an_unused_parameter_set_on_one_rank_is_an_error_on_all(
    ranks: Pool,
) -> None:
    recipe = replace(RECIPE, spec=WITH_UNUSED, batches=(12, 12))
    failures = training.assert_unchanged(ranks.run(set_on_one_rank, Run(recipe, uneven(0))), recipe)
    assert_raised(failures, "whose .grad is None", "never.bias", kind=ValueError)


# Other changes


def set_after_clipping(run: Run, puts_back: bool = False) -> tuple[list[Failure], bool]:
    """Errors, and whether the parameters are the same after them."""
    model, optimizer = training.prepare(run)
    before = training.whole_parameters(model, optimizer)
    passes(run, model, optimizer, 0)
    given = model.head.bias.grad
    if puts_back:
        model.head.bias.grad = None
    optimizer.clip_grad_norm_(1.0)
    model.head.bias.grad = given if puts_back else torch.zeros_like(model.head.bias)
    with harness.catching() as caught:
        optimizer.step()
    here = {name: p for name, p in model.named_parameters() if not training.is_absent(p)}
    return caught, all(torch.equal(p.cpu(), before[name]) for name, p in here.items())


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gradient_set_after_clipping_is_an_error(ranks: Pool, stage: int) -> None:
    answers = ranks.run(set_after_clipping, Run(RECIPE, uneven(stage)))
    assert_raised([failure for (failure,), _ in answers], "Use stage 0, or change the loss")
    assert all(same for _, same in answers)


@pytest.mark.parametrize("stage", STAGES)
def test_gradient_that_is_put_back_after_clipping_is_an_error(ranks: Pool, stage: int) -> None:
    answers = ranks.run(set_after_clipping, Run(RECIPE, uneven(stage)), puts_back=True)
    assert_raised([failure for (failure,), _ in answers], "now it is what it was before")
    assert all(same for _, same in answers)


def clip_values(model: nn.Module) -> None:
    torch.nn.utils.clip_grad_value_(model.parameters(), 1e-3)


def write_to_data(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad.data.mul_(0.25)


def replace_by_another(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = parameter.grad.sign() * 1e-3


CHANGES: dict[str, Any] = {
    change.__name__: change for change in (clip_values, write_to_data, replace_by_another)
}


@pytest.mark.parametrize("scaled", [False, True], ids=["", "scaled"])
@pytest.mark.parametrize("order", [clip_last, clip_twice])
@pytest.mark.parametrize("change", CHANGES)
def test_stage_0_norm_is_that_of_the_gradient_of_now(
    ranks: Pool, change: str, order: Callable[..., Tensor], scaled: bool
) -> None:
    """Unscaling and clipping close the step, and `.grad` may change after it."""
    given = uneven(0), order, CHANGES[change]
    answers = ranks.run(train_in_loops, Run(RECIPE, given[0]), *given[1:], "micro_batches", scaled)
    assert_steps(answers, train_alone(RECIPE, *given[1:]))
