"""VGG on small images: nearly all compute is in convolutions, nearly all parameters in two layers.

The layers are those of torchvision's `vgg19`, without dropout: five groups of convolutions, average
pooling to 7 x 7, three linear layers. There is no BatchNorm.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from images import CHANNELS, CLASSES
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True, slots=True)
class VGGConfig:
    """The sizes of a model."""

    channels: tuple[int, ...] = (64, 128, 256, 512, 512)
    """Of each group of convolutions."""
    convolutions: tuple[int, ...] = (2, 2, 4, 4, 4)
    """In each group."""
    pooled: int = 7
    """Height and width before the linear layers."""
    hidden: int = 4096
    """Width of the linear layers."""


SIZES = {
    "tiny": VGGConfig(channels=(8, 16), convolutions=(1, 1), pooled=2, hidden=32),
    "demo": VGGConfig(channels=(16, 32, 64, 128, 128), hidden=1024),
    "vgg19": VGGConfig(),
}


class VGG(nn.Module):
    """Images [batch, 3, side, side] in, logits [batch, 10] out."""

    def __init__(self, config: VGGConfig) -> None:
        super().__init__()
        self.config = config
        before = CHANNELS
        groups = []
        for channels, count in zip(config.channels, config.convolutions, strict=True):
            groups.append(Convolutions(before, channels, count))
            before = channels
        self.groups = nn.ModuleList(groups)
        self.first = nn.Linear(before * config.pooled**2, config.hidden)
        self.second = nn.Linear(config.hidden, config.hidden)
        self.head = nn.Linear(config.hidden, CLASSES)
        self.apply(_initialize)

    def forward(self, images: Tensor) -> Tensor:
        """Logits."""
        x = images
        for group in self.groups:
            x = group(x)
        x = F.adaptive_avg_pool2d(x, self.config.pooled).flatten(1)
        return self.head(F.relu(self.second(F.relu(self.first(x)))))


class Convolutions(nn.Module):
    """Convolutions of one width; the last one is followed by pooling, which halves both sides."""

    def __init__(self, before: int, channels: int, count: int) -> None:
        super().__init__()
        widths = [before] + [channels] * (count - 1)
        self.layers = nn.ModuleList(nn.Conv2d(width, channels, 3, padding=1) for width in widths)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, before, side, side] in, [batch, channels, side / 2, side / 2] out."""
        for layer in self.layers:
            x = F.relu(layer(x))
        return F.max_pool2d(x, 2)


def _initialize(module: nn.Module) -> None:
    if isinstance(module, nn.Conv2d | nn.Linear):
        nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
        nn.init.zeros_(module.bias)
