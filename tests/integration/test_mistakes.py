"""Everyday mistakes: each ends in an error or a warning that names the fix.

`MISTAKES` is the list. Every one is made between two correct steps on two ranks with an uneven
plan. After an error on all ranks nothing has changed, and the next correct step gives the result of
one process; so no mistake trains on a wrong gradient.
"""

from __future__ import annotations

import contextlib
import copy
import io
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import models
import pytest
import ranks as harness
import reference
import torch
import torchrun
import training
from models import ModelSpec
from ranks import Failure, Pool
from readme import program_of
from reference import Recipe
from subset import choose
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from training import STAGES, Answer, Run

import poplar
from poplar import HeteroBatchSampler, HeteroZeroOptimizer, Plan
from poplar.zero.streams import Streams

RECIPE = Recipe(spec=ModelSpec(blocks=2, kind="mlp"), batches=(8, 8))
LAST = 1
"""The rank that makes a mistake of one rank."""

loss_fn = models.mean_over_samples


@dataclass
class Made:
    """What a mistake works with, on one rank."""

    run: Run
    model: nn.Module
    optimizer: HeteroZeroOptimizer
    batch: dict[str, Any]

    def new_optimizer(self, model: nn.Module | None = None, **changed: Any) -> HeteroZeroOptimizer:
        arguments: dict[str, Any] = {
            "optimizer_class": torch.optim.SGD,
            "plan": self.run.plan,
            "process_group": harness.group(),
            "lr": 0.1,
            **changed,
        }
        other = models.build(RECIPE.spec) if model is None else model
        return HeteroZeroOptimizer(other, **arguments)


def plan_of(stage: int) -> Plan:
    return Plan(stage=stage, global_batch=8, micro_batches=((3, 2), (2, 1)), shares=(0.7, 0.3))


# In the loop


def backward_outside_of_micro_batches(made: Made) -> None:
    loss_fn(made.model, made.batch).backward()
    made.optimizer.step()


def accumulation_with_no_sync(made: Made) -> None:
    with made.optimizer.no_sync():
        loss_fn(made.model, made.batch).backward()
    made.optimizer.step()


def gradients_set_by_hand(made: Made) -> None:
    with made.optimizer.full_parameters():
        parameters = list(made.model.parameters())
        shapes = [torch.full_like(p, 0.1) for p in parameters]
    for parameter, gradient in zip(parameters, shapes, strict=True):
        parameter.grad = gradient
    made.optimizer.step()


def body_without_backward(made: Made) -> None:
    for micro_batch in made.optimizer.micro_batches(made.batch):
        loss_fn(made.model, micro_batch)
    made.optimizer.step()


def body_that_skips_a_micro_batch(made: Made) -> None:
    for number, micro_batch in enumerate(made.optimizer.micro_batches(made.batch)):
        if harness.rank() == LAST and number == 0:
            continue
        loss_fn(made.model, micro_batch).backward()
    made.optimizer.step()


def zero_grad_in_the_loop(made: Made) -> None:
    for micro_batch in made.optimizer.micro_batches(made.batch):
        made.optimizer.zero_grad()
        loss_fn(made.model, micro_batch).backward()
    made.optimizer.step()


def step_in_the_loop(made: Made) -> None:
    for micro_batch in made.optimizer.micro_batches(made.batch):
        loss_fn(made.model, micro_batch).backward()
        made.optimizer.step()


def two_backwards_in_the_loop(made: Made) -> None:
    for micro_batch in made.optimizer.micro_batches(made.batch):
        loss_fn(made.model, micro_batch).backward()
        loss_fn(made.model, micro_batch).backward()
    made.optimizer.step()


def loop_left_early(made: Made) -> None:
    for micro_batch in made.optimizer.micro_batches(made.batch):
        loss_fn(made.model, micro_batch).backward()
        break
    made.optimizer.step()


def step_without_backward(made: Made) -> None:
    made.optimizer.step()


def zero_grad_before_step(made: Made) -> None:
    for micro_batch in made.optimizer.micro_batches(made.batch):
        loss_fn(made.model, micro_batch).backward()
    made.optimizer.zero_grad()
    made.optimizer.step()


def no_step_after_the_loop(made: Made) -> None:
    for _ in range(2):
        for micro_batch in made.optimizer.micro_batches(made.batch):
            loss_fn(made.model, micro_batch).backward()
    made.optimizer.zero_grad()


def train_step_in_the_loop(made: Made) -> None:
    for micro_batch in made.optimizer.micro_batches(made.batch):
        made.optimizer.train_step(loss_fn, micro_batch)


def backward_in_the_loss_function(made: Made) -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        value = loss_fn(model, batch)
        value.backward()
        return value

    made.optimizer.train_step(loss, made.batch)


def backward_in_the_first_loss_function(made: Made) -> None:
    model = models.build(RECIPE.spec)
    backward_in_the_loss_function(replace(made, model=model, optimizer=made.new_optimizer(model)))


def error_in_the_loss_function(made: Made) -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        raise KeyError("labels of the user")

    made.optimizer.train_step(loss, made.batch)


