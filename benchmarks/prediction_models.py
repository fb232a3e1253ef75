"""The models of `prediction.py`: three different models of similar size.

A Llama (causal, equal units, a loss at every position), an encoder (wide, shallow, with biases, a
loss at a few positions) and a convolutional net (units of very unequal size). A sample takes 20 to
40 ms of a core, much longer than the quota period of 10 ms.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
import encoder
import llama

SEED = 0
CONTEXT = 192
"""Bytes per sample."""
MASKED = 10
"""Masked positions per sample of the encoder."""
SIDE, CLASSES = 56, 10
"""Image size in pixels, and number of classes."""
WIDTHS = (40, 80, 160, 320)
"""Channels of the convolutional net after its stem and after each block."""

Batch = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """A model with its loss and data."""

    new: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Batch], Tensor]
    """Mean over samples."""
    draw: Callable[[int, torch.Generator], Batch]
    """A batch of so many samples."""

    def model(self) -> nn.Module:
        """A new model with the same weights on every rank."""
        torch.manual_seed(SEED)
        return self.new()

    def batch(self, samples: int) -> Batch:
        """Random data."""
        return self.draw(samples, torch.Generator().manual_seed(SEED))


def _llama() -> nn.Module:
    return llama.Llama(replace(llama.SIZES["demo"], context=CONTEXT))


def draw_text(samples: int, generator: torch.Generator) -> Batch:
    """Random bytes, and the next byte at every position."""
    text = torch.randint(256, (samples, CONTEXT + 1), generator=generator)
    return {"input": text[:, :-1].contiguous(), "target": text[:, 1:].contiguous()}


def _encoder() -> nn.Module:
    return encoder.Encoder(encoder.EncoderConfig(width=256, layers=2, heads=4, context=CONTEXT))


def draw_masked_text(samples: int, generator: torch.Generator) -> Batch:
    """Random bytes, and the bytes at `MASKED` positions."""
    return {
        "input": torch.randint(encoder.MASK + 1, (samples, CONTEXT), generator=generator),
        "places": torch.randint(CONTEXT, (samples, MASKED), generator=generator),
        "target": torch.randint(encoder.BYTES, (samples, MASKED), generator=generator),
    }


class ConvolutionalBlock(nn.Module):
    """Two convolutions with a shortcut; halves height and width."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(before, after, 3, stride=2, padding=1, bias=False)
        self.norm = nn.GroupNorm(8, after)
        self.second = nn.Conv2d(after, after, 3, padding=1)
        self.shortcut = nn.Conv2d(before, after, 1, stride=2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, before, side, side] in, [batch, after, side / 2, side / 2] out."""
        return F.relu(self.shortcut(x) + self.second(F.relu(self.norm(self.first(x)))))


class ConvolutionalNet(nn.Module):
    """Images [batch, 3, 56, 56] in, logits [batch, 10] out."""

    def __init__(self, widths: Sequence[int] = WIDTHS) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, widths[0], 3, padding=1)
        self.blocks = nn.ModuleList(
            ConvolutionalBlock(before, after) for before, after in itertools.pairwise(widths)
        )
        side = SIDE // 2 ** len(self.blocks)
        self.hidden = nn.Linear(widths[-1] * side * side, 512)
        self.head = nn.Linear(512, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """Logits."""
        x = F.relu(self.stem(images))
        for block in self.blocks:
            x = block(x)
        return self.head(F.relu(self.hidden(x.flatten(1))))


def _images(samples: int, generator: torch.Generator) -> Batch:
    return {
        "input": torch.randn(samples, 3, SIDE, SIDE, generator=generator),
        "target": torch.randint(CLASSES, (samples,), generator=generator),
    }


def _image_loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["input"]), batch["target"])


SUBJECTS = {
    "llama": Subject(new=_llama, loss=llama.next_byte_loss, draw=draw_text),
    "encoder": Subject(new=_encoder, loss=encoder.masked_byte_loss, draw=draw_masked_text),
    "convolutional": Subject(new=ConvolutionalNet, loss=_image_loss, draw=_images),
}
