"""Placements of tensors on ranks that are all in this process: parts, and the whole from parts."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from poplar.programmes.graph.placement import PARTIAL, REPLICATED, Placement, Sharded


def parts(
    whole: Tensor,
    placement: Placement,
    ratios: Sequence[int],
    draws: torch.Generator | None = None,
) -> list[Tensor]:
    """Each rank's tensor. Partial ones are random, with the whole as sum."""
    ranks = len(ratios)
    if isinstance(placement, Sharded):
        bounds = placement.bounds(whole.shape, ratios)
        return [
            whole.narrow(placement.dim, start, stop - start).clone()
            for start, stop in itertools.pairwise(bounds)
        ]
    if placement is PARTIAL:
        noise = [random_like(whole, draws) for _ in range(ranks - 1)]
        return [*noise, whole - sum(noise, torch.zeros_like(whole))]
    return [whole.clone() for _ in range(ranks)]


def assembled(own: Sequence[Tensor], placement: Placement) -> Tensor:
    """The whole tensor. Replicated ones are compared."""
    if isinstance(placement, Sharded):
        return torch.cat(list(own), placement.dim)
    if placement is PARTIAL:
        return sum(own[1:], own[0])
    for other in own[1:]:
        torch.testing.assert_close(other, own[0], rtol=0, atol=0, equal_nan=True)
    return own[0]


def random_like(tensor: Tensor, draws: torch.Generator | None) -> Tensor:
    """Small random values of the same shape and type."""
    if tensor.is_floating_point():
        return torch.randn(tensor.shape, generator=draws, dtype=tensor.dtype)
    return torch.randint(-5, 5, tensor.shape, generator=draws).to(tensor.dtype)


def adjoint(placement: Placement) -> Placement:
    """The placement of the gradient."""
    return {REPLICATED: PARTIAL, PARTIAL: REPLICATED}.get(placement, placement)


def as_list(value: Any) -> list[Tensor]:
    """One or several outputs."""
    return list(value) if isinstance(value, list | tuple) else [value]