def evaluation_in_the_loss_function(made: Made) -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        made.optimizer.evaluate(loss_fn, [batch])
        return loss_fn(model, batch)

    made.optimizer.train_step(loss, made.batch)


def training_in_the_loss_function(made: Made) -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        made.optimizer.train_step(loss_fn, batch)
        return loss_fn(model, batch)

    made.optimizer.train_step(loss, made.batch)


def detached_loss(made: Made) -> None:
    made.optimizer.train_step(lambda model, batch: loss_fn(model, batch).detach(), made.batch)


def step_inside_full_parameters(made: Made) -> None:
    with made.optimizer.full_parameters():
        made.optimizer.train_step(loss_fn, made.batch)


def loss_per_sample(made: Made) -> None:
    made.optimizer.train_step(lambda model, batch: model(batch["tokens"]).sum((1, 2)), made.batch)


# Gradients


def passes(made: Made) -> None:
    for micro_batch in made.optimizer.micro_batches(made.batch):
        loss_fn(made.model, micro_batch).backward()


def clip_with_torch(made: Made) -> None:
    passes(made)
    torch.nn.utils.clip_grad_norm_(made.model.parameters(), 0.1)
    made.optimizer.step()


def clip_with_torch_in_the_loop(made: Made) -> None:
    for micro_batch in made.optimizer.micro_batches(made.batch):
        loss_fn(made.model, micro_batch).backward()
        torch.nn.utils.clip_grad_norm_(made.model.parameters(), 0.1)
    made.optimizer.step()


def clip_values_with_torch(made: Made) -> None:
    passes(made)
    torch.nn.utils.clip_grad_value_(made.model.parameters(), 0.1)
    made.optimizer.step()


def read_gradients(made: Made) -> None:
    passes(made)
    sum(float(p.grad.norm()) for p in made.model.parameters() if p.grad is not None)
    made.optimizer.step()


def gradient_set(made: Made) -> None:
    passes(made)
    for parameter in made.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    made.optimizer.step()


def gradient_removed_in_the_loop(made: Made) -> None:
    for micro_batch in made.optimizer.micro_batches(made.batch):
        loss_fn(made.model, micro_batch).backward()
        made.model.head.zero_grad()
    made.optimizer.step()


def gradient_set_in_the_last_pass(made: Made) -> None:
    for number, micro_batch in enumerate(made.optimizer.micro_batches(made.batch)):
        loss_fn(made.model, micro_batch).backward()
        if number == 1:
            made.model.head.bias.grad = torch.ones(37)
    made.optimizer.step()


def scale_with_torch(made: Made) -> None:
    scaler = torch.amp.GradScaler(harness.device().type, init_scale=256.0)
    for micro_batch in made.optimizer.micro_batches(made.batch):
        scaler.scale(loss_fn(made.model, micro_batch)).backward()
    scaler.step(made.optimizer)


def fp16_without_a_loss_scale(made: Made) -> None:
    model = models.build(RECIPE.spec)
    optimizer = made.new_optimizer(model, compute_dtype=torch.float16)
    for micro_batch in optimizer.micro_batches(made.batch):
        loss_fn(model, micro_batch).backward()
    optimizer.step()


def step_of_a_second_optimizer(made: Made) -> None:
    second = torch.optim.SGD(made.model.parameters(), lr=0.1)
    passes(made)
    second.step()
    made.optimizer.step()


def nonfinite_loss(made: Made) -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        value = loss_fn(model, batch)
        return (
            value * float("nan") if harness.rank() == LAST and len(batch["tokens"]) == 1 else value
        )

    made.optimizer.train_step(loss, made.batch)


def nonfinite_loss_in_an_own_loop(made: Made) -> None:
    """Without clipping; nothing tells Poplar the loss."""
    for number, micro_batch in enumerate(made.optimizer.micro_batches(made.batch)):
        bad = harness.rank() == LAST and number == 1
        (loss_fn(made.model, micro_batch) * (float("nan") if bad else 1.0)).backward()
    made.optimizer.step()


def nonfinite_gradient(made: Made) -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        value = loss_fn(model, batch)
        return value + (value - value.detach()).clamp(min=0).sqrt()  # its slope at 0 is infinite

    made.optimizer.train_step(loss, made.batch, max_norm=1.0)


# The model


def wrapped_in_ddp(made: Made) -> None:
    wrapped = nn.parallel.DistributedDataParallel(made.model, process_group=harness.group())
    for micro_batch in made.optimizer.micro_batches(made.batch):
        loss_fn(wrapped, micro_batch).backward()
    made.optimizer.step()


def compiled_in_ddp(made: Made) -> None:
    compiled = torch.compile(made.model, backend="aot_eager")
    wrapped = nn.parallel.DistributedDataParallel(compiled, process_group=harness.group())
    made.optimizer.train_step(lambda _, batch: loss_fn(wrapped, batch), made.batch)


def given_in_ddp(made: Made) -> None:
    model = models.build(RECIPE.spec)
    made.new_optimizer(nn.parallel.DistributedDataParallel(model, process_group=harness.group()))


