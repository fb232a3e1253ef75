"""Small labelled images that are computed from their index, so nothing is downloaded.

Each class has a pattern of low frequency; a sample is its pattern beside noise.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

CLASSES = 10
CHANNELS = 3
SIDE = 32
"""Pixels of height and width, as in CIFAR-10."""
_PATTERN_SIDE = 4
_NOISE = 0.5


class Images(Dataset[dict[str, Tensor]]):
    """`count` samples; sample `i` depends only on the seed and on `i`."""

    def __init__(self, count: int = 4096, seed: int = 0) -> None:
        self._count, self._seed = count, seed
        draws = torch.Generator().manual_seed(seed)
        coarse = torch.randn(CLASSES, CHANNELS, _PATTERN_SIDE, _PATTERN_SIDE, generator=draws)
        self._patterns = F.interpolate(coarse, size=(SIDE, SIDE), mode="bilinear")

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """`input` [3, 32, 32] and `target` [], the class."""
        if not 0 <= index < self._count:
            raise IndexError(f"sample {index} of {self._count}")
        draws = torch.Generator().manual_seed(self._seed * self._count + index)
        target = torch.randint(CLASSES, (), generator=draws)
        noise = torch.randn(CHANNELS, SIDE, SIDE, generator=draws)
        return {"input": self._patterns[target] + _NOISE * noise, "target": target}


def image_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Mean cross-entropy of the classes, in nats."""
    return F.cross_entropy(model(batch["input"]).float(), batch["target"])
