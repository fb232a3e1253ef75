"""A tensor with a storage of its own is the same memory, for any dtype and shape."""

from __future__ import annotations

import gc

import pytest
import torch

from poplar.checkpoint.saved_values import digest
from poplar.system.storage import as_bytes, bits_are_equal, separate_elements, with_own_storage
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


@pytest.mark.parametrize("dtype", [*DTYPES, torch.complex128])
def test_bits_of_any_dtype_and_strides_are_compared(dtype: torch.dtype) -> None:
    one = torch.arange(6).view(2, 3).to(dtype)
    other = one.t().contiguous().t()
    assert one.stride() != other.stride()
    assert bits_are_equal(one, other)
    other[1, 1] = 0
    assert not bits_are_equal(one, other)
    assert bits_are_equal(one[0, 1], one[0, 1].clone())
    assert bits_are_equal(one[:0], one[:0].clone())


def test_bits_tell_zeros_and_know_nan() -> None:
    assert not bits_are_equal(torch.tensor(0.0), torch.tensor(-0.0))
    assert bits_are_equal(torch.tensor(float("nan")), torch.tensor(float("nan")))


def test_elements_that_share_memory_are_separated_and_others_keep_theirs() -> None:
    expanded, plain = torch.arange(3.0).expand(2, 3), torch.arange(6.0).view(2, 3).t()
    place = plain.data_ptr()
    for tensor in (expanded, plain):
        before = tensor.tolist()
        separate_elements(tensor)
        assert tensor.tolist() == before
        tensor.copy_(torch.zeros_like(tensor))
    assert plain.data_ptr() == place
