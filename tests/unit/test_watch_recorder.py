"""The recorder of `poplar watch`: marks on a device, keys of collectives, what torch still has."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch

from poplar import HeteroZeroOptimizer
from poplar.comm.host_memory.rendezvous import Rendezvous
from poplar.comm.point_to_point import Exchange
from poplar.system.trace import Trace
from poplar.watch import recorder
from poplar.watch.records import read_endings


def watching_on_the_host(tmp_path):
    """A recorder that has begun a step, on the clock of the host."""
    watching = recorder.Recorder(str(tmp_path))
    watching._torch, watching._clock = torch, recorder._HostClock()
    watching._step = recorder._Step(1, 0.0)
    return watching


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
    cuda.stream = "communication"
    assert not watching._clock.is_exposed()


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


@pytest.fixture
def wrapped_poplar(monkeypatch):
    """What the recorder wraps of Poplar is restored."""
    for owner, name in (
        (HeteroZeroOptimizer, "step"),
        (Rendezvous, "_traced_wait"),
        (Exchange, "_wait_for_peers"),
        (Trace, "add"),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name))


@pytest.mark.usefixtures("wrapped_poplar")
@pytest.mark.parametrize("queued", [0.0, 1.0])
def test_a_wait_of_poplar_on_the_host_counts_as_far_as_the_device_has_no_work(
    tmp_path, monkeypatch, queued
):
    cuda, watching = watching_on_a_device(tmp_path, monkeypatch)
    watching._begin_work()  # wraps Poplar
    watching._add("event/0", watching._clock.mark(), watching._clock.mark())

    def wait(*_):
        cuda.now += 0.2
        cuda.queued = max(0.0, cuda.queued - 0.2)

    rendezvous, exchange = object.__new__(Rendezvous), object.__new__(Exchange)
    rendezvous.group = exchange._group = SimpleNamespace(
        trace=Trace(), timeout=timedelta(seconds=1)
    )
    rendezvous._wait = wait
    message = SimpleNamespace(wait=watching._wrapped(wait, watching._wait))
    exchange._works, exchange._what, exchange._before_wait = [(message, 1)], "sizes", None
    cuda.now, cuda.queued = 3.0, queued
    rendezvous._traced_wait(None, 0, "loss")
    exchange.wait()
    rendezvous._traced_wait(None, 1, "loss")
    waits = json.loads(watching._step.line(watching._clock))["waits"]
    idle = 0.0 if queued else 0.2
    assert [key for key, *_ in waits] == ["event/0", "loss/0", "sizes/0", "loss/1"]
    assert [round(end - begin, 6) for _, _, begin, end in waits] == [0.0, idle, idle, idle]
    assert [issued for _, issued, *_ in waits[1:]] == [3.0, 3.2, 3.4]  # when the host gets there


def test_nothing_is_recorded_while_a_graph_is_captured(tmp_path):
    cuda = FakeCuda()
    distributed = SimpleNamespace(is_initialized=lambda: True)
    watching = recorder.Recorder(str(tmp_path))
    watching._torch = SimpleNamespace(cuda=cuda, distributed=distributed)
    step = watching._wrapped(lambda: None, watching._update)
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
    watching = watching_on_the_host(tmp_path)
    draw = watching._wrapped(lambda loader: torch.zeros(2), watching._next)
    for number in range(recorder.MOST_WAITS + 5):
        draw(None)
        watching._add(f"all/{number}", float(number), float(number))
    assert len(watching._step.data) == len(watching._step.waits) == recorder.MOST_WAITS


def test_a_backward_in_which_others_wait_is_not_that_of_ddp_however_many_waits_there_were(tmp_path):
    watching = watching_on_the_host(tmp_path)
    for number in range(recorder.MOST_WAITS):
        watching._add(f"all/{number}", float(number), float(number))
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda _: watching._add("all/last", 1e9, 1e9))
    watching._wrapped(torch.autograd.backward, watching._backward)(x.sum())
    assert watching._step.calls["backward"] == 0


def test_a_backward_of_an_iterator_gets_all_losses(tmp_path):
    watching = recorder.Recorder(str(tmp_path))
    watching._torch = torch
    x = torch.ones(2, requires_grad=True)
    backward = watching._wrapped(torch.autograd.backward, watching._backward)
    backward(loss for loss in (x[0] * 2, x[1] * 3))
    assert x.grad.tolist() == [2.0, 3.0]


def test_another_version_of_poplar_ends_the_recording_and_not_the_job(
    tmp_path, monkeypatch, capsys
):
    watching = recorder.Recorder(str(tmp_path))
    watching._torch = torch
    monkeypatch.setitem(sys.modules, "poplar.optimizer", SimpleNamespace())
    draw = watching._wrapped(lambda loader: 7, watching._next)
    assert (draw(None), draw(None)) == (7, 7)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    watching._wrapped(lambda: None, watching._update)()
    assert watching._step is None
    assert capsys.readouterr().err.count("recording ends: AttributeError") == 1


def broken(*_):
    raise RuntimeError("broken")


@pytest.mark.parametrize(
    "name", ["collective", "wait", "event", "buffers", "next", "update", "exchange"]
)
def test_an_error_of_the_recorder_reaches_no_call_of_the_job(tmp_path, monkeypatch, name):
    _, watching = watching_on_a_device(tmp_path, monkeypatch)
    watching._clock.mark = broken
    around = getattr(watching, f"_{name}")
    argument = "compute" if name == "event" else SimpleNamespace(group_name="0", _what="sizes")
    call = watching._wrapped(lambda _: "result", around)
    assert [call(argument), call(argument)] == ["result", "result"]
    assert read_endings(tmp_path) == ("on rank 0, recording ends: RuntimeError('broken')",)


def test_an_error_after_a_call_leaves_the_result_or_the_error_of_the_job(tmp_path, monkeypatch):
    def fail(_):
        raise KeyError("of the job")

    for job in (lambda _: "result", fail):
        _, watching = watching_on_a_device(tmp_path, monkeypatch)
        watching._clock.is_exposed = broken
        wait = watching._wrapped(job, watching._wait)
        if job is fail:
            with pytest.raises(KeyError, match="of the job"):
                wait(None)
        else:
            assert wait(None) == "result"
        assert watching._has_failed


def test_an_error_at_the_end_of_a_backward_reaches_no_job(tmp_path):
    watching = watching_on_the_host(tmp_path)
    watching._clock.mark = broken
    x = torch.ones(2, requires_grad=True)
    watching._wrapped(torch.autograd.backward, watching._backward)(x.sum())
    assert x.grad.tolist() == [1.0, 1.0]
    (ending,) = read_endings(tmp_path)  # before a process group, a process has no rank
    assert f"in process {os.getpid()} on " in ending


def test_a_record_and_a_terminal_that_cannot_be_written_do_not_end_the_job(tmp_path, monkeypatch):
    watching = recorder.Recorder(str(tmp_path / "missing"))
    monkeypatch.setattr(recorder, "print", broken, raising=False)
    assert watching.attempt(broken) is None


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
