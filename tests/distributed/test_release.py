"""Releasing a model, full gradients and traces."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import models
import pytest
import torch
import training
from ranks import Pool, RanksFailed
from reference import Recipe
from torch import Tensor
from training import STAGES, Run

from poplar import HeteroZeroOptimizer, Plan

UNEVEN = ((2, 3), (4, 1), (0, 2), (0, 0))
SHARES = (0.5, 0.3, 0.2, 0.0)


def run_at(stage: int, **changes: Any) -> Run:
    plan = Plan(stage=stage, global_batch=12, micro_batches=UNEVEN, shares=SHARES)
    return Run(Recipe(**changes), plan)


def step_and_release(run: Run, next_stage: int) -> dict[str, Any]:
    model, optimizer = training.prepare(run)
    training.take_step(run, model, optimizer, 0)
    expected = training.whole_parameters(model, optimizer)
    optimizer.release()
    released = {name: p.detach().cpu().clone() for name, p in model.named_parameters()}
    with pytest.raises(RuntimeError, match="has released its model"):
        optimizer.memory()
    own_memory = len({p.untyped_storage().data_ptr() for p in model.parameters()})
    again = HeteroZeroOptimizer(model, torch.optim.SGD, stage=next_stage, lr=0.1)
    after = training.whole_parameters(model, again)
    hooks = sum(len(module._forward_hooks) for module in model.modules())
    again.release()
    left = sum(len(module._forward_hooks) for module in model.modules())
    return {
        "expected": expected,
        "released": released,
        "after": after,
        "own_memory": own_memory == len(list(model.parameters())),
        "hooks": (next_stage == 3, hooks > 0, left),
    }


@pytest.mark.parametrize("stage", STAGES)
def test_released_model_is_complete_and_can_be_reused(ranks: Pool, stage):
    for seen in ranks.run(step_and_release, run_at(stage), 3 - stage):
        torch.testing.assert_close(seen["released"], seen["expected"], rtol=0, atol=0)
        torch.testing.assert_close(seen["after"], seen["expected"], rtol=0, atol=0)
        assert seen["own_memory"]
        shards_parameters, hooked, left = seen["hooks"]
        assert hooked == shards_parameters
        assert left == 0


def release_during_step(run: Run) -> None:
    model, optimizer = training.prepare(run)
    batch = training.batch_of(run, 0)
    for micro_batch in optimizer.micro_batches(batch):
        training.loss_of(run.recipe)(model, micro_batch).backward()
    optimizer.release()


def engine_is_freed_beside(run: Run) -> bool:
    model, optimizer = training.prepare(run)
    training.take_step(run, model, optimizer, 0)
    engine, update = (
        weakref.ref(optimizer._training.engine),
        weakref.ref(optimizer._training.update),
    )
    optimizer.release()
    gc.collect()
    return engine() is None and update() is None


@pytest.mark.parametrize("stage", STAGES)
def test_released_optimizer_holds_no_state(ranks: Pool, stage):
    assert all(ranks.run(engine_is_freed_beside, run_at(stage)))


def test_release_during_step_raises_on_all_ranks(ranks: Pool):
    with pytest.raises(RanksFailed, match="in the middle of a step"):
        ranks.run(release_during_step, run_at(1))


def gradients_of_a_step(run: Run, max_norm: float | None) -> dict[str, Tensor]:
    model, optimizer = training.prepare(run)
    for micro_batch in optimizer.micro_batches(training.batch_of(run, 0)):
        training.loss_of(run.recipe)(model, micro_batch).backward()
    if max_norm is not None:
        optimizer.clip_grad_norm_(max_norm)
    return {name: value.cpu() for name, value in optimizer.full_gradients().items()}


def expected_gradients(recipe: Recipe, max_norm: float | None) -> dict[str, Tensor]:
    model = models.build(recipe.spec)
    training.loss_of(recipe)(model, recipe.batch(0)).backward()
    if max_norm is not None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("max_norm", [None, 0.1])
@pytest.mark.parametrize("stage", STAGES)
def test_full_gradients_equal_one_process(ranks: Pool, stage, max_norm):
    run = run_at(stage)
    expected = expected_gradients(run.recipe, max_norm)
    for gradients in ranks.run(gradients_of_a_step, run, max_norm):
        assert gradients.keys() == expected.keys()
        for name, gradient in gradients.items():
            scale = float(expected[name].abs().max()) + 1e-12
            torch.testing.assert_close(gradient, expected[name], rtol=0, atol=1e-5 * scale)


def trace_of_a_step(run: Run) -> list[tuple[str, str, float, float]]:
    model, optimizer = training.prepare(run)
    training.take_step(run, model, optimizer, 0)
    with optimizer.trace() as spans:
        training.take_step(run, model, optimizer, 1)
    count = len(spans)
    training.take_step(run, model, optimizer, 2)
    assert len(spans) == count, "recorded after the end of its context"
    return [(span.kind, span.what, span.start, span.stop) for span in spans]


@pytest.mark.parametrize("stage", STAGES)
def test_trace_has_the_same_waits_on_all_ranks(ranks: Pool, stage):
    traces = ranks.run(trace_of_a_step, run_at(stage))
    waits = [sorted(what for kind, what, *_ in trace if kind == "wait") for trace in traces]
    assert all(names == waits[0] for names in waits)
    for trace in traces:
        kinds = [kind for kind, *_ in trace]
        assert kinds.count("optimizer") == 1
        assert all(start <= stop for *_, start, stop in trace)
    passes = sum(kind == "pass" for kind, *_ in traces[0])
    assert passes == 2
