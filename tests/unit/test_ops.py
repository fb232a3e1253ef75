"""Every operator: C++ against plain PyTorch bit by bit, and plain PyTorch against numpy loops.

The cases that other implementations share are in `operator_cases.py`.
"""

from __future__ import annotations

import inspect
import math
import os
import re
import shutil
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from operator_cases import (
    CASES,
    DTYPES,
    NORMS,
    Draw,
    Implementation,
    Shards,
    assert_same_bits,
    new_sums,
    totals_of,
)
from subset import choose
from torch import Tensor

from poplar import _core, ops
from poplar.ops import plain as plain_ops
from poplar.zero import gradient_norm

ROOT = Path(__file__).resolve().parents[2]
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
STREAMED = 4 << 20
"""Bytes from which on the C++ kernels use streaming stores."""
PLAIN = plain_ops.FUNCTIONS
RULE = ops.AdamWRule(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, step=3.0)

pytestmark = pytest.mark.parametrize("device", DEVICES)


def naive_pack(
    bucket: Tensor, grads: list[Tensor], offsets: list[int], weight: float, add: bool
) -> Tensor:
    """In numpy, one element after the other: fp32 products, then fp32 sums."""
    old = bucket.float().cpu().numpy()
    result = old.copy() if add else np.zeros_like(old)
    for grad, offset in zip(grads, offsets, strict=True):
        for i, value in enumerate(grad.float().cpu().flatten().numpy()):
            product = np.float32(weight) * value
            result[offset + i] = old[offset + i] + product if add else product
    return torch.from_numpy(result).to(bucket.dtype)


def dispatched(device: str) -> Implementation:
    """What torch runs on tensors of the device."""
    return Implementation(torch.ops.poplar, device)


def free_bytes(device: str) -> int:
    if device == "cuda":
        return torch.cuda.mem_get_info()[0]
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))


def test_built_libraries_are_used(device):
    built = (Path(_core.__file__).parent / "libpoplar_ops.so").exists()
    assert ops.native == (built and os.environ.get("POPLAR_OPS") != "off")
    assert "operators on CPU: " in ops.describe()
    if not ops.native:
        pytest.skip(f"plain PyTorch is compared with itself here: {ops.describe()}")


@pytest.mark.parametrize("case", CASES)
def test_every_case_gives_the_bits_of_plain_pytorch(device, case):
    CASES[case](dispatched(device))


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_pack_rounds_the_product_and_the_sum(device, dtype, accumulate):
    draw = Draw(100, device)
    grads, offsets, numel = draw.tensors(20)
    before = draw.values(numel, dtype)
    actual = before.clone()
    ops.pack_(actual, grads, offsets, 1 / 3, accumulate)
    expected = naive_pack(before, grads, offsets, 1 / 3, accumulate)
    assert_same_bits(actual.cpu(), expected)


def test_pack_writes_every_element_unless_it_accumulates(device):
    grads = [torch.ones(3, device=device), torch.ones(2, device=device)]
    bucket = torch.full((10,), float("nan"), device=device)
    ops.pack_(bucket, grads, [1, 6], 0.5)
    assert bucket.tolist() == [0, 0.5, 0.5, 0.5, 0, 0, 0.5, 0.5, 0, 0]
    ops.pack_(bucket, grads, [0, 8], 1.0, accumulate=True)
    assert bucket.tolist() == [1, 1.5, 1.5, 0.5, 0, 0, 0.5, 0.5, 1, 1]
    ops.pack_(bucket, [], [], 1.0)
    assert bucket.tolist() == [0] * 10


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("numel", [100, STREAMED])
def test_pack_in_place(device, numel, accumulate):
    before = Draw(5, device).values(numel, torch.float32)
    buckets = [before.clone() for _ in "ab"]
    for pack_, bucket in zip((ops.pack_, PLAIN["pack_"]), buckets, strict=True):
        pack_(bucket, [bucket[3:20], bucket[30:]], [3, 30], 0.5, accumulate)
    assert_same_bits(*buckets)
    finite = before[30:].isfinite()
    wanted = before[30:] * 1.5 if accumulate else before[30:] * 0.5
    torch.testing.assert_close(buckets[0][30:][finite], wanted[finite])


