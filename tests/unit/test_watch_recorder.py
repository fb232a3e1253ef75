"""The recorder of `poplar watch`: marks on a device, keys of collectives, what torch still has."""

from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from poplar.watch import recorder


class FakeCuda:
    """A device that runs behind the host: an event has a time when it is passed."""

    def __init__(self):
        self.now, self.stream, self.synchronized, self.capturing = 0.0, "compute", 0, False
        self.queued = 0.0
        """Seconds of work in the streams of the job."""

    def is_initialized(self):
        return True

    def current_stream(self):
        return self.stream

    def Stream(self):
        return "without work"

    def get_device_name(self):
        return "fake"

    def is_current_stream_capturing(self):
        return self.capturing

    def Event(self, enable_timing):
        event = SimpleNamespace(at=None)

        def record(stream="compute"):
            event.at = self.now + (self.queued if stream != "without work" else 0.0)

        event.record = record
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


def watching_on_a_device(tmp_path, monkeypatch):
    """A recorder on a `FakeCuda`, whose clock the host shares, and which has begun a step."""
    cuda, watching = FakeCuda(), recorder.Recorder(str(tmp_path))
    monkeypatch.setattr(recorder, "time", SimpleNamespace(perf_counter=lambda: cuda.now))
    distributed = SimpleNamespace(
        is_initialized=lambda: True, get_rank=lambda: 0, get_world_size=lambda: 1
    )
    watching._torch = SimpleNamespace(cuda=cuda, distributed=distributed)
    watching._end_update(None)
    return cuda, watching


def test_times_of_a_device_stay_on_the_clock_of_the_host_while_it_is_busy(tmp_path, monkeypatch):
    cuda, watching = watching_on_a_device(tmp_path, monkeypatch)
    drift = 50e-6
    host = SimpleNamespace(perf_counter=lambda: cuda.now * (1 + drift))
    monkeypatch.setattr(recorder, "time", host)
    cuda.queued = 0.25
    for _ in range(720):
        cuda.now += 5.0
        watching._end_update(watching._clock.mark())
        watching._begin_work()
    cuda.now += 1.0
    watching._write()
    watching._file.close()
    last = json.loads((tmp_path / "rank-0.jsonl").read_text().splitlines()[-1])
    end = (cuda.now - 1.0 + cuda.queued) * (1 + drift)
    assert last["end"] == pytest.approx(end, abs=2 * 5.0 * drift)
    assert cuda.synchronized == 1


def test_a_comparison_of_clocks_that_takes_long_changes_nothing(monkeypatch):
    cuda = FakeCuda()
    host = SimpleNamespace(now=0.0)

    def perf_counter():
        host.now += recorder.LONGEST_PROBE
        return host.now

    monkeypatch.setattr(recorder, "time", SimpleNamespace(perf_counter=perf_counter))
    clock = recorder._DeviceClock(cuda)
    mark, host.now = clock.mark(), 100.0
    before = clock.seconds(mark)
    clock.relate()
    assert clock.seconds(mark) == before


def test_nothing_is_recorded_while_a_graph_is_captured(tmp_path):
    cuda = FakeCuda()
    distributed = SimpleNamespace(is_initialized=lambda: True)
    watching = recorder.Recorder(str(tmp_path))
    watching._torch = SimpleNamespace(cuda=cuda, distributed=distributed)
    step = watching._update(lambda: None)
    cuda.capturing = True
    step()
    assert watching._clock is None
    cuda.capturing = False
    step()
    step()  # it is over when more work begins
    cuda.capturing, event = True, cuda.Event
    cuda.Event = lambda enable_timing: pytest.fail("an event in a graph")
    step()
    watching._begin_work()
    assert not watching._records()
    assert not watching._closed
    cuda.capturing, cuda.Event = False, event
    assert watching._records()


def test_last_backwards_of_ranks_with_different_passes_have_the_same_key():
    keys = []
    for passes in (1, 3):
        step = recorder._Step(1, 0.0)
        for number in range(passes):
            step.waits.append((f"backward/{number}", 0.0, 0.0, 0.0))
        step.calls["backward"] = passes
        keys.append([key for key, *_ in json.loads(step.line(recorder._HostClock()))["waits"]])
    assert keys[0][-1] == keys[1][-1] == "backward/-1"


OWN = ["poplar.optimizer", "poplar.integrations.unequal_passes", "torch.distributed.fsdp"]
"""What every job with `UnequalPasses` has imported."""


