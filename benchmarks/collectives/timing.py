"""Seconds of a collective on the slowest rank; the providers are interleaved in every round."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist

TURN_SECONDS = 0.1
"""Target duration of a turn, which runs a collective repeatedly. Ranks leave a barrier at slightly
different times, which would distort the time of a single run.
"""
MAX_RUNS = 300
WARM_UPS = 2


def time_turns(runs: Mapping[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
    """Seconds per run, by name, one value per round: the mean of a turn, on the slowest rank.

    Collective; every rank names the same runs in the same order.
    """
    counts = {name: _runs_of_a_turn(run) for name, run in runs.items()}
    mine: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            mine[name].append(_turn(run, counts[name]))
    slowest = torch.tensor([mine[name] for name in runs], dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return {name: seconds.tolist() for name, seconds in zip(runs, slowest, strict=True)}


def _runs_of_a_turn(run: Callable[[], None]) -> int:
    _turn(run, WARM_UPS)
    seconds = torch.tensor(_turn(run, WARM_UPS), dtype=torch.float64)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)  # all ranks need the same count
    return max(1, min(MAX_RUNS, round(TURN_SECONDS / seconds.item())))


def _turn(run: Callable[[], None], times: int) -> float:
    dist.barrier()
    began = time.perf_counter()
    for _ in range(times):
        run()
    return (time.perf_counter() - began) / times
