"""The compressed form of flat tensors in plain PyTorch; `csrc/include/poplar/codec.h` explains it.

Functions of whole groups: a row for each 64 elements.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

GROUP = 64
"""Elements that are encoded together."""
_TRANSFORM = 32  # elements of one transform
_DISTANCES = (32, 16, 4, 2, 1)
FRACTION_BITS = 15
"""Binary digits of quotients behind the point, and random bits per element."""
_SMALLEST_SCALE = (127 - 100) << 7
_NAN = 0x7FC0
_MASK_32 = 0xFFFFFFFF
_MASK_64 = 0xFFFFFFFFFFFFFFFF


def group_bytes(bits: int) -> int:
    """The size of an encoded group."""
    return GROUP * bits // 8 + 2


def random_key(key: int) -> tuple[int, int]:
    """Two 32-bit words from the key of a call: SplitMix64."""
    mixed = (key + 0x9E3779B97F4A7C15) & _MASK_64
    mixed = ((mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9) & _MASK_64
    mixed = ((mixed ^ mixed >> 27) * 0x94D049BB133111EB) & _MASK_64
    mixed ^= mixed >> 31
    return mixed & _MASK_32, mixed >> 32


def random_words(first: int, count: int, key: int, device: torch.device) -> Tensor:
    """`count` words of 32 random bits, as int64, from element `first` on: one for two elements."""
    low, high = random_key(key)
    number = torch.arange(first // 2, first // 2 + count, device=device)
    word = (number + low + (number >> 32) * 0x9E3779B9) & _MASK_32
    word = ((word ^ word >> 16) * 0x21F0AAAD) & _MASK_32
    word = ((word ^ word >> 15 ^ high) * 0x735A2D97) & _MASK_32
    return word ^ word >> 15


def transform(groups: Tensor, distances: Sequence[int]) -> Tensor:
    """Replace each two elements at a distance by their sum and their difference, level by level."""
    shape = groups.shape
    for distance in distances:
        low, high = groups.reshape(-1, 2, distance).unbind(1)
        groups = torch.stack([low + high, low - high], 1)
    return groups.reshape(shape)


def encode(groups: Tensor, bits: int, first: int, key: int) -> Tensor:
    """The codes and scales of fp32 groups, a row of `group_bytes` each.

    Args:
        groups: 64 columns.
        first: number of the first element in the whole flat tensor.
    """
    coefficients = transform(groups, _DISTANCES)
    largest = (coefficients.view(torch.int32) & 0x7FFFFFFF).amax(1, keepdim=True)
    is_finite = largest < 0x7F800000
    magnitude = torch.where(is_finite, largest, 0).view(torch.float32)
    # Rounded to fp32 first: a product with a Python number need not be the same on all devices.
    step = torch.tensor((1 + 2**-20) / (2 ** (bits - 1) - 1), device=groups.device)
    scale = ((magnitude * step).view(torch.int32) + 0xFFFF) >> 16
    scale = torch.where(largest == 0, 0, scale.clamp(min=_SMALLEST_SCALE))
    units = torch.where(scale == 0, 0.0, 2.0**FRACTION_BITS / _float_of(scale))
    # Where the magnitude is not finite, all codes are those of 0.
    quotients = torch.where(is_finite, coefficients, 0.0) * units
    words = random_words(first, groups.numel() // 2, key, groups.device)
    random = torch.stack([words & 0x7FFF, words >> 17], 1).view(groups.shape)
    zero = 2 ** (bits - 1)
    codes = ((quotients.round().long() + random) >> FRACTION_BITS) + zero
    if bits == 4:
        codes = codes[:, ::2] | codes[:, 1::2] << 4
    scale = torch.where(is_finite, scale, _NAN)
    return torch.cat([codes, scale & 0xFF, scale >> 8], 1).to(torch.uint8)


def decode_sum(received: Sequence[Tensor], bits: int) -> Tensor:
    """The fp32 groups of which each rank's rows are codes, summed in rank order.

    Coefficients are summed, so that one transform serves all ranks.
    """
    total = torch.zeros(len(received[0]), GROUP, device=received[0].device)
    for rows in received:
        codes = rows[:, :-2]
        if bits == 4:
            codes = torch.stack([codes & 15, codes >> 4], 2).flatten(1)
        scale = rows[:, -2:-1].int() | rows[:, -1:].int() << 8
        total += (codes.float() - 2 ** (bits - 1)) * (_float_of(scale) / _TRANSFORM)
    return transform(total, _DISTANCES[::-1])


def _float_of(scale: Tensor) -> Tensor:
    return (scale.int() << 16).view(torch.float32)
