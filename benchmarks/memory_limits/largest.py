"""The largest model that each engine trains under the limits of a cluster, by bisection."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from head_to_head.engine import Configuration

from memory_limits.bisection import largest_that_fits
from memory_limits.clusters import MemoryCluster
from memory_limits.planned import NoPlan, Planner
from memory_limits.row import PLANNED, LargestRow
from memory_limits.task import GrowingLlama
from memory_limits.trial import EngineMissing, Outcome, attempt
from poplar import Plan

STATE_BYTES = 16
"""Of a parameter in fp32: value, gradient and the state of AdamW."""
STAGE = 3
EVEN = "poplar even"
ENGINES = (EVEN, "FSDP2", "DeepSpeed ZeRO-3", PLANNED)
_PROVIDERS = {PLANNED: "poplar", EVEN: "poplar", "FSDP2": "fsdp2", "DeepSpeed ZeRO-3": "deepspeed"}
Log = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What is measured, and how precisely."""

    task: GrowingLlama
    """The number of blocks does not matter."""
    tolerance: float
    """Bisection ends when the model is within this fraction of one that does not fit."""


def largest_models(
    cluster: MemoryCluster, engines: Sequence[str], settings: Settings, log: Log
) -> list[LargestRow]:
    """A row per engine: all train a global batch of one sample per rank at stage 3."""
    rows = []
    for engine in sorted(engines, key=ENGINES.index):
        try:
            rows.append(_largest(cluster, engine, settings, log))
        except EngineMissing as missing:
            rows.append(LargestRow.absent_engine(cluster, engine, str(missing)))
        log(rows[-1].summary)
    return rows


def _largest(cluster: MemoryCluster, engine: str, settings: Settings, log: Log) -> LargestRow:
    planner = Planner(cluster, settings.task) if engine == PLANNED else None
    outcomes: dict[int, Outcome] = {}
    plans: dict[int, Plan] = {}

    def fits(blocks: int) -> bool:
        task = settings.task.with_blocks(blocks)
        try:
            plans[blocks] = plan = even_plan(cluster) if planner is None else planner.plan(task)
        except NoPlan as none:
            outcomes[blocks] = Outcome(fits=False, seconds=none.seconds, reason=str(none))
        else:
            outcomes[blocks] = attempt(cluster, task, configuration_of(engine, plan))
        one = outcomes[blocks]
        log(
            f"{engine}, {blocks} blocks: {'fits' if one.fits else one.reason} ({one.seconds:.0f} s)"
        )
        return one.fits

    guess = _guess(cluster, settings.task, planned=planner is not None)
    blocks = largest_that_fits(fits, guess, settings.tolerance)
    failing = min((count for count, one in outcomes.items() if not one.fits), default=0)
    return LargestRow.of(
        cluster=cluster,
        engine=engine,
        task=settings.task.with_blocks(blocks),
        plan=plans[blocks] if blocks else None,
        outcomes=outcomes,
        reason=outcomes[failing].reason,
    )


def even_plan(cluster: MemoryCluster) -> Plan:
    """One sample and an equal share for every rank."""
    return Plan.even(cluster.size, cluster.size, 1, STAGE)


def configuration_of(engine: str, plan: Plan) -> Configuration:
    """The configuration of one of `ENGINES`; those of others than Poplar use the batches only."""
    return Configuration(
        name=engine,
        provider=_PROVIDERS[engine],
        stage=STAGE,
        policy="exact" if engine == PLANNED else "even",
        plan=plan,
        ranks=tuple(range(plan.world_size)),
    )


def _guess(cluster: MemoryCluster, task: GrowingLlama, *, planned: bool) -> int:
    """Blocks whose training state fills what the ranks can use."""
    usable = sum(cluster.limits) if planned else cluster.size * min(cluster.limits)
    one, two = (task.with_blocks(count).parameters for count in (1, 2))
    return max(1, round(0.85 * usable / (STATE_BYTES * (two - one))))
