"""The control channel broadcasts along a binomial tree: few messages per rank, few steps."""

from __future__ import annotations

import pytest

from poplar.comm.control_channel import broadcast_children, broadcast_parent


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 8, 33, 64])
def test_every_rank_receives_once_from_the_rank_that_sends_to_it(size: int) -> None:
    for source in range(size):
        sent = [
            (rank, child)
            for rank in range(size)
            for child in broadcast_children(rank, source, size)
        ]
        expected = [(broadcast_parent(r, source, size), r) for r in range(size) if r != source]
        assert sorted(sent) == sorted(expected)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 8, 33, 64])
def test_messages_and_steps_grow_with_the_logarithm_of_the_ranks(size: int) -> None:
    steps = (size - 1).bit_length()
    for source in (0, size // 2, size - 1):
        for rank in range(size):
            assert len(broadcast_children(rank, source, size)) <= steps
            at, hops = rank, 0
            while at != source:
                at, hops = broadcast_parent(at, source, size), hops + 1
            assert hops <= steps
