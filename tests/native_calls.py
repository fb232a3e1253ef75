"""Lets gloo issue the native collectives that the engine calls on devices, instead of messages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch.distributed as dist
from torch import Tensor

from poplar.comm import Group


@contextmanager
def native_calls() -> Iterator[None]:
    """A context in which gloo counts as the backend of a device."""
    with (
        mock.patch.object(Group, "is_on_host", return_value=False),
        mock.patch.object(dist, "all_gather", gather_by_broadcasts),
    ):
        yield


def gather_by_broadcasts(
    slices: list[Tensor], own: Tensor, *, group: dist.ProcessGroup, async_op: bool
) -> None:
    """`dist.all_gather` of uneven slices, which NCCL supports and gloo does not."""
    assert async_op
    for owner, part in enumerate(slices):
        if owner == dist.get_rank(group):
            part.copy_(own)
        if part.numel():
            dist.broadcast(part, group=group, group_src=owner)
