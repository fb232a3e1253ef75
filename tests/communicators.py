"""Communicators for tests: one records what is issued, one sends as late as possible."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from poplar.comm import Bucket, Group, Work
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