def given_with_ddp_inside(made: Made) -> None:
    model = models.build(RECIPE.spec)
    wrapped = nn.parallel.DistributedDataParallel(model, process_group=harness.group())
    made.new_optimizer(nn.Sequential(wrapped))


def given_in_fsdp2(made: Made) -> None:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    model = models.build(RECIPE.spec)
    fully_shard(model, mesh=DeviceMesh.from_group(harness.group(), harness.device().type))
    made.new_optimizer(model)


def sharded_by_fsdp2(made: Made) -> None:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    model = models.build(RECIPE.spec)
    optimizer = made.new_optimizer(model)
    mesh = DeviceMesh.from_group(harness.group(), harness.device().type)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    optimizer.train_step(loss_fn, made.batch)


def parameter_added(made: Made) -> None:
    made.model.extra = nn.Linear(3, 3)
    try:
        made.optimizer.train_step(loss_fn, made.batch)
    finally:
        del made.model.extra


def parameter_replaced(made: Made) -> None:
    head = made.model.head
    made.model.head = copy.copy(head)
    made.model.head._parameters = {"weight": nn.Parameter(torch.ones(37, 26)), "bias": head.bias}
    try:
        made.optimizer.train_step(loss_fn, made.batch)
    finally:
        made.model.head = head


def model_converted(made: Made) -> None:
    kept = [p.data for p in made.model.parameters()]
    made.model.half()
    try:
        made.optimizer.train_step(loss_fn, made.batch)
    finally:
        for parameter, data in zip(made.model.parameters(), kept, strict=True):
            parameter.data = data


def model_converted_before_a_plain_backward(made: Made) -> None:
    kept = [p.data for p in made.model.parameters()]
    made.model.double()
    try:
        with mock.patch.object(made.optimizer._training.engine.hooks, "uneven_samples", None):
            loss_fn(made.model, made.batch).backward()
    finally:
        for parameter, data in zip(made.model.parameters(), kept, strict=True):
            parameter.data = data
            parameter.grad = None


def parameter_unfrozen(made: Made) -> None:
    model = models.build(replace(RECIPE.spec, kind="transformer", frozen=True))
    optimizer = made.new_optimizer(model)
    model.requires_grad_(True)
    optimizer.train_step(loss_fn, made.batch)


def parameter_of_no_group_unfrozen(made: Made) -> None:
    model = models.build(replace(RECIPE.spec, kind="transformer", frozen=True))
    optimizer = made.new_optimizer(model, params=[p for p in model.parameters() if p.requires_grad])
    model.requires_grad_(True)
    optimizer.train_step(loss_fn, made.batch)


def param_groups_changed(made: Made) -> None:
    removed = made.optimizer.param_groups[0]["params"].pop()
    try:
        made.optimizer.train_step(loss_fn, made.batch)
    finally:
        made.optimizer.param_groups[0]["params"].append(removed)


def param_group_added(made: Made) -> None:
    made.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})


def parameters_in_no_group(made: Made) -> None:
    """Another optimizer is meant to train the head, or nothing is."""
    model = models.build(RECIPE.spec)
    made.new_optimizer(model, params=model.blocks.parameters())


def model_in_evaluation_mode(made: Made) -> None:
    model = models.build(RECIPE.spec).eval()
    made.new_optimizer(model).train_step(loss_fn, made.batch)


def batch_norm_in_training_mode(made: Made) -> None:
    made.new_optimizer(models.build(replace(RECIPE.spec, kind="batch_norm")))


def sync_batch_norm_in_training_mode(made: Made) -> None:
    model = models.build(replace(RECIPE.spec, kind="batch_norm"))
    model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    made.new_optimizer(model, allow_forward_state=True)


def two_optimizers_on_one_model(made: Made) -> None:
    made.new_optimizer(made.model)


def parameter_written(made: Made) -> None:
    for parameter in made.model.parameters():
        parameter.data.clamp_(-1.0, 1.0)


def penalty_on_parameters(made: Made) -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        penalty = sum(parameter.square().sum() for parameter in model.parameters())
        return loss_fn(model, batch) + penalty

    made.optimizer.train_step(loss, made.batch)


def model_copied(made: Made) -> None:
    copy.deepcopy(made.model)


def model_pickled(made: Made) -> None:
    torch.save(made.model, io.BytesIO())


def state_dict_pickled(made: Made) -> None:
    torch.save(made.model.state_dict(), io.BytesIO())


# Optimizer classes


class Lamb(torch.optim.Optimizer):
    """The ratio of two norms of a tensor scales its update."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    ratio = p.detach().norm() / p.grad.norm().clamp(min=1e-6)
                    p.data.add_(p.grad * ratio, alpha=-group["lr"])


class Prodigy(torch.optim.Optimizer):
    """Estimates its step size over the whole group, and keeps the estimate there."""

    def __init__(self, params: Any, lr: float = 1.0, d: float = 1e-6) -> None:
        super().__init__(params, {"lr": lr, "d": d})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            gradients = [p.grad for p in group["params"] if p.grad is not None]
            group["d"] = max([group["d"], *(1e-6 * float(g.norm()) for g in gradients)])
            for p in group["params"]:
                if p.grad is not None:
                    p.data.add_(p.grad.sign(), alpha=-group["lr"] * group["d"])


class ScheduleFree(torch.optim.SGD):
    """Counts its steps in the param group."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
        super().step(closure)


