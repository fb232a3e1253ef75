"""Small deterministic models and data that cover the cases in which the engine must be exact.

Sizes are odd (37, 61), so that shard boundaries, which are multiples of 64 elements, split
parameters. No parameter starts near zero, so that a relative tolerance is meaningful.
`build(spec)` gives the same bits in every process.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

VOCABULARY = 37
WIDTH = 26
HEADS = 2
HIDDEN = 61
LENGTH = 7
IGNORED = -100
"""Target that the loss ignores."""


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A model and its special cases."""

    kind: str = "transformer"
    """"transformer", "albert" (one block, used several times), "mlp" or "batch_norm"."""
    blocks: int = 3
    norm: str = "layer"
    """`layer` or `rms`."""
    tied: bool = False
    """The head and the embedding share their weight."""
    frozen: bool = False
    """The positions and one norm inside a unit are not trained."""
    unused: bool = False
    """One parameter in the root and one in a block are used by no pass."""
    two_groups: bool = False
    """Two param groups: weight decay for matrices, none for vectors."""
    checkpointing: bool = False
    compiled: str = ""
    """Backend of torch.compile on every block; empty: not compiled."""
    dtype: torch.dtype = torch.float32
    width: int = WIDTH
    hidden: int = HIDDEN


class Block(nn.Module):
    """Attention and an MLP, each after a norm. No bias whose gradient would be 0."""

    def __init__(self, spec: ModelSpec):
        super().__init__()
        norm = {"layer": nn.LayerNorm, "rms": nn.RMSNorm}[spec.norm]
        self.norm1 = norm(spec.width)
        self.attention = nn.Linear(spec.width, 3 * spec.width, bias=False)
        self.project = nn.Linear(spec.width, spec.width)
        self.norm2 = norm(spec.width)
        self.up = nn.Linear(spec.width, spec.hidden)
        self.down = nn.Linear(spec.hidden, spec.width)

    def forward(self, x: Tensor) -> Tensor:
        samples, length, width = x.shape
        q, k, v = (
            part.view(samples, length, HEADS, width // HEADS).transpose(1, 2)
            for part in self.attention(self.norm1(x)).chunk(3, dim=-1)
        )
        scores = (q @ k.transpose(-1, -2)) * (width // HEADS) ** -0.5
        future = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        mixed = scores.masked_fill(future, float("-inf")).softmax(-1) @ v
        x = x + self.project(mixed.transpose(1, 2).reshape(samples, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """A language model. `order` and `skip` in the batch select the blocks of a pass."""

    def __init__(self, spec: ModelSpec):
        super().__init__()
        self.spec = spec
        self.embedding = nn.Embedding(VOCABULARY, spec.width)
        self.positions = nn.Parameter(torch.zeros(LENGTH, spec.width))
        entered = 1 if spec.kind == "albert" else spec.blocks
        self.blocks = nn.ModuleList(Block(spec) for _ in range(entered))
        self.norm = nn.LayerNorm(spec.width)
        self.head = nn.Linear(spec.width, VOCABULARY, bias=False)
        if spec.tied:
            self.head.weight = self.embedding.weight
        if spec.unused:
            self.never = nn.Linear(spec.width, 5)
            self.blocks[-1].never = nn.Parameter(torch.zeros(61))

    def forward(self, tokens: Tensor, order: str = "", skip: int | None = None) -> Tensor:
        x = self.embedding(tokens) + self.positions[: tokens.shape[1]]
        for index in self._route(order, skip):
            block = self.blocks[index]
            if self.spec.checkpointing and torch.is_grad_enabled():
                x = checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        return self.head(self.norm(x))

    def _route(self, order: str, skip: int | None) -> list[int]:
        if self.spec.kind == "albert":
            return [0] * self.spec.blocks
        route = [index for index in range(len(self.blocks)) if index != skip]
        return route[::-1] if order == "reversed" else route


class Perceptron(nn.Module):
    """The smallest model with repeated blocks, optionally with batch norm."""

    def __init__(self, spec: ModelSpec):
        super().__init__()
        self.spec = spec
        self.embedding = nn.Embedding(VOCABULARY, spec.width)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Linear(spec.width, spec.hidden), nn.Tanh(), nn.Linear(spec.hidden, spec.width)
            )
            for _ in range(spec.blocks)
        )
        self.norm = nn.BatchNorm1d(LENGTH) if spec.kind == "batch_norm" else nn.Identity()
        self.head = nn.Linear(spec.width, VOCABULARY)

    def forward(self, tokens: Tensor, order: str = "", skip: int | None = None) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.norm(x))


class Stateful(nn.Module):
    """Uses random numbers and changes its buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = build(ModelSpec(blocks=1))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, tokens: Tensor) -> Tensor:
        self.calls += 1
        self.seen = 0.9 * self.seen + tokens.numel()
        random.random()
        numpy.random.rand()
        return self.inner(tokens) + 0.0 * torch.rand(1)


def build(spec: ModelSpec, seed: int = 0) -> nn.Module:
    """The model of `spec`: the same bits in every process, no parameter at zero."""
    model = Perceptron(spec) if spec.kind in ("mlp", "batch_norm") else Transformer(spec)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = (
                0.3 if parameter.dim() < 2 or "embedding" in name else parameter.shape[1] ** -0.5
            )
            noise = torch.randn(parameter.shape, generator=generator) * scale
            is_norm_weight = "norm" in name and name.endswith("weight")
            parameter.copy_(1 + 0.1 * noise if is_norm_weight else noise)
    model.to(spec.dtype)
    if spec.frozen:
        model.positions.requires_grad_(False)
        model.blocks[1].norm1.weight.requires_grad_(False)
    if spec.compiled:
        for block in model.blocks:
            block.compile(backend=spec.compiled)
    return model


def parameter_groups(spec: ModelSpec, model: nn.Module) -> list[dict[str, Any]] | None:
    """The `params` argument; None for one group of all parameters."""
    if not spec.two_groups:
        return None
    trained = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0, "lr": 2e-3},
    ]


def data(samples: int, *, seed: int, masked: bool = False) -> dict[str, Tensor]:
    """One global batch of tokens and targets; `masked`: samples have unequal numbers of tokens."""
    generator = torch.Generator().manual_seed(seed)
    text = torch.randint(VOCABULARY, (samples, LENGTH + 1), generator=generator)
    targets = text[:, 1:].clone()
    if masked:
        counted = torch.randint(1, LENGTH + 1, (samples, 1), generator=generator)
        targets[torch.arange(LENGTH)[None, :] >= counted] = IGNORED
    return {"tokens": text[:, :-1].contiguous(), "targets": targets}


def part(batch: Mapping[str, Any], start: int, stop: int) -> dict[str, Any]:
    """Samples `start` to `stop` of a batch."""
    return {k: v[start:stop] if isinstance(v, Tensor) else v for k, v in batch.items()}


def counted_tokens(batch: Mapping[str, Tensor]) -> int:
    """Number of tokens that the loss counts."""
    return int((batch["targets"] != IGNORED).sum())


def _token_losses(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    steering = {k: batch[k] for k in ("order", "skip") if k in batch}
    logits = model(batch["tokens"], **steering).float()
    return F.cross_entropy(
        logits.flatten(0, 1), batch["targets"].flatten(), ignore_index=IGNORED, reduction="none"
    )


def mean_over_samples(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    """Mean over samples of each sample's mean (all tokens count)."""
    return _token_losses(model, batch).mean()


def mean_over_tokens(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    """Mean over the tokens that count."""
    return _token_losses(model, batch).sum() / counted_tokens(batch)


def sum_over_tokens(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    """Sum over the tokens that count."""
    return _token_losses(model, batch).sum()


def already_divided(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    """Sum over samples, divided by `divisor`: the samples of the global batch."""
    return sum_over_samples(model, batch) / batch["divisor"]


def sum_over_samples(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    """Sum over samples of each sample's mean (all tokens count)."""
    return _token_losses(model, batch).sum() / LENGTH
