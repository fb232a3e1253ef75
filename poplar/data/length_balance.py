"""Which rank gets which samples of a global batch, and in which pass, by the samples' lengths."""

from __future__ import annotations

import hashlib
import heapq
from array import array
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from poplar.values.plan import Plan

_GLOBAL_BATCHES_IN_A_GROUP = 50
"""Global batches that are sorted by length together, as Hugging Face's Trainer does."""


def checked_lengths(lengths: Iterable[float] | Tensor, samples: int | None = None) -> Tensor:
    """The lengths as one tensor on the CPU.

    Args:
        lengths: one number per sample.
        samples: how many there must be; None: at least one.

    Raises:
        ValueError: a wrong number of lengths, or one that is not a number above 0.
    """
    given = lengths if isinstance(lengths, Tensor) else torch.tensor(list(lengths), device="cpu")
    values = given.detach().to("cpu", torch.float64)
    if values.dim() != 1 or samples not in (None, values.numel()):
        expected = "one dimension" if samples is None else f"the shape [{samples}]"
        raise ValueError(
            f"lengths must have {expected}, one number per sample of the dataset, got the shape "
            f"{list(values.shape)}"
        )
    if values.numel() == 0 or not bool((values.isfinite() & (values > 0)).all()):
        raise ValueError("lengths must be finite numbers above 0, at least one")
    return values


def digest_of(lengths: Tensor) -> str:
    """16 hexadecimal digits that identify the lengths."""
    return hashlib.sha256(array("d", lengths.tolist()).tobytes()).hexdigest()[:16]


def passes_of(plan: Plan, samples: int) -> list[tuple[int, ...]]:
    """By rank, the sizes of its passes in a global batch of so many samples."""
    cut = plan.cut(samples)
    return [plan.micro_batch_sizes(rank, own) for rank, own in enumerate(cut)]


def deal(plan: Plan, lengths: Sequence[float]) -> list[list[int]]:
    """Divide the samples of a global batch among the ranks' passes.

    Every pass gets samples of similar length, so little of it is padding. From the longest sample
    down, the next pass is one of the rank with the fewest padded tokens per sample so far. Where
    ranks wait for each other at every pass, a pass is filled on all ranks before the next.

    Args:
        plan: gives the sizes of the passes.
        lengths: of the samples of a global batch, which may be short.

    Returns:
        By rank, positions in `lengths`, in the order of its passes: those of the first pass are
        the longest. Each position occurs once.
    """
    passes = passes_of(plan, len(lengths))
    samples = list(map(sum, passes))
    order = sorted(range(len(lengths)), key=lambda at: (-lengths[at], at))
    parts: list[list[int]] = [[] for _ in passes]
    # By rank: its next pass (0 if ranks do not wait at each), its padded tokens per sample, and the
    # part of its samples that are in the pass: of equal ranks, the one that gains least is first.
    waiting = [
        (0, 0.0, sizes[0] / samples[rank], rank, 0)
        for rank, sizes in enumerate(passes)
        if samples[rank]
    ]
    heapq.heapify(waiting)
    start = 0
    while waiting:
        _, padded, part, rank, done = heapq.heappop(waiting)
        taken = order[start : start + passes[rank][done]]
        start += len(taken)
        parts[rank] += taken
        if taken:
            padded += part * lengths[taken[0]]
        done += 1
        if done < len(passes[rank]):
            turn = done if plan.synchronizes_every_pass else 0
            part = passes[rank][done] / samples[rank]
            heapq.heappush(waiting, (turn, padded, part, rank, done))
    return parts


def grouped_order(
    order: Tensor, lengths: Tensor, global_batch: int, generator: torch.Generator
) -> Tensor:
    """Reorder samples so that those of each global batch have similar lengths.

    Groups of consecutive global batches are sorted by length; then all global batches are shuffled.
    A short last one keeps its samples and its place.

    Args:
        order: indices of all samples, in a random order.
        lengths: by index.
        global_batch: samples of a global batch.
        generator: shuffles the global batches.
    """
    whole = len(order) // global_batch
    # A quarter of the epoch at most, so that small data sets are not sorted completely.
    group = max(1, min(_GLOBAL_BATCHES_IN_A_GROUP, whole // 4)) * global_batch
    body, tail = order[: whole * global_batch], order[whole * global_batch :]
    parts = [
        part[lengths[part].argsort(descending=True, stable=True)] for part in body.split(group)
    ]
    batches = torch.cat(parts).view(whole, global_batch)
    shuffled = batches[torch.randperm(whole, generator=generator, device="cpu")]
    return torch.cat([shuffled.view(-1), tail])
