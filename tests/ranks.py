"""A persistent pool of worker processes for multi-rank tests; no call can hang.

A `Pool` starts its workers once and calls module-level functions on all of them. Every call has a
deadline. An exception on any rank is raised in the test with its rank and traceback. A rank without
an answer at the deadline is reported with the stacks of all its threads, the workers are killed,
and the next call starts new ones. A call with fewer ranks runs on the first `ranks` workers; inside
the called function `group()` is the process group of exactly the participating ranks, and a failed
call never leaves a used process group to the next one.

`one_off` starts separate ranks, for tests that kill or stop them. They are forks, and start in a
tenth of a second: see `fork_server`. Workers are forks too, but the first one of tests/distributed
is started by `spawn`: it has another hash seed than its peers, as the ranks of a launcher have.

Gloo on CPU; NCCL with one device per rank if there are CUDA devices (see `device()`).
`POPLAR_TEST_BACKEND=gloo|nccl` overrides this, and `POPLAR_TEST_DEVICE=cuda` puts gloo's ranks on
the CUDA devices too, several on one if needed.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any
from unittest import mock

import fork_server
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from poplar.profiler import timing, trial_runs
from poplar.zero import unit

WORLD = 4
"""Ranks in the pool; a call may use fewer."""

CALL_SECONDS = 240.0
"""Deadline of a call: far longer than any takes on a machine with other load."""

GRACE_SECONDS = 60.0
"""After one rank has failed, the other ranks have at most this long to finish or fail."""

GROUP_SECONDS = 600.0
"""Timeout of process groups: longer than deadlines, so that reports of a hang include stacks."""

SAMPLE_SECONDS = 0.01
"""Length of the shortest sample of the profiler on ranks: a tenth of the usual."""


@dataclass(frozen=True)
class Failure:
    """An exception on one rank, as values: its class may not exist in this process."""

    rank: int
    type: str
    """Name of the class, without its module."""
    bases: tuple[str, ...]
    """Full names of the class and its base classes."""
    message: str
    traceback: str

    @staticmethod
    def of(error: BaseException, rank: int | None = None) -> Failure:
        """Describe `error`; the rank defaults to this process's."""
        return Failure(
            rank=_Worker.rank if rank is None else rank,
            type=type(error).__name__,
            bases=tuple(_full_name(base) for base in type(error).__mro__),
            message=str(error),
            traceback="".join(traceback.format_exception(error)),
        )

    def is_a(self, base: type[BaseException]) -> bool:
        """Whether the exception was an instance of `base`."""
        return _full_name(base) in self.bases

    def __str__(self) -> str:
        return f"--- rank {self.rank}: {self.type}: {self.message}\n{self.traceback}"


@dataclass(frozen=True)
class Silent:
    """A rank that had not answered when the call ended, or whose process had exited."""

    rank: int
    exit_code: int | None
    """None while the process runs; negative: the signal that ended it."""
    stacks: str

    def __str__(self) -> str:
        what = "still running" if self.exit_code is None else f"exited, exit code {self.exit_code}"
        return f"--- rank {self.rank}: {what}\n{self.stacks}"


class RanksFailed(Exception):
    """Some ranks raised, did not answer by the deadline, or exited: all tracebacks and stacks."""

    def __init__(self, summary: str, failures: Sequence[Failure], silent: Sequence[Silent] = ()):
        self.failures = tuple(failures)
        self.silent = tuple(silent)
        super().__init__("\n".join([summary, *map(str, failures), *map(str, silent)]))


def _full_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


# In a worker process


class _Gloo(distributed_c10d.ProcessGroupGloo):
    """Gloo with one device for all groups of a process.

    torch makes a device for each group. Its thread wakes up a hundred times a second, and tests
    leave hundreds of groups in a worker, which took most of the time of all cores.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        options = self._Options()
        options._devices = [_gloo_device()]
        options._timeout = timeout
        super().__init__(store, rank, size, options)


@functools.cache
def _gloo_device() -> Any:
    return _Gloo.create_default_device()


class _Worker:
    """The state of a worker during a call."""

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None
    device: torch.device = torch.device("cpu")
    notes: Path | None = None


def rank() -> int:
    """This worker's rank, in the world and (sub-worlds are the first ranks) in `group()`."""
    return _Worker.rank


def size() -> int:
    """The number of ranks in the current call."""
    return _Worker.size


