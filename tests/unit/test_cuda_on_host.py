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
from typing import Any

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


def as_c(value: Any) -> Any:
    """A C argument. A list becomes an array of its elements; floats in it become doubles."""
    match value:
        case None | Tensor():
            return ctypes.c_void_p(None if value is None else value.data_ptr())
        case torch.dtype():
            return ctypes.c_uint8(CODES[value])
        case bool():
            return ctypes.c_bool(value)
        case int():
            return ctypes.c_int64(value)
        case float():
            return ctypes.c_float(value)
    if value and isinstance(value[0], float):
        return (ctypes.c_double * len(value))(*value)
    elements = list(map(as_c, value))
    kind = type(elements[0]) if elements else ctypes.c_void_p
    return (kind * len(elements))(*(element.value for element in elements))


def tables(tensors: Sequence[Tensor], offsets: Sequence[int]) -> list[Any]:
    """Many tensors as arguments: count, offsets, numels, addresses, dtypes."""
    numels, dtypes = [each.numel() for each in tensors], [each.dtype for each in tensors]
    return [len(tensors), offsets, numels, tensors, dtypes]


class Kernels:
    """The kernels, with the arguments of the operators."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def _call(self, kernel: str, *arguments: Any) -> None:
        getattr(self._library, kernel)(*map(as_c, arguments))

    def pack_(
        self, bucket: Tensor, grads: Any, offsets: Any, weight: float, accumulate: bool
    ) -> None:
        listed = tables([grad.contiguous() for grad in grads], offsets)
        self._call("pack", bucket.dtype, bucket, bucket.numel(), *listed, weight, accumulate)

    def rank_sum_(self, out: Tensor, parts: Any, accumulate: bool, sums: Tensor | None) -> None:
        listed = parts, len(parts), torch.full((out.numel(),), -1.0)
        self._call("rank_sum", parts[0].dtype, out, sums, *listed, out.numel(), accumulate)

    def encode_(
        self, codes: Tensor, values: Any, offsets: Any, weight: float, bits: int, *place: int
    ) -> None:
        groups = codes.numel() // codec.encoded_bytes(64, bits)
        listed = tables([tensor.contiguous() for tensor in values], offsets)
        self._call("encode", bits, codes, groups, *listed, weight, *place)

    def decode_sum_(
        self, out: Tensor, received: Any, bits: int, accumulate: bool, sums: Tensor | None
    ) -> None:
        listed = received, len(received), out.numel()
        self._call("decode_sum", bits, out.dtype, out, sums, *listed, accumulate)

    def block_sums_of_squares(self, flat: Tensor) -> Tensor:
        sums = new_sums(flat.numel())
        self._call("block_sums", flat.dtype, sums, flat, flat.numel())
        return sums

    def exact_sum_(self, total: Tensor, values: Any) -> None:
        self._call("exact_sum", total, len(values), values, [part.numel() for part in values])

    def exact_norm(self, totals: Tensor) -> Tensor:
        norm = torch.zeros((), dtype=torch.float64)
        self._call("exact_norm", norm, totals, *totals.shape)
        return norm

    def clip_coefficient(self, norm: Tensor, max_norm: float, scale: Tensor | None) -> Tensor:
        found = torch.zeros_like(norm)
        self._call("clip_coefficient", found, norm, scale, max_norm)
        return found

    def adamw_(self, *arguments: Any) -> None:
        *lists, rounded, numbers, scale, found_inf = arguments
        values, dtypes = lists[0], [tensor.dtype for tensor in rounded]
        low = [tensor if tensor.numel() else None for tensor in rounded]
        shards = list(chain.from_iterable(zip(*lists, low, strict=True)))
        numels = [tensor.numel() for tensor in values]
        self._call("adamw", len(values), shards, dtypes, numels, numbers, scale, found_inf)


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
