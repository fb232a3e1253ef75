"""Staging copies values, whatever tensors they are in, and later changes do not reach the copy."""

from __future__ import annotations

import gc
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex

from poplar.checkpoint.files.data_file import Pickled
from poplar.checkpoint.files.staging import Staging


def staged(values: dict[str, Any], staging: Staging | None = None) -> dict[str, Any]:
    copies = (staging or Staging()).copy({MetadataIndex(n): v for n, v in values.items()})
    return {index.fqn: copy for index, copy in copies.items()}


def test_the_copy_has_the_values_of_tensors_of_any_kind() -> None:
    base = torch.arange(24.0).reshape(4, 6)
    imaginary = torch.complex(base, base + 1).conj()
    tensors = {
        "contiguous": base,
        "transposed": base.t(),
        "every second": base[:, ::2],
        "expanded": base[0].expand(3, 6),
        "conjugate": imaginary,
        "negative": imaginary.imag,
        "one": torch.tensor(3),
        "none": torch.empty(0, 5),
        "bf16": base.bfloat16(),
        "bool": base > 5,
        "odd": torch.arange(7, dtype=torch.uint8),
    }
    copies = staged(tensors)
    for name, tensor in tensors.items():
        assert copies[name].dtype == tensor.dtype, name
        assert torch.equal(copies[name], tensor), name


def test_later_changes_do_not_reach_the_copy() -> None:
    tensor, settings = torch.ones(1000), {"lr": 1.0}
    copies = staged({"tensor": tensor, "settings": settings})
    tensor.zero_()
    settings["lr"] = 2.0
    assert bool((copies["tensor"] == 1).all())
    assert copies["settings"].data.tobytes() == Pickled.of({"lr": 1.0}).data.tobytes()


def test_the_buffer_is_used_again() -> None:
    staging = Staging()
    first: Tensor = staged({"a": torch.ones(1000)}, staging)["a"]
    second: Tensor = staged({"a": torch.zeros(500)}, staging)["a"]
    assert first.data_ptr() == second.data_ptr()


def test_pinned_memory_is_as_large_as_the_copy_and_unpinned_once() -> None:
    cuda = mock.Mock()
    cuda.cudaHostRegister.return_value = cuda.cudaHostUnregister.return_value = 0
    with mock.patch.object(torch.cuda, "cudart", return_value=cuda):
        staging = Staging()
        for size in (1000, 500, 3000):
            staging._reserve(size, pinned=True)
            assert not staging._buffer.numel() % 1000
        del staging
        gc.collect()
    pinned = [call.args for call in cuda.cudaHostRegister.call_args_list]
    assert [size for _, size, _ in pinned] == [1000, 3000]
    unpinned = [call.args for call in cuda.cudaHostUnregister.call_args_list]
    assert unpinned == [(address,) for address, *_ in pinned]
