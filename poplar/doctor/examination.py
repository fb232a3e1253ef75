"""Exchange the facts of all ranks through the launcher's store, without a collective.

Ranks with different NCCL versions or device types cannot compare them by a collective, because it
would hang. The store always works, and carries a few hundred bytes per rank.
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
from poplar.doctor.facts import RankFacts, collect_facts, own_device, own_world_size
from poplar.doctor.report import Report
from poplar.values.errors import CollectiveTimeout
from poplar.values.formatting import format_ranks
from poplar.values.schema import from_fields, parse_json, to_json_types

_TIMEOUT = timedelta(seconds=60)
_GRACE = timedelta(seconds=5)

_examinations = itertools.count()


def examine(device: torch.device | None = None, *, timeout: timedelta = _TIMEOUT) -> Report:
    """Examine this rank, and all ranks of the job if there is a launcher or a process group.

    Every rank of the job must call it, equally often. It uses the job's store only: no collective
    and no process group.

    Args:
        device: of this rank; None: the CUDA device of its local rank, else the CPU.
        timeout: how long to wait for the other ranks.

    Raises:
        CollectiveTimeout: some ranks did not report in time; names them.
    """
    own = collect_facts(own_device() if device is None else device)
    ranks = (own,) if own_world_size() == 1 else _exchange(own, timeout)
    return Report(ranks=ranks, findings=tuple(findings(ranks)))


def _exchange(own: RankFacts, timeout: timedelta) -> tuple[RankFacts, ...]:
    store = PrefixStore(f"poplar/doctor/{next(_examinations)}", _store(timeout))
    world = range(own_world_size())
    store.set(str(own.rank), json.dumps(to_json_types(own)))
    # Rank 0 may host the store: it waits longer, so that the other ranks can raise their own error.
    deadline = time.monotonic() + (timeout + _GRACE * (own.rank == 0)).total_seconds()
    missing = [rank for rank in world if not _has_key(store, str(rank), deadline)]
    if missing:
        raise CollectiveTimeout(
            f"rank {own.rank}: {format_ranks(missing)} did not report within "
            f"{timeout.total_seconds():g} s; check their logs, and whether they can reach "
            "MASTER_ADDR"
        )
    reports = [from_fields(RankFacts, parse_json(store.get(str(rank)))) for rank in world]
    _wait_for_readers(store, own.rank)
    return tuple(reports)


def _store(timeout: timedelta) -> Store:
    """The store of the process group, or the launcher's if there is no group yet."""
    return _get_default_store() if dist.is_initialized() else _launchers_store(timeout)


@functools.cache
def _launchers_store(timeout: timedelta) -> Store:
    """Cached: rank 0 cannot listen twice on one port."""
    store: Store = next(rendezvous("env://", timeout=timeout))[0]
    return store


def _has_key(store: Store, key: str, deadline: float) -> bool:
    left = max(deadline - time.monotonic(), 0.01)
    try:
        store.wait([key], timedelta(seconds=left))
    except RuntimeError:  # stores differ in their type of timeout error
        return False
    return True


def _wait_for_readers(store: Store, rank: int) -> None:
    """Rank 0 may host the store: it stays until all ranks have read it."""
    if store.add("have read", 1) == own_world_size():
        store.set("all have read", "")
    if rank == 0:
        _has_key(store, "all have read", time.monotonic() + _GRACE.total_seconds())
