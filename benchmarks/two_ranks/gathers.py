"""Host time of the calls that all-gather even and uneven slices."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from two_ranks.rank import RANKS, Rank

CALLS, ELEMENTS = 200, 64 * 1024
SLICES = {"even": (1 / 2, 1 / 2), "uneven": (3 / 4, 1 / 4)}


def gathers(own: Rank) -> None:
    """Time the calls, each waited for before the next one."""
    for name, shares in SLICES.items():
        for way, call in ways_to_gather(own, [int(share * ELEMENTS) for share in shares]).items():
            seconds = [host_seconds(call) for _ in range(CALLS)][CALLS // 4 :]
            if own.rank == 0:
                taken = 1e6 * statistics.median(seconds)
                own.note("gathers", f"{name}, {way}", True, host_microseconds=taken)


def ways_to_gather(own: Rank, counts: list[int]) -> dict[str, Callable[[], Any]]:
    """Calls that gather slices of these sizes, by name, as far as the backend has them."""
    whole = torch.zeros(sum(counts), device=own.device)
    parts = list(whole.split(counts))
    size = counts[own.rank]
    mine = torch.ones(size, device=own.device)
    copies = torch.ones(RANKS * size, device=own.device)  # one for each rank
    even = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

    def all_gather() -> Any:
        return dist.all_gather(parts, mine, async_op=True)

    def all_to_all() -> Any:
        return dist.all_to_all_single(whole, copies, counts, [size] * RANKS, async_op=True)

    def all_gather_into_tensor() -> Any:
        return even(whole, mine, async_op=True)

    ways = [all_to_all]
    if len(set(counts)) == 1:
        ways.append(all_gather_into_tensor)
    if len(set(counts)) == 1 or own.device.type == "cuda":  # gloo's slices are equal
        ways.append(all_gather)
    return {way.__name__: way for way in ways}


def host_seconds(call: Callable[[], Any]) -> float:
    """Seconds until an asynchronous call returns."""
    began = time.perf_counter()
    work = call()
    seconds = time.perf_counter() - began
    work.wait()
    return seconds
