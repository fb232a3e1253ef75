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
from itertools import chain
from pathlib import Path

import pytest
import torch
from operator_cases import CASES, Draw, Implementation, Shards, new_sums
from torch import Tensor

from poplar.ops import codec

ROOT = Path(__file__).resolve().parents[2]
CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
SEGMENTS = 640
"""Maximum number of tensors in one launch of pack."""
SHARDS = 355
"""Maximum number of shards in one launch of AdamW."""


@pytest.fixture(scope="module")
def cuda(tmp_path_factory: pytest.TempPathFactory) -> Implementation:
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
    return Implementation(Kernels(ctypes.CDLL(str(library))))


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


class Kernels:
    """The kernels, with the arguments of the operators."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library

    def pack_(
        self,
        bucket: Tensor,
        grads: Sequence[Tensor],
        offsets: Sequence[int],
        weight: float,
        accumulate: bool,
    ) -> None:
        grads = [grad.contiguous() for grad in grads]
        self.library.pack(
            code(bucket.dtype),
            address(bucket),
            ctypes.c_int64(bucket.numel()),
            *tables(grads, offsets),
            ctypes.c_float(weight),
            ctypes.c_bool(accumulate),
        )

    def rank_sum_(
        self, out: Tensor, parts: Sequence[Tensor], accumulate: bool, sums: Tensor | None
    ) -> None:
        begun = torch.full((out.numel(),), -1.0)
        self.library.rank_sum(
            code(parts[0].dtype),
            address(out),
            address(sums),
            addresses(parts),
            ctypes.c_int64(len(parts)),
            address(begun),
            ctypes.c_int64(out.numel()),
            ctypes.c_bool(accumulate),
        )

    def encode_(
        self,
        codes: Tensor,
        values: Sequence[Tensor],
        offsets: Sequence[int],
        weight: float,
        bits: int,
        first: int,
        key: int,
    ) -> None:
        values = [tensor.contiguous() for tensor in values]
        self.library.encode(
            ctypes.c_int64(bits),
            address(codes),
            ctypes.c_int64(codes.numel() // codec.encoded_bytes(64, bits)),
            *tables(values, offsets),
            ctypes.c_float(weight),
            ctypes.c_int64(first),
            ctypes.c_int64(key),
        )

    def decode_sum_(
        self,
        out: Tensor,
        received: Sequence[Tensor],
        bits: int,
        accumulate: bool,
        sums: Tensor | None,
    ) -> None:
        self.library.decode_sum(
            ctypes.c_int64(bits),
            code(out.dtype),
            address(out),
            address(sums),
            addresses(received),
            ctypes.c_int64(len(received)),
            ctypes.c_int64(out.numel()),
            ctypes.c_bool(accumulate),
        )

    def block_sums_of_squares(self, flat: Tensor) -> Tensor:
        sums = new_sums(flat.numel())
        numel = ctypes.c_int64(flat.numel())
        self.library.block_sums(code(flat.dtype), address(sums), address(flat), numel)
        return sums

    def exact_sum_(self, total: Tensor, values: Sequence[Tensor]) -> None:
        numels = longs([part.numel() for part in values])
        count = ctypes.c_int64(len(values))
        self.library.exact_sum(address(total), count, addresses(values), numels)

    def exact_norm(self, totals: Tensor) -> Tensor:
        norm = torch.zeros((), dtype=torch.float64)
        sizes = map(ctypes.c_int64, totals.shape)
        self.library.exact_norm(address(norm), address(totals), *sizes)
        return norm

    def clip_coefficient(self, norm: Tensor, max_norm: float, scale: Tensor | None) -> Tensor:
        found = torch.zeros_like(norm)
        bound = ctypes.c_float(max_norm)
        self.library.clip_coefficient(address(found), address(norm), address(scale), bound)
        return found

    def adamw_(
        self,
        values: Sequence[Tensor],
        gradients: Sequence[Tensor],
        means: Sequence[Tensor],
        square_means: Sequence[Tensor],
        rounded: Sequence[Tensor],
        numbers: Sequence[float],
        scale: Tensor | None,
        found_inf: Tensor | None,
    ) -> None:
        count = len(values)
        low = [tensor if tensor.numel() else None for tensor in rounded]
        shards = zip(values, gradients, means, square_means, low, strict=True)
        self.library.adamw(
            ctypes.c_int64(count),
            addresses(list(chain.from_iterable(shards))),
            (ctypes.c_uint8 * count)(*(CODES[tensor.dtype] for tensor in rounded)),
            longs([tensor.numel() for tensor in values]),
            (ctypes.c_double * len(numbers))(*numbers),
            address(scale),
            address(found_inf),
        )


@pytest.mark.parametrize("case", CASES)
def test_every_case_gives_the_bits_of_plain_pytorch(cuda, case):
    CASES[case](cuda)


@pytest.mark.parametrize("sizes", [[0, 1, 2, 3], [9], [0] * 700 + [65], [1], [100, 0, 70]])
@pytest.mark.parametrize("count", [SEGMENTS, SEGMENTS + 1, 3 * SEGMENTS])
@pytest.mark.parametrize("accumulate", [False, True])
def test_pack_of_more_tensors_than_one_launch_holds(cuda, sizes, count, accumulate):
    draw = Draw(count, "cpu")
    grads = [draw.values(sizes[i % len(sizes)], torch.float32) for i in range(count)]
    offsets, end = [], 0
    for i, grad in enumerate(grads):
        offsets.append(end + i % 3)
        end = offsets[-1] + grad.numel()
    cuda.check("pack_", torch.ones(end + 5), grads, offsets, 0.5, accumulate)


@pytest.mark.parametrize("ranks", [256, 257, 600])
@pytest.mark.parametrize("accumulate", [False, True])
def test_more_ranks_than_one_launch_holds_are_added_in_order(cuda, accumulate, ranks):
    draw = Draw(ranks, "cpu")
    parts = list(draw.values(ranks * 70, torch.bfloat16).view(ranks, 70).unbind())
    out = draw.values(70, torch.float32)
    cuda.check("rank_sum_", out, parts, accumulate, new_sums(70), written=(0, 3))


@pytest.mark.parametrize("bits", [8, 4])
def test_encode_of_more_tensors_than_one_launch_holds(cuda, bits):
    tensors, offsets, end = Draw(700, "cpu").tensors(700)
    codes = torch.zeros(codec.encoded_bytes(end, bits), dtype=torch.uint8)
    cuda.check("encode_", codes, tensors, offsets, 1 / 3, bits, 640, 7)


@pytest.mark.parametrize("sizes", [[1], [0, 3], [0]])
@pytest.mark.parametrize("count", [SHARDS, SHARDS + 1, 2 * SHARDS + 2])
def test_adamw_of_more_shards_than_one_launch_holds(cuda, count, sizes):
    sizes = [sizes[i % len(sizes)] for i in range(count)]
    cuda.check_adamw(Shards.draw(Draw(count, "cpu"), sizes, [None, torch.half]))
