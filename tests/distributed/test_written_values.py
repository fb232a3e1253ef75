"""A value that the user writes into a parameter is kept, or an error says how to write it."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
import pytest
import ranks as harness
import torch
import training
from ranks import Failure, Pool
from torch import Tensor, nn
from torch.nn import functional

from poplar import HeteroZeroOptimizer, Plan, RankFailed

PASSES = ((3, 2), (1, 1))


class Gated(nn.Module):
    """Two blocks and a parameter of one element."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(2))
        self.gate = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x * self.gate


def mean_square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).float().square().mean()


def build(
    stage: int, optimizer: type[torch.optim.Optimizer], dtype: torch.dtype
) -> tuple[Gated, HeteroZeroOptimizer]:
    torch.manual_seed(0)
    model = Gated()
    return model, optimizer_of(model, stage, optimizer, dtype)


def optimizer_of(
    model: Gated, stage: int, optimizer: type[torch.optim.Optimizer], dtype: torch.dtype
) -> HeteroZeroOptimizer:
    return HeteroZeroOptimizer(
        model,
        optimizer,
        plan=Plan(stage=stage, global_batch=7, micro_batches=PASSES, shares=(0.6, 0.4)),
        process_group=harness.group(),
        units=["blocks.0", "blocks.1"],
        compute_dtype=dtype,
        lr=0.01,
    )


def batch() -> Tensor:
    torch.manual_seed(1 + harness.rank())
    return torch.randn(sum(PASSES[harness.rank()]), 6)


def fill_data(model: Gated) -> None:
    model.gate.data.fill_(0.3)
    model.blocks[1][0].weight.data.copy_(torch.full((6, 6), 0.123))


def initialize(model: Gated) -> None:
    nn.init.constant_(model.gate, 0.3)
    nn.init.constant_(model.blocks[0][0].weight, 0.123)


def clamp_all(model: Gated) -> None:
    for parameter in model.parameters():
        parameter.data.clamp_(-0.05, 0.05)


@torch.no_grad()
def multiply_by_masks(model: Gated) -> None:
    for parameter in model.parameters():
        parameter.mul_(torch.arange(parameter.numel()).view(parameter.shape) % 2 == 0)


@torch.no_grad()
def write_elements(model: Gated) -> None:
    model.blocks[0][0].weight[2, 1:3] = 0.123
    model.gate.view(1)[0] = 0.3


def multiply_foreach(model: Gated) -> None:
    torch._foreach_mul_([p.detach() for p in model.parameters()], 0.5)


WRITES = [fill_data, initialize, clamp_all, multiply_by_masks, write_elements, multiply_foreach]


def values_after(
    stage: int,
    optimizer: type[torch.optim.Optimizer],
    dtype: torch.dtype,
    write: Callable[[Gated], None],
    *,
    inside: bool,
) -> list[Tensor]:
    """Masters after the write, on rank 0, and values after two more steps."""
    model, made = build(stage, optimizer, dtype)
    made.train_step(mean_square, batch())
    if inside:
        with made.full_parameters(writeback=True):
            write(model)
    else:
        write(model)
    states = (made.full_state_dict() or {"state": {}})["state"].values()
    masters = [state["master"] for state in states if "master" in state]
    for _ in range(2):
        made.train_step(mean_square, batch())
    values = training.whole_parameters(model, made).values()
    made.release()
    return [*masters, *values]


def both_ways(stage: int, write: Callable[[Gated], None]) -> None:
    for optimizer, dtype in ((torch.optim.AdamW, torch.bfloat16), (torch.optim.SGD, torch.float32)):
        one = values_after(stage, optimizer, dtype, write, inside=False)
        other = values_after(stage, optimizer, dtype, write, inside=True)
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("write", WRITES)
def test_values_written_between_steps_are_kept(ranks: Pool, stage: int, write) -> None:
    """They train on as values written in `full_parameters(writeback=True)`, bit by bit."""
    ranks.run(both_ways, stage, write, ranks=2)


