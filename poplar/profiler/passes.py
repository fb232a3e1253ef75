"""Times plain passes of the user's model and measures their memory, against the batch."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from poplar.curve import error_of_median
from poplar.data import pytree
from poplar.profile import BatchPoint
from poplar.profiler.memory import peak_bytes
from poplar.profiler.timing import seconds_of
from poplar.system.devices import synchronize
from poplar.zero.micro_batch_loss import LossFunction

SHORTEST_SAMPLE_SECONDS = 0.1
"""Shorter passes are timed several at a time: a CPU quota is enforced every 10 to 100 ms."""
MARGIN = 0.97
"""Part of the free memory for which the largest batch is extrapolated."""
NEAR_ENOUGH = 1 / 8
"""Relative distance to a batch that was too large at which the search for the largest ends."""


@dataclass
class Passes:
    """Forward and backward on one rank, for any batch size."""

    model: nn.Module
    loss_fn: LossFunction
    example: Any
    """A batch; its samples are repeated for larger ones."""
    device: torch.device
    _batches: dict[int, Any] = field(default_factory=dict)

    def batch(self, size: int) -> Any:
        """A batch of `size` samples of the example."""
        if size not in self._batches:
            available = pytree.samples_in(self.example)
            self._batches[size] = pytree.take(self.example, [at % available for at in range(size)])
        return self._batches[size]

    def run(self, size: int) -> None:
        """Run one pass and drop its gradients."""
        loss = self.loss_fn(self.model, self.batch(size))
        loss.backward()
        self._drop_gradients()

    def check(self) -> None:
        """Run a first pass of one sample.

        Raises:
            TypeError, ValueError: the loss is not a scalar, requires no gradient, or is not finite.
        """
        loss: Any = self.loss_fn(self.model, self.batch(1))
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            what = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise TypeError(
                f"loss_fn(model, micro_batch) must return a scalar tensor, got {what}; return the "
                "mean over the micro-batch"
            )
        if not loss.requires_grad:
            raise ValueError(
                "the loss does not require a gradient, so there is no backward to measure; compute "
                "it outside of torch.no_grad() from parameters that require gradients"
            )
        value = float(loss.detach())
        if not math.isfinite(value):
            raise ValueError(
                f"the loss of the first sample of example_batch is {value}; profile with a "
                "batch and a model as in training, because a NaN may change what a model computes"
            )
        loss.backward()
        self._drop_gradients()

    def seconds(self, size: int, repeats: int = 1) -> float:
        """Seconds of one pass, the mean over `repeats` without a pause."""
        return seconds_of(lambda: self.run(size), self.device, repeats)

    def backward_fraction(self, size: int) -> float:
        """Part of a pass that the backward takes."""
        self.synchronize()
        began = time.perf_counter()
        loss = self.loss_fn(self.model, self.batch(size))
        self.synchronize()
        middle = time.perf_counter()
        loss.backward()
        self.synchronize()
        ended = time.perf_counter()
        self._drop_gradients()
        return (ended - middle) / (ended - began)

    def activation_bytes(self, size: int) -> int:
        """Peak memory of a pass above what was allocated before it.

        Gradients are freed as soon as they are complete, as in the engine, so they do not count.

        Raises:
            torch.OutOfMemoryError: the pass does not fit; all its memory is freed.
        """
        self.batch(size)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        handles = [p.register_post_accumulate_grad_hook(_drop) for p in trained]
        try:
            return peak_bytes(lambda: self.run(size), self.device)
        except torch.OutOfMemoryError:
            self._drop_gradients()
            self._batches.pop(size, None)
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
            raise
        finally:
            for handle in handles:
                handle.remove()

    def synchronize(self) -> None:
        """Wait for the device."""
        synchronize(self.device)

    def _drop_gradients(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = None


def _drop(parameter: Tensor) -> None:
    parameter.grad = None


def climb(
    passes: Passes, *, max_batch: int, activation_bytes: float, longest_seconds: float
) -> list[BatchPoint]:
    """Run batch sizes 1, 2, 4, ... as far as memory and time allow, and measure their memory.

    The times are rough: those of a single pass, with the memory measurement.

    Args:
        passes: of this rank.
        max_batch: the largest batch to try.
        activation_bytes: what activations may take; the last size is the largest that fits.
        longest_seconds: no pass is tried that would probably take longer.

    Raises:
        torch.OutOfMemoryError: not even one sample fits.
    """
    sizes: list[BatchPoint] = []
    size, too_large = 1, 0
    passes.run(1)
    while True:
        tried = _try(passes, size)
        if tried is None and not sizes:
            raise torch.OutOfMemoryError(
                "not even one sample fits in the memory of the device; use shorter samples, "
                "activation checkpointing or a smaller model"
            )
        if tried is None or (tried.activation_bytes > activation_bytes and sizes):
            too_large = size
        else:
            sizes.append(tried)
        last = sizes[-1]
        following = min(2 * last.batch, max_batch, _largest_that_fits(sizes, activation_bytes))
        if too_large and too_large - last.batch <= last.batch * NEAR_ENOUGH:
            return sizes
        if too_large and following >= too_large:
            following = (last.batch + too_large) // 2
        longer = last.seconds * following / last.batch
        if following <= last.batch or (longer > longest_seconds and len(sizes) > 1):
            return sizes
        size = following


def _try(passes: Passes, size: int) -> BatchPoint | None:
    """One pass of this size, with a rough time; None if it does not fit."""
    try:
        began = time.perf_counter()
        held = passes.activation_bytes(size)
        passes.synchronize()
    except torch.OutOfMemoryError:
        return None
    seconds = time.perf_counter() - began
    return BatchPoint(batch=size, seconds=seconds, activation_bytes=held)


def _largest_that_fits(sizes: Sequence[BatchPoint], activation_bytes: float) -> int:
    """Extrapolated by a straight line through the last two sizes, at most twice the last one."""
    if len(sizes) < 2:
        return 2 * sizes[-1].batch
    before, last = sizes[-2:]
    slope = (last.activation_bytes - before.activation_bytes) / (last.batch - before.batch)
    left = activation_bytes * MARGIN - last.activation_bytes
    if slope <= 0 or left >= slope * last.batch:
        return 2 * last.batch
    return last.batch + max(0, math.floor(left / slope))


class Timings:
    """Times passes of several sizes in turns, so that a disturbance affects all sizes."""

    def __init__(self, passes: Passes, sizes: Sequence[BatchPoint]) -> None:
        self.passes = passes
        self._sizes = sizes
        self._samples: dict[int, list[float]] = {size.batch: [] for size in sizes}
        self._repeats = {
            s.batch: max(1, math.ceil(SHORTEST_SAMPLE_SECONDS / s.seconds)) for s in sizes
        }
        self._order = [size.batch for size in sizes]

    def run(self, seconds: float, *, least: int) -> None:
        """Time for so many seconds, and until each size has been timed `least` times in all."""
        end = time.perf_counter() + seconds
        while True:
            for size in self._order:
                enough = all(len(got) >= least for got in self._samples.values())
                if enough and time.perf_counter() >= end:
                    return
                self._samples[size].append(self.passes.seconds(size, self._repeats[size]))
            self._order.reverse()

    def forget(self) -> None:
        """Drop all samples so far."""
        for samples in self._samples.values():
            samples.clear()

    @property
    def points(self) -> tuple[BatchPoint, ...]:
        """The median time of each size, by ascending batch."""
        return tuple(
            replace(
                size,
                seconds=median(self._samples[size.batch]),
                spread_seconds=error_of_median(self._samples[size.batch]),
            )
            for size in self._sizes
        )


def time_sizes(
    passes: Passes, sizes: Sequence[BatchPoint], *, seconds: float, least: int
) -> tuple[BatchPoint, ...]:
    """Time all sizes in turns until `seconds` are over, each at least `least` times.

    Args:
        passes: of this rank.
        sizes: with rough times, which determine how many short passes are timed at once.
        seconds: time budget.
        least: timings of each size.
    """
    timings = Timings(passes, sizes)
    timings.run(seconds, least=least)
    return timings.points
