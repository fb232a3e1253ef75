"""The engine's tensor operators: schemas, fake kernels and plain PyTorch, which is also the oracle.

Each operator is defined once, here. Plain PyTorch serves every device; `libpoplar_ops.so` (CPU) and
`libpoplar_ops_cuda.so` (beside a CUDA build of torch) replace it where they were built, through
torch's stable ABI. Always holds: whoever serves, the bits are the same. Arithmetic is fp32, every
product and every sum is rounded before it is used again, narrowing rounds to nearest even, and sums
run in a fixed order. Only the payload of a NaN is undefined, as in PyTorch itself.

Environment: `POPLAR_OPS=off` leaves the libraries alone, so that plain PyTorch serves.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from poplar import _core

__all__ = [
    "ALIGNMENT",
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
    "bool accumulate=False) -> ()"
)
_library.define("rank_sum_(Tensor(a!) out, Tensor[] received, bool accumulate=False) -> ()")
_library.define("rank_sum_each_(Tensor(a!)[] outs, Tensor[] received) -> ()")
_library.define("rank_sum_claimed_(Tensor(a!)[] outs, Tensor[] received, Tensor(b!) claims) -> ()")
_library.define("unpack_(Tensor flat, Tensor(a!)[] outs, int[] offsets) -> ()")
_library.define("block_sums_of_squares(Tensor flat) -> Tensor")


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
) -> None:
    """Write or add `weight * grads[i]` at `bucket[offsets[i]:]`, for every i, in one read.

    Args:
        bucket: 1-D, contiguous; fp32, bf16 or fp16. Every element is written: gaps become 0, unless
            `accumulate`.
        grads: any shapes and strides; fp32, bf16 or fp16, mixed; may be empty.
        offsets: first element of each gradient in the bucket, ascending without overlap.
        weight: rounded to fp32, as is its product with each element.
        accumulate: add to what the bucket holds, and leave gaps as they are.

    Raises:
        RuntimeError: offsets that overlap or reach past the bucket, another dtype or device.
    """
    with torch.no_grad():
        torch.ops.poplar.pack_(bucket, grads, offsets, weight, accumulate)
    _written(bucket)


def rank_sum_(out: Tensor, received: Sequence[Tensor], accumulate: bool = False) -> None:
    """Sum what ranks sent, in rank order: `out = ((r0 + r1) + r2) + ...`.

    Args:
        out: fp32, 1-D, contiguous, `m` elements.
        received: each rank's part, `m` elements, 1-D, contiguous; fp32, bf16 or fp16, all the same.
            One of them may be `out` itself. On CUDA they are slices of one tensor at equal
            distances, as transports receive them.
        accumulate: add the finished total to `out` instead.

    Raises:
        RuntimeError: no parts, sizes that don't fit together, another dtype or device.
    """
    with torch.no_grad():
        torch.ops.poplar.rank_sum_(out, received, accumulate)
    _written(out)


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


def rank_sum_claimed_(outs: Sequence[Tensor], received: Sequence[Tensor], claims: Tensor) -> None:
    """As `rank_sum_each_`, a chunk at a time, of those that nobody else has claimed.

    Several processes that call it with the same shared memory share the work; each returns when
    there is nothing left to claim, and others may then still be at theirs.

    Args:
        outs: as in `rank_sum_each_`, in shared memory.
        received: as in `rank_sum_each_`.
        claims: `_core.CLAIMS_BYTES` of uint8, zeros before the first: see `csrc/include/poplar/
            claims.h`. Plain PyTorch claims without care for others.

    Raises:
        RuntimeError: as `rank_sum_each_`, or claims of another size.
    """
    with torch.no_grad():
        torch.ops.poplar.rank_sum_claimed_(outs, received, claims)
    _written(*outs, claims)


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


def describe() -> str:
    """Say in a line what serves the operators, and why, for `poplar doctor` and bug reports."""
    return f"operators on CPU: {_cpu_state}; on CUDA: {_cuda_state}"


def _written(*tensors: Tensor) -> None:
    """Tell autograd, as every in-place operation of PyTorch does; the C++ kernels cannot.

    Without it, a backward that saved one of these tensors would use the new values unnoticed.
    """
    if not torch.compiler.is_compiling():
        torch.autograd.graph.increment_version([t for t in tensors if not t.is_inference()])


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
    bucket: Tensor, grads: list[Tensor], offsets: list[int], weight: float, accumulate: bool = False
) -> None:
    _check_flat(bucket, "pack_: bucket")
    pieces = _pieces("pack_", bucket, grads, offsets)
    rounded = torch.tensor(weight, dtype=torch.float32).item()
    if not accumulate:
        bucket.zero_()
    for grad, place in pieces:
        product = grad.reshape(-1).to(torch.float32) * rounded
        place.copy_(place.to(torch.float32) + product if accumulate else product)


@torch.no_grad()
def _plain_rank_sum_(out: Tensor, received: list[Tensor], accumulate: bool = False) -> None:
    _check_rank_sum("rank_sum_", out, received)
    _check(out.dtype == torch.float32, "rank_sum_: out must be float32")
    total = _total(received)
    if accumulate:
        out += total
    else:
        out.copy_(total)


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
def _plain_rank_sum_claimed_(outs: list[Tensor], received: list[Tensor], claims: Tensor) -> None:
    _check_shape(claims, "rank_sum_claimed_: claims")
    _check(
        claims.element_size() == 1 and claims.numel() == _core.CLAIMS_BYTES,
        f"rank_sum_claimed_: claims must hold {_core.CLAIMS_BYTES} bytes",
    )
    counters = claims.view(torch.int32)  # claimed, nothing, done, sleepers
    first = int(counters[0]) * _core.CHUNK
    rest = [out[first:] for out in outs]
    _plain_rank_sum_each_(rest, [part[first:] for part in received])
    chunks = -(-rest[0].numel() // _core.CHUNK) if rest else 0
    counters[0] += chunks
    counters[2] += chunks


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
}
for _name, _function in _PLAIN.items():
    _library.impl(_name, _function, "CompositeExplicitAutograd")


# Fake kernels: what torch.compile and FakeTensorMode need to know, shapes and dtypes.


def _fake_copy_(target: Tensor, source: Tensor) -> None:
    return None


def _fake_pack_(
    bucket: Tensor, grads: list[Tensor], offsets: list[int], weight: float, accumulate: bool = False
) -> None:
    return None


def _fake_rank_sum_(out: Tensor, received: list[Tensor], accumulate: bool = False) -> None:
    return None


def _fake_rank_sum_each_(outs: list[Tensor], received: list[Tensor]) -> None:
    return None


def _fake_rank_sum_claimed_(outs: list[Tensor], received: list[Tensor], claims: Tensor) -> None:
    return None


def _fake_unpack_(flat: Tensor, outs: list[Tensor], offsets: list[int]) -> None:
    return None


def _fake_block_sums_of_squares(flat: Tensor) -> Tensor:
    return flat.new_empty((flat.numel() + ALIGNMENT - 1) // ALIGNMENT, dtype=torch.float32)


_FAKE: dict[str, Callable[..., Tensor | None]] = {
    "copy_": _fake_copy_,
    "pack_": _fake_pack_,
    "rank_sum_": _fake_rank_sum_,
    "rank_sum_claimed_": _fake_rank_sum_claimed_,
    "rank_sum_each_": _fake_rank_sum_each_,
    "unpack_": _fake_unpack_,
    "block_sums_of_squares": _fake_block_sums_of_squares,
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
