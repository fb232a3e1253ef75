"""Default devices (`set_default_device`, `with torch.device(...)`) and dtypes change nothing.

The default device is "meta" here: a tensor that Poplar created on it would have no values, and the
next use would raise.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import models
import pytest
import ranks as at
import torch
from models import ModelSpec
from torch import Tensor, nn
from training import STAGES, assert_same

import poplar
from poplar import HeteroBatchSampler, HeteroZeroOptimizer, Plan
from poplar.data import split_stream

SPEC = ModelSpec(kind="mlp", blocks=2)
SHARES = (0.7, 0.3)
PASSES = {0: ((2, 2), (2,)), 1: ((2, 2), (2,)), 2: ((2, 2), (2, 0)), 3: ((2, 2), (2, 0))}


@contextmanager
def default_device(way: str) -> Iterator[None]:
    """The default device is "meta", set in one of two ways, or the default dtype is float64."""
    if way == "context":
        with torch.device("meta"):
            yield
        return
    torch.set_default_device("meta" if way == "setting" else None)
    torch.set_default_dtype(torch.float64 if way == "dtype" else torch.float32)
    try:
        yield
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)


def own_part(plan: Plan, step: int) -> dict[str, Tensor]:
    with torch.device("cpu"):
        batch = models.data(6, seed=step)
    start = sum(plan.samples(rank) for rank in range(at.rank()))
    part = models.part(batch, start, start + plan.samples(at.rank()))
    return {name: value.to(at.device()) for name, value in part.items()}


def train(
    way: str, stage: int, communicator: str, dtype: torch.dtype, folder: str
) -> tuple[dict[str, Tensor], list[float]]:
    """Parameters and values after every kind of call."""
    model = models.build(SPEC).to(at.device())
    with default_device(way):
        return use(model, stage, communicator, dtype, folder)


def use(
    model: nn.Module, stage: int, communicator: str, dtype: torch.dtype, folder: str
) -> tuple[dict[str, Tensor], list[float]]:
    plan = Plan(stage=stage, global_batch=6, micro_batches=PASSES[stage], shares=SHARES)
    optimizer = HeteroZeroOptimizer(
        model,
        torch.optim.AdamW,
        plan=plan,
        process_group=at.group(),
        communicator=communicator,
        compute_dtype=dtype,
        lr=1e-2,
    )
    loss, found = models.mean_over_samples, []
    result = optimizer.train_step(loss, own_part(plan, 0), max_norm=1.0)
    found += [float(result.loss), float(result.grad_norm)]
    scaler = poplar.GradScaler(at.device().type, init_scale=8.0)
    for norm_type in (2.0, 3.0, float("inf")):
        for micro_batch in optimizer.micro_batches(own_part(plan, 1), models.counted_tokens):
            scaler.scale(loss(model, micro_batch)).backward()
        scaler.unscale_(optimizer)
        found.append(float(optimizer.clip_grad_norm_(0.1, norm_type)))
        found += [float(value.sum()) for value in optimizer.full_gradients().values()]
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    found.append(optimizer.evaluate(loss, [own_part(plan, 2)] * (1 + at.rank())))
    optimizer.verify_replicas()
    optimizer.load_state_dict(optimizer.state_dict())
    state = optimizer.full_state_dict()
    found += [] if state is None else [len(state["state"])]
    optimizer.save_model(Path(folder) / f"{stage}-{communicator}.safetensors")
    passes = tuple(reversed(PASSES[stage])) if stage < 2 else ((2, 0), (2, 2))
    swapped = Plan(stage=stage, global_batch=6, micro_batches=passes, shares=SHARES[::-1])
    optimizer.apply_plan(swapped)
    found.append(float(optimizer.train_step(loss, own_part(swapped, 3)).loss))
    with optimizer.full_parameters():
        parameters = {name: p.detach().cpu().clone() for name, p in model.named_parameters()}
    optimizer.release()
    return parameters, found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("communicator", ["process_group", "shared_memory", "hierarchical"])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("way", ["context", "dtype"])
def test_training_does_not_depend_on_it(ranks, way, stage, communicator, dtype, tmp_path):
    arguments = (stage, communicator, dtype, str(tmp_path))
    expected = ranks.run(train, "none", *arguments, ranks=2)
    for (parameters, found), (wanted, values) in zip(
        ranks.run(train, way, *arguments, ranks=2), expected, strict=True
    ):
        assert_same(parameters, wanted)
        assert found == values


def tune(way: str) -> tuple[Plan, bool]:
    model = models.build(SPEC).to(at.device())
    batch = {name: value.to(at.device()) for name, value in models.data(6, seed=0).items()}
    options: dict[str, Any] = {"process_group": at.group()}
    with default_device(way):
        plan = poplar.autotune(
            model,
            models.mean_over_samples,
            batch,
            global_batch=6,
            leave_out="never",  # for verify()
            max_batch=8,
            seconds=0.3,
            cache=False,
            progress=False,
            **options,
        )
        verified = poplar.verify(model, models.mean_over_samples, batch, plan, **options)
    return plan, verified.ok


@pytest.mark.parametrize("way", ["context", "dtype"])
def test_autotune_and_verify_do_not_depend_on_it(ranks, way):
    (plan, first), (other, second) = ranks.run(tune, way, ranks=2)
    assert plan == other
    assert first
    assert second


def indices(way: str) -> list[list[list[int]]]:
    plan = Plan.even(2, 4, 2, stage=0)
    drawn = []
    with default_device(way):
        for shuffle in (True, False):
            sampler = HeteroBatchSampler(10, plan, rank=1, shuffle=shuffle)
            drawn.append(list(sampler))
            sampler.load_state_dict(sampler.state_dict())
        stream = split_stream(range(10), plan, rank=1)
        drawn.append(list(stream))
        stream.load_state_dict(stream.state_dict())
    return drawn


@pytest.mark.parametrize("way", ["setting", "context"])
def test_samplers_do_not_depend_on_it(way):
    assert indices(way) == indices("none")
