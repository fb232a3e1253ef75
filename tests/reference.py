"""The reference: one process trains on the global batch with a plain torch optimizer.

It does not use the engine. A `Recipe` contains everything that determines the trajectory. How the
batch is split and what the ranks own is not part of it, because neither may change the result.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import models
import torch
from models import ModelSpec
from torch import Tensor, nn

LOSSES = ("samples", "tokens", "sum", "token_sum", "divided")


@dataclass(frozen=True)
class Steering:
    """Samples `start` to `stop` of every global batch skip or reorder blocks of the model."""

    start: int
    stop: int
    key: str
    """`skip` or `order`."""
    value: Any
    steps: tuple[int, ...] | None = None
    """The steps in which this applies; None: all."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A training run, independent of ranks."""

    spec: ModelSpec = field(default_factory=ModelSpec)
    optimizer: str = "AdamW"
    """Name of a class in torch.optim."""
    options: tuple[tuple[str, Any], ...] = (("lr", 1e-3), ("eps", 1e-5), ("weight_decay", 0.05))
    """Keyword arguments of the optimizer. See test_exact_steps.py for eps."""
    batches: tuple[int, ...] = (12,) * 3
    """Samples of each global batch, one per step."""
    loss: str = "samples"
    """What the loss function returns for a micro-batch: "samples", the mean over samples; "tokens",
    the mean over the tokens that count (their number differs between samples); "sum" and
    "token_sum", the corresponding sums; "divided", a sum that is divided by the samples of the
    global batch. The gradient of a step is always that of the mean over the global batch."""
    max_norm: float | None = None
    decaying: bool = False
    """The learning rate decreases in every step, by a LambdaLR."""
    steering: tuple[Steering, ...] = ()
    """If not empty, it must cover the whole batch (`stop == start` of the next)."""
    seed: int = 1

    def __post_init__(self) -> None:
        if self.loss not in LOSSES:
            raise ValueError(f"loss must be one of {LOSSES}, got {self.loss!r}")

    @property
    def optimizer_class(self) -> type[torch.optim.Optimizer]:
        """The class that `optimizer` names."""
        return getattr(torch.optim, self.optimizer)

    def scheduler(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
        """The learning rate scheduler."""
        return torch.optim.lr_scheduler.LambdaLR(
            optimizer, (lambda step: 1 / (1 + step)) if self.decaying else (lambda step: 1.0)
        )

    @property
    def counts_tokens(self) -> bool:
        """Whether the mean is over tokens."""
        return self.loss in ("tokens", "token_sum")

    def batch(self, step: int) -> dict[str, Any]:
        """The global batch of a step."""
        samples = self.batches[step]
        batch: dict[str, Any] = models.data(
            samples, seed=1000 * self.seed + step, masked=self.counts_tokens
        )
        if self.loss == "divided":
            batch["divisor"] = samples
        return batch

    def part(self, step: int, start: int, stop: int) -> dict[str, Any]:
        """Some samples of a step, with their steering."""
        part = models.part(self.batch(step), start, stop)
        for steering in self.steering:
            inside = steering.start <= start and stop <= steering.stop
            if inside and (steering.steps is None or step in steering.steps):
                part[steering.key] = steering.value
        return part


@dataclass(frozen=True, kw_only=True)
class Trajectory:
    """The result of a training run."""

    parameters: dict[str, Tensor]
    losses: tuple[float | None, ...]
    """None where the loss was not summed over ranks."""
    norms: tuple[float | None, ...]
    """Norm of each step's gradient before clipping; None where the recipe does not clip."""


@functools.cache
def train(recipe: Recipe) -> Trajectory:
    """Train the recipe in this process."""
    spec = recipe.spec
    model = models.build(spec)
    masters = _Masters(model)
    optimizer = recipe.optimizer_class(
        masters.swap(models.parameter_groups(spec, model)), **dict(recipe.options)
    )
    scheduler = recipe.scheduler(optimizer)
    losses, norms = [], []
    for step in range(len(recipe.batches)):
        loss = sum(_weighted_losses(recipe, model, step))
        loss.backward()
        masters.take_gradients()
        norm = None
        if recipe.max_norm is not None:
            norm = torch.nn.utils.clip_grad_norm_(masters.values(), recipe.max_norm).item()
        optimizer.step()
        optimizer.zero_grad()
        masters.write_back()
        scheduler.step()
        losses.append(loss.item())
        norms.append(norm)
    return Trajectory(
        parameters={name: p.detach().clone() for name, p in model.named_parameters()},
        losses=tuple(losses),
        norms=tuple(norms),
    )


def _weighted_losses(recipe: Recipe, model: nn.Module, step: int) -> Iterator[Tensor]:
    """Losses that sum to the mean over the whole batch: one, unless the recipe steers parts."""
    mean = models.mean_over_tokens if recipe.counts_tokens else models.mean_over_samples
    size = models.counted_tokens if recipe.counts_tokens else (lambda part: len(part["tokens"]))
    parts = [(s.start, s.stop) for s in recipe.steering] or [(0, recipe.batches[step])]
    for start, stop in parts:
        part = recipe.part(step, start, stop)
        yield mean(model, part) * (size(part) / size(recipe.batch(step)))


class _Masters:
    """The parameters of the optimizer: fp32 copies of those with 16 bits."""

    def __init__(self, model: nn.Module):
        self.of = {
            p: p if p.dtype == torch.float32 else nn.Parameter(p.detach().float())
            for p in model.parameters()
            if p.requires_grad
        }

    def values(self) -> list[Tensor]:
        return list(self.of.values())

    def swap(self, groups: list[dict[str, Any]] | None) -> list[Any]:
        if groups is None:
            return self.values()
        return [{**group, "params": [self.of[p] for p in group["params"]]} for group in groups]

    def take_gradients(self) -> None:
        for parameter, master in self.of.items():
            if master is not parameter:
                grad, parameter.grad = parameter.grad, None
                master.grad = None if grad is None else grad.float()

    @torch.no_grad()
    def write_back(self) -> None:
        for parameter, master in self.of.items():
            if master is not parameter:
                parameter.copy_(master)