class Changed(Gated):
    """Gated, with a function that the forward calls first."""

    def __init__(self, change: Callable[[Gated], None]) -> None:
        super().__init__()
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        self.change(self)
        return super().forward(x)


def normalize(model: Gated, *, replace: bool) -> None:
    """Normalize a weight and halve the last parameter, in place or in other memory."""
    weight, gate = model.blocks[1][0].weight, model.gate
    changed = (weight, functional.normalize(weight.data)), (gate, gate.data * 0.5)
    for parameter, values in changed:
        if replace:
            parameter.data = values
        else:
            parameter.data.copy_(values)


def transpose(model: Gated, *, replace: bool) -> None:
    """Transpose a weight: a view of the same memory, or in place."""
    weight = model.blocks[1][0].weight
    if replace:
        weight.data = weight.data.t()
    else:
        weight.data.copy_(weight.data.t().clone())


IN_STEP = ["train_step", "forward", "after the passes", "after clipping"]


def step_with_change(
    model: Gated, made: HeteroZeroOptimizer, where: str, change: Callable[[Gated], None]
) -> None:
    """One step; the forward changes the parameters, or `change` does."""
    if where == "train_step":
        made.train_step(mean_square, batch())
        return
    for micro_batch in made.micro_batches(batch()):
        mean_square(model, micro_batch).backward()
    if where == "after the passes":
        change(model)
    made.clip_grad_norm_(0.1)
    if where == "after clipping":
        change(model)
    made.step()
    made.zero_grad()


def change_in_step(
    stage: int, dtype: torch.dtype, where: str, change: Callable[[Gated], None]
) -> list[Tensor]:
    torch.manual_seed(0)
    in_forward = where in ("train_step", "forward")
    model = Changed(change if in_forward else lambda _: None)
    made = optimizer_of(model, stage, torch.optim.AdamW, dtype)
    for _ in range(3):
        step_with_change(model, made, where, change)
    states = made.full_state_dict() or {"state": {}}
    masters = [state["master"] for state in states["state"].values() if "master" in state]
    values = [*masters, *(p.detach().clone() for p in model.parameters())]
    made.release()
    return values


def change_in_step_both_ways(stage: int, where: str, change: Callable[..., None]) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        one, other = (
            change_in_step(stage, dtype, where, partial(change, replace=replace))
            for replace in (True, False)
        )
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("where", IN_STEP)
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_data_that_is_replaced_in_a_step_is_updated(ranks: Pool, stage: int, where: str) -> None:
    """It trains on as data written in place, bit by bit."""
    ranks.run(change_in_step_both_ways, stage, where, normalize, ranks=2)


@pytest.mark.parametrize("where", ["after the passes", "after clipping"])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_data_that_is_transposed_in_a_step_is_updated(ranks: Pool, stage: int, where: str) -> None:
    """As above. Not in the forward, where a transposed product may round otherwise."""
    ranks.run(change_in_step_both_ways, stage, where, transpose, ranks=2)


def replace_by_other_kinds(stage: int) -> list[list[Failure]]:
    """Before the update, rank 1 assigns data of another dtype, then of another shape."""
    model, made = build(stage, torch.optim.SGD, torch.float32)
    weight, failures = model.blocks[0][0].weight, []
    values = training.whole_parameters(model, made)
    for other in (torch.ones(6, 6, dtype=torch.float64), torch.ones(7, 6), torch.ones(36)):
        kept = weight.data
        with harness.catching() as caught:
            for micro_batch in made.micro_batches(batch()):
                mean_square(model, micro_batch).backward()
            if harness.rank() == 1:
                weight.data = other
            made.step()
        weight.data = kept
        failures.append(caught)
        training.assert_same(training.whole_parameters(model, made), values)
    made.train_step(mean_square, batch())
    made.release()
    return failures


