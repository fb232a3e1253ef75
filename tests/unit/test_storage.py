"""A tensor with a storage of its own is the same memory, for any dtype and shape."""

from __future__ import annotations

import gc

import pytest
import torch

from poplar.checkpoint.saved_values import digest
from poplar.system.storage import as_bytes, with_own_storage
from poplar.zero.checks.replica_check import bit_checksum

DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.complex64,
    torch.bool,
    torch.int64,
)


@pytest.mark.parametrize("dtype", DTYPES)
def test_memory_is_shared_and_the_storage_is_not(dtype: torch.dtype) -> None:
    whole = torch.zeros(12).to(dtype)
    for part in (whole[2:8].view(2, 3), whole[4:5].view(()), whole[3:3]):
        own = with_own_storage(part)
        assert (own.dtype, own.shape, own.stride()) == (dtype, part.shape, part.stride())
        assert own.untyped_storage().nbytes() == part.nbytes
        assert not part.numel() or own.data_ptr() == part.data_ptr()
        own.fill_(1)
        assert torch.equal(part, torch.ones_like(part))


def test_a_single_element_may_have_any_stride() -> None:
    element = torch.arange(6.0).view(3, 2)[1:2, 1]
    assert element.is_contiguous()
    assert element.stride() == (2,)
    assert torch.equal(with_own_storage(element), element)
    assert torch.equal(as_bytes(element), torch.tensor([3.0]).view(torch.uint8))
    assert int(bit_checksum(element)) == int(bit_checksum(element.clone()))
    assert digest(element) == digest(torch.tensor([3.0]))


def test_memory_lives_as_long_as_the_result() -> None:
    with torch.inference_mode():
        whole = torch.full((1 << 16,), 3.0)
        own = with_own_storage(whole[5:])
    del whole
    gc.collect()
    others = [torch.zeros(1 << 16) for _ in range(8)]
    assert float(own.min()) == 3.0
    assert not own.is_inference()
    assert len(others) == 8
