"""Encoded flat tensors: the same bits from every provider, unbiased rounding, bounded errors."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from operator_cases import DTYPES, Draw, new_sums
from test_ops import DEVICES, STREAMED, dispatched
from torch import Tensor

from poplar import ops
from poplar.ops import codec
from poplar.ops import plain as plain_ops

BITS = [8, 4]
LARGEST = {8: 127, 4: 7}
HUGE = 3e38
MOST_RANKS = 1024
DISTANCES = (32, 16, 8, 4, 2, 1)

pytestmark = pytest.mark.parametrize("device", DEVICES)


def encoded(values: Tensor, bits: int, key: int = 1, first: int = 0) -> Tensor:
    codes = torch.full(
        (codec.encoded_bytes(values.numel(), bits),), 255, dtype=torch.uint8, device=values.device
    )
    ops.encode_(codes, [values], [0], 1.0, bits=bits, first=first, key=key)
    return codes


def decoded(codes: Tensor, numel: int, bits: int) -> Tensor:
    out = torch.full((numel,), -1.0, device=codes.device)
    ops.decode_sum_(out, [codes], bits=bits)
    return out


def special_groups(device: str) -> Tensor:
    """Groups of one kind of values each."""
    normal = torch.randn(64, generator=torch.Generator().manual_seed(0))
    rows = [normal * 0, -normal * 0, normal * 1e-42, normal * 1e-38, normal * 1e-30, normal * 1e36]
    rows += [normal.clone() for _ in range(4)]
    rows += [torch.full((64,), HUGE), torch.full((64,), 2.0), torch.full((64,), 1e-45)]
    rows[6][63] = math.nan
    rows[7][5] = math.inf
    rows[8][5:7] = -math.inf
    rows[9] = torch.zeros(64)
    rows[9][1] = -1e-8
    return torch.stack(rows).to(device)


def transformed(group: np.ndarray, distances: tuple[int, ...]) -> np.ndarray:
    x = group.copy()
    for distance in distances:
        for i in range(64):
            if i & distance == 0:
                x[i], x[i + distance] = x[i] + x[i + distance], x[i] - x[i + distance]
    return x


def by_definition(group: Tensor, bits: int, first: int, key: int) -> bytes:
    """The encoded group, computed with numpy's fp32 and Python's integers."""
    x = transformed(group.float().cpu().numpy(), DISTANCES)
    largest, zero = np.abs(x).max(), 2 ** (bits - 1)
    numbers, scale = [0] * 64, np.float32(0)
    if not np.isfinite(largest):
        scale = np.float32("nan")
    elif largest:
        step = np.float32((1 + 2**-20) / (zero - 1))
        bound = max(float(largest * step), 2.0**-100)
        unit = 2.0 ** (math.floor(math.log2(bound)) - 7)  # of bf16
        scale = np.float32(math.ceil(bound / unit) * unit)
        words = codec.random_words(first, 32, key, torch.device("cpu")).tolist()
        units = np.float32(32768) / scale
        for i, value in enumerate(x * units):
            random = words[i // 2] >> 17 if i % 2 else words[i // 2] & 0x7FFF
            numbers[i] = (int(np.rint(value)) + random) >> 15
    assert max(map(abs, numbers)) < zero
    codes = [number + zero for number in numbers]
    if bits == 4:
        codes = [a | b << 4 for a, b in zip(codes[::2], codes[1::2], strict=True)]
    upper = int(scale.view(np.uint32)) >> 16
    return bytes([*codes, upper & 0xFF, upper >> 8])


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
@pytest.mark.parametrize("bits", BITS)
def test_groups_are_encoded_by_the_definition(device, bits):
    groups = torch.cat(
        [special_groups(device), Draw(1, device).values(640, torch.half).view(10, 64)]
    )
    codes = encoded(groups.view(-1), bits, key=-5, first=6400).view(len(groups), -1)
    for i, group in enumerate(groups):
        assert bytes(codes[i].tolist()) == by_definition(group, bits, 6400 + 64 * i, -5), i


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", BITS)
def test_large_encode_gives_the_same_bits_and_writes_nothing_else(device, bits, dtype):
    numel = STREAMED // 2 + 70
    values = Draw(numel, device).values(numel, dtype)
    values[: 64 * 13] = special_groups(device).view(-1).to(dtype)
    memory = torch.full((2, codec.encoded_bytes(numel, bits) + 4), 99, device=device).byte()
    for function, row in zip((torch.ops.poplar.encode_, plain_ops.encode_), memory, strict=True):
        function(row[2:-2], [values], [0], 1 / 3, bits, 2**33 - 640, 2**62 + 5)
    assert torch.equal(*memory)
    assert memory[:, :2].eq(99).all()
    assert memory[:, -2:].eq(99).all()


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("bits", BITS)
def test_encode_of_many_tensors_equals_packing_them_first(device, bits, seed):
    draw = Draw(seed, device)
    tensors, offsets, numel = draw.tensors([0, 1, 3, 20, 100, 700][seed])
    packed = torch.empty(-(-numel // 64) * 64, device=device)
    ops.pack_(packed, tensors, offsets, 0.3)
    codes = torch.empty(codec.encoded_bytes(numel, bits), dtype=torch.uint8, device=device)
    ops.encode_(codes, tensors, offsets, 0.3, bits=bits, first=128, key=seed)
    assert torch.equal(codes, encoded(packed, bits, seed, 128))


@pytest.mark.parametrize("bits", BITS)
def test_a_slice_has_the_same_codes_as_in_the_whole(device, bits):
    values = Draw(2, device).values(64 * 700 + 5, torch.float32)
    whole = encoded(values, bits, key=9, first=64)
    for low, high in [(0, 1), (3, 600), (600, 701)]:
        part = encoded(values[64 * low : 64 * high], bits, key=9, first=64 + 64 * low)
        size = codec.encoded_bytes(64, bits)
        assert torch.equal(part, whole[size * low : size * high])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("bits", BITS)
def test_large_decode_gives_the_same_bits(device, bits, accumulate, dtype):
    draw, numel = Draw(0, device), STREAMED // 4 + 70
    received = [encoded(draw.values(numel, torch.float32), bits, key) for key in range(3)]
    sums = new_sums(numel, device) if dtype is torch.float32 else None
    dispatched(device).check(
        "decode_sum_", draw.values(numel, dtype), received, bits, accumulate, sums, written=(0, 4)
    )


def decoded_by_definition(received: list[Tensor], bits: int) -> np.ndarray:
    """One group, computed with numpy's fp32."""
    x = np.zeros(64, dtype=np.float32)
    for codes in received:
        *numbers, low, high = codes.tolist()
        if bits == 4:
            numbers = [number >> shift & 15 for number in numbers for shift in (0, 4)]
        share = np.array([low << 16 | high << 24], np.uint32).view(np.float32) / np.float32(64)
        x = x + (np.array(numbers, np.float32) - np.float32(2 ** (bits - 1))) * share
    return transformed(x, DISTANCES[::-1])


