"""A server of `multiprocessing` whose processes have imported all that the tests import.

It is a fork of the pytest process, made after the collection and before the first test. A rank then
starts in a tenth of a second, although torch, transformers and Lightning take ten to import.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import multiprocessing
import os
import select
import stat
import sys
import threading
import warnings
from collections.abc import Sequence
from multiprocessing import forkserver, resource_tracker, util
from typing import Any
from unittest import mock

import torch

PRELOADED = (
    "torch.distributed.run",
    "torch._dynamo",
    "poplar.checkpoint.manager",
    "poplar.comm",
    "poplar.optimizer",
    "poplar.tuning.autotune",
    "poplar.tuning.verification",
    "pytest",
)
"""Imported by the server itself, before its first fork."""
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "NCCL_MULTI_RANK_GPU_ENABLE": "1"}
"""Of ranks: one thread each; several may share one GPU."""


def context() -> Any:
    """A multiprocessing context whose processes are forks of the server.

    Without `start`, the server is a new process, which imports `PRELOADED` only.
    """
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(list(PRELOADED))
    return found


def start() -> None:
    """Make the server a fork of this process, which must not have started threads of torch yet.

    On a machine with CUDA it stays a new process: a fork could not use CUDA.
    """
    if torch.cuda.is_available():
        return
    context()
    resource_tracker.ensure_running()  # started in the same way, but always new
    with mock.patch.object(util, "spawnv_passfds", _fork):
        forkserver.ensure_running()


def _fork(path: bytes, arguments: Sequence[str], kept: Sequence[int]) -> int:
    """As `util.spawnv_passfds`, for the server's program, without a new interpreter."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # other threads only wait
        pid = os.fork()
    if pid:
        return pid
    try:
        _serve(arguments[-1], kept)
    finally:
        os._exit(1)


def _serve(program: str, kept: Sequence[int]) -> None:
    """The server, in the fork: forget what is pytest's, and run once it is needed."""
    atexit._clear()
    faulthandler.disable()
    nothing = os.open(os.devnull, os.O_RDWR)
    # Not closed: objects that were imported may write to what has captured their output.
    for opened in sorted(map(int, os.listdir("/proc/self/fd"))):
        if opened > 2 and opened not in kept:
            with contextlib.suppress(OSError):  # that of the listing is closed
                os.dup2(2 if stat.S_ISREG(os.fstat(opened).st_mode) else nothing, opened)
    sys.stdin = open(os.devnull)  # noqa: SIM115
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    os.environ |= ENVIRONMENT
    # The fork was made under this lock. Ranks that start processes of their own need it.
    forkserver._forkserver._lock = threading.Lock()
    listener, alive = kept[:2]
    ready, _, _ = select.select([listener, alive], [], [])
    if listener in ready:  # else pytest has ended
        gc.freeze()
        exec(program, {})
