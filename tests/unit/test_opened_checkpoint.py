"""Which values are read straight into place, and what is equal on all ranks."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from poplar.checkpoint.data_file import DataFile, _own_storage
from poplar.checkpoint.digests import digest
from poplar.checkpoint.item_reader import ItemReader
from poplar.checkpoint.opened import _first_of_contiguous


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
    assert torch.equal(reader.tensor("file", *written[0][:2]), part)
    assert reader.value("file", *written[1][:2]) == {"a": 1}
    assert reader.tensor("file", *written[2][:2]).shape == (0, 5_000)
    reader.close()


def test_digests_are_equal_for_equal_values_only():
    values = [
        *(None, True, 1, 1.5, "1", b"1", (), {}, [1, 2], {"a": 1}, {"a": {"b": [1, "c"]}}),
        *(torch.arange(3), torch.arange(3.0), torch.zeros(3, 1), torch.zeros(1, 3)),
    ]
    assert len({digest(value) for value in values}) == len(values)
    assert digest({"a": torch.ones(2), "b": 1}) == digest({"b": 1, "a": torch.ones(2)})
    assert digest([1, 2]) == digest((1, 2)), "containers of one content are alike"
    assert digest(object()) == digest(object()), "of other objects, only the type is compared"
