"""The CPU operators on several threads give the bits of plain PyTorch.

Other tests use one thread, as the ranks do. The buffers here are large enough for sixteen threads
and for streaming stores. Sizes are odd, so that threads begin and end within blocks and tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from subset import choose
from test_ops import DTYPES, Draw, Shards, assert_same_bits
from torch import Tensor

from poplar import _core, ops
from poplar.ops import plain

NUMEL = (3 << 20) + 77
OPERATORS = torch.ops.poplar

pytestmark = pytest.mark.skipif(not ops.native, reason="the C++ library is not in use")


@pytest.fixture(params=choose(quick=[16], full=[2, 3, 16]))
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def assert_same_as_plain(name: str, outs: list[Tensor], call: Callable[[Any, list[Tensor]], None]):
    """Run both on copies of `outs` and compare the results."""
    ours, theirs = ([out.clone() for out in outs] for _ in "ab")
    call(getattr(OPERATORS, name), ours)
    call(plain.FUNCTIONS[name], theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert_same_bits(one, other)


def new_sums() -> Tensor:
    return torch.full((-(-NUMEL // ops.ALIGNMENT),), -1.0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("accumulate", [False, True])
def test_pack_equals_plain_for_any_threads(
    threads: int, accumulate: bool, dtype: torch.dtype
) -> None:
    draw = Draw(threads, "cpu")
    grads = [draw.values(size, DTYPES[size % 3]) for size in (1, 70_001, 0, 1_500_000, 63, 999)]
    offsets = [5, 6, 70_007, 70_100, 1_570_100, 1_600_000]
    assert_same_as_plain(
        "pack_",
        [draw.values(NUMEL, dtype)],
        lambda pack_, out: pack_(out[0], grads, offsets, 0.37, accumulate),
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ranks", [1, 3, 9])
def test_sums_over_ranks_equal_plain_for_any_threads(
    threads: int, ranks: int, dtype: torch.dtype
) -> None:
    received = list(Draw(threads, "cpu").values(ranks * NUMEL, dtype).view(ranks, NUMEL).unbind())
    assert_same_as_plain(
        "rank_sum_",
        [torch.zeros(NUMEL), new_sums()],
        lambda sum_, out: sum_(out[0], received, True, out[1]),
    )
    work_counters = torch.zeros(_core.WORK_COUNTERS_BYTES, dtype=torch.uint8)
    assert_same_as_plain(
        "rank_sum_chunks_",
        [torch.zeros(NUMEL), new_sums()],
        lambda sum_, out: sum_(out[0], received, work_counters.clone(), out[1]),
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_copy_and_block_sums_equal_plain_for_any_threads(threads: int, dtype: torch.dtype) -> None:
    flat = Draw(threads, "cpu").values(NUMEL, dtype)
    assert_same_as_plain("copy_", [torch.zeros_like(flat)], lambda copy_, out: copy_(out[0], flat))
    assert_same_bits(ops.block_sums_of_squares(flat), plain.block_sums_of_squares(flat))


def test_exact_sums_equal_plain_for_any_threads(threads: int) -> None:
    parts = (
        Draw(threads, "cpu").values(NUMEL, torch.float32).split([70_001, 1_500_000, 0, 1_575_804])
    )
    totals = [torch.arange(ops.EXACT_WORDS) for _ in "ab"]
    OPERATORS.exact_sum_(totals[0], parts)
    plain.exact_sum_(totals[1], parts)
    assert torch.equal(*totals)


@pytest.mark.parametrize("rounded", [None, *DTYPES])
def test_adamw_equals_plain_for_any_threads(threads: int, rounded: torch.dtype | None) -> None:
    shards = Shards.draw(Draw(threads, "cpu"), [70_001, 5, 1_500_000, 0, 9_000], [rounded, None])
    ours, theirs = shards.copy(), shards.copy()
    OPERATORS.adamw_(*ours.arguments(), ours.numbers(), None, None)
    plain.adamw_(*theirs.arguments(), theirs.numbers())
    for one, other in zip(ours.flat(), theirs.flat(), strict=True):
        assert_same_bits(one, other)
