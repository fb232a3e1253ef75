"""Where the model computes in 16 bits, the user can have and write the fp32 values."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import ranks as harness
import torch
from ranks import Failure, Pool
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from training import STAGES

from poplar import HeteroZeroOptimizer, Plan

BF16 = torch.bfloat16
PASSES = ((3, 2), (1, 1))
DECAY = 0.999


class Distilled(nn.Module):
    """Two blocks of a student and a frozen teacher that starts as its copy."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.head = nn.Linear(6, 3)
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for block in self.student:
            x = torch.tanh(block(x))
        for block in self.teacher:
            y = torch.tanh(block(y))
        return self.head(x - 0.5 * y)


def mean_square(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x).float() - 1).square().mean()


def plan_of(stage: int, *left_out: int) -> Plan:
    plan = Plan(stage=stage, global_batch=7, micro_batches=PASSES, shares=(0.6, 0.4))
    return plan.beside(left_out) if left_out else plan


def optimizer_of(model: nn.Module, plan: Plan, **options: Any) -> HeteroZeroOptimizer:
    given: dict[str, Any] = {"lr": 1e-4, "compute_dtype": BF16, **options}
    return HeteroZeroOptimizer(
        model, torch.optim.AdamW, plan=plan, process_group=harness.group(), **given
    )


def build(plan: Plan, **options: Any) -> tuple[Distilled, HeteroZeroOptimizer]:
    torch.manual_seed(0)
    model = Distilled().to(harness.device())
    return model, optimizer_of(model, plan, **options)


def batch_for(optimizer: HeteroZeroOptimizer, step: int) -> Tensor | None:
    torch.manual_seed(10 * step + harness.rank())
    plan = optimizer.plan
    assert plan is not None
    samples = plan.samples(harness.rank())
    return torch.randn(samples, 6).to(harness.device()) if samples else None


def masters_of(model: nn.Module, optimizer: HeteroZeroOptimizer, to: int) -> dict[str, Tensor]:
    """The fp32 values of the trained parameters, by name, on rank `to`."""
    state = optimizer.full_state_dict(to)
    if state is None:
        return {}
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    return {name: state["state"][at]["master"] for at, name in enumerate(names)}


def average(plan: Plan, **options: Any) -> tuple[dict[str, Tensor], dict[str, Tensor], Any]:
    """By name, an average by the recipe of the guide, and one by hand; dtypes inside."""
    model, optimizer = build(plan, **options)
    step_average = get_ema_multi_avg_fn(DECAY)
    with optimizer.full_parameters(masters=True):
        ema = AveragedModel(model, multi_avg_fn=step_average)
        dtypes = {p.dtype for p in model.parameters()}
    first = plan.active_ranks[0]
    expected: list[dict[str, Tensor]] = []
    for step in range(4):
        optimizer.train_step(mean_square, batch_for(optimizer, step))
        with optimizer.full_parameters(masters=True):
            ema.update_parameters(model)
        masters = masters_of(model, optimizer, first)
        if step == 0:
            expected = [masters]
        elif masters:
            before = expected[0]
            lists = list(before.values()), list(masters.values())
            torch._foreach_lerp_(*lists, 1 - DECAY)
    with torch.no_grad():
        ema(torch.ones(2, 6, device=harness.device()))  # a plain fp32 model
    averages = {name: p.detach().cpu() for name, p in ema.module.named_parameters()}
    return averages, expected[0], (dtypes, {p.dtype for p in model.parameters()})


def assert_averages(answers: list[tuple[dict[str, Tensor], dict[str, Tensor], Any]]) -> None:
    expected = next(own for _, own, _ in answers if own)
    for averages, _, (inside, outside) in answers:
        assert inside == {torch.float32}
        assert outside == {BF16}
        trained = {name: averages[name] for name in expected}
        torch.testing.assert_close(trained, expected, rtol=0, atol=0)
        assert any((a != a.to(BF16).float()).any() for a in trained.values()), "rounded values"


@pytest.mark.parametrize("stage", STAGES)
def test_average_in_full_parameters_is_that_of_the_masters(ranks: Pool, stage: int) -> None:
    """The recipe of docs/guides/large-models.md, bit by bit, at a decay that bf16 rounds away."""
    assert_averages(ranks.run(average, plan_of(stage), ranks=2))


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_rank_that_is_left_out_has_the_average(ranks: Pool, stage: int) -> None:
    assert_averages(ranks.run(average, plan_of(stage, 0), ranks=3))


