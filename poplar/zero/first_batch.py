"""Compares the data of the ranks in the first step: each must get its own part of the global batch.

Ranks that shuffle with different seeds train on some samples twice and on others never; ranks
without a sampler of their own may all get the same samples. Neither is visible in a loss.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from poplar.comm import Control
from poplar.data import pytree
from poplar.data.sampler import orders_of_samplers


def compare_first_batches(control: Control, batch: Any) -> None:
    """Collective, once, when the first step is opened; the host reads one sample.

    Args:
        batch: of this rank; None without samples.

    Raises:
        ValueError: on all ranks; samplers of two ranks have different orders.
    """
    mine = (orders_of_samplers(), _fingerprint(batch))
    received = control.exchange_objects(mine, what="the first step")
    for rank, (orders, _) in enumerate(received):
        if orders and received[0][0] and not orders & received[0][0]:
            raise ValueError(
                f"the HeteroBatchSampler of rank 0 has {_text(received[0][0])}, that of rank "
                f"{rank} {_text(orders)}, so their parts are not of the same global batch; give "
                "all ranks the same dataset length, plan, seed, shuffle and lengths"
            )
    first_with: dict[Any, int] = {}
    for rank, (_, fingerprint) in enumerate(received):
        other = first_with.setdefault(fingerprint, rank)
        if fingerprint is not None and other != rank and control.group.rank == 0:
            warnings.warn(
                f"ranks {other} and {rank} have the same first sample in their first batch, but "
                "each rank must get its own part of the global batch: build the loader with "
                "HeteroBatchSampler(len(dataset), plan)",
                stacklevel=6,
            )
            break


def _text(orders: frozenset[tuple[tuple[str, Any], ...]]) -> str:
    return " or ".join(", ".join(f"{k}={v}" for k, v in o if v != "") for o in sorted(orders))


def _fingerprint(batch: Any) -> tuple[Any, ...] | None:
    """Two sums over the first sample of each tensor; None if there is nothing to compare.

    It raises on no rank, because all ranks exchange the result; the step reports a bad batch.
    """
    try:
        tensors = [tensor for tensor in pytree.tensors(batch) if tensor.dim() and len(tensor)]
        sums = tuple(_sums(tensor[0].detach()) for tensor in tensors)
    except Exception:
        return None
    return sums if any(differs for _, _, differs in sums) else None


def _sums(sample: Tensor) -> tuple[float, float, bool]:
    """The sum, a weighted sum, and whether the elements differ: constants are artificial data."""
    values = sample.flatten().double()
    places = torch.arange(1, values.numel() + 1, device=values.device, dtype=torch.float64)
    both = torch.stack([values.sum(), (values * places).sum(), values.sub(values[:1]).abs().sum()])
    total, weighted, spread = both.tolist()
    return total, weighted, spread > 0
