"""The partition arithmetic of poplar._core against naive reference implementations."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poplar import _core


def naive_apportion(total: int, weights: list[float]) -> list[int]:
    exact = [Fraction(weight) for weight in weights]
    quotas = [total * weight / sum(exact) for weight in exact]
    parts = [int(quota) for quota in quotas]
    by_remainder = sorted(range(len(parts)), key=lambda i: (parts[i] - quotas[i], i))
    for i in by_remainder[: total - sum(parts)]:
        parts[i] += 1
    return parts


def naive_owner(boundaries: list[int], position: int) -> int:
    owners = [r for r, (low, high) in enumerate(pairwise(boundaries)) if low <= position < high]
    assert len(owners) == 1
    return owners[0]


def cuts(numel: int) -> st.SearchStrategy[list[int]]:
    """Boundaries of a buffer of `numel` elements; empty slices are common."""
    inner = st.lists(st.integers(0, numel), max_size=6).map(sorted)
    return inner.map(lambda points: [0, *points, numel])


totals = st.integers(0, 10**12) | st.integers(0, 50)
integer_weights = st.lists(st.integers(0, 1000), min_size=1, max_size=30).filter(any)
float_weights = st.lists(st.floats(2**-8, 1.0) | st.just(0.0), min_size=1, max_size=30).filter(any)
wild_weights = st.lists(
    st.floats(0.0, allow_nan=False, allow_infinity=False), min_size=1, max_size=30
).filter(any)


@given(totals, integer_weights | float_weights)
def test_apportion_is_the_largest_remainder_method_exactly(total: int, weights: list[float]):
    assert _core.apportion(total, weights) == naive_apportion(total, weights)


@given(totals, wild_weights)
def test_apportion_gives_whole_quotas_for_any_weights(total: int, weights: list[float]):
    parts = _core.apportion(total, weights)
    exact = [Fraction(weight) for weight in weights]
    slack = 1 + Fraction(total, 2**60)  # weights far below the largest are rounded
    assert sum(parts) == total
    assert all(part == 0 for part, weight in zip(parts, weights, strict=True) if weight == 0)
    assert all(
        abs(part - total * weight / sum(exact)) < slack
        for part, weight in zip(parts, exact, strict=True)
    )


def test_apportion_gives_ties_to_the_lower_index():
    assert _core.apportion(2, [1, 1, 1]) == [1, 1, 0]
    assert _core.apportion(2, [1, 3]) == [1, 1]
    assert _core.apportion(4, [1, 4, 1]) == [1, 3, 0]  # remainders 2/3 each, two units left
    assert _core.apportion(10, [0.1] * 3) == [4, 3, 3]


def test_apportion_handles_the_largest_totals():
    assert _core.apportion(2**63 - 1, [1.0, 1.0]) == [2**62, 2**62 - 1]
    assert _core.apportion(2**63 - 1, [5e-324]) == [2**63 - 1]
    assert _core.apportion(7, [1.7e308, 1.7e308]) == [4, 3]


@pytest.mark.parametrize(
    ("total", "weights", "message"),
    [
        (-1, [1.0], "total must not be negative"),
        (1, [], "at least one of the 0 weights"),
        (1, [0.0, 0.0], "at least one of the 2 weights"),
        (1, [1.0, -0.5], "got -0.5 at index 1"),
        (1, [float("nan")], "finite"),
        (1, [float("inf"), 1.0], "finite"),
    ],
)
def test_apportion_refuses_invalid_arguments(total, weights, message):
    with pytest.raises(ValueError, match=message):
        _core.apportion(total, weights)


@given(
    st.integers(0, 10**9),
    st.lists(st.integers(0, 100), min_size=1, max_size=20).filter(any),
    st.sampled_from([1, 8, 64, 128]),
)
def test_boundaries_are_aligned_and_within_one_alignment_of_the_shares(units, parts, alignment):
    shares = [part / sum(parts) for part in parts]
    numel = units * alignment
    boundaries = _core.shard_boundaries(numel, shares, alignment)
    assert boundaries[0] == 0
    assert boundaries[-1] == numel
    assert boundaries == sorted(boundaries)
    assert all(boundary % alignment == 0 for boundary in boundaries)
    for (low, high), share in zip(pairwise(boundaries), shares, strict=True):
        assert abs(Fraction(high - low) - Fraction(share) * numel) < alignment * 1.001
        assert share > 0 or low == high


@pytest.mark.parametrize(
    ("numel", "shares", "alignment", "message"),
    [
        (64, [0.5, 0.4], 64, "sum to 1"),
        (64, [], 64, "sum to 1"),
        (64, [1.5, -0.5], 64, "-0.5 for rank 1"),
        (64, [float("nan"), 1.0], 64, "for rank 0"),
        (65, [1.0], 64, "multiple of the alignment, 64, got 65"),
        (-64, [1.0], 64, "got -64"),
        (64, [1.0], 0, "alignment must be at least 1"),
    ],
)
def test_boundaries_refuse_bad_shares_and_buffers(numel, shares, alignment, message):
    with pytest.raises(ValueError, match=message):
        _core.shard_boundaries(numel, shares, alignment)


@given(
    st.integers(0, 60).flatmap(lambda numel: st.tuples(st.just(numel), cuts(numel), cuts(numel)))
)
def test_transfers_move_every_element_from_its_old_owner_to_its_new_one(case):
    numel, old, new = case
    moves = _core.transfers(old, new)
    assert [(start, stop) for *_, start, stop in moves] == sorted((m[2], m[3]) for m in moves)
    assert all(a[:2] != b[:2] for a, b in pairwise(moves)), "one transfer per pair of ranks"
    assert [
        (position, source, target)
        for source, target, start, stop in moves
        for position in range(start, stop)
    ] == [(i, naive_owner(old, i), naive_owner(new, i)) for i in range(numel)]


def test_transfers_refuse_two_different_buffers():
    with pytest.raises(ValueError, match="same buffer, got 64 elements and 128"):
        _core.transfers([0, 64], [0, 128])


def test_a_hundred_billion_parameters_over_ten_thousand_ranks():
    """All counts are checked at a size at which rounding errors would show."""
    ranks, layers, width = 10_000, 56, 12_288
    layer = 12 * width**2 + width
    padded = -(-layer * layers // 64) * 64
    assert padded > 100e9
    weights = [1.0 + rank % 3 for rank in range(ranks)]
    boundaries = _core.shard_boundaries(padded, [w / sum(weights) for w in weights], 64)
    even = _core.shard_boundaries(padded, [1 / ranks] * ranks, 64)
    moves = _core.transfers(boundaries, even)
    assert sum(stop - start for *_, start, stop in moves) == padded
    assert len(moves) <= 2 * ranks
