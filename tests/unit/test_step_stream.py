"""The steps of a collective wait on their own stream: not the host, and not the caller's stream."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from poplar.comm.hierarchy.transport import StepStream

CUDA = torch.device("cuda", 0)


class FakeDevice:
    """CUDA streams and events that record what is issued on them; nothing else is provided."""

    def __init__(self) -> None:
        self.issued: list[str] = []
        self.current = FakeStream(self, "compute")
        self.streams = 0

    def new_stream(self, device: torch.device, priority: int) -> FakeStream:
        assert priority < 0, "its collectives must not wait for the kernels of the caller"
        self.streams += 1
        return FakeStream(self, f"steps {self.streams}")

    @contextmanager
    def entered(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def step(self, name: str) -> None:
        self.issued.append(f"{self.current.name}: {name}")


class FakeStream:
    device = CUDA

    def __init__(self, owner: FakeDevice, name: str) -> None:
        self.owner, self.name = owner, name

    def wait_stream(self, other: FakeStream) -> None:
        self.owner.issued.append(f"{self.name}: wait for {other.name}")

    def wait_event(self, event: FakeEvent) -> None:
        self.owner.issued.append(f"{self.name}: wait for the event of {event.stream.name}")


class FakeEvent:
    stream: FakeStream

    def record(self, stream: FakeStream) -> None:
        self.stream = stream
        stream.owner.issued.append(f"{stream.name}: record")


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    fake = FakeDevice()
    monkeypatch.setattr(torch.cuda, "Stream", fake.new_stream)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: fake.current)
    monkeypatch.setattr(torch.cuda, "stream", fake.entered)
    return fake


def test_the_steps_follow_what_was_issued_before_and_only_a_wait_concerns_the_caller(
    device: FakeDevice,
) -> None:
    with StepStream().steps(CUDA) as work:
        device.step("within the host")
        device.step("between hosts")
    device.step("backward")
    work.wait()
    work.wait()
    assert device.issued == [
        "steps 1: wait for compute",
        "steps 1: within the host",
        "steps 1: between hosts",
        "steps 1: record",
        "compute: backward",
        "compute: wait for the event of steps 1",
    ]


def test_a_stream_is_used_again(device: FakeDevice) -> None:
    stream = StepStream()
    for _ in range(3):
        with stream.steps(CUDA) as work:
            device.step("a step")
        work.wait()
    assert device.streams == 1


def test_another_stream_may_wait(device: FakeDevice) -> None:
    with StepStream().steps(CUDA) as work:
        pass
    with device.entered(FakeStream(device, "optimizer")):
        work.wait()
    assert device.issued[-1] == "optimizer: wait for the event of steps 1"


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_the_callers_tensors_live_until_the_wait(device: FakeDevice, kind: str) -> None:
    tensor = torch.ones(3)
    alive: Any = weakref.ref(tensor)
    with StepStream().steps(torch.device(kind), tensor) as work:
        del tensor
    gc.collect()
    assert alive() is not None
    work.wait()
    gc.collect()
    assert alive() is None


def test_an_error_in_a_step_reaches_the_caller(device: FakeDevice) -> None:
    with pytest.raises(ValueError, match="no"), StepStream().steps(CUDA):
        raise ValueError("no")
