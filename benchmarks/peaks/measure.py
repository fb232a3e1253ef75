"""Predicted against measured peak memory of the ranks, over stages, models and batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import process_memory
import torch
import torch.distributed as dist
from head_to_head.clusters import free_ranks
from head_to_head.workers import WorkerContext, Workers
from rows import Row

from peaks.subjects import SUBJECTS, Subject
from poplar import HeteroZeroOptimizer, Plan
from poplar.comm import Group
from poplar.planner.prediction import memory_needed
from poplar.profiler.job import Job
from poplar.profiler.model_profile import model_profile, trained_units
from poplar.profiler.session import Session
from poplar.values.profile import ClusterProfile, DeviceProfile, NetworkProfile

RANKS = 4
MEMORY_LIMIT = 8 << 30
"""Bytes by rank in the profile: enough for every plan. Only needs are compared here."""
UNEVEN_SHARES = (0.5, 0.3, 0.2, 0.0)
ADAMW_BYTES = 8.0
"""Of the optimizer's state, per parameter."""
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


def measure_model(name: str, stages: Sequence[int], batches: Sequence[int]) -> Iterator[Row]:
    """A row per stage, batch, plan and rank."""
    with Workers(free_ranks(RANKS), f"profile of {name}") as workers:
        sizes = sorted({*batches, *(2 * batch for batch in batches)})
        profile: ClusterProfile = workers.call(_profile, name, sizes)[0]
    for stage in stages:
        cases = [(batch, case) for batch in batches for case in cases_of(stage, batch)]
        with Workers(free_ranks(RANKS), f"{name}, stage {stage}") as workers:
            for batch, case in cases:
                needed = memory_needed(profile, case.plan)
                peaks = workers.call(_peak, name, case.plan)
                for rank in range(RANKS):
                    yield _row(name, case, batch, rank, needed[rank], peaks[rank])


def _row(model: str, case: Case, batch: int, rank: int, predicted: int, measured: int) -> Row:
    plan = case.plan
    return Row.of(
        "memory peaks",
        {
            "model": model,
            "stage": plan.stage,
            "plan": case.name,
            "batch": batch,
            "rank": rank,
            "micro_batch": max(plan.micro_batches[rank], default=0),
            "share": plan.shares[rank],
        },
        {
            "predicted_bytes": predicted,
            "measured_bytes": measured,
            "error": predicted / measured - 1,
        },
    )


def _profile(context: WorkerContext, name: str, batches: Sequence[int]) -> ClusterProfile | None:
    """The memory part of what `profile_cluster` measures, on the first rank.

    A time budget would bound the batches on a slow machine, and times do not matter here.
    """
    subject = SUBJECTS[name]
    job = Job(
        model=subject.model(),
        loss_fn=subject.loss,
        example=subject.batch(1),
        optimizer_options={"lr": 1e-3},
        max_batch=max(batches),
        memory_limit=MEMORY_LIMIT,
        stages=(0,),
        seconds=1.0,
        compute_dtype=torch.float32,
    )
    session = Session(job, Group.of(job.process_group, job.timeout))
    if context.rank:
        return None
    with session.as_in_training():
        points = tuple(map(session.passes(trained_units(session)).first, batches))
    device = DeviceProfile(
        name="CPU", memory_bytes=MEMORY_LIMIT, points=points, optimizer_seconds=1.0
    )
    return ClusterProfile(
        devices=(device,) * RANKS,
        model=model_profile(session, ADAMW_BYTES),
        network=NetworkProfile(
            reduce_scatter_seconds=1.0,
            all_gather_seconds=1.0,
            send_seconds_per_byte=(1e-9,) * RANKS,
            receive_seconds_per_byte=(1e-9,) * RANKS,
            receive_buffers="step",  # see `process_memory.MALLOC`
        ),
    )


def _peak(context: WorkerContext, name: str, plan: Plan) -> int:
    """Peak resident bytes of steps after the first one, above those before the model was built,
    without mapped files.

    The plan has run two steps before: modules are imported, ranks connected, threads started, and
    libraries have allocated their buffers (up to 14 MiB in oneDNN and MKL for the shapes of a
    model).
    """
    process_memory.write_to_allocated_memory()
    _train(SUBJECTS[name], plan, context.rank, steps=1)
    process_memory.release_freed_memory()
    before = process_memory.resident_bytes()
    return _train(SUBJECTS[name], plan, context.rank, steps=STEPS) - before


def _train(subject: Subject, plan: Plan, rank: int, *, steps: int) -> int:
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
    for _ in range(steps):
        optimizer.train_step(subject.loss, batch, max_norm=1.0)
    peak = process_memory.peak_resident_bytes()
    optimizer.release()
    return peak
