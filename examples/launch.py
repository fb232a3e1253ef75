"""Start several gloo ranks on this machine from a plain Python program, without `torchrun`.

For the demo and the benchmarks. If a rank fails, its traceback is raised here and the other ranks
are ended. Ranks rendezvous through a file, so no port is needed.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

RESULT = "result.pickle"
"""The file of what rank 0 returns."""
GRACE_SECONDS = 20.0
"""Time for the other ranks to fail by themselves after the first failure."""

PRELOADED = ["torch.distributed", "torch._dynamo", "poplar.comm", "poplar.optimizer"]
"""Imported once, in the process that all ranks are forks of, if there is no CUDA device."""


class LaunchError(RuntimeError):
    """At least one rank failed. The message contains every traceback, in order of time."""


def run_ranks(
    work: Callable[..., Any],
    ranks: int,
    *args: Any,
    cores: tuple[int, ...] | None = None,
    before: Callable[[int], None] | None = None,
    backend: str = "gloo",
) -> Any:
    """Run `work(*args)` on `ranks` processes with one thread each; returns what rank 0 returned.

    Args:
        work: a module-level function; the default process group is initialized when it runs. What
            it returns must be picklable.
        ranks: number of processes.
        args: arguments of `work`; must be picklable.
        cores: the core that each rank is bound to; None: not bound.
        before: called with the rank before the rendezvous, e.g. to enter a network namespace.
        backend: of the default process group.

    Raises:
        LaunchError: a rank raised an exception or was ended by a signal.
    """
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOADED)
    with tempfile.TemporaryDirectory() as folder:
        started = mp.start_processes(
            _rank,
            (ranks, folder, cores, before, backend, work, args),
            nprocs=ranks,
            join=False,
            # CUDA may not be used in forks of a process that has found devices.
            start_method="spawn" if torch.cuda.is_available() else "forkserver",
        )
        try:
            while not started.join(grace_period=GRACE_SECONDS):
                pass
        except (mp.ProcessRaisedException, mp.ProcessExitedException) as failure:
            failures = sorted(Path(folder).glob("failed-*"))
            reported = {int(path.name.rpartition("-")[2]) for path in failures}
            messages = _ended_without_traceback(started, reported)
            messages += [path.read_text() for path in failures]
            raise LaunchError("\n".join(messages) or str(failure)) from None
        return pickle.loads(Path(folder, RESULT).read_bytes())


def _ended_without_traceback(started: mp.ProcessContext, reported: set[int]) -> list[str]:
    """Messages for ranks that ended without an exception, for example killed for memory."""
    # The exit code after an exception is 1. SIGTERM ended the ranks that were still running.
    return [
        f"rank {rank} ended with exit code {process.exitcode} (-n means signal n)\n"
        for rank, process in enumerate(started.processes)
        if rank not in reported and process.exitcode not in (0, 1, -signal.SIGTERM)
    ]


def _rank(
    rank: int,
    ranks: int,
    folder: str,
    cores: tuple[int, ...] | None,
    before: Callable[[int], None] | None,
    backend: str,
    work: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    # The loopback interface works even if the host's name does not resolve.
    if Path("/sys/class/net/lo").exists():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        if cores is not None:
            os.sched_setaffinity(0, {cores[rank]})
        torch.set_num_threads(1)
        if before is not None:
            before(rank)
        dist.init_process_group(
            backend, init_method=f"file://{folder}/rendezvous", rank=rank, world_size=ranks
        )
        result = work(*args)
        if rank == 0:
            Path(folder, RESULT).write_bytes(pickle.dumps(result))
    except Exception:
        # Named by time, so that the first failure is reported first.
        path = Path(folder, f"failed-{time.time_ns():020d}-{rank}")
        path.write_text(f"rank {rank} failed:\n{traceback.format_exc()}")
        raise
    dist.destroy_process_group()
    # Skip the interpreter's shutdown: a gloo thread that frees its last tensor then aborts the
    # process on a busy machine.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