def test_average_of_compressed_updates_and_state_on_the_host(ranks: Pool) -> None:
    hosted = replace(plan_of(1), host_state=(1.0, 0.0))
    assert_averages(ranks.run(average, hosted, ranks=2))
    compressed = {"communication": "int8"}
    assert_averages(ranks.run(average, plan_of(1), ranks=2, **compressed))


def write(stage: int) -> list[dict[str, Tensor]]:
    """Masters on rank 0: written ones, and those after a context without `writeback`."""
    model, optimizer = build(plan_of(stage))
    optimizer.train_step(mean_square, batch_for(optimizer, 0))
    before = masters_of(model, optimizer, 0)
    with optimizer.full_parameters(writeback=True, masters=True), torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1e-5)
        model.head.bias.data = torch.full((3,), 0.123, device=harness.device())
        written = {n: p.detach().cpu().clone() for n, p in model.named_parameters()}
    after = masters_of(model, optimizer, 0)
    with optimizer.full_parameters():
        rounded = {n: p.detach().float().cpu() for n, p in model.named_parameters()}
    with optimizer.full_parameters(masters=True), torch.no_grad():
        model.head.weight.zero_()
    kept = masters_of(model, optimizer, 0)
    optimizer.train_step(mean_square, batch_for(optimizer, 1))
    optimizer.release()
    return [before, written, after, rounded, kept]


@pytest.mark.parametrize("stage", STAGES)
def test_written_masters_are_kept_by_writeback(ranks: Pool, stage: int) -> None:
    for before, written, after, rounded, kept in ranks.run(write, stage, ranks=2):
        assert all(not torch.equal(after[name], value) for name, value in before.items())
        for name, value in after.items():
            torch.testing.assert_close(value, written[name], rtol=0, atol=0)
        for name, value in written.items():
            torch.testing.assert_close(rounded[name], value.to(BF16).float(), rtol=0, atol=0)
        assert all(torch.equal(kept[name], value) for name, value in after.items())


def use_inside() -> list[list[Failure]]:
    model, optimizer = build(plan_of(1))

    def load() -> None:
        model.load_state_dict(model.state_dict())

    def step() -> None:
        optimizer.train_step(mean_square, batch_for(optimizer, 0))

    calls = [load, step, lambda: optimizer.full_parameters().__enter__(), optimizer.release]
    failures = []
    with optimizer.full_parameters(masters=True):
        for call in calls:
            with harness.catching() as caught:
                call()
            failures.append(caught)
    with optimizer.full_parameters(), harness.catching() as caught:
        optimizer.full_parameters(masters=True).__enter__()
    failures.append(caught)
    step()
    optimizer.release()
    return failures


def test_calls_inside_the_context_raise(ranks: Pool) -> None:
    expected = [
        "with masters=True; use full_parameters(writeback=True)",
        "a step was started inside full_parameters()",
        "full_parameters() inside full_parameters(masters=True)",
        "release() inside full_parameters()",
        "full_parameters(masters=True) inside full_parameters()",
    ]
    for failures in ranks.run(use_inside, ranks=2):
        for caught, text in zip(failures, expected, strict=True):
            assert text in caught[0].message


def release_and_build_again(plan: Plan) -> tuple[dict[str, Tensor], dict[str, Tensor], bool]:
    """Masters before the release, values after it; whether the next optimizer has them again."""
    model, optimizer = build(plan)
    first = plan.active_ranks[0]
    for step in range(2):
        optimizer.train_step(mean_square, batch_for(optimizer, step))
    masters = masters_of(model, optimizer, first)
    optimizer.release()
    released = {name: p.detach().cpu().clone() for name, p in model.named_parameters()}
    model.head = nn.Linear(6, 4).to(harness.device())
    again = optimizer_of(model, plan_of(1, *plan.left_out))
    later = masters_of(model, again, first)
    again.train_step(mean_square, batch_for(again, 2))
    again.release()
    same = all(torch.equal(value, masters[n]) for n, value in later.items() if "head" not in n)
    return masters, released, same


@pytest.mark.parametrize("left_out", [(), (1,)])
@pytest.mark.parametrize("stage", STAGES)
def test_released_model_has_its_dtypes_and_exact_values(
    ranks: Pool, stage: int, left_out: tuple[int, ...]
) -> None:
    plan = plan_of(stage, *left_out)
    answers = ranks.run(release_and_build_again, plan, ranks=2 + len(left_out))
    masters = next(own for own, _, _ in answers if own)
    for rank, (_, released, same) in enumerate(answers):
        assert {value.dtype for value in released.values()} == {torch.float32}
        assert same
        if rank in left_out:  # old values
            continue
        trained = {name: released[name] for name in masters}
        torch.testing.assert_close(trained, masters, rtol=0, atol=0)