@pytest.mark.parametrize("stage", [0, 2])
def test_replaced_data_of_another_kind_raises_on_all_ranks(ranks: Pool, stage: int) -> None:
    for others, own in zip(*ranks.run(replace_by_other_kinds, stage, ranks=2), strict=True):
        assert own[0].is_a(RuntimeError)
        assert "'blocks.0.0.weight' was replaced" in own[0].message
        assert others[0].is_a(RankFailed)


def replace_after_clipping(stage: int) -> str:
    """Rank 1 raises alone: the ranks have agreed on the step. The error of this rank."""
    model, made = build(stage, torch.optim.SGD, torch.float32)
    with harness.catching() as caught:
        for micro_batch in made.micro_batches(batch()):
            mean_square(model, micro_batch).backward()
        made.clip_grad_norm_(0.1)
        if harness.rank() == 1:
            model.gate.data = torch.ones((), dtype=torch.float64)
        made.step()
    return caught[0].message


def test_data_of_another_kind_after_clipping_stops_all_ranks(ranks: Pool) -> None:
    other, own = ranks.run(replace_after_clipping, 1, ranks=2)
    assert own.startswith("the data of parameter 'gate' was replaced")
    assert "rank 1 failed in step(), before the update" in other


EXCHANGES = {
    "of one unit": ["blocks.0.0.weight", "blocks.0.2.weight"],
    "of two units": ["blocks.0.0.weight", "blocks.1.0.weight"],
    "of three": ["blocks.1.0.bias", "blocks.0.2.bias", "blocks.0.0.bias"],
}


def exchange(
    stage: int,
    dtype: torch.dtype,
    names: list[str],
    contexts: Sequence[dict[str, Any]] = (),
    *,
    replace: bool,
) -> list[Tensor]:
    """Between steps, give each of these parameters the values of the next one.

    `contexts` are arguments for `full_parameters`, from the outermost context to the innermost.
    """
    torch.manual_seed(0)
    model = Gated()
    model.blocks[0].append(nn.Linear(6, 6))
    made = optimizer_of(model, stage, torch.optim.AdamW, dtype)
    made.train_step(mean_square, batch())
    with ExitStack() as stack:
        for arguments in contexts:
            stack.enter_context(made.full_parameters(**arguments))
        own = [model.get_parameter(name) for name in names]
        given = [parameter.data for parameter in own]
        if not replace:
            given = [values.clone() for values in given]
        for parameter, values in zip(own, given[1:] + given[:1], strict=True):
            if replace:
                parameter.data = values
            else:
                parameter.data.copy_(values)
    made.train_step(mean_square, batch())
    values = list(training.whole_parameters(model, made).values())
    made.release()
    return values


def exchange_both_ways(
    stage: int, names: list[str], contexts: Sequence[dict[str, Any]] = ()
) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        one, other = (
            exchange(stage, dtype, names, contexts, replace=replace) for replace in (True, False)
        )
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("names", EXCHANGES.values(), ids=EXCHANGES)
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_data_may_be_exchanged_between_parameters(
    ranks: Pool, stage: int, names: list[str]
) -> None:
    ranks.run(exchange_both_ways, stage, names, ranks=2)


WRITEBACK = {"writeback": True}
CONTEXTS = {
    "one": [WRITEBACK],
    "an inner one of a part": [WRITEBACK, {"modules": ["blocks.0"], **WRITEBACK}],
    "none that writes back": [{}],
}


@pytest.mark.parametrize("contexts", CONTEXTS.values(), ids=CONTEXTS)
def test_unsharded_data_may_be_exchanged(ranks: Pool, contexts: list[dict[str, Any]]) -> None:
    """It is kept where data written in place is."""
    for names in EXCHANGES.values():
        ranks.run(exchange_both_ways, 3, names, contexts, ranks=2)


