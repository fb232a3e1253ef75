"""Every operator in plain PyTorch: the fallback on every device, and the oracle of the tests.

Checks and messages are those of `csrc/ops/checks.h`. Contracts are in `poplar/ops/__init__.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from poplar import _core
from poplar.ops import codec

F = TypeVar("F", bound=Callable[..., Any])

ALIGNMENT = 64
"""Elements per block of the norm's tree; all boundaries of flat buffers are multiples of it."""
EXACT_WORDS = 16
"""Number of words of an exact sum: see `poplar.ops.exact_sum_`."""
EXACT_BITS = 28
"""Bits between the units of two consecutive words of an exact sum."""
RULE_NUMBERS = 7
"""Numbers of a `poplar.ops.AdamWRule`."""
_CHUNK_NUMEL = 1 << 22
_COUNTER_BYTES = 4
"""Of each of the work counters."""
_MOST_RANKS = 1024
_FLOATING = (torch.float32, torch.bfloat16, torch.float16)


FUNCTIONS: dict[str, Callable[..., Any]] = {}
"""The operators by name."""


def _operator(function: F) -> F:
    """Register an operator, which records no gradients."""
    FUNCTIONS[function.__name__] = torch.no_grad()(function)
    return cast(F, FUNCTIONS[function.__name__])


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


def _fp32(value: float) -> float:
    """The value as fp32 rounds it."""
    return torch.tensor(value, dtype=torch.float32, device="cpu").item()


def _check_scalars(
    names: str, dtype: torch.dtype, device: torch.device, *scalars: Tensor | None
) -> None:
    for scalar in scalars:
        _check(
            scalar is None
            or (scalar.numel() == 1 and scalar.device == device and scalar.dtype == dtype),
            f"{names} must be single {str(dtype).removeprefix('torch.')} elements on the same "
            "device",
        )


