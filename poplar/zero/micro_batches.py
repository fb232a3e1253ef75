"""Splits this rank's part of a global batch into weighted micro-batches.

All ranks know the sizes on all ranks before the first backward. So they agree on the total weight,
on the leader of each pass, and on whether the sizes match the plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, Literal, SupportsFloat

import torch
from torch import Tensor

from poplar.comm import Control, Group
from poplar.data import pytree
from poplar.values.errors import agreed
from poplar.values.plan import Plan, fewest_passes
from poplar.zero.agreement import (
    OPENING,
    StepSizes,
    caught,
    leader_of,
    open_step,
    raise_on_all_ranks,
)

Loss = Literal["mean", "sum", "global_mean"]
Weight = Callable[[Any], "float | int | Tensor"]

_LOSSES = ("mean", "sum", "global_mean")


@dataclass(frozen=True)
class MicroBatch:
    """The input of one pass of this rank; it may have 0 samples."""

    batch: Any
    samples: int
    weight: float
    """Factor for the gradient of this pass."""
    leader: int | None
    """The first rank that has samples in this pass."""
    last: bool
    """This rank's last pass of the step."""
    is_even: bool = False
    """It is the only pass, and all ranks have one of the same weight."""


@dataclass(frozen=True)
class OpenedStep:
    """A step that this rank has opened; other ranks may not have."""

    wait: Callable[[], StepSizes]
    """Wait for the other ranks; returns all sizes."""
    cut: Callable[[StepSizes], list[MicroBatch]]
    """Cut the batch; a ValueError of the step as a whole is raised on all ranks."""
    control: Control
    error: Exception | None
    """Why this rank cannot start the step."""
    batch: Any = None
    """This rank's part of the global batch; None without samples."""
    first: Any = None
    """The first micro-batch of this rank that has samples; None if there is none."""
    first_pass: int | None = None
    """Its pass."""

    def micro_batches(self, sizes: StepSizes) -> list[MicroBatch]:
        """This rank's micro-batches, or an error on all ranks. Collective if a rank has one."""
        if sizes.has_error:
            raise_on_all_ranks(self.control, self.error, doing=OPENING)
        return self.cut(sizes)


def open_joint_pass(control: Control, samples: int, error: Exception | None) -> OpenedStep:
    """Start to agree on a step of one pass that all ranks compute together. Collective.

    `error`, why this rank cannot start it, is raised when the result is waited for.
    """

    def cut(sizes: StepSizes) -> list[MicroBatch]:
        return [MicroBatch(None, sum(sizes.samples), 1.0, leader_of(sizes.samples), last=True)]

    has_error = error is not None
    wait = open_step(control, samples=samples, weight=float(samples), kind=0, has_error=has_error)
    return OpenedStep(wait, cut, control, error)


