"""Times of the optimizer and of the codec on a machine that stops for a while."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sessions import fake_session

from poplar.profiler import element_costs, timing

ELEMENTS = 1 << 16
TOTAL = 8 * ELEMENTS
"""Elements of the model, of which an eighth is stepped."""
LATENCY, WHOLE = 0.002, 0.4
"""Seconds of a step over no and over all elements, without a disturbance."""


def seconds_of_step(numel: int) -> float:
    return LATENCY + (WHOLE - LATENCY) * numel / TOTAL


class Disturbed:
    """A clock for work that takes `factor` times as long where it begins in a disturbance."""

    def __init__(self, begin: float, end: float, factor: float) -> None:
        self.now, self.begin, self.end, self.factor = 0.0, begin, end, factor

    def perf_counter(self) -> float:
        return self.now

    def work(self, seconds: float) -> None:
        self.now += seconds * (self.factor if self.begin <= self.now < self.end else 1.0)


def update(
    monkeypatch: pytest.MonkeyPatch,
    clock: Disturbed,
    seconds: Callable[[int], float] = seconds_of_step,
) -> element_costs.UpdateCost:
    class Timed(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            clock.work(seconds(sum(p.numel() for p in self.param_groups[0]["params"])))

    monkeypatch.setattr(timing, "time", clock)
    monkeypatch.setattr(element_costs, "MOST_STEPPED", ELEMENTS)
    monkeypatch.setattr(element_costs, "flat_numels", lambda session: [TOTAL])
    cls = SimpleNamespace(shard_factory=Timed, options={}, granularity="elements")
    return element_costs.measure_update(fake_session(setup=SimpleNamespace(classes=[cls])))


@pytest.mark.parametrize("begin", [0.0, 0.11, 0.16, 0.27, 0.30, 0.35])
def test_an_update_is_extrapolated_from_undisturbed_steps(monkeypatch, begin):
    cost = update(monkeypatch, Disturbed(begin, begin + 0.3, 4.0))
    assert cost.seconds == pytest.approx(WHOLE)
    assert cost.latency_seconds == pytest.approx(LATENCY)


@pytest.mark.parametrize(("large", "small"), [(0.1, 0.12), (0.1, 0.1), (0.1, 0.05), (0.1, 0.001)])
def test_an_update_is_a_line_through_the_larger_size(monkeypatch, large, small):
    clock = Disturbed(0.0, 0.0, 1.0)
    cost = update(monkeypatch, clock, lambda numel: large if numel == ELEMENTS else small)
    at_large = cost.latency_seconds + (cost.seconds - cost.latency_seconds) * ELEMENTS / TOTAL
    assert at_large == pytest.approx(large)
    assert 0.0 <= cost.latency_seconds <= small
    assert cost.seconds >= large * (1 - 1e-9)


@pytest.mark.parametrize("begin", [0.0, 0.01, 0.02, 0.04, 0.06, 0.2])
def test_the_codec_is_timed_where_nothing_disturbs_it(monkeypatch, begin):
    clock = Disturbed(begin, begin + 0.1, 4.0)
    for name, seconds in (("pack_", 0.001), ("rank_sum_", 0.002), ("encode_", 0.003)):
        monkeypatch.setattr(f"poplar.ops.{name}", lambda *_, s=seconds, **__: clock.work(s))
    monkeypatch.setattr("poplar.ops.decode_sum_", lambda *_, **__: clock.work(0.004))
    monkeypatch.setattr(timing, "time", clock)
    monkeypatch.setattr(element_costs, "MOST_PACKED", ELEMENTS)
    found = element_costs.measure_codec(fake_session(2))
    encode, decode = ([ELEMENTS * each for each in one] for one in found.values())
    assert encode == pytest.approx([0.001, 0.003, 0.003])
    assert decode == pytest.approx([0.001, 0.002, 0.002])