def group() -> dist.ProcessGroup:
    """The process group of the ranks in the current call."""
    if _Worker.group is None:
        raise RuntimeError("ranks.group() is for functions that a pool calls on its workers")
    return _Worker.group


def device() -> torch.device:
    """The device of this rank's tensors: its CUDA device under NCCL, otherwise the CPU."""
    return _Worker.device


def note(text: str) -> None:
    """Record what this rank is doing; shown if it does not answer by the deadline."""
    if _Worker.notes is not None:
        _Worker.notes.write_text(f"at: {text}\n")


@contextlib.contextmanager
def catching() -> Iterator[list[Failure]]:
    """Catch an exception on this rank and continue; the yielded list holds it afterwards."""
    caught: list[Failure] = []
    try:
        yield caught
    except Exception as error:
        caught.append(Failure.of(error))
        # The frames would keep tensors and process groups alive.
        traceback.clear_frames(error.__traceback__)


@dataclass(frozen=True)
class _Call:
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    ranks: int
    generation: int


def _backend() -> str:
    chosen = os.environ.get("POPLAR_TEST_BACKEND")
    if chosen:
        return chosen
    return "nccl" if torch.cuda.is_available() and torch.cuda.device_count() >= 2 else "gloo"


def _new_group(ranks: int, name: str) -> dist.ProcessGroup:
    """The group of the first ranks. Collective over all workers.

    torch names groups by their number, which earlier tests may have left unequal.
    """
    with mock.patch.object(distributed_c10d, "_process_group_name", return_value=name):
        return dist.new_group(list(range(ranks)), timeout=timedelta(seconds=GROUP_SECONDS))


@contextlib.contextmanager
def separate_group() -> Iterator[dist.ProcessGroup]:
    """A context with a new group of the ranks of this call, which may break it. Collective."""
    _separate_groups[size()] += 1
    name = mock.Mock(return_value=f"{size()} ranks, separate group {_separate_groups[size()]}")
    with mock.patch.object(distributed_c10d, "_process_group_name", name):
        group = dist.new_group(list(range(size())), use_local_synchronization=True)
    # A rank that destroys the group at once would close connections that others still make.
    dist.barrier(group)
    try:
        yield group
    finally:
        dist.destroy_process_group(group)  # its threads and descriptors


_separate_groups: Counter[int] = Counter()
"""By the number of ranks, which all make the same groups of that size."""


def _run_worker(
    own_rank: int, world_size: int, folder: str, backend: str, channel: Connection
) -> None:
    """A worker: join the process group, then answer calls until `channel` is closed."""
    stacks = open(Path(folder) / f"stacks-{own_rank}", "w")  # noqa: SIM115 (open as long as the process runs)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    # As in a program: workers of loaders would be new processes, which import torch for seconds.
    multiprocessing.set_start_method("fork", force=True)
    torch.set_num_threads(1)
    distributed_c10d.ProcessGroupGloo = _Gloo
    # Test models are tiny; otherwise all their blocks would form one unit.
    unit.MERGED_UNIT_BYTES = 0
    # Their passes take a millisecond and no quota stops them.
    timing.SHORTEST_SAMPLE_SECONDS = trial_runs.SHORTEST_SAMPLE_SECONDS = SAMPLE_SECONDS
    _Worker.rank = own_rank
    _Worker.notes = Path(folder) / f"note-{own_rank}"
    if backend == "nccl" or os.environ.get("POPLAR_TEST_DEVICE") == "cuda":
        _Worker.device = torch.device("cuda", own_rank % torch.cuda.device_count())
        torch.cuda.set_device(_Worker.device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if backend == "nccl" else "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=own_rank,
        world_size=world_size,
        timeout=timedelta(seconds=GROUP_SECONDS),
    )
    channel.send_bytes(pickle.dumps(None))

    imported = len(sys.modules)
    gc.freeze()
    groups: dict[tuple[int, int], dist.ProcessGroup] = {}
    while True:
        try:
            call: _Call | Failure = pickle.loads(channel.recv_bytes())
        except EOFError:
            os._exit(0)
        except Exception as error:  # a test module that cannot be imported here
            channel.send_bytes(pickle.dumps((False, Failure.of(error, own_rank))))
            continue
        answer: tuple[bool, Any]
        try:
            key = (call.generation, call.ranks)
            if key not in groups:
                groups[key] = _new_group(call.ranks, f"{call.generation} {call.ranks} ranks")
            _Worker.group, _Worker.size = groups[key], call.ranks
            torch.manual_seed(0)
            value = call.function(*call.args, **call.kwargs) if own_rank < call.ranks else None
            answer = (True, value)
            payload = pickle.dumps(answer)
        except BaseException as error:
            payload = pickle.dumps((False, Failure.of(error, own_rank)))
            traceback.clear_frames(error.__traceback__)
        answer = value = call = None  # type: ignore[assignment]
        gc.collect()
        # Modules are never freed: scanning their objects (300,000 after importing the first
        # optimizer) after every call took a large part of the tests' time.
        if imported != len(sys.modules):
            imported = len(sys.modules)
            gc.freeze()
        channel.send_bytes(payload)