class EightBit(torch.optim.Optimizer):
    """Quantizes the momentum of large tensors in blocks."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if p.numel() >= 4096:
                    state["scale"] = p.grad.abs().amax() / 127
                    state["momentum"] = (p.grad / state["scale"]).round().to(torch.int8)
                p.data.add_(p.grad, alpha=-group["lr"])


class RowWise(torch.optim.Optimizer):
    """Has one state value for 64 elements, and updates element by element."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                self.state[p]["second"] = torch.zeros(p.numel() // 64)
                p.data.add_(p.grad, alpha=-group["lr"])


def with_class(kind: Any, **options: Any) -> Callable[[Made], None]:
    def build(made: Made) -> None:
        made.new_optimizer(optimizer_class=kind, **options)

    return build


def with_an_instance(made: Made) -> None:
    model = models.build(RECIPE.spec)
    made.new_optimizer(model, optimizer_class=torch.optim.AdamW(model.parameters()))


def parameters_for_a_model(made: Made) -> None:
    made.new_optimizer(models.build(RECIPE.spec).parameters())


def state_with_fewer_names(made: Made) -> None:
    state = made.optimizer.state_dict()
    state["param_groups"][0]["param_names"] = ["head.weight"]
    made.optimizer.load_state_dict(state)


# Plans and data


def plan_for_another_world_size(made: Made) -> None:
    made.new_optimizer(plan=Plan.even(3, global_batch=6, micro_batch=2, stage=made.run.plan.stage))


def plan_of_another_stage(made: Made) -> None:
    made.new_optimizer(stage=(made.run.plan.stage + 1) % 4)


def neither_plan_nor_stage(made: Made) -> None:
    made.new_optimizer(plan=None)


def batch_of_another_size(made: Made) -> None:
    whole = {key: torch.cat([value, value]) for key, value in made.batch.items()}
    made.optimizer.train_step(loss_fn, whole)


def batches_dropped_before_a_change(made: Made) -> None:
    plan, data = made.run.plan, models.data(64, seed=0)
    fresh = made.new_optimizer()
    for number, indices in enumerate(HeteroBatchSampler(64, plan, rank=harness.rank())):
        if number < 2:
            continue
        fresh.train_step(loss_fn, {name: values[indices] for name, values in data.items()})
        if number == 2:
            fresh.apply_plan(replace(plan, micro_batches=((2, 1), (3, 2))))


def average_in_frozen_parameters(made: Made) -> None:
    model = models.build(RECIPE.spec).to(harness.device())
    model.head.requires_grad_(False)
    fresh = made.new_optimizer(model, compute_dtype=torch.bfloat16)
    for _ in range(3):
        fresh.train_step(loss_fn, made.batch)
        with torch.no_grad():
            model.head.weight.mul_(0.999).add_(0.001)


def batch_sampler_as_sampler(made: Made) -> None:
    sampler = HeteroBatchSampler(64, made.run.plan, rank=harness.rank())
    loader = DataLoader(TensorDataset(torch.ones(64, 3)), batch_size=6, sampler=sampler)
    made.optimizer.train_step(loss_fn, next(iter(loader)))


def stream_with_a_batch_size(made: Made) -> None:
    stream = poplar.split_stream(torch.ones(64, 3), made.run.plan, rank=harness.rank())
    made.optimizer.train_step(loss_fn, next(iter(DataLoader(stream, batch_size=6))))


def samplers_with_different_seeds(made: Made) -> None:
    same = HeteroBatchSampler(64, made.run.plan, seed=5, rank=harness.rank())  # of an evaluation
    own = HeteroBatchSampler(64, made.run.plan, seed=harness.rank(), rank=harness.rank())
    fresh = made.new_optimizer()
    list(same)
    next(iter(own))
    with pytest.raises(ValueError, match="give all ranks the same"):
        fresh.train_step(loss_fn, made.batch)
    fresh.train_step(loss_fn, made.batch)  # a handled error does not end the check


def same_batch_on_all_ranks(made: Made) -> None:
    plan = Plan.even(2, global_batch=8, micro_batch=4, stage=made.run.plan.stage)
    made.new_optimizer(plan=plan).train_step(loss_fn, models.data(4, seed=0))


def sampler_divided_again(made: Made) -> None:
    from accelerate.data_loader import BatchSamplerShard

    BatchSamplerShard(HeteroBatchSampler(64, made.run.plan, rank=0), 2, harness.rank())


SHARDED = (1, 2, 3)


@dataclass(frozen=True)
class Mistake:
    """One mistake and what says so."""

    make: Callable[[Made], None]
    says: str
    """A part of the message, on at least one rank; it names the fix."""
    stages: tuple[int, ...] = STAGES
    warns: bool = False
    """A warning, and training goes on; otherwise an error on all ranks, and nothing is applied."""
    local: bool = False
    """An error of a call without communication: on the ranks that make it."""
    name: str = ""

    def __str__(self) -> str:
        return self.name or self.make.__name__.replace("_", " ")


