"""Every operator in plain PyTorch: the fallback on every device, and the oracle of the tests.

Contracts are in `poplar/ops/__init__.py`. Callers must keep them: only the C++ operators check
their arguments.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
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


FUNCTIONS: dict[str, Callable[..., Any]] = {}
"""The operators by name."""


def _operator(function: F) -> F:
    """Register an operator, which records no gradients."""
    FUNCTIONS[function.__name__] = torch.no_grad()(function)
    return cast(F, FUNCTIONS[function.__name__])


def _fp32(value: float) -> float:
    """The value as fp32 rounds it."""
    return torch.tensor(value, dtype=torch.float32, device="cpu").item()


@_operator
def copy_(target: Tensor, source: Tensor) -> None:
    """See `poplar.ops.copy_`."""
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


def check_places(bucket: Tensor, grads: Sequence[Tensor], offsets: Sequence[int]) -> None:
    """Raise if a gradient is in the bucket's memory, but not at its own offset.

    That is possible if a user has set gradients that are views of others.
    """
    for i, (grad, offset) in enumerate(zip(grads, offsets, strict=True)):
        place = bucket.data_ptr() + offset * bucket.element_size()
        is_its_place = grad.data_ptr() == place and grad.is_contiguous()
        if not (is_its_place and grad.dtype == bucket.dtype) and _overlap(grad, bucket):
            raise RuntimeError(
                f"poplar::pack_: tensor {i} is in the buffer's memory, but not at its own offset"
            )


@_operator
def pack_(
    bucket: Tensor,
    grads: list[Tensor],
    offsets: list[int],
    weight: float,
    accumulate: bool = False,
) -> None:
    """See `poplar.ops.pack_`."""
    check_places(bucket, grads, offsets)
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


def _total(received: Sequence[Tensor]) -> Tensor:
    total = received[0].to(torch.float32, copy=True)
    for part in received[1:]:
        total += part.to(torch.float32)
    return total


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
    rows = codes.view(-1, codec.encoded_bytes(64, bits))
    flat = torch.empty(len(rows) * ALIGNMENT, device=codes.device)
    pack_(flat, values, offsets, weight)
    rows.copy_(codec.encode(flat.view(-1, ALIGNMENT), bits, first, key))


@_operator
def decode_sum_(
    out: Tensor,
    received: list[Tensor],
    bits: int,
    accumulate: bool = False,
    sums: Tensor | None = None,
) -> None:
    """See `poplar.ops.decode_sum_`."""
    rows = [part.view(-1, codec.encoded_bytes(64, bits)) for part in received]
    total = codec.decode_sum(rows, bits).view(-1)[: out.numel()]
    if accumulate:
        total += out
    if sums is not None:
        sums.copy_(block_sums_of_squares(total))
    out.copy_(total)  # last: a call that runs out of memory is repeated


@_operator
def block_sums_of_squares(flat: Tensor) -> Tensor:
    """See `poplar.ops.block_sums_of_squares`."""
    blocks = -(-flat.numel() // ALIGNMENT)
    padded = flat.new_zeros(blocks * ALIGNMENT, dtype=torch.float32)
    padded[: flat.numel()] = flat
    lanes = padded.view(blocks, ALIGNMENT).square()
    width = ALIGNMENT
    while width > 1:
        width //= 2
        lanes = lanes[:, :width] + lanes[:, width:]
    return lanes.reshape(-1)


@_operator
def exact_sum_(total: Tensor, values: Sequence[Tensor]) -> None:
    """See `poplar.ops.exact_sum_`."""
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


@_operator
def exact_norm(totals: Tensor) -> Tensor:
    """See `poplar.ops.exact_norm`."""
    words = totals[:, :EXACT_WORDS].sum(0)
    total, carry = torch.zeros((), dtype=torch.float64, device=totals.device), 0
    for place, word in enumerate(words[:-1]):
        carried = word + carry
        digit = carried & ((1 << EXACT_BITS) - 1)
        total = total + digit.double() * 2.0 ** (EXACT_BITS * place - 149)
        carry = carried >> EXACT_BITS
    return torch.where(words[-1] == 0, total.sqrt(), math.inf)


@_operator
def clip_coefficient(norm: Tensor, max_norm: float, scale: Tensor | None = None) -> Tensor:
    """See `poplar.ops.clip_coefficient`."""
    scaled = norm.reshape(()) * (1.0 if scale is None else scale.reshape(()))
    bound = torch.full_like(scaled, _fp32(max_norm))
    return (bound / (scaled + 1e-6)).clamp(max=1.0)
