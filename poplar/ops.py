"""The engine's tensor operators: schemas, fake kernels and plain PyTorch, which is also the oracle.

Each operator is defined once, here. Plain PyTorch serves every device; `libpoplar_ops.so` (CPU) and
`libpoplar_ops_cuda.so` (beside a CUDA build of torch) replace it where they were built, through
torch's stable ABI. Always holds: whoever serves, the bits are the same. Arithmetic is fp32, every
product and every sum is rounded before it is used again, narrowing rounds to nearest even, and sums
run in a fixed order. Only the payload of a NaN is undefined, as in PyTorch itself.

Environment: `POPLAR_OPS=off` leaves the libraries alone, so that plain PyTorch serves.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from poplar import _core

__all__ = [
    "ALIGNMENT",
    "adamw_",
    "block_sums_of_squares",
    "copy_",
    "describe",
    "native",
    "native_cuda",
    "pack_",
    "rank_sum_",
    "rank_sum_claimed_",
    "rank_sum_each_",
    "unpack_",
]

ALIGNMENT = 64
"""Elements per block of the norm's tree; every boundary of a flat buffer is a multiple of it."""

_FLOATING = (torch.float32, torch.bfloat16, torch.float16)

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
        RuntimeError: they differ in dtype, device or size, or are not flat.
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
        grads: any shapes and strides; fp32, bf16 or fp16, mixed; may be empty.
        offsets: first element of each gradient in the bucket, ascending without overlap.
        weight: rounded to fp32, as is its product with each element.
        accumulate: add to what the bucket holds, and leave gaps as they are.
        sums: takes `block_sums_of_squares(bucket)` as it is then, without another read of it. One
            that is not finite tells that an element is not, or is beyond 1.8e19.

    Raises:
        RuntimeError: offsets that overlap or reach past the bucket, another dtype or device.
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
            One of them may be `out` itself. On CUDA they are slices of one tensor at equal
            distances, as transports receive them.
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
        step: number of this step, from 1 on.
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


# Plain PyTorch: the fallback on every device and the oracle of the tests. Checks and messages are
# those of csrc/ops/checks.h.


def _check(holds: bool, message: str) -> None:
    if not holds:
        raise RuntimeError(f"poplar::{message}")


def _check_dtype(tensor: Tensor, name: str) -> None:
    _check(tensor.dtype in _FLOATING, f"{name} must be float32, bfloat16 or float16")


def _check_shape(tensor: Tensor, name: str) -> None:
    _check(
        tensor.dim() == 1 and tensor.is_contiguous(),
        f"{name} must be 1-D and contiguous, got {tensor.dim()} dimensions",
    )


def _check_flat(tensor: Tensor, name: str) -> None:
    _check_shape(tensor, name)
    _check_dtype(tensor, name)


