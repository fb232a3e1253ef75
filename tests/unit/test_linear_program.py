"""The linear program solver is compared with SciPy's."""

from __future__ import annotations

import random

import pytest
from scipy.optimize import linprog

from poplar import _core
from poplar.planner.shard_allocation import equal, minimize


def solve(costs, rows, bounds, simplex):
    limits = [(bound, dict(enumerate(row))) for row, bound in zip(rows, bounds, strict=True)]
    if simplex:
        limits += equal(1.0, dict.fromkeys(range(len(costs)), 1.0))
    return minimize(costs, limits)


@pytest.mark.parametrize("first", range(0, 300, 100))
def test_the_minimum_matches_scipy(first):
    for seed in range(first, first + 100):
        draw = random.Random(seed)
        n, m, simplex = draw.randint(1, 10), draw.randint(1, 30), draw.random() < 0.7
        costs = [draw.choice((0.0, draw.random())) for _ in range(n)]
        rows = [
            [draw.choice((0.0, 0.0, draw.uniform(-1, 1), -1.0, 1.0)) for _ in range(n)]
            for _ in range(m)
        ]
        bounds = [draw.choice((0.0, draw.uniform(-0.3, 2.0))) for _ in range(m)]
        found = solve(costs, rows, bounds, simplex)
        equal = {"A_eq": [[1.0] * n], "b_eq": [1.0]} if simplex else {}
        known = linprog(costs, A_ub=rows, b_ub=bounds, **equal)
        assert (found is None) == (known.status == 2), seed
        if found is not None:
            value, variables = found
            assert value == pytest.approx(known.fun, abs=1e-9), seed
            for row, bound in zip(rows, bounds, strict=True):
                used = sum(a * x for a, x in zip(row, variables, strict=True))
                assert used <= bound + 1e-9, seed


def test_a_degenerate_program_terminates():
    rows = [[1.0 if j <= i else -1.0 for j in range(12)] for i in range(12)] * 4
    found = solve([0.0] * 11 + [1.0], rows, [0.0] * 48, simplex=True)
    assert found is None or found[0] >= 0.0


def test_a_program_without_rows_is_solved():
    assert minimize([1.0, 0.0], []) == (0.0, [0.0, 0.0])


def test_negative_costs_raise():
    with pytest.raises(ValueError, match=r"costs must not be negative, got \[-1\.0\]"):
        minimize([-1.0], [])


def test_unknown_variables_and_missing_bounds_raise():
    with pytest.raises(ValueError, match="minimise: variable 1 of 1"):
        _core.minimise([1.0], [{1: 1.0}], [0.0])
    with pytest.raises(ValueError, match="minimise: 1 rows and 2 bounds"):
        _core.minimise([1.0], [{0: 1.0}], [0.0, 1.0])
