"""CRC-32C of checkpoints, against its definition bit by bit and known values."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from poplar._core import crc32c

KNOWN = {b"": 0x00000000, b"123456789": 0xE3069283, bytes(32): 0x8A9136AA, b"\xff" * 32: 0x62A8AB43}
"""From RFC 3720, appendix B.4, and the usual check value."""
BOTH = pytest.mark.parametrize("portable", [False, True])


def by_definition(data: bytes, crc: int = 0) -> int:
    crc ^= 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


@BOTH
@pytest.mark.parametrize("data", KNOWN)
def test_known_values(data: bytes, portable: bool):
    assert crc32c(data, portable=portable) == by_definition(data) == KNOWN[data]


@BOTH
@given(data=st.binary(max_size=100), before=st.integers(0, 2**32 - 1), start=st.integers(0, 9))
def test_any_bytes_at_any_address(portable: bool, data: bytes, before: int, start: int):
    view = memoryview(bytes(start) + data)[start:]
    assert crc32c(view, before, portable) == by_definition(data, before)


@BOTH
@given(data=st.binary(max_size=100), cut=st.integers(0, 100))
def test_parts_continue_each_other(portable: bool, data: bytes, cut: int):
    assert crc32c(data[cut:], crc32c(data[:cut]), portable) == crc32c(data, portable=portable)


def test_a_buffer_with_gaps_raises():
    with pytest.raises((ValueError, BufferError), match="contiguous"):
        crc32c(memoryview(b"abcdef")[::2])