def replace_by_other_kinds_in_context() -> tuple[str, list[bool]]:
    """The error, and of each parameter whether it is sharded after it."""
    model, made = build(3, torch.optim.SGD, torch.float32)
    with harness.catching() as caught, made.full_parameters(writeback=True):
        model.blocks[0][0].weight.data = torch.ones(6, 7)
    is_sharded = [training.is_absent(parameter) for parameter in model.parameters()]
    return caught[0].message, is_sharded


def test_unsharded_data_of_another_kind_raises(ranks: Pool) -> None:
    for message, is_sharded in ranks.run(replace_by_other_kinds_in_context, ranks=2):
        assert "'blocks.0.0.weight' was replaced" in message
        assert all(is_sharded)


VIEWS = (
    *(lambda w: w.chunk(2)[0], lambda w: w.split(1)[0], lambda w: w.unbind()[0]),
    *(Tensor.diagonal, lambda w: w.mT, Tensor.ravel, Tensor.contiguous),
    *(Tensor.numpy, np.asarray, lambda w: torch.from_dlpack(w)),
    *(lambda w: w[:1], lambda w: w.as_strided((1,), (1,)), lambda w: w.expand(1, *w.shape)),
)


def errors_of_writes() -> list[str]:
    model, made = build(3, torch.optim.AdamW, torch.float32)
    made.train_step(mean_square, batch())
    errors = []
    weight = next(parameter for parameter in model.parameters() if parameter.dim() == 2)
    to_views = [lambda _, view=view: view(weight.data).zero_() for view in VIEWS]
    to_gate = [lambda m: m.gate.data.clamp_(0.0), lambda m: nn.init.zeros_(m.gate)]
    for write in [*WRITES, *to_gate, *to_views]:
        try:
            write(model)
        except RuntimeError as error:
            errors.append(str(error))
    made.train_step(mean_square, batch())
    made.release()
    return errors


def test_writes_to_sharded_parameters_name_the_context_that_keeps_them(ranks: Pool) -> None:
    """Also those to a parameter of one element, which torch would accept, and to views."""
    for errors in ranks.run(errors_of_writes, ranks=2):
        assert len(errors) == len(WRITES) + 2 + len(VIEWS)
        assert all("full_parameters(writeback=True)" in error for error in errors)


READS: dict[str, Callable[[Tensor, Tensor], object]] = {
    "a method": lambda weight, _: weight.norm(),
    "a function": lambda weight, _: torch.linalg.vector_norm(weight),
    "a keyword": lambda weight, kept: torch.lerp(kept, end=weight, weight=0.5),
    "a clone": lambda weight, _: weight.detach().clone(),
    "a copy of a view": lambda weight, _: weight.view(-1)[1:].clone(),
    "a product with a view": lambda weight, kept: (weight.mT.mT * kept).sum(),
    "indices": lambda weight, _: weight[torch.tensor([0])],
    "a list": lambda weight, kept: torch.cat([kept, weight]),
    "several results": lambda weight, _: weight.max(dim=0),
    "an average": lambda weight, kept: kept.lerp_(weight, 0.5),
    "a copy": lambda weight, kept: kept.copy_(weight),
    "averages": lambda weight, kept: torch._foreach_lerp_([kept], [weight], 0.5),
    "an operator": lambda weight, kept: operator.iadd(kept, weight),
    "an item": lambda weight, kept: kept.__setitem__(0, weight[0]),
    "an output": lambda weight, kept: torch.mul(weight, 2.0, out=kept),
    "a comparison": lambda weight, kept: torch.equal(weight, kept),
    "a number": lambda weight, _: weight[0, 0].item(),
    "a test": lambda weight, _: bool(weight[0, 0]),
    "another type": lambda weight, _: weight.double(),
    "a keyword of a copy": lambda weight, kept: kept.copy_(other=weight),
    "a transform": lambda weight, kept: torch.func.grad(lambda x: (weight * x).sum())(kept),
    "a transform of a view": lambda weight, kept: torch.vmap(lambda x: weight.mT @ x)(kept),
}
DESCRIPTIONS: dict[str, Callable[[Tensor, Tensor], object]] = {
    "shape": lambda weight, _: (weight.shape, weight.dtype, weight.numel(), weight.stride()),
    "text": lambda weight, _: repr(weight),
    "like": lambda weight, _: (torch.zeros_like(weight), weight.new_zeros(3), weight.new(3)),
    "meta": lambda weight, _: weight.to("meta"),
    "as": lambda weight, kept: (kept.view_as(weight), kept.type_as(weight), kept.to(weight)),
    "views": lambda weight, _: (weight.view(-1), weight.detach(), weight[0], weight.mT),
    "gradient": lambda weight, _: weight.grad,
    "node": lambda weight, _: weight.expand_as(weight).grad_fn,
    "itself": lambda weight, _: weight.to(weight.dtype),
    "hash": lambda weight, _: {weight: 1},
}


