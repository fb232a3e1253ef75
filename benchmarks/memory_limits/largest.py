"""The largest model that each engine trains under the limits of a cluster, by bisection."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from memory_limits.bisection import largest_that_fits
from memory_limits.clusters import MemoryCluster
from memory_limits.configurations import ENGINES, configuration_of, even_plan
from memory_limits.planned import NoPlan, Planner, tuned_plan
from memory_limits.row import PLANNED, LargestRow
from memory_limits.task import GrowingLlama
from memory_limits.trial import EngineMissing, Outcome, attempt
from poplar import Plan

Log = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What is measured, and how precisely."""

    task: GrowingLlama
    """The number of blocks does not matter."""
    tolerance: float
    """Bisection ends when the model is within this fraction of one that does not fit."""
    autotune: bool = True
    """Plans come from `poplar.autotune`; otherwise from a profile of small models."""
    seconds: float = 20.0
    """Time budget of autotune."""


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
    planner = Planner(cluster, settings.task)
    planned = engine == PLANNED
    outcomes: dict[int, Outcome] = {}
    plans: dict[int, Plan] = {}

    def fits(blocks: int) -> bool:
        task = settings.task.with_blocks(blocks)
        try:
            if not planned:
                plan = even_plan(cluster)
            elif settings.autotune:
                plan = tuned_plan(cluster, task, settings.seconds)
            else:
                plan = planner.plan(task)
            plans[blocks] = plan
        except NoPlan as none:
            outcomes[blocks] = Outcome(fits=False, seconds=none.seconds, reason=str(none))
        else:
            outcomes[blocks] = attempt(cluster, task, configuration_of(engine, plan))
        one = outcomes[blocks]
        log(
            f"{engine}, {blocks} blocks: {'fits' if one.fits else one.reason} ({one.seconds:.0f} s)"
        )
        return one.fits

    guess = planner.predicted_largest(even=not planned)
    blocks = largest_that_fits(fits, guess, settings.tolerance)
    failing = min((count for count, one in outcomes.items() if not one.fits), default=0)
    return LargestRow.of(
        cluster=cluster,
        engine=engine,
        task=settings.task.with_blocks(blocks),
        plan=plans[blocks] if blocks else None,
        outcomes=outcomes,
        reason=outcomes[failing].reason if failing else "",
        plans_by=("autotune" if settings.autotune else "scaled profile") if planned else "",
    )
