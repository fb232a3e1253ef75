"""Lets gloo issue the native collectives that the engine calls on devices, instead of messages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from poplar.comm import Group


@contextmanager
def native_calls() -> Iterator[None]:
    """A context in which gloo counts as the backend of a device."""
    with (
        mock.patch.object(Group, "is_on_host", return_value=False),
        mock.patch.object(dist, "all_to_all", all_to_all_of_parts),
    ):
        yield


@contextmanager
def streams_wait() -> Iterator[list[dist.ProcessGroup]]:
    """As `native_calls`; waits return at once, as on a device whose stream waits for other ranks.

    Yields the process groups that are aborted. Results are not final, so use it for steps that
    cannot be finished.
    """
    aborted: list[dist.ProcessGroup] = []
    wait = dist.Work.wait

    def wait_on_stream(work: dist.Work, timeout: timedelta | None = None) -> bool:
        return True if timeout is None else wait(work, timeout)

    with (
        native_calls(),
        mock.patch.object(dist.Work, "wait", wait_on_stream),
        mock.patch.object(Group, "has_device_backend", True),
        mock.patch.object(dist.ProcessGroup, "abort", lambda group: aborted.append(group)),
    ):
        yield aborted


def all_to_all_of_parts(
    received: list[Tensor], sent: list[Tensor], *, group: dist.ProcessGroup, async_op: bool
) -> None:
    """`dist.all_to_all`, which NCCL supports and gloo does not."""
    assert async_op
    result = torch.cat(received)
    sizes = [part.numel() for part in received], [part.numel() for part in sent]
    dist.all_to_all_single(result, torch.cat(sent), *sizes, group=group)
    for part, values in zip(received, result.split(sizes[0]), strict=True):
        part.copy_(values)
