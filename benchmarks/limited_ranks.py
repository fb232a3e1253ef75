"""The largest model that ranks train whose memory is limited by `RLIMIT_DATA`."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import process_memory
from head_to_head.clusters import free_ranks
from head_to_head.workers import Workers, WorkersFailed
from rows import Row

MIB = 2**20


def prepare(limits: Sequence[int], largest_mib: int) -> tuple[int, ...]:
    """Set what ranks inherit; returns the bytes of each rank for ratios of their memory."""
    process_memory.prepare_rank_processes()
    os.environ["OMP_NUM_THREADS"] = "1"
    resource.setrlimit(resource.RLIMIT_STACK, (MIB, resource.RLIM_INFINITY))  # threads' count
    unit = largest_mib * MIB // max(limits)
    return tuple(unit * limit for limit in limits)


@contextmanager
def limited(nbytes: int) -> Iterator[None]:
    """Let this process allocate at most so much more private memory in the `with` block."""
    process_memory.release_freed_memory()
    allowed = process_memory.private_bytes() + nbytes
    resource.setrlimit(resource.RLIMIT_DATA, (allowed, resource.RLIM_INFINITY))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY,) * 2)


def on_ranks(attempt: Callable[..., Any], ranks: int, *given: Any) -> tuple[Any, ...] | None:
    """What `attempt(context, *given)` returns on new ranks; None: one ran out of memory."""
    try:
        with Workers(free_ranks(ranks), attempt.__name__) as workers:
            return workers.call(attempt, *given)
    except WorkersFailed as error:
        if not error.is_out_of_memory:
            raise
        return None


def gains(
    rows: Sequence[Row], size: str, name: str, with_it: str, without: str
) -> Iterator[tuple[str, float | None]]:
    """`size` of the rows called `with_it` over that of those called `without`, by their `name`.

    For each memory of the ranks and width of the matrices that has both rows. None: nothing fits
    without.
    """
    sizes: dict[str, dict[str, float]] = {}
    for row in rows:
        case = f"{row['limits']}, {row['largest_mib']} MiB, width {row['width']}"
        sizes.setdefault(case, {})[row[name]] = row[size]
    for case, own in sizes.items():
        if {with_it, without} <= own.keys():
            yield case, own[with_it] / own[without] if own[without] else None


def largest(fits: Callable[[int], bool]) -> int:
    """The most blocks that fit, to about 3 %; 0: not even one."""
    low, high = 0, 8
    while fits(high):
        low, high = high, 2 * high
    while high - low > max(1, low // 32):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
