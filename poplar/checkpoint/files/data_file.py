"""Writes the data files of a checkpoint: sequences of items, each item what `torch.save` writes.

`torch.distributed.checkpoint.FileSystemReader` reads them. Tensors are written from where they are:
on the CPU by small buffers, on other devices one at a time.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import io
import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from poplar._core import DiskWriter, crc32c
from poplar.checkpoint.files.manifest import Part
from poplar.system.storage import with_own_storage

_CHUNK = 16 << 20
"""Bytes between two looks at whether the save has been cancelled."""

_DESCRIPTION_BYTES = 1 << 16
"""More than `torch.save` writes at a time to describe a tensor."""

_SCALAR_BYTES = 16
"""Tensors of at most so many bytes, such as step counters, mostly have equal values."""


class Cancelled(Exception):
    """Another rank has failed, so the file will not be used."""


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
    """Writes one file, item by item, with their checksums. Nothing else may write to it.

    Raises:
        OSError: from all methods; names the file.
        Cancelled: `is_stopped()` is true, from `write_item`.
    """

    def __init__(self, path: Path, is_stopped: Callable[[], bool]) -> None:
        self._path = path
        self._is_stopped = is_stopped
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        self._lock = _Lock(descriptor)
        try:
            self._file = DiskWriter(descriptor)
        except BaseException:
            self._lock.release()
            raise
        self._crc = 0
        self._values: int | None = None
        self._elements: Tensor | None = None
        self._around: tuple[list[bytes], list[bytes]] = [], []
        """What `torch.save` has written before and after the elements of a tensor; of a scalar,
        all of it."""
        self._known: dict[tuple[torch.dtype, torch.Size], tuple[bytes, bytes]] = {}
        """The same of an earlier tensor, by dtype and shape, on which alone it depends."""
        self._scalars: dict[tuple[torch.dtype, torch.Size, bytes], tuple[bytes, int | None]] = {}
        """All that `torch.save` has written of a tensor, by its elements, and where they are."""
        self._failure: Exception | None = None
        self.bytes_written = 0

    def write_item(self, value: Any) -> Part:
        """Write a tensor, or any other picklable value."""
        start, self._crc, self._values = self.bytes_written, 0, None
        self._elements = _own_storage(value) if isinstance(value, Tensor) else None
        try:
            if isinstance(value, Pickled):
                self.write(value.data)
            elif self._elements is not None:
                self._write_tensor(self._elements)
            else:
                self._save(value)
        except RuntimeError:
            if self._failure is not None:  # torch.save raises another error while it unwinds
                raise self._failure from None
            raise
        finally:
            self._elements = None  # it may be a copy
        return Part(start, self.bytes_written - start, self._crc, self._values)

    def _write_tensor(self, tensor: Tensor) -> None:
        if tensor.nbytes <= _SCALAR_BYTES:
            self._write_scalar(tensor)
            return
        key = tensor.dtype, tensor.shape
        if key in self._known:
            before, after = self._known[key]
            self._write(memoryview(before))
            self._values = self.bytes_written
            self._write(memoryview(memory_of(tensor)).cast("B"))
            self._write(memoryview(after))
            return
        self._around = [], []
        self._save(tensor)
        if tensor.nbytes > _DESCRIPTION_BYTES:  # else they could be mistaken for another part
            before, after = (b"".join(parts) for parts in self._around)
            self._known[key] = before, after

    def _write_scalar(self, tensor: Tensor) -> None:
        key = tensor.dtype, tensor.shape, bytes(memory_of(tensor))
        start = self.bytes_written
        if key in self._scalars:
            data, values = self._scalars[key]
            self._values = None if values is None else start + values
            self._write(memoryview(data))
            return
        self._around = [], []
        self._save(tensor)
        values = None if self._values is None else self._values - start
        self._scalars[key] = b"".join(itertools.chain(*self._around)), values

    def _save(self, value: Any) -> None:
        with _without_checksum_of_torch():
            torch.save(value, self)  # type: ignore[arg-type]

    def write(self, data: Any) -> int:
        """Write bytes; `torch.save` calls it."""
        view = memoryview(data).cast("B")
        is_elements = self._is_elements(view)
        if is_elements:
            self._values = self.bytes_written
        if self._elements is not None and (not is_elements or len(view) <= _SCALAR_BYTES):
            self._around[self._values is not None].append(bytes(view))
        self._write(view)
        return len(view)

    def _write(self, view: memoryview) -> None:
        for start in range(0, len(view), _CHUNK):
            self._write_chunk(view[start : start + _CHUNK])

    def _is_elements(self, view: memoryview) -> bool:
        """Whether `torch.save` now writes the elements of the tensor, not what describes it."""
        elements = self._elements
        if elements is None or len(view) != elements.nbytes:
            return False
        return len(view) > _DESCRIPTION_BYTES or view == memoryview(memory_of(elements)).cast("B")

    def flush(self) -> None:
        """Nothing is buffered; `torch.save` calls it."""

    def close(self) -> None:
        """Close the file once its content is on the disk."""
        try:
            self._file.close()
        except OSError as error:
            raise _with_path(error, self._path) from error

    def abandon(self) -> None:
        """Close the file without waiting for the disk."""
        self._file.abandon()

    def release(self) -> None:
        """Say that this process has done all that it does with the file; see `has_writer`."""
        self._lock.release()

    def _write_chunk(self, chunk: memoryview) -> None:
        if self._is_stopped():
            self._failure = Cancelled()
            raise self._failure
        try:
            self._crc = self._file.append(chunk, self._crc)
        except OSError as error:
            self._failure = _with_path(error, self._path)
            raise self._failure from error
        self.bytes_written += len(chunk)


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


def write_whole(path: Path, data: bytes) -> Part:
    """Write a small file to the disk."""
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return Part(0, len(data), crc32c(data))


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


def _own_storage(tensor: Tensor) -> Tensor:
    """A CPU tensor whose storage has no other elements, because `torch.save` writes all of it."""
    tensor = tensor.detach().cpu().contiguous().resolve_conj().resolve_neg()
    if tensor.untyped_storage().nbytes() == tensor.nbytes:
        return tensor
    return with_own_storage(tensor)


def memory_of(tensor: Tensor) -> Any:
    """The memory of a contiguous CPU tensor as a buffer, without NumPy."""
    return (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())


def _with_path(error: OSError, path: Path) -> OSError:
    return OSError(error.errno, error.strerror, str(path))
