"""Any number of ranks in one process, on torch's fake process group.

The fake group copies this rank's tensors where other ranks' would arrive. The engine treats it as
a device backend: it waits on streams and issues one native call per collective.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # noqa: F401 (registers the backend)
from torch import Tensor

from poplar.comm import Control, Group
from poplar.comm.formation import Formation, Formed


@contextmanager
def fake_ranks(count: int) -> Iterator[None]:
    """A context in which this process is rank 0 of `count` ranks, and Poplar can be built."""
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=count)
    try:
        with (
            # Gloo, which carries the control channel beside devices, cannot run in one process.
            mock.patch("poplar.comm.group.Group._control_group_of", lambda self, group: group),
            # The other ranks do not join.
            mock.patch.object(Formation, "wait", return_value=Formed(1, "fake ranks", ())),
            mock.patch("poplar.comm.control_channel.wait_for_all_ranks", _wait),
            mock.patch.object(Control, "_exchange_long_values", _copy_own),
            mock.patch.object(dist, "all_to_all", _all_to_all),
        ):
            yield
    finally:
        dist.destroy_process_group()


def _wait(_group: Group, work: dist.Work, _what: str) -> None:
    """Fake works never report that they are completed, but a wait returns at once."""
    work.wait()


def _copy_own(control: Control, values: list[Tensor], _number: int, _what: str) -> None:
    """The fake group receives no messages."""
    for received in values:
        received.copy_(values[control.group.rank])


_real_all_to_all = dist.all_to_all


def _all_to_all(received: list[Tensor], sent: list[Tensor], **options: Any) -> dist.Work | None:
    """As `dist.all_to_all`; the fake group copies what is sent to where it receives.

    If sizes differ it cannot, and zeros are received: new memory may have NaN, and a step whose
    loss is NaN is not applied.
    """
    if any(to.numel() != part.numel() for to, part in zip(received, sent, strict=True)):
        for part in received:
            part.zero_()
        received = sent
    return _real_all_to_all(received, sent, **options)
