"""Communicators for tests.

One records what is issued, one sends as late as possible, one issues the calls of NCCL on gloo.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from poplar.comm import Bucket, Group, Work
from poplar.comm.hierarchical_process_group import HierarchicalProcessGroupCommunicator
from poplar.comm.host_topology import Hosts
from poplar.comm.process_group import ProcessGroupCommunicator
from poplar.comm.shard_layout import Layout


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


def connect_natively(group: Group, hosts: Hosts) -> HierarchicalProcessGroupCommunicator:
    """The hierarchical transport of devices, between CPU ranks. Collective."""
    host_group = group.split(hosts.members)
    return HierarchicalProcessGroupCommunicator(
        NativeGroup.like(group), hosts, NativeGroup.like(host_group)
    )


def gather_by_broadcasts(
    slices: list[Tensor], own: Tensor, *, group: dist.ProcessGroup, async_op: bool
) -> None:
    """`dist.all_gather` of slices of any size, which NCCL supports and gloo does not."""
    assert async_op
    for owner, part in enumerate(slices):
        if owner == dist.get_rank(group):
            part.copy_(own)
        if part.numel():
            dist.broadcast(part, group=group, group_src=owner)
