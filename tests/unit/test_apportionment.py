"""Whole numbers in proportion to weights, against a naive reference implementation."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poplar.values.apportionment import apportion


def naive_apportion(total: int, weights: list[float]) -> list[int]:
    exact = [Fraction(weight) for weight in weights]
    quotas = [total * weight / sum(exact) for weight in exact]
    parts = [int(quota) for quota in quotas]
    by_remainder = sorted(range(len(parts)), key=lambda i: (parts[i] - quotas[i], i))
    for i in by_remainder[: total - sum(parts)]:
        parts[i] += 1
    return parts


totals = st.integers(0, 10**12) | st.integers(0, 50)
integers = st.lists(st.integers(0, 1000), min_size=1, max_size=30)
floats = st.lists(st.floats(0.0, allow_infinity=False), min_size=1, max_size=30)


@given(totals, (integers | floats).filter(any))
def test_apportion_is_the_largest_remainder_method_exactly(total: int, weights: list[float]):
    parts = apportion(total, weights)
    assert parts == naive_apportion(total, weights)
    assert sum(parts) == total
    assert all(part == 0 for part, weight in zip(parts, weights, strict=True) if weight == 0)


def test_apportion_gives_ties_to_the_lower_index():
    assert apportion(2, [1, 1, 1]) == [1, 1, 0]
    assert apportion(2, [1, 3]) == [1, 1]
    assert apportion(4, [1, 4, 1]) == [1, 3, 0]  # remainders 2/3 each, two units left
    assert apportion(10, [0.1] * 3) == [4, 3, 3]


def test_apportion_handles_the_largest_totals():
    assert apportion(2**63 - 1, [1.0, 1.0]) == [2**62, 2**62 - 1]
    assert apportion(2**63 - 1, [5e-324]) == [2**63 - 1]
    assert apportion(7, [1.7e308, 1.7e308]) == [4, 3]


@pytest.mark.parametrize(
    "weights", [[], [0.0, 0.0], [1.0, -0.5], [float("nan"), 1.0], [float("inf"), 1.0]]
)
def test_apportion_refuses_weights_without_a_proportion(weights):
    with pytest.raises(ValueError, match="weights must be finite and at least 0, and one of them"):
        apportion(1, weights)