@dataclass(frozen=True)
class BatchSplitter:
    """Splits the batches of this rank by the plan."""

    plan: Plan | None
    """None: a batch is one pass, of any size."""
    synchronizes_every_pass: bool
    """All ranks run the same number of passes, including passes without samples."""
    largest_batches: Mapping[int, int] = field(default_factory=dict)
    """Without a plan: by rank, the most samples of one pass; other ranks have no limit."""

    def open(
        self,
        control: Control,
        batch: Any,
        weight: Weight | None,
        loss: Loss,
        error: Exception | None,
        version: int = 0,
    ) -> OpenedStep:
        """Check and split a batch, and start to agree on the weights. Collective.

        An error in the input is raised when the result is waited for.

        Args:
            batch, weight, loss: as for `HeteroZeroOptimizer.train_step`.
            error: why this rank cannot start a step, for another reason than its batch.
            version: `PlanSchedule.version` of the batch.
        """
        rank = control.group.rank
        sizes: tuple[int, ...] = ()
        batches: list[Any] = []
        counts: list[float] = []

        def split() -> None:
            nonlocal sizes, batches, counts
            if loss not in _LOSSES:
                raise ValueError(f"loss={loss!r}; use 'mean', 'sum' or 'global_mean'")
            samples = self._samples_in(control.group, batch)
            sizes = self._sizes(rank, samples)
            batches = pytree.split(batch, sizes) if samples else [None] * len(sizes)
            counts = _counts(weight, batches, sizes)

        error = error or caught(split)
        error = None if error is None else _with_rank(control.group.name, error)
        kind = _LOSSES.index(loss) * 2 + (weight is not None) if error is None else 0

        def cut(step_sizes: StepSizes) -> list[MicroBatch]:
            self._check_sizes(step_sizes, control.group.names)
            weights = _weights(loss, counts, step_sizes.total_weight)
            return self._micro_batches(batches, sizes, weights, step_sizes)

        wait = open_step(
            control,
            samples=sum(sizes),
            weight=sum(counts),
            kind=kind,
            has_error=error is not None,
            version=version,
        )
        first = next((at for at, size in enumerate(sizes) if size), None)
        if first is None or error is not None:
            return OpenedStep(wait, cut, control, error)
        return OpenedStep(wait, cut, control, error, batch, batches[first], first)

    def _micro_batches(
        self,
        batches: list[Any],
        sizes: Sequence[int],
        weights: Sequence[float],
        step_sizes: StepSizes,
    ) -> list[MicroBatch]:
        is_even = self._is_even(sizes, step_sizes)
        if self.synchronizes_every_pass:
            by_rank = [self._sizes(rank, count) for rank, count in enumerate(step_sizes.samples)]
            leaders = [leader_of(each) for each in zip_longest(*by_rank, fillvalue=0)]
            places = list(range(len(leaders)))
            # Without a plan only the sizes of all ranks tell how many passes follow.
            missing = len(places) - len(sizes)
            batches, sizes = [*batches, *[None] * missing], [*sizes, *[0] * missing]
            weights = [*weights, *[0.0] * missing]
        else:
            places = [place for place, size in enumerate(sizes) if size]
            leaders = [leader_of(step_sizes.samples)] * len(sizes)
        micro_batches = [
            MicroBatch(batches[at], sizes[at], weights[at], leaders[at], at == places[-1], is_even)
            for at in places
        ]
        return micro_batches or [MicroBatch(None, 0, 0.0, leader_of(step_sizes.samples), last=True)]

    def _is_even(self, own: Sequence[int], step_sizes: StepSizes) -> bool:
        """Whether every rank runs one pass of the same size, and its loss is a mean over samples.

        Equal on all ranks. `own`: sizes of the passes of this rank.
        """
        losses, has_weight = zip(*(divmod(kind, 2) for kind in step_sizes.kinds), strict=True)
        is_alone = len(has_weight) == 1  # it has all of the weight, whatever that is
        if len(own) > 1 or any(losses) or (any(has_weight) and not is_alone):
            return False
        by_rank = enumerate(step_sizes.samples)
        return all(self._sizes(rank, count) == tuple(own) for rank, count in by_rank)

    def _samples_in(self, group: Group, batch: Any) -> int:
        if self.plan is None:
            return 0 if batch is None else pytree.samples_in(batch)
        expected = self.plan.samples(group.rank)
        if batch is None:
            if expected:
                raise ValueError(
                    f"got no batch, but the plan gives this rank {expected} samples; build the "
                    "loader with HeteroBatchSampler(len(dataset), plan)"
                )
            return 0
        size = pytree.samples_in(batch)
        # A DataLoader cannot yield an empty batch, so a rank without samples gets one and drops it.
        if size > max(expected, 1):
            raise ValueError(_size_message(group.name, size, expected))
        return size if expected else 0

    def _sizes(self, rank: int, samples: int) -> tuple[int, ...]:
        if self.plan is not None:
            return self.plan.micro_batch_sizes(rank, samples)
        most = self.largest_batches.get(rank, samples)
        return fewest_passes(samples, most) or (0,)

    def evaluated_sizes(self, rank: int, samples: int) -> tuple[int, ...]:
        """Sizes of passes that evaluate a batch, which may have more samples than planned."""
        if self.plan is None or samples <= self.plan.samples(rank):
            return tuple(filter(None, self._sizes(rank, samples)))
        return fewest_passes(samples, max(self.plan.micro_batches[rank], default=0) or samples)

    def _check_sizes(self, step_sizes: StepSizes, names: Sequence[int]) -> None:
        """Check what the ranks, which messages name so, have said: all of them raise the same."""
        try:
            _check_versions(step_sizes, names)
            self._check_samples(step_sizes, names)
            _check_kinds(step_sizes, names)
        except ValueError as error:
            raise agreed(error) from None

    def _check_samples(self, step_sizes: StepSizes, names: Sequence[int]) -> None:
        total = sum(step_sizes.samples)
        if self.plan is not None and total != self.plan.global_batch:
            planned = tuple(self.plan.samples(rank) for rank in range(self.plan.world_size))
            try:
                expected = self.plan.cut(total)
            except ValueError:
                expected = planned
            for rank, size in enumerate(step_sizes.samples):
                if size < expected[rank]:  # if any differs, one has fewer
                    raise ValueError(_size_message(names[rank], size, planned[rank]))
        if not 0.0 < step_sizes.total_weight < math.inf:
            raise ValueError(
                f"the weights of this global batch of {total} samples sum to "
                f"{step_sizes.total_weight}; at least one sample or token must count, and the sum "
                "must be finite"
            )


