"""A loop written for `Accelerator` trains on unequal ranks as on one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accelerate import Accelerator
from launched import BATCH, PLANS, as_launched, fresh_state, three_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import poplar
from poplar.data.sampler import HeteroBatchSampler
from poplar.integrations.accelerate import prepare

three = pytest.fixture(scope="module")(three_ranks)


def a_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def a_dataset() -> TensorDataset:
    inputs = torch.randn(5 * BATCH, 4, generator=torch.Generator().manual_seed(1))
    return TensorDataset(inputs, inputs.square().sum(1, keepdim=True))


def loss_fn(model: nn.Module, batch: list[Tensor]) -> Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


def a_scheduler(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)


def prepared(plan: poplar.Plan | None, accelerator: Accelerator, **options: Any) -> Any:
    loader = DataLoader(a_dataset(), batch_size=2, shuffle=True)
    return prepare(
        accelerator,
        a_model(),
        torch.optim.AdamW,
        loader,
        loss_fn=loss_fn,
        plan=plan,
        scheduler=a_scheduler,
        lr=0.05,
        **options,
    )


def run_loop(accelerator: Accelerator, parts: Any, save_at: int, folder: str) -> list[float]:
    """The norms of the steps until the end of the second epoch."""
    model, optimizer, loader, scheduler = parts
    norms: list[float] = []
    for epoch in range(loader.batch_sampler.epoch, 2):
        loader.set_epoch(epoch)
        for batch in loader:
            for micro_batch in optimizer.micro_batches(batch):
                accelerator.backward(loss_fn(model, micro_batch))
            norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            if len(norms) == save_at:
                accelerator.save_state(folder)
    return norms


def train_and_resume(plan: poplar.Plan, folder: str, save_at: int) -> Any:
    as_launched()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    norms = run_loop(accelerator, prepared(plan, accelerator), save_at, folder)
    fresh_state()
    again = Accelerator(cpu=True, gradient_accumulation_steps=2)
    parts = prepared(plan, again)
    again.load_state(folder)
    resumed = run_loop(again, parts, 0, folder)
    means = again.gather_for_metrics(torch.tensor([float(again.process_index)])).tolist()
    return norms, resumed, means, [group["lr"] for group in parts.optimizer.param_groups]


def train_alone() -> tuple[list[float], float]:
    model, dataset = a_model(), a_dataset()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = a_scheduler(optimizer)
    whole = poplar.Plan.even(1, global_batch=BATCH, micro_batch=BATCH, stage=0)
    sampler = HeteroBatchSampler(len(dataset), whole, rank=0)
    norms = []
    for _ in range(2):
        for batch in DataLoader(dataset, batch_sampler=sampler):
            loss_fn(model, batch).backward()
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return norms, scheduler.get_last_lr()[0]


@pytest.mark.parametrize("save_at", [3, 5])
@pytest.mark.parametrize("stage", PLANS)
def test_the_loop_equals_one_process_and_resumes(three, tmp_path, stage, save_at):
    expected, rate = train_alone()
    folder = str(tmp_path / "state")
    for norms, resumed, means, rates in three.run(train_and_resume, PLANS[stage], folder, save_at):
        torch.testing.assert_close(norms, expected, rtol=1e-4, atol=1e-5)
        assert resumed == norms[save_at:], "the same bits after load_state"
        assert means == [0.0, 1.0, 2.0]
        assert rates == [pytest.approx(rate)]


def train_under_a_measured_plan() -> Any:
    as_launched()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    tuning = {"seconds": 2.0, "cache": False, "verify": False, "progress": False}
    engine = {"on_nonfinite": "skip", "allow_batch_norm": True}  # not options of AdamW
    parts = prepared(None, accelerator, tuning=tuning, **engine)
    return parts.optimizer.plan.global_batch, run_loop(accelerator, parts, 0, "unused")


def test_without_a_plan_the_ranks_are_measured(three):
    expected, _ = train_alone()
    for global_batch, norms in three.run(train_under_a_measured_plan, timeout=120):
        assert global_batch == BATCH
        torch.testing.assert_close(norms, expected, rtol=1e-4, atol=1e-5)


def use_wrongly(way: str) -> None:
    as_launched()
    steps = 1 if way == "batch" else 2
    precision = "bf16" if way == "precision" else "no"
    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=steps, mixed_precision=precision
    )
    if way == "sampler":
        weights = torch.ones(5 * BATCH)
        sampler = torch.utils.data.WeightedRandomSampler(weights, 5 * BATCH)
        loader = DataLoader(a_dataset(), batch_size=2, sampler=sampler)
        prepare(accelerator, a_model(), torch.optim.AdamW, loader, plan=PLANS[1], lr=0.1)
    if way == "prepared loader":
        loader = accelerator.prepare(DataLoader(a_dataset(), batch_size=2))
        prepare(accelerator, a_model(), torch.optim.AdamW, loader, plan=PLANS[1], lr=0.1)
    if way == "prepared model":
        loader = DataLoader(a_dataset(), batch_size=2)
        model = accelerator.prepare_model(a_model(), evaluation_mode=True)
        prepare(accelerator, model, torch.optim.AdamW, loader, plan=PLANS[1], lr=0.1)
    if way == "no plan":
        loader = DataLoader(a_dataset(), batch_size=2)
        prepare(accelerator, a_model(), torch.optim.AdamW, loader, lr=0.1)
    model, *_ = prepared(PLANS[1], accelerator)
    if way == "accumulate":
        with accelerator.accumulate(model):
            pass
    if way == "clip value":
        accelerator.clip_grad_value_(model.parameters(), 1.0)
    if way == "clip some":
        accelerator.clip_grad_norm_(model[0].parameters(), 1.0)


@pytest.mark.every_combination
@pytest.mark.parametrize(
    ("way", "message"),
    [
        ("batch", "a global batch of 12, but the loader and the accelerator ask for 6"),
        ("sampler", "cannot keep its sampler WeightedRandomSampler"),
        ("prepared loader", "pass a plain torch DataLoader"),
        ("prepared model", "leave out accelerator.prepare for it"),
        ("no plan", "needs loss_fn= to make a plan"),
        ("accumulate", "use `for micro_batch in optimizer.micro_batches"),
        ("clip value", "use accelerator.clip_grad_norm_"),
        ("clip some", "pass model.parameters()"),
    ],
)
def test_what_does_not_work_says_what_to_do(three, way, message):
    for error in three.run_expecting_errors(use_wrongly, way):
        assert message in error.message
