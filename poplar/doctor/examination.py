"""The facts and findings of all ranks, exchanged through the launcher's store without a collective.

Ranks with different NCCL versions or device types cannot compare them by a collective, because it
would hang. The store always works, and carries a few hundred bytes per rank.
"""

from __future__ import annotations

import functools
import itertools
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store
from torch.distributed.rendezvous import rendezvous

from poplar.doctor.checks import findings
from poplar.doctor.facts import (
    RankFacts,
    collect_facts,
    describe_values,
    own_device,
    own_world_size,
)
from poplar.doctor.finding import Finding
from poplar.values.errors import CollectiveTimeout
from poplar.values.formatting import format_bytes, format_ranks, format_table, format_usage
from poplar.values.schema import from_fields, parse_json, to_json_types

_TIMEOUT = timedelta(seconds=60)
_GRACE = timedelta(seconds=5)

_examinations = itertools.count()


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """The facts and findings of all ranks; equal on all ranks."""

    ranks: tuple[RankFacts, ...]
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Whether there is no problem that training would fail on."""
        return not any(finding.kind == "problem" for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """This report as JSON types."""
        return {"ok": self.ok, **to_json_types(self)}

    def __str__(self) -> str:
        header = ("rank", "host", "device", "memory", "used by others", "/dev/shm free", "dtypes")
        lines = [format_table(header, *map(_row, self.ranks)), "", *self._facts_of_all(), ""]
        lines += map(str, self.findings or ["no problems found: these ranks can train"])
        return "\n".join(lines)

    def _facts_of_all(self) -> Iterator[str]:
        """Facts that are usually equal on all ranks: one value, or each value with its ranks."""
        by_rank = [
            {
                **facts.versions,
                "operators": facts.operators,
                "transport": facts.transport,
                "links": ", ".join(facts.device.links),
                "notes": "; ".join(facts.device.notes),
            }
            for facts in self.ranks
        ]
        for name in by_rank[0]:
            value = describe_values(self.ranks, [facts[name] for facts in by_rank])
            if value:
                yield f"{name}: {value}"


def _row(facts: RankFacts) -> tuple[str, ...]:
    device = facts.device
    capability = "" if device.capability is None else " sm_{}{}".format(*device.capability)
    shared = facts.shared_memory_bytes
    return (
        str(facts.rank),
        device.host,
        f"{device.name}, {device.cores} cores"
        if device.kind == "cpu"
        else f"{device.name}{capability}",
        format_usage(facts.memory_bytes, device.total_bytes),
        format_bytes(device.others_bytes),
        "none" if shared is None else format_bytes(shared[0]),
        ", ".join(facts.dtypes),
    )


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
