"""What `prediction.py` trains: three models that have little in common but their size.

A Llama (causal, equal units, a loss at every place), an encoder (wide, shallow, biases, a loss at a
few places) and a convolutional net (units of very unequal size, most parameters in one of them). A
sample takes each 20 to 40 ms of a core, so that a pass is much longer than the 10 ms in which
quotas are given out.
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
"""Bytes of a sample."""
MASKED = 10
"""Places of a sample that the encoder fills in."""
SIDE, CLASSES = 56, 10
"""Pixels of a picture's side, and what it may show."""
WIDTHS = (40, 80, 160, 320)
"""Channels of the convolutional net: behind its stem, then behind each block."""

Batch = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """A model to predict steps of."""

    new: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Batch], Tensor]
    """Mean over samples of equal weight."""
    draw: Callable[[int, torch.Generator], Batch]
    """So many samples."""

    def model(self) -> nn.Module:
        """The same weights at every call, on every rank."""
        torch.manual_seed(SEED)
        return self.new()

    def batch(self, samples: int) -> Batch:
        """Any data: what it says changes nothing in how long it takes."""
        return self.draw(samples, torch.Generator().manual_seed(SEED))


def _llama() -> nn.Module:
    return llama.Llama(replace(llama.SIZES["demo"], context=CONTEXT))


def _text(samples: int, generator: torch.Generator) -> Batch:
    text = torch.randint(256, (samples, CONTEXT + 1), generator=generator)
    return {"input": text[:, :-1].contiguous(), "target": text[:, 1:].contiguous()}


def _encoder() -> nn.Module:
    return encoder.Encoder(encoder.EncoderConfig(width=256, layers=2, heads=4, context=CONTEXT))


def _masked_text(samples: int, generator: torch.Generator) -> Batch:
    return {
        "input": torch.randint(encoder.MASK + 1, (samples, CONTEXT), generator=generator),
        "places": torch.randint(CONTEXT, (samples, MASKED), generator=generator),
        "target": torch.randint(encoder.BYTES, (samples, MASKED), generator=generator),
    }


class ConvolutionalBlock(nn.Module):
    """Two convolutions beside a shorter way; halves the picture's sides."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(before, after, 3, stride=2, padding=1, bias=False)
        self.norm = nn.GroupNorm(8, after)
        self.second = nn.Conv2d(after, after, 3, padding=1)
        self.shorter = nn.Conv2d(before, after, 1, stride=2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, before, side, side] in, [batch, after, side / 2, side / 2] out."""
        return F.relu(self.shorter(x) + self.second(F.relu(self.norm(self.first(x)))))


class ConvolutionalNet(nn.Module):
    """Pictures [batch, 3, 32, 32] in, logits of what they show [batch, 10] out."""

    def __init__(self, widths: Sequence[int] = WIDTHS) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, widths[0], 3, padding=1)
        self.blocks = nn.ModuleList(
            ConvolutionalBlock(before, after) for before, after in itertools.pairwise(widths)
        )
        side = SIDE // 2 ** len(self.blocks)
        self.hidden = nn.Linear(widths[-1] * side * side, 512)
        self.head = nn.Linear(512, CLASSES)

    def forward(self, pictures: Tensor) -> Tensor:
        """Logits."""
        x = F.relu(self.stem(pictures))
        for block in self.blocks:
            x = block(x)
        return self.head(F.relu(self.hidden(x.flatten(1))))


def _pictures(samples: int, generator: torch.Generator) -> Batch:
    return {
        "input": torch.randn(samples, 3, SIDE, SIDE, generator=generator),
        "target": torch.randint(CLASSES, (samples,), generator=generator),
    }


def _picture_loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["input"]), batch["target"])


SUBJECTS = {
    "llama": Subject(new=_llama, loss=llama.next_byte_loss, draw=_text),
    "encoder": Subject(new=_encoder, loss=encoder.masked_byte_loss, draw=_masked_text),
    "convolutional": Subject(new=ConvolutionalNet, loss=_picture_loss, draw=_pictures),
}
