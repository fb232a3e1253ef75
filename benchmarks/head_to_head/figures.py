"""The rows of a comparison: ratios to peers and to the sum of speeds, and what explains them."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rows import Row

from head_to_head.outcome import Comparison, Outcome

LOSSES_COMPARED = 20
"""Number of first steps whose losses are compared."""
RESAMPLES = 500


def rows_of(comparison: Comparison) -> list[Row]:
    """One row per configuration, absent ones included."""
    return [
        Row.of(
            "train",
            _case(comparison, outcome),
            _figures(comparison, outcome),
            packages=("torch", "deepspeed"),
        )
        for outcome in comparison.outcomes
    ]


def _case(comparison: Comparison, outcome: Outcome) -> dict[str, Any]:
    configuration, task = outcome.configuration, comparison.task
    return {
        "run": comparison.began,
        "cluster": comparison.cluster,
        "described": comparison.described,
        "unequal": comparison.unequal,
        "configuration": configuration.name,
        "provider": configuration.provider,
        "stage": configuration.stage,
        "policy": configuration.policy,
        "over_gloo": configuration.over_gloo,
        "model": task.model,
        "size": task.size,
        "context": task.context,
        "global_batch": task.global_batch,
        "parameters": comparison.parameters,
        "ranks": configuration.ranks,
        "micro_batches": configuration.plan.micro_batches,
        "shares": configuration.plan.shares,
        "notes": comparison.notes,
    }


def _figures(comparison: Comparison, outcome: Outcome) -> dict[str, Any]:
    """Speeds are samples per second; ratios of speeds are of medians unless they say otherwise."""
    configuration, ran = outcome.configuration, not outcome.absent
    if not ran:  # steps before the failure are no result
        outcome = replace(outcome, step_seconds=(), losses=(), peak_memory=())
    speeds = [configuration.plan.global_batch / seconds for seconds in outcome.step_seconds]
    median = outcome.samples_per_second if ran else None
    seconds = outcome.median_seconds if ran else None
    tflops = None if median is None else median * comparison.flops_per_sample / 1e12
    peak = sum(comparison.before.rank_flops[rank] for rank in configuration.ranks)
    peer = _best_peer(comparison, configuration.stage)
    predicted = outcome.predicted_seconds
    balance, transport, engine = _split(comparison, outcome, peer)
    ideal = comparison.ideal_over_even.get(configuration.stage, 1.0)
    return {
        "steps": len(speeds),
        "p20_speed": _quantile(speeds, 0),
        "p50_speed": median,
        "p80_speed": _quantile(speeds, 3),
        "p20_seconds": _quantile(outcome.step_seconds, 0),
        "p50_seconds": seconds,
        "p80_seconds": _quantile(outcome.step_seconds, 3),
        "tflops": tflops,
        # Over the ranks' peak, measured in matrix products before the run.
        "mfu": None if tflops is None else 1e12 * tflops / peak,
        "sum_of_speeds": comparison.sum_of_speeds,
        "largest_sum_of_speeds": comparison.largest_sum_of_speeds,
        "of_sum_of_speeds": comparison.of_sum_of_speeds(outcome) if ran else None,
        "of_sum_in_step": comparison.of_sum_in_step(outcome) if ran else None,
        # Over each peer, of all stages.
        "over": {
            other.configuration.name: median / other.samples_per_second
            for other in _peers(comparison)
            if median is not None and other.configuration.name != configuration.name
        },
        "best_peer_of_stage": peer.configuration.name if peer else "",
        "over_best_peer_of_stage": _interval(outcome, peer) if ran and peer else None,
        "balance": balance,
        "transport": transport,
        "engine": engine,
        "ideal_over_even": ideal,
        "balance_of_ideal": None if balance is None else balance / ideal,
        "predicted_seconds": predicted,
        "prediction_error": None
        if predicted is None or seconds is None
        else predicted / seconds - 1,
        "peak_memory": outcome.peak_memory,
        "last_loss": outcome.losses[-1] if outcome.losses else None,
        "loss_difference": _loss_difference(outcome, _reference(comparison)),
        "drift": comparison.drift,
        "calibrated_speeds": comparison.speeds,
        # Why there is no result; empty if there is one.
        "absent": outcome.absent,
    }


def _peers(comparison: Comparison) -> list[Outcome]:
    return [o for o in comparison.outcomes if o.configuration.provider != "poplar" and not o.absent]


def _best_peer(comparison: Comparison, stage: int) -> Outcome | None:
    found = [
        outcome
        for outcome in _peers(comparison)
        if outcome.configuration.stage == stage and outcome.configuration.policy == "even"
    ]
    return min(found, key=lambda outcome: outcome.median_seconds, default=None)


def _split(
    comparison: Comparison, outcome: Outcome, peer: Outcome | None
) -> tuple[float | None, float | None, float | None]:
    """Balance, transport and engine of a plan of Poplar; None for other configurations."""
    configuration = outcome.configuration
    all_ranks = len(configuration.ranks) == len(comparison.before.speeds)
    if (
        configuration.provider != "poplar"
        or not all_ranks
        or configuration.over_gloo
        or outcome.absent
    ):
        return None, None, None
    even = _even(comparison, configuration.stage)
    even_on_gloo = _even(comparison, configuration.stage, gloo=True)
    return _ratio(outcome, even), _ratio(even, even_on_gloo), _ratio(even_on_gloo, peer)


def _reference(comparison: Comparison) -> Outcome | None:
    """The outcome with the reference losses."""
    present = (outcome for outcome in comparison.outcomes if not outcome.absent)
    return _even(comparison, 0) or next(present, None)


def _even(comparison: Comparison, stage: int, *, gloo: bool = False) -> Outcome | None:
    """Poplar's even plan at a stage; `gloo`: on the transport of the peers."""
    for outcome in comparison.outcomes:
        configuration = outcome.configuration
        all_ranks = len(configuration.ranks) == len(comparison.before.speeds)
        same = (configuration.provider, configuration.policy, configuration.stage) == (
            "poplar",
            "even",
            stage,
        )
        if same and all_ranks and configuration.over_gloo == gloo and not outcome.absent:
            return outcome
    return None


def _ratio(one: Outcome | None, other: Outcome | None) -> float | None:
    """How much faster `one` is."""
    if one is None or other is None or one.absent or other.absent:
        return None
    return other.median_seconds / one.median_seconds


def _interval(one: Outcome, other: Outcome) -> tuple[float, float, float]:
    draw = random.Random(0)

    rounds = list(zip(one.turns, other.turns, strict=False))  # those with both

    def ratio() -> float:
        drawn = draw.choices(rounds, k=len(rounds))
        first = statistics.median(seconds for turn, _ in drawn for seconds in turn)
        second = statistics.median(seconds for _, turn in drawn for seconds in turn)
        return second / first

    ratios = sorted(ratio() for _ in range(RESAMPLES))
    ends = ratios[int(0.05 * RESAMPLES)], ratios[int(0.95 * RESAMPLES)]
    return (other.median_seconds / one.median_seconds, *ends)


def _loss_difference(outcome: Outcome, reference: Outcome | None) -> float | None:
    expected = reference.losses if reference else ()
    pairs = list(zip(outcome.losses, expected, strict=False))[:LOSSES_COMPARED]
    differences = [abs(loss - other) for loss, other in pairs]
    # max() would ignore NaN.
    return max((math.inf if math.isnan(d) else d for d in differences), default=None)


def _quantile(values: Sequence[float], fifth: int) -> float | None:
    if len(values) < 2:
        return values[0] if values else None
    return statistics.quantiles(values, n=5)[fifth]
