"""Choosing batch sizes, timing passes, and building batches from the example.

No model runs in most tests: `Machine` computes memory and time of a pass, on a simulated clock.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn

from poplar.data import pytree
from poplar.profiler import batch_sizes
from poplar.profiler import passes as measuring
from poplar.profiler.batch_sizes import SizeLimits, climb, probe, time_sizes
from poplar.profiler.memory import PassBytes
from poplar.profiler.passes import Passes
from poplar.values.curve import error_of_median
from poplar.values.profile import BatchPoint

PLENTY = float("inf")


class Clock:
    """Replaces the module `time`; passes advance `now`."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    for module in (measuring, batch_sizes):
        monkeypatch.setattr(module, "time", made)
    return made


def first_pass(batch: int, seconds: float, held: int | None = None) -> BatchPoint:
    held = 10 * batch if held is None else held
    return BatchPoint(batch=batch, seconds=seconds, activation_bytes=held)


@dataclass
class Machine:
    """Replaces `Passes`: memory and time are functions of the batch."""

    clock: Any = None
    held: Callable[[int], float] = lambda size: 100 * size
    takes: Callable[[int], float] = lambda size: 0.01 * size
    ends_at: float = PLENTY
    """Batch from which the device raises out of memory."""
    tried: list[int] = field(default_factory=list)
    timed: list[tuple[int, int]] = field(default_factory=list)

    def run(self, size: int, *, longest: bool = False) -> None:
        self._pass_time(size)

    def first(self, size: int) -> BatchPoint:
        self.tried.append(size)
        self._pass_time(size)
        if size >= self.ends_at:
            raise torch.OutOfMemoryError("out of memory")
        return first_pass(size, self.takes(size), int(self.held(size)))

    def seconds(self, size: int, repeats: int = 1) -> float:
        self.timed.append((size, repeats))
        for _ in range(repeats):
            self._pass_time(size)
        return self.takes(size)

    def _pass_time(self, size: int) -> None:
        if self.clock is not None:
            self.clock.now += self.takes(size)


def climbed(
    machine: Machine,
    *,
    max_batch: int = 1024,
    activation_bytes: float = PLENTY,
    longest_seconds: float = PLENTY,
) -> list[int]:
    limits = SizeLimits(
        max_batch=max_batch, activation_bytes=activation_bytes, longest_seconds=longest_seconds
    )
    *_, sizes_run = climb(machine, limits)  # type: ignore[arg-type]
    return [size.batch for size in sizes_run]


@pytest.mark.parametrize(
    ("max_batch", "expected"),
    [(1, [1]), (2, [1, 2]), (8, [1, 2, 4, 8]), (11, [1, 2, 4, 8, 11])],
)
def test_sizes_double_up_to_max_batch(max_batch, expected):
    machine = Machine()
    assert climbed(machine, max_batch=max_batch) == expected
    assert machine.tried == expected


def test_no_batch_above_free_memory_is_tried():
    machine = Machine(held=lambda size: 50 + 100 * size)
    sizes = climbed(machine, activation_bytes=2000)
    assert sizes == [1, 2, 4, 8, 16, 18]
    assert max(machine.tried) == 18


def test_one_sample_is_measured_without_free_memory():
    assert climbed(Machine(), activation_bytes=1) == [1]
    assert climbed(Machine(), activation_bytes=-1e9) == [1]


def test_out_of_memory_with_one_sample_raises():
    with pytest.raises(torch.OutOfMemoryError, match="not even one sample fits"):
        climbed(Machine(ends_at=1))


def test_largest_size_is_close_below_out_of_memory():
    for ends_at in range(2, 40):
        machine = Machine(ends_at=ends_at)
        sizes = climbed(machine)
        assert sizes == sorted(set(sizes))
        assert sizes[-1] < ends_at
        assert ends_at - 1 - sizes[-1] <= sizes[-1] * batch_sizes.NEAR_ENOUGH
        assert len(machine.tried) <= 2 * ends_at.bit_length() + 2


def test_no_size_above_a_failed_one_is_tried():
    machine = Machine(ends_at=21)
    climbed(machine)
    failed = [size for size in machine.tried if size >= 21]
    assert failed == sorted(failed, reverse=True)
    assert len(set(machine.tried)) == len(machine.tried)


