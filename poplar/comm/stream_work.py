"""Native collectives of torch.distributed on a device: a wait blocks a stream, never the host."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from poplar.comm.group import DeviceWork, Group, first_line
from poplar.comm.host_buffers import record

_ADVICE = (
    "The first collective needs one device per rank: call torch.cuda.set_device(local_rank), or "
    "pass init_process_group(device_id=...)"
)


class StreamWork:
    """A native collective of device tensors. A wait blocks the current stream, never the host.

    If other ranks are missing, so does the stream. The host finds out in an exchange of the control
    channel, in `Group.wait_for_event`, or by `Group.abort_late_collectives`.
    """

    __slots__ = ("_call", "_group", "_issued")

    def __init__(
        self,
        group: Group,
        call: Callable[[], dist.Work | None] | None,
        device: torch.device,
        what: str,
    ) -> None:
        """Issue the collective. Issue and wait on the same stream.

        Args:
            call: issues it; None: there is nothing to send. It is kept until the wait, with the
                tensors that it refers to: the backend must not lose their memory, and calls no
                `record_stream`.

        Raises:
            CollectiveTimeout: the collective cannot be issued because earlier ones were aborted.
        """
        self._call, self._group = call, group
        group.check()
        try:
            work = call() if call is not None else None
        except RuntimeError as error:
            cause = str(error) if group.devices else f"{first_line(error)}. {_ADVICE}"
            raise group.fail(what, group.peers(), cause) from error
        self._issued = DeviceWork(what, device, work)
        group.devices.add(device)
        group.in_flight[id(self._issued)] = self._issued, time.monotonic()

    def wait(self) -> float:
        """As `Work.wait`; 0, because the host does not wait."""
        issued = self._issued
        try:
            if issued.work is not None:
                issued.work.wait()
        except RuntimeError as error:
            raise self._group.fail(issued.what, self._group.peers(), error) from error
        # A work refers to its tensors. So the device's progress is seen by an event from now on.
        issued.passed = record(issued.device) if self._group.reports is not None else None
        self._drop_tensors()
        return 0.0

    def _drop_tensors(self) -> None:
        if self._issued.passed is None:
            self._group.in_flight.pop(id(self._issued), None)
        self._issued.work = self._call = None

    def __del__(self) -> None:
        if hasattr(self, "_issued"):  # the collectives of an abandoned step are not waited for
            self._drop_tensors()
