"""The CPU operators on several threads give the bits of plain PyTorch.

Other tests use one thread, as the ranks do. The buffers here are large enough for sixteen threads
and for streaming stores. Sizes are odd, so that threads begin and end within blocks and tensors.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from operator_cases import DTYPES, Draw, Implementation, Shards, assert_same_bits, new_sums
from subset import choose

from poplar import _core, ops
from poplar.ops import plain

NUMEL = (3 << 20) + 77
MADE = Implementation(torch.ops.poplar)

pytestmark = pytest.mark.skipif(not ops.native, reason="the C++ library is not in use")


@pytest.fixture(params=choose(quick=[16], full=[2, 3, 16]))
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("accumulate", [False, True])
def test_pack_equals_plain_for_any_threads(
    threads: int, accumulate: bool, dtype: torch.dtype
) -> None:
    draw = Draw(threads, "cpu")
    grads = [draw.values(size, DTYPES[size % 3]) for size in (1, 70_001, 0, 1_500_000, 63, 999)]
    offsets = [5, 6, 70_007, 70_100, 1_570_100, 1_600_000]
    MADE.check("pack_", draw.values(NUMEL, dtype), grads, offsets, 0.37, accumulate)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ranks", [1, 3, 9])
def test_sums_over_ranks_equal_plain_for_any_threads(
    threads: int, ranks: int, dtype: torch.dtype
) -> None:
    received = list(Draw(threads, "cpu").values(ranks * NUMEL, dtype).view(ranks, NUMEL).unbind())
    out, sums = torch.zeros(NUMEL), new_sums(NUMEL)
    MADE.check("rank_sum_", out, received, True, sums, written=(0, 3))
    counters = torch.zeros(_core.WORK_COUNTERS_BYTES, dtype=torch.uint8)
    MADE.operators.rank_sum_chunks_(out, received, counters, sums)
    expected, expected_sums = torch.zeros(NUMEL), new_sums(NUMEL)
    plain.rank_sum_(expected, received, False, expected_sums)
    assert_same_bits(out, expected)
    assert_same_bits(sums, expected_sums)


@pytest.mark.parametrize("dtype", DTYPES)
def test_copy_and_block_sums_equal_plain_for_any_threads(threads: int, dtype: torch.dtype) -> None:
    flat = Draw(threads, "cpu").values(NUMEL, dtype)
    MADE.check("copy_", torch.zeros_like(flat), flat)
    MADE.check("block_sums_of_squares", flat, written=())


def test_exact_sums_equal_plain_for_any_threads(threads: int) -> None:
    values = Draw(threads, "cpu").values(NUMEL, torch.float32)
    parts = list(values.split([70_001, 1_500_000, 0, 1_575_804]))
    MADE.check("exact_sum_", torch.arange(ops.EXACT_WORDS), parts)


@pytest.mark.parametrize("rounded", [None, *DTYPES])
def test_adamw_equals_plain_for_any_threads(threads: int, rounded: torch.dtype | None) -> None:
    shards = Shards.draw(Draw(threads, "cpu"), [70_001, 5, 1_500_000, 0, 9_000], [rounded, None])
    MADE.check_adamw(shards)
