"""The training task: every engine gets the same weights, global batches and loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import encoder
import llama
import torch
from text import load_text
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, default_collate

from poplar import HeteroBatchSampler, Plan

Batch = dict[str, Tensor]
LossFunction = Callable[[nn.Module, Batch], Tensor]

SIZES = {"llama": llama.SIZES, "encoder": encoder.SIZES}
MODELS = tuple(SIZES)
TEXT_BYTES = 2_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """A small picklable value from which every rank builds its model and data."""

    model: str = "llama"
    """`llama` (next byte) or `encoder` (masked bytes, as BERT)."""
    size: str = "demo"
    context: int = 64
    """Bytes per sample."""
    global_batch: int = 96
    learning_rate: float = 1e-3
    seed: int = 0

    def __post_init__(self) -> None:
        if self.model not in SIZES:
            raise ValueError(f"Task.model {self.model!r} must be one of {', '.join(SIZES)}")
        if self.size not in SIZES[self.model]:
            sizes = ", ".join(SIZES[self.model])
            raise ValueError(f"Task.size {self.size!r} of the {self.model} must be one of {sizes}")

    def new_model(self) -> nn.Module:
        """The same weights at every call, on every rank."""
        torch.manual_seed(self.seed)
        if self.model == "encoder":
            return encoder.Encoder(replace(encoder.SIZES[self.size], context=self.context))
        return llama.Llama(replace(llama.SIZES[self.size], context=self.context))

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        """The transformer's blocks, which sharding engines use as units."""
        return list(model.blocks)

    @property
    def loss_fn(self) -> LossFunction:
        """Mean loss over samples."""
        return encoder.masked_byte_loss if self.model == "encoder" else llama.next_byte_loss

    def data(self) -> Dataset[Batch]:
        """The dataset, the same on every rank."""
        windows, _ = load_text(self.context, limit=TEXT_BYTES)
        return encoder.MaskedBytes(windows, self.seed) if self.model == "encoder" else windows

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
