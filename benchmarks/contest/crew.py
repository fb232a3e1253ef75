"""A crew: one process per rank of a cluster, with a process group of its own, that does as told.

Each family of engines gets a crew, so that what one of them changes in torch, or keeps, or breaks
is not another's; while one crew works the others wait for their turn. Calls have deadlines, errors
come home with their tracebacks, and a crew ends with its `with` block.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.forkserver
import os
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any

from contest.clusters import Place

START_SECONDS = 180.0
GRACE_SECONDS = 20.0
"""After one rank has failed the others get this long at most to finish or fail."""
GROUP_SECONDS = 600.0
PRELOADED = ("torch", "torch.distributed", "torch._dynamo", "poplar")
"""Imported once, for all processes of all crews."""


class CrewFailed(RuntimeError):
    """Ranks raised, died or were silent at the deadline; the message has all tracebacks."""


class Here:
    """What the functions that a crew calls may use: who they are, and what earlier calls left."""

    def __init__(self, rank: int, place: Place) -> None:
        self.rank = rank
        self.place = place
        self.kept: dict[str, Any] = {}

    @property
    def size(self) -> int:
        """Ranks in the crew."""
        return self.place.cluster.size


class Crew:
    """Starts with its `with` block, ends with it."""

    def __init__(self, place: Place, name: str, backend: str = "gloo") -> None:
        """`backend`: of the default process group, as `init_process_group` takes it."""
        self.name = name
        self._folder = tempfile.mkdtemp(prefix="poplar-crew-")
        self._channels: list[Connection] = []
        self._processes: list[Any] = []
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(PRELOADED))
        for rank in range(place.cluster.size):
            here, there = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(rank, place, self._folder, backend, there),
                name=f"{name}, rank {rank}",
                daemon=True,
            )
            process.start()
            there.close()
            self._channels.append(here)
            self._processes.append(process)

    def __enter__(self) -> Crew:
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
        """Its processes are gone: a call failed on some ranks only."""
        return not self._processes

    def call(
        self, function: Callable[..., Any], *args: Any, timeout: float = 600.0
    ) -> tuple[Any, ...]:
        """Run `function(here, *args)` on every rank; returns what each of them returned.

        Raises:
            CrewFailed: after it the crew is of use only if every rank raised; else it is closed.
        """
        if self.is_closed:
            raise CrewFailed(f"{self.name}: its processes have ended")
        for channel in self._channels:
            with suppress(OSError):  # it is gone; collecting will say so
                channel.send((function, args))
        return self._collect(getattr(function, "__name__", str(function)), timeout)

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
                    fine, answers[rank] = False, "its process is gone"
                    lost.append(rank)
                if not fine:
                    failed.append(f"rank {rank}: {answers[rank]}")
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        failed += [f"rank {rank}: no answer" for rank in waiting.values()]
        if failed:
            if waiting or lost or len(failed) < len(self._channels):
                self.close()
            raise CrewFailed(f"{self.name}, {what}:\n" + "\n".join(failed))
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


def last_lines(failures: Sequence[str] | str, count: int = 1) -> str:
    """The gist of a traceback."""
    text = failures if isinstance(failures, str) else "\n".join(failures)
    return " ".join(text.strip().splitlines()[-count:])


def _serve(rank: int, place: Place, folder: str, backend: str, channel: Connection) -> None:
    """One rank: join the others, then do as told until the other end of the channel is gone."""
    try:
        place.connect(rank)
        import torch
        import torch.distributed as dist

        import poplar.comm  # noqa: F401 - makes cpu:poplar known

        torch.set_num_threads(1)
        # What torchrun would set; some engines read it.
        size = place.cluster.size
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size))
        dist.init_process_group(
            backend,
            init_method=f"file://{folder}/rendezvous",
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=GROUP_SECONDS),
        )
    except Exception:
        channel.send((False, traceback.format_exc()))
        return
    channel.send((True, None))
    here = Here(rank, place)
    while True:
        try:
            function, args = channel.recv()
        except EOFError:
            os._exit(0)
        try:
            answer = (True, function(here, *args))
        except Exception:
            answer = (False, traceback.format_exc())
        channel.send(answer)
