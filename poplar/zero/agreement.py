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

from poplar.comm import Control
from poplar.errors import RankFailed
from poplar.zero import norm
from poplar.zero.flat import Flat


@dataclass(frozen=True)
class Opening:
    """What all ranks know before the first backward."""

    samples: tuple[int, ...]
    """Of each rank in this step."""
    total_weight: float


@dataclass(frozen=True)
class Closing:
    """What all ranks know once the gradients are final."""

    loss: float
    norm_type: float | None
    norm: float
    """Of the gradient as accumulated (a loss scale still in it); NaN if not asked for."""
    unused: dict[Flat, set[int]]
    """Parameters, by position, that got a gradient on no rank."""
    waited: tuple[float, ...]
    """Seconds each rank was held up by the others."""


def leader_of(sizes: Sequence[int]) -> int | None:
    """The first rank with samples, given each rank's in a pass; None if nobody has any."""
    return next((rank for rank, size in enumerate(sizes) if size > 0), None)


def agree(control: Control, error: Exception | None, *, doing: str) -> None:
    """Raise on all ranks if one has an error, `RankFailed` on the others. Collective."""
    flags = control.exchange(torch.tensor([error is not None]), what=doing)()
    if any(bool(flag) for flag in flags):
        raise_together(control, error, doing=doing)


def raise_together(control: Control, error: BaseException | None, *, doing: str) -> None:
    """Tell each other the errors of those that failed. Collective; always raises."""
    mine = None if error is None else f"{type(error).__name__}: {error}"
    messages = control.exchange_objects(mine, what=doing)
    if error is not None:
        raise error
    causes = "; ".join(f"rank {r}: {text}" for r, text in enumerate(messages) if text)
    raise RankFailed(f"another rank failed in {doing}, so nothing was applied. {causes}")


def open_step(
    control: Control, *, samples: int, weight: float, error: Exception | None
) -> Callable[[], tuple[Opening, float]]:
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

    def wait() -> tuple[Opening, float]:
        began = time.perf_counter()
        received = collect()
        waited = time.perf_counter() - began
        if any(bool(values[0]) for values in received):
            raise_together(control, error, doing="opening a step")
        counts = tuple(int(values[1]) for values in received)
        return Opening(counts, sum(float(values[2]) for values in received)), waited

    if error is not None:
        wait()
    return wait


def close_step(
    control: Control,
    flats: Sequence[Flat],
    *,
    loss: float,
    waited: float,
    norm_type: float | None,
    error: BaseException | None,
) -> Closing:
    """Agree that the step may be applied. Collective.

    Args:
        loss: this rank's part of the weighted loss.
        norm_type: of the gradient norm to compute on the way; None for none.
        error: this rank could not finish its passes.

    Raises:
        RankFailed: on the ranks that have finished theirs, if one has not.
    """
    head = torch.tensor([float(error is not None), loss, waited], dtype=torch.float64)
    ours = local_norm(flats, control.group.rank, norm_type if error is None else None)
    flags = [place in flat.used for flat in flats for place in range(len(flat.parameters))]
    used = torch.tensor(flags, dtype=torch.float64)
    received = control.exchange(torch.cat([head, ours, used]), what="closing a step")()
    if any(bool(values[0]) for values in received):
        raise_together(control, error, doing="a step")
    end = len(head) + len(ours)
    return Closing(
        loss=sum(float(values[1]) for values in received),
        norm_type=norm_type,
        norm=join_norm([values[len(head) : end] for values in received], norm_type),
        unused=_unused(flats, torch.stack([values[end:] for values in received]).amax(0)),
        waited=tuple(float(values[2]) for values in received),
    )


def _unused(flats: Sequence[Flat], used: Tensor) -> dict[Flat, set[int]]:
    unused: dict[Flat, set[int]] = {}
    flags = iter(used.tolist())
    for flat in flats:
        unused[flat] = {position for position, _ in enumerate(flat.parameters) if not next(flags)}
    return unused


def local_norm(flats: Sequence[Flat], rank: int, norm_type: float | None) -> Tensor:
    """This rank's part of the gradient norm, over the slices that it owns in the layouts.

    float64, always `norm.BINS` long: a rank that has failed does not know what the others ask for.
    """
    result = torch.zeros(norm.BINS, dtype=torch.float64)
    if norm_type is None:
        return result
    owned = [(flat, flat.restrict(*flat.layout.bounds(rank))) for flat in flats]
    if norm_type == 2.0:
        return norm.square_bins([flat.squares_of(part) for flat, part in owned if part is not None])
    parts = [flat.gradient[part] for flat, part in owned if part is not None]
    if norm_type == float("inf"):
        result[0] = norm.largest(parts)
    else:
        result[0] = norm.power_sum(parts, norm_type)
    return result


def join_norm(parts: Sequence[Tensor], norm_type: float | None) -> float:
    """The norm from all ranks' `local_norm`."""
    if norm_type is None:
        return float("nan")
    stacked = torch.stack(list(parts))
    if norm_type == 2.0:
        return math.sqrt(norm.total_of_bins(stacked.sum(0)))
    if norm_type == float("inf"):
        return float(stacked[:, 0].max())
    return math.pow(float(stacked[:, 0].sum()), 1.0 / norm_type)
