"""A file that is written in order, past the page cache where the file system can do that.

Copying into the page cache takes more CPU than the checksums, and where memory is full of other
files it waits until their pages are free. So chunks are collected in two small buffers: one is
filled while a thread writes the other one.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

BUFFER_BYTES = 1 << 20
"""Of each buffer; larger ones write no faster."""
_BLOCK = 4096
"""Writes past the page cache must be multiples of a block of the disk, of at most so many bytes."""
_NO_CACHE = getattr(os, "O_DIRECT", 0)


class DiskFile:
    """A new file.

    Raises:
        OSError: from all methods. The one of a write may be raised by a later call.
    """

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        self._buffers = [mmap.mmap(-1, BUFFER_BYTES) for _ in range(2)]
        self._filled = 0
        """Bytes in the first buffer."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="poplar checkpoint writer")
        self._writing: Future[None] | None = None
        """Of the second buffer."""
        self._passes_cache = self._set_no_cache(True)

    def write(self, data: memoryview) -> None:
        """Append bytes, which may change afterwards."""
        while data:
            part = data[: BUFFER_BYTES - self._filled]
            self._buffers[0][self._filled : self._filled + len(part)] = part
            self._filled += len(part)
            data = data[len(part) :]
            if self._filled == BUFFER_BYTES:
                self._start(BUFFER_BYTES)

    def close(self) -> None:
        """Close the file once its content is on the disk."""
        try:
            blocks = self._filled // _BLOCK * _BLOCK
            rest = bytes(self._buffers[0][blocks : self._filled])
            self._start(blocks)
            self._wait()
            self._set_no_cache(False)
            self._write_all(memoryview(rest))
            os.fsync(self._descriptor)
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Close the file without waiting for the disk, except for a write that has begun."""
        self._thread.shutdown()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _start(self, count: int) -> None:
        """Write the first buffer, when the second one has been written."""
        self._wait()
        self._buffers.reverse()
        self._filled = 0
        self._writing = self._thread.submit(self._write_buffer, count)

    def _wait(self) -> None:
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def _write_buffer(self, count: int) -> None:
        with memoryview(self._buffers[1]) as whole:
            self._write_all(whole[:count])

    def _write_all(self, data: memoryview) -> None:
        while data:
            try:
                written = os.write(self._descriptor, data)
            except OSError as error:
                if error.errno == errno.EINVAL and self._passes_cache:
                    self._set_no_cache(False)  # the file system has accepted the flag only
                    continue
                raise
            data = data[written:]
            if written % _BLOCK:  # a disk that is nearly full
                self._set_no_cache(False)

    def _set_no_cache(self, on: bool) -> bool:
        """Whether writes pass the page cache from now on."""
        before = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        self._passes_cache = False
        if _NO_CACHE:
            flags = before | _NO_CACHE if on else before & ~_NO_CACHE
            try:
                fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags)
            except OSError:  # as in memory: it has no other place than the page cache
                return False
            self._passes_cache = on
        return self._passes_cache
