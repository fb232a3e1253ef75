"""Several gloo ranks on this machine, started by a plain Python program.

What `torchrun` does for real jobs, for the demo and the benchmarks, which must be one command and
end by themselves: a rank that fails brings its traceback home, the others are ended, nothing hangs.
Ranks meet through a file, so no port has to be free.
"""

from __future__ import annotations

import os
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

GRACE_SECONDS = 20.0
"""How long the other ranks may take to fail by themselves after one has: their errors help too."""


class LaunchError(RuntimeError):
    """At least one rank failed; the message holds every traceback, the first failure first."""


def run_ranks(
    work: Callable[..., None],
    ranks: int,
    *args: Any,
    cores: tuple[int, ...] | None = None,
    before: Callable[[int], None] | None = None,
    backend: str = "gloo",
) -> None:
    """Run `work(*args)` in as many processes as there are ranks, each with one thread.

    Args:
        work: a function of a module; it finds the default process group initialised.
        ranks: how many processes.
        args: passed on to each of them; must be picklable.
        cores: the core that each rank is bound to; None leaves them free.
        before: called with the rank before the ranks meet, to enter another network, say.
        backend: of the default process group.

    Raises:
        LaunchError: some rank raised, or was ended by a signal.
    """
    # The loopback interface serves also where the host's own name resolves to nothing.
    if Path("/sys/class/net/lo").exists():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        started = mp.spawn(
            _rank, (ranks, folder, cores, before, backend, work, args), nprocs=ranks, join=False
        )
        try:
            while not started.join(grace_period=GRACE_SECONDS):
                pass
        except (mp.ProcessRaisedException, mp.ProcessExitedException) as failure:
            stories = sorted(Path(folder).glob("failed-*"))
            heard = {int(story.name.rpartition("-")[2]) for story in stories}
            told = _ended_without_a_word(started, heard) + [story.read_text() for story in stories]
            raise LaunchError("\n".join(told) or str(failure)) from None


def _ended_without_a_word(started: mp.ProcessContext, heard: set[int]) -> list[str]:
    """Ranks that raised nothing: killed, as for want of memory, or gone by themselves."""
    # Python's exit code after an exception is 1; SIGTERM is how ranks still running were ended.
    return [
        f"rank {rank} ended with exit code {process.exitcode} (-n: by signal n)\n"
        for rank, process in enumerate(started.processes)
        if rank not in heard and process.exitcode not in (0, 1, -signal.SIGTERM)
    ]


def _rank(
    rank: int,
    ranks: int,
    folder: str,
    cores: tuple[int, ...] | None,
    before: Callable[[int], None] | None,
    backend: str,
    work: Callable[..., None],
    args: tuple[Any, ...],
) -> None:
    try:
        if cores is not None:
            os.sched_setaffinity(0, {cores[rank]})
        torch.set_num_threads(1)
        if before is not None:
            before(rank)
        dist.init_process_group(
            backend, init_method=f"file://{folder}/rendezvous", rank=rank, world_size=ranks
        )
        work(*args)
    except Exception:
        # Named by time: the first failure is the cause, those after it its consequences.
        story = Path(folder, f"failed-{time.time_ns():020d}-{rank}")
        story.write_text(f"rank {rank} failed:\n{traceback.format_exc()}")
        raise
    dist.destroy_process_group()
    # Without the interpreter's own shutdown: a gloo thread that lets go of its last tensor in it
    # aborts the process, as seen on a busy machine.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