def test_jump_in_memory_is_found():
    """A workspace that is allocated only from 6 samples on cannot be extrapolated."""
    machine = Machine(held=lambda size: 10 * size + (1000 if size >= 6 else 0))
    sizes = climbed(machine, activation_bytes=500)
    assert sizes == [1, 2, 4, 5]
    assert 6 in machine.tried


def test_concave_memory_curve_reaches_the_limit():
    machine = Machine(held=lambda size: 1000 * size**0.5)
    sizes = climbed(machine, activation_bytes=5000)
    assert sizes[-1] <= 25
    assert sizes[-1] >= 21


memory_curves = st.builds(
    lambda fixed, linear, power, jump, at: (
        lambda size: fixed + linear * size**power + (jump if size >= at else 0)
    ),
    st.integers(0, 500),
    st.integers(0, 100),
    st.sampled_from([0.5, 1.0, 1.5, 2.0]),
    st.integers(0, 2000),
    st.integers(1, 70),
)


@given(
    held=memory_curves,
    free=st.integers(1, 5000),
    ends_at=st.integers(2, 200),
    max_batch=st.integers(1, 128),
)
def test_all_sizes_fit_for_any_memory_curve(held, free, ends_at, max_batch):
    machine = Machine(held=held, ends_at=ends_at)
    sizes = climbed(machine, max_batch=max_batch, activation_bytes=free)
    assert sizes == sorted(set(sizes))
    assert sizes[0] == 1
    assert sizes[-1] <= max_batch
    assert all(held(size) <= free + 1 for size in sizes[1:])
    assert len(machine.tried) <= 40


def test_no_pass_above_the_longest_time_is_tried(clock: Clock):
    machine = Machine(clock=clock, takes=lambda size: 0.5 * size)
    assert climbed(machine, longest_seconds=4.0) == [1, 2, 4, 8]


def probed(
    machine: Machine,
    *,
    known: Sequence[BatchPoint] = (),
    max_batch: int = 1024,
    activation_bytes: float = PLENTY,
    longest_seconds: float = PLENTY,
) -> list[int]:
    limits = SizeLimits(
        max_batch=max_batch, activation_bytes=activation_bytes, longest_seconds=longest_seconds
    )
    *_, found = probe(machine, limits, known=known)  # type: ignore[arg-type]
    return [size.batch for size in found]


memory_curves_without_jumps = st.builds(
    lambda fixed, linear, power: lambda size: 1000 * (fixed + linear * size**power),
    st.integers(0, 500),
    st.integers(1, 100),
    st.floats(0.97, 1.03),
)


@given(held=memory_curves_without_jumps, largest=st.integers(1, 1000))
@example(held=lambda size: 1000 * size**0.990234375, largest=207)
def test_probing_finds_the_largest_batch_within_three_percent_in_five_probes(held, largest):
    machine = Machine(held=held)
    sizes = probed(machine, activation_bytes=held(largest) + 1)
    assert len(machine.tried) <= 5
    assert sizes == sorted(set(sizes))
    assert sizes[-1] <= largest
    assert largest - sizes[-1] <= max(1, 0.03 * largest)


def test_probing_without_memory_for_one_sample_raises():
    with pytest.raises(torch.OutOfMemoryError, match="not even one sample fits"):
        probed(Machine(ends_at=1))


def test_probing_a_straight_line_needs_one_size_near_the_limit():
    machine = Machine(held=lambda size: 50 + 100 * size)
    assert probed(machine, activation_bytes=20_000) == [1, 2, 4, 199]
    assert machine.tried == [1, 2, 4, 199]


@given(
    held=memory_curves,
    free=st.integers(1, 5000),
    ends_at=st.integers(2, 200),
    max_batch=st.integers(1, 128),
)
def test_all_probed_sizes_fit_for_any_memory_curve(held, free, ends_at, max_batch):
    machine = Machine(held=held, ends_at=ends_at)
    sizes = probed(machine, activation_bytes=free, max_batch=max_batch)
    assert sizes == sorted(set(sizes))
    assert sizes[0] == 1
    assert sizes[-1] <= max_batch
    assert all(held(size) <= free for size in sizes[1:])
    assert len(machine.tried) <= 5
    assert len(set(machine.tried)) == len(machine.tried)


@pytest.mark.parametrize("ends_at", [2, 3, 5, 50])
def test_probing_ends_below_a_size_that_ran_out_of_memory(ends_at):
    machine = Machine(ends_at=ends_at)
    assert probed(machine, max_batch=64)[-1] < ends_at


