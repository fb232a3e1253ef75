"""Norms of sharded gradients whose bits do not depend on the shards.

[Note: exact sums]
A floating-point sum depends on its order, and shards change the order. So sums of squares are taken
in fp32 over aligned blocks of 64 elements, which no shard boundary splits, and then added exactly,
as integers (`ops.exact_sum_`). Integer sums over units and ranks have the same bits in any order.
Only the conversion to one number (`ops.exact_norm`) rounds. The host does not synchronize.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from poplar import ops
from poplar.comm import Communicator, Work
from poplar.comm.shard_layout import ALIGNMENT, Layout
from poplar.zero.flat_parameter import FlatParameter

ROW = ALIGNMENT
"""int64 elements that each rank contributes: its part of the norm, then its loss and checksum."""
_CHUNK_ELEMENTS = 1 << 20


def full_norm(comm: Communicator, flats: Sequence[FlatParameter], norm_type: float) -> Tensor:
    """Norm of the mean gradient, as one float64 on the device. Collective."""
    rows = norm_rows(comm, flats)
    fill_norm_row(rows, flats, comm.group.rank, norm_type)
    gather_rows(comm, rows, what="a gradient norm").wait()
    return combine_norm(rows, norm_type)


def norm_rows(comm: Communicator, flats: Sequence[FlatParameter]) -> Tensor:
    """Zero rows for `gather_rows`, one per rank, on the gradients' device."""
    return torch.zeros(comm.group.size, ROW, dtype=torch.int64, device=flats[0].device)


def fill_norm_row(
    rows: Tensor, flats: Sequence[FlatParameter], rank: int, norm_type: float
) -> None:
    """Write this rank's part of the gradient norm, over its slices of the layouts, to its row."""
    row = rows[rank]
    owned = [(flat, flat.intersect_owned(*flat.layout.bounds(rank))) for flat in flats]
    if norm_type == 2.0:
        squares = [flat.sums_of_squares(part) for flat, part in owned if part is not None]
        ops.exact_sum_(row[: ops.EXACT_WORDS], squares)  # see [Note: exact sums]
        return
    parts = [flat.gradient[part] for flat, part in owned if part is not None]
    if norm_type == float("inf"):
        row[0] = _largest(parts, row.device).view(torch.int64)
    else:
        row[0] = _power_sum(parts, norm_type, row.device).view(torch.int64)


def gather_rows(comm: Communicator, rows: Tensor, *, what: str) -> Work:
    """Start to all-gather the rows. Collective."""
    layout = Layout(tuple(range(0, rows.numel() + 1, ROW)))
    return comm.all_gather(rows.view(-1), layout, what=what)


def combine_norm(rows: Tensor, norm_type: float) -> Tensor:
    """The norm from all ranks' rows, as one float64 on the device.

    It has the same bits on every rank: the general case uses the host's `pow`, because devices
    round it differently.
    """
    if norm_type == 2.0:
        return ops.exact_norm(rows)
    parts = rows[:, 0].view(torch.float64)
    if norm_type == float("inf"):
        return parts.max()
    total = math.fsum(parts.tolist()) ** (1.0 / norm_type)
    return torch.full((), total, dtype=torch.float64, device=rows.device)


def _largest(parts: Sequence[Tensor], device: torch.device) -> Tensor:
    """Largest absolute value as one float64; 0 if there are no values."""
    values = [torch.linalg.vector_norm(part, torch.inf) for part in parts if part.numel()]
    return torch.stack(values).max().double() if values else _zero(device)


def _power_sum(parts: Sequence[Tensor], power: float, device: torch.device) -> Tensor:
    """Sum of `|x| ** power` as one float64. Its bits may depend on the shards."""
    total = _zero(device)
    for part in parts:
        for chunk in part.split(_CHUNK_ELEMENTS):  # a float64 copy of a whole shard would double it
            total += chunk.double().abs_().pow_(power).sum()
    return total


def _zero(device: torch.device) -> Tensor:
    return torch.zeros((), dtype=torch.float64, device=device)
