"""The seconds of each unit in a pass, on a simulated clock that forwards and backwards advance."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, median
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from poplar.profiler import timing, unit_hooks
from poplar.profiler.passes import Passes
from poplar.profiler.unit_hooks import TrainedUnit, UnitFractions, combined

CPU = torch.device("cpu")


class Clock:
    """Replaces the module `time`."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    for module in (timing, unit_hooks):
        monkeypatch.setattr(module, "time", made)
    return made


class Busy(torch.autograd.Function):
    """Multiplies; takes some seconds in the forward and in the backward."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, clock: Clock, takes: Sequence[float]
    ) -> Tensor:
        ctx.clock, ctx.takes = clock, takes
        ctx.save_for_backward(x, weight)
        clock.now += takes[0]
        return x * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.clock.now += ctx.takes[1]
        x, weight = ctx.saved_tensors
        return grad * weight, (grad * x).sum(), None, None


class Layer(nn.Module):
    """Seconds of its forward and of its backward; without a weight if it is not trained."""

    def __init__(self, clock: Clock, *takes: float, trained: bool = True) -> None:
        super().__init__()
        self.takes, self.clock = takes, clock
        weight = torch.tensor(2.0)
        self.weight = nn.Parameter(weight) if trained else weight

    def forward(self, x: Tensor) -> Tensor:
        return Busy.apply(x, self.weight, self.clock, self.takes)


def parts_of(layers: Sequence[nn.Module], units: Sequence[TrainedUnit], **changes: Any) -> Any:
    model = nn.Sequential(*layers)
    passes = Passes(
        model,
        changes.get("loss_fn", lambda model, batch: model(batch).sum()),
        torch.ones(2),
        CPU,
        units,
    )
    return passes.parts(2)


def unit(*layers: nn.Module, resident: bool = False, modules: Sequence[nn.Module] = ()):
    weights = [weight for layer in layers for weight in layer.parameters()]
    return TrainedUnit(weights, resident, () if resident else (modules or layers))


def seconds(forward: Sequence[float], backward: Sequence[float]) -> UnitFractions:
    total = sum(forward) + sum(backward)
    found = UnitFractions.of_seconds(forward, backward)
    assert sum(found.forward) + sum(found.backward) == pytest.approx(1.0)
    assert found.forward == pytest.approx([value / total for value in forward])
    return found


def check(found: UnitFractions, forward: Sequence[float], backward: Sequence[float]) -> None:
    expected = seconds(forward, backward)
    assert found.forward == pytest.approx(expected.forward)
    assert found.backward == pytest.approx(expected.backward)


def test_each_unit_has_its_own_forward_and_backward(clock: Clock):
    layers = [Layer(clock, 1, 5), Layer(clock, 2, 3), Layer(clock, 4, 1)]
    parts = parts_of(layers, [unit(layer) for layer in layers])
    check(parts.units, (1, 2, 4), (5, 3, 1))
    assert parts.backward_fraction == pytest.approx(9 / 16)


def test_pauses_of_the_host_change_no_part(clock: Clock):
    """Two of three passes are paused, in the forward of different units."""
    layers = [Layer(clock, 1, 5), Layer(clock, 2, 3), Layer(clock, 4, 1)]
    expected = parts_of(layers, [unit(layer) for layer in layers])
    pauses = iter([100, 0, 0, 0, 100, 0, 0, 0, 0])
    for layer in layers:
        layer.register_forward_hook(
            lambda *_: setattr(clock, "now", clock.now + next(pauses))  # counts with its unit
        )
    found = parts_of(layers, [unit(layer) for layer in layers])
    check(found.units, (1, 2, 4), (5, 3, 1))
    assert found.backward_fraction == pytest.approx(expected.backward_fraction)


def test_compute_outside_of_blocks_counts_where_it_runs(clock: Clock):
    """The head's seconds count with the last block, and an activation's with the block before."""
    embedding, head = Layer(clock, 1, 2), Layer(clock, 8, 16)
    first, last = Layer(clock, 3, 5), Layer(clock, 7, 11)
    activation = Layer(clock, 0.5, 0.25, trained=False)
    layers = [embedding, first, activation, last, head]
    root = unit(embedding, head, resident=True)
    found = parts_of(layers, [root, unit(first), unit(last)]).units
    check(found, (1, 3.5, 15), (2, 5.25, 27))


def test_a_merged_unit_begins_with_its_first_block(clock: Clock):
    layers = [Layer(clock, 1, 1), Layer(clock, 2, 2), Layer(clock, 3, 3)]
    found = parts_of(layers, [unit(layers[0]), unit(*layers[1:])]).units
    check(found, (1, 5), (1, 5))


def test_a_recomputed_forward_belongs_to_the_backward(clock: Clock):
    layers = [Layer(clock, 1, 1), Layer(clock, 2, 3)]

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        for layer in model:
            batch = checkpoint(layer, batch, use_reentrant=False)
        return batch.sum()

    found = parts_of(layers, [unit(layer) for layer in layers], loss_fn=loss).units
    check(found, (1, 2), (2, 5))


def test_a_block_without_a_forward_leaves_the_fractions_unknown(clock: Clock):
    layers = [Layer(clock, 1, 1), Layer(clock, 2, 2)]

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return model[0](batch).sum()

    units = [unit(layer) for layer in layers]
    assert parts_of(layers, units, loss_fn=loss).units == UnitFractions()
    assert parts_of(layers, ()).units == UnitFractions()


def test_compiled_models_are_not_hooked(clock: Clock):
    layers = [Layer(clock, 1, 1), Layer(clock, 2, 2)]
    layers[1]._compiled_call_impl = layers[1].forward
    assert parts_of(layers, [unit(layer) for layer in layers]).units == UnitFractions()


def test_no_hooks_are_left(clock: Clock):
    layers = [Layer(clock, 1, 1), Layer(clock, 2, 2)]
    parts_of(layers, [unit(layer) for layer in layers])
    assert not any(layer._forward_pre_hooks for layer in layers)
    assert not any(layer.weight._post_accumulate_grad_hooks for layer in layers)


def test_the_median_and_the_mean_sum_to_one():
    passes = [
        UnitFractions((0.1, 0.3), (0.2, 0.4)),
        UnitFractions((0.2, 0.2), (0.3, 0.3)),
        UnitFractions((0.3, 0.1), (0.5, 0.1)),
    ]
    found = combined(passes, median)
    assert found.forward == pytest.approx((0.2, 0.2))
    assert found.backward == pytest.approx((0.3, 0.3))
    assert sum(combined(passes[1:], fmean).backward) == pytest.approx(0.6)
    assert combined([*passes, UnitFractions()], fmean) == UnitFractions()


def test_cuda_units_are_timed_by_events_on_the_present_stream(monkeypatch: pytest.MonkeyPatch):
    """The host does not wait for the device between units."""
    device = SimpleNamespace(now=0.0)

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self, stream: str) -> None:
            assert stream == "stream of cuda:0"
            self.at = device.now

        def elapsed_time(self, other: Event) -> float:
            return 1e3 * (other.at - self.at)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda which: f"stream of {which}")
    layers = [Layer(device, 1, 2), Layer(device, 3, 4)]
    clock = unit_hooks.UnitClock([unit(layer) for layer in layers], torch.device("cuda", 0))
    with clock.measuring():
        clock.next_phase()
        loss = nn.Sequential(*layers)(torch.ones(2)).sum()
        clock.next_phase()
        loss.backward()
        clock.next_phase()
    assert clock.result() == ((1, 3), (2, 4))
