"""Worker processes: one per rank of a cluster, in a process group of their own, that run functions.

Engines that patch torch or leak memory get workers of their own, so that they cannot affect others.
Calls have deadlines, and errors return with their tracebacks.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.forkserver
import os
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any

from head_to_head.clusters import OpenCluster

START_SECONDS = 180.0
GRACE_SECONDS = 20.0
"""After one rank fails, the others have at most this long to finish or fail."""
CALL_SECONDS = 600.0
GROUP_SECONDS = 600.0
PRELOADED = ("torch", "torch.distributed", "torch._dynamo", "poplar")
"""Imported once, for all worker processes."""


class WorkersFailed(RuntimeError):
    """Ranks raised, died or missed the deadline; the message has all tracebacks."""

    @property
    def last_line(self) -> str:
        """Of the last traceback."""
        return str(self).strip().splitlines()[-1]

    @property
    def is_out_of_memory(self) -> bool:
        """Whether a rank ran out of memory, in Python, torch or a thread of C++, which aborts."""
        text = str(self).lower()
        return any(word in text for word in ("memory", "allocate", "bad_alloc", "exit code -6"))


class WorkerContext:
    """First argument of every function that workers run: the rank, its cluster, and its engines."""

    def __init__(self, rank: int, open_cluster: OpenCluster) -> None:
        self.rank = rank
        self.open_cluster = open_cluster
        self.engines: dict[str, Any] = {}

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.open_cluster.cluster.size


class Workers:
    """The processes run as long as the `with` block."""

    def __init__(self, open_cluster: OpenCluster, name: str) -> None:
        """
        Args:
            open_cluster: its ranks, one process each.
            name: of these workers in errors.
        """
        self.name = name
        self._folder = tempfile.mkdtemp(prefix="poplar-workers-")
        self._channels: list[Connection] = []
        self._processes: list[Any] = []
        forkserver = multiprocessing.get_context("forkserver")
        forkserver.set_forkserver_preload(list(PRELOADED))
        for rank in range(open_cluster.cluster.size):
            channel, worker_channel = forkserver.Pipe()
            process = forkserver.Process(
                target=_serve,
                args=(rank, open_cluster, self._folder, worker_channel),
                name=f"{name}, rank {rank}",
                daemon=True,
            )
            process.start()
            worker_channel.close()
            self._channels.append(channel)
            self._processes.append(process)

    def __enter__(self) -> Workers:
        try:
            self._collect("starting", START_SECONDS)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def is_closed(self) -> bool:
        """The processes have ended, because a call failed on some ranks only."""
        return not self._processes

    def call(self, function: Callable[..., Any], *args: Any) -> tuple[Any, ...]:
        """Run `function(here, *args)` on every rank; returns what each of them returned.

        Raises:
            WorkersFailed: the workers stay usable only if every rank raised; else they are closed.
        """
        if self.is_closed:
            raise WorkersFailed(f"{self.name}: its processes have ended")
        for channel in self._channels:
            with suppress(OSError):  # the process has ended; `_collect` reports it
                channel.send((function, args))
        return self._collect(function.__name__, CALL_SECONDS)

    def _collect(self, what: str, timeout: float) -> tuple[Any, ...]:
        deadline = time.monotonic() + timeout
        waiting = {channel: rank for rank, channel in enumerate(self._channels)}
        answers: dict[int, Any] = {}
        failed: list[str] = []
        lost: list[int] = []
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for channel in ready:
                rank = waiting.pop(channel)  # type: ignore[call-overload]
                try:
                    fine, answers[rank] = channel.recv()  # type: ignore[union-attr]
                except (EOFError, ConnectionError):
                    self._processes[rank].join(GRACE_SECONDS)
                    code = self._processes[rank].exitcode
                    fine, answers[rank] = False, f"its process ended with exit code {code}"
                    lost.append(rank)
                if not fine:
                    failed.append(f"rank {rank}: {answers[rank]}")
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        failed += [f"rank {rank}: no answer" for rank in waiting.values()]
        if failed:
            if waiting or lost or len(failed) < len(self._channels):
                self.close()
            raise WorkersFailed(f"{self.name}, {what}:\n" + "\n".join(failed))
        return tuple(answers[rank] for rank in range(len(self._channels)))

    def close(self) -> None:
        """End the processes."""
        for channel in self._channels:
            channel.close()
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join(10)
        self._processes = []
        self._channels = []
        shutil.rmtree(self._folder, ignore_errors=True)


def _serve(rank: int, open_cluster: OpenCluster, folder: str, channel: Connection) -> None:
    """One rank: join the process group, then run functions until the channel closes."""
    try:
        open_cluster.connect(rank)
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        # What torchrun would set; some engines read it.
        size = open_cluster.cluster.size
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size))
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/rendezvous",
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=GROUP_SECONDS),
        )
    except Exception:
        channel.send((False, traceback.format_exc()))
        return
    channel.send((True, None))
    context = WorkerContext(rank, open_cluster)
    while True:
        try:
            function, args = channel.recv()
        except EOFError:
            os._exit(0)
        try:
            answer = (True, function(context, *args))
        except Exception:
            answer = (False, traceback.format_exc())
        channel.send(answer)
