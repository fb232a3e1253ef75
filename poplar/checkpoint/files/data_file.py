"""A data file of a checkpoint, with the items as `torch.distributed.checkpoint` writes them.

Unlike torch, it computes a checksum of the file, and stops when another rank has failed.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem

from poplar._core import crc32c
from poplar.checkpoint.files.new_files import lock
from poplar.checkpoint.files.stored_files import open_stored
from poplar.system.storage import as_bytes, with_own_storage
from poplar.values.regular_files import naming
from poplar.values.schema import Count

_CHUNK = 16 << 20
"""Bytes between two looks at whether the save has been cancelled."""
SYNC_BYTES = 256 << 20
"""Bytes that are at most written but not on the disk. `written` counts as progress of the save, so
that a slow disk must not take longer for them than the deadline."""

_READ_BYTES = 1 << 20
"""Bytes of a file whose checksum is computed at a time, while they are in the cache."""
_START_BYTES = 4096
"""More than `torch.save` writes before the elements of a tensor."""


class Cancelled(Exception):
    """Another rank has failed, so the file will not be used."""


class Stored(NamedTuple):
    """What was written into a file."""

    length: Count
    """Bytes."""
    crc32c: Count


class Pickled(NamedTuple):
    """A value as `torch.save` writes it."""

    data: memoryview

    @classmethod
    def of(cls, value: Any) -> Pickled:
        """Pickle a value."""
        buffer = io.BytesIO()
        torch.save(value, buffer)
        return cls(buffer.getbuffer())


class DataFile:
    """A new file that computes the checksum of what is written. Nothing else may write to it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._is_stopped: Callable[[], bool] = lambda: False
        self._file = path.open("xb", buffering=0)
        lock(self._file)
        self._failure: OSError | Cancelled | None = None
        self._synced = 0
        self.written = Stored(0, 0)
        """So far."""

    def write_items(
        self,
        items: Sequence[WriteItem],
        values: Mapping[MetadataIndex, Any],
        is_stopped: Callable[[], bool],
    ) -> list[tuple[int, int]]:
        """Write all items and bring them to the disk; the first byte and the bytes of each.

        Raises:
            Cancelled: `is_stopped()` is true.
            OSError: names the file.
        """
        self._is_stopped = is_stopped
        places: list[tuple[int, int]] = []
        with naming(self.path):
            with checksums_of_torch(False):
                for item in items:
                    begin = self.written.length
                    self._write_value(values[item.index])
                    if self._failure is not None:
                        raise self._failure
                    places.append((begin, self.written.length - begin))
            os.fsync(self._file.fileno())
        return places

    def _write_value(self, value: Any) -> None:
        """Write a tensor or another value as `FileSystemWriter` of torch does."""
        if isinstance(value, Tensor):
            tensor = value.detach().contiguous().resolve_conj().resolve_neg().cpu()
            value = with_own_storage(tensor)
        if isinstance(value, Pickled):
            self.write(value.data)
        else:  # not via memory: it may have a copy of the model
            torch.save(value, self)  # type: ignore[arg-type]  # it only writes

    def write(self, data: Any) -> int:
        """Write bytes; for `torch.save`, as `flush`.

        After a failure nothing is written: `torch.save` would raise another error as it unwinds.
        """
        view = memoryview(data).cast("B")
        for start in range(0, len(view), _CHUNK):
            if self._failure is None:
                try:
                    self._write_chunk(view[start : start + _CHUNK])
                except (OSError, Cancelled) as error:
                    self._failure = error
        return len(view)

    def _write_chunk(self, chunk: memoryview) -> None:
        if self._is_stopped():
            raise Cancelled
        length, crc = self.written
        left = chunk
        while left:
            left = left[self._file.write(left) :]
        if length + len(chunk) - self._synced >= SYNC_BYTES:
            os.fsync(self._file.fileno())
            self._synced = length + len(chunk)
        self.written = Stored(length + len(chunk), crc32c(chunk, crc))

    def flush(self) -> None:
        """Nothing is buffered."""

    def close(self) -> None:
        """Say that this process has done all that it does with the file; see `has_writer`."""
        self._file.close()


def read_tensor(file: io.BufferedReader, first_byte: int, target: Tensor) -> bool:
    """Read the elements of an item into a tensor of its dtype and shape.

    `torch.load` would run an unpickler and copy the elements.

    Args:
        target: contiguous, on the CPU.

    Returns:
        False: the item is not what `DataFile` writes of such a tensor, or is not complete.
    """
    before = _bytes_before_elements(target.dtype, target.shape)
    file.seek(first_byte)
    if before is None or file.read(len(before)) != before:
        return False
    return file.readinto(as_bytes(target).numpy().data) == target.nbytes


@lru_cache(4096)
def _bytes_before_elements(dtype: torch.dtype, shape: torch.Size) -> bytes | None:
    """How an item with a tensor begins, which says that it is plain, its dtype and its shape.

    None: this version of torch writes items in another way.
    """
    start = _Start()
    with checksums_of_torch(False):
        torch.save(torch.empty(shape, dtype=dtype, device="cpu"), start)  # type: ignore[arg-type]
    before, name, after = start.data.partition(b"archive/data/0")
    return before + name + after[: int.from_bytes(before[-2:], "little")] if name else None


class _Start:
    """The first bytes that `torch.save` writes. The elements are not copied."""

    data = b""

    def write(self, data: Any) -> int:
        """Write bytes; for `torch.save`, as `flush`."""
        self.data += bytes(data[: _START_BYTES - len(self.data)])
        return len(data)

    def flush(self) -> None:
        """Nothing is buffered."""


def checksum(folder: Path, name: str) -> Stored:
    """What is in a file now.

    Raises:
        DamagedCheckpoint: as `open_stored`.
    """
    buffer, length, crc = bytearray(_READ_BYTES), 0, 0
    with open_stored(folder, name) as file:
        while count := file.readinto(buffer):
            length, crc = length + count, crc32c(memoryview(buffer)[:count], crc)
    return Stored(length, crc)


def write_whole(path: Path, data: bytes) -> Stored:
    """Write a small file to the disk."""
    with naming(path), path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return Stored(len(data), crc32c(data))


def sync_folder(folder: Path) -> None:
    """Bring the names of the files in a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def checksums_of_torch(computed: bool) -> Iterator[None]:
    """A context in which `torch.save` computes checksums, or not.

    They would take as long as ours, and `torch.load` does not check them.
    """
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(computed)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)
