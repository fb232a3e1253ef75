"""Results of `prediction.py`: a row per plan, and summaries."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import provenance
from prediction_plans import CHOSEN
from prediction_yardstick import Turn, steadied
from rich.table import Table

from poplar import Plan
from poplar.planner.prediction import Prediction

ACCEPTED_REGRET = 0.02
"""The summary counts configurations with a larger regret."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """Steps of one plan."""

    turns: tuple[Turn, ...]
    bystanders: float
    """Cores that other programs used during the turns."""

    @property
    def seconds(self) -> float:
        """Seconds of a step, the median over turns."""
        return statistics.median(turn.seconds for turn in self.turns)

    @property
    def spread(self) -> tuple[float, float]:
        """p20 and p80 of the seconds of a step over turns."""
        seconds = [turn.seconds for turn in self.turns]
        low, *_, high = statistics.quantiles(seconds, n=5, method="inclusive")
        return low, high


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """The result of one plan, as appended to `--output`."""

    benchmark: str
    cluster: str
    model: str
    stage: int
    plan: str
    """Name of the plan."""
    micro_batches: list[list[int]]
    shares: list[float]
    unprofiled: float
    """Part of the micro-batches without a point in the profile."""
    predicted_seconds: float
    """From the closed form."""
    simulated_seconds: float
    p20_seconds: float
    p50_seconds: float
    """Seconds of a step, the median over turns."""
    p80_seconds: float
    steady_seconds: float
    """p50 at the speeds of the profile: see `prediction_yardstick.steadied`."""
    timed_error: float
    """Predicted over p50, minus 1."""
    error: float
    """Predicted over steady, minus 1."""
    simulated_error: float
    """Simulated over steady, minus 1."""
    bound: str
    """What bounds the step, from the prediction."""
    bystanders: float
    """Cores that other programs used during the measurement."""
    device: str
    versions: str
    commit: str

    @classmethod
    def of(
        cls,
        plan: Plan,
        predicted: Prediction,
        simulated_seconds: float,
        measured: Measurement,
        expected: Callable[[Sequence[float]], float],
        *,
        cluster: str,
        model: str,
        kind: str,
        unprofiled: float,
    ) -> Row:
        """A row from prediction and measurement.

        `expected` gives the seconds of a step for slowdowns of the ranks.
        """
        low, high = measured.spread
        steady = steadied(measured.turns, expected)
        return cls(
            benchmark="prediction",
            cluster=cluster,
            model=model,
            stage=plan.stage,
            plan=kind,
            micro_batches=[list(passes) for passes in plan.micro_batches],
            shares=list(plan.shares),
            unprofiled=unprofiled,
            predicted_seconds=predicted.step_seconds,
            simulated_seconds=simulated_seconds,
            p20_seconds=low,
            p50_seconds=measured.seconds,
            p80_seconds=high,
            steady_seconds=steady,
            timed_error=predicted.step_seconds / measured.seconds - 1,
            error=predicted.step_seconds / steady - 1,
            simulated_error=simulated_seconds / steady - 1,
            bound=predicted.bound,
            bystanders=measured.bystanders,
            device=provenance.device(),
            versions=provenance.versions("torch"),
            commit=provenance.commit(),
        )

    @property
    def configuration(self) -> tuple[str, str, int]:
        """Rows of the same configuration are alternatives for a user."""
        return self.cluster, self.model, self.stage

    @property
    def global_batch(self) -> int:
        """Samples of a step."""
        return sum(map(sum, self.micro_batches))

    @property
    def seconds_per_sample(self) -> float:
        """Measured, at the speeds of the profile."""
        return self.steady_seconds / self.global_batch

    @property
    def timed_seconds_per_sample(self) -> float:
        """Measured."""
        return self.p50_seconds / self.global_batch


@dataclass(frozen=True, kw_only=True, slots=True)
class Regret:
    """Regret of the chosen plan in one configuration."""

    cluster: str
    model: str
    stage: int
    best: str
    """Name of the fastest other plan."""
    regret: float
    """Seconds per sample of the chosen plan over those of the fastest other plan, minus 1."""


def regrets(
    rows: Sequence[Row], seconds: Callable[[Row], float] = lambda row: row.seconds_per_sample
) -> list[Regret]:
    """The regret of each configuration that has a chosen plan and another plan."""
    found = []
    for configuration in dict.fromkeys(row.configuration for row in rows):
        own = [row for row in rows if row.configuration == configuration]
        chosen = [row for row in own if row.plan == CHOSEN]
        others = [row for row in own if row.plan != CHOSEN]
        if chosen and others:
            best = min(others, key=seconds)
            cluster, model, stage = configuration
            found.append(
                Regret(
                    cluster=cluster,
                    model=model,
                    stage=stage,
                    best=best.plan,
                    regret=seconds(chosen[0]) / seconds(best) - 1,
                )
            )
    return found


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Errors of both predictions, in total and by stage, cluster and model; and regrets."""
    return {
        "plans": len(rows),
        "unprofiled": round(statistics.mean(row.unprofiled for row in rows), 3),
        "closed_form": _by_part(rows, lambda row: row.error),
        "simulated": _by_part(rows, lambda row: row.simulated_error),
        "regret": of_regrets(regrets(rows)),
        "as_timed": {
            "closed_form": errors([row.timed_error for row in rows]),
            "regret": of_regrets(regrets(rows, lambda row: row.timed_seconds_per_sample)),
        },
    }


