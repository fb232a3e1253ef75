"""Data files of a checkpoint: `torch.distributed.checkpoint` writes their items.

Poplar adds what it lacks: a checksum of each file, a stop when another rank has failed, and, when
items are read, that only regular files of the folder are opened and that tensors have the dtype and
shape that the metadata says, because a checkpoint may come from a stranger.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import (
    FileSystem,
    FileSystemWriter,
    _StoragePrefix,
)
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, WriteItem
from torch.distributed.checkpoint.utils import _create_file_view, find_state_dict_object
from torch.serialization import get_unsafe_globals_in_checkpoint

from poplar._core import crc32c
from poplar.checkpoint.files.metadata_file import METADATA
from poplar.checkpoint.files.stored_files import open_stored
from poplar.values.errors import DamagedCheckpoint

_CHUNK = 16 << 20
"""Bytes between two looks at whether the save has been cancelled."""


class Cancelled(Exception):
    """Another rank has failed, so the file will not be used."""


class Stored(NamedTuple):
    """What was written into a file."""

    length: int
    """Bytes."""
    crc32c: int


class Pickled(NamedTuple):
    """A value as `torch.save` writes it."""

    data: memoryview

    @classmethod
    def of(cls, value: Any) -> Pickled:
        """Pickle a value."""
        buffer = io.BytesIO()
        torch.save(value, buffer)
        return cls(buffer.getbuffer())


class DataFile(io.RawIOBase):
    """A new file that computes the checksum of what is written. Nothing else may write to it.

    Raises:
        OSError: from all methods; names the file.
        Cancelled: `is_stopped()` is true, from `write_items`.
    """

    def __init__(self, path: Path, is_stopped: Callable[[], bool]) -> None:
        super().__init__()
        self.path = path
        self._is_stopped = is_stopped
        self._file = path.open("xb", buffering=0)
        self._lock = _Lock(self._file.fileno())
        self._failure: Exception | None = None
        self.written = Stored(0, 0)
        """So far."""

    def write_items(
        self, items: Sequence[WriteItem], values: Mapping[MetadataIndex, Any]
    ) -> list[tuple[int, int]]:
        """Write all items and bring them to the disk; the first byte and the bytes of each."""
        writer = FileSystemWriter(self.path.parent, sync_files=True)
        writer.fs = _OnlyFile(self)
        prefix = self.path.name.removesuffix("0.distcp")  # the writer adds its number of the file
        plan = SavePlan(list(items), storage_data=_StoragePrefix(prefix))
        try:
            with _without_checksum_of_torch():
                results = writer.write_data(plan, _GivenValues(values)).wait()
        except Exception as error:
            if self._failure is not None:  # torch.save raises another error while it unwinds
                raise self._failure from None
            if isinstance(error, OSError):
                raise _with_path(error, self.path) from error
            raise
        places = {result.index: result.storage_data for result in results}
        return [(places[item.index].offset, places[item.index].length) for item in items]

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        for start in range(0, len(view), _CHUNK):
            self._write_chunk(view[start : start + _CHUNK])
        return len(view)

    def _write_chunk(self, chunk: memoryview) -> None:
        try:
            if self._is_stopped():
                raise Cancelled
            left = chunk
            while left:
                left = left[self._file.write(left) :]
        except Exception as error:
            is_os_error = isinstance(error, OSError)
            self._failure = _with_path(error, self.path) if is_os_error else error  # type: ignore[arg-type]
            raise self._failure from error
        length, crc = self.written
        self.written = Stored(length + len(chunk), crc32c(chunk, crc))

    def tell(self) -> int:
        return self.written.length

    def fileno(self) -> int:
        return self._file.fileno()

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()

    def release(self) -> None:
        """Say that this process has done all that it does with the file; see `has_writer`."""
        self._lock.release()


class _OnlyFile(FileSystem):
    """A writer's file system, in which one file is open."""

    def __init__(self, file: DataFile) -> None:
        self._file = file

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        assert Path(path) == self._file.path
        yield self._file


class _GivenValues(DefaultSavePlanner):
    """Says what a writer writes."""

    def __init__(self, values: Mapping[MetadataIndex, Any]) -> None:
        super().__init__()
        self._values = values

    def resolve_data(self, write_item: WriteItem) -> Any:
        value = self._values[write_item.index]
        if isinstance(value, Tensor):
            return value.detach().contiguous().resolve_conj().resolve_neg()
        pickled = value if isinstance(value, Pickled) else Pickled.of(value)
        return io.BytesIO(pickled.data)


