"""The engine's tensor operators: schemas, fake kernels, and the choice of their providers.

Plain PyTorch (`plain`, also the oracle of the tests) runs on every device. `libpoplar_ops.so` (CPU)
and `libpoplar_ops_cuda.so` (with a CUDA build of torch) replace it where they were built, through
torch's stable ABI. Without the CUDA library, Triton kernels run on CUDA (`triton_backend`). All
providers give the same bits: arithmetic is fp32, every product and every sum is rounded before it
is used again, narrowing rounds to nearest even, and sums have a fixed order. Only the payload of a
NaN is undefined, as in PyTorch itself.

The C++ operators raise a RuntimeError that names what is wrong for other dtypes, sizes, layouts
and devices than documented. The others rely on their callers. All refuse gradients to pack that are
in the bucket's memory at another place than their own.

Under `torch.compile` each operator is a node of the graph. As with PyTorch's own operators, a
changed Python number (a weight, a learning rate, a step) compiles a new graph, so compile the code
around them.

Environment: `POPLAR_OPS=off` uses plain PyTorch only; `POPLAR_OPS=triton` uses Triton instead of
the CUDA library.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from poplar import _core
from poplar.ops import plain, triton_backend
from poplar.ops.plain import ALIGNMENT as ALIGNMENT
from poplar.ops.plain import EXACT_BITS as EXACT_BITS
from poplar.ops.plain import EXACT_WORDS as EXACT_WORDS
from poplar.system.cuda_architectures import has_kernels

_library = torch.library.Library("poplar", "DEF")
# No argument has a default: torch calls Python functions without the arguments that equal one.
_library.define("copy_(Tensor(a!) target, Tensor source) -> ()")
_library.define(
    "pack_(Tensor(a!) bucket, Tensor[] grads, int[] offsets, float weight, bool accumulate) -> ()"
)
_library.define(
    "rank_sum_(Tensor(a!) out, Tensor[] received, bool accumulate, Tensor(b!)? sums) -> ()"
)
_library.define(
    "rank_sum_chunks_(Tensor(a!) out, Tensor[] received, Tensor(b!) work_counters, "
    "Tensor(c!)? sums) -> ()"
)
_library.define(
    "encode_(Tensor(a!) codes, Tensor[] values, int[] offsets, float weight, int bits, int first, "
    "int key) -> ()"
)
_library.define(
    "decode_sum_(Tensor(a!) out, Tensor[] received, int bits, bool accumulate, "
    "Tensor(b!)? sums) -> ()"
)
_library.define("block_sums_of_squares(Tensor flat) -> Tensor")
_library.define("exact_sum_(Tensor(a!) total, Tensor[] values) -> ()")
_library.define("exact_norm(Tensor totals) -> Tensor")
_library.define("clip_coefficient(Tensor norm, float max_norm, Tensor? scale) -> Tensor")
_library.define(
    "adamw_(Tensor(a!)[] values, Tensor[] gradients, Tensor(b!)[] means, "
    "Tensor(c!)[] square_means, Tensor(d!)[] rounded, float[] rules, Tensor? scale, "
    "Tensor? found_inf) -> ()"
)


# The functions that the engine calls.


def copy_(target: Tensor, source: Tensor) -> None:
    """`target.copy_(source)` for large flat tensors that are not read again soon.

    Args:
        target: 1-D, contiguous, any dtype.
        source: same dtype and number of elements.
    """
    with torch.no_grad():
        torch.ops.poplar.copy_(target, source)
    _written(target)


def pack_(
    bucket: Tensor,
    grads: Sequence[Tensor],
    offsets: Sequence[int],
    weight: float,
    accumulate: bool = False,
) -> None:
    """Write or add `weight * grads[i]` at `bucket[offsets[i]:]` for every i, in one read.

    Args:
        bucket: 1-D, contiguous; fp32, bf16 or fp16. Every element is written: gaps become 0, unless
            `accumulate`.
        grads: any shapes and strides; fp32, bf16 or fp16, mixed; may be empty. A gradient in the
            bucket's own memory must be at its own offset.
        offsets: first element of each gradient in the bucket, ascending without overlap.
        weight: rounded to fp32, as is its product with each element.
        accumulate: add to the bucket, and leave gaps unchanged.

    Raises:
        RuntimeError: a gradient is in the bucket's memory at another offset.
    """
    with torch.no_grad():
        torch.ops.poplar.pack_(bucket, grads, offsets, weight, accumulate)
    _written(bucket)


def rank_sum_(
    out: Tensor,
    received: Sequence[Tensor],
    accumulate: bool = False,
    sums: Tensor | None = None,
) -> None:
    """Sum the parts of all ranks in rank order: `out = ((r0 + r1) + r2) + ...`.

    Args:
        out: fp32, 1-D, contiguous, `m` elements.
        received: each rank's part, `m` elements, 1-D, contiguous; fp32, bf16 or fp16, all the same.
            One of them may be `out` itself; otherwise none overlaps it.
        accumulate: add the finished total to `out` instead.
        sums: receives `block_sums_of_squares(out)` of the result, without another read of it. A sum
            that is not finite means that one of its 64 elements is not, or that the root of their
            squares is beyond 1.8e19, the limit of fp32.
    """
    with torch.no_grad():
        torch.ops.poplar.rank_sum_(out, received, accumulate, sums)
    _written(out, sums)


def rank_sum_chunks_(
    out: Tensor, received: Sequence[Tensor], work_counters: Tensor, sums: Tensor | None = None
) -> None:
    """Sum the parts of all ranks as `rank_sum_` does, in the chunks that no other process takes.

    Several processes that call it with the same shared memory share the work. Each returns when no
    chunk is left to take; others may then still be working on theirs.

    Args:
        out: as in `rank_sum_`, in shared memory.
        received: as in `rank_sum_`.
        work_counters: `_core.WORK_COUNTERS_BYTES` of uint8, zero before the first call: see
            `csrc/include/poplar/work_sharing.h`. Plain PyTorch takes all chunks without atomics.
        sums: in shared memory; receives `block_sums_of_squares(out)` of the chunks.
    """
    with torch.no_grad():
        torch.ops.poplar.rank_sum_chunks_(out, received, work_counters, sums)
    _written(out, work_counters, sums)


def encode_(
    codes: Tensor,
    values: Sequence[Tensor],
    offsets: Sequence[int],
    weight: float,
    bits: int,
    *,
    first: int,
    key: int,
) -> None:
    """Write `weight * values[i]` from element `offsets[i]` on for every i, as codes, in one read.

    Rounding is random and unbiased. A group of 64 elements has the same codes in whichever part of
    the flat tensor it is encoded: see `csrc/include/poplar/codec.h`.

    Args:
        codes: uint8, 1-D, contiguous, at an even address; `codec.encoded_bytes` of a number of
            elements. Every byte is written. Elements without a value are 0.
        values: any shapes and strides; fp32, bf16 or fp16, mixed; may be empty.
        offsets: first element of each tensor, ascending without overlap.
        weight: rounded to fp32, as is its product with each element.
        bits: 8 or 4 per element.
        first: number of the first element in the whole flat tensor, a multiple of 64.
        key: seed of the rounding; different for each tensor, rank and step.
    """
    with torch.no_grad():
        torch.ops.poplar.encode_(codes, values, offsets, weight, bits, first, key)
    _written(codes)


def decode_sum_(
    out: Tensor,
    received: Sequence[Tensor],
    bits: int,
    accumulate: bool = False,
    sums: Tensor | None = None,
) -> None:
    """Sum what all ranks encoded, in rank order and fp32, in one read and one write.

    A group that held a NaN, an infinity or coefficients beyond fp32 at any rank becomes NaN.

    Args:
        out: fp32, bf16 or fp16, 1-D, contiguous.
        received: each of at most 1024 ranks' codes of the same elements, as `encode_` writes them.
            None overlaps `out`.
        bits: 8 or 4, as encoded.
        accumulate: add the finished total to `out` instead.
        sums: with fp32 `out`; see `rank_sum_`.
    """
    with torch.no_grad():
        torch.ops.poplar.decode_sum_(out, received, bits, accumulate, sums)
    _written(out, sums)


def block_sums_of_squares(flat: Tensor) -> Tensor:
    """Sum the squares of each 64-element block in a fixed tree: the leaves of a gradient norm.

    Args:
        flat: 1-D, contiguous; fp32, bf16 or fp16. The last block is padded with zeros.

    Returns:
        fp32, `ceil(len(flat) / 64)` sums. The tree halves the block: `x[:32] + x[32:]`, then 16 and
        16, down to 1, so a shard's sums are the same on whichever rank.
    """
    with torch.no_grad():
        sums: Tensor = torch.ops.poplar.block_sums_of_squares(flat)
    return sums


def exact_sum_(total: Tensor, values: Sequence[Tensor]) -> None:
    """Add the values of many tensors to an exact sum: the same bits in any order and any division.

    `total` is a fixed-point number that can represent every fp32 value (Kulisch's accumulator):
    element i counts in units of 2^(28 i - 149). Carries are not propagated, so totals of several
    ranks are added by `+`, and the same values give the same bits. One launch serves more than a
    thousand tensors.

    Args:
        total: int64, `EXACT_WORDS` elements, zeros at first; holds up to 2^34 values. The last
            element counts the values that are not finite, which are left out.
        values: fp32, 1-D, contiguous; any number of tensors, which may be empty.
    """
    with torch.no_grad():
        torch.ops.poplar.exact_sum_(total, values)
    _written(total)


def exact_norm(totals: Tensor) -> Tensor:
    """The square root of exact sums of squares, as `exact_sum_` computes them.

    Args:
        totals: int64, contiguous; one sum per row, in its first `EXACT_WORDS` elements. Their total
            is not negative.

    Returns:
        One float64; infinite if a value was not finite. Equal sums give the same bits on every
        device, whichever values they consist of.
    """
    with torch.no_grad():
        norm: Tensor = torch.ops.poplar.exact_norm(totals)
    return norm


def clip_coefficient(norm: Tensor, max_norm: float, scale: Tensor | None = None) -> Tensor:
    """The factor that limits a norm to `max_norm`: `min(1, max_norm / (norm * scale + 1e-6))`.

    As in `torch.nn.utils.clip_grad_norm_`, in one launch and without a host synchronization.

    Args:
        norm: one float64.
        max_norm: rounded to fp32.
        scale: one float64 on the same device; None for 1.

    Returns:
        One float64; NaN if the norm is.
    """
    with torch.no_grad():
        coefficient: Tensor = torch.ops.poplar.clip_coefficient(norm, max_norm, scale)
    return coefficient


class AdamWRule(NamedTuple):
    """One step of AdamW for one tensor."""

    lr: float
    beta1: float
    """Decay of the first moment."""
    beta2: float
    """Decay of the second moment."""
    eps: float
    """Added to the root."""
    weight_decay: float
    """Decoupled, times `lr`."""
    step: float
    """Number of this step, at least 1."""
    maximize: bool = False
    """Update in the direction of the gradient."""


def adamw_(
    values: Sequence[Tensor],
    gradients: Sequence[Tensor],
    means: Sequence[Tensor],
    square_means: Sequence[Tensor],
    rounded: Sequence[Tensor | None],
    rules: Sequence[AdamWRule],
    *,
    scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """One step of AdamW on many flat shards, in one launch for about 350 of them; reads and writes
    everything once, 28 or 32 bytes per element.

    The operations of `torch.optim.AdamW`, so equal to it except for rounding. The lists have one
    entry per shard.

    Args:
        values: the (master) parameters. fp32, 1-D, contiguous, as are all others except `rounded`.
        gradients: not changed.
        means: first moments, `exp_avg`.
        square_means: second moments, `exp_avg_sq`.
        rounded: fp32, bf16 or fp16, mixed: the rounded values, which are updated too; None for
            none. An element that is not the rounded value was written since, and replaces it.
        rules: hyper-parameters and step numbers.
        scale: one element on the same device; the gradients are multiplied by it (weight, unscaling
            and clipping).
        found_inf: one element on the same device; if it is not 0, nothing is changed.
    """
    if not values:
        return
    absent = values[0].new_empty(0)
    outs = [absent if out is None else out for out in rounded]
    numbers = list(chain.from_iterable(rules))
    with torch.no_grad():
        torch.ops.poplar.adamw_(
            values, gradients, means, square_means, outs, numbers, scale, found_inf
        )
    _written(*values, *means, *square_means, *rounded)


@dataclass(frozen=True, slots=True)
class Provider:
    """What runs the operators on one type of device."""

    name: str
    """`C++`, `Triton`, `plain PyTorch` or `none`."""
    detail: str
    """The library, or the reason for this provider."""

    def __str__(self) -> str:
        return f"{self.name} ({self.detail})"


def providers() -> dict[str, Provider]:
    """The providers by device type: `cpu` and `cuda`."""
    return {"cpu": _cpu_provider, "cuda": _cuda_provider}


def describe() -> str:
    """The providers in one line, for `poplar doctor` and bug reports."""
    found = providers()
    return f"operators on CPU: {found['cpu']}; on CUDA: {found['cuda']}"


def _written(*tensors: Tensor | None) -> None:
    """Increment the versions that autograd checks, as PyTorch's in-place operations do.

    The C++ kernels cannot do that. Without it, a backward that saved one of these tensors would use
    the new values without an error.
    """
    if not torch.compiler.is_compiling():
        torch.autograd.graph.increment_version(
            [t for t in tensors if t is not None and not t.is_inference()]
        )


def _fake_block_sums(flat: Tensor) -> Tensor:
    return flat.new_empty((flat.numel() + ALIGNMENT - 1) // ALIGNMENT, dtype=torch.float32)


def _fake_scalar(like: Tensor, *_: object, **__: object) -> Tensor:
    return like.new_empty((), dtype=torch.float64)


def _fake_write(*_: object, **__: object) -> None:
    """For operators that only write to their arguments."""


_FAKES: dict[str, Callable[..., object]] = {
    "block_sums_of_squares": _fake_block_sums,
    "exact_norm": _fake_scalar,
    "clip_coefficient": _fake_scalar,
}
for _name, _function in plain.FUNCTIONS.items():
    _library.impl(_name, _function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"poplar::{_name}", _FAKES.get(_name, _fake_write), lib=_library)


# The libraries are in the folder of `_core` (in an editable install, not in that of this file).

_CHOICE = os.environ.get("POPLAR_OPS", "").lower()
if _CHOICE not in ("", "off", "triton"):
    raise ValueError(f"POPLAR_OPS must be off, triton or unset, got {_CHOICE!r}")
_CPP, _TRITON, _PYTORCH, _NONE = "C++", "Triton", "plain PyTorch", "none"


def _load(file_name: str) -> Provider:
    """Load one library of operators if it was built; returns the provider."""
    if _CHOICE == "off":
        return Provider(_PYTORCH, "POPLAR_OPS=off")
    path = Path(_core.__file__).with_name(file_name)
    if not path.exists():
        return Provider(_PYTORCH, f"{file_name} was not built")
    torch.ops.load_library(path)
    return Provider(_CPP, file_name)


def _load_cuda(file_name: str) -> Provider:
    """As `_load`; Triton replaces a library that was not built."""
    # The CUDA library cannot be loaded with a CPU build of torch, which lacks its symbols.
    if not torch.version.cuda:
        return Provider(_NONE, "this torch has no CUDA")
    if _CHOICE == "triton":
        if not triton_backend.is_available():
            raise ImportError("POPLAR_OPS=triton needs Triton: pip install triton")
        provider = Provider(_PYTORCH, "POPLAR_OPS=triton")
    else:
        provider = _load(file_name)
    if provider.name == _CPP or _CHOICE == "off" or not triton_backend.is_available():
        return provider
    for name, function in triton_backend.FUNCTIONS.items():
        _library.impl(name, function, "CUDA")
    return replace(provider, name=_TRITON)


def _warn_if_not_built(provider: Provider) -> None:
    """Warn once per job if the slower PyTorch versions replace operators that were not built."""
    if provider.name == _PYTORCH and _CHOICE != "off" and os.environ.get("RANK", "0") == "0":
        warnings.warn(
            "Poplar was installed without its C++ operators for CPU, because the build did not "
            "find torch >= 2.10. Slower PyTorch code computes the same results. To build the "
            "operators, install torch first and then Poplar again: "
            "pip install --force-reinstall --no-deps . (POPLAR_OPS=off silences this warning)",
            RuntimeWarning,
            stacklevel=2,
        )


_cpu_provider = _load("libpoplar_ops.so")
_warn_if_not_built(_cpu_provider)
_cuda_provider = _load_cuda("libpoplar_ops_cuda.so")


def problem_on(capability: tuple[int, int]) -> tuple[str, str] | None:
    """Why the operators cannot run on a CUDA device of this compute capability, and what to do.

    None if they can.

    The CUDA library replaces Triton and plain PyTorch when it is loaded, and a launch on a device
    for which it was not compiled fails.
    """
    built_for = _core.CUDA_ARCHITECTURES  # empty: no CUDA library, or unknown
    if _cuda_provider.name != _CPP or not built_for:
        return None
    if has_kernels(capability, built_for.split(",")):
        return None
    return (
        f"Poplar's CUDA operators were not compiled for sm_{capability[0]}{capability[1]}, only "
        f"for {built_for}",
        "build Poplar again with an nvcc that supports all GPUs of the job, and without "
        "CUDAARCHS and CMAKE_CUDA_ARCHITECTURES or with these GPUs in it. POPLAR_OPS=triton (from "
        "capability 8.0 on) or POPLAR_OPS=off run without them, more slowly",
    )


native: bool = _cpu_provider.name == _CPP
"""Whether the C++ library runs the operators on the CPU."""
native_cuda: bool = _cuda_provider.name in (_CPP, _TRITON)
"""Whether the CUDA library or Triton runs the operators on CUDA."""