def read_and_describe(trains: bool) -> None:
    model, made = build(3, torch.optim.AdamW, torch.float32)
    weight = next(parameter for parameter in model.parameters() if parameter.dim() == 2)
    kept = torch.ones(weight.shape)
    with torch.set_grad_enabled(trains):
        for name, read in READS.items():
            with pytest.raises(RuntimeError, match=r"values are not on .*full_parameters"):
                pytest.fail(f"{name} returned {read(weight, kept)}")
        for describe in DESCRIPTIONS.values():
            describe(weight, kept)
    assert (kept == 1).all()
    with made.full_parameters(), torch.no_grad():
        for read in READS.values():
            read(weight, torch.ones(weight.shape))
    made.release()


@pytest.mark.parametrize("trains", [False, True])
def test_reads_of_sharded_parameters_raise_before_they_change_anything(
    ranks: Pool, trains: bool
) -> None:
    """What needs no values is available, and all are where the parameters are unsharded."""
    ranks.run(read_and_describe, trains, ranks=2)


def first_the_penalty(model: nn.Module, x: Tensor) -> Tensor:
    penalty = sum(parameter.abs().sum() for parameter in model.parameters())
    return mean_square(model, x) + penalty


def penalty_of_blocks(model: Gated, x: Tensor) -> Tensor:
    return mean_square(model, x) + sum(p.square().sum() for p in model.blocks.parameters())


def elementwise_penalty(model: Gated, x: Tensor) -> Tensor:
    return mean_square(model, x) + torch.stack(torch._foreach_norm(list(model.parameters()))).sum()


def errors_of_losses() -> list[str]:
    _, made = build(3, torch.optim.AdamW, torch.float32)
    errors = []
    for loss in (first_the_penalty, penalty_of_blocks, elementwise_penalty):
        try:
            made.train_step(loss, batch())
        except RuntimeError as error:
            errors.append(str(error))
        made.train_step(mean_square, batch())
    made.release()
    return errors


def test_losses_over_sharded_parameters_name_the_stage(ranks: Pool) -> None:
    """All ranks raise, and the optimizer can be used again."""
    for errors in ranks.run(errors_of_losses, ranks=2):
        assert len(errors) == 3
        assert all("needs stage 2" in error for error in errors), errors


def train_and_reset(stage: int) -> list[str]:
    """Two steps, a reset and two more; the state of the inner optimizer is then as after two."""
    _, made = build(stage, torch.optim.AdamW, torch.float32)
    for step in range(4):
        if step == 2:
            made.state = {}
        made.train_step(mean_square, batch())
    state = made.full_state_dict()
    steps = [] if state is None else [float(s["step"]) for s in state["state"].values()]
    errors = []
    try:
        made.state = {0: {"step": torch.tensor(1.0)}}
    except ValueError as error:
        errors.append(str(error))
    made.release()
    assert set(steps) <= {2.0}
    return errors


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_state_that_is_set_to_an_empty_dict_is_reset(ranks: Pool, stage: int) -> None:
    for errors in ranks.run(train_and_reset, stage, ranks=2):
        assert "load_state_dict()" in errors[0]