def test_known_points_take_the_place_of_small_sizes():
    machine = Machine()
    known = [first_pass(size, 0.01 * size, 100 * size) for size in (1, 2, 4, 8)]
    assert probed(machine, known=known, activation_bytes=3000) == [8, 30]
    assert machine.tried == [8, 30]


@pytest.mark.parametrize(
    ("activation_bytes", "ends_at", "tried"),
    [(450, PLENTY, [4]), (PLENTY, 4, [8, 4, 2]), (50, PLENTY, [1])],
)
def test_the_largest_known_size_that_still_fits_is_measured_again(activation_bytes, ends_at, tried):
    """A rank with most of the shards may have less memory for activations than beside the model."""
    machine = Machine(ends_at=ends_at)
    known = [first_pass(size, 0.01 * size, 100 * size) for size in (1, 2, 4, 8)]
    assert probed(machine, known=known, activation_bytes=activation_bytes) == tried[-1:]
    assert machine.tried == tried


@pytest.mark.parametrize(("max_batch", "longest", "expected"), [(16, 1e9, 16), (999, 0.2, 20)])
def test_probing_ends_at_max_batch_and_at_the_longest_pass(max_batch, longest, expected):
    assert probed(Machine(), max_batch=max_batch, longest_seconds=longest)[-1] == expected


class ColdPasses(Passes):
    """Passes on a simulated clock whose first passes of every size compile and tune kernels."""

    def __init__(self, clock: Clock, cold: Callable[[int, int], float]) -> None:
        super().__init__(nn.Linear(2, 1), lambda model, batch: None, None, torch.device("cuda"))
        self._clock = clock
        self._cold = cold
        """Seconds on top of a steady pass, by size and number of earlier passes of this size."""
        self.ran: Counter[int] = Counter()

    def batch(self, size: int, *, longest: bool = False) -> None:
        return None

    def pass_bytes(self, size: int) -> PassBytes:
        self.run(size)
        return PassBytes(0)

    def run(self, size: int, *, longest: bool = False) -> None:
        self._clock.now += 0.001 * size + self._cold(size, self.ran[size])
        self.ran[size] += 1

    def seconds(self, size: int, repeats: int = 1) -> float:
        began = self._clock.now
        for _ in range(repeats):
            self.run(size)
        return (self._clock.now - began) / repeats


def climbed_cold(passes: ColdPasses, max_batch: int = 256) -> list[BatchPoint]:
    *_, found = climb(
        passes, SizeLimits(max_batch=max_batch, activation_bytes=PLENTY, longest_seconds=4.5)
    )
    return found


@pytest.mark.parametrize("compiling", [2.0, 5.0, 60.0, 600.0])
@pytest.mark.parametrize("tuning", [0.0, 0.3])
def test_compilation_and_tuning_do_not_end_the_curve(clock: Clock, compiling, tuning):
    passes = ColdPasses(clock, lambda size, ran: [compiling, tuning][ran] if ran < 2 else 0.0)
    found = climbed_cold(passes)
    assert [point.batch for point in found] == [2**power for power in range(9)]
    if compiling < measuring.WARM_UP_SECONDS:
        for point in found:
            assert point.seconds == pytest.approx(0.001 * point.batch)


def test_warm_passes_run_only_twice_before_memory_is_measured(clock: Clock):
    passes = ColdPasses(clock, lambda size, ran: 0.0)
    climbed_cold(passes, max_batch=4)
    assert passes.ran == {1: 3, 2: 3, 4: 3}


def test_on_the_host_the_pass_whose_tensors_are_counted_is_the_warm_up(clock: Clock):
    passes = ColdPasses(clock, lambda size, ran: 0.3 if ran == 0 else 0.0)
    passes.device = torch.device("cpu")
    found = climbed_cold(passes, max_batch=4)
    assert passes.ran == {1: 2, 2: 2, 4: 2}
    assert [point.seconds for point in found] == pytest.approx([0.001, 0.002, 0.004])


def test_warm_up_of_a_size_is_limited(clock: Clock):
    """A model that never settles, such as one that compiles again in every pass."""
    passes = ColdPasses(clock, lambda size, ran: 100.0 * 0.5**ran)
    climbed_cold(passes, max_batch=2)
    assert max(passes.ran.values()) <= measuring.WARM_UP_PASSES + 1
    slow = ColdPasses(clock, lambda size, ran: 1000.0 * 0.5**ran)
    climbed_cold(slow, max_batch=2)
    assert slow.ran == {1: 3, 2: 3}, "two passes and that of the memory, after a long first one"


