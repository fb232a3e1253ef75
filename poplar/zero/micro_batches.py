"""A global batch in pieces: what each pass of this rank runs, and what it counts for.

Every rank knows every rank's sizes before the first backward, so all agree on the total that
weights are divided by, on who leads a pass, and on whether somebody brought a batch that is not the
plan's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from poplar.comm import Control
from poplar.data import pytree
from poplar.plan import Plan
from poplar.zero.agreement import StepSizes, leader_of, open_step

Loss = Literal["mean", "sum", "global_mean"]
Weight = Callable[[Any], "float | int | Tensor"]

_LOSSES = ("mean", "sum", "global_mean")


@dataclass(frozen=True)
class MicroBatch:
    """One pass of this rank."""

    batch: Any
    samples: int
    weight: float
    """What the gradient of this pass is multiplied by."""
    leader: int | None
    """The first rank that has samples in this pass."""
    last: bool
    """This rank's last pass of the step."""


@dataclass(frozen=True)
class OpenedStep:
    """A step that this rank has opened, and others perhaps not yet."""

    first: Any
    """The batch of this rank's first pass with samples; None if it has none."""
    wait: Callable[[], tuple[list[MicroBatch], StepSizes, float]]
    """Wait for the others: this rank's pieces, what was agreed, and the seconds spent waiting.

    Raises what is wrong with the step as a whole, the same on all ranks, or `RankFailed` for what
    is wrong on another.
    """


@dataclass(frozen=True)
class BatchSplitter:
    """How this rank's batches become pieces."""

    plan: Plan | None
    """None: whatever comes, in one pass."""
    synchronizes_every_pass: bool
    """All ranks run the same number of passes, those without samples included."""
    input_dtype: torch.dtype | None
    """Floating-point inputs are cast to this; None: left as they are."""

    def open(
        self,
        control: Control,
        batch: Any,
        weight: Weight | None,
        loss: Loss,
        check: Callable[[], None],
    ) -> OpenedStep:
        """Check and cut a batch, and begin to agree on the weights with all ranks. Collective.

        Args:
            control: how ranks agree.
            batch: this rank's part of the global batch.
            weight: what a micro-batch counts for; None: its samples.
            loss: what the loss function returns.
            check: raises what else forbids a step on this rank.

        Raises:
            Exception: what is wrong with this rank's part; the others get a `RankFailed`.
        """
        rank = control.group.rank
        error: Exception | None = None
        sizes: tuple[int, ...] = ()
        batches: list[Any] = []
        counts: list[float] = []
        try:
            check()
            if loss not in _LOSSES:
                raise ValueError(f"loss={loss!r}; use 'mean', 'sum' or 'global_mean'")
            samples = self._samples_in(rank, batch)
            sizes = self._sizes(rank, samples)
            batches = pytree.cut(self.cast(batch), sizes) if samples else [None] * len(sizes)
            for part, size in zip(batches, sizes, strict=True):
                counts.append(float(weight(part)) if weight is not None and size else float(size))
        except Exception as caught:
            error = _with_rank(rank, caught)
        collect = open_step(control, samples=sum(sizes), weight=sum(counts), error=error)

        def wait() -> tuple[list[MicroBatch], StepSizes, float]:
            opening, waited = collect()
            self._check_sizes(opening)
            weights = _weights(loss, counts, opening.total_weight)
            return self._micro_batches(batches, sizes, weights, opening), opening, waited

        first = next((part for part, size in zip(batches, sizes, strict=True) if size), None)
        return OpenedStep(first, wait)

    def cast(self, batch: Any) -> Any:
        """The batch with its floating-point tensors in the dtype that the model computes in."""
        dtype = self.input_dtype
        if dtype is None or dtype is torch.float32:
            return batch
        return pytree.map_tensors(lambda t: t.to(dtype) if t.is_floating_point() else t, batch)

    def _micro_batches(
        self, batches: list[Any], sizes: Sequence[int], weights: Sequence[float], opening: StepSizes
    ) -> list[MicroBatch]:
        if self.synchronizes_every_pass:
            everybodys = [self._sizes(rank, count) for rank, count in enumerate(opening.samples)]
            places = list(range(len(sizes)))
            leaders = [leader_of([own[place] for own in everybodys]) for place in places]
        else:
            places = [place for place, size in enumerate(sizes) if size]
            leaders = [leader_of(opening.samples)] * len(sizes)
        micro_batches = [
            MicroBatch(batches[at], sizes[at], weights[at], leaders[at], last=at == places[-1])
            for at in places
        ]
        return micro_batches or [MicroBatch(None, 0, 0.0, leader_of(opening.samples), last=True)]

    def _samples_in(self, rank: int, batch: Any) -> int:
        if self.plan is None:
            return 0 if batch is None else pytree.samples_in(batch)
        expected = self.plan.samples(rank)
        if batch is None:
            if expected:
                raise ValueError(f"no batch, but the plan gives this rank {expected} samples")
            return 0
        size = pytree.samples_in(batch)
        # A loader can't yield an empty batch: a rank without samples is sent one, and drops it.
        if size > max(expected, 1):
            raise ValueError(_size_message(rank, size, expected))
        return size if expected else 0

    def _sizes(self, rank: int, samples: int) -> tuple[int, ...]:
        return (samples,) if self.plan is None else self.plan.micro_batch_sizes(rank, samples)

    def _check_sizes(self, opening: StepSizes) -> None:
        """All ranks know all sizes now, so all raise the same."""
        total = sum(opening.samples)
        if self.plan is not None and total != self.plan.global_batch:
            planned = tuple(self.plan.samples(rank) for rank in range(self.plan.world_size))
            try:
                expected = self.plan.cut(total)
            except ValueError:
                expected = planned
            for rank, size in enumerate(opening.samples):
                if size != expected[rank]:
                    raise ValueError(_size_message(rank, size, planned[rank]))
        if not opening.total_weight > 0.0:
            raise ValueError(
                f"the weights of this global batch of {total} samples sum to "
                f"{opening.total_weight}; at least one sample or token must count"
            )


def _weights(loss: Loss, counts: Sequence[float], total: float) -> list[float]:
    """What the gradient of each of this rank's passes is multiplied by."""
    if loss == "global_mean":
        return [1.0] * len(counts)
    factors = [1.0] * len(counts) if loss == "sum" else counts
    return [factor / total for factor in factors]


def _size_message(rank: int, size: int, expected: int) -> str:
    return (
        f"rank {rank}: this batch has {size} samples, but the plan gives this rank {expected}; "
        "build the loader with HeteroBatchSampler(len(dataset), plan), or pass drop_last=True"
    )


def _with_rank(rank: int, error: Exception) -> Exception:
    """The same error, with the rank that it is about at its head where its kind is a plain one."""
    if type(error) not in (ValueError, TypeError, RuntimeError) or str(error).startswith("rank "):
        return error
    return type(error)(f"rank {rank}: {error}").with_traceback(error.__traceback__)