@pytest.mark.parametrize("ranks", [1, 5, MOST_RANKS])
@pytest.mark.parametrize("bits", BITS)
def test_ranks_are_summed_in_order(device, bits, ranks):
    values = Draw(ranks, device).values(ranks * 64, torch.float32).nan_to_num(0, 0, 0)
    received = [encoded(row, bits, key) for key, row in enumerate(values.view(ranks, 64))]
    out = torch.empty(64, device=device)
    ops.decode_sum_(out, received, bits=bits)
    assert out.tolist() == decoded_by_definition(received, bits).tolist()
    ops.decode_sum_(out, received[::-1], bits=bits)
    assert out.tolist() == decoded_by_definition(received[::-1], bits).tolist()


@pytest.mark.parametrize("bits", BITS)
def test_errors_are_bounded_by_the_largest_coefficient(device, bits):
    """A coefficient is wrong by less than its scale; 64 of them, over 64, make an element."""
    values = Draw(6, device).values(64_000, torch.float32).nan_to_num(0, 0, 0).view(-1, 64)
    coefficients = codec.transform(values.double(), DISTANCES)
    scale = coefficients.abs().amax(1) / LARGEST[bits] * (1 + 2**-7)
    error = (decoded(encoded(values.view(-1), bits), 64_000, bits).view(-1, 64) - values).abs()
    assert (error.amax(1) <= scale * (1 + 1e-4) + 1e-30).all()
    variance = error.double().square().mean(1)
    assert (variance <= scale.square() / 4 / 64 * 2 + 1e-60).all(), "at most scale^2 / 4 each"


@pytest.mark.parametrize("bits", BITS)
def test_rounding_is_unbiased(device, bits):
    values = Draw(8, device).values(6400, torch.float32).nan_to_num(0, 0, 0)
    keys, bound = 400, codec.transform(values.view(-1, 64), DISTANCES).abs().amax(1)
    scale = (bound / LARGEST[bits]).repeat_interleave(64).double() + 1e-30
    errors = torch.stack([decoded(encoded(values, bits, k), 6400, bits) for k in range(keys)])
    errors = (errors.double() - values.double()) / scale
    # An error's deviation is at most 1 / 2 / sqrt(64) of the scale.
    deviation = 0.5 / math.sqrt(64 * keys)
    assert errors.mean(0).abs().max() < 5.5 * deviation
    assert errors.mean().abs() < 5 * deviation / math.sqrt(6400)


def test_random_bits_are_uniform_and_depend_on_key_and_place(device):
    def halves(first: int, key: int) -> Tensor:
        words = codec.random_words(first, 1 << 18, key, torch.device(device))
        return torch.stack([words & 0x7FFF, words >> 17], 1).view(-1)

    for key in (0, 1, -1, 2**63 - 1):
        bits = halves(0, key)
        for shift in (10, 0):  # upper and lower bits
            counts = torch.bincount(bits >> shift & 31, minlength=32).double()
            assert ((counts - counts.mean()).square() / counts.mean()).sum() < 80  # p = 4e-6
        steps = bits.double() / 2**15 - 0.5
        for other in (halves(0, key + 1 if key < 2**62 else 0), halves(1 << 19, key), bits.roll(1)):
            product = (steps * (other.double() / 2**15 - 0.5)).mean() * 12
            assert product.abs() < 5 / math.sqrt(len(bits))


def test_groups_that_are_not_finite_decode_to_nan(device):
    groups = special_groups(device)
    for bits in BITS:
        out = decoded(encoded(groups.view(-1), bits), groups.numel(), bits).view(groups.shape)
        is_nan = [6, 7, 8, 10]  # the last one's coefficients are beyond fp32
        assert out[is_nan].isnan().all()
        rest = [i for i in range(len(groups)) if i not in is_nan]
        assert out[rest].isfinite().all()
        assert not out[:2].any()
        assert out[2].abs().max() < 2.0**-100, "below the smallest scale"
        torch.testing.assert_close(out[11], groups[11], rtol=0.01, atol=0.01)


def test_sizes_on_the_wire(device):
    assert codec.encoded_bytes(64, 8) / (64 * 2) < 0.52
    assert codec.encoded_bytes(64, 4) / (64 * 2) < 0.27
    assert [codec.encoded_bytes(numel, 8) for numel in (0, 1, 64, 65)] == [0, 66, 66, 132]
