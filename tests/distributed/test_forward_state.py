"""State that forwards write is equal on all ranks, or the first steps raise; nothing else does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import ranks as harness
import torch
from ranks import Pool
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, prune, spectral_norm, weight_norm

from poplar import HeteroZeroOptimizer, Plan
from poplar.values.errors import RankFailed
from poplar.zero.checks.forward_state import ForwardStateCheck

UNEQUAL = Plan(stage=0, global_batch=8, micro_batches=((2, 2, 2), (2,)), shares=(0.6, 0.4))
EQUAL = Plan(stage=2, global_batch=8, micro_batches=((5,), (3,)), shares=(0.6, 0.4))


class ActNorm(nn.Module):
    """Parameters that the first forward initializes from its samples."""

    def __init__(self) -> None:
        super().__init__()
        self.shift, self.scale = nn.Parameter(torch.zeros(6)), nn.Parameter(torch.ones(6))
        self.register_buffer("ready", torch.tensor(False))

    def forward(self, x: Tensor) -> Tensor:
        if not self.ready:
            self.shift.data.copy_(-x.mean(0).detach())
            self.scale.data.copy_(1 / (x.std(0).detach() + 1e-6))
            self.ready.fill_(True)
        return (x + self.shift) * self.scale


class Buffer(nn.Module):
    """A saved buffer that `write` changes in every training forward."""

    def __init__(self, write: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.register_buffer("state", torch.full((6,), 0.5))
        self.write = write

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.state = self.write(self.state, x)
        return x - self.state


class Codebook(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randn(4, 6))

    def forward(self, x: Tensor) -> Tensor:
        nearest = torch.cdist(x, self.codes).argmin(1)
        with torch.no_grad():
            self.codes.data.index_add_(0, nearest, 0.01 * (x - self.codes[nearest]))
        return x + (self.codes[nearest] - x).detach()


class RenormalizedEmbedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(8, 6))

    def forward(self, x: Tensor) -> Tensor:
        return x + functional.embedding(rows_of(x, 8), self.table, max_norm=0.1)


class Counts(nn.Module):
    """Counts how often each row of a table is used, as for a correction by frequency."""

    def __init__(self, rows: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("counts", torch.zeros(rows, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        ids = rows_of(x, len(self.counts))
        self.counts.index_add_(0, ids, torch.ones_like(ids, dtype=self.counts.dtype))
        return x


class Seen(nn.Module):
    """Marks the rows of a table that are used."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(64, dtype=torch.bool))

    def forward(self, x: Tensor) -> Tensor:
        self.seen[rows_of(x, 64)] = True
        return x


