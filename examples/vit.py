"""A vision transformer on small images: patches, the encoder's blocks, the mean over patches."""

from __future__ import annotations

from dataclasses import dataclass

import encoder
from images import CHANNELS, CLASSES, SIDE
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True, slots=True)
class ViTConfig:
    """The sizes of a model."""

    width: int = 192
    layers: int = 6
    heads: int = 3
    patch: int = 4
    """Pixels of height and width of a patch."""

    @property
    def patches(self) -> int:
        """Of an image."""
        return (SIDE // self.patch) ** 2


SIZES = {
    "tiny": ViTConfig(width=32, layers=2, heads=2, patch=8),
    "demo": ViTConfig(width=160, layers=4, heads=5),
    "base": ViTConfig(width=768, layers=12, heads=12),
}


class ViT(nn.Module):
    """Images [batch, 3, 32, 32] in, logits [batch, 10] out."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.config = config
        patches = encoder.EncoderConfig(
            width=config.width, layers=config.layers, heads=config.heads, context=config.patches
        )
        self.embedding = nn.Conv2d(CHANNELS, config.width, config.patch, stride=config.patch)
        self.positions = nn.Embedding(config.patches, config.width)
        self.blocks = nn.ModuleList(encoder.Block(patches) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """Logits."""
        x = self.embedding(images).flatten(2).transpose(1, 2) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x.mean(1)))
