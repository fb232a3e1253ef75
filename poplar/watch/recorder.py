"""Records the steps of one rank of a watched job. Loaded by `inject/sitecustomize.py` by its path.

After the job has imported torch, the recorder wraps what every engine calls: the collectives of a
process group and `Work.wait`, `torch.autograd.backward`, `Optimizer.step` and the iterator of a
`DataLoader`. It records from the end of the first optimizer step in an initialized process group.
Times on a CUDA device are events, read when the device has passed them; no host waits for them.

A file `rank-N.jsonl` has a header and one line per step: the fields of `RankRecord` and of
`StepRecord` in `records`, with times on the clock of the host. A file that has become large starts
again, so a long job needs little space.

The recorder runs inside the functions of the job, always through `Recorder.attempt`: its errors end
the recording and not the job, and are written to a file `ended-HOST-PROCESS.txt`.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Mapping
from contextlib import suppress
from importlib.abc import MetaPathFinder
from importlib.util import find_spec
from itertools import islice
from typing import Any

COLLECTIVES = (
    *("allreduce", "allreduce_coalesced", "broadcast", "reduce", "barrier", "gather", "scatter"),
    *("allgather", "_allgather_base", "allgather_coalesced", "allgather_into_tensor_coalesced"),
    *("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced"),
    *("alltoall", "alltoall_base", "all_gather_single", "all_gather_single_coalesced"),
    *("reduce_scatter_single", "reduce_scatter_single_coalesced", "all_to_all_single"),
)
"""Methods of `ProcessGroup`; torch versions have different ones."""
MOST_WAITS = 2000
"""Waits and batches of a step that are recorded: an evaluation of hours is part of a step."""
MOST_PARTS = 16
"""Members of a container of a batch in which a tensor is looked for."""
ENGINES = {
    "poplar.integrations.ddp": "DDP",
    "poplar.integrations.fsdp2": "FSDP2",
    "poplar.optimizer": "Poplar",
    "deepspeed": "DeepSpeed",
    "transformers.trainer": "Trainer",
}
"""The engine of a job by a module that it has imported. The first one counts: `UnequalPasses` of
DDP and FSDP2 imports Poplar's optimizer, too."""
FLUSH_SECONDS = 0.5
MOST_BYTES = 2**25
RELATE_SECONDS = 1.0
"""Between two comparisons of a device's timer with the host's clock: their rates differ by some
10 microseconds per second."""
LONGEST_PROBE = 5e-4
"""Seconds that a comparison may take, which is also its error."""

_Around = Generator[None, Any, None]
"""What is done around a call: until its `yield`, before the call; then, with its result, after it.
It is closed there if the call raises."""


def install(folder: str) -> None:
    """Record this process into `folder` once it has imported torch and has a process group."""
    sys.meta_path.insert(0, _AfterTorch(Recorder(folder)))


