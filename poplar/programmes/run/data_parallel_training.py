"""Training by a plan without a programme: every rank computes its samples with the whole model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from poplar.optimizer import HeteroZeroOptimizer
from poplar.programmes.run.distributed_training import DistributedTraining
from poplar.values.plan import Plan
from poplar.zero.micro_batch_loss import LossFunction
from poplar.zero.micro_batches import Loss, Weight
from poplar.zero.step_result import StepResult


class DataParallelTraining(DistributedTraining):
    """`HeteroZeroOptimizer` with its loss function."""

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFunction,
        optimizer: HeteroZeroOptimizer,
        plan: Plan,
        *,
        weight: Weight | None,
        loss: Loss,
        reason: str,
    ) -> None:
        self.model, self.optimizer, self.plan = model, optimizer, plan
        self.programme, self.reason = None, reason
        self._loss_fn, self._weight, self._loss = loss_fn, weight, loss

    def train_step(self, batch: Any, *, max_norm: float | None = None) -> StepResult:
        return self.optimizer.train_step(
            self._loss_fn, batch, weight=self._weight, loss=self._loss, max_norm=max_norm
        )

    def evaluate(self, loader: Iterable[Any]) -> float:
        return self.optimizer.evaluate(self._loss_fn, loader, self._weight)

    def state_dict(self, to: int = 0) -> dict[str, Any] | None:
        optimizer = self.optimizer.full_state_dict(to)
        with self.optimizer.full_parameters():
            if optimizer is None:
                return None
            values = self.model.state_dict()
            model = {name: value.detach().cpu().clone() for name, value in values.items()}
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        with self.optimizer.full_parameters(writeback=True):
            self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def save_model(self, path: str | Path) -> None:
        self.optimizer.save_model(path)

    def release(self) -> None:
        self.optimizer.release()
