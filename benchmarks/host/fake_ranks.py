"""Any number of ranks in one process: torch's fake process group, and a control channel like it.

The fake group copies this rank's tensors where other ranks' would arrive. The engine treats it as
a device backend: it waits on streams and issues one native call per collective.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar
from unittest import mock

import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from poplar.comm import Control, Group

T = TypeVar("T")


class InProcessControl(Control):
    """Every rank sends what this rank sends."""

    exchanges = 0
    """Exchanges and broadcasts of all instances; each is a collective between hosts."""

    def exchange(self, values: Tensor, *, what: str) -> Callable[[], list[Tensor]]:
        del what
        InProcessControl.exchanges += 1
        return lambda: [values.clone() for _ in range(self.group.size)]

    def exchange_objects(self, value: T, *, what: str) -> list[T]:
        del what
        InProcessControl.exchanges += 1
        return [value] * self.group.size

    def broadcast_integer(self, value: int) -> None:
        del value
        InProcessControl.exchanges += 1


@contextmanager
def fake_ranks(count: int) -> Iterator[None]:
    """A context in which this process is rank 0 of `count` ranks, and Poplar can be built."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=count)
    try:
        with ExitStack() as stack:
            # Gloo, which carries the control channel beside devices, cannot run in one process.
            same = mock.patch("poplar.comm.group._control_group", lambda group, _timeout: group)
            stack.enter_context(same)
            stack.enter_context(mock.patch("poplar.optimizer.connect_control", _connect))
            stack.enter_context(mock.patch.object(dist, "all_gather", _all_gather))
            yield
    finally:
        dist.destroy_process_group()


_real_all_gather = dist.all_gather


def _all_gather(
    tensors: list[Tensor], own: Tensor, group: dist.ProcessGroup | None = None, **options: Any
) -> dist.Work | None:
    """As `dist.all_gather`; the fake group cannot copy this rank's tensor to other sizes."""
    if any(part.numel() != own.numel() for part in tensors):
        tensors = [own] * len(tensors)
    return _real_all_gather(tensors, own, group=group, **options)


def _connect(group: Group, choice: object = "auto") -> Control:
    del choice
    return InProcessControl(group)