# In the test process


class _World:
    """`size` new worker processes that share a process group."""

    def __init__(self, size: int, backend: str, *, forked: bool):
        self.folder = tempfile.mkdtemp(prefix="poplar-ranks-")
        self.generation = 0
        self.channels: list[Connection] = []
        self.processes: list[Any] = []
        new = multiprocessing.get_context("spawn")
        # CUDA may not be used in forks of a process that has found devices.
        fork: Any = new if torch.cuda.is_available() else fork_server.context()
        inherited = fork_server.ENVIRONMENT  # one thread per rank from the first import on
        before = {name: os.environ.get(name) for name in inherited}
        os.environ.update(inherited)
        try:
            for rank in range(size):
                context = fork if forked or rank else new
                parent_end, child_end = context.Pipe()
                process = context.Process(
                    target=_run_worker,
                    args=(rank, size, self.folder, backend, child_end),
                    name=f"rank {rank}",
                    daemon=True,
                )
                process.start()
                child_end.close()
                self.channels.append(parent_end)
                self.processes.append(process)
        finally:
            for name, value in before.items():
                os.environ.pop(name, None)
                if value is not None:
                    os.environ[name] = value
        self._collect(range(size), time.monotonic() + CALL_SECONDS, "start the workers")

    def call(self, call: _Call, timeout: float, lost: Sequence[int] = ()) -> list[Any]:
        """One answer per rank of the call: a value, a `Failure`, or a `Silent` for `lost` ranks."""
        message = pickle.dumps(call)
        for channel in self.channels:
            channel.send_bytes(message)
        awaited = [rank for rank in range(len(self.channels)) if rank not in lost]
        name = getattr(call.function, "__name__", repr(call.function))
        answers = self._collect(awaited, time.monotonic() + timeout, f"{name} in {timeout:g} s")
        for rank in lost:
            answers[rank] = self._silent(rank, wait_seconds=0.0)
        return [
            answers[rank] if isinstance(answers[rank], Silent) else answers[rank][1]
            for rank in range(call.ranks)
        ]

    def _collect(self, ranks: Sequence[int], deadline: float, what: str) -> dict[int, Any]:
        answers: dict[int, Any] = {}
        channels = {self.channels[rank]: rank for rank in ranks}
        exited: list[int] = []
        while channels:
            ready = wait(list(channels), timeout=max(0.0, deadline - time.monotonic()))
            for channel in ready:
                rank = channels.pop(channel)  # type: ignore[index]
                try:
                    answers[rank] = pickle.loads(channel.recv_bytes())  # type: ignore[union-attr]
                except (EOFError, ConnectionError):
                    self.processes[rank].join(5)
                    exited.append(rank)
                failed = rank in exited or (answers[rank] is not None and not answers[rank][0])
                if failed:
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
            if not ready and time.monotonic() >= deadline:
                break
        missing = sorted([*exited, *channels.values()])
        if missing:
            silent = [self._silent(rank) for rank in missing]
            failures = [a[1] for a in answers.values() if a is not None and not a[0]]
            self.kill()
            raise RanksFailed(f"ranks {missing} did not finish: {what}", failures, silent)
        return answers

    def _silent(self, rank: int, wait_seconds: float = 1.0) -> Silent:
        process = self.processes[rank]
        path = Path(self.folder) / f"stacks-{rank}"
        note = _text(Path(self.folder) / f"note-{rank}")
        # Before a worker has made this file, the signal would end it.
        if path.exists() and process.exitcode is None and process.pid is not None:
            with contextlib.suppress(ProcessLookupError):  # it may have just ended
                os.kill(process.pid, signal.SIGUSR1)
            end = time.monotonic() + wait_seconds  # a stopped process never answers
            while time.monotonic() < end and not _text(path).strip():
                time.sleep(0.02)
            time.sleep(0.05)
        return Silent(rank=rank, exit_code=process.exitcode, stacks=note + _text(path))

    def kill(self) -> None:
        for channel in self.channels:
            channel.close()
        for process in self.processes:
            process.kill()  # SIGKILL ends a stopped process too
        for process in self.processes:
            process.join(10)
        shutil.rmtree(self.folder, ignore_errors=True)


