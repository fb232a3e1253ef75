"""Calls of parts of a sharded model, transforms, frozen networks and hooks that are added later.

Each works, or raises an error on all ranks that names the way; the optimizer can be used again.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from unittest import mock

import pytest
import ranks as harness
import torch
import training
from ranks import Pool
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, vmap

from poplar import HeteroZeroOptimizer, Plan, RankFailed

PLAN = Plan(stage=3, global_batch=6, micro_batches=((3, 1), (1, 1)), shares=(0.6, 0.4))

DEADLINE = timedelta(seconds=40)


class Parts(nn.Module):
    """An encoder of two units, a head, and a part that forwards do not use."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(2)])
        self.head = nn.Linear(6, 1)
        self.unused = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x))


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def build(model: nn.Module, plan: Plan = PLAN, **options: object) -> HeteroZeroOptimizer:
    group = harness.group()
    return HeteroZeroOptimizer(
        model, torch.optim.SGD, plan=plan, process_group=group, lr=0.1, **options
    )


def own_batch(plan: Plan = PLAN) -> Tensor:
    torch.manual_seed(3)
    whole = torch.randn(plan.global_batch, 6)
    first = sum(plan.samples(rank) for rank in range(harness.rank()))
    return whole[first : first + plan.samples(harness.rank())]


def call_parts(trains_first: bool) -> tuple[list[bool], float, float]:
    """Values of parts without gradients equal those of a plain model; the loss afterwards."""
    model, plain = Parts(), Parts()
    optimizer = build(model, units=["encoder.0", "encoder.1"])
    if trains_first:
        optimizer.train_step(loss_of, own_batch())
        with optimizer.full_parameters():
            plain.load_state_dict({n: p.clone() for n, p in model.state_dict().items()})
    x, equal = own_batch(), []
    calls: list[Callable[[nn.Module], Tensor]] = [
        lambda m: m.encoder(x),
        lambda m: m.encoder[1](x),
        lambda m: m.head(x),
        lambda m: m.encoder(m.encoder(x)),
        lambda m: m(x),
        lambda m: m.encoder(x),
    ]
    with torch.no_grad():
        for call in [*calls, *calls]:
            equal.append(torch.equal(call(model), call(plain)))
    with optimizer.full_parameters():
        pass
    evaluated = optimizer.evaluate(loss_of, [x])
    trained = float(optimizer.train_step(loss_of, x).loss)
    with torch.no_grad():
        model.encoder(x)
    optimizer.release()
    return equal, evaluated, trained


@pytest.mark.parametrize("trains_first", [False, True])
def test_parts_called_without_gradients_leave_no_pass_open(ranks: Pool, trains_first: bool) -> None:
    for equal, evaluated, trained in ranks.run(call_parts, trains_first, ranks=2):
        assert all(equal)
        assert evaluated == pytest.approx(trained, rel=1e-5)


def tangent(model: nn.Module, x: Tensor) -> Tensor:
    value, change = jvp(model, (x,), (torch.ones_like(x),))
    return (value - change.detach()).square().mean()


def gradients_per_sample(model: nn.Module, x: Tensor) -> Tensor:
    parameters = dict(model.named_parameters())
    gradients = vmap(grad(lambda p, s: functional_call(model, p, (s,)).sum()), (None, 0))
    return sum(g.square().mean() for g in gradients(parameters, x).values())


def adapted(model: nn.Module, x: Tensor) -> Tensor:
    parameters = dict(model.named_parameters())
    inner = functional_call(model, parameters, (x,)).square().mean()
    used = {n: p for n, p in parameters.items() if "unused" not in n}
    changes = torch.autograd.grad(inner, list(used.values()), create_graph=True)
    fast = {n: p - 0.1 * d for (n, p), d in zip(used.items(), changes, strict=True)}
    return functional_call(model, fast, (x,)).square().mean()


def transform_errors(communicator: str) -> list[str]:
    model = Parts()
    optimizer = build(model, units=["encoder.0", "encoder.1"], communicator=communicator)
    errors = []
    for loss in (tangent, gradients_per_sample, adapted):
        try:
            optimizer.train_step(loss, own_batch())
        except RuntimeError as error:
            errors.append(str(error))
        optimizer.train_step(loss_of, own_batch())
    optimizer.release()
    return errors


@pytest.mark.parametrize("communicator", ["process_group", "shared_memory"])
def test_transforms_name_the_stage_that_runs_them(ranks: Pool, communicator: str) -> None:
    for errors in ranks.run(transform_errors, communicator, ranks=2):
        assert len(errors) == 3
        assert all("stage 2" in error for error in errors), errors


