"""A data file has the items that it was given, and a checksum of all that was written."""

from __future__ import annotations

import errno
import itertools
import os
import resource
import tracemalloc
from contextlib import contextmanager

import pytest
import torch
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan

from poplar._core import crc32c
from poplar.checkpoint.files import data_file
from poplar.checkpoint.files.data_file import Cancelled, DataFile, Stored, checksum, read_tensor
from poplar.values.errors import DamagedCheckpoint

WHOLE = torch.randn(3, 40_000)


def write(folder, values, is_stopped=lambda: False):
    """Write values by name; the places of the items, and the file."""
    items = create_default_local_save_plan(values, True).items
    file = DataFile(folder / "__0_0.distcp")
    try:
        own = {item.index: values[item.index.fqn] for item in items}
        places = file.write_items(items, own, is_stopped)
    finally:
        file.close()
    return dict(zip((item.index.fqn for item in items), places, strict=True)), file


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64])
def test_items_are_what_was_given_without_the_rest_of_their_storage(tmp_path, dtype):
    tensors = {"row": WHOLE[1], "column": WHOLE.t()[:5], "empty": WHOLE[:0], "one": WHOLE[0, 0]}
    tensors["strided"] = WHOLE[:1, 0]
    values = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    if dtype is torch.complex64:
        values["conjugate"] = values["row"].conj()
    places, file = write(tmp_path, {**values, "other": {"step": 3}})
    data = file.path.read_bytes()
    assert sum(length for _, length in places.values()) == len(data) < 3 * WHOLE[0].to(dtype).nbytes
    for name, value in values.items():
        offset, length = places[name]
        (tmp_path / "item").write_bytes(data[offset : offset + length])
        assert torch.equal(torch.load(tmp_path / "item"), value)
        read = torch.zeros(value.shape, dtype=dtype)
        with file.path.open("rb") as opened:
            assert read_tensor(opened, offset, read)
        assert torch.equal(read, value)


def test_an_item_that_the_file_does_not_write_of_such_a_tensor_is_not_read(tmp_path):
    places, file = write(tmp_path, {"a": torch.ones(4, 6), "b": [1, 2]})
    others = {
        "dtype": torch.ones(4, 6, dtype=torch.int32),
        "shape": torch.ones(6, 4),
        "dimensions": torch.ones(24),
        "order": torch.ones(6, 4).t(),
        "part": torch.ones(5, 6)[1:],
        "sign": torch.ones(4, 6)._neg_view(),
        "list": [torch.ones(4, 6)],
        "checksum of torch": torch.ones(4, 6),
    }
    for what, value in others.items():
        with (
            data_file.checksums_of_torch(what == "checksum of torch"),
            (tmp_path / what).open("wb") as item,
        ):
            torch.save(value, item)
    (tmp_path / "incomplete").write_bytes(file.path.read_bytes()[:750])
    (tmp_path / "empty").touch()
    target = torch.zeros(4, 6)
    for path in tmp_path.iterdir():
        with path.open("rb") as opened:
            assert read_tensor(opened, places["a"][0], target) is (path == file.path), path.name
    with file.path.open("rb") as opened:
        assert not read_tensor(opened, places["b"][0], target)


def test_checksum_is_of_all_that_was_written(tmp_path):
    _, file = write(tmp_path, {"a": WHOLE, "b": [1, 2]})
    data = file.path.read_bytes()
    assert file.written == Stored(len(data), crc32c(data)) == checksum(tmp_path, file.path.name)
    file.path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert checksum(tmp_path, file.path.name) != file.written
    with pytest.raises(DamagedCheckpoint, match="missing"):
        checksum(tmp_path, "other")


def test_a_copy_of_the_model_in_state_is_not_copied_to_memory(tmp_path):
    average = {f"weight{number}": torch.zeros(1 << 20) for number in range(4)}
    write(tmp_path, {})
    (tmp_path / "__0_0.distcp").unlink()
    tracemalloc.start()
    try:
        places, _ = write(tmp_path, {"average": average})
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert places["average"][1] > 4 << 22


def test_little_is_written_that_is_not_on_the_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(data_file, "_CHUNK", 1000)
    monkeypatch.setattr(data_file, "SYNC_BYTES", 5000)
    sizes = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: sizes.append(os.fstat(descriptor).st_size))
    _, file = write(tmp_path, {"a": WHOLE, "b": WHOLE})
    between = [end - start for start, end in itertools.pairwise([0, *sizes])]
    assert max(between) < 7000
    assert sizes[-1] == file.written.length


def test_an_existing_file_is_not_overwritten(tmp_path):
    (tmp_path / "__0_0.distcp").write_bytes(b"kept")
    with pytest.raises(FileExistsError):
        write(tmp_path, {})
    assert (tmp_path / "__0_0.distcp").read_bytes() == b"kept"


def test_cancelled_save_ends_in_the_middle_of_a_tensor(tmp_path):
    looks = iter([False, False])
    with pytest.raises(Cancelled):
        write(tmp_path, {"a": torch.zeros(20 << 20)}, lambda: next(looks, True))
    assert 0 < (tmp_path / "__0_0.distcp").stat().st_size < 80 << 20


def test_error_of_the_disk_names_the_file(tmp_path):
    with limited_file_size(100_000), pytest.raises(OSError, match=r"__0_0\.distcp") as caught:
        write(tmp_path, {"a": WHOLE})
    assert caught.value.errno == errno.EFBIG


@contextmanager
def limited_file_size(size):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
