"""The stream on which the steps of a collective follow one another.

A collective of several steps must not make the caller's stream wait between them. Its steps run on
a stream of their own, behind the work that the caller had issued before.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class StepsWork:
    """Steps that have been issued. It keeps the tensors that they read and write until the wait."""

    def __init__(self, *tensors: object) -> None:
        self._tensors = tensors
        self._done: torch.cuda.Event | None = None
        self._device: torch.device | None = None

    def record(self, stream: torch.cuda.Stream) -> None:
        """All steps have been issued on this stream."""
        self._device = stream.device
        self._done = torch.cuda.Event()
        self._done.record(stream)

    def wait(self) -> float:
        """As `Work.wait`: only the current stream waits."""
        if self._done is not None:
            torch.cuda.current_stream(self._device).wait_event(self._done)
        self._tensors, self._done = (), None
        return 0.0


class StepStream:
    """A stream of each CUDA device; on other devices the steps run when they are issued."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    @contextmanager
    def steps(self, device: torch.device, *tensors: object) -> Iterator[StepsWork]:
        """A context in which steps are issued, and the work to wait for.

        Tensors that the steps allocate belong to their stream, so they can be freed while the steps
        run. The others must live until the wait.

        Args:
            device: of the tensors.
            tensors: the tensors of the caller.
        """
        work = StepsWork(*tensors)
        if device.type != "cuda":
            yield work
            return
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device, priority=-1)
        stream = self._streams[device]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            yield work
        work.record(stream)
