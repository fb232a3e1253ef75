"""Seconds of a collective, as the slowest rank sees them; providers take turns in every round."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist

TURN_SECONDS = 0.1
"""A turn runs a collective back to back for about so long: ranks don't leave a barrier together,
and what that adds to one run would be noise of its own size."""
MOST_RUNS = 300
WARM_UPS = 2


def time_turns(runs: Mapping[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
    """Seconds of a run, by name, one for every round: a turn's mean, on the slowest rank.

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
    dist.all_reduce(seconds, dist.ReduceOp.MAX)  # all ranks must count the same
    return max(1, min(MOST_RUNS, round(TURN_SECONDS / seconds.item())))


def _turn(run: Callable[[], None], times: int) -> float:
    dist.barrier()
    began = time.perf_counter()
    for _ in range(times):
        run()
    return (time.perf_counter() - began) / times