MISTAKES = [
    Mistake(backward_outside_of_micro_batches, "optimizer.micro_batches(batch)"),
    Mistake(accumulation_with_no_sync, "optimizer.micro_batches(batch)"),
    Mistake(gradients_set_by_hand, "optimizer.micro_batches(batch)"),
    Mistake(body_without_backward, "call loss.backward() once for every micro-batch"),
    Mistake(body_that_skips_a_micro_batch, "give it the weight 0"),
    Mistake(zero_grad_in_the_loop, "call it after step()"),
    Mistake(step_in_the_loop, "call it after the loop"),
    Mistake(two_backwards_in_the_loop, "add the losses first"),
    Mistake(loop_left_early, "start the next step with a new micro_batches()"),
    Mistake(step_without_backward, "step() without a backward"),
    Mistake(zero_grad_before_step, "step() without a backward"),
    Mistake(no_step_after_the_loop, "call optimizer.step() after the micro_batches", warns=True),
    Mistake(train_step_in_the_loop, "end the loop first"),
    Mistake(backward_in_the_loss_function, "must only return the loss"),
    Mistake(backward_in_the_first_loss_function, "must only return the loss", stages=(3,)),
    Mistake(detached_loss, "return the loss with its graph"),
    Mistake(evaluation_in_the_loss_function, "evaluate() inside loss_fn"),
    Mistake(training_in_the_loss_function, "train_step() inside loss_fn"),
    Mistake(loss_per_sample, "return the mean over the micro-batch"),
    Mistake(clip_with_torch, "optimizer.clip_grad_norm_(max_norm)", stages=SHARDED),
    Mistake(clip_with_torch_in_the_loop, "optimizer.clip_grad_norm_(max_norm)"),
    Mistake(clip_values_with_torch, "train_step(..., max_norm=...)", stages=SHARDED),
    Mistake(read_gradients, "optimizer.full_gradients()", stages=SHARDED),
    Mistake(gradient_set, "Use stage 0, or change the loss", stages=SHARDED),
    Mistake(gradient_removed_in_the_loop, "Set it after the loop, on every rank"),
    Mistake(gradient_set_in_the_last_pass, "Set it after the loop, on every rank"),
    Mistake(scale_with_torch, "poplar.GradScaler"),
    Mistake(fp16_without_a_loss_scale, "scaler = poplar.GradScaler"),
    Mistake(step_of_a_second_optimizer, "the gradient is not in .grad", stages=SHARDED),
    Mistake(nonfinite_loss, "rank 1: the loss is nan in pass 2 of 2"),
    Mistake(nonfinite_loss_in_an_own_loop, "the gradient norm is not finite; no rank applied"),
    Mistake(nonfinite_gradient, "the gradient norm is not finite"),
    Mistake(wrapped_in_ddp, "Do not wrap", stages=(0, 1, 2)),  # at stage 3 DDP itself raises
    Mistake(compiled_in_ddp, "Do not wrap", stages=(0, 1, 2)),
    Mistake(given_in_ddp, "pass the unwrapped model", stages=(0, 3)),
    Mistake(given_with_ddp_inside, "pass the unwrapped model", stages=(0, 3)),
    Mistake(given_in_fsdp2, "pass the unwrapped model", stages=(0, 3)),
    Mistake(sharded_by_fsdp2, "pass the unwrapped model", stages=(0, 1, 2)),
    Mistake(error_in_the_loss_function, "labels of the user"),
    Mistake(parameter_added, "build a new optimizer"),
    Mistake(parameter_replaced, "build a new optimizer"),
    Mistake(model_converted, "convert the model before"),
    Mistake(model_converted_before_a_plain_backward, "convert the model before", stages=(0, 3)),
    Mistake(parameter_unfrozen, "build a new optimizer after unfreezing"),
    Mistake(parameter_of_no_group_unfrozen, "build a new optimizer after unfreezing"),
    Mistake(param_groups_changed, "freeze parameters with requires_grad_(False)", stages=(0, 3)),
    Mistake(param_group_added, "pass all param groups to the constructor", stages=(0, 3)),
    Mistake(
        parameters_in_no_group,
        "group: 'embedding.weight', 'head.weight', 'head.bias'. Every",
        warns=True,
    ),
    Mistake(model_in_evaluation_mode, "call model.train()", warns=True),
    Mistake(batch_norm_in_training_mode, "freeze it with .eval()", stages=(0, 3)),
    Mistake(sync_batch_norm_in_training_mode, "use a plain BatchNorm", stages=(0, 3)),
    Mistake(two_optimizers_on_one_model, "call release() on that optimizer", stages=(0, 3)),
    Mistake(parameter_written, "full_parameters(writeback=True)", stages=(3,), local=True),
    Mistake(average_in_frozen_parameters, "an fp32 model outside", stages=(0, 1, 2), warns=True),
    Mistake(penalty_on_parameters, "needs stage 2", stages=(3,)),
    Mistake(step_inside_full_parameters, "a step was started inside full_param", stages=(3,)),
    Mistake(model_copied, "optimizer.full_parameters()", stages=(3,), local=True),
    Mistake(model_pickled, "optimizer.save_model(path)", stages=(3,), local=True),
    Mistake(state_dict_pickled, "full_parameters()", stages=(3,), local=True),
    Mistake(with_class(Lamb), "depends on other elements", stages=(2,), name="LAMB"),
    Mistake(with_class(Prodigy), "state in the param group (d)", stages=(2,), name="Prodigy"),
    Mistake(with_class(ScheduleFree), "state in the param group (k)", (2,), name="schedule-free"),
    Mistake(with_class(EightBit), "not one floating-point number per", (2,), name="8-bit state"),
    Mistake(with_class(RowWise), "not one floating-point number per", (2,), name="state per row"),
    Mistake(with_class(torch.optim.Adafactor), "use stage 2", stages=(3,), name="Adafactor"),
    Mistake(with_class(torch.optim.LBFGS), "LBFGS.step() needs a closure", (2,), name="LBFGS"),
    Mistake(with_class(torch.optim.SparseAdam), "SparseAdam cannot", (2,), name="SparseAdam"),
    Mistake(parameters_for_a_model, "model must be a torch.nn.Module", stages=(2,)),
    Mistake(state_with_fewer_names, "1 'param_names'", stages=(0, 3)),
    Mistake(with_an_instance, "pass the class AdamW", stages=(2,)),
    Mistake(plan_for_another_world_size, "make a plan for this group", stages=(1,)),
    Mistake(plan_of_another_stage, "leave stage out", stages=(1,)),
    Mistake(neither_plan_nor_stage, "pass a plan, or stage=0, 1, 2 or 3", stages=(1,)),
    Mistake(batch_of_another_size, "HeteroBatchSampler(len(dataset), plan)", stages=(0, 3)),
    Mistake(batches_dropped_before_a_change, "to skip() of the sampler", stages=(0, 3)),
    Mistake(batch_sampler_as_sampler, "batch_sampler=Hetero", stages=(2,)),
    Mistake(stream_with_a_batch_size, "batch_size=None", stages=(2,)),
    Mistake(samplers_with_different_seeds, "give all ranks the same", stages=(0, 3)),
    Mistake(same_batch_on_all_ranks, "HeteroBatchSampler(len(dataset), plan)", (0, 3), warns=True),
    Mistake(sampler_divided_again, "accelerate.prepare()", stages=(1,), local=True),
]


