"""`ShardFile`: one rank's part of the training state of one step, in a file in memory.

A process that ends while it writes leaves a file without a valid mark, which is never read.
"""

from __future__ import annotations

import errno
import io
import mmap
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from poplar.checkpoint.files.manifest import Manifest
from poplar.checkpoint.files.staging import pin
from poplar.checkpoint.state_dicts.shard_tensor import ShardTensor
from poplar.comm.copies import copy, to_bytes
from poplar.values.formatting import format_bytes

START = 64
"""The first byte after the mark; tensors start at multiples of it."""
_ROOM = 1 << 20
"""Bytes at most by which values may grow, such as lists, before a file is mapped again."""


class Mark(NamedTuple):
    """What a file contains, once all of it is written."""

    step: int
    ranks: int
    """Parts that make up the step."""
    values_end: int
    """The byte after the tensors."""
    end: int


def mark_in(path: Path) -> Mark | None:
    """What a file contains; None: nothing whole, or another rank has just removed it."""
    try:
        with path.open("rb") as file:
            start = file.read(START)
    except FileNotFoundError:
        return None
    words = memoryview(start).cast("q").tolist() if len(start) == START else [0]
    return Mark(*words[1:5]) if words[0] else None


class Part(NamedTuple):
    """Elements `[start, stop)` of a tensor, in row-major order, in a file."""

    shape: torch.Size
    dtype: torch.dtype
    start: int
    stop: int
    place: int
    """The first byte in the file."""


class Description(NamedTuple):
    """What a file contains, but for the elements of its parts."""

    parts: Mapping[str, Part]
    values: Mapping[str, Any]
    """By name, what is not cut."""
    paths: Mapping[str, tuple[str | int, ...]]
    aliases: Mapping[str, str]
    manifest: Manifest


class ShardFile:
    """A file that is mapped into the memory of this process.

    Args:
        path: of the file, which may exist.
        pinned: CUDA devices copy to it.
    """

    def __init__(self, path: Path, *, pinned: bool = False) -> None:
        self._path, self._pinned = path, pinned
        self._unpin: Callable[[], object] = lambda: None
        self.bytes = torch.empty(0, dtype=torch.uint8, device="cpu")
        """All of them, with the mark."""
        if path.exists() and (size := path.stat().st_size) >= START:
            self.reserve(size)

    @property
    def mark(self) -> Mark | None:
        """What the file contains; None: nothing whole."""
        words = self._words.tolist() or [0]
        return Mark(*words[1:5]) if words[0] else None

    @property
    def _words(self) -> Tensor:
        return self.bytes[:START].view(torch.int64)

    def reserve(self, size: int) -> None:
        """Make room for so many bytes. The content stays.

        Raises:
            OSError: there is too little memory; says how much is needed.
            RuntimeError: the memory cannot be pinned, as that of a file on a disk.
        """
        if size <= self.bytes.numel():
            return
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, size)  # else the first write would end the process
            mapping = mmap.mmap(descriptor, size)
        except OSError as error:
            status = os.statvfs(self._path.parent)
            raise OSError(
                error.errno,
                f"{os.strerror(error.errno or errno.ENOSPC)}: each of two files with a part of the "
                f"training state takes {format_bytes(size, round_up=True)}, but "
                f"{format_bytes(status.f_bavail * status.f_frsize)} are free; make /dev/shm larger "
                "(docker run --shm-size), or pass another folder=",
                str(self._path),
            ) from error
        finally:
            os.close(descriptor)
        self._unpin()
        self.bytes = torch.frombuffer(mapping, dtype=torch.uint8)
        if self._pinned:
            self._unpin = pin(
                self,
                self.bytes,
                "free host memory, or pass another folder=: CUDA pins files in memory only, as in "
                f"/dev/shm, but this one is {self._path}",
            )

    def begin(self) -> None:
        """Note that the content is about to change."""
        self._words[0] = 0

    def finish(self, mark: Mark) -> None:
        """Note that the content is whole."""
        self._words[1:5] = torch.tensor(mark, device="cpu")
        self._words[0] = 1

    def description(self) -> Description:
        """Read all but the parts of a file that is whole; values are on the CPU."""
        assert self.mark is not None
        data = to_bytes(self.bytes[self.mark.values_end : self.mark.end])
        found: Description = torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)
        return found


def write_shard(
    files: Sequence[ShardFile], step: int, ranks: int, description: Description
) -> Mark:
    """Write a step into the first file; a second one gets room for the next step.

    Args:
        ranks: as in `Mark`.
        description: with `ShardTensor`s among its values, which become its parts.

    Raises:
        OSError: as `reserve`.
    """
    shards = {n: v for n, v in description.values.items() if isinstance(v, ShardTensor)}
    parts: dict[str, Part] = {}
    copies: list[tuple[int, Tensor]] = []
    end = START
    for name, shard in shards.items():
        parts[name] = Part(shard.shape, shard.dtype, shard.start, shard.stop, end)
        copies.append((end, shard.local))
        end += -(-shard.local.nbytes // START) * START
    others = {n: v for n, v in description.values.items() if n not in shards}
    pickled = io.BytesIO()
    torch.save(description._replace(parts=parts, values=others), pickled)
    mark = Mark(step, ranks, end, end + pickled.tell())
    for file in files:
        if file.bytes.numel() < mark.end:
            file.reserve(mark.end + min(pickled.tell(), _ROOM))
    file = files[0]
    file.begin()
    for at, part in copies:
        target = file.bytes[at : at + part.nbytes].view(part.dtype)
        if part.is_cuda:
            target.copy_(part, non_blocking=True)
        else:
            copy(target, part)
    file.bytes[end : mark.end] = torch.frombuffer(pickled.getbuffer(), dtype=torch.uint8)
    for device in {part.device for _, part in copies if part.is_cuda}:
        torch.cuda.current_stream(device).synchronize()
    file.finish(mark)
    return mark