def test_two_sizes_are_always_measured(clock: Clock):
    """One point gives no slope."""
    machine = Machine(clock=clock, takes=lambda size: 100.0 * size)
    assert climbed(machine, longest_seconds=1.0) == [1, 2]


def test_sizes_are_timed_in_alternating_order(clock: Clock):
    machine = Machine(clock=clock, takes=lambda size: float(size))
    points = time_sizes(
        machine, [first_pass(1, 1.0), first_pass(2, 2.0), first_pass(4, 4.0)], seconds=21.0, least=1
    )
    assert [size for size, _ in machine.timed] == [1, 2, 4, 4, 2, 1, 1, 2, 4]
    assert [(p.batch, p.seconds, p.activation_bytes) for p in points] == [
        (1, 1.0, 10),
        (2, 2.0, 20),
        (4, 4.0, 40),
    ]


def test_every_size_is_timed_at_least_so_often(clock: Clock):
    machine = Machine(clock=clock, takes=lambda size: 1000.0)
    time_sizes(machine, [first_pass(1, 1000.0), first_pass(2, 1000.0)], seconds=0.0, least=3)
    assert sorted(size for size, _ in machine.timed) == [1, 1, 1, 2, 2, 2]


def test_short_passes_are_timed_in_batches(clock: Clock):
    machine = Machine(clock=clock, takes=lambda size: 0.004 * size)
    time_sizes(
        machine,
        [first_pass(1, 0.004), first_pass(8, 0.032), first_pass(64, 0.256)],
        seconds=0.0,
        least=1,
    )
    assert machine.timed == [(1, 25), (8, 4), (64, 1)]


def test_one_disturbed_pass_does_not_change_a_point(clock: Clock):
    machine = Machine(clock=clock)
    durations = iter([1.0, 1.1, 50.0, 0.9, 1.05])
    machine.seconds = lambda size, repeats: next(durations)  # type: ignore[method-assign]
    (point,) = time_sizes(machine, [first_pass(1, 1.0)], seconds=0.0, least=5)
    assert point.seconds == pytest.approx(1.05, rel=0.03)


@pytest.mark.parametrize(
    ("durations", "spread"),
    [
        ([1.0, 1.0, 1.0], 0.0),
        ([1.0], 0.0),
        ([0.9, 1.0, 1.1], 1.858 * 0.1 / 2**0.5),
        ([0.9, 1.0, 1.1, 50.0, 0.95], 1.858 * 0.1 / 4**0.5),  # robust to one disturbed pass
    ],
)
def test_points_have_the_standard_error_of_their_median(clock: Clock, durations, spread):
    machine, taken = Machine(clock=clock), iter(durations)
    machine.seconds = lambda size, repeats: next(taken)  # type: ignore[method-assign]
    (point,) = time_sizes(machine, [first_pass(1, 1.0)], seconds=0.0, least=len(durations))
    assert point.spread_seconds == pytest.approx(spread, rel=1e-3)


def test_standard_error_of_median_matches_its_distribution():
    """More than two standard errors off in 5 to 12 % of cases, because samples are few."""
    draw = random.Random(0)
    off = [
        abs(median(samples) - 1.0) > 2.0 * error_of_median(samples)
        for samples in ([draw.gauss(1.0, 0.05) for _ in range(15)] for _ in range(500))
    ]
    assert sum(off) / len(off) < 0.12


class Sample(NamedTuple):
    image: Tensor
    label: Any


def plain_passes(
    loss: Callable[[nn.Module, Any], Any] | None = None, example: Any = None
) -> Passes:
    model = nn.Linear(2, 1)
    return Passes(
        model,
        loss or (lambda model, batch: model(batch).mean()),
        torch.arange(6.0).reshape(3, 2) if example is None else example,
        torch.device("cpu"),
    )


def test_larger_batch_repeats_samples():
    passes = plain_passes(example={"x": torch.tensor([5, 6, 7]), "scale": torch.tensor(2.0)})
    assert passes.batch(2)["x"].tolist() == [5, 6]
    assert passes.batch(7)["x"].tolist() == [5, 6, 7, 5, 6, 7, 5]
    assert passes.batch(7)["scale"] == 2.0


