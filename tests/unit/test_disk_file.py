"""Files that are written and read past the page cache have the same bytes where that cannot be."""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path

import pytest

from poplar._core import DISK_BUFFER_BYTES, DiskReader, DiskWriter, crc32c

BUFFER = DISK_BUFFER_BYTES


def new_file(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)


def write_parts(writer: DiskWriter, sizes: list[int]) -> bytes:
    parts = [random.Random(number).randbytes(size) for number, size in enumerate(sizes)]
    crc = 0
    for part in parts:
        crc = writer.append(part, crc)
    writer.close()
    assert crc == crc32c(b"".join(parts))
    return b"".join(parts)


@pytest.mark.parametrize(
    "sizes",
    [
        [],
        [0],
        [1],
        [4096],
        [BUFFER],
        [BUFFER - 1, 2],
        [2 * BUFFER],
        [3 * BUFFER + 4097],
        [17, 100_000, 4096, 0, 2 * BUFFER, 5, 4 * BUFFER],
    ],
)
def test_the_file_has_all_parts_in_order(tmp_path: Path, sizes: list[int]) -> None:
    expected = write_parts(DiskWriter(new_file(tmp_path / "file")), sizes)
    assert (tmp_path / "file").read_bytes() == expected


def test_memory_may_change_after_it_was_appended(tmp_path: Path) -> None:
    writer, memory = DiskWriter(new_file(tmp_path / "file")), bytearray(BUFFER)
    for number in range(8):
        memory[:] = bytes([number]) * BUFFER
        writer.append(memory)
    writer.close()
    assert (tmp_path / "file").read_bytes() == b"".join(bytes([n]) * BUFFER for n in range(8))


def test_writes_that_are_refused_past_the_cache_go_through_it(tmp_path: Path) -> None:
    """The flag is accepted, but the system refuses direct writes that begin within a block."""
    descriptor = new_file(tmp_path / "file")
    os.write(descriptor, b"x")
    writer = DiskWriter(descriptor)
    if not writer.is_direct:
        pytest.skip("no writes past the page cache here")
    writer.append(bytes(2 * BUFFER))
    expected = b"x" + bytes(2 * BUFFER) + write_parts(writer, [2 * BUFFER + 5])
    assert not writer.is_direct
    assert (tmp_path / "file").read_bytes() == expected


def test_a_file_system_without_direct_access() -> None:
    descriptor = os.memfd_create("file")
    writer = DiskWriter(os.dup(descriptor))
    expected = write_parts(writer, [3 * BUFFER + 5])
    assert os.pread(descriptor, len(expected) + 1, 0) == expected
    reader, target = DiskReader(descriptor), bytearray(len(expected))
    assert reader.read(0, len(expected), target) == crc32c(expected)
    assert target == expected


def test_an_error_of_a_write_is_raised_at_the_latest_by_close() -> None:
    writer = DiskWriter(os.open("/dev/full", os.O_WRONLY))
    writer.append(bytes(BUFFER))
    with pytest.raises(OSError, match="No space left") as caught:
        writer.close()
    assert caught.value.errno == errno.ENOSPC


def test_an_error_of_a_write_ends_the_appending() -> None:
    writer = DiskWriter(os.open("/dev/full", os.O_WRONLY))
    with pytest.raises(OSError, match="No space left"):
        writer.append(bytes(10 * BUFFER))
    writer.abandon()


def test_nothing_can_be_written_to_an_abandoned_file(tmp_path: Path) -> None:
    writer = DiskWriter(new_file(tmp_path / "file"))
    writer.append(bytes(10))
    writer.abandon()
    writer.abandon()
    with pytest.raises(OSError, match="Bad file descriptor"):
        writer.append(bytes(10))
    with pytest.raises(OSError, match="Bad file descriptor"):
        writer.close()


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    path, data = tmp_path_factory.mktemp("stored") / "file", random.Random(0).randbytes(5_000_001)
    path.write_bytes(data)
    return path, data


@pytest.mark.parametrize("expects", [False, True])
@pytest.mark.parametrize("has_target", [False, True])
def test_ranges_are_read_in_any_order(
    stored: tuple[Path, bytes], expects: bool, has_target: bool
) -> None:
    path, data = stored
    reader, chance = DiskReader(os.open(path, os.O_RDONLY)), random.Random(1)
    ranges = [(0, len(data)), (len(data), 0), (len(data) - 1, 1), (0, 1), (4095, 2), (4096, 4096)]
    starts = sorted(chance.randrange(len(data)) for _ in range(40))
    ranges += [
        (start, min(chance.choice([1, 5_000, 2 * BUFFER]), len(data) - start)) for start in starts
    ]
    for start, length in ranges:
        if expects:
            reader.expect(min(start + length + chance.randrange(3 * BUFFER), len(data)))
        expected = data[start : start + length]
        target = bytearray(length) if has_target else None
        assert reader.read(start, length, target, 7) == crc32c(expected, 7)
        assert target is None or target == expected


def test_an_error_of_a_read_is_raised() -> None:
    ends = os.pipe()
    os.close(ends[1])
    with pytest.raises(OSError, match="Illegal seek"):
        DiskReader(ends[0]).read(0, 1)


@pytest.mark.parametrize("start", [0, 4_999_000, 5_000_001, 6_000_000])
def test_the_first_missing_byte_is_named(stored: tuple[Path, bytes], start: int) -> None:
    reader = DiskReader(os.open(stored[0], os.O_RDONLY))
    with pytest.raises(EOFError, match=f"no byte {max(start, 5_000_001)}"):
        reader.read(start, 6_000_001 - start)
    assert reader.read(0, 10) == crc32c(stored[1][:10])


def test_a_target_of_another_size_raises(stored: tuple[Path, bytes]) -> None:
    reader = DiskReader(os.open(stored[0], os.O_RDONLY))
    with pytest.raises(ValueError, match="as many bytes"):
        reader.read(0, 10, bytearray(9))
    with pytest.raises((TypeError, BufferError), match=r"read-only|writable"):
        reader.read(0, 10, bytes(10))
