"""Norms of sharded gradients: exact sums, for any shards."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from poplar import ops
from poplar.zero import gradient_norm

CPU = torch.device("cpu")


def spread(numel: int, seed: int) -> torch.Tensor:
    """Values over 60 powers of two, so that a floating-point sum rounds."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-30, 30, (numel,), generator=generator)
    return torch.ldexp(torch.randn(numel, generator=generator), exponents)


def total_of(parts: list[torch.Tensor]) -> torch.Tensor:
    total = torch.zeros(ops.EXACT_WORDS, dtype=torch.int64)
    ops.exact_sum_(total, [ops.block_sums_of_squares(part) for part in parts])
    return total


def root_of(total: torch.Tensor) -> float:
    return float(ops.exact_norm(total.view(1, -1)))


def squares_of_blocks(values: torch.Tensor) -> list[float]:
    return ops.block_sums_of_squares(values).double().tolist()


@given(st.integers(0, 2000), st.integers(0, 2**20))
def test_norm_is_the_square_root_of_the_exact_sum(numel: int, seed: int) -> None:
    values = spread(numel, seed)
    exact = math.sqrt(math.fsum(squares_of_blocks(values)))
    assert root_of(total_of([values])) == pytest.approx(exact, rel=2**-50)


@given(st.lists(st.integers(0, 30), max_size=5), st.integers(0, 2**20))
def test_shard_boundaries_change_no_bit(cuts: list[int], seed: int) -> None:
    values = spread(64 * 30 + 7, seed)
    places = [0, *sorted(64 * cut for cut in cuts), len(values)]
    parts = [values[low:high] for low, high in pairwise(places)]
    shards = torch.stack([total_of([part]) for part in reversed(parts)])
    assert float(ops.exact_norm(shards)) == root_of(total_of([values]))


def test_thousands_of_sums_can_be_added() -> None:
    values = torch.full((64 * 1000,), 1.9999999)
    one = total_of([values])
    assert root_of(one * 2**20) == root_of(one) * 2**10


def test_norm_equals_torch_to_fp32_rounding() -> None:
    values = torch.randn(10_000, generator=torch.Generator().manual_seed(0))
    ours = root_of(total_of([values]))
    assert ours == pytest.approx(float(values.double().norm()), rel=1e-6)


@pytest.mark.parametrize("tiny", [1e-19, 2.0**-70, 1e-21, 0.0])
def test_subnormal_squares_are_counted(tiny: float) -> None:
    values = torch.full((64,), tiny)
    assert root_of(total_of([values])) == math.sqrt(squares_of_blocks(values)[0])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e30])
def test_nonfinite_value_makes_the_norm_infinite(bad: float) -> None:
    values = torch.zeros(200)
    values[130] = bad
    assert root_of(total_of([torch.ones(64), values])) == math.inf


def test_norm_of_no_values_is_zero() -> None:
    empty = torch.zeros(0)
    assert root_of(total_of([])) == 0.0
    assert root_of(total_of([empty])) == 0.0
    assert gradient_norm._largest([empty], CPU) == 0.0
    assert gradient_norm._power_sum([empty], 3.0, CPU) == 0.0
