"""The recorder of `poplar watch`: marks on a device, keys of collectives, what torch still has."""

from __future__ import annotations

import json
from types import SimpleNamespace

import torch

from poplar.watch import recorder


class FakeCuda:
    """A device that runs behind the host: an event has a time when it is passed."""

    def __init__(self):
        self.now, self.stream, self.synchronized, self.capturing = 0.0, "compute", 0, False

    def current_stream(self):
        return self.stream

    def is_current_stream_capturing(self):
        return self.capturing

    def Event(self, enable_timing):
        event = SimpleNamespace(at=None)
        event.record = lambda: setattr(event, "at", self.now)
        event.synchronize = lambda: setattr(self, "synchronized", self.synchronized + 1)
        event.query = lambda: event.at <= self.now
        event.elapsed_time = lambda other: 1e3 * (other.at - event.at)
        return event


def test_times_of_a_device_need_one_synchronization():
    cuda = FakeCuda()
    clock = recorder._DeviceClock(cuda)
    marks = []
    for _ in range(4):
        cuda.now += 0.5
        marks.append(clock.mark())
    start = clock.seconds(marks[0])
    clock.move_to(marks[1])
    assert [round(clock.seconds(mark) - start, 6) for mark in marks] == [0.0, 0.5, 1.0, 1.5]
    assert cuda.synchronized == 1
    cuda.stream = "communication"
    assert not clock.is_exposed()


def test_events_are_not_recorded_while_a_graph_is_captured():
    cuda = FakeCuda()
    clock = recorder._DeviceClock(cuda)
    cuda.capturing = True
    assert clock.mark() is clock._origin


def test_last_backwards_of_ranks_with_different_passes_have_the_same_key():
    keys = []
    for passes in (1, 3):
        step = recorder._Step(1, 0.0)
        for number in range(passes):
            step.waits.append((f"backward/{number}", 0.0, 0.0, 0.0))
        step.calls["backward"] = passes
        keys.append([key for key, *_ in json.loads(step.line(recorder._HostClock()))["waits"]])
    assert keys[0][-1] == keys[1][-1] == "backward/-1"


def test_samples_are_the_length_of_the_first_tensor(tmp_path):
    watching = recorder.Recorder(str(tmp_path))
    watching._torch = torch
    batch = {"name": "text", "x": torch.zeros(3, 2), "y": torch.zeros(5)}
    assert watching._samples(batch) == watching._samples([torch.tensor(1.0), batch]) == 3
    assert watching._samples("text") == watching._samples(None) == 0
