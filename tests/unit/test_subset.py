"""The subset that `make test` runs still covers every pair of parameter values."""

from __future__ import annotations

from itertools import combinations, product

import pytest
from subset import FULL_VARIABLE, choose, pairwise_subset


def pairs(case: dict[str, int]) -> set[object]:
    return set(combinations(sorted(case.items()), 2))


@pytest.mark.parametrize("sizes", [(2, 2), (4, 3), (4, 4, 4), (4, 3, 2, 2)])
def test_pairwise_subset_covers_every_pair_with_fewer_cases(sizes):
    cases = [dict(zip("abcd", case, strict=False)) for case in product(*map(range, sizes))]
    kept = pairwise_subset(cases)
    assert set().union(*(pairs(cases[number]) for number in kept)) == set().union(
        *map(pairs, cases)
    )
    if len(sizes) > 2:
        assert len(kept) <= 0.5 * len(cases)


def test_pairwise_subset_keeps_every_value_of_a_single_parameter():
    assert pairwise_subset([{"a": 0}, {"a": 1}, {"a": 2}]) == {0, 1, 2}


def test_pairwise_subset_of_combinations_with_holes():
    cases = [{"a": 0, "b": 0, "c": 0}, {"a": 0, "b": 1, "c": 1}, {"a": 1, "b": 1, "c": 0}]
    assert pairwise_subset(cases) == {0, 1, 2}


def test_random_cases_by_suite(monkeypatch):
    monkeypatch.setenv(FULL_VARIABLE, "0")
    assert choose(quick=3, full=30) == 3
    monkeypatch.setenv(FULL_VARIABLE, "1")
    assert choose(quick=3, full=30) == 30