@pytest.mark.parametrize(
    ("imported", "backwards", "engine"),
    [
        ([], 1, "DDP"),
        (["torch.distributed.fsdp"], 0, "FSDP2"),
        (["torch.distributed.fsdp"], 1, "DDP"),
        (["transformers.trainer", "deepspeed"], 1, "DeepSpeed"),
        (["poplar.optimizer", "transformers.trainer"], 0, "Poplar"),
        ([*OWN, "poplar.integrations.ddp"], 1, "DDP"),
        ([*OWN, "poplar.integrations.fsdp2"], 0, "FSDP2"),
    ],
)
def test_the_engine_is_known_by_what_the_job_has_imported(
    tmp_path, monkeypatch, imported, backwards, engine
):
    watching = recorder.Recorder(str(tmp_path))
    distributed = SimpleNamespace(get_world_size=lambda: 2)
    watching._torch = SimpleNamespace(distributed=distributed)
    watching._knows_poplar = "poplar.optimizer" in imported
    watching._closed.append(recorder._Step(1, 0.0))
    watching._closed[0].calls["backward"] = backwards
    monkeypatch.setattr(recorder, "sys", SimpleNamespace(modules=imported))
    assert watching._about(0)["engine"] == engine


def test_samples_are_the_length_of_the_first_tensor(tmp_path):
    watching = recorder.Recorder(str(tmp_path))
    watching._torch = torch
    batch = {"name": "text", "x": torch.zeros(3, 2), "y": torch.zeros(5)}
    assert watching._samples(batch) == watching._samples([torch.tensor(1.0), batch]) == 3
    assert watching._samples("text") == watching._samples(None) == 0
    mapping_like = SimpleNamespace(values=torch.zeros(3, 2))
    iterator = iter([torch.zeros(3)])
    assert watching._samples(mapping_like) == watching._samples(iterator) == 0
    assert len(list(iterator)) == 1


def test_steps_without_an_update_keep_a_limited_number_of_marks(tmp_path):
    watching = recorder.Recorder(str(tmp_path))
    watching._torch, watching._clock = torch, recorder._HostClock()
    watching._step = recorder._Step(1, 0.0)
    draw = watching._next(lambda loader: torch.zeros(2))
    for number in range(recorder.MOST_WAITS + 5):
        draw(None)
        watching._add(f"all/{number}", float(number), float(number))
    assert len(watching._step.data) == len(watching._step.waits) == recorder.MOST_WAITS


def test_a_backward_in_which_others_wait_is_not_that_of_ddp_however_many_waits_there_were(tmp_path):
    watching = recorder.Recorder(str(tmp_path))
    watching._torch, watching._clock = torch, recorder._HostClock()
    watching._step = recorder._Step(1, 0.0)
    for number in range(recorder.MOST_WAITS):
        watching._add(f"all/{number}", float(number), float(number))
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda _: watching._add("all/last", 1e9, 1e9))
    watching._backward(torch.autograd.backward)(x.sum())
    assert watching._step.calls["backward"] == 0


def test_a_backward_of_an_iterator_gets_all_losses(tmp_path):
    watching = recorder.Recorder(str(tmp_path))
    watching._torch = torch
    x = torch.ones(2, requires_grad=True)
    watching._backward(torch.autograd.backward)(loss for loss in (x[0] * 2, x[1] * 3))
    assert x.grad.tolist() == [2.0, 3.0]


def test_another_version_of_poplar_ends_the_recording_and_not_the_job(
    tmp_path, monkeypatch, capsys
):
    watching = recorder.Recorder(str(tmp_path))
    watching._torch = torch
    monkeypatch.setitem(sys.modules, "poplar.optimizer", SimpleNamespace())
    watching._begin_work()
    watching._begin_work()
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    watching._end_update(None)
    assert watching._step is None
    assert capsys.readouterr().err.count("recording ends: AttributeError") == 1


def test_a_process_that_only_asked_for_torch_is_recorded_when_it_imports_torch(tmp_path):
    folder = tmp_path / "torch"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    program = f"""
import importlib.util, sys
spec = importlib.util.spec_from_file_location("recorder", {recorder.__file__!r})
recorder = importlib.util.module_from_spec(spec)
spec.loader.exec_module(recorder)
recorder.Recorder.wrap = lambda self, torch: setattr(torch, "wrapped", True)
recorder.install({str(tmp_path)!r})
assert importlib.util.find_spec("torch") is not None  # as Transformers does
import torch
assert torch.wrapped
"""
    command = [sys.executable, "-S", "-c", program]
    subprocess.run(command, check=True, env={"PYTHONPATH": str(tmp_path)})
