"""Slow tests take turns: the parts together have all of them, each about as many."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import slow_tests
from slow_tests import ALL, PARTS, in_other_parts, listed, part_of_commit

ROOT = Path(__file__).resolve().parents[2]


def test_parts_are_disjoint_and_together_have_every_case():
    tests = ["a", "a", "b", "fast", "c", "a", "a", "d", "d"]
    run = [
        set(range(len(tests))) - in_other_parts(tests, ["d", "c", "b", "a"], str(part))
        for part in range(PARTS)
    ]
    assert set.union(*run) == set(range(len(tests)))
    slow = [{number for number in part if tests[number] != "fast"} for part in run]
    assert sum(map(len, slow)) == len(set.union(*slow))
    assert all(tests.index("fast") in part for part in run)
    assert all(sum(tests[number] == "a" for number in part) <= 1 for part in run)


def test_the_part_with_all_leaves_nothing_out():
    assert in_other_parts(["a", "b"], ["a", "b"], ALL) == set()


def test_a_commit_has_one_part_and_a_folder_without_commits_the_first(tmp_path):
    assert part_of_commit(ROOT) == part_of_commit(ROOT / "tests")
    assert part_of_commit(tmp_path) == "0"


@functools.cache
def statements_of(file: str) -> list[ast.stmt]:
    return ast.parse((ROOT / file).read_text()).body


def test_the_list_is_sorted_and_names_tests_that_exist():
    for test in listed():
        file, *scopes, function = test.split("::")
        inside = statements_of(file)
        for scope in scopes:
            inside = next(c for c in inside if isinstance(c, ast.ClassDef) and c.name == scope).body
        assert function in {f.name for f in inside if isinstance(f, ast.FunctionDef)}, test
    seconds = [float(line.split()[0]) for line in slow_tests.LIST.read_text().splitlines()]
    assert seconds == sorted(seconds, reverse=True)
    assert min(seconds) >= slow_tests.SLOW_SECONDS


def test_only_slow_tests_are_saved(tmp_path):
    slow_tests.save({"f::a": [1.0, 3.0], "f::b": [0.1], "f::c": [9.0]}, tmp_path / "list")
    assert listed(tmp_path / "list") == ["f::c", "f::a"]
