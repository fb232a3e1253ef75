"""A file that is written past the page cache has what was written, also where that cannot be."""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path

import pytest

from poplar.checkpoint.files import disk_file
from poplar.checkpoint.files.disk_file import BUFFER_BYTES, DiskFile


def write_parts(path: Path, sizes: list[int]) -> bytes:
    parts = [random.Random(number).randbytes(size) for number, size in enumerate(sizes)]
    file = DiskFile(path)
    for part in parts:
        file.write(memoryview(part))
    file.close()
    return b"".join(parts)


@pytest.mark.parametrize(
    "sizes",
    [
        [],
        [0],
        [1],
        [4096],
        [BUFFER_BYTES],
        [BUFFER_BYTES - 1, 2],
        [3 * BUFFER_BYTES + 4097],
        [17, 100_000, 4096, 0, 2 * BUFFER_BYTES, 5],
    ],
)
def test_the_file_has_all_parts_in_order(tmp_path: Path, sizes: list[int]) -> None:
    expected = write_parts(tmp_path / "file", sizes)
    assert (tmp_path / "file").read_bytes() == expected


def test_a_file_system_that_refuses_writes_past_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some accept the flag and refuse the first write."""
    refused = []

    def write(descriptor: int, data: memoryview, real=os.write) -> int:
        if not refused:
            refused.append(len(data))
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(descriptor, data)

    monkeypatch.setattr(disk_file.os, "write", write)
    path = tmp_path / "file"
    probe = DiskFile(tmp_path / "probe")
    passes_cache = probe._passes_cache
    probe.abandon()
    if not passes_cache:
        pytest.skip("no writes past the page cache here")
    expected = write_parts(path, [3 * BUFFER_BYTES + 5])
    assert refused
    assert path.read_bytes() == expected


def test_an_error_of_a_write_is_raised_at_the_latest_by_close(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(descriptor: int, data: memoryview) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(disk_file.os, "write", write)
    file = DiskFile(tmp_path / "file")
    file.write(memoryview(bytes(BUFFER_BYTES)))
    with pytest.raises(OSError, match="No space left"):
        file.close()


def test_an_existing_file_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"kept")
    with pytest.raises(FileExistsError):
        DiskFile(tmp_path / "file")