@pytest.mark.parametrize("accumulate", [False, True])
def test_pack_of_thousands_of_tensors_and_large_buckets(device, accumulate):
    draw = Draw(7, device)
    grads = [draw.values(i % 97, DTYPES[i % 3]) for i in range(3000)]
    grads.append(draw.values(300_001, torch.float32))
    numels = [grad.numel() for grad in grads]
    offsets = [sum(numels[:i]) + i // 2 for i in range(len(numels))]
    before = draw.values(offsets[-1] + numels[-1] + 40_000, torch.float32)
    dispatched(device).check("pack_", before, grads, offsets, 0.37, accumulate)


@pytest.mark.full
@pytest.mark.slow
def test_pack_of_more_than_2_to_the_31_elements(device):
    """One gradient, many times, so that only the bucket is large."""
    numel, times = (1 << 26) + 64, 33
    if free_bytes(device) < 12 << 30:
        pytest.skip("12 GiB of memory are not free here")
    grad = torch.arange(numel, device=device).remainder_(2048).half()
    bucket = torch.empty(times * numel, dtype=torch.float16, device=device)
    assert bucket.numel() > 2**31
    ops.pack_(bucket, [grad] * times, [i * numel for i in range(times)], 0.5)
    expected = grad * 0.5
    assert all(torch.equal(part, expected) for part in bucket.view(times, -1))
    out = torch.empty(numel, device=device)
    ops.rank_sum_(out, list(bucket.view(times, -1).unbind()))
    assert torch.equal(out, expected.float() * times)  # small integers and halves: exact


@pytest.mark.parametrize("numel", [STREAMED // 4, STREAMED // 2 + 5, STREAMED + 70])
@pytest.mark.parametrize("dtype", DTYPES)
def test_large_pack_gives_the_same_bits(device, dtype, numel):
    draw = Draw(numel, device)
    sizes = [numel // 3, 1, numel // 2]
    grads = [draw.values(size, grad) for size, grad in zip(sizes, DTYPES, strict=True)]
    offsets = [3, 10 + numel // 3, 20 + numel // 3]
    expected = torch.empty(numel, dtype=dtype, device=device)
    plain_ops.pack_(expected, grads, offsets, 0.3)
    for shift in (0, 8, 1):  # the last one is not aligned for streaming
        bucket = torch.full((numel + shift,), 5.0, dtype=dtype, device=device)[shift:]
        ops.pack_(bucket, grads, offsets, 0.3)
        assert_same_bits(bucket, expected)


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shift", [0, 1])
def test_large_rank_sum_gives_the_same_bits(device, dtype, shift, accumulate):
    draw, numel = Draw(3, device), STREAMED // 4 + 77
    received = list(draw.values(3 * numel, dtype).view(3, numel).unbind())
    out = draw.values(numel + shift, torch.float32)[shift:]
    sums = new_sums(numel, device)
    dispatched(device).check("rank_sum_", out, received, accumulate, sums, written=(0, 3))


@pytest.mark.parametrize("numel", [0, 5, _core.CHUNK, 3 * _core.CHUNK + 5])
@pytest.mark.parametrize("plain", [False, True])
def test_rank_sum_chunks_skips_chunks_of_other_processes(device, numel, plain):
    draw = Draw(1, device)
    received = list(draw.values(3 * numel, torch.float32).view(3, numel).unbind())
    expected, out = torch.empty(numel, device=device), torch.zeros(numel, device=device)
    ops.rank_sum_(expected, received)
    work_counters = torch.zeros(_core.WORK_COUNTERS_BYTES, dtype=torch.uint8, device=device)
    work_counters.view(torch.int32)[0] = 1
    rank_sum_chunks = PLAIN["rank_sum_chunks_"] if plain else ops.rank_sum_chunks_
    rank_sum_chunks(out, received, work_counters)
    assert not out[: _core.CHUNK].any()
    assert_same_bits(out[_core.CHUNK :], expected[_core.CHUNK :])
    chunks = -(-numel // _core.CHUNK)
    assert work_counters.view(torch.int32)[2] == max(chunks - 1, 0), "done by this call"
    before = out.clone()
    rank_sum_chunks(out, received, work_counters)
    assert_same_bits(out, before)


@pytest.mark.parametrize("numel", [0, 1, 15, 64, 1025, STREAMED + 13])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8])
@pytest.mark.parametrize("shift", [0, 1])
def test_copy_writes_exactly_its_target(device, dtype, numel, shift):
    source = torch.randint(0, 100, (numel,), device=device).to(dtype)
    around = torch.full((numel + 2,), 101, device=device).to(dtype)
    target = around[shift : numel + shift]
    ops.copy_(target, source)
    assert torch.equal(target, source)
    assert (around[:shift] == 101).all()
    assert (around[numel + shift :] == 101).all()


def test_rank_sum_of_unaligned_parts(device):
    draw = Draw(2, device)
    parts = [draw.values(size, torch.bfloat16)[:700] for size in (700, 900, 701, 800)]
    scattered, together = torch.empty(2, 700, device=device)
    ops.rank_sum_(scattered, [parts[1], parts[0], parts[3], parts[2], parts[0]])
    ops.rank_sum_(together, list(torch.stack([parts[i] for i in (1, 0, 3, 2, 0)]).unbind()))
    assert_same_bits(scattered, together)


@pytest.mark.parametrize("place", [None, 0, 256, 599])
@pytest.mark.parametrize("accumulate", [False, True])
def test_more_ranks_than_one_launch_holds_are_added_in_order(device, accumulate, place):
    draw = Draw(4, device)
    parts = list(draw.values(600 * 70, torch.float32).view(600, 70).unbind())
    before = draw.values(70, torch.float32) if place is None else parts[place].clone()
    outs = []
    for sum_ in (ops.rank_sum_, PLAIN["rank_sum_"]):
        out, sums = before.clone(), torch.zeros(2, device=device)
        given = [out if i == place else part for i, part in enumerate(parts)]
        sum_(out, given, accumulate, sums)
        outs.append((out, sums))
    assert_same_bits(outs[0][0], outs[1][0])
    assert_same_bits(outs[0][1], outs[1][1])


def test_rank_sum_adds_in_rank_order_and_accumulates_last(device):
    big = 2.0**24  # where fp32 can no longer count by ones
    out = torch.zeros(1, device=device)
    ops.rank_sum_(out, list(torch.tensor([big, 1.0, 1.0], device=device).split(1)))
    assert out.item() == big
    ops.rank_sum_(out, list(torch.tensor([1.0, 1.0, big], device=device).split(1)))
    assert out.item() == big + 2
    out.fill_(1.0)
    parts = list(torch.tensor([1.0, big], device=device).split(1))
    ops.rank_sum_(out, parts, accumulate=True)
    assert out.item() == big, "1 + (1 + 2^24), not (1 + 1) + 2^24"


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16])
def test_narrowing_rounds_to_nearest_even(device, narrow):
    """Every value of the narrow dtype, the midpoints between consecutive values, and just beside
    them.
    """
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(narrow).float()
    integers = every.view(torch.int32)
    unit = 1 << 16 if narrow == torch.bfloat16 else 1 << 13
    flat = torch.cat(
        [
            (integers + delta).view(torch.float32)
            for delta in (-1, 0, 1, unit // 2 - 1, unit // 2, unit // 2 + 1)
        ]
        + [torch.linspace(-1, 1, 100_001) * 6.2e-5, torch.linspace(65_400, 65_600, 1001)]
    ).to(device)
    out = torch.empty(flat.shape, dtype=narrow, device=device)
    ops.pack_(out, [flat], [0], 1.0)
    assert_same_bits(out.cpu(), flat.cpu().to(narrow))
    back = torch.empty_like(flat)
    ops.pack_(back, [out], [0], 1.0)
    assert_same_bits(back.cpu(), out.cpu().float())


@pytest.mark.parametrize("dtype", DTYPES)
def test_large_block_sums_give_the_same_bits(device, dtype):
    flat = Draw(1, device).values(300_000, dtype)
    dispatched(device).check("block_sums_of_squares", flat, written=())


def test_block_sums_use_the_halving_tree_in_any_shard(device):
    flat = Draw(3, device).values(64 * 9 + 5, torch.float32).nan_to_num(0, 1, 1).clamp(-1e4, 1e4)
    sums = ops.block_sums_of_squares(flat)
    for block, values in enumerate(flat.cpu().split(64)):
        lanes = [np.float32(value) * np.float32(value) for value in values.numpy()]
        lanes += [np.float32(0)] * (64 - len(lanes))
        while len(lanes) > 1:
            half = len(lanes) // 2
            lanes = [lanes[i] + lanes[i + half] for i in range(half)]
        assert sums[block].item() == lanes[0]
    exact = flat.double().square().sum().item()
    assert sums.double().sum().item() == pytest.approx(exact, rel=1e-6)
    cut = torch.cat([ops.block_sums_of_squares(flat[:192]), ops.block_sums_of_squares(flat[192:])])
    assert_same_bits(cut, sums)


def test_rank_sum_chunks_computes_block_sums(device):
    if device != "cpu":
        pytest.skip("work_counters are of CPU ranks")
    numel = 2 * _core.CHUNK + 100
    parts = [Draw(seed, device).values(numel, torch.float32) for seed in range(3)]
    work_counters = torch.zeros(_core.WORK_COUNTERS_BYTES, dtype=torch.uint8)
    work_counters.view(torch.int32)[0] = 1  # another process has the first chunk
    sums, out = torch.zeros(-(-numel // 64)), torch.zeros(numel)
    ops.rank_sum_chunks_(out, parts, work_counters, sums)
    blocks = _core.CHUNK // 64
    assert not sums[:blocks].any()
    assert_same_bits(sums[blocks:], plain_ops.block_sums_of_squares(out)[blocks:])


# AdamW.


def exact(total: Tensor) -> Fraction:
    """The value of an exact sum, by its definition."""
    return sum(
        (
            word * Fraction(2) ** (28 * place - 149)
            for place, word in enumerate(total[:-1].tolist())
        ),
        Fraction(0),
    )


@pytest.mark.parametrize("numel", [0, 1, 64, 5000, 300_001])
def test_exact_sums_are_exact_and_skip_nonfinite_values(device, numel):
    values = Draw(numel, device).values(numel, torch.float32)
    before = torch.arange(ops.EXACT_WORDS, device=device)
    dispatched(device).check("exact_sum_", before, [values])
    total = before.clone()
    ops.exact_sum_(total, [values])
    finite = values[values.isfinite()].tolist()
    assert exact(total) - exact(before) == sum(map(Fraction, finite), Fraction(0))
    assert total[-1] - before[-1] == numel - len(finite)


@pytest.mark.parametrize(
    "value",
    [0.0, -0.0, 1e-45, -1e-45, 1.17e-38, 2.0**-126, 1.0, -1 / 3, 65504.0, 2.0**127 * 1.9999998],
)
def test_exact_sums_hold_every_magnitude(device, value):
    values = torch.full((3,), value, device=device)
    total = torch.zeros(ops.EXACT_WORDS, dtype=torch.int64, device=device)
    ops.exact_sum_(total, [values])
    assert exact(total) == 3 * Fraction(values[0].item())
    assert total[-1] == 0


def test_exact_sums_do_not_depend_on_order_or_division(device):
    values = Draw(0, device).values(70_000, torch.float32)
    whole = torch.zeros(ops.EXACT_WORDS, dtype=torch.int64, device=device)
    ops.exact_sum_(whole, [values])
    parts = values[torch.randperm(70_000).to(device)].split([1, 40_000, 0, 29_999])
    totals = [torch.zeros_like(whole) for _ in parts]
    for total, part in zip(totals, parts, strict=True):
        ops.exact_sum_(total, [part])
    assert torch.equal(torch.stack(totals).sum(0), whole)
    at_once = torch.zeros_like(whole)
    ops.exact_sum_(at_once, parts)
    assert torch.equal(at_once, whole)


@pytest.mark.parametrize("count", [0, 1, 1634, 1635, 4000])
def test_exact_sum_of_more_tensors_than_one_launch_holds(device, count):
    draw = Draw(count, device)
    parts = [draw.values(i % 7 * 40, torch.float32) for i in range(count)]
    if parts:
        parts[count // 2] = draw.values(40_000, torch.float32)
    total, plain = torch.zeros(2, ops.EXACT_WORDS, dtype=torch.int64, device=device).unbind()
    ops.exact_sum_(total, parts)
    plain_ops.exact_sum_(plain, [torch.cat(parts)] if parts else [])
    assert torch.equal(total, plain)


@pytest.mark.parametrize("rows", [0, 1, 2, 7])
def test_norm_is_the_square_root_of_the_exact_sum(device, rows):
    totals = totals_of(Draw(rows, device), rows)
    norm = ops.exact_norm(totals)
    assert norm.shape == ()
    wanted = sum((exact(row[: ops.EXACT_WORDS]) for row in totals), Fraction(0))
    assert norm.item() == pytest.approx(math.sqrt(wanted), rel=2**-51)


def test_norm_depends_on_the_value_of_the_sum_only(device):
    spread = torch.zeros(1, ops.EXACT_WORDS, dtype=torch.int64, device=device)
    spread[0, 4:7] = torch.tensor([-(2**61), 2**40 + 5, 2**62], device=device)
    carried = spread.clone()
    carried[0, 4] += 2**61 + 2**33
    carried[0, 5] -= 2**33 + 2**5
    assert exact(spread[0]) == exact(carried[0])
    assert torch.equal(ops.exact_norm(spread), ops.exact_norm(carried))


def test_norm_of_nonfinite_values_is_infinite(device):
    totals = totals_of(Draw(0, device), 3)
    totals[1, ops.EXACT_WORDS - 1] = 2
    assert ops.exact_norm(totals).item() == math.inf


def norm_of(parts: list[Tensor], device: str, times: int = 1) -> float:
    """The norm of some shards, whose exact sum is added so many times."""
    total = torch.zeros(ops.EXACT_WORDS, dtype=torch.int64, device=device)
    ops.exact_sum_(total, [ops.block_sums_of_squares(part) for part in parts])
    return float(ops.exact_norm(times * total.view(1, -1)))


def test_thousands_of_sums_can_be_added(device):
    values = torch.full((64 * 1000,), 1.9999999, device=device)
    assert norm_of([values], device, times=2**20) == norm_of([values], device) * 2**10


@pytest.mark.parametrize("tiny", [1e-19, 2.0**-70, 1e-21, 0.0])
def test_subnormal_squares_are_counted(device, tiny):
    values = torch.full((64,), tiny, device=device)
    assert norm_of([values], device) == math.sqrt(ops.block_sums_of_squares(values).item())


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e30])
def test_norm_is_infinite_if_a_value_or_its_square_is_not_finite(device, bad):
    values = torch.zeros(200, device=device)
    values[130] = bad
    assert norm_of([torch.ones(64, device=device), values], device) == math.inf


def test_norm_of_no_values_is_zero(device):
    empty = torch.zeros(0, device=device)
    assert norm_of([], device) == norm_of([empty], device) == 0.0
    assert gradient_norm._largest([empty], torch.device(device)) == 0.0
    assert gradient_norm._power_sum([empty], 3.0, torch.device(device)) == 0.0


@pytest.mark.parametrize("scale", [None, 1 / 1024, 3.7])
@pytest.mark.parametrize("max_norm", [0.0, 0.1, math.inf])
def test_clip_coefficient_matches_torch(device, max_norm, scale):
    factor = None if scale is None else torch.tensor(scale, dtype=torch.float64, device=device)
    for value in NORMS:
        norm = torch.tensor([value], dtype=torch.float64, device=device)
        actual = ops.clip_coefficient(norm, max_norm, factor)
        assert actual.shape == ()
        gradient = torch.ones(1, dtype=torch.float64)
        parameter = torch.nn.Parameter(gradient)
        parameter.grad = gradient.clone()
        total = torch.tensor(value * (scale or 1.0), dtype=torch.float64)
        torch.nn.utils.clip_grads_with_norm_(parameter, max_norm, total)
        expected = parameter.grad[0]
        torch.testing.assert_close(actual.cpu(), expected, rtol=1e-7, atol=0.0, equal_nan=True)


@pytest.mark.parametrize("rounded", [None, *DTYPES])
@pytest.mark.parametrize("maximize", [False, True])
def test_large_adamw_gives_the_same_bits(device, rounded, maximize):
    shards = Shards.draw(Draw(1, device), [70_000], [rounded])
    shards.rules[0] = RULE._replace(maximize=maximize)
    dispatched(device).check_adamw(shards, torch.tensor([0.37], device=device))


@pytest.mark.parametrize("sizes", [[70], [1100, 0, 5], [0]])
@pytest.mark.parametrize("count", [355, 356, 1000])
def test_adamw_of_more_shards_than_one_launch_holds(device, count, sizes):
    sizes = [sizes[i % len(sizes)] for i in range(count)]
    shards = Shards.draw(Draw(count, device), sizes, [None, torch.float16])
    dispatched(device).check_adamw(shards)


def test_adamw_without_shards(device):
    ops.adamw_([], [], [], [], [], [])


@pytest.mark.parametrize("beta1", [0.0, 0.3, 0.6])
def test_adamw_keeps_small_gradients_at_any_decay(device, beta1):
    ours = [torch.zeros(100, device=device) for _ in range(3)]
    theirs = torch.zeros(100, device=device, requires_grad=True)
    optimizer = torch.optim.AdamW([theirs], lr=0.01, betas=(beta1, 0.9))
    rule = ops.AdamWRule(0.01, beta1, 0.9, 1e-8, 0.01, 0.0)
    for step, size in enumerate([1e4, 1e-4, 3.0], start=1):
        theirs.grad = torch.full((100,), size, device=device)
        values, mean, square = ([tensor] for tensor in ours)
        ops.adamw_(values, [theirs.grad], mean, square, [None], [rule._replace(step=step)])
        optimizer.step()
        persistent = optimizer.state[theirs]
        torch.testing.assert_close(ours[1], persistent["exp_avg"], rtol=1e-6, atol=0)
        torch.testing.assert_close(ours[0], theirs.detach(), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_adamw_matches_torch(device, weight_decay):
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(1000, generator=generator)
    theirs = start.clone().to(device).requires_grad_()
    optimizer = torch.optim.AdamW([theirs], lr=0.01, weight_decay=weight_decay)
    values, mean, square = (start.clone().to(device), *torch.zeros(2, 1000, device=device).unbind())
    for step in range(1, 21):
        gradient = torch.randn(1000, generator=generator).to(device)
        theirs.grad = gradient * 0.5
        optimizer.step()
        rule = ops.AdamWRule(0.01, 0.9, 0.999, 1e-8, weight_decay, step)
        scale = torch.tensor(0.5, device=device)
        ops.adamw_([values], [gradient], [mean], [square], [None], [rule], scale=scale)
    torch.testing.assert_close(values, theirs.detach(), rtol=1e-5, atol=1e-7)
    persistent = optimizer.state[theirs]
    torch.testing.assert_close(mean, persistent["exp_avg"], rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(square, persistent["exp_avg_sq"], rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("plain", [False, True])
def test_adamw_changes_nothing_if_found_inf(device, plain):
    shards = Shards.draw(Draw(0, device), [100, 7], [torch.bfloat16, None])
    shards.tensors[0][1].fill_(float("inf"))
    before = shards.copy()
    adamw_ = plain_ops.adamw_ if plain else torch.ops.poplar.adamw_
    adamw_(*shards.arguments(), shards.numbers(), None, torch.ones((), device=device))
    for actual, expected in zip(shards.flat(), before.flat(), strict=True):
        assert_same_bits(actual, expected)


def one_shard(f, *, gradient=None, low=None):
    """Arguments for one shard of four elements; `f` makes a tensor."""
    given = [f(4), f(4) if gradient is None else gradient, f(4), f(4)]
    return (*([tensor] for tensor in given), [f(0) if low is None else low], list(RULE))


def all_arguments(name, given):
    """Those given, and the defaults of the plain function: the schema has none."""
    parameters = list(inspect.signature(PLAIN[name]).parameters.values())
    return (*given, *(each.default for each in parameters[len(given) :]))


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("rank_sum_", lambda f: (f(65), [f(65)], False, f(1)), "hold 2 elements, one for each 64"),
        ("rank_sum_", lambda f: (f(65), [f(65)], False, f(2).half()), "sums must be float32"),
        ("rank_sum_", lambda f: (f(4), [f(4), f(5)]), "each part must hold 4 elements, as out"),
        ("rank_sum_", lambda f: (f(4), []), "at least one rank's part, got none"),
        ("rank_sum_", lambda f: (f(4).half(), [f(4)]), "out must be float32"),
        ("rank_sum_", lambda f: (f(4), [f(4), f(4).half()]), "parts must have one dtype"),
        ("rank_sum_", lambda f: (f(4), [f(8)[::2]]), "1-D and contiguous"),
        ("adamw_", lambda f: one_shard(f, gradient=f(5)), "have 4 elements, another tensor 5"),
        ("adamw_", lambda f: one_shard(f, low=f(5)), "values have 4 elements, another tensor 5"),
        ("adamw_", lambda f: one_shard(f, gradient=f(4).half()), "must be float32"),
        ("adamw_", lambda f: one_shard(f, low=f(4).int()), "must be float32, bfloat16 or"),
        ("adamw_", lambda f: ([f(4)], *one_shard(f)[1:5], [0.0] * 6), "expected 7 numbers for"),
        ("adamw_", lambda f: ([f(4)] * 2, *one_shard(f)[1:]), "got 2 values and a list of 1"),
        ("adamw_", lambda f: (*one_shard(f), f(2)), "scale and found_inf must be single"),
        ("pack_", lambda f: (f(10), [f(4), f(4)], [0, 3], 1.0), "tensor 1 starts at 3, before 4"),
        ("pack_", lambda f: (f(10), [f(4)], [7], 1.0), "reaches past the end of the buffer, 10"),
        ("pack_", lambda f: (f(10), [f(4)], [2**63 - 2], 1.0), "reaches past the end"),
        ("pack_", lambda f: (f(10), [f(4)], [-1], 1.0), "starts at -1"),
        ("pack_", lambda f: (f(10), [f(4)], [0, 4], 1.0), "got 1 tensors and 2 offsets"),
        ("pack_", lambda f: (f(10), [f(4).long()], [0], 1.0), "must be float32, bfloat16 or"),
        ("pack_", lambda f: (f(10).view(2, 5), [], [], 1.0), "1-D and contiguous, got 2"),
        ("pack_", lambda f: (f(10).double(), [f(4)], [0], 1.0), "must be float32, bfloat16 or"),
        (
            "rank_sum_chunks_",
            lambda f: (f(4), [f(4)], f(4).byte()),
            "work_counters must hold 16 bytes",
        ),
        (
            "rank_sum_chunks_",
            lambda f: (f(4), [f(4)], f(17).byte()[1:]),
            "work_counters must hold 16 bytes at an address that is a multiple of 4",
        ),
        ("encode_", lambda f: (f(67).byte()[1:], [], [], 1.0, 8, 0, 0), "at an even address"),
        ("encode_", lambda f: (f(66), [f(9)], [0], 1.0, 8, 0, 0), "codes must be uint8"),
        ("encode_", lambda f: (f(66).byte(), [f(9)], [0], 1.0, 8, 32, 0), "multiple of 64, got 32"),
        ("encode_", lambda f: (f(66).byte(), [f(9)], [0], 1.0, 7, 0, 0), "8 or 4 bits, got 7"),
        ("encode_", lambda f: (f(64).byte(), [f(9)], [0], 1.0, 8, 0, 0), "66 bytes for each 64 e"),
        ("decode_sum_", lambda f: (f(65), [f(66).byte()], 8), "65 elements take 132 bytes, but"),
        ("decode_sum_", lambda f: (f(64), [], 8), "must hold 1 to 1024 parts, got 0"),
        (
            "decode_sum_",
            lambda f: (f(9).half(), [f(34).byte()], 4, False, f(1)),
            "out must be float32 with",
        ),
        ("decode_sum_", lambda f: (f(9), [f(34).byte()], 4, False, f(2)), "hold 1 elements, one"),
        ("copy_", lambda f: (f(4), f(5)), "target has 4 elements, source 5"),
        ("copy_", lambda f: (f(4), f(4).half()), "must have one dtype"),
        ("copy_", lambda f: (f(4), f(8)[::2]), "source must be 1-D and contiguous"),
        ("block_sums_of_squares", lambda f: (f(64).view(8, 8),), "1-D and contiguous, got 2"),
        ("block_sums_of_squares", lambda f: (f(64).double(),), "must be float32, bfloat16 or"),
        ("exact_sum_", lambda f: (f(15).long(), [f(4)]), "total must be int64 and hold 16"),
        ("exact_sum_", lambda f: (f(16).long(), [f(4), f(4).half()]), "values must be float32"),
        ("exact_sum_", lambda f: (f(16).long(), [f(8)[::2]]), "values must be 1-D and contiguous"),
        ("exact_norm", lambda f: (f(32).view(2, 16),), "totals must be int64"),
        ("exact_norm", lambda f: (f(30).long().view(2, 15),), "hold at least 16"),
        ("clip_coefficient", lambda f: (f(1), 1.0), "must be single float64 elements"),
        ("clip_coefficient", lambda f: (f(1).double(), 1.0, f(2).double()), "single float64"),
    ],
)
def test_cpp_operators_do_not_access_other_memory(device, name, arguments, message):
    if ops.providers()[device].name != "C++":
        pytest.skip("only the C++ operators check their arguments")
    given = arguments(lambda numel: torch.zeros(numel, device=device))
    with pytest.raises(RuntimeError, match=message):
        getattr(torch.ops.poplar, name)(*all_arguments(name, given))


@pytest.mark.parametrize("plain", [False, True])
def test_pack_refuses_gradients_at_another_place_of_the_bucket(device, plain):
    whole = torch.zeros(20, device=device)
    pack_ = plain_ops.pack_ if plain else ops.pack_
    with pytest.raises(RuntimeError, match="tensor 1 is in the buffer's memory, but not at its"):
        pack_(whole[:12], [torch.zeros(1, device=device), whole[10:14]], [0, 5], 1.0)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("pack_", lambda f: (f(200), [f(8, 3).t(), f(0), f(5).half()], [2, 30, 64], 0.3)),
        ("pack_", lambda f: (f(200).half(), [f(8).bfloat16()], [64], 0.3, True)),
        ("rank_sum_", lambda f: (f(64), list(f(4, 64).bfloat16().unbind()), True)),
        (
            "rank_sum_chunks_",
            lambda f: (f(64), list(f(4, 64).unbind()), torch.zeros(16, dtype=torch.uint8)),
        ),
        ("encode_", lambda f: (f(132).byte(), [f(9, 3).t(), f(5).half()], [2, 70], 0.3, 8, 64, 1)),
        ("decode_sum_", lambda f: (f(64), [f(34).byte(), f(34).byte()], 4, True, f(1))),
        ("copy_", lambda f: (f(64), f(64))),
        ("block_sums_of_squares", lambda f: (f(100),)),
        ("exact_sum_", lambda f: (f(16).long(), [f(100), f(0), f(7)])),
        ("exact_norm", lambda f: (f(3, 64).long().abs(),)),
        ("clip_coefficient", lambda f: (f(1).double(), 0.5)),
        ("clip_coefficient", lambda f: (f(1)[0].double(), 0.5, f(1).double())),
        ("rank_sum_", lambda f: (f(64), list(f(4, 64).unbind()), False, f(1))),
        ("adamw_", lambda f: one_shard(f, low=f(4).bfloat16())),
        ("adamw_", lambda f: (*one_shard(f), f(1), f(1))),
        (
            "adamw_",
            lambda f: (
                *([f(9), f(2)] for _ in range(3)),
                [f(9).abs(), f(2).abs()],
                [f(9).half(), f(0)],
                [*RULE, *RULE],
            ),
        ),
    ],
)
def test_opcheck(device, name, arguments):
    sample = arguments(lambda *shape: torch.randn(*shape, device=device))
    torch.library.opcheck(getattr(torch.ops.poplar, name).default, all_arguments(name, sample))


@pytest.mark.parametrize("name", PLAIN)
def test_providers_in_python_get_every_argument(device, name):
    """PyTorch calls them without arguments that equal a default of the schema."""
    schema = getattr(torch.ops.poplar, name).default._schema
    assert not any(argument.has_default_value() for argument in schema.arguments)


def test_operators_write_to_leaves_that_require_gradients(device):
    parameter = torch.nn.Parameter(torch.zeros(4, device=device))
    ops.pack_(parameter, [torch.arange(4.0, device=device)], [0], 1.0)
    assert parameter.tolist() == [0, 1, 2, 3]
    assert parameter.requires_grad
    assert parameter.is_leaf


def test_autograd_detects_overwritten_saved_tensors(device):
    weight = torch.ones(4, device=device, requires_grad=True)
    saved = torch.ones(4, device=device)
    loss = (weight * saved).sum()
    ops.pack_(saved, [torch.zeros(4, device=device)], [0], 1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_operators_compile_into_one_graph_and_run_in_inference_mode(device):
    def packed_norm(bucket, grads):
        ops.pack_(bucket, grads, [0, 64], 0.5)
        return ops.block_sums_of_squares(bucket)

    grads = [torch.ones(3, device=device), torch.ones(4, 2, device=device)]
    compiled = torch.compile(packed_norm, backend="aot_eager", fullgraph=True)
    assert compiled(torch.empty(100, device=device), grads).tolist() == [0.75, 2.0]
    with torch.inference_mode():
        assert packed_norm(torch.empty(100, device=device), grads).tolist() == [0.75, 2.0]


def test_poplar_ops_off_selects_plain_pytorch(device):
    program = (
        "import torch; from poplar import ops; assert not ops.native; print(ops.describe());"
        f"b = torch.ones(5, device='{device}');"
        f"ops.pack_(b, [torch.ones(3, device='{device}')], [1], 0.5); print(b.tolist())"
    )
    environment = {**os.environ, "POPLAR_OPS": "off"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    assert "plain PyTorch (POPLAR_OPS=off)" in done.stdout
    assert "[0.0, 0.5, 0.5, 0.5, 0.0]" in done.stdout


CUDA_SOURCE = ROOT / "csrc/ops/cuda/library.cu"
ARCHITECTURES = ("75", "120")


def nvcc(*arguments: str | Path) -> None:
    """Run nvcc with the flags of the build; needs no GPU."""
    program = shutil.which("nvcc")
    if program is None:
        pytest.skip("nvcc is not on the path: the CUDA operators were not compiled")
    recipe = (ROOT / "CMakeLists.txt").read_text()
    assert "poplar_ops_cuda PRIVATE -fmad=false" in recipe
    options = ["-std=c++20", "-fmad=false", f"-I{ROOT / 'csrc/include'}"]
    subprocess.run([program, *options, *map(str, arguments)], check=True)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", choose(quick=ARCHITECTURES[:1], full=ARCHITECTURES))
def test_cuda_operators_compile_and_round_every_product(device, tmp_path, architecture):
    """The compiled code must not contain fused multiply-adds, which change bits."""
    ptx = tmp_path / "out.ptx"
    torch_headers = Path(torch.__file__).parent / "include"
    nvcc(
        *("-ptx", f"-arch=compute_{architecture}", "-isystem", torch_headers, "-o", ptx),
        *("-DTORCH_TARGET_VERSION=0x020a000000000000ULL", CUDA_SOURCE),
    )
    code = ptx.read_text()
    assert ".entry" in code
    assert "fma.rn.f" not in code


@pytest.mark.full
@pytest.mark.slow
def test_cuda_kernels_compile_for_every_architecture_of_the_toolkit(device, tmp_path):
    """All kernels in one file, without PyTorch's headers, to read headers once per architecture."""
    if shutil.which("nvcc") is None:
        pytest.skip("nvcc is not on the path: the CUDA kernels were not compiled")
    kernels = ROOT / "tests/csrc/cuda_on_host.cpp"
    kernel_headers = re.findall(r'#include "\w+\.cuh"', CUDA_SOURCE.read_text())
    assert set(kernel_headers) <= set(kernels.read_text().splitlines())
    listed = subprocess.run(["nvcc", "--list-gpu-arch"], capture_output=True, text=True, check=True)
    known = [name.removeprefix("compute_") for name in listed.stdout.split()]
    assert known
    chips = [
        word
        for chip in known
        if int(chip) >= 70  # older ones have a lower limit of kernel parameters
        for word in ("-gencode", f"arch=compute_{chip},code=sm_{chip}")
    ]
    nvcc(
        *("-x", "cu", "-c", *chips, "--threads=0", f"-I{ROOT / 'csrc/ops/cuda'}"),
        *("-o", tmp_path / "out.o", kernels),
    )
