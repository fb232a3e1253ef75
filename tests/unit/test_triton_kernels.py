"""Triton's kernels: in its interpreter against plain PyTorch, and compiled for real chips.

No GPU is needed. The interpreter must be selected before Triton is imported, so a separate process
runs it. It truncates fp32 to bf16 instead of rounding, so bf16 results may differ by one unit. On
GPUs `test_ops.py` compares every bit; `POPLAR_OPS=triton` selects Triton there.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context
from typing import Any
from unittest import mock

import pytest
import torch
from subset import choose, covering_subset
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

from poplar import ops
from poplar.ops import codec, plain, triton_backend

triton = pytest.importorskip("triton", reason="Triton is not installed: its kernels were not run")

NAMES = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16"}
CHIPS = [80, 90]
BF16_ULP = 2**-7
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Callable[..., Any]]:
    """Calls a function of this module with Triton's interpreter."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as executor:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TRITON_INTERPRET", "1")
            assert executor.submit(interpreter_works).result(timeout=120)
        yield lambda function, *arguments: executor.submit(function, *arguments).result(120)


def interpreter_works() -> bool:
    from triton import knobs

    return bool(knobs.runtime.interpret)


def new_sums(numel: int) -> Tensor:
    return torch.full((-(-numel // 64),), -1.0)


def assert_rounded(actual: Tensor, expected: Tensor) -> None:
    """The same bits; bf16 may differ by one unit, because the interpreter does not round it."""
    if actual.dtype is torch.bfloat16:
        torch.testing.assert_close(actual, expected, rtol=BF16_ULP, atol=1e-38, equal_nan=True)
    else:
        assert_same_bits(actual, expected)


def check_pack(seed: int, dtype: torch.dtype, accumulate: bool) -> None:
    from poplar import kernels

    draw = Draw(seed, "cpu")
    grads, offsets, numel = draw.tensors(draw.random.choice([0, 1, 3, 12]))
    weight = draw.random.choice([1.0, 1 / 3, 0.0, -2.5, 1e-8])
    before = draw.values(numel, dtype)
    actual, expected = before.clone(), before.clone()
    kernels.pack_(actual, grads, offsets, weight, accumulate)
    plain.pack_(expected, grads, offsets, weight, accumulate)
    assert_rounded(actual, expected)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_pack_scales_and_rounds(interpreted, dtype, accumulate, seed):
    interpreted(check_pack, seed, dtype, accumulate)


def check_long_pack(numel: int) -> None:
    from poplar import kernels

    draw = Draw(numel, "cpu")
    grads = [draw.values(numel - 5, torch.float32), draw.values(3, torch.float16)]
    actual, expected = torch.empty(numel), torch.empty(numel)
    kernels.pack_(actual, grads, [1, numel - 4], 1 / 3, False)
    plain.pack_(expected, grads, [1, numel - 4], 1 / 3)
    assert_same_bits(actual, expected)


@pytest.mark.parametrize("numel", [64, 1024, 1025, 4096, 10_000])
def test_pack_of_a_gradient_over_many_tiles(interpreted, numel):
    interpreted(check_long_pack, numel)


def check_rank_sum(ranks: int, numel: int, dtype: torch.dtype, accumulate: bool) -> None:
    from poplar import kernels

    draw = Draw(ranks, "cpu")
    parts = list(draw.values(ranks * (numel + 7), dtype).view(ranks, -1)[:, :numel].unbind())
    parts[ranks // 2] = parts[ranks // 2].clone()  # a rank's own slice is in other memory
    before = draw.values(numel, torch.float32)
    actual, expected = before.clone(), before.clone()
    sums = new_sums(numel)
    kernels.rank_sum_(actual, parts, accumulate, sums)
    plain.rank_sum_(expected, parts, accumulate)
    assert_same_bits(actual, expected)
    assert_same_bits(sums, plain.block_sums_of_squares(expected))


@pytest.mark.parametrize("numel", [0, 1, 64, 3000])
@pytest.mark.parametrize("ranks", [1, 2, 5])
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rank_sum_adds_in_rank_order(interpreted, dtype, accumulate, ranks, numel):
    interpreted(check_rank_sum, ranks, numel, dtype, accumulate)


def check_encode(seed: int, bits: int) -> None:
    from poplar import kernels

    draw = Draw(seed, "cpu")
    tensors, offsets, end = draw.tensors([0, 3, 12][seed])
    tensors.append(draw.values(2100, DTYPES[seed]))  # a whole tile, and parts of others
    offsets.append(end)
    actual = torch.zeros(codec.encoded_bytes(end + 2100, bits), dtype=torch.uint8)
    expected = torch.ones_like(actual)
    arguments = tensors, offsets, 1 / 3, bits, 2**33 - 640, seed
    kernels.encode_(actual, *arguments)
    plain.encode_(expected, *arguments)
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("bits", [8, 4])
def test_encode_gives_the_same_codes(interpreted, bits, seed):
    interpreted(check_encode, seed, bits)


def check_decode_sum(numel: int, bits: int, dtype: torch.dtype, accumulate: bool) -> None:
    from poplar import kernels

    draw = Draw(numel, "cpu")
    received = [torch.empty(codec.encoded_bytes(numel, bits), dtype=torch.uint8) for _ in range(3)]
    for rank, codes in enumerate(received):
        plain.encode_(codes, [draw.values(numel, torch.float32)], [0], 1.0, bits, 0, rank)
    before = draw.values(numel, dtype)
    outs = [before.clone() for _ in "ab"]
    sums = [new_sums(numel) if dtype is torch.float32 else None for _ in "ab"]
    for provider, out, own in zip((kernels, plain), outs, sums, strict=True):
        provider.decode_sum_(out, received, bits, accumulate, own)
    assert_rounded(*outs)
    if dtype is torch.float32:
        assert_same_bits(*sums)


@pytest.mark.parametrize("numel", [0, 65, 3000])
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [8, 4])
def test_decode_sum_adds_in_rank_order(interpreted, bits, dtype, accumulate, numel):
    interpreted(check_decode_sum, numel, bits, dtype, accumulate)


def check_block_sums(numel: int, dtype: torch.dtype) -> None:
    from poplar import kernels

    flat = Draw(numel, "cpu").values(numel, dtype)
    assert_same_bits(kernels.block_sums_of_squares(flat), plain.block_sums_of_squares(flat))


@pytest.mark.parametrize("numel", [0, 1, 63, 64, 65, 2048, 5000])
@pytest.mark.parametrize("dtype", DTYPES)
def test_block_sums_use_the_fixed_tree(interpreted, dtype, numel):
    interpreted(check_block_sums, numel, dtype)


def check_exact_sum(sizes: list[int]) -> None:
    from poplar import kernels

    parts = [Draw(numel, "cpu").values(numel, torch.float32) for numel in sizes]
    actual = torch.arange(plain.EXACT_WORDS)
    expected = actual.clone()
    kernels.exact_sum_(actual, parts)
    plain.exact_sum_(expected, parts)
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("sizes", [[], [0], [1], [64], [4096], [10_000], [0, 5, 4097, 0, 64, 1]])
def test_exact_sum_matches_plain_pytorch(interpreted, sizes):
    interpreted(check_exact_sum, sizes)


def check_exact_norm(rows: int) -> None:
    from poplar import kernels

    totals = totals_of(Draw(rows, "cpu"), rows)
    assert torch.equal(kernels.exact_norm(totals), plain.exact_norm(totals))


@pytest.mark.parametrize("rows", [0, 1, 2, 9])
def test_exact_norm_matches_plain_pytorch(interpreted, rows):
    interpreted(check_exact_norm, rows)


def check_clip_coefficient(value: float, scale: float | None) -> None:
    from poplar import kernels

    norm = torch.tensor(value, dtype=torch.float64)
    factor = None if scale is None else torch.tensor(scale, dtype=torch.float64)
    actual = kernels.clip_coefficient(norm, 0.1, factor)
    assert_same_value(actual, plain.clip_coefficient(norm, 0.1, factor))


@pytest.mark.parametrize("value", NORMS)
@pytest.mark.parametrize("scale", [None, 1 / 1024])
def test_clip_coefficient_matches_plain_pytorch(interpreted, value, scale):
    interpreted(check_clip_coefficient, value, scale)


def round_down_to_bf16(shards: Shards) -> None:
    """Change the values behind bf16 copies to some that the interpreter rounds as chips do.

    The kernel compares the copy with the rounded value, so one unit makes it a written one.
    """
    for values, *_, low in shards.tensors:
        if low.dtype is torch.bfloat16:
            written = values.to(low.dtype) != low
            values.view(torch.int32).bitwise_and_(~0x8000)  # the first of the bits cut off
            low.copy_(torch.where(written, low, values.to(low.dtype)))


def check_adamw(sizes: list[int], dtypes: list[Any], shift: int, found: float | None) -> None:
    from poplar import kernels

    shards = Shards.draw(Draw(sum(sizes), "cpu"), sizes, dtypes, shift)
    round_down_to_bf16(shards)
    scale = None if found is None else torch.tensor([0.25])
    flag = None if found is None else torch.tensor(found)
    actual, expected = shards.copy(), shards.copy()
    for own, operators in ((actual, kernels), (expected, plain)):
        operators.adamw_(*own.arguments(), own.numbers(), scale, flag)
    for one, other in zip(actual.flat(), expected.flat(), strict=True):
        assert_rounded(one, other)


@pytest.mark.parametrize("numel", [0, 1, 1024, 3001])
@pytest.mark.parametrize("rounded", [None, *DTYPES])
@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("found", [None, 0.0, 1.0])
def test_adamw_matches_plain_pytorch(interpreted, numel, rounded, shift, found):
    interpreted(check_adamw, [numel], [rounded], shift, found)


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("sizes", [[], [0, 0], [5, 0, 1024, 2049, 0, 64, 1, 3000]])
def test_adamw_of_many_shards_matches_plain_pytorch(interpreted, sizes, shift):
    interpreted(check_adamw, sizes, [torch.float16, None, *DTYPES], shift, 0.0)


class Broken:
    """Kernels that no compiler takes."""

    def block_sums_of_squares(self, flat: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no such chip")


@pytest.mark.parametrize(
    ("kernels", "capability", "problem"),
    [
        (Broken(), (8, 0), "launch failed: RuntimeError: no such chip"),
        (plain, (7, 5), "Triton supports capability 8.0 and higher, not 7.5"),
        (plain, (8, 0), ""),
    ],
)
def test_kernels_serve_where_triton_can_launch_them(kernels, capability, problem):
    with mock.patch("torch.cuda.get_device_capability", return_value=capability):
        assert triton_backend.problem_of(kernels, CPU) == problem


def launched_variants() -> list[tuple[str, str, dict[str, str], dict[str, Any]]]:
    """Module, kernel, types and compile-time arguments of every launched variant."""
    found: list[tuple[str, str, dict[str, str], dict[str, Any]]] = []
    for dtype in NAMES.values():
        pack = {"bucket_ptr": dtype, "table_ptr": "*i64", "numel": "i64", "segments": "i32"}
        for accumulate in (False, True):
            found.append(("pack", "pack_kernel", pack, {"ACCUMULATE": accumulate}))
        add = {"out_ptr": "*fp32", "first_ptr": dtype, "table_ptr": "*i64", "sums_ptr": "*fp32"}
        sizes = {"numel": "i64", "ranks": "i32"}
        flags = ("ACCUMULATE", "SUMS", "ALIGNED")
        for values in product((False, True), repeat=len(flags)):
            variant = dict(zip(flags, values, strict=True))
            found.append(("rank_sum", "rank_sum_kernel", sizes | add, variant))
        decode = {"out_ptr": dtype, "table_ptr": "*i64", "numel": "i64", "ranks": "i32"}
        for values in product((8, 4), (False, True), (False, True)):
            variant = dict(zip(("BITS", "ACCUMULATE", "SUMS"), values, strict=True))
            found.append(("codec", "decode_kernel", decode | {"sums_ptr": "*fp32"}, variant))
        norm = {"sums_ptr": "*fp32", "flat_ptr": dtype, "numel": "i64"}
        found.append(("norm", "block_sums_kernel", norm, {}))
    encode = {"codes_ptr": "*u8", "table_ptr": "*i64", "groups": "i64", "segments": "i32"}
    encode |= {"first_group": "i64", "key_low": "i32", "key_high": "i32"}
    for bits in (8, 4):
        found.append(("codec", "encode_kernel", encode, {"BITS": bits}))
    table = {"table_ptr": "*i64", "rows": "i32"}
    found.append(("exact_sum", "exact_sum_kernel", table | {"total_ptr": "*i64"}, {}))
    names = ("SCALED", "CHECKED", "ALIGNED")
    for values in product((False, True), repeat=len(names)):
        found.append(("adamw", "adamw_kernel", table, dict(zip(names, values, strict=True))))
    rows = {"norm_ptr": "*fp64", "totals_ptr": "*i64", "rows": "i32", "distance": "i32"}
    found.append(("clip", "exact_norm_kernel", rows, {"LAST": ops.EXACT_WORDS - 1}))
    clip = dict.fromkeys(("coefficient_ptr", "norm_ptr", "scale_ptr"), "*fp64")
    for value in (False, True):
        found.append(("clip", "clip_coefficient_kernel", clip, {"SCALED": value}))
    return found


def compiled_variants() -> list[tuple[str, str, dict[str, str], dict[str, Any]]]:
    """The launched variants; without `--full`, those that cover pairs of types and flags."""
    variants = launched_variants()
    kernels = sorted({(module, name) for module, name, _, _ in variants})
    chosen = []
    for kernel in kernels:
        own = [variant for variant in variants if variant[:2] == kernel]
        all_types = [variant[2] for variant in own]
        cases = [{**flags, "types": all_types.index(types)} for _, _, types, flags in own]
        numbers = choose(quick=sorted(covering_subset(cases)), full=range(len(own)))
        chosen += [own[number] for number in numbers]
    return chosen


def compile_kernel(
    chip: int, module_name: str, name: str, types: dict[str, str], flags: dict[str, Any]
) -> Any:
    """Compile for a chip, with arguments aligned as PyTorch allocates them."""
    from importlib import import_module

    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    module = import_module(f"poplar.kernels.{module_name}")
    kernel = getattr(module, name)
    sizes = {
        name: getattr(module, name) for name in ("TILE", "COLUMNS") if name in kernel.arg_names
    }
    constants = {**flags, **sizes}
    signature = {
        argument: "constexpr"
        if argument in constants
        else types.get(argument, "*fp32" if argument.endswith("_ptr") else "fp32")
        for argument in kernel.arg_names
    }
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, argument in enumerate(kernel.arg_names)
        if argument.endswith("_ptr") or argument == "numel"
    }
    return triton.compile(
        ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned),
        target=GPUTarget("cuda", chip, 32),
        options={"num_warps": 4, "enable_fp_fusion": False},
    )


@pytest.fixture(scope="module", params=CHIPS)
def compiled(request: pytest.FixtureRequest) -> list[tuple[Any, ...]]:
    """Each variant with its code for a chip."""
    return [(*own, compile_kernel(request.param, *own)) for own in compiled_variants()]


def test_another_key_or_number_of_tensors_compiles_nothing_again():
    from poplar.kernels.codec import decode_kernel, encode_kernel

    fixed = {each.name for each in encode_kernel.params if each.do_not_specialize}
    assert fixed == {"groups", "segments", "first_group", "key_low", "key_high"}
    assert next(each for each in decode_kernel.params if each.name == "ranks").do_not_specialize


@pytest.mark.slow
def test_all_variants_compile_without_fused_multiply_add(compiled):
    for _, name, types, flags, made in compiled:
        assert made.asm["cubin"], (name, types, flags)
        assert "fma.rn.f" not in made.asm["ptx"], (name, types, flags)


@pytest.mark.slow
def test_aligned_loads_are_vectorized(compiled):
    for module, name, types, flags, made in compiled:
        reads = Counter(re.findall(r"ld\.global[\w.]*", made.asm["ptx"]))
        if name == "decode_kernel":  # groups of 66 and 34 bytes are not aligned
            continue
        if name in (
            "pack_kernel",
            "encode_kernel",
        ):  # a tile inside one tensor: a thread's 8 elements of either width
            assert reads["ld.global.v4.b32"] >= 3, (types, flags)
        elif module == "adamw":  # 8 elements of four tensors, and of the copy in each dtype
            assert reads["ld.global.v4.b32"] == (8 + 2 + 1 + 1) * flags["ALIGNED"], flags
        elif module == "exact_sum":  # consecutive threads read consecutive values
            assert reads["ld.global.v4.b32"] == 0
        elif module != "clip" and flags.get("ALIGNED", True):
            tables = {"ld.global.b64", "ld.global.v2.b64"} if module == "rank_sum" else set()
            assert reads.keys() <= {"ld.global.v4.b32"} | tables, (name, flags)