def make_mistake(number: int, stage: int) -> tuple[list[str], Answer]:
    """What was warned of, and the mistake between two correct steps."""
    run, warned = Run(RECIPE, plan_of(stage)), list[str]()
    model, optimizer = training.prepare(run)

    def act() -> None:
        harness.note(f"making the mistake {MISTAKES[number]}")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            MISTAKES[number].make(Made(run, model, optimizer, training.batch_of(run, 1)))
        warned.extend(str(warning.message) for warning in caught)

    return warned, training.between_good_steps(run, model, optimizer, act)


def cases() -> Iterator[Any]:
    """Every mistake at each of its stages; in the quick suite, at one of them."""
    for number, mistake in enumerate(MISTAKES):
        quick = mistake.stages[number % len(mistake.stages) :][:1]
        for stage in choose(quick=quick, full=mistake.stages):
            yield pytest.param(number, stage, id=f"{mistake}, stage {stage}")


@pytest.mark.every_combination
@pytest.mark.parametrize(("number", "stage"), list(cases()))
def test_mistake_names_its_fix(ranks: Pool, number: int, stage: int) -> None:
    mistake = MISTAKES[number]
    answers = ranks.run(make_mistake, number, stage, ranks=2)
    failures = training.assert_unchanged([answer for _, answer in answers], RECIPE)
    if mistake.warns:
        assert failures == [None, None]
        assert any(mistake.says in text for warned, _ in answers for text in warned)
    else:
        training.assert_raised(failures)
        assert any(mistake.says in failure.message for failure in failures), failures


