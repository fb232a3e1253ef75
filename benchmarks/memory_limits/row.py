"""Results of `benchmarks/memory.py`, as appended to `--output`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import provenance

from memory_limits.clusters import MIB, MemoryCluster
from memory_limits.task import GrowingLlama
from memory_limits.trial import Outcome
from poplar import Plan

PLANNED = "poplar planned"
"""Name of the engine whose batches and shares are planned."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PeakRow:
    """Predicted and measured memory of one rank under one plan."""

    benchmark: str
    model: str
    stage: int
    plan: str
    """`even` or `uneven`."""
    batch: int
    """Micro-batch of the even plan."""
    rank: int
    micro_batch: int
    """Largest pass of this rank."""
    share: float
    predicted_bytes: int
    measured_bytes: int
    """Peak of private memory during steps, above what the process held before."""
    error: float
    """Predicted over measured, minus 1; below 0 the plan needs more than was predicted."""
    device: str
    versions: str
    commit: str

    @classmethod
    def of(
        cls,
        model: str,
        name: str,
        plan: Plan,
        batch: int,
        rank: int,
        predicted: int,
        measured: int,
    ) -> PeakRow:
        """A row with its provenance."""
        return cls(
            benchmark="memory peaks",
            model=model,
            stage=plan.stage,
            plan=name,
            batch=batch,
            rank=rank,
            micro_batch=max(plan.micro_batches[rank], default=0),
            share=plan.shares[rank],
            predicted_bytes=predicted,
            measured_bytes=measured,
            error=predicted / measured - 1,
            device=provenance.device(),
            versions=provenance.versions("torch"),
            commit=provenance.commit(),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class LargestRow:
    """The largest model of one engine on one cluster."""

    benchmark: str
    cluster: str
    limits_mib: list[int]
    """By rank."""
    engine: str
    blocks: int
    """Of the largest model that trains; 0: not even one block, or the engine is absent."""
    parameters: int
    plans_by: str
    """`autotune` or `scaled profile`; empty for even engines."""
    shares: list[float]
    """By rank; empty for an engine that is absent."""
    micro_batches: list[list[int]]
    peaks_mib: list[float]
    """By rank, resident memory above the baseline."""
    trials: int
    seconds: float
    """Of all trials."""
    reason: str
    """Why the next larger model that was tried does not fit, or why the engine is absent."""
    absent: bool
    ideal_ratio: float
    """Sum of limits over the number of ranks times the smallest limit."""
    device: str
    versions: str
    commit: str

    @classmethod
    def of(
        cls,
        *,
        cluster: MemoryCluster,
        engine: str,
        task: GrowingLlama,
        plan: Plan | None,
        outcomes: Mapping[int, Outcome],
        reason: str,
        plans_by: str = "",
    ) -> LargestRow:
        """From all trials of an engine, by number of blocks."""
        blocks = task.blocks_count
        return cls._with_provenance(
            cluster,
            engine=engine,
            blocks=blocks,
            parameters=task.parameters if blocks else 0,
            shares=list(plan.shares) if plan else [],
            micro_batches=[list(passes) for passes in plan.micro_batches] if plan else [],
            peaks_mib=[round(peak / MIB, 1) for peak in outcomes[blocks].peaks] if blocks else [],
            trials=len(outcomes),
            seconds=sum(outcome.seconds for outcome in outcomes.values()),
            reason=reason,
            plans_by=plans_by,
            absent=False,
        )

    @classmethod
    def absent_engine(cls, cluster: MemoryCluster, engine: str, reason: str) -> LargestRow:
        """An engine that is not installed or does not run here."""
        return cls._with_provenance(
            cluster,
            engine=engine,
            blocks=0,
            parameters=0,
            shares=[],
            micro_batches=[],
            peaks_mib=[],
            trials=0,
            seconds=0.0,
            reason=reason,
            plans_by="",
            absent=True,
        )

    @classmethod
    def _with_provenance(cls, cluster: MemoryCluster, **values: Any) -> LargestRow:
        return cls(
            benchmark="memory largest",
            cluster=cluster.name,
            limits_mib=[limit // MIB for limit in cluster.limits],
            ideal_ratio=cluster.ideal_ratio,
            device=provenance.device(),
            versions=provenance.versions("torch", "deepspeed"),
            commit=provenance.commit(),
            **values,
        )

    @property
    def policy_is_planned(self) -> bool:
        """Batches and shares are planned for the limits; otherwise they are even."""
        return self.engine == PLANNED

    @property
    def summary(self) -> str:
        """One line."""
        if self.absent:
            return f"{self.engine}: absent ({self.reason})"
        return f"{self.engine}: {self.blocks} blocks, {self.parameters / 1e6:.1f} M parameters"


@dataclass(frozen=True, kw_only=True, slots=True)
class RecomputationRow:
    """A plan that may recompute units on some ranks, against the best plan that does not."""

    benchmark: str
    cluster: str
    limits_mib: list[int]
    parameters: int
    context: int
    """Bytes per sample."""
    global_batch: int
    stages: dict[str, int]
    """By `recompute`; absent if no plan fits, as below."""
    micro_batches: dict[str, list[list[int]]]
    recomputed: list[int]
    """By rank, the units that the plan with `recompute="auto"` recomputes."""
    step_seconds: dict[str, float]
    """Median over turns."""
    speed_up: float | None
    """Median over rounds of the seconds without recomputation over those with it; None: no plan
    without it fits."""
    predicted_speed_up: float | None
    peaks_mib: dict[str, list[float]]
    device: str
    versions: str
    commit: str

    @classmethod
    def of(
        cls,
        *,
        cluster: MemoryCluster,
        task: GrowingLlama,
        global_batch: int,
        plans: Mapping[str, Plan | ValueError],
        seconds: dict[str, float],
        speed_up: float | None,
        predicted_speed_up: float | None,
        peaks: Mapping[str, Sequence[int]],
    ) -> RecomputationRow:
        """A row with its provenance."""
        found = {name: plan for name, plan in plans.items() if isinstance(plan, Plan)}
        auto = found.get("auto")
        ranks = range(cluster.size)
        return cls(
            benchmark="memory recomputation",
            cluster=cluster.name,
            limits_mib=[limit // MIB for limit in cluster.limits],
            parameters=task.parameters,
            context=task.context,
            global_batch=global_batch,
            stages={name: plan.stage for name, plan in found.items()},
            micro_batches={
                name: list(map(list, plan.micro_batches)) for name, plan in found.items()
            },
            recomputed=[len(auto.recomputed_units(rank)) for rank in ranks] if auto else [],
            step_seconds=seconds,
            speed_up=speed_up,
            predicted_speed_up=predicted_speed_up,
            peaks_mib={name: [round(peak / MIB, 1) for peak in peaks[name]] for name in found},
            device=provenance.device(),
            versions=provenance.versions("torch"),
            commit=provenance.commit(),
        )
