"""The training task: every engine gets the same weights, global batches and loss."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, default_collate

from head_to_head.workloads import WORKLOADS, Batch, LossFunction, Workload
from poplar import HeteroBatchSampler, Plan

MODELS = tuple(WORKLOADS)


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """A small picklable value from which every rank builds its model and data."""

    model: str = "llama"
    """`llama` (next byte), `encoder` (masked bytes, as BERT), `mixture` (the same with experts, as
    BERT-MoE), `vgg` or `vit` (images of 32 x 32 pixels)."""
    size: str = "demo"
    context: int = 64
    """Bytes per sample of text."""
    global_batch: int = 96
    learning_rate: float = 1e-3
    seed: int = 0

    def __post_init__(self) -> None:
        if self.model not in WORKLOADS:
            raise ValueError(f"Task.model {self.model!r} must be one of {', '.join(WORKLOADS)}")
        if self.size not in self._workload.sizes:
            sizes = ", ".join(self._workload.sizes)
            raise ValueError(f"Task.size {self.size!r} of the {self.model} must be one of {sizes}")

    @property
    def _workload(self) -> Workload:
        return WORKLOADS[self.model]

    def new_model(self) -> nn.Module:
        """The same weights at every call, on every rank."""
        torch.manual_seed(self.seed)
        return self._workload.new(self._workload.sizes[self.size], self.context)

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        """The repeated blocks, which sharding engines use as units."""
        return self._workload.blocks(model)

    @property
    def loss_fn(self) -> LossFunction:
        """Mean loss over samples."""
        return self._workload.loss

    def data(self) -> Dataset[Batch]:
        """The dataset, the same on every rank."""
        return self._workload.data(self.context, self.seed)

    def example(self, samples: int) -> Batch:
        """A batch of the first samples."""
        data = self.data()
        return default_collate([data[index] for index in range(samples)])

    def batches(self, plan: Plan, rank: int) -> Iterator[Batch | None]:
        """This rank's part of each global batch, over epochs without end.

        The union over ranks does not depend on the plan. A rank without samples gets None.
        """
        data = self.data()
        sampler = HeteroBatchSampler(len(data), plan, seed=self.seed, rank=rank)
        loader = DataLoader(data, batch_sampler=sampler)
        while True:
            for batch in loader:
                yield batch if plan.samples(rank) else None
            sampler.set_epoch(sampler.epoch + 1)