def _pieces(
    name: str, flat: Tensor, tensors: Sequence[Tensor], offsets: Sequence[int]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Each tensor with its place in the flat buffer, after everything has been checked."""
    _check(
        len(tensors) == len(offsets),
        f"{name}: got {len(tensors)} tensors and {len(offsets)} offsets",
    )
    end = 0
    for i, (tensor, offset) in enumerate(zip(tensors, offsets, strict=True)):
        _check(
            offset >= end,
            f"{name}: tensor {i} starts at {offset}, before {end}, where the one before it ends; "
            "offsets must ascend",
        )
        end = offset + tensor.numel()
        _check(
            end <= flat.numel(),
            f"{name}: tensor {i} (offset {offset}, {tensor.numel()} elements) reaches past the "
            f"end of the buffer, {flat.numel()}",
        )
    for tensor in tensors:
        _check(tensor.device == flat.device, f"{name}: all tensors must be on the buffer's device")
        _check_dtype(tensor, name)
    return (
        (tensor, flat[offset : offset + tensor.numel()])
        for tensor, offset in zip(tensors, offsets, strict=True)
    )


@torch.no_grad()
def _plain_copy_(target: Tensor, source: Tensor) -> None:
    for tensor, name in ((target, "target"), (source, "source")):
        _check_shape(tensor, f"copy_: {name}")
    _check(target.device == source.device, "copy_: target and source must be on one device")
    _check(target.dtype == source.dtype, "copy_: target and source must have one dtype")
    _check(
        target.numel() == source.numel(),
        f"copy_: target has {target.numel()} elements, source {source.numel()}",
    )
    target.copy_(source)


@torch.no_grad()
def _plain_pack_(
    bucket: Tensor,
    grads: list[Tensor],
    offsets: list[int],
    weight: float,
    accumulate: bool = False,
    sums: Tensor | None = None,
) -> None:
    _check_flat(bucket, "pack_: bucket")
    pieces = _pieces("pack_", bucket, grads, offsets)
    _check_sums("pack_", bucket, sums)
    rounded = torch.tensor(weight, dtype=torch.float32).item()
    if not accumulate:
        bucket.zero_()
    for grad, place in pieces:
        product = grad.reshape(-1).to(torch.float32) * rounded
        place.copy_(place.to(torch.float32) + product if accumulate else product)
    if sums is not None:
        sums.copy_(_plain_block_sums_of_squares(bucket))


@torch.no_grad()
def _plain_rank_sum_(
    out: Tensor, received: list[Tensor], accumulate: bool = False, sums: Tensor | None = None
) -> None:
    _check_rank_sum("rank_sum_", out, received)
    _check(out.dtype == torch.float32, "rank_sum_: out must be float32")
    _check_sums("rank_sum_", out, sums)
    total = _total(received)
    if accumulate:
        out += total
    else:
        out.copy_(total)
    if sums is not None:
        sums.copy_(_plain_block_sums_of_squares(out))


@torch.no_grad()
def _plain_rank_sum_each_(outs: list[Tensor], received: list[Tensor]) -> None:
    for out in outs:
        _check_rank_sum("rank_sum_each_", out, received)
        _check(out.dtype == outs[0].dtype, "rank_sum_each_: all outs must have one dtype")
    if outs:
        total = _total(received)
        for out in outs:
            out.copy_(total)


@torch.no_grad()
def _plain_rank_sum_claimed_(
    outs: list[Tensor], received: list[Tensor], claims: Tensor, sums: Tensor | None = None
) -> None:
    _check_shape(claims, "rank_sum_claimed_: claims")
    _check(
        claims.element_size() == 1 and claims.numel() == _core.CLAIMS_BYTES,
        f"rank_sum_claimed_: claims must hold {_core.CLAIMS_BYTES} bytes",
    )
    if outs:
        _check_sums("rank_sum_claimed_", outs[0], sums)
    counters = claims.view(torch.int32)  # claimed, nothing, done, sleepers
    first = int(counters[0]) * _core.CHUNK
    rest = [out[first:] for out in outs]
    _plain_rank_sum_each_(rest, [part[first:] for part in received])
    if rest and sums is not None:
        sums[first // ALIGNMENT :].copy_(_plain_block_sums_of_squares(rest[0]))
    chunks = -(-rest[0].numel() // _core.CHUNK) if rest else 0
    counters[0] += chunks
    counters[2] += chunks


@torch.no_grad()
def _plain_adamw_(
    values: Tensor,
    gradient: Tensor,
    mean: Tensor,
    square_mean: Tensor,
    rounded: Tensor | None,
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
    _check_adamw(values, gradient, mean, square_mean, rounded, scale, found_inf)

    def single(value: float) -> float:
        return torch.tensor(value, dtype=torch.float32).item()

    factor = torch.ones((), device=values.device) if scale is None else scale.reshape(())
    scaled = gradient * (-factor if maximize else factor)
    keeps_mean = 1.0 - beta1 < 0.5  # else interpolated from the other end, as torch.lerp does
    change = (scaled - mean) * single(1.0 - beta1 if keeps_mean else -beta1)
    new_mean = (mean if keeps_mean else scaled) + change
    new_square = square_mean * single(beta2) + (scaled * scaled) * single(1.0 - beta2)
    # By way of float64: the root that torch takes on a CPU is not always the nearest fp32.
    root = new_square.double().sqrt().float() * single(1.0 / math.sqrt(1.0 - beta2**step)) + single(
        eps
    )
    moved = (new_mean / root) * single(lr / (1.0 - beta1**step))
    new_values = values * single(1.0 - lr * weight_decay) - moved
    for old, new in ((mean, new_mean), (square_mean, new_square), (values, new_values)):
        # On the device: nobody waits for the flag.
        old.copy_(new if found_inf is None else torch.where(found_inf.reshape(()) == 0, new, old))
    if rounded is not None:
        new = values.to(rounded.dtype)
        rounded.copy_(
            new if found_inf is None else torch.where(found_inf.reshape(()) == 0, new, rounded)
        )


def _check_adamw(
    values: Tensor,
    gradient: Tensor,
    mean: Tensor,
    square_mean: Tensor,
    rounded: Tensor | None,
    scale: Tensor | None,
    found_inf: Tensor | None,
) -> None:
    for tensor in (values, gradient, mean, square_mean):
        _check_flat(tensor, "adamw_: all tensors")
        _check(tensor.dtype == torch.float32, "adamw_: values, gradient and state must be float32")
    for tensor in (gradient, mean, square_mean, *([] if rounded is None else [rounded])):
        _check_flat(tensor, "adamw_: rounded")
        _check(tensor.device == values.device, "adamw_: all tensors must be on one device")
        _check(
            tensor.numel() == values.numel(),
            f"adamw_: values have {values.numel()} elements, another tensor {tensor.numel()}",
        )
    for scalar in (scale, found_inf):
        _check(
            scalar is None
            or (
                scalar.numel() == 1
                and scalar.device == values.device
                and scalar.dtype == torch.float32
            ),
            "adamw_: scale and found_inf must be single float32 elements on the same device",
        )


def _check_sums(name: str, flat: Tensor, sums: Tensor | None) -> None:
    if sums is None:
        return
    _check_shape(sums, f"{name}: sums")
    blocks = -(-flat.numel() // ALIGNMENT)
    _check(
        sums.device == flat.device and sums.dtype == torch.float32 and sums.numel() == blocks,
        f"{name}: sums must be float32 on the same device and hold {blocks} elements, one for each "
        "64",
    )


def _total(received: Sequence[Tensor]) -> Tensor:
    total = received[0].to(torch.float32, copy=True)
    for part in received[1:]:
        total += part.to(torch.float32)
    return total


def _check_rank_sum(name: str, out: Tensor, received: Sequence[Tensor]) -> None:
    _check_flat(out, f"{name}: out")
    _check(bool(received), f"{name}: received must hold at least one rank's part, got none")
    for part in received:
        _check_flat(part, f"{name}: received")
        _check(out.device == part.device, f"{name}: out and received must be on one device")
        _check(part.dtype == received[0].dtype, f"{name}: all parts must have one dtype")
        _check(
            part.numel() == out.numel(),
            f"{name}: each part must hold {out.numel()} elements, as out does, got {part.numel()}",
        )


@torch.no_grad()
def _plain_unpack_(flat: Tensor, outs: list[Tensor], offsets: list[int]) -> None:
    _check_flat(flat, "unpack_: flat")
    pieces = _pieces("unpack_", flat, outs, offsets)
    for i, out in enumerate(outs):
        _check(out.is_contiguous(), f"unpack_: outs must be contiguous, number {i} is not")
    for out, place in pieces:
        out.view(-1).copy_(place)


@torch.no_grad()
def _plain_block_sums_of_squares(flat: Tensor) -> Tensor:
    _check_flat(flat, "block_sums_of_squares: flat")
    blocks = -(-flat.numel() // ALIGNMENT)
    padded = flat.new_zeros(blocks * ALIGNMENT, dtype=torch.float32)
    padded[: flat.numel()] = flat
    lanes = padded.view(blocks, ALIGNMENT).square()
    width = ALIGNMENT
    while width > 1:
        width //= 2
        lanes = lanes[:, :width] + lanes[:, width:]
    return lanes.reshape(-1)


_PLAIN: dict[str, Callable[..., Tensor | None]] = {
    "copy_": _plain_copy_,
    "pack_": _plain_pack_,
    "rank_sum_": _plain_rank_sum_,
    "rank_sum_claimed_": _plain_rank_sum_claimed_,
    "rank_sum_each_": _plain_rank_sum_each_,
    "unpack_": _plain_unpack_,
    "block_sums_of_squares": _plain_block_sums_of_squares,
    "adamw_": _plain_adamw_,
}
for _name, _function in _PLAIN.items():
    _library.impl(_name, _function, "CompositeExplicitAutograd")


# Fake kernels: what torch.compile and FakeTensorMode need to know, shapes and dtypes.


def _fake_copy_(target: Tensor, source: Tensor) -> None:
    return None


def _fake_pack_(
    bucket: Tensor,
    grads: list[Tensor],
    offsets: list[int],
    weight: float,
    accumulate: bool = False,
    sums: Tensor | None = None,
) -> None:
    return None


def _fake_rank_sum_(
    out: Tensor, received: list[Tensor], accumulate: bool = False, sums: Tensor | None = None
) -> None:
    return None


def _fake_rank_sum_each_(outs: list[Tensor], received: list[Tensor]) -> None:
    return None


def _fake_rank_sum_claimed_(
    outs: list[Tensor], received: list[Tensor], claims: Tensor, sums: Tensor | None = None
) -> None:
    return None


def _fake_unpack_(flat: Tensor, outs: list[Tensor], offsets: list[int]) -> None:
    return None


def _fake_block_sums_of_squares(flat: Tensor) -> Tensor:
    return flat.new_empty((flat.numel() + ALIGNMENT - 1) // ALIGNMENT, dtype=torch.float32)


def _fake_adamw_(
    values: Tensor,
    gradient: Tensor,
    mean: Tensor,
    square_mean: Tensor,
    rounded: Tensor | None,
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
    return None


_FAKE: dict[str, Callable[..., Tensor | None]] = {
    "copy_": _fake_copy_,
    "pack_": _fake_pack_,
    "rank_sum_": _fake_rank_sum_,
    "rank_sum_claimed_": _fake_rank_sum_claimed_,
    "rank_sum_each_": _fake_rank_sum_each_,
    "unpack_": _fake_unpack_,
    "block_sums_of_squares": _fake_block_sums_of_squares,
    "adamw_": _fake_adamw_,
}
for _name, _function in _FAKE.items():
    torch.library.register_fake(f"poplar::{_name}", _function, lib=_library)


# The libraries, which lie beside `_core` (not beside this file in an editable install).


def _load(file_name: str) -> str:
    """Load one library of operators; say what serves now."""
    if os.environ.get("POPLAR_OPS", "").lower() == "off":
        return "plain PyTorch (POPLAR_OPS=off)"
    path = Path(_core.__file__).with_name(file_name)
    if not path.exists():
        return f"plain PyTorch ({file_name} was not built)"
    torch.ops.load_library(path)
    return f"C++ ({file_name})"


_cpu_state = _load("libpoplar_ops.so")
# A library with CUDA code cannot be loaded beside a CPU build of torch: symbols are missing there.
_cuda_state = (
    _load("libpoplar_ops_cuda.so") if torch.version.cuda else "none (this torch has no CUDA)"
)

native: bool = _cpu_state.startswith("C++")
"""Whether the C++ library serves CPU tensors."""
native_cuda: bool = _cuda_state.startswith("C++")
"""Whether the CUDA library serves CUDA tensors."""
