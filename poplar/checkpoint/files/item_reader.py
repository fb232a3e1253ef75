"""Reads items of the data files of a checkpoint, and compares checksums while it reads.

Parts are read past the page cache where the file system can do that, and copied into the memory of
tensors while their checksum is computed. Threads may read at the same time: one waits for the disk
while the other one computes. Both release the GIL.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.distributed.checkpoint.utils import _create_file_view
from torch.serialization import get_unsafe_globals_in_checkpoint

from poplar._core import DiskReader
from poplar.checkpoint.files.data_file import memory_of
from poplar.checkpoint.files.manifest import Part
from poplar.checkpoint.files.stored_files import open_stored
from poplar.values.errors import DamagedCheckpoint

_AHEAD = 64 << 20
"""Bytes that the system is told to read before they are needed, if they go through the cache."""


class ItemReader:
    """Reads items of the data files of one checkpoint; each file is opened once.

    Raises:
        DamagedCheckpoint: from all methods, if the content is not what was expected.
    """

    def __init__(self, folder: Path, *, weights_only: bool = True) -> None:
        """`weights_only`: as of `torch.load`, for values."""
        self._folder = folder
        self._weights_only = weights_only
        self._files: dict[str, BinaryIO] = {}
        self._opening = threading.Lock()
        self._of_thread = threading.local()

    def value(self, file: str, offset: int, length: int) -> Any:
        """A tensor on the CPU, or any other value. Not for several threads.

        Raises:
            ValueError: it contains an object of a class, and only weights may be loaded.
        """
        opened: Any = self._open(file)
        if offset + length > os.fstat(opened.fileno()).st_size:
            raise DamagedCheckpoint(self._folder / file, f"it has no byte {offset + length - 1}")
        view: Any = _create_file_view(opened, offset, length)
        try:
            return torch.load(view, map_location="cpu", weights_only=self._weights_only)
        except OSError:
            raise
        except Exception as error:  # torch raises many types for content that it cannot read
            view.seek(0)
            if classes := _refused_classes(view):
                raise ValueError(
                    f"{self._folder / file}: the value at byte {offset} needs {classes}, which may "
                    "run any code. If you trust the checkpoint, register these classes with "
                    "torch.serialization.add_safe_globals, or load it with weights_only=False"
                ) from error
            raise DamagedCheckpoint(
                self._folder / file, f"the item at byte {offset}: {error}"
            ) from error

    def elements(self, file: str, start: int, target: Tensor) -> None:
        """Read the elements of a contiguous CPU tensor from byte `start` on, without a checksum."""
        self._read(file, start, target.nbytes, target)

    def verify(self, file: str, part: Part, target: Tensor | None = None) -> None:
        """Read a part of a file once and compare its checksum.

        Args:
            file: name of the file.
            part: the part; if there is a target, of a tensor.
            target: a contiguous CPU tensor that gets all elements of the part.
        """
        start, stop, crc = part.offset, part.offset + part.length, 0
        if target is not None and part.values is not None:
            crc = self._read(file, start, part.values - start)
            crc = self._read(file, part.values, target.nbytes, target, crc)
            start = part.values + target.nbytes
        crc = self._read(file, start, stop - start, None, crc)
        if crc != part.crc32c:
            raise DamagedCheckpoint(
                self._folder / file,
                f"the checksum of {part.length} bytes from byte {part.offset} on differs",
            )

    def expect(self, file: str, until: int) -> None:
        """This thread will next read bytes before this one, so they may be read together."""
        self._of_this_thread(file).expect(until)

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
        if not self._of_this_thread(file).is_direct and hasattr(os, "posix_fadvise"):
            handle = self._open(file).fileno()
            os.posix_fadvise(handle, part.offset, part.length, os.POSIX_FADV_WILLNEED)

    def close(self) -> None:
        """Close all files."""
        for file in self._files.values():
            file.close()
        self._files.clear()
        self._of_thread.__dict__.clear()

    def _read(
        self, file: str, start: int, length: int, target: Tensor | None = None, crc: int = 0
    ) -> int:
        """Read bytes, into a tensor if there is one, and continue their checksum."""
        memory = None if target is None else memory_of(target)
        try:
            return self._of_this_thread(file).read(start, length, memory, crc)
        except EOFError as error:
            raise DamagedCheckpoint(self._folder / file, str(error)) from error

    def _of_this_thread(self, file: str) -> DiskReader:
        readers: dict[str, DiskReader] = self._of_thread.__dict__
        if file not in readers:
            readers[file] = DiskReader(open_stored(self._folder, file))
        return readers[file]

    def _open(self, name: str) -> BinaryIO:
        with self._opening:
            if name not in self._files:
                self._files[name] = os.fdopen(open_stored(self._folder, name), "rb")
            return self._files[name]


def _refused_classes(item: Any) -> str:
    """What a pickled item names that is not allowed; empty if it is none or is damaged."""
    try:
        return ", ".join(sorted(get_unsafe_globals_in_checkpoint(item)))
    except Exception:
        return ""
