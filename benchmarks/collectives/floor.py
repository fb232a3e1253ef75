"""The copy bandwidth of this machine when all ranks copy at once, as a bound for collectives.

Buffers are at least four times the last-level cache, so that memory is measured, and the fastest
method counts. The copy is measured in every round, like the collectives, because the memory of a
shared machine may be half as fast in the next minute. Bandwidth is bytes read plus bytes written.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from poplar import ops

LEAST_BYTES, MOST_BYTES = 64 << 20, 512 << 20
"""Bounds of a buffer: a virtual machine may report its host's whole cache; memory is limited."""
TRIES = 5


class Floor:
    """A copy between this rank's own buffers, by the fastest method. Collective to construct."""

    def __init__(self, ranks: int) -> None:
        nbytes = min(max(4 * _cache_bytes() // ranks, LEAST_BYTES), MOST_BYTES)
        source, target = torch.ones(nbytes // 4), torch.ones(nbytes // 4)
        self.bytes_moved = 2 * nbytes * ranks
        """By all ranks together, in one copy each."""
        ways: dict[str, Callable[[], object]] = {
            "copy_": lambda: target.copy_(source),
            "memcpy": lambda: ctypes.memmove(target.data_ptr(), source.data_ptr(), nbytes),
            "streaming stores": lambda: ops.copy_(target, source),
        }
        _, self.way = min((_seconds(copy), name) for name, copy in ways.items())
        self._copy = ways[self.way]

    def copy(self) -> None:
        """Copy once."""
        self._copy()


def _seconds(copy: Callable[[], object]) -> float:
    """Median over tries, on the slowest rank."""
    copy()
    tries = []
    for _ in range(TRIES):
        dist.barrier()
        began = time.perf_counter()
        copy()
        tries.append(time.perf_counter() - began)
    seconds = torch.tensor(tries, dtype=torch.float64)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return float(seconds.median())


def _cache_bytes() -> int:
    """Size of the last-level cache; 0 if the system does not report it."""
    names = ("SC_LEVEL4_CACHE_SIZE", "SC_LEVEL3_CACHE_SIZE", "SC_LEVEL2_CACHE_SIZE")
    return max((os.sysconf(name) for name in names if name in os.sysconf_names), default=0)
