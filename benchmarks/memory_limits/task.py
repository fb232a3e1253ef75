"""The model of the trials: a Llama with any number of blocks, on `meta`."""

from __future__ import annotations

from dataclasses import dataclass, replace

import llama
import torch
from head_to_head.task import Batch, LossFunction
from torch import nn


@dataclass(frozen=True, kw_only=True, slots=True)
class GrowingLlama:
    """A small picklable value with the interface of `head_to_head.task.Task` that engines use."""

    blocks_count: int
    width: int = 256
    heads: int = 4
    context: int = 16
    """Bytes per sample; few, because state is to be compared, not activations."""
    learning_rate: float = 1e-3

    @property
    def config(self) -> llama.LlamaConfig:
        """Sizes of the model."""
        return llama.LlamaConfig(
            width=self.width,
            layers=self.blocks_count,
            heads=self.heads,
            kv_heads=self.heads // 2,
            context=self.context,
        )

    def new_model(self) -> nn.Module:
        """The model without values, on `meta`."""
        with torch.device("meta"):
            return llama.Llama(self.config)

    def new_real_model(self) -> nn.Module:
        """The model with values, on the CPU."""
        return llama.Llama(self.config)

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        """The units of sharding engines."""
        return list(model.blocks)

    @property
    def loss_fn(self) -> LossFunction:
        """Mean over samples."""
        return llama.next_byte_loss

    def batch(self, samples: int) -> Batch | None:
        """Random samples; None for no samples."""
        if not samples:
            return None
        text = torch.randint(256, (samples, self.context + 1))
        return {"input": text[:, :-1].contiguous(), "target": text[:, 1:].contiguous()}

    @property
    def parameters(self) -> int:
        """Elements of the model."""
        return sum(parameter.numel() for parameter in self.new_model().parameters())

    def with_blocks(self, count: int) -> GrowingLlama:
        """The same with another number of blocks."""
        return replace(self, blocks_count=count)
