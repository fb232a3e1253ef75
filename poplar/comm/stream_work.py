"""Native collectives of torch.distributed on a device: a wait blocks a stream, never the host."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from poplar.comm.group import Event, Group, first_line, on_device
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

    __slots__ = ("_call", "_finish", "_group", "_issued")

    def __init__(
        self,
        group: Group,
        call: Callable[[], dist.Work | None] | None,
        device: torch.device,
        what: str,
        finish: Callable[[], None] | None = None,
    ) -> None:
        """Issue the collective. Issue and wait on the same stream.

        Args:
            group: the participating ranks.
            call: issues it; None: there is nothing to send. It is kept until the wait, with the
                tensors that it refers to: the backend must not lose their memory, and calls no
                `record_stream`.
            device: of the tensors.
            what: the collective's name in errors.
            finish: called once, in the wait.

        Raises:
            CollectiveTimeout: the collective cannot be issued because earlier ones were aborted.
        """
        self._call, self._group, self._finish = call, group, finish
        group.check()
        try:
            work = call() if call is not None else None
        except RuntimeError as error:
            cause = str(error) if group.devices else f"{first_line(error)}. {_ADVICE}"
            raise group.fail(what, group.peers(), cause) from error
        self._issued = _Issued(what, device, work)
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
        if self._finish is not None:
            self._finish()
        self._drop_tensors()
        return 0.0

    def _drop_tensors(self) -> None:
        if self._issued.passed is None:
            self._group.in_flight.pop(id(self._issued), None)
        self._issued.work = self._call = self._finish = None

    def __del__(self) -> None:
        if hasattr(self, "_issued"):  # the collectives of an abandoned step are not waited for
            self._drop_tensors()


@dataclass(slots=True)
class _Issued:
    """A collective that has been issued."""

    what: str
    device: torch.device
    work: dist.Work | None
    """None once it has been waited for."""
    passed: Event | None = None
    """After the wait of a stream."""

    def is_completed(self) -> bool:
        """Whether the device has finished it; called from another thread."""
        work = self.work  # before `passed`, which is set before the work is dropped
        with on_device(self.device):
            if self.passed is not None:
                return self.passed.query()
            return work is None or work.is_completed()
