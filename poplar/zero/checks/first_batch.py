"""Compares the data of the ranks in the first step: each must get its own part of the global batch.

Ranks that shuffle with different seeds train on some samples twice and on others never; ranks
without a sampler of their own may all get the same samples. Neither is visible in a loss.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from poplar.comm import Control
from poplar.data import pytree
from poplar.data.sampler import last_drawn_order
from poplar.values.errors import agreed
from poplar.zero.agreement import exchange_results, run_on_all_ranks


def compare_batches(control: Control, batch: Any) -> None:
    """Compare this rank's batch with those of the others. Collective.

    Args:
        control: the control channel of the ranks.
        batch: None without samples.

    Raises:
        ValueError: on all ranks; samplers of two ranks have different orders.
    """

    def describe() -> tuple[Mapping[str, Any], tuple[Any, ...] | None]:
        return {} if batch is None else last_drawn_order(), _fingerprint(batch)

    received = exchange_results(control, describe, what="the first step")
    drawn = {rank: order for rank, (order, _) in enumerate(received) if order}
    first = min(drawn, default=0)
    for rank, order in drawn.items():
        if order != drawn[first]:
            raise agreed(
                ValueError(
                    f"the HeteroBatchSampler of rank {first} has {_text(drawn[first])}, that of "
                    f"rank {rank} {_text(order)}, so their parts are not of the same global batch; "
                    "give all ranks the same dataset length, plan, seed, shuffle, lengths and epoch"
                )
            )
    first_with: dict[Any, int] = {}
    for rank, (_, fingerprint) in enumerate(received):
        other = first_with.setdefault(fingerprint, rank)
        if fingerprint is not None and other != rank:
            warn = partial(_warn_of_equal_samples, control.group.rank, other, rank)
            run_on_all_ranks(control, warn, doing="the first step")  # warnings may be errors
            break


def _warn_of_equal_samples(own: int, first: int, second: int) -> None:
    if own == 0:
        warnings.warn(
            f"ranks {first} and {second} have the same first sample in their first batch, but each "
            "rank must get its own part of the global batch: build the loader with "
            "HeteroBatchSampler(len(dataset), plan)",
            stacklevel=8,
        )


def _text(order: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in order.items() if value != "")


def _fingerprint(batch: Any) -> tuple[Any, ...] | None:
    """Two sums over the first sample of each tensor; None if there is nothing to compare.

    The step reports a bad batch.
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
