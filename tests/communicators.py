"""Communicators for tests, and where they are connected.

One records what is issued, one sends as late as possible, one issues the calls of NCCL on gloo.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from poplar.comm import Bucket, Group, Work, host_topology
from poplar.comm.hierarchy.transport import HierarchicalCommunicator
from poplar.comm.host_topology import Hosts
from poplar.comm.process_group import ProcessGroupCommunicator
from poplar.comm.shard_layout import Layout


def on_host(name: object) -> AbstractContextManager[Any]:
    """A context in which this rank reports that it is on this host."""
    return mock.patch.object(host_topology, "host_id", return_value=(name,))


def memory_cache(setting: str) -> AbstractContextManager[Any]:
    """Engines built inside keep idle shared memory ("on"), or free it at once ("off")."""
    return mock.patch.dict(os.environ, {"POPLAR_MEMORY_CACHE": setting})


class RecordingCommunicator(ProcessGroupCommunicator):
    """Records collectives when they are issued; a test may add other events."""

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        self.events: list[str] = []

    def reduce_scatter(self, bucket: Bucket, out: Tensor, *, what: str, **options: Any) -> Work:
        self.events.append(what)
        return super().reduce_scatter(bucket, out, what=what, **options)

    def all_gather(
        self, data: Tensor, layout: Layout, *, what: str, own: Tensor | None = None
    ) -> Work:
        self.events.append(what)
        return super().all_gather(data, layout, what=what, own=own)


class LateCommunicator(ProcessGroupCommunicator):
    """Reductions read their buckets only in `wait`: as late as a transport may."""

    def reduce_scatter(self, bucket: Bucket, out: Tensor, *, what: str, **options: Any) -> Work:
        return _LateReduction(
            lambda: super(LateCommunicator, self).reduce_scatter(bucket, out, what=what, **options)
        )


@dataclass
class _LateReduction:
    issue: Callable[[], Work]

    def wait(self) -> float:
        return self.issue().wait()


class NativeGroup(Group):
    """A gloo group that counts as the group of a device: gloo issues the calls that NCCL does."""

    def is_on_host(self, device: torch.device) -> bool:
        return False

    @classmethod
    def like(cls, group: Group) -> NativeGroup:
        return cls(**{field.name: getattr(group, field.name) for field in fields(Group)})


def connect_natively(group: Group, hosts: Hosts) -> HierarchicalCommunicator:
    """The hierarchical transport of devices, between CPU ranks. Collective."""
    host_group = group.split(hosts.members)
    return HierarchicalCommunicator(NativeGroup.like(group), hosts, NativeGroup.like(host_group))
