"""Encoded flat tensors in plain PyTorch; `csrc/include/poplar/codec.h` explains the format."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_DISTANCES = (32, 16, 8, 4, 2, 1)
_FRACTION_BITS = 15  # of quotients, and random bits per element
_SMALLEST_SCALE = (127 - 100) << 7
_MASK_32 = 0xFFFFFFFF
_MASK_64 = 0xFFFFFFFFFFFFFFFF


def encoded_bytes(numel: int, bits: int) -> int:
    """The size of `numel` encoded elements: 66 bytes for each 64 at 8 bits, and 34 at 4 bits."""
    return -(-numel // 64) * (8 * bits + 2)


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
    """The codes and scale of each fp32 group, as bytes."""
    coefficients = transform(groups, _DISTANCES)
    largest = (coefficients.view(torch.int32) & 0x7FFFFFFF).amax(1, keepdim=True)
    is_finite = largest < 0x7F800000
    magnitude = torch.where(is_finite, largest, 0).view(torch.float32)
    # Rounded to fp32 first: a product with a Python number need not be the same on all devices.
    step = torch.tensor((1 + 2**-20) / (2 ** (bits - 1) - 1), device=groups.device)
    scale = ((magnitude * step).view(torch.int32) + 0xFFFF) >> 16
    scale = torch.where(largest == 0, 0, scale.clamp(min=_SMALLEST_SCALE))
    units = torch.where(scale == 0, 0.0, 2.0**_FRACTION_BITS / (scale << 16).view(torch.float32))
    # Where the magnitude is not finite, all codes are those of 0.
    quotients = torch.where(is_finite, coefficients, 0.0) * units
    words = random_words(first, groups.numel() // 2, key, groups.device)
    random = torch.stack([words & 0x7FFF, words >> 17], 1).view(groups.shape)
    zero = 2 ** (bits - 1)
    codes = ((quotients.round().long() + random) >> _FRACTION_BITS) + zero
    if bits == 4:
        codes = codes[:, ::2] | codes[:, 1::2] << 4
    upper_half = torch.where(is_finite, scale, 0x7FC0).to(torch.int16)
    return torch.cat([codes.to(torch.uint8), upper_half.view(torch.uint8)], 1)


def decode_sum(received: Sequence[Tensor], bits: int) -> Tensor:
    """The fp32 groups that each rank's rows encode; coefficients are summed in rank order."""
    total = torch.zeros(len(received[0]), 64, device=received[0].device)
    for rows in received:
        codes, scale = rows[:, :-2], rows[:, -2:].contiguous().view(torch.bfloat16).float()
        if bits == 4:
            codes = torch.stack([codes & 15, codes >> 4], 2).flatten(1)
        total += (codes.float() - 2 ** (bits - 1)) * (scale / 64)
    return transform(total, _DISTANCES[::-1])
