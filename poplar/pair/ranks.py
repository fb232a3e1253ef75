"""The ranks of a measurement: a group on the host, and one that a failed turn may break."""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from poplar.comm import Group
from poplar.comm.deadline import WATCHDOG_MARGIN
from poplar.comm.point_to_point import close_when_aborted
from poplar.pair.row import DID_NOT_FIT
from poplar.pair.speed import control_group
from poplar.planner.memory_shortfall import DoesNotFit, NoPlanFits
from poplar.system.out_of_memory import free_failed_pass, is_out_of_memory

T = TypeVar("T")

TIMEOUT = timedelta(minutes=2)
"""Of the engines' collectives."""


class TurnFailed(Exception):
    """On some rank; the same on all ranks. The message is an entry of the row."""


class Ranks:
    """All ranks: a group on the host, and the engines' process group, which a turn may break."""

    def __init__(self) -> None:
        self.control = control_group()
        self.renew()

    def renew(self) -> None:
        """Make a process group for the next turns. Collective."""
        # torch's watchdog ends a process on GPUs after this timeout: Poplar's deadline comes first.
        self.process_group = dist.new_group(timeout=TIMEOUT + WATCHDOG_MARGIN)
        self._guard = Group.of(self.process_group, TIMEOUT)
        close_when_aborted(self._guard, self.process_group)

    def gather(self, value: T) -> list[T]:
        """The value of every rank. Collective."""
        values: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(values, value, group=self.control)
        return values

    def from_first(self, value: T) -> T:
        """The value of rank 0. Collective."""
        return self.gather(value)[0]

    def together(self, work: Callable[[], T]) -> T:
        """What `work` returns on this rank, if it does not raise on any. Collective.

        Raises:
            TurnFailed: it has raised on some rank. Others may have waited for that rank in
                collectives of the process group, which are aborted.
        """
        failed = ""
        try:
            value = work()
        except Exception as error:
            does_not_fit = is_out_of_memory(error) or isinstance(error, DoesNotFit | NoPlanFits)
            failed = DID_NOT_FIT if does_not_fit else f"failed: {type(error).__name__}"
            print(f"rank {dist.get_rank()}: {type(error).__name__}: {error}", file=sys.stderr)
            self._guard.abort(f"rank {dist.get_rank()}: {error}")
            free_failed_pass(error)
        failures = [each for each in self.gather(failed) if each]
        if failures:
            self._guard.abort("another rank failed")
            self.renew()
            # Ranks that waited for one that ran out of memory have failed in another way.
            raise TurnFailed(DID_NOT_FIT if DID_NOT_FIT in failures else failures[0])
        return value
