"""Layouts and transfers against the naive definition: the owner of every element."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poplar.comm.shard_layout import ALIGNMENT, Layout, Transfer, transfers

layouts = st.lists(st.integers(0, 40), min_size=1, max_size=6)


def layout_of(sizes: list[int]) -> Layout:
    offsets = [0]
    for size in sizes:
        offsets.append(offsets[-1] + size)
    return Layout(tuple(offsets))


def owner_of_every_element(layout: Layout) -> list[int]:
    return [rank for rank, size in enumerate(layout.sizes) for _ in range(size)]


@st.composite
def two_layouts_of_one_buffer(draw):
    old = layout_of(draw(layouts))
    cuts = sorted(draw(st.lists(st.integers(0, old.numel), max_size=5)))
    return old, Layout((0, *cuts, old.numel))


@given(two_layouts_of_one_buffer())
def test_transfers_give_source_and_target_of_every_element(pair):
    old, new = pair
    before, after = owner_of_every_element(old), owner_of_every_element(new)
    moved = [
        (element, transfer.source, transfer.target)
        for transfer in transfers(old, new)
        for element in range(transfer.start, transfer.stop)
    ]
    assert moved == [(element, before[element], after[element]) for element in range(old.numel)]


@given(two_layouts_of_one_buffer())
def test_transfers_are_minimal(pair):
    old, new = pair
    pairs = list(zip(owner_of_every_element(old), owner_of_every_element(new), strict=True))
    changes = sum(here != next_door for here, next_door in pairwise(pairs))
    assert len(transfers(old, new)) == (changes + 1 if pairs else 0)


@given(two_layouts_of_one_buffer())
def test_moving_a_buffer_back_restores_it(pair):
    old, new = pair
    there, back = transfers(old, new), transfers(new, old)
    assert back == tuple(Transfer(t.target, t.source, t.start, t.stop) for t in there)


def test_transfers_between_different_numbers_of_ranks():
    moved = transfers(Layout((0, 64, 128)), Layout((0, 0, 100, 128)))
    assert moved == (Transfer(0, 1, 0, 64), Transfer(1, 1, 64, 100), Transfer(1, 2, 100, 128))


def test_transfers_between_buffers_of_different_size_are_refused():
    with pytest.raises(ValueError, match="128 elements into one of 64"):
        transfers(Layout((0, 128)), Layout((0, 64)))


def test_bounds_and_sizes_of_a_layout():
    layout = Layout((0, 64, 64, 192))
    assert layout.numel == 192
    assert layout.world_size == 3
    assert layout.sizes == (64, 0, 128)
    assert layout.bounds(2) == (64, 192)
    assert layout.size(1) == 0
    assert hash(layout) == hash(Layout((0, 64, 64, 192)))


@given(
    blocks=st.integers(0, 500),
    weights=st.lists(st.integers(0, 20), min_size=1, max_size=8).filter(any),
)
def test_slices_are_aligned_and_within_one_block_of_the_share(blocks, weights):
    shares = [weight / sum(weights) for weight in weights]
    layout = Layout.from_shares(blocks * ALIGNMENT, shares)
    assert layout.numel == blocks * ALIGNMENT
    assert all(offset % ALIGNMENT == 0 for offset in layout.offsets)
    for size, share in zip(layout.sizes, shares, strict=True):
        assert abs(size - share * layout.numel) <= ALIGNMENT
        assert size == 0 or share > 0


def test_even_layouts_differ_by_at_most_one_block():
    sizes = Layout.even(10 * ALIGNMENT, 4).sizes
    assert sum(sizes) == 10 * ALIGNMENT
    assert max(sizes) - min(sizes) <= ALIGNMENT


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ((0,), "at least 2 boundaries"),
        ((64, 128), "start at 0"),
        ((0, 128, 64), "rank 1 would own"),
    ],
)
def test_invalid_boundaries_are_refused(offsets, message):
    with pytest.raises(ValueError, match=message):
        Layout(offsets)


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_outside_the_layout_is_refused(rank):
    with pytest.raises(ValueError, match=f"rank {rank}: this layout is for ranks 0 to 1"):
        Layout((0, 64, 128)).bounds(rank)


def test_even_layout_without_ranks_is_refused():
    with pytest.raises(ValueError, match="world_size must be at least 1, got 0"):
        Layout.even(64, 0)
