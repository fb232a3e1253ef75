"""Lengths of samples: which rank gets which samples, and how long micro-batches become."""

from __future__ import annotations

import hashlib
import heapq
import math
from array import array
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor

from poplar.data import pytree
from poplar.values.plan import Plan

PyTree = TypeVar("PyTree")

_INTEGERS = (torch.int32, torch.int64)
_OTHER_UNIT = 2.0
"""A batch that is longer than the longest sample, or shorter than the shortest, by this factor is
no batch of such samples: collate functions may pad a little further."""
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


def check_quantile(quantile: float) -> None:
    """Raise ValueError if `length_quantile` is not between 0 and 1."""
    if not 0.0 < quantile < 1.0:
        raise ValueError(f"length_quantile must be above 0 and below 1, got {quantile}")


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


class SampleLengths:
    """The distribution of the longest of `n` samples that are drawn at random."""

    def __init__(self, lengths: Iterable[float] | Tensor, quantile: float) -> None:
        """
        Args:
            lengths: of all samples of the dataset.
            quantile: of the longest samples of micro-batches, for `longest`.

        Raises:
            ValueError: lengths that are not numbers above 0; a quantile that is not below 1.
        """
        check_quantile(quantile)
        self._sorted = checked_lengths(lengths).sort().values
        self._quantile = quantile
        self.typical = cache(self._typical)
        self.longest = cache(self._longest)

    def __str__(self) -> str:
        """What was measured, for the identity of a profile."""
        values = self._sorted
        return (
            f"{len(values)} samples of {float(values[0]):g} to {float(values[-1]):g}, mean "
            f"{float(values.mean()):g}, memory at quantile {self._quantile} ({digest_of(values)})"
        )

    def check_padded(self, length: int) -> None:
        """Raise ValueError if a batch of samples with these lengths is not padded to `length`."""
        shortest, longest = float(self._sorted[0]), float(self._sorted[-1])
        if not shortest / _OTHER_UNIT <= length <= longest * _OTHER_UNIT:
            raise ValueError(
                f"lengths= has samples of {shortest:g} to {longest:g}, but the longest dim 1 of "
                f"example_batch is {length}, so they are not lengths of its tensors of the shape "
                "[samples, length, ...]; give lengths in elements of dim 1 (not in seconds), or "
                "leave out lengths= if the length is another dim"
            )

    def _typical(self, samples: int) -> int:
        """The expected longest of so many samples, rounded up."""
        count = len(self._sorted)
        # The longest is at most the k-th value with the probability (k / count) ** samples.
        at_most = (torch.arange(count + 1, dtype=torch.float64, device="cpu") / count) ** samples
        return math.ceil(float((self._sorted * at_most.diff()).sum()) - 1e-9)

    def _longest(self, samples: int) -> int:
        """A length that the longest of so many samples exceeds with `1 - quantile` at most."""
        count = len(self._sorted)
        at_least = self._quantile ** (1.0 / samples)
        place = min(count, math.ceil(at_least * count - 1e-9))
        return math.ceil(float(self._sorted[place - 1]))


def padded_length(batch: Any) -> int:
    """The largest dim 1 of a tensor in the batch; 0 if no tensor has one.

    Also 0 if its samples are not rows of its tensors, because dim 1 is then no length. In graphs it
    may be the number of edges.
    """
    if not pytree.rows_are_samples(batch):
        return 0
    return max((int(t.shape[1]) for t in pytree.tensors(batch) if t.dim() > 1), default=0)


def at_length(batch: PyTree, length: int) -> PyTree:
    """The batch with another padded length: tensors whose dim 1 is that length are cut or repeated.

    A vector of integers of which the largest is the padded length holds the lengths of the samples,
    as losses with CTC and packed sequences need them: they change in proportion.

    Args:
        batch: with at least one such tensor; its samples are rows.
        length: at least 1.
    """
    present = padded_length(batch)

    def resized(tensor: Tensor) -> Tensor:
        is_of_integers = tensor.dim() == 1 and tensor.dtype in _INTEGERS and tensor.numel() > 0
        if is_of_integers and int(tensor.max()) == present:
            return (tensor * length).div(present, rounding_mode="floor").clamp(min=1)
        if tensor.dim() < 2 or tensor.shape[1] != present:
            return tensor
        places = torch.arange(length, device=tensor.device) % present
        return tensor.index_select(1, places)

    return pytree.map_tensors(resized, batch) if length != present else batch
