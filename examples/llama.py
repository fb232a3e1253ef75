"""A byte-level Llama in plain PyTorch, for the examples, the demo and the benchmarks.

The blocks are one `nn.ModuleList`, so sharding engines find the units themselves. The loss is a
mean over samples of equal length, so the weighted gradient is exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

ROTARY_BASE = 10_000.0
EPSILON = 1e-5


@dataclass(frozen=True, kw_only=True, slots=True)
class LlamaConfig:
    """The sizes of a model."""

    vocabulary: int = 256
    """One token per byte."""
    width: int = 256
    layers: int = 4
    heads: int = 4
    """Each has an even number of channels: rotary positions rotate pairs of them."""
    kv_heads: int = 2
    """Key and value heads; each is shared by `heads / kv_heads` query heads."""
    hidden: int = 0
    """Width inside the feed-forward layers; 0: 8/3 of `width`, rounded up to 32."""
    context: int = 256
    """Bytes per sample."""
    recompute: bool = False
    """Activation checkpointing: keep one activation per block and recompute the rest."""

    @property
    def feed_forward(self) -> int:
        """Width inside the feed-forward layers."""
        return self.hidden or -(-8 * self.width // (3 * 32)) * 32


SIZES = {
    "tiny": LlamaConfig(width=64, layers=2, heads=2, kv_heads=1, context=64),
    "demo": LlamaConfig(width=160, layers=4, heads=5, kv_heads=1, context=256),
    "small": LlamaConfig(width=384, layers=8, heads=6, kv_heads=2, context=512),
    "base": LlamaConfig(width=768, layers=12, heads=12, kv_heads=4, context=1024),
    "large": LlamaConfig(width=1536, layers=24, heads=16, kv_heads=4, context=2048),
}


def rotary_tables(config: LlamaConfig, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines of shape [context, width / heads / 2], always in fp32."""
    channels = config.width // config.heads
    exponents = torch.arange(0, channels, 2, device=device, dtype=torch.float32) / channels
    positions = torch.arange(config.context, device=device, dtype=torch.float32)
    angles = torch.outer(positions, ROTARY_BASE**-exponents)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotate each pair (channel i, channel i + half) of `x` [batch, heads, length, channels]."""
    first, second = x.float().chunk(2, dim=-1)
    rotated = (first * cosines - second * sines, second * cosines + first * sines)
    return torch.cat(rotated, dim=-1).to(x.dtype)


class Attention(nn.Module):
    """Causal self-attention with grouped queries."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.channels = config.width // config.heads
        self.queries = nn.Linear(config.width, config.width, bias=False)
        self.keys = nn.Linear(config.width, config.kv_heads * self.channels, bias=False)
        self.values = nn.Linear(config.width, config.kv_heads * self.channels, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        """[batch, length, width] in and out."""

        def heads(projected: Tensor) -> Tensor:
            return projected.unflatten(-1, (-1, self.channels)).transpose(1, 2)

        queries = rotate(heads(self.queries(x)), cosines, sines)
        keys = rotate(heads(self.keys(x)), cosines, sines)
        mixed = F.scaled_dot_product_attention(
            queries, keys, heads(self.values(x)), is_causal=True, enable_gqa=True
        )
        return self.out(mixed.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """SwiGLU: one projection gates the other."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.width, config.feed_forward, bias=False)
        self.up = nn.Linear(config.width, config.feed_forward, bias=False)
        self.down = nn.Linear(config.feed_forward, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] in and out."""
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Pre-norm attention and feed-forward, each with a residual connection."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width, eps=EPSILON)
        self.attention = Attention(config)
        self.feed_forward_norm = nn.RMSNorm(config.width, eps=EPSILON)
        self.feed_forward = FeedForward(config)

    def forward(self, x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        """[batch, length, width] in and out."""
        x = x + self.attention(self.attention_norm(x), cosines, sines)
        return x + self.feed_forward(self.feed_forward_norm(x))


class Llama(nn.Module):
    """Maps bytes [batch, length] to logits of the next byte [batch, length, vocabulary]."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width, eps=EPSILON)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.apply(self._initialize)

    def _initialize(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """`tokens` [batch, length], with any length up to the context."""
        length = tokens.shape[1]
        if length > self.config.context:
            raise ValueError(f"{length} bytes do not fit the context of {self.config.context}")
        cosines, sines = (t[:length] for t in rotary_tables(self.config, tokens.device))
        x = self.embedding(tokens)
        for block in self.blocks:
            if self.config.recompute and torch.is_grad_enabled():
                x = checkpoint(block, x, cosines, sines, use_reentrant=False)
            else:
                x = block(x, cosines, sines)
        return self.head(self.norm(x))


def next_byte_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Mean cross-entropy of the next byte, in nats."""
    logits = model(batch["input"])
    return F.cross_entropy(logits.flatten(0, 1).float(), batch["target"].flatten())


def warmup_then_cosine(warmup: int, steps: int) -> Callable[[int], float]:
    """Factor of the learning rate: linear warm-up, then cosine decay to 10 %."""

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        progress = min(1.0, (step - warmup) / max(1, steps - warmup))
        return 0.1 + 0.45 * (1 + math.cos(math.pi * progress))

    return factor
