"""What was measured of one integration, its table and its targets."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from provenance import commit
from rich.box import SIMPLE_HEAD
from rich.table import Table
from verdict import CaseVerdict

from integration_runs.task import Task
from poplar import Plan

SPEED_UP = 1.2
"""At least, over the library's own engine with even batches."""
OF_POPLAR = 0.97
"""At least, of the samples per second of Poplar's own loop."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One integration on one model; samples per second are medians over the rounds."""

    integration: str
    model: str
    size: str
    cluster: str
    samples: int
    stage: int
    micro_batches: tuple[tuple[int, ...], ...]
    rounds: int
    own: float
    with_poplar: float
    poplar: float
    over_own: float
    """Medians of the ratios of the rounds."""
    of_poplar: float
    of_engine: float | None
    """Of the library's own engine with the plan's batches and no weights; None: not measured."""
    commit: str

    @classmethod
    def of(
        cls,
        *,
        integration: str,
        task: Task,
        cluster: str,
        plan: Plan,
        seconds: Sequence[list[float]],
    ) -> Row:
        """
        Args:
            seconds: of a step in each round: of the library, with Poplar, of Poplar alone, and of
                the library's engine with the plan's batches, if it was measured.
        """
        own, with_poplar, alone, *engine = seconds
        speeds = [task.samples / statistics.median(values) for values in seconds]
        pairs = list(zip(own, with_poplar, alone, strict=True))
        return cls(
            integration=integration,
            model=task.model,
            size=task.size,
            cluster=cluster,
            samples=task.samples,
            stage=plan.stage,
            micro_batches=plan.micro_batches,
            rounds=len(own),
            own=speeds[0],
            with_poplar=speeds[1],
            poplar=speeds[2],
            over_own=statistics.median(a / b for a, b, _ in pairs),
            of_poplar=statistics.median(c / b for _, b, c in pairs),
            of_engine=(
                statistics.median(d / b for b, d in zip(with_poplar, engine[0], strict=True))
                if engine
                else None
            ),
            commit=commit(),
        )


def table_of(rows: Sequence[Row]) -> Table:
    """The integrations of one model."""
    first = rows[0]
    title = f"{first.model} ({first.size}) at {first.cluster}, global batch {first.samples}"
    table = Table("integration", "stage", "plan", title=title, box=SIMPLE_HEAD)
    for heading in (
        "own samples/s",
        "with Poplar",
        "Poplar's loop",
        "over own",
        "of Poplar",
        "of engine",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            row.integration,
            str(row.stage),
            " | ".join(" ".join(map(str, sizes)) for sizes in row.micro_batches),
            f"{row.own:.1f}",
            f"{row.with_poplar:.1f}",
            f"{row.poplar:.1f}",
            f"{row.over_own:.2f}x",
            f"{100 * row.of_poplar:.1f} %",
            "" if row.of_engine is None else f"{100 * row.of_engine:.1f} %",
        )
    return table


def verdicts_of(rows: Sequence[Row]) -> list[CaseVerdict]:
    """Each row beside its targets."""
    verdicts = []
    for row in rows:
        case = f"{row.model}, {row.integration}"
        for what, value, wanted in (
            ("samples per second over the library's own", row.over_own, SPEED_UP),
            ("samples per second of Poplar's own loop", row.of_poplar, OF_POPLAR),
        ):
            verdicts.append(CaseVerdict(what=what, value=value, wanted=wanted, case=case))
    return verdicts
