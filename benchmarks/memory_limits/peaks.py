"""Predicted against measured peak memory of the ranks, over stages, models and batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from head_to_head.workers import WorkerContext, Workers

from memory_limits import process_memory
from memory_limits.clusters import open_cluster
from memory_limits.row import PeakRow
from memory_limits.subjects import SUBJECTS, TINY, Subject
from poplar import HeteroZeroOptimizer, Plan, profile_cluster
from poplar.planner.prediction import memory_needed
from poplar.profile import ClusterProfile

RANKS = 4
MEMORY_LIMIT = 8 << 30
"""Bytes by rank in the profile: enough for every plan. Only needs are compared here."""
UNEVEN_SHARES = (0.5, 0.3, 0.2, 0.0)
PROFILE_SECONDS = 60.0
"""Memory, unlike time, is the same at every pass."""
STEPS = 3


@dataclass(frozen=True, slots=True)
class Case:
    """One plan of a model."""

    name: str
    plan: Plan


def cases_of(stage: int, batch: int) -> list[Case]:
    """An even plan, and an uneven one of two passes in which the last rank has neither samples nor
    shards.
    """
    even = Plan.manual([batch] * RANKS, stage=stage)
    sizes = [2 * batch, batch, batch, 0]
    uneven = Plan.manual(sizes, stage=stage, passes=2, shares=UNEVEN_SHARES)
    return [Case("even", even), Case("uneven", uneven)]


def measure_model(name: str, stages: Sequence[int], batches: Sequence[int]) -> Iterator[PeakRow]:
    """A row per stage, batch, plan and rank."""
    with Workers(open_cluster("profile", RANKS), f"profile of {name}") as workers:
        profile: ClusterProfile = workers.call(_profile, name, 2 * max(batches))[0]
    largest = min(device.max_batch for device in profile.devices)  # less if passes are very slow
    measured = [batch for batch in batches if 2 * batch <= largest]
    for stage in stages:
        cases = [(batch, case) for batch in measured for case in cases_of(stage, batch)]
        with Workers(open_cluster("peaks", RANKS), f"{name}, stage {stage}") as workers:
            workers.call(_warm_up, stage)
            for batch, case in cases:
                needed = memory_needed(profile, case.plan)
                peaks = workers.call(_peak, name, case.plan)
                for rank in range(RANKS):
                    yield PeakRow.of(
                        name, case.name, case.plan, batch, rank, needed[rank], peaks[rank]
                    )


def _profile(context: WorkerContext, name: str, max_batch: int) -> ClusterProfile:
    del context
    subject = SUBJECTS[name]
    return profile_cluster(
        subject.model(),
        subject.loss,
        subject.batch(1),
        max_batch=max_batch,
        memory_limit=MEMORY_LIMIT,
        seconds=PROFILE_SECONDS,
        stages=(0,),
        compute_dtype=torch.float32,
        cache=False,
        progress=False,
        lr=1e-3,
    )


def _warm_up(context: WorkerContext, stage: int) -> None:
    """Import modules, start threads and connect the ranks."""
    _train(TINY, Plan.even(RANKS, RANKS, 1, stage), context.rank)


def _peak(context: WorkerContext, name: str, plan: Plan) -> int:
    """Peak resident bytes of steps after the first one, above those before the model was built."""
    process_memory.release_freed_memory()
    before = process_memory.resident_bytes()
    return _train(SUBJECTS[name], plan, context.rank) - before


def _train(subject: Subject, plan: Plan, rank: int) -> int:
    """The resident peak. The first step, which allocates the optimizer's state, does not count."""
    optimizer = HeteroZeroOptimizer(
        subject.model(),
        torch.optim.AdamW,
        plan=plan,
        communicator="process_group",
        compute_dtype=torch.float32,
        lr=1e-3,
    )
    samples = plan.samples(rank)
    batch = subject.batch(samples) if samples else None
    optimizer.train_step(subject.loss, batch, max_norm=1.0)
    process_memory.release_freed_memory()
    process_memory.reset_peak()
    dist.barrier()
    for _ in range(STEPS):
        optimizer.train_step(subject.loss, batch, max_norm=1.0)
    peak = process_memory.peak_resident_bytes()
    optimizer.release()
    return peak