def test_passes_leave_no_gradient_even_after_out_of_memory():
    def runs_out(model: nn.Module, batch: Tensor) -> Tensor:
        loss = model(batch).mean()
        if len(batch) > 2:
            model.weight.grad = torch.ones(1, 2)
            raise torch.OutOfMemoryError("out of memory")
        return loss

    passes = plain_passes(runs_out)
    assert passes.first(2).activation_bytes > 0
    with pytest.raises(torch.OutOfMemoryError):
        passes.first(3)
    assert all(parameter.grad is None for parameter in passes.model.parameters())


def test_times_are_above_zero_even_if_the_clock_does_not_advance(monkeypatch):
    """A profile refuses a time of 0."""
    stopped = Clock()
    monkeypatch.setattr("poplar.profiler.timing.time", stopped)
    for module in (measuring, batch_sizes):
        monkeypatch.setattr(module, "time", stopped)
    monkeypatch.setattr(batch_sizes, "repeats_in_a_sample", lambda seconds: 3)
    passes = plain_passes()
    first = passes.first(2)
    (point,) = time_sizes(passes, [first], seconds=0.0, least=2)
    assert first.seconds > 0.0
    assert point.seconds > 0.0
    assert 0.0 < passes.parts(2).backward_fraction < 1.0


@pytest.mark.parametrize(
    ("loss", "kind", "message"),
    [
        (
            lambda model, batch: model(batch),
            TypeError,
            r"must return a scalar tensor, got \(1, 2\)",
        ),
        (lambda model, batch: 0.25, TypeError, "must return a scalar tensor, got float"),
        (lambda model, batch: None, TypeError, "must return a scalar tensor, got NoneType"),
        (lambda model, batch: model(batch).mean().detach(), ValueError, "not require a gradient"),
        (lambda model, batch: model(batch).mean() / 0, ValueError, "is (inf|-inf|nan)"),
        (lambda model, batch: model(batch).mean() * float("nan"), ValueError, "is nan"),
    ],
)
def test_invalid_loss_raises(loss, kind, message):
    passes = plain_passes(loss)
    passes.model = nn.Linear(2, 2)
    with pytest.raises(kind, match=message):
        passes.check()


def test_take_selects_samples_of_nested_batches():
    batch = {
        "pair": Sample(torch.tensor([[1, 1], [2, 2], [3, 3]]), torch.tensor([10, 20, 30])),
        "list": [torch.tensor([7, 8, 9])],
        "shared": torch.tensor(0.5),
        "name": "training",
    }
    taken = pytree.take(batch, [2, 0, 2])
    assert taken["pair"].image.tolist() == [[3, 3], [1, 1], [3, 3]]
    assert taken["pair"].label.tolist() == [30, 10, 30]
    assert isinstance(taken["pair"], Sample)
    assert taken["list"][0].tolist() == [9, 7, 9]
    assert taken["shared"] is batch["shared"]
    assert taken["name"] == "training"
    assert batch["list"][0].tolist() == [7, 8, 9]


def test_take_selects_samples_of_lists_tuples_and_arrays():
    numpy = pytest.importorskip("numpy")
    batch = {
        "x": torch.arange(3),
        "texts": ["a", "b", "c"],
        "spans": ((0, 1), (1, 2), (2, 3)),
        "array": numpy.array([[1, 2], [3, 4], [5, 6]]),
        "other": [1, 2],
    }
    taken = pytree.take(batch, [1, 1, 2, 0])
    assert taken["texts"] == ["b", "b", "c", "a"]
    assert taken["spans"] == ((1, 2), (1, 2), (2, 3), (0, 1))
    assert taken["array"].tolist() == [[3, 4], [3, 4], [5, 6], [1, 2]]
    assert taken["other"] == [1, 2]


def test_taken_samples_are_copies():
    batch = torch.arange(3)
    pytree.take(batch, [0, 1])[0] = 99
    assert batch.tolist() == [0, 1, 2]


def test_take_refuses_different_batch_dimensions():
    with pytest.raises(ValueError, match=r"\['b'\] has 2 samples .* has 3"):
        pytree.take({"a": torch.zeros(3), "b": torch.zeros(2)}, [0])


def test_a_batch_norm_without_room_for_one_sample_is_explained():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 1))
    example = torch.randn(4, 3, 3, 3)
    passes = Passes(model, lambda model, batch: model(batch).mean(), example, example.device)
    with pytest.raises(ValueError, match=r"a pass of one sample.*Plan\.manual"):
        passes.check()
    passes.model.eval()
    passes.check()
