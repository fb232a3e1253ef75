"""The engine's tensor operators: schemas, fake kernels, and who serves them.

Each operator is defined once, here. Plain PyTorch (`plain`, which is also the oracle) serves every
device; `libpoplar_ops.so` (CPU) and `libpoplar_ops_cuda.so` (beside a CUDA build of torch) replace
it where they were built, through torch's stable ABI. Where the latter was not, Triton's kernels
serve CUDA (`through_triton`). Always holds: whoever serves, the bits are the same. Arithmetic is
fp32, every product and every sum is rounded before it is used again, narrowing rounds to nearest
even, and sums run in a fixed order. Only the payload of a NaN is undefined, as in PyTorch itself.

Under `torch.compile` each is a node of the graph. A Python number that changes (a weight, a
learning rate, a step) makes a new graph, as with PyTorch's own: compile what lies around them.

Environment: `POPLAR_OPS=off` leaves all of that alone, so that plain PyTorch serves;
`POPLAR_OPS=triton` leaves the CUDA library alone, so that Triton does.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from poplar import _core
from poplar.ops import plain, through_triton

__all__ = [
    "ALIGNMENT",
    "EXACT_BITS",
    "EXACT_WORDS",
    "adamw_",
    "block_sums_of_squares",
    "clip_coefficient",
    "copy_",
    "describe",
    "exact_norm",
    "exact_sum_",
    "native",
    "native_cuda",
    "pack_",
    "rank_sum_",
    "rank_sum_claimed_",
    "rank_sum_each_",
    "unpack_",
]

ALIGNMENT = plain.ALIGNMENT
"""Elements per block of the norm's tree; every boundary of a flat buffer is a multiple of it."""

EXACT_WORDS = plain.EXACT_WORDS
"""Elements of an exact sum: see `exact_sum_`."""
EXACT_BITS = plain.EXACT_BITS
"""By how many bits each of them counts for more than the one before."""

_library = torch.library.Library("poplar", "DEF")
_library.define("copy_(Tensor(a!) target, Tensor source) -> ()")
_library.define(
    "pack_(Tensor(a!) bucket, Tensor[] grads, int[] offsets, float weight, "
    "bool accumulate=False, Tensor(b!)? sums=None) -> ()"
)
_library.define(
    "rank_sum_(Tensor(a!) out, Tensor[] received, bool accumulate=False, "
    "Tensor(b!)? sums=None) -> ()"
)
_library.define("rank_sum_each_(Tensor(a!)[] outs, Tensor[] received) -> ()")
_library.define(
    "rank_sum_claimed_(Tensor(a!)[] outs, Tensor[] received, Tensor(b!) claims, "
    "Tensor(c!)? sums=None) -> ()"
)
_library.define("unpack_(Tensor flat, Tensor(a!)[] outs, int[] offsets) -> ()")
_library.define("block_sums_of_squares(Tensor flat) -> Tensor")
_library.define("exact_sum_(Tensor(a!) total, Tensor values) -> ()")
_library.define("exact_norm(Tensor totals) -> Tensor")
_library.define("clip_coefficient(Tensor norm, float max_norm, Tensor? scale=None) -> Tensor")
_library.define(
    "adamw_(Tensor(a!) values, Tensor gradient, Tensor(b!) mean, Tensor(c!) square_mean, "
    "Tensor(d!)? rounded, float lr, float beta1, float beta2, float eps, float weight_decay, "
    "float step, bool maximize=False, Tensor? scale=None, Tensor? found_inf=None) -> ()"
)


# The face: what the engine calls.


