"""What all ranks must know before a step's first backward and before anybody applies it.

Opening: how much each rank brings, so that weights are exact, and that nobody's input is bad.
Closing: whether a rank failed, which parameters were used at all, the loss, the norm. A step that
one rank could not finish is applied by nobody, and every rank says why.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from poplar import ops
from poplar.comm import Communicator, Control, Pending
from poplar.comm.shard_layout import ALIGNMENT, Layout
from poplar.errors import RankFailed
from poplar.zero import gradient_norm
from poplar.zero.flat_parameter import FlatParameter

ROW = ALIGNMENT
"""Elements of what each rank contributes to a norm, and to the loss beside it."""
_LOSS = ops.EXACT_WORDS
"""Where in a row the loss is."""


@dataclass(frozen=True)
class StepSizes:
    """What all ranks know before the first backward."""

    samples: tuple[int, ...]
    """Of each rank in this step."""
    total_weight: float


@dataclass(frozen=True)
class StepSummary:
    """What all ranks know once the gradients are final."""

    losses: Tensor
    """By rank, its part of the weighted loss: float64 on the device."""
    norm_type: float | None
    norm: Tensor
    """Of the gradient as accumulated (a loss scale still in it), one float64 on the device; NaN if
    not asked for."""
    unused: dict[FlatParameter, set[int]]
    """Parameters, by position, that got a gradient on no rank."""
    waited: tuple[float, ...]
    """Seconds each rank was held up by the others."""


def leader_of(sizes: Sequence[int]) -> int | None:
    """The first rank with samples, given each rank's in a pass; None if nobody has any."""
    return next((rank for rank, size in enumerate(sizes) if size > 0), None)


def raise_on_any_error(control: Control, error: Exception | None, *, doing: str) -> None:
    """Raise on all ranks if one has an error, `RankFailed` on the others. Collective."""
    flags = control.exchange(torch.tensor([error is not None]), what=doing)()
    if any(bool(flag) for flag in flags):
        raise_on_all_ranks(control, error, doing=doing)


def raise_on_all_ranks(control: Control, error: BaseException | None, *, doing: str) -> None:
    """Tell each other the errors of those that failed. Collective; always raises."""
    mine = None if error is None else f"{type(error).__name__}: {error}"
    messages = control.exchange_objects(mine, what=doing)
    if error is not None:
        raise error
    causes = "; ".join(f"rank {r}: {text}" for r, text in enumerate(messages) if text)
    raise RankFailed(f"another rank failed in {doing}, so nothing was applied. {causes}")


def open_step(
    control: Control, *, samples: int, weight: float, error: Exception | None
) -> Callable[[], tuple[StepSizes, float]]:
    """Start to agree on a step's samples and weights. Collective.

    Args:
        samples: this rank's in this step.
        weight: what this rank's samples count for (their number, or tokens).
        error: this rank's input is bad; raised at once here, and as `RankFailed` by what the others
            are given.

    Returns:
        What waits for the others; gives what was agreed, and the seconds spent waiting.
    """
    values = torch.tensor([float(error is not None), samples, weight], dtype=torch.float64)
    collect = control.exchange(values, what="opening a step")

    def wait() -> tuple[StepSizes, float]:
        began = time.perf_counter()
        received = collect()
        waited = time.perf_counter() - began
        if any(bool(values[0]) for values in received):
            raise_on_all_ranks(control, error, doing="opening a step")
        counts = tuple(int(values[1]) for values in received)
        return StepSizes(counts, sum(float(values[2]) for values in received)), waited

    if error is not None:
        wait()
    return wait


