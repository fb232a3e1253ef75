"""Reads and writes of files, for which ranks wait as long as bytes move: a file may have 100 GB."""

from __future__ import annotations

import queue
import re
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import torch

from poplar.comm import Control
from poplar.comm.failure_reports import call_in_thread
from poplar.comm.group import on_device
from poplar.system.devices import synchronize
from poplar.zero.agreement import raise_on_any_error

_LOOK_SECONDS = 1.0
"""Longest time between two exchanges of what the ranks have read and written."""


def transfer_on_all_ranks(
    control: Control, device: torch.device, transfer: Callable[[], object], *, doing: str
) -> None:
    """Run `transfer` on every rank, in a thread, until all have finished. Collective.

    Args:
        device: of the tensors that are read into or written.

    Raises:
        Exception: of this rank's `transfer`.
        TimeoutError: this rank has not finished, and all ranks have read and written nothing for
            the timeout of collectives. The thread goes on in vain.
        RankFailed: `transfer` of another rank raised.
    """
    threads: list[int] = []

    def run() -> None:
        threads.append(threading.get_native_id())
        synchronize(device)  # this thread has another stream
        with torch.no_grad(), on_device(device):
            transfer()
        synchronize(device)

    answers, error, done = call_in_thread(run), None, False
    timeout = control.group.timeout.total_seconds()
    since, progress = time.monotonic(), 0
    while True:
        with suppress(queue.Empty):
            if not done:
                _, error = answers.get(timeout=min(_LOOK_SECONDS, timeout / 4))
                done = True
        own = [float(done), float(_bytes_moved(threads)), time.monotonic() - since]
        values = torch.tensor(own, dtype=torch.float64, device="cpu")
        ranks = control.exchange(values, what=doing)()
        total = sum(int(rank[1]) for rank in ranks)
        if total != progress:
            progress, since = total, time.monotonic()
        elif float(ranks[0][2]) > timeout:  # the same value on all ranks
            break
        if all(bool(rank[0]) for rank in ranks):
            break
    if not done:
        error = TimeoutError(
            f"rank {control.group.name} has read and written nothing for {timeout:g} s; "
            "check its storage"
        )
    raise_on_any_error(control, error, doing=doing)


def _bytes_moved(threads: Sequence[int]) -> int:
    """The bytes that threads of this process have read and written, where Linux counts them, else
    0. Those of other threads, which exchange what the ranks have moved, do not count.
    """
    total = 0
    for thread in threads:
        with suppress(OSError):  # it has ended
            counts = Path(f"/proc/self/task/{thread}/io").read_text("ascii")
            total += sum(map(int, re.findall(r"^[rw]char: (\d+)", counts, re.MULTILINE)))
    return total