class Spectrum(nn.Module):
    """A moving average of complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.lerp_(torch.fft.fft(x).mean(0), 0.1)
        return x


class Passes(nn.Module):
    """Counts its passes by kind, in integers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("passes", torch.zeros(3, dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.passes[0] += 1
        return x


def rows_of(x: Tensor, rows: int) -> Tensor:
    return x[:, 0].mul(1000).long().remainder(rows)


class Teacher(nn.Module):
    """A frozen copy of a layer, which follows it by moving average."""

    def __init__(self, width: int = 6, in_forward: bool = True) -> None:
        super().__init__()
        self.student = nn.Linear(6, width)
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.in_forward = in_forward

    def forward(self, x: Tensor) -> Tensor:
        if self.in_forward:
            self.follow()
        return x + (self.student(x) * self.teacher(x)).mean(1, keepdim=True)

    @torch.no_grad()
    def follow(self) -> None:
        pairs = zip(self.teacher.parameters(), self.student.parameters(), strict=True)
        for mean, parameter in pairs:
            mean.lerp_(parameter, 0.1)


class Counters(nn.Module):
    """Counts passes in an integer and in a floating-point buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("passes", torch.tensor(0))
        self.register_buffer("time", torch.tensor(0.0))

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        self.time += 1.0
        return x


class Caches(nn.Module):
    """Buffers that a forward makes, enlarges and fills, depending on the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scratch", torch.zeros(6), persistent=False)
        self.register_buffer("lazy", None)
        self.register_buffer("table", torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        self.scratch.copy_(x[0].detach())
        self.lazy = torch.ones(len(x))
        self.table = torch.ones(max(len(x), len(self.table)))
        return x


def masked(module: nn.Linear) -> nn.Linear:
    """A forward pre-hook multiplies a mask into the weight."""
    module.register_buffer("keep", (torch.arange(36).view(6, 6) % 2).float())
    module.register_forward_pre_hook(lambda m, _: m.weight.data.mul_(m.keep))
    return module


def replaced(change: Callable[[Tensor], Tensor]) -> nn.Linear:
    """A forward pre-hook assigns other memory to the `.data` of the weight."""

    def replace(module: nn.Linear, _: object) -> None:
        module.weight.data = change(module.weight.data)

    module = linear()
    module.register_forward_pre_hook(replace)
    return module


class Scaled(nn.Module):
    """Its forward assigns data of another dtype or shape to `.data` of its parameter."""

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1, 1))
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        self.scale.data = self.change(self.scale.data)
        return (x * self.scale).float()


def linear() -> nn.Linear:
    return nn.Linear(6, 6)


WRITES: dict[str, tuple[Callable[[], nn.Module], Plan]] = {
    "ActNorm": (ActNorm, EQUAL),
    "ActNorm, unequal passes": (ActNorm, UNEQUAL),
    "running mean": (lambda: Buffer(lambda state, x: state.lerp(x.mean(0), 0.01)), EQUAL),
    "largest value": (lambda: Buffer(lambda state, x: state.maximum(x.amax(0))), EQUAL),
    "codebook": (Codebook, EQUAL),
    "spectral_norm": (lambda: parametrizations.spectral_norm(linear()), UNEQUAL),
    "old spectral_norm": (lambda: spectral_norm(linear()), UNEQUAL),
    "embedding(max_norm)": (RenormalizedEmbedding, EQUAL),
    "counts": (lambda: Counts(64, torch.long), EQUAL),
    "counts of a large table": (lambda: Counts(1 << 20, torch.long), EQUAL),
    "counts in floating point": (lambda: Counts(1 << 20, torch.float32), EQUAL),
    "seen rows": (Seen, EQUAL),
    "spectrum": (Spectrum, EQUAL),
    "passes by kind": (Passes, UNEQUAL),
    "teacher": (Teacher, UNEQUAL),
    "large teacher": (lambda: Teacher(width=2000), UNEQUAL),
}

EQUAL_WRITES: dict[str, tuple[Callable[[], nn.Module], Plan]] = {
    "none": (linear, UNEQUAL),
    "spectral_norm": (lambda: parametrizations.spectral_norm(linear()), EQUAL),
    "old spectral_norm": (lambda: spectral_norm(linear()), EQUAL),
    "weight_norm": (lambda: parametrizations.weight_norm(linear()), UNEQUAL),
    "old weight_norm": (lambda: weight_norm(linear()), UNEQUAL),
    "pruned": (lambda: prune.random_unstructured(linear(), "weight", 0.5), UNEQUAL),
    "masked": (lambda: masked(linear()), EQUAL),
    "normalized": (lambda: replaced(functional.normalize), EQUAL),
    "rounded": (lambda: replaced(lambda weight: weight.round(decimals=2)), EQUAL),
    "copied": (lambda: replaced(Tensor.clone), EQUAL),
    "counters": (Counters, UNEQUAL),
    "passes by kind": (Passes, EQUAL),
    "caches": (Caches, EQUAL),
    "decay": (lambda: Buffer(lambda state, x: state * 0.9), EQUAL),
    "dropout": (lambda: nn.Dropout(0.5), UNEQUAL),
    "evaluation": (lambda: Buffer(lambda state, x: x.mean(0)).eval(), EQUAL),
    "teacher": (Teacher, EQUAL),
    "frozen": (lambda: linear().requires_grad_(False), UNEQUAL),
}


def steps(
    make: Callable[[], Any],
    plan: Plan,
    options: dict[str, Any],
    after: Callable[[Any], None] = lambda _inner: None,
) -> str:
    """Two steps, with `after(inner)` after each of them; the error, if one raises."""
    torch.manual_seed(0)
    inner = make()
    model = nn.Sequential(linear(), inner, nn.Linear(6, 1))
    evaluates = not inner.training
    optimizer = HeteroZeroOptimizer(
        model, torch.optim.SGD, plan=plan, process_group=harness.group(), lr=0.01, **options
    )
    model.train()
    inner.train(not evaluates)
    torch.manual_seed(1 + harness.rank())
    try:
        for _ in range(2):
            x = torch.randn(plan.samples(harness.rank()), 6) + 1
            optimizer.train_step(lambda m, b: m(b).square().mean(), x)
            after(inner)
    except ValueError as error:
        return str(error)
    optimizer.release()
    return ""


def all_steps(table: str, stage: int, options: dict[str, Any]) -> dict[str, str]:
    named = {"writes": WRITES, "equal writes": EQUAL_WRITES}[table]
    return {
        name: steps(make, plan_at(stage, plan), options) for name, (make, plan) in named.items()
    }


def plan_at(stage: int, plan: Plan) -> Plan:
    if stage >= 2 and plan is UNEQUAL:  # where ranks run equally many passes
        passes: Any = ((2, 2, 2), (2, 0, 0))
    else:
        passes = plan.micro_batches
    return Plan(stage=stage, global_batch=8, micro_batches=passes, shares=plan.shares)


TRAINED = ("ActNorm", "ActNorm, unequal passes", "embedding(max_norm)")
"""What writes into trained parameters."""


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_state_that_differs_between_ranks_is_noticed(ranks: Pool, stage: int) -> None:
    for errors in ranks.run(all_steps, "writes", stage, {}, ranks=2):
        for name, error in errors.items():
            expected = "allow_forward_state=True"
            if name in TRAINED or (stage == 3 and "teacher" in name):
                expected = "full_parameters(writeback=True)"
            assert expected in error, (name, error)
            if name in TRAINED:  # what does not help is no advice
                assert "eval()" not in error
                assert "allow_forward_state" not in error


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_large_counts_in_32_bits_are_no_quantised_weights(ranks: Pool, stage: int) -> None:
    make = partial(Counts, 1 << 15, torch.int32)
    for error in ranks.run(steps, make, plan_at(stage, EQUAL), {}, ranks=2):
        assert "'1.counts' differs after the forwards" in error


def build_renormalized(stage: int, cls: type[nn.Module], allowed: bool) -> str:
    model = nn.Sequential(cls(8, 6, max_norm=0.1), nn.Linear(6, 1)).eval()
    options: dict[str, Any] = {"stage": stage, "allow_forward_state": allowed, "lr": 0.1}
    with pytest.raises((ValueError, RankFailed)) as caught:
        HeteroZeroOptimizer(model, torch.optim.SGD, process_group=harness.group(), **options)
    return str(caught.value)


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("cls", [nn.Embedding, nn.EmbeddingBag])
def test_renormalizing_modules_are_refused_when_the_optimizer_is_built(
    ranks: Pool, cls: type[nn.Module], stage: int
) -> None:
    for allowed in (False, True):
        for error in ranks.run(build_renormalized, stage, cls, allowed, ranks=2):
            assert "'0' has max_norm=0.1" in error
            assert "torch.renorm(weight, 2.0, 0, 0.1)" in error


def look_after_an_error_on_the_last_rank() -> str:
    model = nn.Sequential(nn.Linear(6, 6), Buffer(lambda state, x: state + 0.25), nn.Linear(6, 1))
    plan = plan_at(2, EQUAL)
    optimizer = HeteroZeroOptimizer(
        model, torch.optim.SGD, plan=plan, process_group=harness.group(), lr=0.1
    )
    fails = patch.object(ForwardStateCheck, "_compared", side_effect=MemoryError("no memory left"))
    with fails if harness.rank() == 1 else nullcontext(), harness.catching() as caught:
        optimizer.train_step(
            lambda model, x: model(x).mean(), torch.ones(plan.samples(harness.rank()), 6)
        )
    return caught[0].message


def test_a_look_that_fails_on_one_rank_raises_on_all(ranks: Pool) -> None:
    errors = ranks.run(look_after_an_error_on_the_last_rank, ranks=2)
    assert all("no memory left" in error and "stopped" not in error for error in errors), errors


BOUND = 0.5


def renormalized(stage: int, compute_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The table after three steps with the advised bound: of the engine, and of one process."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(8, 6), nn.Linear(6, 1))
    alone = copy.deepcopy(model)
    optimizer = HeteroZeroOptimizer(
        model,
        torch.optim.SGD,
        plan=plan_at(stage, EQUAL),
        process_group=harness.group(),
        compute_dtype=compute_dtype,
        lr=1.0,
    )
    reference = torch.optim.SGD(alone.parameters(), lr=1.0)

    def bound() -> None:
        weight = model[0].weight
        with torch.no_grad(), optimizer.full_parameters(writeback=True, masters=True):
            weight.copy_(torch.renorm(weight, 2, 0, BOUND))
        alone[0].weight.data.renorm_(2, 0, BOUND)

    def loss_fn(inner: nn.Module, ids: Tensor) -> Tensor:
        return (inner(ids).float() - 3).square().mean()

    bound()
    for step in range(3):
        ids = torch.arange(step, step + 8) % 8
        first = EQUAL.offset(harness.rank())
        optimizer.train_step(loss_fn, ids[first : first + EQUAL.samples(harness.rank())])
        reference.zero_grad()
        loss_fn(alone, ids).backward()
        reference.step()
        bound()
    with optimizer.full_parameters(masters=True):
        return model[0].weight.detach().clone(), alone[0].weight.detach().clone()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_weights_may_be_renormalized_between_steps(ranks: Pool, stage: int) -> None:
    for dtype, rtol in ((torch.float32, 1e-5), (torch.bfloat16, 5e-2)):
        for table, expected in ranks.run(renormalized, stage, dtype, ranks=2):
            assert float(table.norm(dim=1).max()) <= BOUND * (1 + 1e-6)
            torch.testing.assert_close(table, expected, rtol=rtol, atol=rtol)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_equal_state_caches_and_counters_are_no_alarm(ranks: Pool, stage: int) -> None:
    for errors in ranks.run(all_steps, "equal writes", stage, {}, ranks=2):
        if stage == 3:
            for name in ("masked", "normalized", "rounded", "teacher"):
                assert "full_parameters(writeback=True)" in errors.pop(name)
        assert not any(errors.values()), errors


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_frozen_teacher_may_be_written_between_steps(ranks: Pool, stage: int) -> None:
    make, plan = partial(Teacher, in_forward=False), plan_at(stage, UNEQUAL)
    for error in ranks.run(steps, make, plan, {}, Teacher.follow, ranks=2):
        assert not error


class Own(nn.Module):
    """A buffer in which the program writes between steps; `counts`: a forward does, too."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("own", torch.zeros(8, dtype=dtype))
        self.counts = False

    def forward(self, x: Tensor) -> Tensor:
        if self.counts:
            self.own[0] += len(x)
        return x

    def write(self) -> None:
        self.own += harness.rank()

    def write_and_count(self) -> None:
        self.write()
        self.counts = True


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("dtype", [torch.long, torch.uint8, torch.complex64])
def test_counts_that_a_program_writes_between_steps_are_no_alarm(
    ranks: Pool, stage: int, dtype: torch.dtype
) -> None:
    make, plan = partial(Own, dtype), plan_at(stage, EQUAL)
    assert ranks.run(steps, make, plan, {}, Own.write, ranks=2) == ["", ""]
    for error in ranks.run(steps, make, plan, {}, Own.write_and_count, ranks=2):
        assert "'1.own' differs after the forwards" in error


def test_other_numbers_that_a_program_writes_between_steps_are_noticed(ranks: Pool) -> None:
    make = partial(Own, torch.float32)
    for error in ranks.run(steps, make, plan_at(0, EQUAL), {}, Own.write, ranks=2):
        assert "'1.own' differs after the forwards" in error


def own_loop(stage: int) -> None:
    """Two steps without `micro_batches`, between which the program writes."""
    torch.manual_seed(0)
    model = nn.Sequential(linear(), Own(torch.long), nn.Linear(6, 1))
    optimizer = HeteroZeroOptimizer(
        model, torch.optim.SGD, stage=stage, process_group=harness.group(), lr=0.01
    )
    for _ in range(2):
        model[1].write()
        model(torch.ones(4, 6)).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("stage", [0, 3])
def test_loops_of_the_user_may_write_counts_between_steps(ranks: Pool, stage: int) -> None:
    ranks.run(own_loop, stage, ranks=2)


@pytest.mark.parametrize("change", [Tensor.bfloat16, Tensor.squeeze])
def test_data_of_another_kind_is_noticed(ranks: Pool, change: Callable[[Tensor], Tensor]) -> None:
    for error in ranks.run(steps, partial(Scaled, change), plan_at(3, EQUAL), {}, ranks=2):
        assert "'1.scale', which is lost at stage 3" in error


def test_allowed_state_differs(ranks: Pool) -> None:
    for errors in ranks.run(all_steps, "writes", 2, {"allow_forward_state": True}, ranks=2):
        assert not any(errors.values()), errors
