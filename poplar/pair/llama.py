"""The models that are measured: Llamas of plain torch modules, trained in full or by LoRA."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from poplar.hardware.model_shapes import Architecture, llama

RANK = 16
"""Of the LoRA adapters, which every linear layer of a block has."""


CPU_SIZES = (
    llama("0.1M", 64, 2, 2, 192, key_value_heads=1, vocabulary=256, sequence=32),
    llama("0.9M", 128, 4, 4, 384, key_value_heads=2, vocabulary=256, sequence=32),
)
"""Without a GPU: they show that the command works."""
SIZES = (
    llama("75M", 512, 12, 8, 1408, sequence=1024),
    llama("160M", 768, 16, 12, 2048, sequence=1024),
    llama("370M", 1024, 24, 16, 2816, sequence=1024),
    llama("1.1B", 2048, 22, 32, 5632, sequence=1024, key_value_heads=4),
    llama("3.4B", 3200, 26, 32, 8640, sequence=1024),
    llama("7B", 4096, 32, 32, 11008, sequence=1024),
)
"""From the smallest to the largest, which are those of TinyLlama, OpenLLaMA-3B and Llama-7B."""
TRAININGS = {"full": 16.0, "LoRA": 2.5}
"""Bytes per parameter that a card holds if the training state is replicated: fp32 values, gradients
and two moments; or a frozen base in half precision and its adapters."""
MODEL_PART = 0.6
"""Of the smallest card's memory, for these bytes; the rest is for activations."""


def chosen_sizes(training: str, memory: int) -> Sequence[Architecture]:
    """The two largest sizes of which the smallest card can hold a replica.

    Args:
        training: a name in `TRAININGS`.
        memory: bytes of the smallest card that are free.

    Raises:
        ValueError: it holds none of the sizes.
    """
    part = TRAININGS[training] / MODEL_PART
    needed = {size: part * size.numel for size in SIZES}
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

    def __init__(self, size: Architecture, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.channels = size.hidden // size.heads
        keys = self.channels * (size.key_value_heads or size.heads)

        def linear(inputs: int, outputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=False, device=device, dtype=dtype)

        self.attention_norm = nn.RMSNorm(size.hidden, device=device, dtype=dtype)
        self.queries, self.out = linear(size.hidden, size.hidden), linear(size.hidden, size.hidden)
        self.keys, self.values = linear(size.hidden, keys), linear(size.hidden, keys)
        self.feed_forward_norm = nn.RMSNorm(size.hidden, device=device, dtype=dtype)
        self.gate, self.up = linear(size.hidden, size.mlp), linear(size.hidden, size.mlp)
        self.down = linear(size.mlp, size.hidden)

    def forward(self, x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        """[batch, length, width] in and out."""
        y = self.attention_norm(x)
        queries, keys, values = (
            layer(y).unflatten(-1, (-1, self.channels)).transpose(1, 2)
            for layer in (self.queries, self.keys, self.values)
        )
        mixed = F.scaled_dot_product_attention(
            _rotate(queries, cosines, sines),
            _rotate(keys, cosines, sines),
            values,
            is_causal=True,
            enable_gqa=queries.shape[1] != keys.shape[1],
        )
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        y = self.feed_forward_norm(x)
        output: Tensor = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return output


class Llama(nn.Module):
    """Maps tokens [batch, length] to logits [batch, length, vocabulary]."""

    def __init__(self, size: Architecture, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.size = size
        placed: dict[str, Any] = {"device": device, "dtype": dtype}
        self.embedding = nn.Embedding(size.vocabulary, size.hidden, **placed)
        self.blocks = nn.ModuleList(Block(size, device, dtype) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.hidden, **placed)
        self.head = nn.Linear(size.hidden, size.vocabulary, bias=False, **placed)

    def forward(self, tokens: Tensor) -> Tensor:
        """`tokens` [batch, length]."""
        channels = self.size.hidden // self.size.heads
        device = tokens.device
        rates = 10_000.0 ** (-torch.arange(0, channels, 2, device=device).float() / channels)
        angles = torch.outer(torch.arange(tokens.shape[1], device=device).float(), rates)
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, angles.cos(), angles.sin())
        logits: Tensor = self.head(self.norm(x))
        return logits


def new_model(size: Architecture, training: str, device: torch.device, dtype: torch.dtype) -> Llama:
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