@_operator
def copy_(target: Tensor, source: Tensor) -> None:
    """See `poplar.ops.copy_`."""
    for tensor, name in ((target, "target"), (source, "source")):
        _check_shape(tensor, f"copy_: {name}")
    _check(target.device == source.device, "copy_: target and source must be on one device")
    _check(target.dtype == source.dtype, "copy_: target and source must have one dtype")
    _check(
        target.numel() == source.numel(),
        f"copy_: target has {target.numel()} elements, source {source.numel()}",
    )
    _check(
        target.data_ptr() == source.data_ptr() or not _overlap(target, source),
        "copy_: target and source must not share memory in part",
    )
    target.copy_(source)


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Whether the memory of two tensors overlaps.

    `b` is contiguous; of `a`, everything from its first to its last element counts.
    """
    if not a.numel() or not b.numel():
        return False
    reach = 1 + sum((size - 1) * step for size, step in zip(a.shape, a.stride(), strict=True))
    first, second = a.data_ptr(), b.data_ptr()
    return first < second + b.nbytes and second < first + reach * a.element_size()


def _check_apart(name: str, written: Iterable[Tensor], read: Iterable[Tensor]) -> None:
    """Raise if what an operator writes overlaps something else that it is given.

    Args:
        name: the operator and what it writes.
        written: contiguous, as are those in `read`.
        read: what it only reads.
    """
    extents = sorted(
        (begin := tensor.data_ptr(), begin + size, is_written)
        for tensors, is_written in ((written, True), (read, False))
        for tensor in tensors
        if (size := tensor.nbytes)
    )
    are_apart, end, written_end = True, 0, 0
    for begin, own_end, is_written in extents:
        are_apart = are_apart and begin >= (end if is_written else written_end)
        end = max(end, own_end)
        written_end = max(written_end, own_end) if is_written else written_end
    _check(are_apart, f"{name} must not share memory with another tensor of the call")


@_operator
def pack_(
    bucket: Tensor,
    grads: list[Tensor],
    offsets: list[int],
    weight: float,
    accumulate: bool = False,
) -> None:
    """See `poplar.ops.pack_`."""
    _check_pack(bucket, grads, offsets)
    rounded = _fp32(weight)
    end = 0
    for grad, offset in zip(grads, offsets, strict=True):
        product = grad.reshape(-1).to(torch.float32) * rounded
        place = bucket[offset : offset + grad.numel()]
        place.copy_(place.to(torch.float32) + product if accumulate else product)
        if not accumulate:
            bucket[end:offset].zero_()
        end = offset + grad.numel()
    if not accumulate:
        bucket[end:].zero_()


@_operator
def rank_sum_(
    out: Tensor, received: list[Tensor], accumulate: bool = False, sums: Tensor | None = None
) -> None:
    """See `poplar.ops.rank_sum_`."""
    _check_rank_sum("rank_sum_", out, received, accumulate, sums)
    total = _total(received)
    if accumulate:
        total += out
    if sums is not None:
        sums.copy_(block_sums_of_squares(total))
    out.copy_(total)  # last: a call that runs out of memory is repeated


@_operator
def rank_sum_chunks_(
    out: Tensor, received: list[Tensor], work_counters: Tensor, sums: Tensor | None = None
) -> None:
    """See `poplar.ops.rank_sum_chunks_`."""
    _check_rank_sum("rank_sum_chunks_", out, received, work_counters, sums)
    _check_work_counters(work_counters, out, received, sums)
    counters = work_counters.view(torch.int32)  # started, padding, done, sleepers
    first = int(counters[0]) * _core.CHUNK
    out[first:] = _total([part[first:] for part in received])
    if sums is not None:
        sums[first // ALIGNMENT :].copy_(block_sums_of_squares(out[first:]))
    chunks = -(-out[first:].numel() // _core.CHUNK)
    counters[0] += chunks
    counters[2] += chunks


@_operator
def adamw_(
    values: Sequence[Tensor],
    gradients: Sequence[Tensor],
    means: Sequence[Tensor],
    square_means: Sequence[Tensor],
    rounded: Sequence[Tensor],
    rules: Sequence[float],
    scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """See `poplar.ops.adamw_`. `rules` holds the numbers of all rules, in their order; entries of
    `rounded` without elements stand for none.
    """
    _check_adamw(values, gradients, means, square_means, rounded, rules, scale, found_inf)
    shards = zip(values, gradients, means, square_means, strict=True)
    for i, shard in enumerate(shards):
        low = rounded[i] if rounded[i].numel() else None
        rule = tuple(rules[i * RULE_NUMBERS : (i + 1) * RULE_NUMBERS])
        for start in range(0, shard[0].numel(), _CHUNK_NUMEL):  # limits the size of temporaries
            part = slice(start, start + _CHUNK_NUMEL)
            pieces = [tensor[part] for tensor in shard]
            _adamw_part(pieces, None if low is None else low[part], rule, scale, found_inf)


def _adamw_part(
    shard: Sequence[Tensor],
    rounded: Tensor | None,
    rule: Sequence[float],
    scale: Tensor | None,
    found_inf: Tensor | None,
) -> None:
    values, gradient, mean, square_mean = shard
    before = values
    if rounded is not None:  # the low-precision copy counts where it was written since
        before = torch.where(values.to(rounded.dtype) == rounded, values, rounded)
    lr, beta1, beta2, eps, weight_decay, step, maximize = rule
    factor = torch.ones((), device=values.device) if scale is None else scale.reshape(())
    scaled = gradient * (-factor if maximize else factor)
    keeps_mean = 1.0 - beta1 < 0.5  # otherwise interpolate from the other end, as torch.lerp does
    change = (scaled - mean) * _fp32(1.0 - beta1 if keeps_mean else -beta1)
    new_mean = (mean if keeps_mean else scaled) + change
    new_square = square_mean * _fp32(beta2) + (scaled * scaled) * _fp32(1.0 - beta2)
    # Through float64: torch's fp32 root on the CPU is not always correctly rounded.
    root = new_square.double().sqrt().float() * _fp32(1.0 / math.sqrt(1.0 - beta2**step))
    root = root + _fp32(eps)
    moved = (new_mean / root) * _fp32(lr / (1.0 - beta1**step))
    new_values = before * _fp32(1.0 - lr * weight_decay) - moved
    written = [(mean, new_mean), (square_mean, new_square), (values, new_values)]
    if rounded is not None:
        written.append((rounded, new_values.to(rounded.dtype)))
    for old, new in written:
        # On the device, so that the host does not wait for the flag.
        old.copy_(new if found_inf is None else torch.where(found_inf.reshape(()) == 0, new, old))


def _check_adamw(
    values: Sequence[Tensor],
    gradients: Sequence[Tensor],
    means: Sequence[Tensor],
    square_means: Sequence[Tensor],
    rounded: Sequence[Tensor],
    rules: Sequence[float],
    scale: Tensor | None,
    found_inf: Tensor | None,
) -> None:
    for tensors in (gradients, means, square_means, rounded):
        _check(
            len(tensors) == len(values),
            f"adamw_: all lists must have one length, got {len(values)} values and a list of "
            f"{len(tensors)}",
        )
    _check(
        len(rules) == RULE_NUMBERS * len(values),
        f"adamw_: expected {RULE_NUMBERS} numbers for each of {len(values)} tensors, got "
        f"{len(rules)}",
    )
    for step in rules[5::RULE_NUMBERS]:
        _check(step >= 1.0, f"adamw_: step must be at least 1, got {step:g}")
    for i, like in enumerate(values):
        for tensor in (like, gradients[i], means[i], square_means[i]):
            _check_adamw_tensor(like, tensor)
            _check(
                tensor.dtype == torch.float32,
                "adamw_: values, gradients and state must be float32",
            )
            _check(tensor.device == values[0].device, "adamw_: all tensors must be on one device")
        if rounded[i].numel():
            _check_adamw_tensor(like, rounded[i])
            _check_dtype(rounded[i], "adamw_: rounded")
    if values:
        single = torch.float32, values[0].device
        _check_scalars("adamw_: scale and found_inf", *single, scale, found_inf)
    written = (*values, *means, *square_means, *rounded)
    scalars = [scalar for scalar in (scale, found_inf) if scalar is not None]
    _check_apart("adamw_: values, state and rounded", written, (*gradients, *scalars))


def _check_adamw_tensor(values: Tensor, tensor: Tensor) -> None:
    """Raise unless the tensor is flat and can belong to `values`."""
    _check_flat(tensor, "adamw_: all tensors")
    _check(tensor.device == values.device, "adamw_: all tensors must be on one device")
    _check(
        tensor.numel() == values.numel(),
        f"adamw_: values have {values.numel()} elements, another tensor {tensor.numel()}",
    )


def _total(received: Sequence[Tensor]) -> Tensor:
    total = received[0].to(torch.float32, copy=True)
    for part in received[1:]:
        total += part.to(torch.float32)
    return total


def _check_pack(
    bucket: Tensor, grads: Sequence[Tensor], offsets: Sequence[int], *_: object
) -> None:
    _check_flat(bucket, "pack_: bucket")
    _check_offsets("pack_", bucket.numel(), grads, offsets)
    for i, (grad, offset) in enumerate(zip(grads, offsets, strict=True)):
        _check(grad.device == bucket.device, "pack_: all tensors must be on the buffer's device")
        _check_dtype(grad, "pack_")
        place = bucket.data_ptr() + offset * bucket.element_size()
        is_its_place = grad.data_ptr() == place and grad.is_contiguous()
        _check(
            (is_its_place and grad.dtype == bucket.dtype) or not _overlap(grad, bucket),
            f"pack_: tensor {i} is in the buffer's memory, but not at its own offset",
        )


def _check_offsets(
    name: str, numel: int, tensors: Sequence[Tensor], offsets: Sequence[int]
) -> None:
    """Raise unless the tensors fit at their offsets in a flat buffer of `numel` elements."""
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
            end <= numel,
            f"{name}: tensor {i} (offset {offset}, {tensor.numel()} elements) reaches past the end "
            f"of the buffer, {numel}",
        )


def _check_rank_sum(
    name: str, out: Tensor, received: Sequence[Tensor], _other: object, sums: Tensor | None
) -> None:
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
        is_out = part.data_ptr() == out.data_ptr() and part.dtype == out.dtype
        _check(
            is_out or not _overlap(part, out),
            f"{name}: received must not share memory with out in part",
        )
    _check(out.dtype == torch.float32, f"{name}: out must be float32")
    _check_sums(name, out, received, sums)


def _check_work_counters(
    work_counters: Tensor, out: Tensor, received: Sequence[Tensor], sums: Tensor | None
) -> None:
    name, size = "rank_sum_chunks_: work_counters", _core.WORK_COUNTERS_BYTES
    _check_shape(work_counters, name)
    _check(
        work_counters.element_size() == 1
        and work_counters.numel() == size
        and work_counters.data_ptr() % _COUNTER_BYTES == 0,
        f"{name} must hold {size} bytes at an address that is a multiple of {_COUNTER_BYTES}",
    )
    _check_apart(name, [work_counters], [out, *received, *([] if sums is None else [sums])])


def _check_sums(name: str, out: Tensor, received: Sequence[Tensor], sums: Tensor | None) -> None:
    if sums is None:
        return
    _check_shape(sums, f"{name}: sums")
    blocks = -(-out.numel() // ALIGNMENT)
    _check(
        sums.device == out.device and sums.dtype == torch.float32 and sums.numel() == blocks,
        f"{name}: sums must be float32 on the same device and hold {blocks} elements, one for each "
        "64",
    )
    _check_apart(f"{name}: sums", [sums], [out, *received])


@_operator
def encode_(
    codes: Tensor,
    values: list[Tensor],
    offsets: list[int],
    weight: float,
    bits: int,
    first: int,
    key: int,
) -> None:
    """See `poplar.ops.encode_`."""
    _check_encode(codes, values, offsets, weight, bits, first, key)
    rows = codes.view(-1, codec.encoded_bytes(64, bits))
    flat = torch.empty(len(rows) * ALIGNMENT, device=codes.device)
    pack_(flat, values, offsets, weight)
    rows.copy_(codec.encode(flat.view(-1, ALIGNMENT), bits, first, key))


def _check_encode(
    codes: Tensor,
    values: Sequence[Tensor],
    offsets: Sequence[int],
    _weight: float,
    bits: int,
    first: int,
    _key: int,
) -> None:
    _check_codes("encode_: codes", codes, bits)
    numel = codes.numel() // codec.encoded_bytes(64, bits) * ALIGNMENT
    _check_offsets("encode_", numel, values, offsets)
    _check(first >= 0 and first % 64 == 0, f"encode_: first must be a multiple of 64, got {first}")
    for tensor in values:
        _check(codes.device == tensor.device, "encode_: all tensors must be on one device")
        _check(not _overlap(tensor, codes), "encode_: values must not share memory with codes")
        _check_dtype(tensor, "encode_: values")


def _check_codes(name: str, codes: Tensor, bits: int) -> None:
    """Raise unless the tensor holds encoded groups."""
    _check(bits in (8, 4), f"{name} have 8 or 4 bits, got {bits}")
    _check_shape(codes, name)
    size = codec.encoded_bytes(64, bits)
    _check(
        codes.dtype == torch.uint8 and codes.numel() % size == 0 and codes.data_ptr() % 2 == 0,
        f"{name} must be uint8 at an even address and hold {size} bytes for each 64 elements, got "
        f"{codes.numel()}",
    )


@_operator
def decode_sum_(
    out: Tensor,
    received: list[Tensor],
    bits: int,
    accumulate: bool = False,
    sums: Tensor | None = None,
) -> None:
    """See `poplar.ops.decode_sum_`."""
    _check_decode_sum(out, received, bits, accumulate, sums)
    rows = [part.view(-1, codec.encoded_bytes(64, bits)) for part in received]
    total = codec.decode_sum(rows, bits).view(-1)[: out.numel()]
    if accumulate:
        total += out
    if sums is not None:
        sums.copy_(block_sums_of_squares(total))
    out.copy_(total)  # last: a call that runs out of memory is repeated


def _check_decode_sum(
    out: Tensor, received: Sequence[Tensor], bits: int, _accumulate: bool, sums: Tensor | None
) -> None:
    name = "decode_sum_"
    _check_flat(out, f"{name}: out")
    _check(sums is None or out.dtype == torch.float32, f"{name}: out must be float32 with sums")
    _check(
        0 < len(received) <= _MOST_RANKS,
        f"{name}: received must hold 1 to {_MOST_RANKS} parts, got {len(received)}",
    )
    for part in received:
        _check_codes(f"{name}: received", part, bits)
        _check(out.device == part.device, f"{name}: out and received must be on one device")
        _check(
            part.numel() == codec.encoded_bytes(out.numel(), bits),
            f"{name}: {out.numel()} elements take {codec.encoded_bytes(out.numel(), bits)} bytes, "
            f"but a part has {part.numel()}",
        )
        _check(not _overlap(part, out), f"{name}: received must not share memory with out")
    _check_sums(name, out, received, sums)


@_operator
def block_sums_of_squares(flat: Tensor) -> Tensor:
    """See `poplar.ops.block_sums_of_squares`."""
    _check_block_sums(flat)
    blocks = -(-flat.numel() // ALIGNMENT)
    padded = flat.new_zeros(blocks * ALIGNMENT, dtype=torch.float32)
    padded[: flat.numel()] = flat
    lanes = padded.view(blocks, ALIGNMENT).square()
    width = ALIGNMENT
    while width > 1:
        width //= 2
        lanes = lanes[:, :width] + lanes[:, width:]
    return lanes.reshape(-1)


def _check_block_sums(flat: Tensor) -> None:
    _check_flat(flat, "block_sums_of_squares: flat")


@_operator
def exact_sum_(total: Tensor, values: Sequence[Tensor]) -> None:
    """See `poplar.ops.exact_sum_`."""
    _check_exact_sum(total, values)
    for piece in (piece for part in values for piece in part.split(_CHUNK_NUMEL)):
        bits = piece.view(torch.int32)
        exponent = (bits >> 23) & 0xFF
        fraction = bits & 0x7FFFFF
        mantissa = torch.where(exponent == 0, fraction, fraction | 0x800000).long()
        place = (exponent - 1).clamp_(min=0)
        shifted = mantissa << (place % EXACT_BITS)
        finite = exponent != 0xFF
        sign = torch.where(bits < 0, -1, 1) * finite
        word = (place // EXACT_BITS).long()
        total.index_add_(0, word, sign * (shifted & ((1 << EXACT_BITS) - 1)))
        total.index_add_(0, word + 1, sign * (shifted >> EXACT_BITS))
        total[-1] += (~finite).sum()


def _check_exact_sum(total: Tensor, values: Sequence[Tensor]) -> None:
    _check_shape(total, "exact_sum_: total")
    _check(
        total.dtype == torch.int64 and total.numel() == EXACT_WORDS,
        f"exact_sum_: total must be int64 and hold {EXACT_WORDS} elements",
    )
    for part in values:
        _check_shape(part, "exact_sum_: values")
        _check(part.dtype == torch.float32, "exact_sum_: values must be float32")
        _check(total.device == part.device, "exact_sum_: total and values must be on one device")
    _check_apart("exact_sum_: total", [total], values)


@_operator
def exact_norm(totals: Tensor) -> Tensor:
    """See `poplar.ops.exact_norm`."""
    _check_exact_norm(totals)
    words = totals[:, :EXACT_WORDS].sum(0)
    total, carry = torch.zeros((), dtype=torch.float64, device=totals.device), 0
    for place, word in enumerate(words[:-1]):
        carried = word + carry
        digit = carried & ((1 << EXACT_BITS) - 1)
        total = total + digit.double() * 2.0 ** (EXACT_BITS * place - 149)
        carry = carried >> EXACT_BITS
    return torch.where(words[-1] == 0, total.sqrt(), math.inf)


def _check_exact_norm(totals: Tensor) -> None:
    _check(
        totals.dim() == 2
        and totals.is_contiguous()
        and totals.shape[1] >= EXACT_WORDS
        and totals.dtype == torch.int64,
        f"exact_norm: totals must be int64, contiguous, and hold at least {EXACT_WORDS} elements "
        "in each row",
    )


@_operator
def clip_coefficient(norm: Tensor, max_norm: float, scale: Tensor | None = None) -> Tensor:
    """See `poplar.ops.clip_coefficient`."""
    _check_clip_coefficient(norm, max_norm, scale)
    scaled = norm.reshape(()) * (1.0 if scale is None else scale.reshape(()))
    bound = torch.full_like(scaled, _fp32(max_norm))
    return (bound / (scaled + 1e-6)).clamp(max=1.0)


def _check_clip_coefficient(norm: Tensor, _max_norm: float, scale: Tensor | None) -> None:
    single = torch.float64, norm.device
    _check_scalars("clip_coefficient: norm and scale", *single, norm, scale)


CHECKS: dict[str, Callable[..., None]] = {
    "pack_": _check_pack,
    "rank_sum_": partial(_check_rank_sum, "rank_sum_"),
    "encode_": _check_encode,
    "decode_sum_": _check_decode_sum,
    "block_sums_of_squares": _check_block_sums,
    "exact_sum_": _check_exact_sum,
    "exact_norm": _check_exact_norm,
    "clip_coefficient": _check_clip_coefficient,
    "adamw_": _check_adamw,
}
"""The checks of the operators with kernels in Triton: they take all arguments of the operator, and
raise if it does not support them."""
