"""Text without a download: the source of Python's standard library, as bytes.

Files are read once, in a fixed order, into one uint8 tensor; a sample is a window of it. A hash of
a file's contents decides whether it is held out for evaluation, so all ranks agree.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

NOT_STANDARD = frozenset({"site-packages", "dist-packages", "__pycache__"})
"""Folders that contain installed packages."""
HELD_OUT = 0.05
"""Fraction of the files, chosen by hash, for evaluation only."""


class ByteWindows(Dataset[dict[str, Tensor]]):
    """Consecutive windows of `context` bytes, each with the same bytes shifted by one as target."""

    def __init__(self, text: Tensor, context: int) -> None:
        self.text = text
        self.context = context

    def __len__(self) -> int:
        return (self.text.numel() - 1) // self.context

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        start = index * self.context
        window = self.text[start : start + self.context + 1].long()
        return {"input": window[:-1], "target": window[1:]}


def standard_library() -> list[Path]:
    """The source files of this Python's standard library, in a fixed order."""
    root = Path(sysconfig.get_path("stdlib"))
    found = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in NOT_STANDARD]
        found += [Path(folder, name) for name in files if name.endswith(".py")]
    return sorted(found, key=lambda path: path.relative_to(root).parts)


def load_text(context: int, *, limit: int | None = None) -> tuple[ByteWindows, ByteWindows]:
    """Read text and split it by file into windows to train on and windows to evaluate on.

    Args:
        context: bytes per sample.
        limit: stop after about this many bytes.
    """
    sides = bytearray(), bytearray()
    for path in standard_library():
        if limit is not None and sum(map(len, sides)) >= limit:
            break
        contents = path.read_bytes()
        drawn = int.from_bytes(hashlib.sha256(contents).digest()[:4], "big") / 2**32
        sides[drawn < HELD_OUT].extend(contents)
    training, evaluation = (
        ByteWindows(torch.frombuffer(side, dtype=torch.uint8), context) for side in sides
    )
    return training, evaluation