def release_without_values() -> set[torch.dtype]:
    model, optimizer = build(plan_of(3))
    optimizer.release(values=False)
    return {parameter.dtype for parameter in model.parameters()}


def test_released_model_without_values_has_its_dtypes(ranks: Pool) -> None:
    assert ranks.run(release_without_values, ranks=2) == [{torch.float32}] * 2


def release_in_inference_mode(stage: int, dtype: torch.dtype) -> bool:
    model, optimizer = build(plan_of(stage), compute_dtype=dtype)
    with torch.inference_mode():
        with optimizer.full_parameters(masters=True):
            copied = copy.deepcopy(model)
        optimizer.release()
    again = optimizer_of(model, plan_of(stage))
    again.train_step(mean_square, batch_for(again, 0))
    again.release()
    return copied.head.weight.dtype is torch.float32


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
@pytest.mark.parametrize("stage", [0, 3])
def test_model_that_is_released_in_inference_mode_can_be_trained(
    ranks: Pool, stage: int, dtype: torch.dtype
) -> None:
    assert all(ranks.run(release_in_inference_mode, stage, dtype, ranks=2))


Write = Callable[[nn.Parameter, nn.Parameter], object]
AVERAGES: dict[str, Write] = {
    "mul and add": lambda t, s: t.mul_(0.996).add_(s, alpha=0.004),
    "lerp": lambda t, s: t.lerp_(s, 1e-4),
    "foreach": lambda t, s: torch._foreach_lerp_([t], [s], 1e-4),
    "data in place": lambda t, s: t.data.mul_(0.9).add_(s.data, alpha=0.1),
    "other data": lambda t, s: setattr(t, "data", t.data * 0.996 + s.data * 0.004),
}


def update_teacher(model: Distilled, write: Write) -> None:
    pairs = zip(model.teacher.parameters(), model.student.parameters(), strict=True)
    with torch.no_grad():
        for teacher, student in pairs:
            write(teacher, student)


@contextmanager
def warned() -> Iterator[list[str]]:
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield texts
    found = [str(warning.message) for warning in caught]
    texts += [text for text in found if "written in step after step" in text]


def average_in_the_model(
    stage: int, name: str, writes: tuple[bool, ...] = (True,) * 4, **options: Any
) -> list[str]:
    """The warnings of steps, after some of which the teacher is written."""
    model, optimizer = build(plan_of(stage), lr=1e-2, **options)
    with warned() as texts:
        for step, written in enumerate(writes):
            optimizer.train_step(mean_square, batch_for(optimizer, step))
            if written:
                whole = optimizer.full_parameters(writeback=True) if stage == 3 else nullcontext()
                with whole:
                    update_teacher(model, AVERAGES[name])
        optimizer.train_step(mean_square, batch_for(optimizer, len(writes)))
    optimizer.release()
    return texts


@pytest.mark.parametrize("name", AVERAGES)
@pytest.mark.parametrize("stage", [0, 2])
def test_averages_in_frozen_parameters_that_were_cast_are_warned_of(
    ranks: Pool, stage: int, name: str
) -> None:
    texts, others = ranks.run(average_in_the_model, stage, name, ranks=2)
    assert len(texts) == 1
    assert "'teacher.0.weight'" in texts[0]
    assert "compute_dtype=torch.float32" in texts[0]
    assert not others


def test_averages_written_back_at_stage_3_are_warned_of(ranks: Pool) -> None:
    assert len(ranks.run(average_in_the_model, 3, "lerp", ranks=2)[0]) == 1


def test_averages_that_begin_late_are_warned_of(ranks: Pool) -> None:
    writes = (False,) * 5 + (True,) * 2
    assert len(ranks.run(average_in_the_model, 1, "lerp", writes, ranks=2)[0]) == 1


def test_averages_in_fp32_are_not_warned_of(ranks: Pool) -> None:
    fp32 = {"compute_dtype": torch.float32}
    assert not any(ranks.run(average_in_the_model, 1, "lerp", ranks=2, **fp32))


def load_between_steps(stage: int) -> list[str]:
    model, optimizer = build(plan_of(stage))
    torch.manual_seed(5)
    other = Distilled().state_dict()
    with warned() as texts:
        for step in range(6):
            optimizer.train_step(mean_square, batch_for(optimizer, step))
            if step % 2:
                model.load_state_dict(other)
    optimizer.release()
    return texts


@pytest.mark.parametrize("stage", [1, 3])
def test_state_dicts_that_are_loaded_between_steps_are_not_warned_of(
    ranks: Pool, stage: int
) -> None:
    assert not any(ranks.run(load_between_steps, stage, ranks=2))
