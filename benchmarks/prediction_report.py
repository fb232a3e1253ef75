"""Rows of `prediction.py`, one per plan, and summaries of them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from prediction_plans import CHOSEN
from prediction_yardstick import Turn, steadied
from rows import Column, Row

from poplar import Plan
from poplar.planner.prediction import Prediction

ACCEPTED_REGRET = 0.02
"""Configurations with a larger regret are counted."""
CONFIGURATION = ("cluster", "model", "stage")
"""Rows that are equal in these are alternatives for a user."""
COLUMNS = (
    *(Column(name, name) for name in (*CONFIGURATION, "plan")),
    Column("samples", lambda row: " ".join(str(sum(p)) for p in row["micro_batches"])),
    Column("passes", lambda row: max(map(len, row["micro_batches"]))),
    Column("new sizes", "unprofiled", "{:.0%}"),
    Column("predicted s", "predicted_seconds", "{:.3f}"),
    Column("simulated s", "simulated_seconds", "{:.3f}"),
    *(Column(f"{part} s", f"{part}_seconds", "{:.3f}") for part in ("p20", "p50", "p80")),
    Column("timed error", "timed_error", "{:+.1%}"),
    Column("steady s", "steady_seconds", "{:.3f}"),
    Column("error", "error", "{:+.1%}"),
    Column("of simulated", "simulated_error", "{:+.1%}"),
    Column("in interval", lambda row: "yes" if is_covered(row) else "no"),
    Column("others", "bystanders", "{:.1f}"),
)
CLUSTER_COLUMNS = (
    Column("ranks", "cluster"),
    Column("plans", "plans"),
    Column("median error", "median", "{:.1%}"),
    Column("90 % within", "p90", "{:.1%}"),
    Column("worst", "worst", "{:.1%}"),
    Column("in their interval", "in_interval", "{:.0%}"),
    Column("median, uncorrected", "timed_median", "{:.1%}"),
    Column("90 %, uncorrected", "timed_p90", "{:.1%}"),
    Column("in their interval, uncorrected", "timed_in_interval", "{:.0%}"),
)
REGRET_COLUMNS = (
    *(Column(name, name) for name in CONFIGURATION),
    Column("regret", "regret", "{:+.1%}"),
    Column("best other", "best"),
)


@dataclass(frozen=True, slots=True)
class Measurement:
    """Steps of one plan."""

    turns: tuple[Turn, ...]
    bystanders: float
    """Cores that other programs used during the turns."""


def row_of(
    plan: Plan,
    predicted: Prediction,
    simulated_seconds: float,
    measured: Measurement,
    expected: Callable[[Sequence[float]], float],
    /,
    **case: Any,
) -> Row:
    """A row from prediction and measurement.

    `expected` gives the seconds of a step for slowdowns of the ranks; `case` has the cluster, the
    model, the name of the plan, and which part of its micro-batches has no point in the profile.
    """
    seconds = [turn.seconds for turn in measured.turns]
    low, *_, high = statistics.quantiles(seconds, n=5, method="inclusive")
    median, steady = statistics.median(seconds), steadied(measured.turns, expected)
    return Row.of(
        "prediction",
        {
            **case,
            "stage": plan.stage,
            "micro_batches": plan.micro_batches,
            "shares": plan.shares,
        },
        {
            "predicted_seconds": predicted.step_seconds,
            "simulated_seconds": simulated_seconds,
            "p20_seconds": low,
            "p50_seconds": median,
            "p80_seconds": high,
            # The median at the speeds of the profile: see `prediction_yardstick.steadied`.
            "steady_seconds": steady,
            "timed_error": predicted.step_seconds / median - 1,
            "error": predicted.step_seconds / steady - 1,
            "simulated_error": simulated_seconds / steady - 1,
            # Of the predicted seconds, with a probability of 80 %.
            "step_interval": predicted.step_interval,
            # What bounds the step, from the prediction.
            "bound": predicted.bound,
            "bystanders": measured.bystanders,
        },
    )


def is_covered(row: Row, seconds: str = "steady_seconds") -> bool:
    """Whether the measured step is in the interval of the predicted one."""
    low, high = row["step_interval"]
    return bool(low <= row[seconds] <= high)


def regrets(rows: Sequence[Row]) -> list[Row]:
    """The regret of each configuration that has a chosen plan and another plan.

    It is the seconds per sample of the chosen plan over those of the fastest other plan, minus 1.
    """

    def per_sample(row: Row) -> float:
        return row["steady_seconds"] / sum(map(sum, row["micro_batches"]))

    configurations: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        configurations.setdefault(tuple(row[name] for name in CONFIGURATION), []).append(row)
    found = []
    for configuration, own in configurations.items():
        chosen = [row for row in own if row["plan"] == CHOSEN]
        others = [row for row in own if row["plan"] != CHOSEN]
        if chosen and others:
            best = min(others, key=per_sample)
            regret = per_sample(chosen[0]) / per_sample(best) - 1
            case = dict(zip(CONFIGURATION, configuration, strict=True))
            found.append(Row.of("regret", case, {"regret": regret, "best": best["plan"]}))
    return found


def by_cluster(rows: Sequence[Row]) -> list[Row]:
    """Errors of the closed form: of each cluster, then of all."""
    names = list(dict.fromkeys(row["cluster"] for row in rows))
    parts = {name: [row for row in rows if row["cluster"] == name] for name in names}
    return [_of_cluster(name, own) for name, own in (parts | {"all": list(rows)}).items()]


def _of_cluster(name: str, rows: Sequence[Row]) -> Row:
    timed = errors([row["timed_error"] for row in rows])
    figures = {
        **errors([row["error"] for row in rows]),
        "in_interval": statistics.mean(map(is_covered, rows)),
        "timed_median": timed["median"],
        "timed_p90": timed["p90"],
        "timed_in_interval": statistics.mean(is_covered(row, "p50_seconds") for row in rows),
    }
    return Row.of("errors", {"cluster": name, "plans": len(rows)}, figures)


def errors(signed: Sequence[float]) -> dict[str, float]:
    """Median, 90th percentile and maximum of the absolute relative errors."""
    sizes = [abs(error) for error in signed]
    return {
        "median": round(statistics.median(sizes), 4),
        "p90": round(_p90(sizes), 4),
        "worst": round(max(sizes), 4),
    }


def in_words(found: Sequence[Row]) -> str:
    """The regrets in one sentence."""
    values = [one["regret"] for one in found]
    if not values:
        return "no configuration has a chosen plan and another one"
    above = sum(value > ACCEPTED_REGRET for value in values)
    return (
        f"regret of {len(values)} configurations: {statistics.median(values):+.1%} in the median, "
        f"above {ACCEPTED_REGRET:.0%} in {above}, at most {max(values):+.1%}"
    )


def _p90(values: Sequence[float]) -> float:
    if len(values) == 1:
        return values[0]
    return statistics.quantiles(values, n=10, method="inclusive")[8]