def close_step(
    comm: Communicator,
    control: Control,
    flats: Sequence[FlatParameter],
    *,
    loss: Tensor | float,
    waited: float,
    norm_type: float | None,
    error: BaseException | None,
) -> StepSummary:
    """Agree that the step may be applied. Collective.

    What the device computes, loss and norm, travels as the gradients do and stays there; only what
    the host knows anyway is awaited here. So a GPU that is still at the last pass holds nobody up.

    Args:
        loss: this rank's part of the weighted loss.
        norm_type: of the gradient norm to compute on the way; None for none.
        error: this rank could not finish its passes.

    Raises:
        RankFailed: on the ranks that have finished theirs, if one has not.
    """
    rows = norm_rows(comm, flats)
    # A rank that has failed does not know what the others ask for, but it takes part.
    fill_norm_row(rows, flats, comm.group.rank, norm_type if error is None else None)
    rows[comm.group.rank, _LOSS] = _float64_bits(loss, rows.device)
    pending = gather_rows(comm, rows, what="the loss and the gradient norm")
    head = torch.tensor([float(error is not None), waited], dtype=torch.float64)
    flags = [place in flat.used for flat in flats for place in range(len(flat.parameters))]
    used = torch.tensor(flags, dtype=torch.float64)
    received = control.exchange(torch.cat([head, used]), what="closing a step")()
    pending.wait()
    if any(bool(values[0]) for values in received):
        raise_on_all_ranks(control, error, doing="a step")
    return StepSummary(
        losses=rows[:, _LOSS].view(torch.float64),
        norm_type=norm_type,
        norm=combine_norm(rows, norm_type),
        unused=_unused(flats, torch.stack([values[len(head) :] for values in received]).amax(0)),
        waited=tuple(float(values[1]) for values in received),
    )


def _unused(flats: Sequence[FlatParameter], used: Tensor) -> dict[FlatParameter, set[int]]:
    unused: dict[FlatParameter, set[int]] = {}
    flags = iter(used.tolist())
    for flat in flats:
        unused[flat] = {position for position, _ in enumerate(flat.parameters) if not next(flags)}
    return unused


def norm_rows(comm: Communicator, flats: Sequence[FlatParameter]) -> Tensor:
    """Small rows for `exchange_rows`, one of each rank, on the gradients' device: zeros."""
    return torch.zeros(comm.group.size, ROW, dtype=torch.int64, device=flats[0].device)


def fill_norm_row(
    rows: Tensor, flats: Sequence[FlatParameter], rank: int, norm_type: float | None
) -> None:
    """Put this rank's part of the gradient norm into its row.

    Over the slices that it owns in the layouts; the loss has room beside it.
    """
    if norm_type is None:
        return
    row = rows[rank]
    owned = [(flat, flat.intersect_owned(*flat.layout.bounds(rank))) for flat in flats]
    if norm_type == 2.0:
        squares = [flat.sums_of_squares(part) for flat, part in owned if part is not None]
        gradient_norm.add_squares(row[: ops.EXACT_WORDS], squares)
        return
    parts = [flat.gradient[part] for flat, part in owned if part is not None]
    if norm_type == float("inf"):
        row[0] = gradient_norm.largest(parts, row.device).view(torch.int64)
    else:
        row[0] = gradient_norm.power_sum(parts, norm_type, row.device).view(torch.int64)


def gather_rows(comm: Communicator, rows: Tensor, *, what: str) -> Pending:
    """Start to give all ranks every rank's row, as transports do it for that device. Collective."""
    layout = Layout(tuple(range(0, rows.numel() + 1, ROW)))
    return comm.all_gather(rows.view(-1), layout, what=what)


def combine_norm(rows: Tensor, norm_type: float | None) -> Tensor:
    """The norm from all ranks' rows, as one float64 on the device.

    The same bits on every rank, whatever their devices: only the host has one `pow` for all.
    """
    if norm_type is None:
        return torch.full((), math.nan, dtype=torch.float64, device=rows.device)
    if norm_type == 2.0:
        return ops.exact_norm(rows)
    parts = rows[:, 0].view(torch.float64)
    if norm_type == float("inf"):
        return parts.max()
    total = math.fsum(parts.tolist()) ** (1.0 / norm_type)
    return torch.full((), total, dtype=torch.float64, device=rows.device)


def _float64_bits(value: Tensor | float, device: torch.device) -> Tensor:
    """The bits of a float64; a number of the host gets to the device without waiting for it."""
    if not isinstance(value, Tensor):
        value = torch.full((), value, dtype=torch.float64, device=device)
    return value.to(device, torch.float64).view(torch.int64)