def build_for_the_blocks(*, freezes: bool, units: Sequence[str] = ()) -> list[str]:
    """Where warnings are raised."""
    model = models.build(RECIPE.spec)
    if freezes:
        model.requires_grad_(False).blocks.requires_grad_(True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with harness.catching() if units else contextlib.nullcontext():
            HeteroZeroOptimizer(
                model,
                torch.optim.SGD,
                stage=1,
                params=model.blocks.parameters(),
                process_group=harness.group(),
                units=units or None,
            )
    return [warning.filename for warning in caught]


def test_the_first_of_several_ranks_warns_of_parameters_in_no_group(ranks: Pool) -> None:
    """At the line that builds the optimizer, unless they are frozen."""
    assert ranks.run(build_for_the_blocks, freezes=False, ranks=2) == [[__file__], []]
    assert ranks.run(build_for_the_blocks, freezes=True, ranks=2) == [[], []]
    assert ranks.run(build_for_the_blocks, freezes=False, ranks=1) == [[]]
    unknown = ["no such module"]
    assert ranks.run(build_for_the_blocks, freezes=False, units=unknown, ranks=2) == [[], []]


def step_with_a_closure() -> str:
    """Other ranks may wait for this one in `step()`, so all are stopped."""
    run = Run(RECIPE, plan_of(2))
    model, optimizer = training.prepare(run)

    def closure() -> Tensor:
        loss = loss_fn(model, training.batch_of(run, 0))
        loss.backward()
        return loss

    with harness.catching() as caught:
        optimizer.step(closure)
    return caught[0].message


def test_a_backward_in_a_closure_is_named(ranks: Pool) -> None:
    for message in ranks.run(step_with_a_closure, ranks=2):
        assert "train_step(loss_fn, batch) in place of step(closure)" in message


# An exception in the body of a loop


class BodyError(Exception):
    """An error in the user's own code."""


def fail_in_the_body(made: Made, form: str) -> None:
    """One rank fails in its second pass, where no code of Poplar runs."""

    def body(number: int, micro_batch: Any) -> None:
        loss_fn(made.model, micro_batch).backward()
        if harness.rank() == LAST and number == 1:
            raise BodyError("cannot write the log")

    if form == "with":
        with made.optimizer.micro_batches(made.batch) as micro_batches:
            for number, micro_batch in enumerate(micro_batches):
                body(number, micro_batch)
    elif form == "for":
        for number, micro_batch in enumerate(made.optimizer.micro_batches(made.batch)):
            body(number, micro_batch)
    else:
        kept = made.optimizer.micro_batches(made.batch)
        for number, micro_batch in enumerate(kept):
            body(number, micro_batch)
    made.optimizer.step()


def fail_and_keep_the_traceback(form: str, stage: int) -> tuple[Failure | None, dict[str, Tensor]]:
    """Both ranks keep their exception, as a notebook does, until the next step has ended."""
    run = Run(RECIPE, plan_of(stage))
    model, optimizer = training.prepare(run)
    training.take_step(run, model, optimizer, 0)
    made = Made(run, model, optimizer, training.batch_of(run, 1))
    kept: Exception | None = None
    try:
        fail_in_the_body(made, form)
    except (BodyError, poplar.PoplarError) as error:
        kept = error
    failure = None if kept is None else Failure.of(kept)
    if form == "kept iterator":  # the step that is still open ends when the next one begins
        with harness.catching():
            training.take_step(run, model, optimizer, 1)
    training.take_step(run, model, optimizer, 1)
    return failure, training.whole_parameters(model, optimizer)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("form", ["for", "with", "kept iterator"])
def test_exception_in_the_body_reaches_all_ranks(ranks: Pool, form: str, stage: int) -> None:
    answers = ranks.run(fail_and_keep_the_traceback, form, stage, ranks=2)
    (other, _), (own, _) = answers
    assert own.is_a(BodyError)
    assert other.is_a(poplar.RankFailed)
    assert "rank 1" in other.message
    assert ("cannot write the log" in other.message) == (form == "with")
    for _, left in answers:
        training.assert_close(left, reference.train(RECIPE).parameters)


# Steps that are not finite


def skip_nonfinite_steps(
    stage: int, optimizer_class: Any
) -> tuple[list[bool], list[str], dict[str, Tensor]]:
    """Three steps; the second has no finite loss on one rank. Returns what was skipped and said."""
    run = Run(RECIPE, plan_of(stage))
    model = models.build(RECIPE.spec)
    options = dict(RECIPE.options) if optimizer_class is torch.optim.AdamW else {"lr": 0.1}
    optimizer = Made(run, model, None, {}).new_optimizer(
        model, optimizer_class=optimizer_class, on_nonfinite="skip", **options
    )
    skipped = []
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for step, factor in ((0, 1.0), (1, float("inf")), (1, 1.0)):
            scale = factor if harness.rank() == LAST else 1.0
            result = optimizer.train_step(
                lambda model, batch, scale=scale: loss_fn(model, batch) * scale,
                training.batch_of(run, step),
            )
            skipped.append(result.skipped)
    messages = [str(warning.message) for warning in warned]
    return skipped, messages, training.whole_parameters(model, optimizer)


@pytest.mark.parametrize("stage", STAGES)
def test_nonfinite_step_may_be_skipped(ranks: Pool, stage: int) -> None:
    answers = ranks.run(skip_nonfinite_steps, stage, torch.optim.AdamW, ranks=2)
    assert any("rank(s) [1] was not finite" in text for text in answers[0][1])
    for skipped, _, parameters in answers:
        assert skipped == [False, True, False]
        training.assert_close(parameters, reference.train(RECIPE).parameters)


class OwnStep(torch.optim.SGD):
    """A class whose step cannot be left out on the device."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)


@pytest.mark.parametrize("optimizer_class", [torch.optim.SGD, OwnStep])
def test_other_optimizers_skip_too(ranks: Pool, optimizer_class: Any) -> None:
    recipe = replace(RECIPE, optimizer="SGD", options=(("lr", 0.1),))
    for skipped, _, parameters in ranks.run(skip_nonfinite_steps, 2, optimizer_class, ranks=2):
        assert skipped == [False, True, False]
        training.assert_close(parameters, reference.train(recipe).parameters)


class LateStreams(Streams):
    """A device that decides after the host has issued the step."""

    asynchronous = True

    def timestamp(self) -> Any:
        return "the end of the update"


def read_after_a_nonfinite_last_step(stage: int, folder: str) -> dict[str, Failure | None]:
    """By what is read or saved after a step whose outcome the host has not asked for, its error."""
    found = {}
    reads: dict[str, Callable[[Made], Any]] = {
        "state_dict": lambda made: made.optimizer.state_dict(),
        "full_state_dict": lambda made: made.optimizer.full_state_dict(),
        "full_parameters": lambda made: made.optimizer.full_parameters().__enter__(),
        "evaluate": lambda made: made.optimizer.evaluate(loss_fn, [made.batch]),
        "save_model": lambda made: made.optimizer.save_model(f"{folder}/model.safetensors"),
        "save_checkpoint": lambda made: poplar.save_checkpoint(f"{folder}/saved", made.optimizer),
        "a step": lambda made: made.optimizer.train_step(loss_fn, made.batch),
    }
    for name, read in reads.items():
        harness.note(name)
        run = Run(RECIPE, plan_of(stage))
        model, optimizer = training.prepare(run)
        steps = optimizer._training.step.nonfinite
        steps._streams = LateStreams()
        group = optimizer._training.engine.control.group
        made = Made(run, model, optimizer, training.batch_of(run, 0))
        with mock.patch.object(type(group), "wait_for_event"):
            factor = float("nan") if harness.rank() == LAST else 1.0
            result = optimizer.train_step(lambda m, b, f=factor: loss_fn(m, b) * f, made.batch)
            with harness.catching() as caught:
                read(made)
            assert result.skipped
            if name == "state_dict":  # local, so it is raised again where all ranks are
                with harness.catching():
                    optimizer.evaluate(loss_fn, [made.batch])
            training.take_step(run, model, optimizer, 0)
        found[name] = caught[0] if caught else None
    return found


@pytest.mark.parametrize("stage", choose(quick=(2,), full=STAGES))
def test_nonfinite_last_step_raises_where_its_result_is_read(
    ranks: Pool, tmp_path: Path, stage: int
) -> None:
    """As on a device, where the step itself does not wait for the outcome."""
    other, own = ranks.run(read_after_a_nonfinite_last_step, stage, str(tmp_path), ranks=2)
    for name, failure in own.items():
        assert failure is not None, name
        assert "rank 1: the loss is nan in pass 1 of 2; no rank applied" in failure.message
        assert other[name] is not None, name
        assert "rank 1: the loss is nan" in other[name].message


# Autocast


def train_in_autocast(stage: int, where: str) -> dict[str, Tensor]:
    """Autocast in the loss function, or around the whole loop, whose casts outlive a step."""
    recipe = replace(RECIPE, spec=ModelSpec(blocks=2), batches=(8,) * 3, optimizer="SGD")
    recipe = replace(recipe, options=(("lr", 0.1),))
    run = Run(recipe, plan_of(stage))
    model, optimizer = training.prepare(run)

    def autocast(place: str) -> Any:
        same = place == where
        return torch.autocast("cpu", torch.bfloat16) if same else contextlib.nullcontext()

    def loss(model: nn.Module, batch: Any) -> Tensor:
        with autocast("in the loss"):
            return loss_fn(model, batch)

    with autocast("around the loop"):
        for step in range(3):
            optimizer.train_step(loss, training.batch_of(run, step))
    return training.whole_parameters(model, optimizer)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("where", ["in the loss", "around the loop"])
def test_autocast_over_fp32_parameters(ranks: Pool, where: str, stage: int) -> None:
    """The same passes in one process, each in an autocast of its own."""
    model = models.build(ModelSpec(blocks=2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        batch = replace(RECIPE, batches=(8,) * 3).batch(step)
        for start, stop in ((0, 3), (3, 5), (5, 7), (7, 8)):
            with torch.autocast("cpu", torch.bfloat16):
                loss = loss_fn(model, models.part(batch, start, stop))
            (loss * ((stop - start) / 8)).backward()
        optimizer.step()
        optimizer.zero_grad()
    for parameters in ranks.run(train_in_autocast, stage, where, ranks=2):
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameters[name], parameter.data, rtol=2e-3, atol=2e-3)


def test_program_of_the_guide(tmp_path: Path) -> None:
    """Its last gradient norm is the same on both ranks."""
    script = program_of("mistakes.md", tmp_path)
    ran = torchrun.run([script], ranks=2, environment={"CUDA_VISIBLE_DEVICES": ""})
    assert ran.returncode == 0, ran.stderr
    norms = re.findall(r"rank \d: gradient norm ([\d.]+)", ran.stdout)
    assert len(norms) == 2
    assert norms[0] == norms[1]
