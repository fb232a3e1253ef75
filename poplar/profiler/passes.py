"""Times passes of the user's model and measures their memory, against the batch."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from poplar.data import pytree
from poplar.data.lengths import SampleLengths, at_length
from poplar.profiler.compilation import frames_compiled, is_compiled
from poplar.profiler.memory import PassBytes, batch_bytes, counts_tensors, pass_bytes
from poplar.profiler.timing import seconds_of
from poplar.profiler.unit_hooks import TrainedUnit, UnitClock, UnitFractions, UnitSeconds, combined
from poplar.system.devices import synchronize
from poplar.system.out_of_memory import free_cached_memory, free_failed_pass, is_out_of_memory
from poplar.values.profile import BatchPoint
from poplar.zero.micro_batch_loss import LossFunction, check_scalar
from poplar.zero.preserved_state import gradients_dropped

T = TypeVar("T")

SETTLED = 1.25
"""A pass is still warming up if it takes more than this many times as long as the next one."""
WARM_UP_PASSES = 8
WARM_UP_SECONDS = 120.0
"""Limits for the warm-up of a batch size. Two passes always run, however long the first takes."""


class PassParts(NamedTuple):
    """How the seconds of a pass are spent."""

    backward_fraction: float
    """Part of a pass that the backward takes: the sum of `units.backward` if they are known."""
    units: UnitFractions
    """The parts of each unit."""
    linear_rows: Mapping[str, float] = MappingProxyType({})
    """Rows for a sample of each `nn.Linear`, by module name."""


@dataclass
class Passes:
    """Plain forward and backward on one rank, for any batch size."""

    model: nn.Module
    loss_fn: LossFunction
    example: Any
    """A batch; its samples are repeated for larger ones."""
    device: torch.device
    units: Sequence[TrainedUnit] = ()
    """Whose memory is measured; none: only the peak of a pass is."""
    lengths: SampleLengths | None = None
    """Lengths to which batches are padded; None: that of the example."""
    _batches: dict[tuple[int, int | None], Any] = field(default_factory=dict)

    def batch(self, size: int, *, longest: bool = False) -> Any:
        """A batch of `size` samples of the example, in containers of its own.

        If there are `lengths`, it has a typical one or the `longest`, for which to plan memory.
        """
        length = None
        if self.lengths is not None:
            length = self.lengths.longest(size) if longest else self.lengths.typical(size)
        if (size, length) not in self._batches:
            available = pytree.samples_in(self.example)
            batch = pytree.take(self.example, [at % available for at in range(size)])
            self._batches[size, length] = batch if length is None else at_length(batch, length)
        return pytree.copied(self._batches[size, length])

    def step_batch(self, samples: int) -> Any:
        """A batch for an optimizer step, whose micro-batches have typical lengths."""
        by_rows = self.lengths is None and not isinstance(self.example, pytree.SplitsItself)
        return self.batch(samples) if by_rows else _StepBatch(self, samples)

    @contextmanager
    def one_pass(self, size: int) -> Iterator[None]:
        """The context of a forward and its backward."""
        yield
        self.model.zero_grad()

    def together(self, work: Callable[[], T]) -> T:
        """The result of `work`, which runs passes while the other ranks run theirs."""
        return work()

    def run(self, size: int, *, longest: bool = False) -> None:
        """Run one pass on a `batch` and drop its gradients."""
        with self.one_pass(size):
            self.loss_fn(self.model, self.batch(size, longest=longest)).backward()

    def check(self) -> None:
        """Run a first pass of one sample.

        Raises:
            TypeError, ValueError: the loss is not a scalar, requires no gradient, or is not finite.
            torch.OutOfMemoryError: the pass does not fit.
        """
        with self._memory_freed_after_failure(1), self.one_pass(1):
            self._checked_loss().backward()

    def _checked_loss(self) -> Tensor:
        """The loss of one sample."""
        try:
            loss = check_scalar(self.loss_fn(self.model, self.batch(1)))
        except ValueError as error:
            if "more than 1 value per channel" not in str(error):  # of torch's batch_norm
                raise
            raise ValueError(
                f"a pass of one sample, which plans may have, fails in a BatchNorm ({error}): its "
                "inputs have one value per channel there. Use larger inputs, GroupNorm or .eval(), "
                "or train with Plan.manual or Plan.even, whose micro-batches you choose"
            ) from error
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
        return loss

    def seconds(self, size: int, repeats: int = 1) -> float:
        """Seconds of one pass, the mean over `repeats` without a pause."""
        return seconds_of(lambda: self.run(size), self.device, repeats)

    def settled_seconds(self, size: int) -> float:
        """Run passes until one takes about as long as the one before; returns their seconds.

        The first passes of a size compile, choose algorithms (cuDNN) and tune kernels, which may
        take minutes. So they only count if the limits for the warm-up leave no other pass. The
        host only compiles, and one pass is enough if it did not.
        """
        began, compiled = time.perf_counter(), frames_compiled()
        last = self.seconds(size)
        if counts_tensors(self.device) and frames_compiled() == compiled:
            return last
        for _ in range(WARM_UP_PASSES - 1):
            before, last = last, self.seconds(size)
            if before <= SETTLED * last or time.perf_counter() - began >= WARM_UP_SECONDS:
                break
        return min(before, last)

    def parts(self, size: int) -> PassParts:
        """The parts of a pass, from three passes. The first one counts rows.

        A pause of the host is in one unit of one pass, so it changes no unit's median.
        """
        timed = self._timed_units()

        def once() -> tuple[UnitSeconds, UnitSeconds]:
            """Of the whole model as one unit, and of all units."""
            batch, losses = self.batch(size), list[Tensor]()
            clock = UnitClock(timed, self.device)
            with self.one_pass(size), clock.measuring():
                clock.next_phase()
                forward = seconds_of(
                    lambda: losses.append(self.loss_fn(self.model, batch)), self.device
                )
                clock.next_phase()
                backward = seconds_of(losses.pop().backward, self.device)
                clock.next_phase()
                synchronize(self.device)
            return UnitSeconds((forward,), (backward,)), clock.result()

        with counting_rows(self.model) as rows:
            first = once()
        whole, units = (
            combined(several, median) for several in zip(first, once(), once(), strict=True)
        )
        return PassParts(
            math.fsum((units if units.backward else whole).backward),
            units,
            {name: count / size for name, count in rows.items()},
        )

    def _timed_units(self) -> Sequence[TrainedUnit]:
        """Units whose time is taken; none if a hook would split or miss a compiled function."""
        return () if any(map(is_compiled, self.model.modules())) else self.units

    def first(self, size: int) -> BatchPoint:
        """Warm up; then the rough time of a pass, and its peak memory above the model.

        Gradients are freed as soon as they are complete, as in the engine, so they do not count.
        The batch itself counts on an accelerator.

        Raises:
            torch.OutOfMemoryError: the pass does not fit; all its memory is freed.
        """
        with self._memory_freed_after_failure(size), gradients_dropped(self.model):
            # On the host the pass whose tensors are counted warms up for those that are timed.
            counted = self.pass_bytes(size) if counts_tensors(self.device) else None
            seconds = self.settled_seconds(size)
            if self.lengths is not None:
                self.run(size, longest=True)  # it may compile
            held = counted or self.pass_bytes(size)
            held = held.plus(batch_bytes(self.batch(size, longest=True), self.device))
            return BatchPoint(
                batch=size,
                activation_bytes=held.peak,
                seconds=seconds,
                unit_bytes=held.during,
                bytes_after_unit=held.after,
            )

    def pass_bytes(self, size: int) -> PassBytes:
        """Memory of a pass above the model."""
        return pass_bytes(lambda: self.run(size, longest=True), self.device, self.units)

    @contextmanager
    def _memory_freed_after_failure(self, size: int) -> Iterator[None]:
        """Free what a pass held that ran out of memory.

        Raises:
            torch.OutOfMemoryError: memory ran out, on any device.
        """
        try:
            yield
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            free_failed_pass(error)
            self.model.zero_grad()
            for key in [key for key in self._batches if key[0] == size]:
                del self._batches[key]
            free_cached_memory(self.device)
            raise torch.OutOfMemoryError(str(error)) from None


class _StepBatch(pytree.SplitsItself):
    """Samples of one rank in a step; each micro-batch is taken from the example on its own.

    So it has its own typical length, and its samples need not be rows.
    """

    def __init__(self, passes: Passes, samples: int) -> None:
        self._passes, self._samples = passes, samples

    def __len__(self) -> int:
        return self._samples

    def split(self, sizes: Sequence[int]) -> list[Any]:
        return [self._passes.batch(size) if size else None for size in sizes]

    def select(self, indices: Sequence[int]) -> _StepBatch:
        return _StepBatch(self._passes, len(indices))

    def parts(self) -> list[Any]:
        return []

    def changed(self, change: Callable[[Any], Any]) -> _StepBatch:
        example = change(self._passes.example)
        return _StepBatch(replace(self._passes, example=example, _batches={}), self._samples)


@contextmanager
def counting_rows(model: nn.Module) -> Iterator[Counter[str]]:
    """Count the rows `numel / inputs` of the inputs of each `nn.Linear` in the forwards inside.

    Yields the counts by module name. Nothing is counted in a model with compiled modules, because
    hooks would change what is compiled.
    """
    rows: Counter[str] = Counter()

    def count(name: str, layer: nn.Linear, arguments: tuple[Any, ...]) -> None:
        if arguments and isinstance(arguments[0], Tensor):
            rows[name] += arguments[0].numel() // layer.in_features

    is_plain = not any(map(is_compiled, model.modules()))
    with ExitStack() as stack:
        for name, layer in model.named_modules():
            if is_plain and type(layer) is nn.Linear:
                stack.enter_context(layer.register_forward_pre_hook(partial(count, name)))
        yield rows
