"""Reads items of the data files of a checkpoint, and compares checksums while it reads.

Bytes are read straight into the memory of tensors. Threads may read at the same time: reading and
the checksum, which both release the GIL, then overlap.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.distributed.checkpoint.utils import _create_file_view

from poplar._core import crc32c
from poplar.checkpoint.files.data_file import memory_of
from poplar.checkpoint.files.manifest import Part
from poplar.errors import DamagedCheckpoint

_CHUNK = 1 << 20
"""Bytes that are read at a time: still in the processor's cache when their checksum is computed."""
_AHEAD = 64 << 20
"""Bytes that the system is told to read before they are needed."""


class ItemReader:
    """Reads items of the data files of one checkpoint; each file is opened once.

    Raises:
        DamagedCheckpoint: from all methods, if the content is not what was expected.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, BinaryIO] = {}
        self._opening = threading.Lock()
        self._of_thread = threading.local()

    def tensor(self, file: str, offset: int, length: int) -> Tensor:
        """A tensor, on the CPU. Not for several threads."""
        value = self._load(file, offset, length, weights_only=True)
        if not isinstance(value, Tensor):
            raise DamagedCheckpoint(self._folder / file, f"no tensor at byte {offset}")
        return value

    def value(self, file: str, offset: int, length: int) -> Any:
        """Any value. It is unpickled, so the file must be from a trusted source."""
        return self._load(file, offset, length, weights_only=False)

    def elements(self, file: str, start: int, target: Tensor) -> None:
        """Read the elements of a contiguous CPU tensor from byte `start` on, without a checksum."""
        self._read(file, start, memoryview(memory_of(target)))

    def verify(self, file: str, part: Part, target: Tensor | None = None) -> None:
        """Read a part of a file once and compare its checksum.

        Args:
            file: name of the file.
            part: the part; if there is a target, of a tensor.
            target: a contiguous CPU tensor that gets all elements of the part.
        """
        crc, position = 0, part.offset
        for chunk in self._chunks(part, target):
            self._read(file, position, chunk)
            crc = crc32c(chunk, crc)
            position += len(chunk)
        if crc != part.crc32c:
            raise DamagedCheckpoint(
                self._folder / file,
                f"the checksum of {part.length} bytes from byte {part.offset} on differs",
            )

    def read_ahead(self, parts: Sequence[tuple[str, Part]]) -> Callable[[], None]:
        """Let the disk read parts of files before they are needed.

        Returns:
            To be called before each part is read, by any thread.
        """
        left, begun, advised = iter(parts), 0, 0
        lengths = [part.length for _, part in parts]
        lock = threading.Lock()

        def begin() -> None:
            nonlocal begun, advised
            with lock:
                advised -= lengths[begun]
                begun += 1
                while advised < _AHEAD and (following := next(left, None)) is not None:
                    file, part = following
                    self._advise(file, part)
                    advised += part.length

        return begin

    def _advise(self, file: str, part: Part) -> None:
        if hasattr(os, "posix_fadvise"):
            handle = self._open(file).fileno()
            os.posix_fadvise(handle, part.offset, part.length, os.POSIX_FADV_WILLNEED)

    def close(self) -> None:
        """Close all files."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _chunks(self, part: Part, target: Tensor | None) -> Iterator[memoryview]:
        """Where the bytes of a part are read, in order: its elements into the target."""
        if target is None or part.values is None:
            yield from self._staging(part.length)
            return
        elements = memoryview(memory_of(target)).cast("B")
        before = part.values - part.offset
        yield from self._staging(before)
        for start in range(0, len(elements), _CHUNK):
            yield elements[start : start + _CHUNK]
        yield from self._staging(part.length - before - len(elements))

    def _staging(self, length: int) -> Iterator[memoryview]:
        """Chunks of this many bytes in one buffer per thread, which is used again."""
        if not hasattr(self._of_thread, "buffer"):
            self._of_thread.buffer = bytearray(_CHUNK)
        buffer = memoryview(self._of_thread.buffer)
        for start in range(0, length, _CHUNK):
            yield buffer[: min(_CHUNK, length - start)]

    def _read(self, file: str, start: int, target: memoryview) -> None:
        handle = self._open(file).fileno()
        while target:
            count = os.preadv(handle, [target], start)
            if not count:
                raise DamagedCheckpoint(self._folder / file, f"it ends at byte {start}")
            target, start = target[count:], start + count

    def _load(self, name: str, offset: int, length: int, *, weights_only: bool) -> Any:
        path = self._folder / name
        file: Any = self._open(name)
        view: Any = _create_file_view(file, offset, length)
        try:
            return torch.load(view, map_location="cpu", weights_only=weights_only)
        except OSError:
            raise
        except Exception as error:  # torch raises many types for content that it cannot read
            raise DamagedCheckpoint(path, f"the item at byte {offset}: {error}") from error

    def _open(self, name: str) -> BinaryIO:
        with self._opening:
            if name not in self._files:
                self._files[name] = (self._folder / name).open("rb")
            return self._files[name]
