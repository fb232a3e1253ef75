"""A small Llama, trained by two unequal ranks and by one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from llama import SIZES, Llama, next_byte_loss
from torch import Tensor, nn

from poplar import HeteroZeroOptimizer, Plan, StepResult
from two_ranks.rank import Rank

STAGES, STEPS = range(4), 3
MICRO_BATCHES, PASSES = (3, 1), 2
SHARES = ((0.6, 0.4), (1.0, 0.0))
TOLERANCE = 1e-4
"""Relative difference of a parameter after three steps in fp32; rounding gives about 1e-6."""
OPTIONS: dict[str, Any] = {"lr": 1e-2, "eps": 1e-3}
"""A large `eps`, so that small gradients are not divided by their own rounding errors."""

LossFunction = Callable[[nn.Module, dict[str, Tensor]], Tensor]


class Training:
    """A model and its optimizer on this rank. All ranks make one."""

    def __init__(
        self,
        own: Rank,
        stage: int,
        shares: tuple[float, ...] = SHARES[0],
        *,
        recompute: bool = False,
        host_state: tuple[float, ...] = (),
        **options: Any,
    ) -> None:
        plan = Plan.manual(MICRO_BATCHES, stage=stage, passes=PASSES, shares=shares)
        plan = replace(plan, host_state=host_state)
        self.batch = part_of(new_batch(own.device, plan.global_batch), plan, own.rank)
        self.model = new_model(own.device, recompute)
        self.optimizer = HeteroZeroOptimizer(
            self.model,
            torch.optim.AdamW,
            plan=plan,
            compute_dtype=torch.float32,
            communicator="process_group",
            **{**OPTIONS, **options},
        )

    def step(self, loss_fn: LossFunction = next_byte_loss) -> StepResult:
        """One step on the global batch. Collective."""
        return self.optimizer.train_step(loss_fn, self.batch, max_norm=1.0)

    def finish(self) -> dict[str, Tensor]:
        """All steps but the first one; returns the parameters after them. Collective."""
        for _ in range(STEPS - 1):
            self.step()
        found = self.parameters()
        self.optimizer.release()
        return found

    def parameters(self) -> dict[str, Tensor]:
        """Copies of all parameters. Collective."""
        return parameters_of(self.model, self.optimizer)


def new_model(device: torch.device, recompute: bool = False) -> Llama:
    """The same weights at every call."""
    torch.manual_seed(0)
    return Llama(replace(SIZES["tiny"], recompute=recompute)).to(device)


def new_batch(device: torch.device, samples: int) -> dict[str, Tensor]:
    """Random bytes, the same at every call."""
    generator = torch.Generator().manual_seed(1)
    text = torch.randint(0, 256, (samples, SIZES["tiny"].context + 1), generator=generator)
    return {"input": text[:, :-1].to(device), "target": text[:, 1:].to(device)}


def part_of(whole: Mapping[str, Tensor], plan: Plan, rank: int) -> dict[str, Tensor]:
    """A rank's part of a global batch."""
    first = plan.offset(rank)
    last = first + plan.samples(rank)
    return {name: value[first:last] for name, value in whole.items()}


def parameters_of(model: nn.Module, optimizer: HeteroZeroOptimizer) -> dict[str, Tensor]:
    """Copies of all parameters. Collective."""
    with optimizer.full_parameters():
        return {name: p.detach().cpu().clone() for name, p in model.named_parameters()}


def train_in_one_process(
    device: torch.device,
    steps: int,
    samples: int = PASSES * sum(MICRO_BATCHES),
    **options: Any,
) -> tuple[dict[str, Tensor], list[float]]:
    """The reference: plain PyTorch on the whole batch; returns the parameters and the losses."""
    model, losses = new_model(device), []
    optimizer = torch.optim.AdamW(model.parameters(), **{**OPTIONS, **options})
    batch = new_batch(device, samples)
    for _ in range(steps):
        loss = next_byte_loss(model, batch)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return {name: p.detach().cpu() for name, p in model.named_parameters()}, losses


def relative_error(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """The largest of any parameter; infinite if a value is NaN."""
    errors = [
        float((found[name] - value).norm() / value.norm()) for name, value in expected.items()
    ]
    return max(error if error == error else float("inf") for error in errors)
