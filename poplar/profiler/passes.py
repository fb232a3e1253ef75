"""Times passes of the user's model and measures their memory, against the batch."""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import cycle
from statistics import median
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from poplar.data import pytree
from poplar.data.example_lengths import at_length
from poplar.data.sample_lengths import SampleLengths
from poplar.profiler.compilation import is_compiled
from poplar.profiler.memory import PassBytes, batch_bytes, pass_bytes
from poplar.profiler.timing import repeats_in_a_sample, seconds_of
from poplar.profiler.unit_hooks import TrainedUnit, UnitClock, UnitFractions, median_of
from poplar.system.devices import synchronize
from poplar.system.out_of_memory import free_cached_memory, free_failed_pass, is_out_of_memory
from poplar.values.curve import error_of_median
from poplar.values.profile import BatchPoint
from poplar.zero.micro_batch_loss import LossFunction, check_scalar
from poplar.zero.preserved_state import gradients_dropped

T = TypeVar("T")

MARGIN = 0.97
"""Part of the free memory for which the largest batch is extrapolated."""
NEAR_ENOUGH = 1 / 8
"""Relative distance to a batch that was too large at which the search for the largest ends."""
SETTLED = 1.25
"""A pass is still warming up if it takes more than this many times as long as the next one."""
WARM_UP_PASSES = 8
WARM_UP_SECONDS = 120.0
"""Limits for the warm-up of a batch size. Two passes always run, however long the first takes."""
SMALL_SIZES = (1, 2, 4)
"""Sizes whose memory gives the line that predicts the largest batch."""
CONFIRMATIONS = 2
"""Sizes near the limit that are tried."""
WORTHWHILE = 0.01
"""A batch that is larger by less than this fraction is not tried. The largest one is wanted within
3 %, and a line may end below it."""