def _text(file: Path) -> str:
    """What a worker has written; empty if it has not come that far."""
    return file.read_text() if file.exists() else ""


class Pool:
    """`size` workers that are reused until a call fails; then new ones are started.

    All are forks of the server if `forked`; else the first one is a new process.
    """

    def __init__(self, size: int = WORLD, backend: str | None = None, *, forked: bool = False):
        self.size = size
        self.backend = backend or _backend()
        self.forked = forked
        self._world: _World | None = None
        self._generation = 0

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        timeout: float = CALL_SECONDS,
        ranks: int | None = None,
        **kwargs: Any,
    ) -> list[Any]:
        """Call `function(*args, **kwargs)` on every rank and return their results.

        Args:
            function: a module-level function (workers import its module by name).
            timeout: seconds until ranks that have not answered are reported and killed.
            ranks: the number of participating ranks, by default the pool's size.

        Raises:
            RanksFailed: a rank raised, did not answer by the deadline, or exited.
        """
        answers = self._call(function, args, kwargs, timeout, ranks)
        failures = [answer for answer in answers if isinstance(answer, Failure)]
        if failures:
            raise RanksFailed(f"ranks {[f.rank for f in failures]} raised", failures)
        return answers

    def run_expecting_errors(
        self,
        function: Callable[..., Any],
        *args: Any,
        timeout: float = CALL_SECONDS,
        ranks: int | None = None,
        **kwargs: Any,
    ) -> list[Failure]:
        """As `run`, for calls in which every rank must raise; returns the exceptions.

        Raises:
            RanksFailed: a rank did not answer by the deadline, or exited.
            AssertionError: a rank raised nothing.
        """
        answers = self._call(function, args, kwargs, timeout, ranks)
        without_error = [
            rank for rank, answer in enumerate(answers) if not isinstance(answer, Failure)
        ]
        if without_error:
            raised = "\n".join(str(a) for a in answers if isinstance(a, Failure))
            raise AssertionError(
                f"ranks {without_error} raised nothing; raised elsewhere:\n{raised}"
            )
        return answers

    def close(self) -> None:
        """End the workers. The next call starts new ones."""
        if self._world is not None:
            self._world.kill()
            self._world = None

    def pids(self) -> list[int]:
        """Process ids of the workers (started if there are none)."""
        return [process.pid for process in self._started().processes]

    def _started(self) -> _World:
        if self._world is None:
            self._world = _World(self.size, self.backend, forked=self.forked)
        return self._world

    def _call(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        timeout: float,
        ranks: int | None,
    ) -> list[Any]:
        count = self.size if ranks is None else ranks
        if not 1 <= count <= self.size:
            raise ValueError(f"ranks must be between 1 and {self.size}, got {count}")
        world = self._started()
        call = _Call(function, args, kwargs, count, self._generation)
        try:
            answers = world.call(call, timeout)
        except BaseException:
            # Also on Ctrl-C: answers of this call may still arrive.
            self.close()
            raise
        if any(isinstance(answer, Failure) for answer in answers):
            # Ranks may have left collectives unfinished, so the next call gets new process groups.
            self._generation += 1
        return answers


def one_off(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    lost: Sequence[int] = (),
    timeout: float = CALL_SECONDS,
    **kwargs: Any,
) -> list[Any]:
    """Call a function on new ranks that end with the call: for tests that kill or stop ranks.

    Args:
        lost: ranks that are not waited for.

    Returns:
        For each rank its result, a `Failure` if it raised, or a `Silent` if it is one of `lost`.

    Raises:
        RanksFailed: a rank that is not `lost` did not answer by the deadline, or exited.
    """
    world = _World(world_size, _backend(), forked=True)
    try:
        return world.call(_Call(function, args, kwargs, world_size, 0), timeout, lost)
    finally:
        world.kill()
