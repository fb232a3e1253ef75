"""Bring together what every rank says of itself, without a collective.

Ranks whose NCCL versions or kinds of device differ cannot even agree on that by a collective: it
would hang. The launcher's store carries a few hundred bytes between any of them.
"""

from __future__ import annotations

import functools
import itertools
import json
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store
from torch.distributed.rendezvous import rendezvous

from poplar.doctor.checks import findings
from poplar.doctor.facts import RankFacts, gather, own_device, own_world_size
from poplar.doctor.report import Report
from poplar.doctor.words import named
from poplar.errors import CollectiveTimeout

_PATIENCE = timedelta(seconds=60)
_GRACE = timedelta(seconds=5)

_examinations = itertools.count()


def examine(device: torch.device | None = None, *, timeout: timedelta = _PATIENCE) -> Report:
    """Look at this rank, and where a launcher or a process group says so, at all of them.

    Every rank of the job must call it, equally often. Sends nothing but a few hundred bytes through
    the job's store; no collective, no process group.

    Args:
        device: what this rank trains on; None: the CUDA device of its local rank, else the CPU.
        timeout: how long to wait for the other ranks.

    Raises:
        CollectiveTimeout: some ranks did not report; names them.
    """
    own = gather(own_device() if device is None else device)
    everyone = (own,) if own_world_size() == 1 else _everyone(own, timeout)
    return Report(ranks=everyone, findings=tuple(findings(everyone)))


def _everyone(own: RankFacts, timeout: timedelta) -> tuple[RankFacts, ...]:
    store = PrefixStore(f"poplar/doctor/{next(_examinations)}", _store(timeout))
    world = range(own_world_size())
    store.set(str(own.rank), json.dumps(own.to_dict()))
    # Rank 0 may be the store: it waits longer, so that the others say themselves who is missing.
    deadline = time.monotonic() + (timeout + _GRACE * (own.rank == 0)).total_seconds()
    silent = [rank for rank in world if not _said(store, str(rank), deadline)]
    if silent:
        raise CollectiveTimeout(
            f"rank {own.rank}: {named(silent)} did not report within {timeout.total_seconds():g} "
            "s; look at their logs, or whether they can reach MASTER_ADDR at all"
        )
    reports = [RankFacts.from_dict(json.loads(store.get(str(rank)))) for rank in world]
    _leave_together(store, own.rank)
    return tuple(reports)


def _store(timeout: timedelta) -> Store:
    """The process group's, or the launcher's where there is no group yet."""
    return _get_default_store() if dist.is_initialized() else _launchers_store(timeout)


@functools.cache
def _launchers_store(timeout: timedelta) -> Store:
    """Made once: rank 0 may have to listen where it listens already."""
    store: Store = next(rendezvous("env://", timeout=timeout))[0]
    return store


def _said(store: Store, key: str, deadline: float) -> bool:
    left = max(deadline - time.monotonic(), 0.01)
    try:
        store.wait([key], timedelta(seconds=left))
    except RuntimeError:  # of several kinds: not every store has its own for a timeout
        return False
    return True


def _leave_together(store: Store, rank: int) -> None:
    """Rank 0 may be the store: it stays until everybody has read."""
    if store.add("have read", 1) == own_world_size():
        store.set("all have read", "")
    if rank == 0:
        _said(store, "all have read", time.monotonic() + _GRACE.total_seconds())
