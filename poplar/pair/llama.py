"""The models that are measured: Llamas of plain torch modules, trained in full or by LoRA."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

RANK = 16
"""Of the LoRA adapters, which every linear layer of a block has."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """One size of a model."""

    name: str
    width: int
    layers: int
    heads: int
    kv_heads: int
    """Key and value heads; each is shared by `heads / kv_heads` query heads."""
    hidden: int
    """Width inside the feed-forward layers."""
    vocabulary: int = 32_000
    context: int = 1024
    """Tokens of a sample."""


CPU_SIZES = (
    Size(name="0.1M", width=64, layers=2, heads=2, kv_heads=1, hidden=192, vocabulary=256,
         context=32),
    Size(name="0.9M", width=128, layers=4, heads=4, kv_heads=2, hidden=384, vocabulary=256,
         context=32),
)  # fmt: skip
"""Without a GPU: they show that the command works."""
SIZES = (
    Size(name="75M", width=512, layers=12, heads=8, kv_heads=8, hidden=1408),
    Size(name="160M", width=768, layers=16, heads=12, kv_heads=12, hidden=2048),
    Size(name="370M", width=1024, layers=24, heads=16, kv_heads=16, hidden=2816),
    Size(name="1.1B", width=2048, layers=22, heads=32, kv_heads=4, hidden=5632),
    Size(name="3.4B", width=3200, layers=26, heads=32, kv_heads=32, hidden=8640),
    Size(name="7B", width=4096, layers=32, heads=32, kv_heads=32, hidden=11008),
)
"""From the smallest to the largest, which are those of TinyLlama, OpenLLaMA-3B and Llama-7B."""
TRAININGS = {"full": 16.0, "LoRA": 2.5}
"""Bytes per parameter that a card holds if the training state is replicated: fp32 values, gradients
and two moments; or a frozen base in half precision and its adapters."""
MODEL_PART = 0.6
"""Of the smallest card's memory, for these bytes; the rest is for activations."""


def chosen_sizes(training: str, memory: int) -> Sequence[Size]:
    """The two largest sizes of which the smallest card can hold a replica.

    Args:
        training: a name in `TRAININGS`.
        memory: bytes of the smallest card that are free.

    Raises:
        ValueError: it holds none of the sizes.
    """
    part = TRAININGS[training] / MODEL_PART
    needed = {size: part * numel(size) for size in SIZES}
    fitting = [size for size in SIZES if needed[size] <= memory]
    if not fitting:
        raise ValueError(
            f"the smallest card has {memory / 2**30:.1f} GiB free, but {training} training of the "
            f"smallest model needs {needed[SIZES[0]] / 2**30:.1f} GiB; end other programs on this "
            "card, or leave it out with CUDA_VISIBLE_DEVICES"
        )
    return fitting[-2:]


class Adapted(nn.Module):
    """A linear layer that is frozen, and its LoRA adapter in fp32."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        device = base.weight.device
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, RANK, bias=False, device=device)
        self.up = nn.Linear(RANK, base.out_features, bias=False, device=device)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_features] to [..., out_features]."""
        output: Tensor = self.base(x) + self.up(self.down(x))
        return output


class Block(nn.Module):
    """Pre-norm causal attention with rotary positions, and a SwiGLU feed-forward."""

    def __init__(self, size: Size, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.size = size
        keys = size.width * size.kv_heads // size.heads

        def linear(inputs: int, outputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=False, device=device, dtype=dtype)

        self.attention_norm = nn.RMSNorm(size.width, device=device, dtype=dtype)
        self.queries, self.out = linear(size.width, size.width), linear(size.width, size.width)
        self.keys, self.values = linear(size.width, keys), linear(size.width, keys)
        self.feed_forward_norm = nn.RMSNorm(size.width, device=device, dtype=dtype)
        self.gate, self.up = linear(size.width, size.hidden), linear(size.width, size.hidden)
        self.down = linear(size.hidden, size.width)

    def forward(self, x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        """[batch, length, width] in and out."""
        y = self.attention_norm(x)
        queries, keys, values = (
            layer(y).unflatten(-1, (-1, self.size.width // self.size.heads)).transpose(1, 2)
            for layer in (self.queries, self.keys, self.values)
        )
        mixed = F.scaled_dot_product_attention(
            _rotate(queries, cosines, sines),
            _rotate(keys, cosines, sines),
            values,
            is_causal=True,
            enable_gqa=self.size.heads != self.size.kv_heads,
        )
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        y = self.feed_forward_norm(x)
        output: Tensor = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return output


class Llama(nn.Module):
    """Maps tokens [batch, length] to logits [batch, length, vocabulary]."""

    def __init__(self, size: Size, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.size = size
        placed: dict[str, Any] = {"device": device, "dtype": dtype}
        self.embedding = nn.Embedding(size.vocabulary, size.width, **placed)
        self.blocks = nn.ModuleList(Block(size, device, dtype) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.width, **placed)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False, **placed)

    def forward(self, tokens: Tensor) -> Tensor:
        """`tokens` [batch, length]."""
        channels = self.size.width // self.size.heads
        device = tokens.device
        rates = 10_000.0 ** (-torch.arange(0, channels, 2, device=device).float() / channels)
        angles = torch.outer(torch.arange(tokens.shape[1], device=device).float(), rates)
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, angles.cos(), angles.sin())
        logits: Tensor = self.head(self.norm(x))
        return logits


def numel(size: Size) -> int:
    """Elements of the parameters of a model."""
    model = Llama(size, torch.device("meta"), torch.float32)
    return sum(each.numel() for each in model.parameters())


def new_model(size: Size, training: str, device: torch.device, dtype: torch.dtype) -> Llama:
    """A model with the same random weights at every call on the same kind of device.

    Args:
        size: of the model.
        training: "full" (fp32 parameters), or "LoRA" (a frozen base, adapters in fp32).
        device: where it is made.
        dtype: of the frozen base.
    """
    torch.manual_seed(0)
    if training == "full":
        return Llama(size, device, torch.float32)
    model = Llama(size, device, dtype).requires_grad_(False)
    for block in model.blocks:
        for name, layer in list(block.named_children()):
            if isinstance(layer, nn.Linear):
                setattr(block, name, Adapted(layer))
    return model


def next_token_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """Mean cross-entropy of the next token, of tokens [batch, context + 1]."""
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def _rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotate each pair (channel i, channel i + half) of `x` [batch, heads, length, channels]."""
    first, second = x.float().chunk(2, dim=-1)
    rotated = (first * cosines - second * sines, second * cosines + first * sines)
    return torch.cat(rotated, dim=-1).to(x.dtype)