class _AfterTorch(MetaPathFinder):
    """Finds nothing; makes the import of torch wrap torch when it is done."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._is_searching = False

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != "torch" or self._is_searching:
            return None
        self._is_searching = True
        try:
            spec: Any = find_spec("torch")
        finally:
            self._is_searching = False
        if spec is not None and spec.loader is not None:
            self._recorder.attempt(self._extend, spec.loader)
        return spec

    def _extend(self, loader: Any) -> None:
        """Make the loader wrap the module that it has loaded."""
        load = loader.exec_module

        def load_and_wrap(module: Any) -> None:
            load(module)
            self._recorder.attempt(self._wrap, module)

        loader.exec_module = load_and_wrap

    def _wrap(self, module: Any) -> None:
        # Not before, because others may only ask whether torch is installed.
        sys.meta_path.remove(self)
        self._recorder.wrap(module)


class _HostClock:
    """Marks are seconds of the clock that the processes of a host share."""

    mark = staticmethod(time.perf_counter)

    def is_exposed(self) -> bool:
        """Whether what the calling thread waits for now keeps it from computing."""
        return True

    def is_passed(self, mark: Any) -> bool:
        return True

    def seconds(self, mark: Any) -> float:
        return float(mark)

    def move_to(self, mark: Any) -> None:
        """Use this mark as the origin of later ones."""

    def relate(self) -> None:
        """Nothing: it is the clock of the host."""


class _DeviceClock:
    """Marks are events of the current stream, converted to the clock of the host.

    The time of a mark of the host itself is a mark, too.
    """

    def __init__(self, cuda: Any) -> None:
        self._cuda, self._compute, self._idle = cuda, cuda.current_stream(), cuda.Stream()
        self._origin = cuda.Event(enable_timing=True)
        self._origin.record()
        self._origin.synchronize()  # once
        self._seconds = self._related = time.perf_counter()

    def is_exposed(self) -> bool:
        """Streams of their own wait for collectives while the compute stream goes on."""
        return bool(self._cuda.current_stream() == self._compute)

    def mark(self) -> Any:
        event = self._cuda.Event(enable_timing=True)
        event.record()
        return event

    def is_passed(self, mark: Any) -> bool:
        return bool(mark.query())

    def seconds(self, mark: Any) -> float:
        if isinstance(mark, float):
            return mark
        return self._seconds + float(self._origin.elapsed_time(mark)) / 1e3

    def move_to(self, mark: Any) -> None:
        """Use this mark as the origin of later ones: elapsed times are of 24 bits."""
        self._seconds, self._origin = self.seconds(mark), mark

    def relate(self) -> None:
        """Compare the timer of the device with the clock of the host, from time to time.

        An event of a stream without work passes at once, so the host does not wait for the job.
        """
        begin = time.perf_counter()
        if begin - self._related < RELATE_SECONDS:
            return
        self._related = begin
        event = self._cuda.Event(enable_timing=True)
        event.record(self._idle)
        while not event.query() and time.perf_counter() - begin < LONGEST_PROBE:
            pass
        end = time.perf_counter()
        if end - begin < LONGEST_PROBE:  # else the device or this thread had something else to do
            passed = float(self._origin.elapsed_time(event)) / 1e3
            self._seconds = (begin + end) / 2 - passed


class _Step:
    """The marks of one step."""

    def __init__(self, number: int, begin: Any) -> None:
        self.number, self.begin, self.end = number, begin, begin
        self.samples = 0
        self.data: list[tuple[Any, Any]] = []
        self.optimizer: list[tuple[Any, Any]] = []
        self.waits: list[tuple[str, Any, Any, Any]] = []
        self.waited = 0
        """Waits, also those beyond the most that are kept."""
        self.calls: Counter[str] = Counter()

    def line(self, clock: Any) -> str:
        """The step as JSON; all marks have been passed."""

        def seconds(mark: Any) -> float:
            return round(float(clock.seconds(mark)), 6)

        waits: Any = [(self._key(key), *map(seconds, marks)) for key, *marks in self.waits]
        updates: Any = [tuple(map(seconds, marks)) for marks in self.optimizer]
        waited = sum(end - begin for _, _, begin, end in waits if _within(begin, updates))
        values = {
            "number": self.number,
            "begin": seconds(self.begin),
            "end": seconds(self.end),
            "samples": self.samples,
            "batches": len(self.data),
            "data": round(sum(seconds(end) - seconds(begin) for begin, end in self.data), 6),
            "optimizer": round(sum(end - begin for begin, end in updates) - waited, 6),
            "waits": waits,
        }
        return json.dumps(values, separators=(",", ":")) + "\n"

    def _key(self, key: str) -> str:
        """Ranks may have different numbers of passes, of which the last ones meet."""
        name, _, number = key.rpartition("/")
        return f"{name}/{int(number) - self.calls[name]}" if name == "backward" else key


def _within(time: float, spans: list[tuple[Any, ...]]) -> bool:
    return any(begin <= time < end for begin, end in spans)


class Recorder:
    """Wraps torch's functions and writes the steps of this rank."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._stop()
        os.register_at_fork(after_in_child=self._stop)  # a worker of a DataLoader is no rank

    def _stop(self) -> None:
        """Record nothing until the next optimizer step."""
        self._clock: Any = None
        self._step: Any = None
        self._file: Any = None
        self._stepped, self._depth, self._written, self._flushed = False, 0, 0, 0.0
        self._issued: dict[int, tuple[str, Any]] = {}
        self._closed: deque[_Step] = deque()
        self._main = threading.get_ident()
        self._in_backward = self._knows_poplar = self._has_failed = False

    def attempt(self, call: Callable[..., Any], *args: Any) -> Any:
        """Call code of the recorder. An error ends the recording and not the job; returns None."""
        try:
            return call(*args)
        # All that the recorder does inside the job goes through here, so this is the one place that
        # catches every error: another version of torch, a device that fails or a full disk must not
        # end a job only because it is watched.
        except Exception as error:
            if not self._has_failed:  # else it has ended before, or its report has failed
                self._has_failed, self._step = True, None
                self._closed.clear()
                self.attempt(self._report, error)

    def _report(self, error: Exception) -> None:
        """Say why the recording ends: to whoever reads the record, and on stderr."""
        host, process = os.uname().nodename, os.getpid()
        rank = self.attempt(lambda: self._torch.distributed.get_rank())
        where = f"in process {process} on {host}" if rank is None else f"on rank {rank}"
        text = f"{where}, recording ends: {error!r}\n"
        self.attempt(lambda: print(f"poplar watch: {text}", end="", file=sys.stderr))
        path = os.path.join(self._folder, f"ended-{host}-{process}.txt")
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)

    def wrap(self, torch: Any) -> None:
        """Wrap what the engines call."""
        self._torch = torch
        if not torch.distributed.is_available():
            return
        c10d, loader = torch._C._distributed_c10d, torch.utils.data.dataloader
        for name in COLLECTIVES:
            if hasattr(c10d.ProcessGroup, name):
                self._replace(c10d.ProcessGroup, name, self._collective)
        self._replace(c10d.Work, "wait", self._wait)
        self._replace(torch.cuda.Stream, "wait_event", self._event)
        self._replace(torch.distributed, "_broadcast_coalesced", self._buffers)
        self._replace(torch.autograd, "backward", self._backward)
        self._replace(loader._BaseDataLoaderIter, "__next__", self._next)
        optimizer = torch.optim.Optimizer
        hooks = optimizer.profile_hook_step  # torch applies it to the `step` of every optimizer
        optimizer.profile_hook_step = staticmethod(
            lambda step: self._wrapped(hooks(step), self._update)
        )

    def _replace(self, owner: Any, name: str, around: Callable[..., _Around]) -> None:
        setattr(owner, name, self._wrapped(getattr(owner, name), around))

    def _wrapped(self, function: Any, around: Callable[..., _Around]) -> Any:
        """`function` with what `around` of its arguments does."""

        def begin(args: Any, kwargs: Any) -> _Around:
            recording = around(*args, **kwargs)
            next(recording, None)
            return recording

        def end(recording: _Around, result: Any) -> None:
            with suppress(StopIteration):
                recording.send(result)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            recording = None if self._has_failed else self.attempt(begin, args, kwargs)
            if recording is None:
                return function(*args, **kwargs)
            try:
                result = function(*args, **kwargs)
            except BaseException:  # it is the job's
                self.attempt(recording.close)
                raise
            self.attempt(end, recording, result)
            return result

        return call

    # What is done around torch's functions.

    def _collective(self, group: Any, *_: Any, **__: Any) -> _Around:
        if not self._records():
            return
        key, issued = self._next_key(group.group_name), self._clock.mark()
        work = yield
        if work is None:  # it is complete, or the stream waits for it
            self._add(key, issued, issued)
        else:
            if len(self._issued) > MOST_WAITS:
                self._issued.clear()  # works that nobody has waited for
            self._issued[id(work)] = key, issued

    def _wait(self, work: Any, *_: Any, **__: Any) -> _Around:
        if not self._records():
            return
        begin = self._clock.mark()
        try:
            yield
        finally:
            key, issued = self._issued.pop(id(work), ("", begin))
            self._add(key, issued, begin)

    def _event(self, stream: Any, *_: Any, **__: Any) -> _Around:
        """FSDP2 issues collectives on streams of its own, for whose events the compute waits."""
        if self._records() and stream == self._torch.cuda.current_stream():
            yield from self._call("event")

    def _buffers(self, *_: Any, **__: Any) -> _Around:
        """DDP broadcasts buffers before a forward, in C++."""
        yield from self._call("buffers")

    def _call(self, name: str) -> _Around:
        """A call that waits until it returns; the i-th of a name is the same on all ranks."""
        if self._records():
            begin = self._clock.mark()
            yield
            self._add(self._next_key(name), begin, begin)

    def _backward(self, tensors: Any, *_: Any, **__: Any) -> _Around:
        """DDP waits in C++ at the end of a backward: from the last gradient until it returns."""
        self._begin_work()
        several = isinstance(tensors, (list, tuple))  # an iterator would lose its first one
        root = next(iter(tensors), None) if several else tensors
        node = getattr(root, "grad_fn", None)
        if node is None or self._in_backward or not self._records():
            return
        computed: list[Any] = []
        queue = self._torch.autograd.Variable._execution_engine.queue_callback

        def mark() -> None:
            self.attempt(lambda: computed.append(self._clock.mark()))

        def before(*_: Any) -> None:  # the first callback runs before those of the engine
            self.attempt(queue, mark)

        hook, step = node.register_prehook(before), self._step
        waits, self._in_backward = step.waited, True  # checkpointing nests backwards
        try:
            yield
        finally:
            self._in_backward = False
            hook.remove()
            if computed and step.waited == waits:
                self._add(self._next_key("backward"), computed[0], computed[0])

    def _next(self, *_: Any, **__: Any) -> _Around:
        self._begin_work()
        if not self._records():
            return
        step, begin = self._step, self._clock.mark()
        batch = yield
        if len(step.data) < MOST_WAITS:
            step.data.append((begin, self._clock.mark()))
            step.samples += self._samples(batch)

    def _update(self, *_: Any, **__: Any) -> _Around:
        begin = self._clock.mark() if self._records() else None
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if not self._depth:
                self._end_update(begin)

    def _in_memory(self, _rendezvous: Any, _event: Any, _collective: Any, what: str) -> _Around:
        yield from self._poplar_wait(what)

    def _exchange(self, exchange: Any) -> _Around:
        yield from self._poplar_wait(exchange._what)

    def _poplar_wait(self, what: str) -> _Around:
        """Poplar's own transports wait on the host; the i-th wait of a name is the same everywhere.

        Ranks meet there by the clock of the host. A device does not compute between two marks
        around the wait, which are the same if it still has work.
        """
        if self._records():
            waits, issued, begin = self._step.waits, time.perf_counter(), self._clock.mark()
            outside = len(waits)
            yield
            del waits[outside:]  # waits inside it were part of it
            self._add(self._next_key(what), issued, begin)

    # Steps.

    def _records(self) -> bool:
        """Whether the calling thread trains: the main thread, or one of autograd.

        Nothing is recorded while a CUDA graph is captured: a query of an event would end that.
        """
        if self._step is None or self._is_capturing():
            return False
        thread = threading.get_ident()
        return thread == self._main or thread not in threading._active  # type: ignore[attr-defined]

    def _is_capturing(self) -> bool:
        cuda = self._torch.cuda
        return bool(cuda.is_initialized() and cuda.is_current_stream_capturing())

    def _next_key(self, name: str) -> str:
        """The i-th call of a name in a step is the same collective on all ranks."""
        number = self._step.calls[name]
        self._step.calls[name] += 1
        return f"{name}/{number}"

    def _add(self, key: str, issued: Any, begin: Any) -> None:
        """Record a wait until now."""
        if not self._clock.is_exposed():
            return
        self._step.waited += 1
        if len(self._step.waits) < MOST_WAITS:
            self._step.waits.append((key, issued, begin, self._clock.mark()))

    def _samples(self, batch: Any) -> int:
        """The length of the first tensor; 0: unknown."""
        if isinstance(batch, self._torch.Tensor):
            return batch.shape[0] if batch.dim() and not batch.is_nested else 0
        # Nothing else is iterated: it may be large, or be used up by it.
        parts = batch.values() if isinstance(batch, Mapping) else batch
        if isinstance(batch, (Mapping, list, tuple)):
            return next(filter(None, map(self._samples, islice(parts, MOST_PARTS))), 0)
        return 0

    def _end_update(self, begin: Any) -> None:
        """An optimizer has stepped; others may follow until the next batch or backward."""
        if self._clock is None:
            if not self._torch.distributed.is_initialized() or self._is_capturing():
                return
            cuda = self._torch.cuda
            self._clock = _DeviceClock(cuda) if cuda.is_initialized() else _HostClock()
            self._main = threading.get_ident()
            self._step = _Step(1, self._clock.mark())
        elif self._step is not None and begin is not None:
            now = self._clock.mark()
            self._step.optimizer.append((begin, now))
            self._step.end = now
            self._stepped = True

    def _begin_work(self) -> None:
        """A batch is asked for, or a backward begins: the step before is over if it has updated."""
        if not self._knows_poplar and "poplar.optimizer" in sys.modules:
            self._knows_poplar = True
            self._wrap_poplar()
        if self._stepped and self._records():
            self._stepped = False
            self._closed.append(self._step)
            self._step = _Step(self._step.number + 1, self._step.end)
            self._write()

    def _wrap_poplar(self) -> None:
        """Wrap what Poplar calls; the version of the job may be another one."""
        optimizer: Any = sys.modules["poplar.optimizer"]
        memory: Any = sys.modules["poplar.comm.host_memory.rendezvous"]
        exchanges: Any = sys.modules["poplar.comm.point_to_point"]
        self._replace(optimizer.HeteroZeroOptimizer, "step", self._update)
        self._replace(memory.Rendezvous, "_traced_wait", self._in_memory)
        self._replace(exchanges.Exchange, "_wait_for_peers", self._exchange)

    def _write(self) -> None:
        """Write the steps that the device has finished."""
        if self._file is None:
            rank = self._torch.distributed.get_rank()
            self._header = json.dumps(self._about(rank)) + "\n"
            self._file = open(os.path.join(self._folder, f"rank-{rank}.jsonl"), "w")  # noqa: SIM115
            self._written = self._file.write(self._header)
            atexit.register(self.attempt, self._file.close)
        elif self._written > MOST_BYTES:
            self._file.seek(0)
            self._file.truncate()
            self._written = self._file.write(self._header)
        while self._closed and self._clock.is_passed(self._closed[0].end):
            step = self._closed.popleft()
            self._written += self._file.write(step.line(self._clock))
            self._clock.move_to(step.end)
        self._clock.relate()
        if time.perf_counter() - self._flushed > FLUSH_SECONDS:
            self._file.flush()
            self._flushed = time.perf_counter()

    def _about(self, rank: int) -> dict[str, Any]:
        modules, usual = sys.modules, "DDP"
        if "torch.distributed.fsdp" in modules and not self._closed[0].calls["backward"]:
            usual = "FSDP2"
        engine = next((name for module, name in ENGINES.items() if module in modules), usual)
        cuda = isinstance(self._clock, _DeviceClock)
        return {
            "rank": rank,
            "world_size": self._torch.distributed.get_world_size(),
            "host": os.uname().nodename,
            "clock": _boot_id(),
            "engine": engine,
            "device": self._torch.cuda.get_device_name() if cuda else "CPU",
        }


def _boot_id() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return os.uname().nodename