def _check_versions(step_sizes: StepSizes, names: Sequence[int]) -> None:
    """Check that samplers split this global batch by the same plan on all ranks."""
    by_rank = zip(names, step_sizes.versions, strict=True)
    known = {rank: version for rank, version in by_rank if version}
    if len(set(known.values())) > 1:
        changes = ", ".join(f"rank {rank}: {version - 1}" for rank, version in known.items())
        raise ValueError(
            "the ranks' batches were drawn under different plans, so they are not parts of one "
            f"global batch (changes of the plan before the batch was drawn: {changes}); train each "
            "batch that a loader yields once, in its order, on every rank"
        )


def _check_kinds(step_sizes: StepSizes, names: Sequence[int]) -> None:
    """Check that the ranks with samples mean the same by loss and weight."""
    ranks = [rank for rank, samples in enumerate(step_sizes.samples) if samples]
    texts: dict[str, list[int]] = {}
    for rank in ranks:
        loss, has_weight = divmod(step_sizes.kinds[rank], 2)
        text = f"loss={_LOSSES[loss]!r} {'with' if has_weight else 'without'} weight="
        texts.setdefault(text, []).append(names[rank])
    if len(texts) > 1:
        found = ", ".join(f"{text} on rank(s) {which}" for text, which in texts.items())
        raise ValueError(f"the ranks take a step with {found}; give all ranks the same")


def counted(weight: Weight, batch: Any) -> float | Tensor:
    """What `weight` returns for a micro-batch: a number, or a tensor without dims.

    Raises:
        TypeError: it is no function, or returns something else.
    """
    if not callable(weight):
        raise TypeError(
            "weight must be a function of a micro-batch, such as poplar.tokens(), got "
            f"{type(weight).__name__}"
        )
    count: Any = weight(batch)
    if isinstance(count, Tensor):
        if count.numel() == 1 and not count.is_complex():
            return count.detach().reshape(())
    elif isinstance(count, SupportsFloat):
        with suppress(TypeError, ValueError):  # an array of several numbers
            return float(count)
    shape = getattr(count, "shape", None)
    got = type(count).__name__ if shape is None else tuple(shape)
    raise TypeError(
        f"weight(micro_batch) must return one number, got {got}; return how many samples or tokens "
        "of the micro-batch count"
    )


def _counts(weight: Weight | None, batches: Sequence[Any], sizes: Sequence[int]) -> list[float]:
    """What each micro-batch counts. It waits for a device at most once."""
    if weight is None:
        return [float(size) for size in sizes]
    found = [
        counted(weight, part) if size else 0.0 for part, size in zip(batches, sizes, strict=True)
    ]
    tensors = [count for count in found if isinstance(count, Tensor)]
    read = iter(torch.stack(tensors).tolist() if tensors else ())
    counts = [float(next(read)) if isinstance(count, Tensor) else count for count in found]
    for count, size in zip(counts, sizes, strict=True):
        if not 0.0 <= count < math.inf:
            raise ValueError(
                f"a micro-batch of {size} samples has the weight {count}, but a weight is the "
                "number of samples or tokens that count: finite and not negative"
            )
    return counts


def _weights(loss: Loss, counts: Sequence[float], total: float) -> list[float]:
    """Factors for the gradients of this rank's passes."""
    if loss == "global_mean":
        return [1.0] * len(counts)
    factors = [1.0] * len(counts) if loss == "sum" else counts
    return [factor / total for factor in factors]


def _size_message(rank: int, size: int, expected: int) -> str:
    return (
        f"rank {rank}: this batch has {size} samples, but the plan gives this rank {expected}; "
        "build it with DataLoader(dataset, batch_sampler=HeteroBatchSampler(len(dataset), plan)), "
        "without batch_size; of a stream, with DataLoader(split_stream(stream, plan), "
        "batch_size=None). Either drops a short last batch by drop_last=True, its default. If the "
        "loop drops batches, pass their number to skip() of the sampler or stream"
    )


def _with_rank(rank: int, error: Exception) -> Exception:
    """The error with the rank in its message, if it has one of the basic types."""
    if type(error) not in (ValueError, TypeError, RuntimeError) or str(error).startswith("rank "):
        return error
    return type(error)(f"rank {rank}: {error}").with_traceback(error.__traceback__)
