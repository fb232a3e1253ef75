"""The CUDA kernels on the host, thread by thread, against plain PyTorch, bit by bit.

`csrc/emulated/cuda_runtime.h` replaces CUDA's header, so the real kernels run with their tiles,
vector accesses, shuffles and barriers; a misaligned access ends the process. Speed, memory and
streams need a GPU: there `test_ops.py` runs the operators themselves.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from test_ops import (
    DTYPES,
    NORMS,
    Draw,
    Shards,
    assert_same_bits,
    assert_same_value,
    totals_of,
)
from torch import Tensor

from poplar.ops import codec, plain

ROOT = Path(__file__).resolve().parents[2]
CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
SEGMENTS = 640
"""Maximum number of tensors in one launch of pack."""
SHARDS = 355
"""Maximum number of shards in one launch of AdamW."""


@pytest.fixture(scope="module")
def cuda(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        pytest.skip(f"no {compiler}: the CUDA kernels were not run on the host")
    library = tmp_path_factory.mktemp("cuda_on_host") / "kernels.so"
    subprocess.run(
        [compiler, "-std=c++20", "-O1", "-ffp-contract=off", "-shared", "-fPIC",
         "-fsanitize=alignment", "-fsanitize-undefined-trap-on-error", "-w",
         f"-I{ROOT / 'tests/csrc/emulated'}", f"-I{ROOT / 'csrc/ops/cuda'}",
         f"-I{ROOT / 'csrc/include'}", "-o", str(library),
         str(ROOT / "tests/csrc/cuda_on_host.cpp")],
        check=True,
    )  # fmt: skip
    return ctypes.CDLL(str(library))


def address(tensor: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


def addresses(tensors: Sequence[Tensor | None]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(tensors))(*(address(tensor).value for tensor in tensors))


def longs(values: Sequence[int]) -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * len(values))(*values)


def code(dtype: torch.dtype) -> ctypes.c_uint8:
    return ctypes.c_uint8(CODES[dtype])


def tables(tensors: Sequence[Tensor], offsets: Sequence[int]) -> list[object]:
    """Many tensors as C arguments: count, offsets, numels, addresses, dtypes."""
    return [
        ctypes.c_int64(len(tensors)),
        longs(offsets),
        longs([tensor.numel() for tensor in tensors]),
        (ctypes.c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors)),
        (ctypes.c_uint8 * len(tensors))(*(CODES[tensor.dtype] for tensor in tensors)),
    ]


def new_sums(numel: int) -> Tensor:
    return torch.full((-(-numel // 64),), -1.0)


def shifted(values: Tensor, by: int) -> Tensor:
    """The same values, `by` elements after an aligned address."""
    memory = torch.empty(values.numel() + by, dtype=values.dtype)
    memory[by:] = values
    return memory[by:]


def assert_packs(
    cuda: ctypes.CDLL,
    before: Tensor,
    grads: Sequence[Tensor],
    offsets: Sequence[int],
    weight: float,
    accumulate: bool,
    shift: int = 0,
) -> None:
    actual, expected = shifted(before, shift), before.clone()
    grads = [grad.contiguous() for grad in grads]
    cuda.pack(
        code(before.dtype),
        address(actual),
        ctypes.c_int64(before.numel()),
        *tables(grads, offsets),
        ctypes.c_float(weight),
        ctypes.c_bool(accumulate),
    )
    plain.pack_(expected, grads, offsets, weight, accumulate)
    assert_same_bits(actual, expected)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_pack_of_small_tensors(cuda, dtype, accumulate, seed):
    draw = Draw(seed, "cpu")
    grads, offsets, numel = draw.tensors(draw.random.choice([0, 1, 3, 20]))
    weight = draw.random.choice([1.0, 1 / 3, 0.0, -2.5, 1e-8])
    assert_packs(cuda, draw.values(numel, dtype), grads, offsets, weight, accumulate)


@pytest.mark.parametrize("shift", [0, 1, 4])
@pytest.mark.parametrize("gradient", DTYPES)
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_pack_of_tiles_within_one_tensor(cuda, dtype, accumulate, gradient, shift):
    draw = Draw(shift, "cpu")
    numel = 3 * 4096 + 70
    grads = [draw.values(numel - 100, gradient), draw.values(50, torch.float16)]
    before = draw.values(numel, dtype)
    assert_packs(cuda, before, grads, [shift, numel - 60], 1 / 3, accumulate, shift)


@pytest.mark.parametrize("sizes", [[0, 1, 2, 3], [9], [0] * 700 + [65], [1], [100, 0, 70]])
@pytest.mark.parametrize("count", [SEGMENTS, SEGMENTS + 1, 3 * SEGMENTS])
def test_pack_of_more_tensors_than_one_launch_holds(cuda, sizes, count):
    draw = Draw(count, "cpu")
    grads = [draw.values(sizes[i % len(sizes)], torch.float32) for i in range(count)]
    offsets, end = [], 0
    for i, grad in enumerate(grads):
        offsets.append(end + i % 3)
        end = offsets[-1] + grad.numel()
    assert_packs(cuda, torch.empty(end + 5), grads, offsets, 0.5, False)


def add_ranks(cuda: ctypes.CDLL, parts: Sequence[Tensor], out: Tensor, accumulate: bool) -> None:
    """Run with and without block sums; the last result stays."""
    before, numel = out.clone(), out.numel()
    begun = torch.full((numel,), -1.0)
    for sums in (None, new_sums(numel)):
        out.copy_(before)
        cuda.rank_sum(
            code(parts[0].dtype),
            address(out),
            address(sums),
            (ctypes.c_void_p * len(parts))(*(part.data_ptr() for part in parts)),
            ctypes.c_int64(len(parts)),
            address(begun),
            ctypes.c_int64(numel),
            ctypes.c_bool(accumulate),
        )
    assert sums is not None
    expected = before.clone()
    plain.rank_sum_(expected, [before if part is out else part for part in parts], accumulate)
    assert_same_bits(out, expected)
    assert_same_bits(sums, plain.block_sums_of_squares(expected))


@pytest.mark.parametrize("numel", [0, 1, 64, 1000, 4100])
@pytest.mark.parametrize("ranks", [1, 2, 5])
@pytest.mark.parametrize("alignment", [0, 1, 8])
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rank_sum(cuda, dtype, accumulate, alignment, ranks, numel):
    draw = Draw(numel + ranks, "cpu")
    received = draw.values(ranks * (numel + alignment), dtype).view(ranks, -1)
    parts = [part[:numel] for part in received]
    parts[ranks // 2] = parts[ranks // 2].clone()  # a rank's own slice is in other memory
    out = shifted(draw.values(numel, torch.float32), alignment % 2)
    add_ranks(cuda, parts, out, accumulate)
    if dtype is torch.float32:
        parts[ranks // 2] = out  # or is where the sum goes
        add_ranks(cuda, parts, out, accumulate)


@pytest.mark.parametrize("ranks", [256, 257, 600])
@pytest.mark.parametrize("accumulate", [False, True])
def test_more_ranks_than_one_launch_holds_are_added_in_order(cuda, accumulate, ranks):
    draw = Draw(ranks, "cpu")
    parts = list(draw.values(ranks * 70, torch.bfloat16).view(ranks, 70).unbind())
    add_ranks(cuda, parts, draw.values(70, torch.float32), accumulate)


@pytest.mark.parametrize("count", [0, 1, 2, 700])
@pytest.mark.parametrize("shift", [0, 2])
@pytest.mark.parametrize("bits", [8, 4])
def test_encode(cuda, bits, shift, count):
    draw = Draw(count, "cpu")
    tensors, offsets, end = draw.tensors(count)
    tensors.append(draw.values(9000, DTYPES[count % 3]))  # a whole tile, and parts of others
    offsets.append(end + shift)
    tensors = [tensor.contiguous() for tensor in tensors]
    numel = end + shift + 9000
    actual = shifted(torch.zeros(codec.encoded_bytes(numel, bits), dtype=torch.uint8), shift)
    expected = torch.zeros_like(actual)
    cuda.encode(
        ctypes.c_int64(bits),
        address(actual),
        ctypes.c_int64(-(-numel // 64)),
        *tables(tensors, offsets),
        ctypes.c_float(1 / 3),
        ctypes.c_int64(640),
        ctypes.c_int64(7),
    )
    plain.encode_(expected, tensors, offsets, 1 / 3, bits, 640, 7)
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("numel", [0, 1, 65, 5000])
@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [8, 4])
def test_decode_sum(cuda, bits, dtype, accumulate, ranks, numel):
    draw = Draw(numel, "cpu")
    received = [
        torch.empty(codec.encoded_bytes(numel, bits), dtype=torch.uint8) for _ in range(ranks)
    ]
    for rank, codes in enumerate(received):
        plain.encode_(codes, [draw.values(numel, torch.float32)], [0], 1.0, bits, 0, rank)
    received[-1] = shifted(received[-1], 2)
    actual = shifted(draw.values(numel, dtype), ranks // 2)
    expected = actual.clone()
    sums = [new_sums(numel) if dtype is torch.float32 else None for _ in "ab"]
    cuda.decode_sum(
        ctypes.c_int64(bits),
        code(dtype),
        address(actual),
        address(sums[0]),
        addresses(received),
        ctypes.c_int64(ranks),
        ctypes.c_int64(numel),
        ctypes.c_bool(accumulate),
    )
    plain.decode_sum_(expected, received, bits, accumulate, sums[1])
    assert_same_bits(actual, expected)
    if sums[0] is not None:
        assert_same_bits(*sums)


@pytest.mark.parametrize("numel", [0, 1, 63, 64, 65, 1024, 5000])
@pytest.mark.parametrize("shift", [0, 1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
def test_block_sums(cuda, dtype, shift, numel):
    flat = shifted(Draw(numel, "cpu").values(numel, dtype), shift)
    sums = new_sums(numel)
    cuda.block_sums(code(dtype), address(sums), address(flat), ctypes.c_int64(numel))
    assert_same_bits(sums, plain.block_sums_of_squares(flat))


@pytest.mark.parametrize("sizes", [[0], [1], [4096], [4097], [10_000], [0, 5, 4100, 0, 64, 1]])
def test_exact_sum(cuda, sizes):
    parts = [Draw(numel, "cpu").values(numel, torch.float32) for numel in sizes]
    actual = torch.arange(plain.EXACT_WORDS)
    expected = actual.clone()
    numels = longs([part.numel() for part in parts])
    cuda.exact_sum(address(actual), ctypes.c_int64(len(parts)), addresses(parts), numels)
    plain.exact_sum_(expected, [torch.cat(parts)])
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("rows", [0, 1, 2, 9])
def test_exact_norm(cuda, rows):
    totals = totals_of(Draw(rows, "cpu"), rows)
    actual = torch.zeros((), dtype=torch.float64)
    cuda.exact_norm(address(actual), address(totals), *longs(totals.shape))
    assert torch.equal(actual, plain.exact_norm(totals))


@pytest.mark.parametrize("value", NORMS)
@pytest.mark.parametrize("scale", [None, 1 / 1024])
def test_clip_coefficient(cuda, scale, value):
    norm = torch.tensor(value, dtype=torch.float64)
    factor = None if scale is None else torch.tensor(scale, dtype=torch.float64)
    actual = torch.zeros_like(norm)
    cuda.clip_coefficient(address(actual), address(norm), address(factor), ctypes.c_float(0.1))
    assert_same_value(actual, plain.clip_coefficient(norm, 0.1, factor))


def assert_same_step(
    cuda: ctypes.CDLL, shards: Shards, scale: Tensor | None, found: Tensor | None
) -> None:
    """The kernel on all shards equals plain PyTorch."""
    actual, expected = shards.copy(), shards.copy()
    count = len(shards.rules)
    places = [None if i % 5 == 4 and not t.numel() else t for i, t in enumerate(actual.flat())]
    cuda.adamw(
        ctypes.c_int64(count),
        addresses(places),
        (ctypes.c_uint8 * count)(*(CODES[shard[-1].dtype] for shard in actual.tensors)),
        longs([shard[0].numel() for shard in actual.tensors]),
        (ctypes.c_double * (7 * count))(*shards.numbers()),
        address(scale),
        address(found),
    )
    plain.adamw_(*expected.arguments(), shards.numbers(), scale, found)
    for one, other in zip(actual.flat(), expected.flat(), strict=True):
        assert_same_bits(one, other)


@pytest.mark.parametrize("numel", [0, 1, 1024, 3001])
@pytest.mark.parametrize("rounded", [None, *DTYPES])
@pytest.mark.parametrize("found", [None, 0.0, 1.0])
@pytest.mark.parametrize("shift", [0, 1, 4])
def test_adamw_of_one_shard(cuda, shift, found, rounded, numel):
    shards = Shards.draw(Draw(numel, "cpu"), [numel], [rounded], shift)
    flag = None if found is None else torch.tensor(found)
    assert_same_step(cuda, shards, torch.tensor([0.25]), flag)


@pytest.mark.parametrize("seed", range(6))
def test_adamw_of_many_shards(cuda, seed):
    draw = Draw(seed, "cpu")
    sizes = [
        draw.random.choice([0, 1, 64, 1023, 1024, 2049])
        for _ in range(draw.random.choice([2, 9, 30]))
    ]
    shards = Shards.draw(draw, sizes, [None, *DTYPES], shift=seed % 3)
    assert_same_step(cuda, shards, None, None)


@pytest.mark.parametrize("sizes", [[1], [0, 3], [0]])
@pytest.mark.parametrize("count", [SHARDS, SHARDS + 1, 2 * SHARDS + 2])
def test_adamw_of_more_shards_than_one_launch_holds(cuda, count, sizes):
    sizes = [sizes[i % len(sizes)] for i in range(count)]
    assert_same_step(cuda, Shards.draw(Draw(count, "cpu"), sizes, [None, torch.half]), None, None)