def _by_part(rows: Sequence[Row], error: Callable[[Row], float]) -> dict[str, Any]:
    def parts(of: Callable[[Row], object]) -> dict[str, dict[str, float]]:
        return {
            str(part): errors([error(row) for row in rows if of(row) == part])
            for part in dict.fromkeys(map(of, rows))
        }

    return {
        **errors([error(row) for row in rows]),
        "by_stage": parts(lambda row: row.stage),
        "by_cluster": parts(lambda row: row.cluster),
        "by_model": parts(lambda row: row.model),
    }


def errors(signed: Sequence[float]) -> dict[str, float]:
    """Median, 90th percentile and maximum of the absolute relative errors."""
    sizes = [abs(error) for error in signed]
    return {
        "median": round(statistics.median(sizes), 4),
        "p90": round(_p90(sizes), 4),
        "worst": round(max(sizes), 4),
    }


def of_regrets(found: Sequence[Regret]) -> dict[str, Any]:
    """Median, 90th percentile and maximum of the regrets, and how many are above 2 %."""
    values = [one.regret for one in found]
    if not values:
        return {"configurations": 0}
    return {
        "configurations": len(values),
        "median": round(statistics.median(values), 4),
        "p90": round(_p90(values), 4),
        "worst": round(max(values), 4),
        "above_2_percent": sum(value > ACCEPTED_REGRET for value in values),
    }


def _p90(values: Sequence[float]) -> float:
    if len(values) == 1:
        return values[0]
    return statistics.quantiles(values, n=10, method="inclusive")[8]


# Tables


def table_of(rows: Sequence[Row]) -> Table:
    """The rows of one cluster and model."""
    off = errors([row.error for row in rows])
    table = Table(
        title=f"cluster {rows[0].cluster}, model {rows[0].model}: median error "
        f"{100 * off['median']:.1f} %, p90 {100 * off['p90']:.1f} %",
        title_justify="left",
    )
    for heading in ("stage", "plan", "samples", "passes", "new sizes"):
        table.add_column(heading, justify="left" if heading == "plan" else "right", no_wrap=True)
    for heading in ("predicted s", "simulated s", "p20 s", "p50 s", "p80 s"):
        table.add_column(heading, justify="right", no_wrap=True)
    for heading in ("timed error", "steady s", "error", "of simulated", "others"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        expected = (row.predicted_seconds, row.simulated_seconds)
        measured = (row.p20_seconds, row.p50_seconds, row.p80_seconds)
        table.add_row(
            str(row.stage),
            row.plan,
            " ".join(str(sum(passes)) for passes in row.micro_batches),
            str(max(map(len, row.micro_batches))),
            f"{100 * row.unprofiled:.0f} %",
            *(f"{value:.3f}" for value in (*expected, *measured)),
            f"{100 * row.timed_error:+.1f} %",
            f"{row.steady_seconds:.3f}",
            f"{100 * row.error:+.1f} %",
            f"{100 * row.simulated_error:+.1f} %",
            f"{row.bystanders:.1f}",
        )
    return table


def regrets_table(found: Sequence[Regret]) -> Table:
    """A table of the regrets by configuration."""
    table = Table(title="chosen plan over the best other one", title_justify="left")
    for heading in ("cluster", "model", "stage", "regret", "best other"):
        table.add_column(heading, justify="right" if heading in ("stage", "regret") else "left")
    for one in found:
        regret = f"{100 * one.regret:+.1f} %"
        table.add_row(one.cluster, one.model, str(one.stage), regret, one.best)
    return table
