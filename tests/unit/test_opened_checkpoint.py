"""What is read and verified of a checkpoint, and which values are read straight into place."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as dcp

from poplar.checkpoint.digests import digest
from poplar.checkpoint.files.data_file import DataFile, _own_storage
from poplar.checkpoint.files.item_reader import ItemReader
from poplar.checkpoint.files.opened import OpenedCheckpoint, _first_of_contiguous, _in_threads
from poplar.values.errors import DamagedCheckpoint


@pytest.mark.parametrize("sizes", [(), (5,), (1, 4), (3, 4), (2, 1, 3), (2, 3, 2)])
def test_boxes_that_are_contiguous_in_a_file_are_recognized(sizes):
    numbers = torch.arange(math.prod(sizes)).reshape(sizes)
    ranges = [[(a, b - a) for a in range(s) for b in range(a + 1, s + 1)] for s in sizes]
    for box in itertools.product(*ranges):
        inside = numbers
        for dim, (offset, length) in enumerate(box):
            inside = inside.narrow(dim, offset, length)
        elements = inside.flatten().tolist()
        contiguous = elements == list(range(elements[0], elements[0] + len(elements)))
        first = _first_of_contiguous(sizes, [a for a, _ in box], [n for _, n in box])
        assert first == (elements[0] if contiguous else None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool])
def test_parts_of_a_buffer_are_written_without_a_copy(tmp_path, dtype):
    buffer = torch.arange(100_000).to(dtype)
    part = buffer[5_000:50_000].view(9, 5_000)
    exact = _own_storage(part)
    assert exact.data_ptr() == part.data_ptr()
    assert exact.untyped_storage().nbytes() == part.nbytes
    file = DataFile(tmp_path / "file", lambda: False)
    written = [file.write_item(part), file.write_item({"a": 1}), file.write_item(part[:0])]
    file.close()

    assert (tmp_path / "file").stat().st_size == sum(item.length for item in written)
    target = torch.zeros_like(part)
    reader = ItemReader(tmp_path)
    reader.elements("file", written[0].values, target)
    assert torch.equal(target, part)
    assert torch.equal(reader.value("file", *written[0][:2]), part)
    assert reader.value("file", *written[1][:2]) == {"a": 1}
    assert reader.value("file", *written[2][:2]).shape == (0, 5_000)
    reader.close()


def written_tensor(folder, numel):
    """A file with two tensors and something before and after; the second tensor's part."""
    file, values = DataFile(folder / "file", lambda: False), torch.randn(numel)
    file.write_item({"a": 1})
    part = [file.write_item(torch.ones(3)), file.write_item(values), file.write_item("end")][1]
    file.close()
    return part, values


@pytest.mark.parametrize("numel", [1, 1000, 700_000])  # the last one is read in several chunks
def test_elements_are_verified_while_they_are_read(tmp_path, numel):
    part, values = written_tensor(tmp_path, numel)
    reader, target = ItemReader(tmp_path), torch.zeros(numel)
    reader.verify("file", part)
    reader.verify("file", part, target)
    assert torch.equal(target, values)
    reader.close()


@pytest.mark.parametrize("where", ["before", "elements", "after", "truncated"])
@pytest.mark.parametrize("reads", [False, True])
def test_damage_anywhere_in_a_part_is_found(tmp_path, where, reads):
    part, values = written_tensor(tmp_path, 1000)
    end = part.offset + part.length
    data = bytearray((tmp_path / "file").read_bytes())
    place = {"before": part.offset, "elements": part.values + 99, "after": end - 1}.get(where)
    if place is None:
        del data[end - 1 :]
    else:
        data[place] ^= 4
    (tmp_path / "file").write_bytes(data)
    reader = ItemReader(tmp_path)
    with pytest.raises(DamagedCheckpoint, match="file"):
        reader.verify("file", part, torch.zeros_like(values) if reads else None)
    reader.close()


def test_each_rank_verifies_a_share_of_what_is_left(tmp_path):
    part, _ = written_tensor(tmp_path, 1000)
    parts = [part._replace(offset=part.offset + n, length=n % 7, crc32c=0) for n in range(50)]
    opened = object.__new__(OpenedCheckpoint)
    opened._parts = {("file", p.offset): p for p in parts}
    opened._numbers = {key: number for number, key in enumerate(opened._parts)}
    opened._reader = SimpleNamespace(
        read_ahead=lambda parts: lambda: None, expect=lambda file, until: None
    )
    seen = []
    opened._verify = seen.append
    done = set(range(0, 50, 3))
    for rank in range(4):
        opened.verify(done, rank, 4)
    numbers = sorted(opened._numbers[key] for key in seen)
    assert numbers == sorted(set(range(50)) - done)


@pytest.mark.filterwarnings("ignore")
def test_tensor_of_which_a_part_is_missing_is_not_read(tmp_path):
    dcp.save({"model": {"w": torch.ones(4)}}, checkpoint_id=tmp_path, no_dist=True)
    opened = OpenedCheckpoint(tmp_path)
    target = torch.zeros(4)
    opened.read_into(opened.reads([("model.w", target)]))
    assert torch.equal(target, torch.ones(4))
    opened.described["model.w"].chunks.clear()
    with pytest.raises(DamagedCheckpoint, match="0 of the 4 elements"):
        opened.read_into(opened.reads([("model.w", target)]))


def test_error_of_a_thread_ends_the_others():
    begun = []

    def work(number):
        begun.append(number)
        if number == 3:
            raise KeyError(number)

    with pytest.raises(KeyError):
        _in_threads(work, list(range(100_000)))
    assert len(begun) < 100_000
    assert len(set(begun)) == len(begun)
    begun.clear()
    _in_threads(work, [0, 1, 2, 4])
    assert sorted(begun) == [0, 1, 2, 4]


def test_digests_are_equal_for_equal_values_only():
    values = [
        *(None, True, 1, 1.5, "1", b"1", (), {}, [1, 2], {"a": 1}, {"a": {"b": [1, "c"]}}),
        *(torch.arange(3), torch.arange(3.0), torch.zeros(3, 1), torch.zeros(1, 3)),
    ]
    assert len({digest(value) for value in values}) == len(values)
    assert digest({"a": torch.ones(2), "b": 1}) == digest({"b": 1, "a": torch.ones(2)})
    assert digest([1, 2]) == digest((1, 2)), "containers of one content are alike"
    assert digest(object()) == digest(object()), "of other objects, only the type is compared"