class PassParts(NamedTuple):
    """How the seconds of a pass are spent."""

    backward_fraction: float
    """Part of a pass that the backward takes."""
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
    """To which length batches are padded; None: that of the example."""
    _batches: dict[tuple[int, int | None], Any] = field(default_factory=dict)

    def batch(self, size: int) -> Any:
        """A batch of `size` samples of the example, of a typical length if there are `lengths`."""
        return self._made(size, None if self.lengths is None else self.lengths.typical(size))

    def longest_batch(self, size: int) -> Any:
        """As `batch`, but of the length for which to plan memory."""
        return self._made(size, self.lengths.longest(size)) if self.lengths else self.batch(size)

    def _made(self, size: int, length: int | None) -> Any:
        if (size, length) not in self._batches:
            available = pytree.samples_in(self.example)
            batch = pytree.take(self.example, [at % available for at in range(size)])
            self._batches[size, length] = batch if length is None else at_length(batch, length)
        return self._batches[size, length]

    def step_batch(self, samples: int) -> Any:
        """A batch for an optimizer step, whose micro-batches have typical lengths."""
        return self.batch(samples) if self.lengths is None else _StepBatch(self, samples)

    @contextmanager
    def one_pass(self, size: int) -> Iterator[None]:
        """The context of a forward and its backward."""
        yield
        self.model.zero_grad()

    def together(self, work: Callable[[], T]) -> T:
        """The result of `work`, which runs passes while the other ranks run theirs."""
        return work()

    def run(self, size: int) -> None:
        """Run one pass and drop its gradients."""
        with self.one_pass(size):
            self.loss_fn(self.model, self.batch(size)).backward()

    def run_longest(self, size: int) -> None:
        """Run one pass of the length for which to plan memory, and drop its gradients."""
        with self.one_pass(size):
            self.loss_fn(self.model, self.longest_batch(size)).backward()

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
        take minutes. So they only count if the limits for the warm-up leave no other pass.
        """
        began = time.perf_counter()
        last = self.seconds(size)
        for _ in range(WARM_UP_PASSES - 1):
            before, last = last, self.seconds(size)
            if before <= SETTLED * last or time.perf_counter() - began >= WARM_UP_SECONDS:
                break
        return min(before, last)

    def parts(self, size: int) -> PassParts:
        """The parts of a pass: the median of three passes. The first one counts rows."""
        batch, units = self.batch(size), self._timed_units()

        def once() -> PassParts:
            losses: list[Tensor] = []
            clock = UnitClock(units, self.device)
            with self.one_pass(size), clock.measuring():
                clock.next_phase()
                forward = seconds_of(
                    lambda: losses.append(self.loss_fn(self.model, batch)), self.device
                )
                clock.next_phase()
                backward = seconds_of(losses.pop().backward, self.device)
                clock.next_phase()
                synchronize(self.device)
            return PassParts(backward / (forward + backward), clock.result())

        with counting_rows(self.model) as rows:
            first = once()
        several = [first, once(), once()]
        return PassParts(
            median(part.backward_fraction for part in several),
            median_of([part.units for part in several]),
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
            seconds = self.settled_seconds(size)
            if self.lengths is not None:
                self.run_longest(size)  # it may compile
            held = self.pass_bytes(size)
            given = batch_bytes(self.longest_batch(size), self.device)
            units = held.units.plus(given)
            return BatchPoint(
                batch=size,
                activation_bytes=held.peak + given,
                seconds=seconds,
                unit_bytes=units.during,
                bytes_after_unit=units.after,
            )

    def pass_bytes(self, size: int) -> PassBytes:
        """Memory of a pass above the model."""
        run = self.run if self.lengths is None else self.run_longest
        return pass_bytes(lambda: run(size), self.device, self.units)

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
    """Samples of one rank in a step; each micro-batch is padded to its own typical length."""

    def __init__(self, passes: Passes, samples: int) -> None:
        self._passes, self._samples = passes, samples

    def __len__(self) -> int:
        return self._samples

    def split(self, sizes: Sequence[int]) -> list[Any]:
        return [self._passes.batch(size) if size else None for size in sizes]

    def take(self, indices: Sequence[int]) -> Any:
        return self._passes.batch(len(indices))

    def parts(self) -> list[Any]:
        return []

    def map_tensors(self, fn: Callable[[Tensor], Tensor]) -> _StepBatch:
        example = pytree.map_tensors(fn, self._passes.example)
        return _StepBatch(replace(self._passes, example=example, _batches={}), self._samples)


def climb(
    passes: Passes, *, max_batch: int, activation_bytes: float, longest_seconds: float
) -> Iterator[list[BatchPoint]]:
    """First passes of sizes 1, 2, 4, ... as far as memory and time allow.

    Yields the sizes so far after each one that was tried, because a size may take minutes to warm
    up and other ranks wait.

    Args:
        passes: of this rank.
        max_batch: largest batch to try.
        activation_bytes: what activations may take; the last size is the largest that fits.
        longest_seconds: no pass is tried that would probably take longer.

    Raises:
        torch.OutOfMemoryError: not even one sample fits.
    """
    sizes: list[BatchPoint] = []
    size, too_large = 1, 2 * max_batch  # so far no size is known to be too large
    while True:
        tried = _first_pass(passes, size, must_fit=not sizes)
        if tried is None or (tried.activation_bytes > activation_bytes and sizes):
            too_large = size
        else:
            sizes.append(tried)
        last = sizes[-1]
        size = min(2 * last.batch, max_batch, _largest_that_fits(sizes, activation_bytes))
        if size >= too_large:
            size = (last.batch + too_large) // 2
        takes_too_long = last.seconds * size / last.batch > longest_seconds and len(sizes) > 1
        is_near = too_large - last.batch <= last.batch * NEAR_ENOUGH
        yield sizes
        if size <= last.batch or takes_too_long or is_near:
            return


def _first_pass(passes: Passes, size: int, *, must_fit: bool) -> BatchPoint | None:
    """The first pass of a size; None if it does not fit.

    Raises:
        torch.OutOfMemoryError: it does not, and must.
    """
    with suppress(torch.OutOfMemoryError):
        return passes.first(size)
    if must_fit:
        raise torch.OutOfMemoryError(_NOT_EVEN_ONE)
    return None


def probe(
    passes: Passes,
    *,
    known: Sequence[BatchPoint],
    max_batch: int,
    activation_bytes: float,
    longest_seconds: float,
) -> Iterator[list[BatchPoint]]:
    """First passes of few sizes: small ones, then the largest that fits by a straight line.

    Yields as `climb` does.

    Args:
        passes: of this rank.
        known: points measured in another way. If there are any, the last one takes the place of the
            small sizes: it is measured again, as a reference for the new ones.
        max_batch: largest batch to try.
        activation_bytes: what activations may take.
        longest_seconds: no pass is tried that would probably take longer.

    Raises:
        torch.OutOfMemoryError: not even the first size fits.
    """
    sizes: list[BatchPoint] = []
    over: BatchPoint | None = None
    too_large, confirmations = max_batch + 1, CONFIRMATIONS
    small = [known[-1].batch] if known else [size for size in SMALL_SIZES if size <= max_batch]
    size = small.pop(0)
    while True:
        tried = _first_pass(passes, size, must_fit=not sizes)
        if tried is not None and (tried.activation_bytes <= activation_bytes or not sizes):
            sizes.append(tried)
        else:
            too_large, over = size, tried
        yield sizes
        last = sizes[-1]
        line = [*known[:-1], *sizes, *([over] if over else [])]
        largest = min(max_batch, too_large - 1, last.batch * longest_seconds / last.seconds)
        if over is None and too_large <= max_batch:  # ran out of memory: its bytes are not known
            largest = min(largest, (last.batch + too_large) // 2)
        elif len(line) > 1:
            largest = min(largest, largest_on_a_line(line, activation_bytes))
        else:
            largest = min(largest, 2 * last.batch)
        if small and small[0] < too_large and (small[0] <= largest or len(line) == 1):
            size = small.pop(0)
        elif confirmations and int(largest) > last.batch * (1 + WORTHWHILE):
            small, size, confirmations = [], int(largest), confirmations - 1
        else:
            return


_NOT_EVEN_ONE = (
    "not even one sample fits in the memory of the device; use shorter samples, activation "
    "checkpointing or a smaller model"
)


def largest_on_a_line(points: Sequence[BatchPoint], activation_bytes: float) -> float:
    """The largest batch that fits, by a line through the last two points; infinite if it is flat.

    Args:
        points: at least two, by ascending batch.
        activation_bytes: what activations may take.
    """
    before, last = points[-2:]
    slope = (last.activation_bytes - before.activation_bytes) / (last.batch - before.batch)
    left = activation_bytes - last.activation_bytes
    return last.batch + left / slope if slope > 0 else math.inf


def _largest_that_fits(sizes: Sequence[BatchPoint], activation_bytes: float) -> int:
    """Extrapolated by a straight line through the last two sizes, at most twice the last one."""
    if len(sizes) < 2:
        return 2 * sizes[-1].batch
    last, largest = sizes[-1].batch, largest_on_a_line(sizes, activation_bytes * MARGIN)
    return int(min(2 * last, max(last, largest)))


Samples = defaultdict[int, list[float]]
"""Seconds of passes, by batch."""


def time_sizes(
    passes: Passes,
    sizes: Sequence[BatchPoint],
    *,
    seconds: float,
    least: int,
    samples: Samples | None = None,
) -> list[BatchPoint]:
    """Time sizes in turns, so that a disturbance affects all of them; returns medians.

    Args:
        passes: of this rank.
        sizes: with rough times, which determine how many short passes are timed at once.
        seconds: time budget; exceeded until each size has been timed `least` times in all.
        least: see `seconds`.
        samples: of earlier calls; those of this call are added.
    """
    samples = defaultdict(list) if samples is None else samples
    end = time.perf_counter() + seconds
    for size in cycle([*sizes, *reversed(sizes)]):
        enough = all(len(samples[each.batch]) >= least for each in sizes)
        if enough and time.perf_counter() >= end:
            break
        repeats = repeats_in_a_sample(size.seconds)
        samples[size.batch].append(passes.seconds(size.batch, repeats))
    return [
        replace(
            size,
            seconds=median(samples[size.batch]),
            spread_seconds=error_of_median(samples[size.batch]),
        )
        for size in sizes
    ]


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
                handle = layer.register_forward_pre_hook(partial(count, name))
                stack.callback(handle.remove)
        yield rows
