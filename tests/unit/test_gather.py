"""`gather` copies what a loop over slices copies, whatever the sizes and addresses."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poplar._core import gather

pieces = st.lists(st.tuples(st.binary(max_size=200), st.integers(0, 40)), max_size=8)


@given(pieces, st.integers(0, 17))
def test_all_pieces_are_where_they_belong_and_nothing_else_changes(
    pieces: list[tuple[bytes, int]], before: int
) -> None:
    expected, offsets = bytearray(), []
    for data, gap in pieces:
        expected += b"-" * gap
        offsets.append(len(expected))
        expected += data
    memory = bytearray(b"-" * (before + len(expected)))
    gather(memoryview(memory)[before:], [data for data, _ in pieces], offsets)
    assert memory == b"-" * before + expected


@pytest.mark.parametrize(("offset", "size"), [(8, 3), (11, 0), (0, 11), (2**63, 1)])
def test_a_piece_that_is_not_inside_the_target_is_refused(offset: int, size: int) -> None:
    memory = bytearray(10)
    with pytest.raises(ValueError, match="exceed the target of 10"):
        gather(memory, [b"ab", bytes(size)], [0, offset])
    assert memory == bytes(10)


def test_every_piece_has_an_offset() -> None:
    with pytest.raises(ValueError, match="2 sources, but 1 offsets"):
        gather(bytearray(10), [b"a", b"b"], [0])


def test_buffers_must_be_contiguous_and_the_target_writable() -> None:
    with pytest.raises(ValueError, match="must be contiguous"):
        gather(bytearray(10), [memoryview(b"abcd")[::2]], [0])
    with pytest.raises(BufferError):
        gather(bytes(10), [b"a"], [0])
