"""Starts a job whose Python processes load the recorder, and waits for its end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

INJECT = Path(__file__).with_name("inject")
PASSED_ON = {
    *(signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM),
    *(signal.SIGUSR1, signal.SIGUSR2),
}
"""What schedulers and users send to a job so that it ends or saves its state. Each of them would
end the watcher alone."""


def environment(folder: Path, inherited: Mapping[str, str]) -> dict[str, str]:
    """The variables of a watched job, for which Python imports `inject/sitecustomize.py`."""
    paths = [str(INJECT), *filter(None, [inherited.get("PYTHONPATH")])]
    return {**inherited, "POPLAR_WATCH": str(folder), "PYTHONPATH": os.pathsep.join(paths)}


def run(command: Sequence[str], folder: Path, every: float, look: Callable[[], None]) -> int:
    """Run a job; returns its exit status, 128 + N if signal N has ended it.

    Signals of `PASSED_ON` that another process sends to this one are sent to the job.

    Args:
        command: the program and its arguments, as a shell would start it.
        folder: where the ranks write their records.
        every: seconds between two calls of `look`.
        look: called while the job runs. Its errors are printed once, and the job runs on.

    Raises:
        ValueError: there is no such program.
    """
    awaited = {signal.SIGCHLD, *PASSED_ON}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, awaited)

    def unblock() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

    try:
        try:
            job = subprocess.Popen(command, env=environment(folder, os.environ), preexec_fn=unblock)
        except OSError as error:
            raise ValueError(f"cannot start {command[0]!r}: {error.strerror or error}") from None
        look_once = _printing_errors(look)
        while (status := job.poll()) is None:
            received = signal.sigtimedwait(awaited, every)
            if received is None:
                look_once()
            elif received.si_signo != signal.SIGCHLD and received.si_code <= 0:
                job.send_signal(received.si_signo)  # a terminal sends its own to the job, too
        return status if status >= 0 else 128 - status
    finally:
        while signal.sigtimedwait(awaited, 0):
            pass  # the job has ended
        unblock()


def _printing_errors(look: Callable[[], None]) -> Callable[[], None]:
    """`look`, which prints each of its errors once: the job must not be left alone."""
    printed: set[str] = set()

    def look_once() -> None:
        try:
            look()
        except Exception as error:
            if repr(error) not in printed:
                with suppress(OSError):  # the terminal may have gone
                    print(f"poplar watch: {error!r}", file=sys.stderr)
            printed.add(repr(error))

    return look_once
