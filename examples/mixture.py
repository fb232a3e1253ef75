"""The encoder with experts, like BERT-MoE: every second feed-forward layer is a mixture of experts.

Routing follows GShard (Lepikhin et al., 2021): two experts per token, each with a fixed capacity; a
token beyond it skips the expert. A group of tokens that shares a capacity is one sample, so what a
sample computes, and the gradient, do not depend on how a batch is divided over ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import encoder
import torch
import torch.nn.functional as F
from torch import Tensor, nn

BALANCE = 0.01
"""Weight in the loss of how unevenly tokens are divided over experts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MixtureConfig:
    """The sizes of a model."""

    encoder: encoder.EncoderConfig
    experts: int = 8
    capacity: float = 1.25
    """Of an expert, relative to an even division of the tokens of a sample, twice each."""

    def places(self, tokens: int) -> int:
        """Of an expert, for a sample of so many tokens."""
        return max(1, math.ceil(self.capacity * 2 * tokens / self.experts))


SIZES = {
    name: MixtureConfig(encoder=encoder.SIZES[name], experts=experts)
    for name, experts in (("tiny", 4), ("demo", 8), ("small", 8), ("base", 8))
}


class Experts(nn.Module):
    """A mixture of feed-forward layers."""

    def __init__(self, config: MixtureConfig) -> None:
        super().__init__()
        self.config = config
        width, hidden = config.encoder.width, 4 * config.encoder.width
        self.gate = nn.Linear(width, config.experts, bias=False)
        self.up = nn.Parameter(torch.empty(config.experts, width, hidden))
        self.down = nn.Parameter(torch.empty(config.experts, hidden, width))
        nn.init.normal_(self.up, std=0.02)
        nn.init.normal_(self.down, std=0.02)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[batch, tokens, width] in and out, and the imbalance of each sample [batch]."""
        weights = self.gate(x).float().softmax(-1)
        combine = self._combine(weights).to(x.dtype)
        inputs = torch.einsum("btec,btw->ebcw", (combine > 0).to(x.dtype), x)
        hidden = F.gelu(torch.einsum("ebcw,ewh->ebch", inputs, self.up))
        outputs = torch.einsum("ebch,ehw->ebcw", hidden, self.down)
        first = F.one_hot(weights.argmax(-1), self.config.experts).to(weights.dtype)
        imbalance = (weights.mean(1) * first.mean(1)).sum(-1) * self.config.experts
        return torch.einsum("btec,ebcw->btw", combine, outputs), imbalance

    def _combine(self, weights: Tensor) -> Tensor:
        """[batch, tokens, experts, places]: the weight of an expert's place for a token."""
        places = self.config.places(weights.shape[1])
        best, experts = weights.topk(2, dim=-1)
        best = best / best.sum(-1, keepdim=True)
        combine = weights.new_zeros(*weights.shape, places)
        taken = weights.new_zeros(weights.shape[0], 1, self.config.experts)
        for choice in range(2):  # first choices come first
            chosen = F.one_hot(experts[..., choice], self.config.experts).to(weights.dtype)
            place = (taken + chosen.cumsum(1) - chosen) * chosen
            taken = taken + chosen.sum(1, keepdim=True)
            fits = chosen * (place < places)
            at = F.one_hot(place.sum(-1).long().clamp(max=places - 1), places).to(weights.dtype)
            combine = combine + torch.einsum("bt,bte,btc->btec", best[..., choice], fits, at)
        return combine


class MixtureBlock(nn.Module):
    """The encoder's block with experts."""

    def __init__(self, config: MixtureConfig) -> None:
        super().__init__()
        inner = config.encoder
        self.attention_norm = nn.LayerNorm(inner.width)
        self.attention = encoder.Attention(inner)
        self.experts_norm = nn.LayerNorm(inner.width)
        self.experts = Experts(config)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[batch, tokens, width] in and out, and the imbalance of each sample [batch]."""
        x = x + self.attention(self.attention_norm(x))
        mixed, imbalance = self.experts(self.experts_norm(x))
        return x + mixed, imbalance


class PairOfBlocks(nn.Module):
    """A plain block and one with experts."""

    def __init__(self, config: MixtureConfig) -> None:
        super().__init__()
        self.plain = encoder.Block(config.encoder)
        self.mixture = MixtureBlock(config)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[batch, tokens, width] in and out, and the imbalance of each sample [batch]."""
        output: tuple[Tensor, Tensor] = self.mixture(self.plain(x))
        return output


class Mixture(nn.Module):
    """Maps bytes with masked positions to logits of the original bytes."""

    def __init__(self, config: MixtureConfig) -> None:
        super().__init__()
        self.config = config
        inner = config.encoder
        self.embedding = nn.Embedding(inner.vocabulary, inner.width)
        self.positions = nn.Embedding(inner.context, inner.width)
        self.blocks = nn.ModuleList(PairOfBlocks(config) for _ in range(inner.layers // 2))
        self.norm = nn.LayerNorm(inner.width)
        self.head = encoder.Head(inner)

    def forward(self, tokens: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [batch, places, 256] at `places`, and the imbalance of each sample [batch]."""
        at = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.embedding(tokens) + self.positions(at)
        imbalance = x.new_zeros(x.shape[0], dtype=torch.float32)
        for block in self.blocks:
            x, added = block(x)
            imbalance = imbalance + added
        x = x.gather(1, places.unsqueeze(-1).expand(-1, -1, x.shape[-1]))
        return self.head(self.norm(x)), imbalance / len(self.blocks)


def mixture_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Mean cross-entropy of the masked bytes, in nats, and the weighted imbalance."""
    logits, imbalance = model(batch["input"], batch["places"])
    text = F.cross_entropy(logits.flatten(0, 1).float(), batch["target"].flatten())
    return text + BALANCE * imbalance.mean()