def frozen_network(calls: str) -> tuple[str, dict[str, Tensor]]:
    """A generator trains against a frozen network whose own optimizer shards it."""
    torch.manual_seed(0)
    generator, judge = nn.Linear(6, 6), Parts()
    plan = Plan(stage=1, global_batch=6, micro_batches=((2, 2), (2,)), shares=(0.5, 0.5))
    trains, owns = build(generator, plan), build(judge)
    owns.train_step(loss_of, own_batch())
    judge.requires_grad_(False)
    error = ""

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        if calls == "no_grad":
            with torch.no_grad():
                judge(x)
            return model(x).square().mean()
        return judge(model(x)).square().mean()

    try:
        if calls == "full_parameters":
            with owns.full_parameters():
                trains.train_step(loss, own_batch(plan))
        elif calls == "no_grad":  # every rank runs as many forwards of the judge
            with torch.no_grad():
                judge(own_batch())
            trains.train_step(lambda m, x: m(x).square().mean(), own_batch(plan))
        else:
            trains.train_step(loss, own_batch(plan))
    except RuntimeError as raised:
        error = str(raised)
    judge.requires_grad_(True)
    owns.train_step(loss_of, own_batch())
    trains.train_step(lambda m, x: m(x).square().mean(), own_batch(plan))
    values = training.whole_parameters(judge, owns)
    owns.release()
    trains.release()
    return error, values


@pytest.mark.parametrize("calls", ["directly", "full_parameters", "no_grad"])
def test_frozen_networks_of_another_optimizer(ranks: Pool, calls: str) -> None:
    outcomes = ranks.run(frozen_network, calls, ranks=2)
    for error, values in outcomes:
        assert ("full_parameters()" in error) == (calls == "directly")
        training.assert_same(values, outcomes[0][1])


def scale_gradient(parameter: Tensor) -> None:
    parameter.grad.mul_(0.25)


def train_with_hooks(stage: int, loop: str, late: bool) -> dict[str, Tensor]:
    """Three steps; the hooks come before the optimizer, or between its first steps."""
    model = Parts()
    samples = (2, 2) if loop == "own" else (3, 1)
    plan = Plan(
        stage=stage, global_batch=4, micro_batches=tuple((n,) for n in samples), shares=(0.6, 0.4)
    )

    def register() -> None:
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(scale_gradient)

    if not late:
        register()
    optimizer = build(model, plan)
    if late:
        register()
    for step in range(3):
        torch.manual_seed(10 * step + harness.rank())
        x = torch.randn(samples[harness.rank()], 6)
        if loop == "train_step":
            optimizer.train_step(loss_of, x)
            continue
        if loop == "micro_batches":
            for micro_batch in optimizer.micro_batches(x):
                loss_of(model, micro_batch).backward()
        else:
            loss_of(model, x).backward()
        optimizer.step()
        optimizer.zero_grad()
    values = training.whole_parameters(model, optimizer)
    optimizer.release()
    return values


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("loop", ["train_step", "micro_batches", "own"])
def test_gradient_hooks_added_later_see_every_gradient(ranks: Pool, stage: int, loop: str) -> None:
    early = ranks.run(train_with_hooks, stage, loop, False, ranks=2)
    late = ranks.run(train_with_hooks, stage, loop, True, ranks=2)
    for one, other in zip(early, late, strict=True):
        training.assert_same(one, other)


def run_out_of_memory() -> tuple[str, bool]:
    """What a rank raises if the second one has no memory to unshard; whether it can go on."""
    model = Parts()
    optimizer = HeteroZeroOptimizer(
        model, torch.optim.SGD, plan=PLAN, process_group=harness.group(), lr=0.1, timeout=DEADLINE
    )
    with pytest.MonkeyPatch.context() as patch:
        if harness.rank() == 1:
            error = torch.OutOfMemoryError("no memory")
            fails = mock.Mock(side_effect=error)
            patch.setattr(optimizer._training.engine.flats[-1], "use_lasting_values", fails)
        with (
            pytest.raises((RankFailed, torch.OutOfMemoryError)) as raised,
            optimizer.full_parameters(),
        ):
            raise AssertionError("not reached")
    with optimizer.full_parameters():
        finite = all(bool(parameter.isfinite().all()) for parameter in model.parameters())
    return str(raised.value), finite


def test_after_a_rank_had_no_memory_for_full_parameters_all_go_on(ranks: Pool) -> None:
    (first, goes_on), (second, also) = ranks.run(run_out_of_memory, ranks=2)
    assert "rank 1: OutOfMemoryError: no memory" in first
    assert second == "no memory"
    assert goes_on
    assert also
