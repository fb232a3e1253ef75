"""Synthetic run records for the tests of the report."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence

from poplar.monitoring import Run, RunRecord, Span
from poplar.values.plan import Plan
from poplar.values.profile import (
    BatchPoint,
    ClusterProfile,
    DeviceProfile,
    ModelProfile,
    NetworkProfile,
)

SPEEDS = (33.0, 11.6, 11.2, 10.6)
"""Samples per second of four ranks: one has a core of its own, three share another."""
STEPS = 30
COMMUNICATION = 0.022


def synthetic_record(
    speeds: Sequence[float] = SPEEDS, stage: int = 0, names: Sequence[str] | None = None
) -> RunRecord:
    """An even and a planned run, both traced; deterministic."""
    noise = random.Random(0)
    names = names or ["AMD EPYC 9B45"] * len(speeds)
    profile = cluster(speeds, names)
    even = Plan.even(len(speeds), 72, 16, stage)
    chosen = Plan.proportional(speeds, 72, stage, 20)
    runs = tuple(
        run(name, plan, speeds, noise) for name, plan in (("even", even), ("planned", chosen))
    )
    return RunRecord(
        title="A byte-level Llama on four unequal CPU ranks",
        profile=profile,
        runs=runs,
        sum_of_speeds=sum(speeds),
    )


def cluster(speeds: Sequence[float], names: Sequence[str]) -> ClusterProfile:
    noise = random.Random(1)
    devices = tuple(
        DeviceProfile(
            name=name,
            memory_bytes=6 * 2**30,
            points=tuple(
                BatchPoint(
                    batch=batch,
                    seconds=(0.012 + batch / speed) * noise.gauss(1, 0.015),
                    activation_bytes=int((4 + 7.1 * batch) * 2**20),
                )
                for batch in (1, 2, 4, 8, 16, 20)
            ),
            optimizer_seconds=0.004 * speeds[0] / speed,
            peak_flops=1e11 * speed / speeds[0],
            host="laptop",
        )
        for name, speed in zip(names, speeds, strict=True)
    )
    return ClusterProfile(
        devices=devices,
        model=ModelProfile(unit_numels=(40_960, 256_000, 256_000, 256_000, 256_000, 41_120)),
        network=NetworkProfile(
            reduce_scatter_seconds=0.012,
            all_gather_seconds=0.010,
            send_seconds_per_byte=(1e-10,) * len(speeds),
            receive_seconds_per_byte=(1e-10,) * len(speeds),
        ),
        identity={"model": "Llama", "dtype": "float32", "torch": "2.13.0", "poplar": "0.1.0"},
        notes=("rank 3 shared its core with another program while it was measured",),
    )


def run(name: str, plan: Plan, speeds: Sequence[float], noise: random.Random) -> Run:
    seconds = slowest(plan, speeds)
    return Run(
        name=name,
        plan=plan,
        losses=tuple(2.4 + 3.1 * math.exp(-step / 9) for step in range(STEPS + 1)),
        step_seconds=tuple(seconds * noise.lognormvariate(0, 0.02) for _ in range(STEPS)),
        predicted_step_seconds=seconds * 0.985,
        spans=tuple(tuple(spans) for spans in traced(plan, speeds)),
    )


def slowest(plan: Plan, speeds: Sequence[float]) -> float:
    times = [plan.samples(r) / speed + 0.012 for r, speed in enumerate(speeds)]
    return max(times) + COMMUNICATION + 0.005


def traced(plan: Plan, speeds: Sequence[float]) -> Iterator[list[Span]]:
    """Consecutive passes, one synchronization at the end, then the optimizer step."""
    begin = 1_000.0
    ends = [plan.samples(r) / speed + 0.012 for r, speed in enumerate(speeds)]
    for rank, speed in enumerate(speeds):
        spans, now = [], begin
        sizes = [size for size in plan.micro_batches[rank] if size]
        for size in sizes:
            spans.append(Span("pass", f"{size} samples", now, now + size / speed))
            now += size / speed + 0.001
        done = begin + max(ends) + COMMUNICATION
        spans.append(Span("wait", "the reduction of unit blocks.0", now, done))
        spans.append(Span("optimizer", "", done, done + 0.005))
        yield spans
