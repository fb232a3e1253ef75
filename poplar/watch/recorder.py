"""Records the steps of one rank of a watched job. Loaded by `inject/sitecustomize.py` by its path.

After the job has imported torch, the recorder wraps what every engine calls: the collectives of a
process group and `Work.wait`, `torch.autograd.backward`, `Optimizer.step` and the iterator of a
`DataLoader`. It records from the end of the first optimizer step in an initialized process group.
Times on a CUDA device are events, read when the device has passed them; the host never waits.

A file `rank-N.jsonl` has a header and one line per step: the fields of `RankRecord` and of
`StepRecord` in `records`, with times on the clock of the host. A file that has become large starts
again, so a long job needs little space.
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
from collections.abc import Mapping
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


def install(folder: str) -> None:
    """Record this process into `folder` once it has imported torch and has a process group."""
    sys.meta_path.insert(0, _AfterTorch(folder))


class _AfterTorch(MetaPathFinder):
    """Finds nothing; makes the import of torch wrap torch when it is done."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._is_searching = False

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != "torch" or self._is_searching:
            return None
        self._is_searching = True
        try:
            spec: Any = find_spec("torch")
        finally:
            self._is_searching = False
        if spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module

        def load_and_wrap(module: Any) -> None:
            load(module)
            try:
                # Not before, because others may only ask whether torch is installed.
                sys.meta_path.remove(self)
                Recorder(self._folder).wrap(module)
            except Exception as error:  # the job runs without being watched
                print(f"poplar watch: this process is not recorded: {error!r}", file=sys.stderr)

        spec.loader.exec_module = load_and_wrap
        return spec


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
    """Marks are events of the current stream, converted to the clock of the host."""

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
        # FSDP2 issues collectives on streams of its own, for whose events the compute waits.
        on_events = self._timed("event", lambda stream, *_: stream == torch.cuda.current_stream())
        self._replace(torch.cuda.Stream, "wait_event", on_events)
        # DDP broadcasts buffers before a forward, in C++.
        self._replace(torch.distributed, "_broadcast_coalesced", self._timed("buffers"))
        self._replace(torch.autograd, "backward", self._backward)
        self._replace(loader._BaseDataLoaderIter, "__next__", self._next)
        optimizer = torch.optim.Optimizer
        hooks = optimizer.profile_hook_step  # torch applies it to the `step` of every optimizer
        optimizer.profile_hook_step = staticmethod(lambda step: self._update(hooks(step)))

    def _replace(self, owner: Any, name: str, wrapper: Any) -> None:
        wrapped = getattr(owner, name)
        setattr(owner, name, functools.wraps(wrapped)(wrapper(wrapped)))

    # What is called instead of torch's functions.

    def _collective(self, method: Any) -> Any:
        def call(group: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._records():
                return method(group, *args, **kwargs)
            key, issued = self._next_key(group.group_name), self._clock.mark()
            work = method(group, *args, **kwargs)
            if work is None:  # it is complete, or the stream waits for it
                self._add(key, issued, issued)
            else:
                if len(self._issued) > MOST_WAITS:
                    self._issued.clear()  # works that nobody has waited for
                self._issued[id(work)] = key, issued
            return work

        return call

    def _wait(self, method: Any) -> Any:
        def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._records():
                return method(work, *args, **kwargs)
            begin = self._clock.mark()
            try:
                return method(work, *args, **kwargs)
            finally:
                key, issued = self._issued.pop(id(work), ("", begin))
                self._add(key, issued, begin)

        return wait

    def _timed(self, name: str, waits: Any = lambda *_: True) -> Any:
        """A wrapper of calls that wait until they return, if `waits` of their arguments is true."""

        def wrapper(function: Any) -> Any:
            def call(*args: Any, **kwargs: Any) -> Any:
                if not self._records() or not waits(*args):
                    return function(*args, **kwargs)
                begin = self._clock.mark()
                result = function(*args, **kwargs)
                self._add(self._next_key(name), begin, begin)
                return result

            return call

        return wrapper

    def _backward(self, function: Any) -> Any:
        """DDP waits in C++ at the end of a backward: from the last gradient until it returns."""

        def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            self._begin_work()
            several = isinstance(tensors, (list, tuple))  # an iterator would lose its first one
            root = next(iter(tensors), None) if several else tensors
            node = getattr(root, "grad_fn", None)
            if node is None or self._in_backward or not self._records():
                return function(tensors, *args, **kwargs)
            computed: list[Any] = []
            queue = self._torch.autograd.Variable._execution_engine.queue_callback

            def before(*_: Any) -> None:  # the first callback runs before those of the engine
                queue(lambda: computed.append(self._clock.mark()))

            hook, step = node.register_prehook(before), self._step
            waits, self._in_backward = step.waited, True  # checkpointing nests backwards
            try:
                return function(tensors, *args, **kwargs)
            finally:
                self._in_backward = False
                hook.remove()
                if computed and step.waited == waits:
                    self._add(self._next_key("backward"), computed[0], computed[0])

        return backward

    def _next(self, method: Any) -> Any:
        def next_batch(loader: Any) -> Any:
            self._begin_work()
            if not self._records():
                return method(loader)
            step, begin = self._step, self._clock.mark()
            batch = method(loader)
            if len(step.data) < MOST_WAITS:
                step.data.append((begin, self._clock.mark()))
                step.samples += self._samples(batch)
            return batch

        return next_batch

    def _update(self, method: Any) -> Any:
        @functools.wraps(method)
        def step(*args: Any, **kwargs: Any) -> Any:
            begin = self._clock.mark() if self._records() else None
            self._depth += 1
            try:
                return method(*args, **kwargs)
            finally:
                self._depth -= 1
                if not self._depth:
                    self._end_update(begin)

        return step

    def _poplar_wait(self, method: Any) -> Any:
        """Poplar's own transports trace their waits; the i-th of a name is the same everywhere."""

        def add(trace: Any, kind: str, what: str, start: Any) -> None:
            method(trace, kind, what, start)
            if kind == "wait" and isinstance(start, float) and self._records():
                self._add(self._next_key(what), start, start)

        return add

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
        """Record a wait until now; waits inside it were part of it."""
        waits = self._step.waits
        if not self._clock.is_exposed():
            return
        self._step.waited += 1
        if len(waits) >= MOST_WAITS:
            return
        if isinstance(begin, float):
            while waits and waits[-1][2] >= begin:
                waits.pop()
        waits.append((key, issued, begin, self._clock.mark()))

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
        distributed = self._torch.distributed
        if self._has_failed:
            return
        if self._clock is None:
            if not distributed.is_initialized() or self._is_capturing():
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
        try:
            if not self._knows_poplar and "poplar.optimizer" in sys.modules:
                self._knows_poplar = True
                self._wrap_poplar()
            if self._stepped and self._records():
                self._stepped = False
                self._closed.append(self._step)
                self._step = _Step(self._step.number + 1, self._step.end)
                self._write()
        except Exception as error:
            print(f"poplar watch: recording ends: {error!r}", file=sys.stderr)
            self._step, self._has_failed = None, True

    def _wrap_poplar(self) -> None:
        """Wrap what Poplar calls; the version of the job may be another one."""
        optimizer: Any = sys.modules["poplar.optimizer"]
        self._replace(optimizer.HeteroZeroOptimizer, "step", self._update)
        self._replace(sys.modules["poplar.system.trace"].Trace, "add", self._poplar_wait)

    def _write(self) -> None:
        """Write the steps that the device has finished."""
        if self._file is None:
            rank = self._torch.distributed.get_rank()
            self._header = json.dumps(self._about(rank)) + "\n"
            self._file = open(os.path.join(self._folder, f"rank-{rank}.jsonl"), "w")  # noqa: SIM115
            self._written = self._file.write(self._header)
            atexit.register(self._file.close)
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
