"""Transports for tests: one that records the issued collectives, and the latest one allowed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from poplar.comm import Bucket, Group, Work
from poplar.comm.process_group import ProcessGroupCommunicator
from poplar.comm.shard_layout import Layout


class Watched(ProcessGroupCommunicator):
    """Records collectives as they are issued; a test may add other events between them."""

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


class Late(ProcessGroupCommunicator):
    """Reductions read their buckets in the wait: as late as a transport may."""

    def reduce_scatter(self, bucket: Bucket, out: Tensor, *, what: str, **options: Any) -> Work:
        return _Later(lambda: super(Late, self).reduce_scatter(bucket, out, what=what, **options))


@dataclass
class _Later:
    issue: Callable[[], Work]

    def wait(self) -> float:
        return self.issue().wait()
