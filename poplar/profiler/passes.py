"""Plain passes of the user's model: how long they take and what they hold, against the batch."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from poplar.data import pytree
from poplar.profile import BatchPoint
from poplar.profiler.memory import peak_bytes

LossFunction = Callable[[nn.Module, Any], Tensor]

SHORTEST_SAMPLE_SECONDS = 0.1
"""Shorter passes are timed several at a time: a CPU quota is enforced every 10 to 100 ms."""
MARGIN = 0.97
"""The largest batch is chosen by extrapolation; it stays this far below what memory allows."""
NEAR_ENOUGH = 1 / 8
"""Once a batch was too large, the search between it and the largest that fits ends here."""

_ERROR_PER_DEVIATION = 1.4826 * math.sqrt(math.pi / 2)
"""Of many normal samples: a standard deviation is so many median ones, and the median errs by so
much more than the mean."""


@dataclass
class Passes:
    """Forward and backward on one rank, at any batch."""

    model: nn.Module
    loss_fn: LossFunction
    example: Any
    """A batch; its samples are repeated where a larger one is needed."""
    device: torch.device
    _batches: dict[int, Any] = field(default_factory=dict)

    def batch(self, size: int) -> Any:
        """A batch of `size` samples out of the example's."""
        if size not in self._batches:
            available = pytree.samples_in(self.example)
            self._batches[size] = pytree.take(self.example, [at % available for at in range(size)])
        return self._batches[size]

    def run(self, size: int) -> None:
        """One pass; its gradients are dropped."""
        loss = self.loss_fn(self.model, self.batch(size))
        loss.backward()
        self._drop_gradients()

    def check(self) -> None:
        """A first pass, of one sample.

        Raises:
            TypeError, ValueError: the loss is no scalar, requires no gradient, or is not finite.
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
                "it outside of torch.no_grad() from parameters that require one"
            )
        value = float(loss.detach())
        if not math.isfinite(value):
            raise ValueError(
                f"the loss of the first sample of example_batch is {value}; profile with a "
                "batch and a model as they are trained (a NaN takes other ways through a model)"
            )
        loss.backward()
        self._drop_gradients()

    def seconds(self, size: int, repeats: int = 1) -> float:
        """Of one pass, the mean over `repeats` back to back."""
        self.synchronize()
        began = time.perf_counter()
        for _ in range(repeats):
            self.run(size)
        self.synchronize()
        return (time.perf_counter() - began) / repeats

    def backward_fraction(self, size: int) -> float:
        """The backward's part of a pass."""
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
        """Peak of a pass above what was held before it.

        Gradients leave as soon as they are there, as in the engine, which packs them: what they
        take is no activation.

        Raises:
            torch.OutOfMemoryError: it does not fit; nothing is left behind.
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
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _drop_gradients(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = None


def _drop(parameter: Tensor) -> None:
    parameter.grad = None


@dataclass(frozen=True, kw_only=True)
class Rung:
    """A batch size worth timing, as the scouting pass found it."""

    batch: int
    seconds: float
    """Of the scouting pass: a first idea."""
    activation_bytes: int


def scout(
    passes: Passes, *, max_batch: int, room_bytes: float, longest_seconds: float
) -> list[Rung]:
    """Climb batch sizes 1, 2, 4, ... as far as memory and time allow, noting what each holds.

    Args:
        passes: of this rank.
        max_batch: the largest batch to try.
        room_bytes: what activations may take; the largest batch that fits becomes the last rung.
        longest_seconds: no pass is tried that would probably take longer than this.

    Raises:
        torch.OutOfMemoryError: not even one sample fits.
    """
    rungs: list[Rung] = []
    size, too_large = 1, 0
    passes.run(1)
    while True:
        rung = _try(passes, size)
        if rung is None and not rungs:
            raise torch.OutOfMemoryError("not even one sample fits into the device's memory")
        if rung is None or (rung.activation_bytes > room_bytes and rungs):
            too_large = size
        else:
            rungs.append(rung)
        last = rungs[-1]
        following = min(2 * last.batch, max_batch, _largest_that_fits(rungs, room_bytes))
        if too_large and too_large - last.batch <= last.batch * NEAR_ENOUGH:
            return rungs
        if too_large and following >= too_large:
            following = (last.batch + too_large) // 2
        longer = last.seconds * following / last.batch
        if following <= last.batch or (longer > longest_seconds and len(rungs) > 1):
            return rungs
        size = following


def _try(passes: Passes, size: int) -> Rung | None:
    """One pass of this size; None if it does not fit."""
    try:
        began = time.perf_counter()
        held = passes.activation_bytes(size)
        passes.synchronize()
    except torch.OutOfMemoryError:
        return None
    seconds = time.perf_counter() - began
    return Rung(batch=size, seconds=seconds, activation_bytes=held)


def _largest_that_fits(rungs: Sequence[Rung], room_bytes: float) -> int:
    """By a straight line through the last two rungs."""
    if len(rungs) < 2:
        return 2 * rungs[-1].batch
    before, last = rungs[-2:]
    slope = (last.activation_bytes - before.activation_bytes) / (last.batch - before.batch)
    left = room_bytes * MARGIN - last.activation_bytes
    if slope <= 0 or left >= slope * last.batch:
        return 2 * last.batch
    return last.batch + max(0, math.floor(left / slope))


class Timings:
    """Passes of several sizes, timed in turns, so that a disturbance meets all of them alike.

    All ranks do this for equally long, so that whatever they share (a core, a memory bus, a power
    budget) is shared as in training.
    """

    def __init__(self, passes: Passes, rungs: Sequence[Rung]) -> None:
        self._passes, self._rungs = passes, rungs
        self._samples: dict[int, list[float]] = {rung.batch: [] for rung in rungs}
        self._repeats = {
            r.batch: max(1, math.ceil(SHORTEST_SAMPLE_SECONDS / r.seconds)) for r in rungs
        }
        self._order = [rung.batch for rung in rungs]

    def run(self, seconds: float, *, least: int) -> None:
        """Go on for so many seconds, and until each size has been timed `least` times in all."""
        end = time.perf_counter() + seconds
        while True:
            for size in self._order:
                enough = all(len(got) >= least for got in self._samples.values())
                if enough and time.perf_counter() >= end:
                    return
                self._samples[size].append(self._passes.seconds(size, self._repeats[size]))
            self._order.reverse()

    def forget(self) -> None:
        """What was timed so far does not count."""
        for samples in self._samples.values():
            samples.clear()

    @property
    def points(self) -> tuple[BatchPoint, ...]:
        """What was found out, by ascending batch."""
        return tuple(
            BatchPoint(
                batch=rung.batch,
                seconds=median(self._samples[rung.batch]),
                activation_bytes=rung.activation_bytes,
                spread_seconds=error_of_median(self._samples[rung.batch]),
            )
            for rung in self._rungs
        )


def time_rungs(
    passes: Passes, rungs: Sequence[Rung], *, seconds: float, least: int
) -> tuple[BatchPoint, ...]:
    """Time all rungs in turns until `seconds` are over, each at least `least` times."""
    timings = Timings(passes, rungs)
    timings.run(seconds, least=least)
    return timings.points


def error_of_median(samples: Sequence[float]) -> float:
    """The standard error of the median, by the median deviation; 0 where one sample says nothing.

    As of a normal distribution, without the few samples that were disturbed.
    """
    middle = median(samples)
    deviation = median(abs(sample - middle) for sample in samples)
    return _ERROR_PER_DEVIATION * deviation / math.sqrt(len(samples))
