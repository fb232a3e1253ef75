"""Text without a download: the source of Python's standard library, or any files, as bytes.

Files are read once, in a fixed order, into one uint8 tensor; a sample is a window of it. A hash of
a file's contents decides whether it is held out for evaluation, so all ranks agree.
"""

from __future__ import annotations

import ctypes
import glob
import hashlib
import os
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

NOT_STANDARD = frozenset({"site-packages", "dist-packages", "__pycache__"})
"""Folders that contain installed packages."""


class ByteWindows(Dataset[dict[str, Tensor]]):
    """Consecutive windows of `context` bytes, each with the same bytes shifted by one as target."""

    def __init__(self, text: Tensor, context: int) -> None:
        if text.numel() <= context:
            raise ValueError(
                f"{text.numel()} bytes of text are too few for a window of {context} bytes and "
                "its target: give more text or a shorter context"
            )
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

    def digest(self) -> str:
        """A hash of the text, to check that all ranks read the same data."""
        return hashlib.sha256(ctypes.string_at(self.text.data_ptr(), self.text.numel())).hexdigest()


def standard_library() -> list[Path]:
    """The source files of this Python's standard library, in a fixed order."""
    root = Path(sysconfig.get_path("stdlib"))
    found = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in NOT_STANDARD]
        found += [Path(folder, name) for name in files if name.endswith(".py")]
    return sorted(found, key=lambda path: path.relative_to(root).parts)


def matching(patterns: Sequence[str]) -> list[Path]:
    """The files that match any of the globs (`**` includes folders), in a fixed order."""
    found = {name for pattern in patterns for name in glob.glob(pattern, recursive=True)}
    return [path for path in map(Path, sorted(found)) if path.is_file()]


def load_text(
    context: int,
    *,
    patterns: Sequence[str] = (),
    held_out: float = 0.05,
    limit: int | None = None,
) -> tuple[ByteWindows, ByteWindows]:
    """Read text and split it by file into training and held-out windows.

    Args:
        context: bytes per sample.
        patterns: globs of the files to read; default: the standard library.
        held_out: fraction of the files, chosen by hash, for evaluation only.
        limit: stop after about this many bytes.

    Returns:
        The windows to train on and the windows to evaluate on.

    Raises:
        ValueError: no file matches, or one side of the split is too small for a window.
    """
    if not 0 < held_out < 1:
        raise ValueError(f"held_out must lie between 0 and 1, got {held_out}")
    paths = matching(patterns) if patterns else standard_library()
    if not paths:
        raise ValueError(f"no file matches {list(patterns) or 'the standard library'}")
    sides = bytearray(), bytearray()
    for contents in _contents(paths, limit):
        drawn = int.from_bytes(hashlib.sha256(contents).digest()[:4], "big") / 2**32
        sides[drawn < held_out].extend(contents)
    try:
        training, evaluation = (ByteWindows(_tensor(side), context) for side in sides)
    except ValueError as error:
        raise ValueError(
            f"{len(paths)} files, split by hash with held_out={held_out}: {error}"
        ) from None
    return training, evaluation


def _contents(paths: Sequence[Path], limit: int | None) -> Iterator[bytes]:
    remaining = limit
    for path in paths:
        if remaining is not None and remaining <= 0:
            return
        contents = path.read_bytes()
        if remaining is not None:
            remaining -= len(contents)
        yield contents


def _tensor(contents: bytearray) -> Tensor:
    # frombuffer rejects an empty buffer; ByteWindows has a better error message.
    return torch.frombuffer(contents, dtype=torch.uint8) if contents else torch.empty(0).byte()
