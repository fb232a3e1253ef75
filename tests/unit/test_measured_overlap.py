"""Overlap on CPU ranks, from passes beside reductions on a simulated clock."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poplar.comm.host_topology import Hosts
from poplar.comm.shard_layout import Layout
from poplar.profiler import overlap
from poplar.profiler.memory_budget import PassMemory
from poplar.values.profile import (
    BatchPoint,
    ClusterProfile,
    DeviceProfile,
    ModelProfile,
    NetworkProfile,
)

BUDGET = 60.0


class Simulated:
    """A rank whose passes advance at `overlap` of their speed while a reduction is on the way."""

    def __init__(self, overlap: float, reducing: float, pass_seconds: float) -> None:
        self.overlap, self.reducing, self.pass_seconds = overlap, reducing, pass_seconds
        self.now = self.arrives = 0.0
        self.numels = [64000, 128000, 64000]
        self.in_flight = self.largest = 0
        self.batches: set[int] = set()

    def run(self, batch: int) -> None:
        self.batches.add(batch)
        left = batch * self.pass_seconds
        beside = max(0.0, self.arrives - self.now)
        if self.overlap * beside >= left:
            self.now += left / self.overlap
        else:
            self.now += beside + left - self.overlap * beside

    def reduce_scatter(self, layout: Layout) -> Any:
        self.in_flight += layout.numel
        self.largest = max(self.largest, self.in_flight)
        part = layout.numel / sum(self.numels)
        self.arrives = max(self.arrives, self.now) + part * self.reducing
        arrives = self.arrives
        return SimpleNamespace(wait=lambda: self.wait_until(arrives))

    def wait_until(self, time: float) -> None:
        self.now, self.in_flight = max(self.now, time), 0

    def seconds_of(self, run: Callable[[], object], device: Any, repeats: int = 1) -> float:
        began = self.now
        for _ in range(repeats):
            run()
        return (self.now - began) / repeats


def measured(
    simulated: Simulated,
    *,
    hosts: int = 2,
    asynchronous: bool = False,
    plain_passes_fit: bool = True,
    budget: float = BUDGET,
    memory: float = math.inf,
) -> float:
    """What `measure_overlap` finds on two such ranks."""
    points = (
        BatchPoint(batch=batch, seconds=batch * simulated.pass_seconds, activation_bytes=batch)
        for batch in (1, 8)
    )
    rank = DeviceProfile(
        name="CPU", memory_bytes=1 << 30, points=tuple(points), optimizer_seconds=0.1
    )
    profile = ClusterProfile(
        devices=(rank, rank),
        model=ModelProfile(unit_numels=tuple(simulated.numels)),
        network=NetworkProfile(
            reduce_scatter_seconds=simulated.reducing,
            all_gather_seconds=simulated.reducing,
            send_seconds_per_byte=(1e-8, 1e-8),
            receive_seconds_per_byte=(1e-8, 1e-8),
        ),
    )
    session: Any = SimpleNamespace(
        group=SimpleNamespace(rank=0, size=2),
        device=None,
        asynchronous=asynchronous,
        plain_passes_fit=lambda: plain_passes_fit,
        memory=replace(PassMemory.unlimited(2), unsharded=(memory, memory)),
        passes=lambda: simulated,
        as_in_training=nullcontext,
        on_all_ranks=lambda work, doing: work(),
        from_first_rank=lambda value: value,
        exchange=lambda value: [value, value],
    )
    members = ((0,), (1,)) if hosts == 2 else ((0, 1),)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(overlap, "find_hosts", lambda session: Hosts(members))
        patch.setattr(overlap, "sampled_collectives", lambda session: (simulated, 1.0))
        patch.setattr(overlap, "seconds_of", simulated.seconds_of)
        patch.setattr("time.perf_counter", lambda: simulated.now)
        return overlap.measure_overlap(session, profile, budget)


@given(st.sampled_from((0.0, 0.25, 0.5, 0.9, 1.0)), st.floats(0.01, 5.0), st.floats(0.005, 0.05))
def test_overlap_is_that_of_the_machine(true, reducing, pass_seconds):
    assert measured(Simulated(true, reducing, pass_seconds)) == pytest.approx(true, abs=1e-6)


def test_reductions_of_large_models_are_cut_to_what_is_in_flight_and_to_the_budget():
    simulated = Simulated(0.5, reducing=10.0, pass_seconds=0.01)
    assert measured(simulated, budget=3.0) == pytest.approx(0.5)
    assert simulated.now < 2 * 3.0
    assert simulated.largest < sum(simulated.numels)


def test_long_passes_run_in_one_round_only():
    simulated = Simulated(0.5, reducing=10.0, pass_seconds=20.0)
    assert measured(simulated, budget=3.0) == pytest.approx(0.5)
    assert simulated.now < 4 * 20.0


@pytest.mark.parametrize(("memory", "batch"), [(1e9, 8), (1e6, 1)])
def test_passes_beside_reductions_fit_in_memory(memory, batch):
    simulated = Simulated(0.5, reducing=1.0, pass_seconds=0.01)
    assert measured(simulated, memory=memory) == pytest.approx(0.5)
    assert simulated.batches == {batch}


@pytest.mark.parametrize(
    "setting",
    [{"hosts": 1}, {"asynchronous": True}, {"plain_passes_fit": False}],
    ids=["one host", "a device that computes while the host goes on", "no plain passes"],
)
def test_overlap_is_not_measured(setting):
    simulated = Simulated(0.5, reducing=1.0, pass_seconds=0.01)
    assert measured(simulated, **setting) == 0.0
    assert simulated.now == 0.0


def test_overlap_of_short_reductions_is_not_measured():
    simulated = Simulated(0.5, reducing=1e-3, pass_seconds=0.1)
    assert measured(simulated) == 0.0
    assert simulated.now == 0.0
