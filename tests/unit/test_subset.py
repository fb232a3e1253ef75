"""The subset that `make test` runs still covers every pair of parameter values."""

from __future__ import annotations

from collections import Counter
from itertools import combinations, product

import pytest
from subset import FULL_VARIABLE, choose, covering_subset, stage_of


def groups(case: dict[str, int], size: int) -> set[object]:
    return set(combinations(sorted(case.items()), size))


@pytest.mark.parametrize("sizes", [(4, 4, 4), (4, 3, 2, 2)])
def test_subset_of_several_parameters_covers_every_pair_of_values(sizes):
    cases = [dict(zip("abcd", case, strict=False)) for case in product(*map(range, sizes))]
    selected = [cases[number] for number in covering_subset(cases)]
    assert set().union(*(groups(c, 2) for c in selected)) == set().union(
        *(groups(c, 2) for c in cases)
    )
    assert len(selected) <= len(cases) / 2


def test_subset_of_two_parameters_covers_every_value_and_pairs_them_evenly():
    cases = [{"stage": stage, "case": case} for case in range(8) for stage in range(4)]
    selected = [cases[number] for number in covering_subset(cases)]
    assert sorted(case["case"] for case in selected) == list(range(8))
    assert sorted(case["stage"] for case in selected) == sorted([*range(4)] * 2)


def test_subset_of_one_parameter_has_every_case():
    assert covering_subset([{"a": 0}, {"a": 1}, {"a": 2}]) == {0, 1, 2}


def test_names_of_one_parametrize_count_as_one_parameter():
    assert covering_subset([{"a": 0, "b": 0}, {"a": 1, "b": 1}]) == {0, 1}
    cases = [{"a": i, "b": i, "stage": s} for i in range(3) for s in range(3)]
    assert len(covering_subset(cases)) == 3


def test_optional_values_are_covered_only_where_other_values_need_them():
    cases = [{"stage": stage} for stage in range(4)]
    optional = [("stage", 1), ("stage", 2)]
    assert covering_subset(cases, optional) == {0, 3}
    cases = [{"stage": 0, "what": 0}, {"stage": 1, "what": 1}, {"stage": 2, "what": 1}]
    assert len(covering_subset(cases, optional)) == 2


def test_half_of_the_tests_cover_the_highest_stage_and_others_all_stages():
    chosen = Counter(stage_of(f"test_{number}", range(4)) for number in range(600))
    assert chosen.keys() == {0, 1, 2, 3}
    assert chosen[3] == pytest.approx(300, abs=60)
    assert min(chosen.values()) > 60
    assert stage_of("test", [2]) == 2


def test_subset_of_combinations_with_holes_covers_every_pair():
    cases = [{"a": 0, "b": 0, "c": 0}, {"a": 0, "b": 1, "c": 1}, {"a": 1, "b": 1, "c": 0}]
    assert covering_subset(cases) == {0, 1, 2}


def test_random_cases_by_suite(monkeypatch):
    monkeypatch.setenv(FULL_VARIABLE, "0")
    assert choose(quick=3, full=30) == 3
    monkeypatch.setenv(FULL_VARIABLE, "1")
    assert choose(quick=3, full=30) == 30
