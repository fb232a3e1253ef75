"""A data file has, item by item, the bytes that `torch.save` writes."""

from __future__ import annotations

import io

import pytest
import torch

from poplar._core import crc32c
from poplar.checkpoint.files.data_file import DataFile

LARGE = 40_000
"""Elements of which even 16 bits take more than what describes a tensor."""


def as_saved(value) -> bytes:
    buffer = io.BytesIO()
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(value, buffer)
    finally:
        torch.serialization.set_crc32_options(before)
    return buffer.getvalue()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("shape", [(LARGE,), (4, LARGE // 4), (LARGE + 1, 1), (3,), (0, 5), ()])
def test_items_of_equal_shape_have_the_bytes_of_torch_save(tmp_path, dtype, shape):
    values = [torch.full(shape, number).to(dtype) for number in (0, 1, 7, 7)]
    values += [torch.randn(shape).mul(100).to(dtype) for _ in range(2)]
    values.insert(3, torch.arange(5.0))  # another kind in between
    check(tmp_path, values)


def test_views_and_other_values_have_the_bytes_of_torch_save(tmp_path):
    whole = torch.randn(3, LARGE)
    check(tmp_path, [whole[1].clone(), {"step": 3}, whole[2].clone(), whole.t().contiguous()])


def check(folder, values) -> None:
    file = DataFile(folder / "data", lambda: False)
    parts = [file.write_item(value) for value in values]
    file.close()
    data = (folder / "data").read_bytes()
    assert sum(part.length for part in parts) == len(data)
    for part, value in zip(parts, values, strict=True):
        item = data[part.offset : part.offset + part.length]
        assert item == as_saved(value)
        assert part.crc32c == crc32c(item, 0)
        if isinstance(value, torch.Tensor) and value.numel():
            start = part.values - part.offset
            own = bytes(value.contiguous().reshape(-1).view(torch.uint8).tolist())
            assert item[start : start + value.nbytes] == own


def test_a_view_is_saved_without_the_rest_of_its_storage(tmp_path):
    whole = torch.randn(3, LARGE)
    file = DataFile(tmp_path / "data", lambda: False)
    parts = [file.write_item(whole[row]) for row in range(3)]
    file.close()
    data = (tmp_path / "data").read_bytes()
    for row, part in enumerate(parts):
        assert part.length < whole.nbytes / 2
        item = io.BytesIO(data[part.offset : part.offset + part.length])
        assert torch.equal(torch.load(item), whole[row])


def test_an_existing_file_is_not_overwritten(tmp_path):
    (tmp_path / "data").write_bytes(b"kept")
    with pytest.raises(FileExistsError):
        DataFile(tmp_path / "data", lambda: False)
    assert (tmp_path / "data").read_bytes() == b"kept"
