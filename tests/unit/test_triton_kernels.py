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
from operator_cases import CASES, Implementation
from subset import choose, covering_subset

from poplar import ops
from poplar.ops import plain, triton_backend

triton = pytest.importorskip("triton", reason="Triton is not installed: its kernels were not run")

NAMES = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16"}
CHIPS = [80, 90]
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


def check(case: str) -> None:
    from poplar import kernels

    CASES[case](Implementation(kernels, rounds_bf16=False))


@pytest.mark.parametrize("case", CASES)
def test_every_case_gives_the_bits_of_plain_pytorch(interpreted, case):
    interpreted(check, case)


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