class DataFiles:
    """Reads items of the data files of a checkpoint.

    Raises:
        DamagedCheckpoint: from all methods, if the content is not what was expected.
    """

    def __init__(self, folder: Path, metadata: Metadata, *, weights_only: bool) -> None:
        """`weights_only`: as of `torch.load`, for values."""
        self._folder = folder
        self._weights_only = weights_only
        self._metadata = metadata

    def read(self, items: Sequence[ReadItem], targets: Mapping[str, Tensor]) -> None:
        """Read into the memory of tensors, by name."""
        ordered = sorted(items, key=lambda item: self._place(item.storage_index)[:2])
        try:
            for item in ordered:
                self._read_item(item, targets[item.dest_index.fqn])
        except DamagedCheckpoint:
            raise
        except Exception as error:  # torch raises many types for content that it cannot read
            if isinstance(error, OSError) and error.errno != errno.EINVAL:  # no byte of the file
                raise
            names = ", ".join(sorted({item.storage_index.fqn for item in items}))[:200]
            raise DamagedCheckpoint(
                self._folder, f"its files do not have the elements of {names}: {error}"
            ) from error

    def _read_item(self, item: ReadItem, target: Tensor) -> None:
        index = item.storage_index
        described: Any = self._metadata.state_dict_metadata[index.fqn]
        sizes = next(part.sizes for part in described.chunks if part.offsets == index.offset)
        file_name, offset, length = self._place(index)
        with os.fdopen(open_stored(self._folder, file_name), "rb") as file:
            view: Any = _create_file_view(file, offset, length)
            stored = torch.load(view, map_location="cpu", weights_only=True)
        if (stored.dtype, stored.shape) != (described.properties.dtype, sizes):
            raise TypeError(
                f"{stored.dtype} of shape {tuple(stored.shape)} at byte {offset} of {file_name}, "
                f"but {METADATA} describes {described.properties.dtype} of {tuple(sizes)}"
            )
        box = find_state_dict_object({item.dest_index.fqn: target}, item.dest_index)
        wanted = narrow_tensor_by_index(box.detach(), item.dest_offsets, item.lengths)
        wanted.copy_(narrow_tensor_by_index(stored, item.storage_offsets, item.lengths))

    def value(self, index: MetadataIndex) -> Any:
        """A value that is no tensor.

        Raises:
            ValueError: it contains an object of a class, and only weights may be loaded.
        """
        file_name, offset, length = self._place(index)
        path = self._folder / file_name
        with os.fdopen(open_stored(self._folder, file_name), "rb") as file:
            if offset + length > os.fstat(file.fileno()).st_size:
                raise DamagedCheckpoint(path, f"it has no byte {offset + length - 1}")
            file.seek(offset)
            item = io.BytesIO(file.read(length))
        try:
            return torch.load(item, map_location="cpu", weights_only=self._weights_only)
        except Exception as error:  # torch raises many types for content that it cannot read
            if classes := _refused_classes(item):
                raise ValueError(
                    f"{path}: the value at byte {offset} needs {classes}, which may run any "
                    "code. If you trust the checkpoint, register these classes with "
                    "torch.serialization.add_safe_globals, or load it with weights_only=False"
                ) from error
            raise DamagedCheckpoint(path, f"the item at byte {offset}: {error}") from error

    def _place(self, index: MetadataIndex) -> tuple[str, int, int]:
        """File, first byte and bytes of an item."""
        place = self._metadata.storage_data.get(index)
        if place is None:
            raise DamagedCheckpoint(self._folder / METADATA, f"it has no place for {index.fqn!r}")
        return place.relative_path, place.offset, place.length


def checksum(folder: Path, name: str) -> Stored:
    """What is in a file now.

    Raises:
        DamagedCheckpoint: as `open_stored`.
    """
    buffer, length, crc = bytearray(_CHUNK), 0, 0
    with os.fdopen(open_stored(folder, name), "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            length, crc = length + count, crc32c(memoryview(buffer)[:count], crc)
    return Stored(length, crc)


class _Lock:
    """A lock of an open file, which ends with its process."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor: int | None = os.dup(descriptor)
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def release(self) -> None:
        """Give the lock back, if this has not been done."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


def has_writer(path: Path) -> bool:
    """Whether a process of this host has not released a `DataFile`; true where it is unknown."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    return False


def write_whole(path: Path, data: bytes) -> Stored:
    """Write a small file to the disk."""
    with path.open("xb") as file:
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
def _without_checksum_of_torch() -> Iterator[None]:
    """Torch's own checksum would take as long as ours, and `torch.load` does not check it."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


def _with_path(error: OSError, path: Path) -> OSError:
    return OSError(error.errno, error.strerror, str(path))


def _refused_classes(item: Any) -> str:
    """What a pickled item names that is not allowed; empty if it is none or is damaged."""
    item.seek(0)
    try:
        return ", ".join(sorted(get_unsafe_globals_in_checkpoint(item)))
    except Exception:
        return ""
