"""A byte-level encoder like BERT, the second model of the benchmarks.

Every sample has the same number of masked positions, so the loss is a mean over samples and the
weighted gradient is exact. There is no dropout. Blocks are pre-norm, which needs no warm-up.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from text import ByteWindows
from torch import Tensor, nn
from torch.utils.data import Dataset

BYTES = 256
"""Number of classes at a masked position."""

MASK = BYTES
"""The mask token, after the last byte."""

MASKED = 0.15
"""Fraction of a sample's positions that are predicted, as in BERT."""

HIDDEN = 0.8
"""Fraction of these positions that contain the mask token, as in BERT."""

SWAPPED = 0.1
"""Fraction of these positions that contain a random byte; the rest contain the original byte."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EncoderConfig:
    """The sizes of a model."""

    vocabulary: int = BYTES + 1
    """Input tokens: one per byte, and the mask. Outputs are bytes only."""
    width: int = 256
    layers: int = 4
    heads: int = 4
    context: int = 256
    """Bytes per sample."""


SIZES = {
    "tiny": EncoderConfig(width=64, layers=2, heads=2, context=64),
    "demo": EncoderConfig(width=160, layers=4, heads=5, context=256),
    "small": EncoderConfig(width=384, layers=8, heads=6, context=512),
    "base": EncoderConfig(width=768, layers=12, heads=12, context=1024),
    "large": EncoderConfig(width=1536, layers=24, heads=16, context=2048),
}


class Attention(nn.Module):
    """Bidirectional self-attention."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.channels = config.width // config.heads
        self.queries = nn.Linear(config.width, config.width)
        # A key bias cancels in the softmax; its gradient would be rounding noise.
        self.keys = nn.Linear(config.width, config.width, bias=False)
        self.values = nn.Linear(config.width, config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, length, width] in and out."""

        def heads(projected: Tensor) -> Tensor:
            return projected.unflatten(-1, (-1, self.channels)).transpose(1, 2)

        mixed = F.scaled_dot_product_attention(
            heads(self.queries(x)), heads(self.keys(x)), heads(self.values(x))
        )
        return self.out(mixed.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """Two layers with a GELU between them."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] in and out."""
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    """Pre-norm attention and feed-forward, each with a residual connection."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.feed_forward_norm = nn.LayerNorm(config.width)
        self.feed_forward = FeedForward(config)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, length, width] in and out."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.feed_forward_norm(x))


class Head(nn.Module):
    """Maps hidden states to logits of the byte at each position."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.transform = nn.Linear(config.width, config.width)
        self.norm = nn.LayerNorm(config.width)
        self.decoder = nn.Linear(config.width, BYTES)

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] in, [..., 256] out."""
        return self.decoder(self.norm(F.gelu(self.transform(x))))


class Encoder(nn.Module):
    """Maps bytes with masked positions to logits of the original bytes."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = Head(config)
        self.apply(self._initialize)

    def _initialize(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor, places: Tensor | None = None) -> Tensor:
        """Logits at the positions `places` [batch, places] of `tokens` [batch, length], or at all.

        Returns:
            [batch, places, 256].

        Raises:
            ValueError: `length` is larger than the context.
        """
        length = tokens.shape[1]
        if length > self.config.context:
            raise ValueError(f"{length} bytes do not fit the context of {self.config.context}")
        x = self.embedding(tokens) + self.positions(torch.arange(length, device=tokens.device))
        for block in self.blocks:
            x = block(x)
        if places is not None:  # compute the head only where logits are needed
            x = x.gather(1, places.unsqueeze(-1).expand(-1, -1, x.shape[-1]))
        return self.head(self.norm(x))


class MaskedBytes(Dataset[dict[str, Tensor]]):
    """Windows of text with a fixed number of masked positions each.

    The masked positions of a sample depend only on the seed and the sample's index.
    """

    def __init__(self, windows: ByteWindows, seed: int = 0) -> None:
        self.windows = windows
        self.seed = seed
        self.masked = max(1, round(MASKED * windows.context))
        """Masked positions per sample."""

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """`input` [context] and `target` [masked]: the original bytes at `places` [masked]."""
        text = self.windows[index]["input"]
        draws = self._draws(index)
        places = torch.randperm(text.numel(), generator=draws)[: self.masked].sort().values
        target = text[places]
        others = torch.randint(BYTES, (self.masked,), generator=draws)
        draw = torch.rand(self.masked, generator=draws)
        shown = torch.where(draw < HIDDEN + SWAPPED, others, target)
        shown[draw < HIDDEN] = MASK
        return {"input": text.index_put((places,), shown), "places": places, "target": target}

    def _draws(self, index: int) -> torch.Generator:
        # Hashed, so that sample i of seed j is independent of sample j of seed i.
        digest = hashlib.sha256(f"{self.seed} {index}".encode()).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest[:4], "big"))


def masked_byte_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Mean cross-entropy of the masked bytes, in nats."""
    logits = model(batch["input"], batch["places"])
    return F.cross_entropy(logits.flatten(0, 1).float(), batch["target"].flatten())