def copy_(target: Tensor, source: Tensor) -> None:
    """As `target.copy_(source)`, for large flat tensors that are not read again soon.

    Args:
        target: 1-D, contiguous, any dtype.
        source: of the same dtype and as many elements.

    Raises:
        RuntimeError: they differ in dtype, device or size, are not flat, or share memory in part.
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
    sums: Tensor | None = None,
) -> None:
    """Write or add `weight * grads[i]` at `bucket[offsets[i]:]`, for every i, in one read.

    Args:
        bucket: 1-D, contiguous; fp32, bf16 or fp16. Every element is written: gaps become 0, unless
            `accumulate`.
        grads: any shapes and strides; fp32, bf16 or fp16, mixed; may be empty. In the bucket's own
            memory only at the very place to which they go.
        offsets: first element of each gradient in the bucket, ascending without overlap.
        weight: rounded to fp32, as is its product with each element.
        accumulate: add to what the bucket holds, and leave gaps as they are.
        sums: takes `block_sums_of_squares(bucket)` as it is then, without another read of it. One
            that is not finite tells that one of its 64 elements is not, or that the root of their
            squares is beyond 1.8e19, where fp32 ends.

    Raises:
        RuntimeError: offsets that overlap or reach past the bucket, a gradient elsewhere in the
            bucket's memory, another dtype or device.
    """
    with torch.no_grad():
        torch.ops.poplar.pack_(bucket, grads, offsets, weight, accumulate, sums)
    _written(bucket, sums)


def rank_sum_(
    out: Tensor,
    received: Sequence[Tensor],
    accumulate: bool = False,
    sums: Tensor | None = None,
) -> None:
    """Sum what ranks sent, in rank order: `out = ((r0 + r1) + r2) + ...`.

    Args:
        out: fp32, 1-D, contiguous, `m` elements.
        received: each rank's part, `m` elements, 1-D, contiguous; fp32, bf16 or fp16, all the same.
            One of them may be `out` itself; none overlaps it otherwise.
        accumulate: add the finished total to `out` instead.
        sums: takes `block_sums_of_squares(out)` as it is then: see `pack_`.

    Raises:
        RuntimeError: no parts, sizes that don't fit together, another dtype or device.
    """
    with torch.no_grad():
        torch.ops.poplar.rank_sum_(out, received, accumulate, sums)
    _written(out, sums)


def rank_sum_each_(outs: Sequence[Tensor], received: Sequence[Tensor]) -> None:
    """Sum what ranks sent, as `rank_sum_` does, and write it to every out, rounded to its dtype.

    Args:
        outs: fp32, bf16 or fp16, all the same, 1-D, contiguous, `m` elements each; they may be the
            very parts.
        received: as in `rank_sum_`.

    Raises:
        RuntimeError: no parts, sizes that don't fit together, another dtype or device.
    """
    with torch.no_grad():
        torch.ops.poplar.rank_sum_each_(outs, received)
    _written(*outs)


def rank_sum_claimed_(
    outs: Sequence[Tensor],
    received: Sequence[Tensor],
    claims: Tensor,
    sums: Tensor | None = None,
) -> None:
    """As `rank_sum_each_`, a chunk at a time, of those that nobody else has claimed.

    Several processes that call it with the same shared memory share the work; each returns when
    there is nothing left to claim, and others may then still be at theirs.

    Args:
        outs: as in `rank_sum_each_`, in shared memory.
        received: as in `rank_sum_each_`.
        claims: `_core.CLAIMS_BYTES` of uint8, zeros before the first: see `csrc/include/poplar/
            claims.h`. Plain PyTorch claims without care for others.
        sums: in shared memory; whoever adds a chunk leaves `block_sums_of_squares(outs[0])` of it.

    Raises:
        RuntimeError: as `rank_sum_each_`, or claims of another size.
    """
    with torch.no_grad():
        torch.ops.poplar.rank_sum_claimed_(outs, received, claims, sums)
    _written(*outs, claims, sums)


def unpack_(flat: Tensor, outs: Sequence[Tensor], offsets: Sequence[int]) -> None:
    """Copy `flat[offsets[i]:]` into `outs[i]`, each rounded to its own dtype.

    Args:
        flat: 1-D, contiguous; fp32, bf16 or fp16.
        outs: contiguous, any shapes; fp32, bf16 or fp16, mixed; may be empty.
        offsets: first element of each out in the buffer, ascending without overlap.

    Raises:
        RuntimeError: offsets that overlap or reach past the buffer, an out that is not contiguous,
            another dtype or device.
    """
    with torch.no_grad():
        torch.ops.poplar.unpack_(flat, outs, offsets)
    _written(*outs)


def block_sums_of_squares(flat: Tensor) -> Tensor:
    """Sum the squares of each 64-element block, in a fixed tree: the leaves of a gradient norm.

    Args:
        flat: 1-D, contiguous; fp32, bf16 or fp16. A tail block counts as if padded with zeros.

    Returns:
        fp32, `ceil(len(flat) / 64)` sums. The tree halves the block: `x[:32] + x[32:]`, then 16 and
        16, down to 1, so a shard's sums are the same whichever rank holds it.

    Raises:
        RuntimeError: another dtype or shape.
    """
    with torch.no_grad():
        sums: Tensor = torch.ops.poplar.block_sums_of_squares(flat)
    return sums


def exact_sum_(total: Tensor, values: Tensor) -> None:
    """Add values to a sum that rounds nothing: the same bits in any order, however they are cut.

    `total` is a fixed-point number that has a place for every fp32 (Kulisch's accumulator): element
    i counts in units of 2^(28 i - 149). Nothing is carried, so totals of several ranks are added by
    `+`, and the same values give the same bits.

    Args:
        total: int64, `EXACT_WORDS` elements, zeros at first; room for 2^34 values. The last one
            counts the values that are not finite, which are left out.
        values: fp32, 1-D, contiguous.

    Raises:
        RuntimeError: another dtype, size or device.
    """
    with torch.no_grad():
        torch.ops.poplar.exact_sum_(total, values)
    _written(total)


def exact_norm(totals: Tensor) -> Tensor:
    """The root of what exact sums of squares add up to, as `exact_sum_` leaves them.

    Args:
        totals: int64, contiguous; one sum a row, in its first `EXACT_WORDS` elements. What they add
            up to is not negative.

    Returns:
        One float64; infinite if a value was not finite. The same sum gives the same bits on every
        device, however it came about.

    Raises:
        RuntimeError: another dtype or shape.
    """
    with torch.no_grad():
        norm: Tensor = torch.ops.poplar.exact_norm(totals)
    return norm


def clip_coefficient(norm: Tensor, max_norm: float, scale: Tensor | None = None) -> Tensor:
    """What brings a norm down to `max_norm`: `min(1, max_norm / (norm * scale + 1e-6))`.

    As `torch.nn.utils.clip_grad_norm_` has it, in one launch and without a wait for the device.

    Args:
        norm: one float64.
        max_norm: rounded to fp32.
        scale: one float64 on the same device; None for 1.

    Returns:
        One float64; NaN if the norm is.

    Raises:
        RuntimeError: another dtype, size or device.
    """
    with torch.no_grad():
        coefficient: Tensor = torch.ops.poplar.clip_coefficient(norm, max_norm, scale)
    return coefficient


def adamw_(
    values: Tensor,
    gradient: Tensor,
    mean: Tensor,
    square_mean: Tensor,
    rounded: Tensor | None = None,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: float,
    maximize: bool = False,
    scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """One step of AdamW on a flat shard: everything is read and written once, 28 or 30 bytes.

    The operations of `torch.optim.AdamW`, so equal to it to rounding.

    Args:
        values: fp32, 1-D, contiguous, as are all others but `rounded`: the (master) parameters.
        gradient: left as it is.
        mean: first moment, `exp_avg`.
        square_mean: second moment, `exp_avg_sq`.
        rounded: fp32, bf16 or fp16: takes the new values.
        lr: learning rate.
        beta1: decay of `mean`.
        beta2: decay of `square_mean`.
        eps: added to the root.
        weight_decay: decoupled, times `lr`.
        step: number of this step, at least 1.
        maximize: against the gradient's direction.
        scale: one element on the same device; the gradient times this is what counts (weight,
            unscaling and clipping).
        found_inf: one element on the same device; if it is not 0, nothing is changed.

    Raises:
        RuntimeError: another dtype, size or device.
    """
    with torch.no_grad():
        torch.ops.poplar.adamw_(
            values,
            gradient,
            mean,
            square_mean,
            rounded,
            lr,
            beta1,
            beta2,
            eps,
            weight_decay,
            step,
            maximize,
            scale,
            found_inf,
        )
    _written(values, mean, square_mean, rounded)


def describe() -> str:
    """Say in a line what serves the operators, and why, for `poplar doctor` and bug reports."""
    return f"operators on CPU: {_cpu_state}; on CUDA: {_cuda_state}"


def _written(*tensors: Tensor | None) -> None:
    """Tell autograd, as every in-place operation of PyTorch does; the C++ kernels cannot.

    Without it, a backward that saved one of these tensors would use the new values unnoticed.
    """
    if not torch.compiler.is_compiling():
        torch.autograd.graph.increment_version(
            [t for t in tensors if t is not None and not t.is_inference()]
        )


def _fake_block_sums(flat: Tensor) -> Tensor:
    return flat.new_empty((flat.numel() + ALIGNMENT - 1) // ALIGNMENT, dtype=torch.float32)


def _fake_scalar(beside: Tensor, *_: object, **__: object) -> Tensor:
    return beside.new_empty((), dtype=torch.float64)


def _fake_write(*_: object, **__: object) -> None:
    """Of the operators that only write to what they are given."""


_FAKES: dict[str, Callable[..., object]] = {
    "block_sums_of_squares": _fake_block_sums,
    "exact_norm": _fake_scalar,
    "clip_coefficient": _fake_scalar,
}
for _name, _function in plain.FUNCTIONS.items():
    _library.impl(_name, _function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"poplar::{_name}", _FAKES.get(_name, _fake_write), lib=_library)


# The libraries, which lie beside `_core` (not beside this file in an editable install).

_CHOICE = os.environ.get("POPLAR_OPS", "").lower()


def _load(file_name: str) -> str:
    """Load one library of operators; say what serves now."""
    if _CHOICE == "off":
        return "plain PyTorch (POPLAR_OPS=off)"
    path = Path(_core.__file__).with_name(file_name)
    if not path.exists():
        return f"plain PyTorch ({file_name} was not built)"
    torch.ops.load_library(path)
    return f"C++ ({file_name})"


def _load_cuda(file_name: str) -> str:
    """As `_load`; Triton takes the place of a library that was not built."""
    # A library with CUDA code can't be loaded beside a CPU build of torch: symbols are missing.
    if not torch.version.cuda:
        return "none (this torch has no CUDA)"
    state = "plain PyTorch (POPLAR_OPS=triton)" if _CHOICE == "triton" else _load(file_name)
    if _CHOICE == "triton" and not through_triton.is_here():
        raise ImportError("POPLAR_OPS=triton, but there is no Triton here: pip install triton")
    if state.startswith("C++") or _CHOICE == "off" or not through_triton.is_here():
        return state
    for name, function in through_triton.FUNCTIONS.items():
        _library.impl(name, function, "CUDA")
    return state.replace("plain PyTorch", "Triton", 1)


def _warn_if_not_built(state: str) -> None:
    """Warn once per job if the slower PyTorch versions replace operators that were not built."""
    if "was not built" in state and os.environ.get("RANK", "0") == "0":
        warnings.warn(
            "Poplar was installed without its C++ operators for CPU, because the build did not "
            "find torch >= 2.10. Slower PyTorch code computes the same results. To build the operators, "
            "install torch first and then Poplar again: pip install --force-reinstall --no-deps . "
            "(POPLAR_OPS=off silences this warning)",
            RuntimeWarning,
            stacklevel=2,
        )


_cpu_state = _load("libpoplar_ops.so")
_warn_if_not_built(_cpu_state)
_cuda_state = _load_cuda("libpoplar_ops_cuda.so")

native: bool = _cpu_state.startswith("C++")
"""Whether the C++ library serves CPU tensors."""
native_cuda: bool = not _cuda_state.startswith(("plain", "none"))
"""Whether the CUDA library or Triton serves CUDA tensors."""
