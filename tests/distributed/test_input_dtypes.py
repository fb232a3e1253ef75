"""The model's inputs are cast to the compute dtype; the batch of the loss function is not."""

from __future__ import annotations

from typing import Any

import pytest
import ranks as at
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from training import STAGES

import poplar
from poplar import HeteroZeroOptimizer, Plan

BF16, FP32 = torch.bfloat16, torch.float32
PASSES = {0: ((3, 1), (2,)), 1: ((3, 1), (2,)), 2: ((3, 1), (2, 0)), 3: ((3, 1), (2, 0))}
PLAN = {
    stage: Plan(stage=stage, global_batch=6, micro_batches=passes, shares=(0.7, 0.3))
    for stage, passes in PASSES.items()
}


class Denoiser(nn.Module):
    """Predicts noise; the loss function may also call its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.table = nn.Buffer(torch.linspace(0, 1, 8))

    def forward(self, x: Tensor, step: Tensor) -> Tensor:
        seen["input"], seen["step"], seen["table"] = x.dtype, step.dtype, self.table.dtype
        for block in self.blocks:
            x = x + block(x + self.table.to(x.dtype))
        return x


seen: dict[str, torch.dtype] = {}


def in_one_call(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The loss of the whole model."""
    seen["target"] = batch["target"].dtype
    prediction = model(batch["x"], batch["step"])
    seen["output"] = prediction.dtype
    return F.mse_loss(prediction.float(), batch["target"])


def batch_of(samples: int) -> dict[str, Tensor]:
    values = torch.linspace(0, 1, samples * 8).view(samples, 8)
    target = 1000.0 + values / 7  # bf16 would round it to 1000
    return {"x": values, "target": target, "step": torch.arange(samples)}


def build(stage: int, **options: Any) -> tuple[nn.Module, HeteroZeroOptimizer]:
    torch.manual_seed(0)
    model = Denoiser().to(at.device())
    given = {"plan": PLAN[stage], "lr": 0.0, "process_group": at.group(), **options}
    optimizer = HeteroZeroOptimizer(model, torch.optim.SGD, **given)
    return model, optimizer


def own_batch(stage: int) -> dict[str, Tensor]:
    counts = PLAN[stage].cut(6)
    start = sum(counts[: at.rank()])
    part = slice(start, start + counts[at.rank()])
    return {name: value[part].to(at.device()) for name, value in batch_of(6).items()}


def dtypes_in_a_step(stage: int, form: str) -> tuple[dict[str, torch.dtype], float | None]:
    seen.clear()
    model, optimizer = build(stage, compute_dtype=BF16)
    batch, loss = own_batch(stage), None
    if form == "train_step":
        loss = float(optimizer.train_step(in_one_call, batch).loss)
    elif form == "micro_batches":
        for micro_batch in optimizer.micro_batches(batch):
            in_one_call(model, micro_batch).backward()
        optimizer.step()
    else:
        loss = optimizer.evaluate(in_one_call, [batch])
    return dict(seen), loss


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("form", ["train_step", "micro_batches", "evaluate"])
def test_inputs_are_cast_and_targets_are_not(ranks, stage, form):
    for dtypes, loss in ranks.run(dtypes_in_a_step, stage, form, ranks=2):
        assert dtypes == {
            "input": BF16,
            "step": torch.int64,
            "table": FP32,
            "output": BF16,
            "target": FP32,
        }
        if loss is not None:
            assert loss == pytest.approx(loss_in_one_process(), rel=1e-4)


def loss_in_one_process() -> float:
    torch.manual_seed(0)
    model = Denoiser()
    for parameter in model.parameters():
        parameter.data = parameter.data.to(BF16)
    batch = batch_of(6)
    return float(in_one_call(model, {**batch, "x": batch["x"].to(BF16)}))


def outputs_under_a_plan_without_rank_0(stage: int) -> list[Tensor]:
    """The outputs of the model and of a module of it, on this rank."""
    model, optimizer = build(stage, compute_dtype=BF16, plan=PLAN[stage].beside((0,)))
    batch = {name: value.to(at.device()) for name, value in batch_of(2).items()}
    with optimizer.full_parameters(), torch.no_grad():
        outputs = [model(batch["x"], batch["step"]), model.stem(batch["x"])]
    return [output.cpu() for output in outputs]


@pytest.mark.parametrize("stage", STAGES)
def test_inputs_are_cast_on_a_rank_that_is_left_out(ranks, stage):
    left_out, *others = ranks.run(outputs_under_a_plan_without_rank_0, stage, ranks=3)
    assert [output.dtype for output in left_out] == [BF16, BF16]
    for output, *same in zip(left_out, *others, strict=True):
        assert all(torch.equal(output, one) for one in same)


def hooks_of(model: nn.Module) -> int:
    kinds = ("_forward_pre_hooks", "_forward_hooks", "_state_dict_pre_hooks")
    return sum(len(getattr(module, kind)) for module in model.modules() for kind in kinds)


def hooks_in_turns(stage: int) -> list[int]:
    """The hooks when rank 0, rank 1 and rank 0 again are left out, and after a release."""
    plans = [PLAN[stage].beside((rank,)) for rank in (0, 1, 0)]
    model, optimizer = build(stage, compute_dtype=BF16, plan=plans[0])
    found = []
    for plan in plans:
        optimizer.apply_plan(plan)
        found.append(hooks_of(model))
    optimizer.release()
    return [*found, hooks_of(model)]


@pytest.mark.parametrize("stage", [0, 3])
def test_ranks_that_change_places_have_the_hooks_of_their_places(ranks, stage):
    first, second, _ = ranks.run(hooks_in_turns, stage, ranks=3)
    left_out, active, *_ = first
    assert first == [left_out, active, left_out, 0]
    assert second == [active, left_out, active, 0]


def verified(stage: int) -> tuple[bool, str, dict[str, torch.dtype]]:
    torch.manual_seed(0)
    model = Denoiser().to(at.device())
    batch = {name: value.to(at.device()) for name, value in batch_of(6).items()}
    plan = PLAN[stage]
    found = poplar.verify(
        model, in_one_call, batch, plan, compute_dtype=BF16, process_group=at.group()
    )
    return found.ok, str(found), dict(seen)


@pytest.mark.parametrize("stage", STAGES)
def test_verification_casts_as_training_does(ranks, stage):
    for ok, text, dtypes in ranks.run(verified, stage, ranks=2):
        assert ok, text
        assert (dtypes["input"], dtypes["target"]) == (BF16, FP32)


def profiled() -> dict[str, torch.dtype]:
    seen.clear()
    poplar.profile_cluster(
        Denoiser().to(at.device()),
        in_one_call,
        {name: value.to(at.device()) for name, value in batch_of(2).items()},
        optimizer_class=torch.optim.SGD,
        lr=0.1,
        compute_dtype=BF16,
        max_batch=4,
        stages=(0,),
        seconds=0.2,
        process_group=at.group(),
        cache=False,
    )
    return dict(seen)


def test_profiled_passes_are_cast_as_in_training(ranks):
    for dtypes in ranks.run(profiled, ranks=2):
        assert (dtypes["input"], dtypes["target"]) == (BF16, FP32)
