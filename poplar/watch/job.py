"""Starts a job whose Python processes load the recorder, and waits for its end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

INJECT = Path(__file__).with_name("inject")


def environment(folder: Path, inherited: Mapping[str, str]) -> dict[str, str]:
    """The variables of a watched job, for which Python imports `inject/sitecustomize.py`."""
    paths = [str(INJECT), *filter(None, [inherited.get("PYTHONPATH")])]
    return {**inherited, "POPLAR_WATCH": str(folder), "PYTHONPATH": os.pathsep.join(paths)}


def run(command: Sequence[str], folder: Path, every: float, look: Callable[[], None]) -> int:
    """Run a job; returns its exit status, 128 + N if signal N has ended it.

    Args:
        command: the program and its arguments, as a shell would start it.
        folder: where the ranks write their records.
        every: seconds between two calls of `look`.
        look: called while the job runs. Its errors are printed once, and the job runs on.

    Raises:
        ValueError: there is no such program.
    """
    try:
        job = subprocess.Popen(command, env=environment(folder, os.environ))
    except OSError as error:
        raise ValueError(f"cannot start {command[0]!r}: {error.strerror or error}") from None

    def interrupted(*_: object) -> None:
        if not _in_foreground():  # else the terminal sends Ctrl-C to the job, too
            job.send_signal(signal.SIGINT)

    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, interrupted)
    signal.signal(signal.SIGTERM, lambda *_: job.terminate())
    printed: set[str] = set()
    try:
        while True:
            try:
                status = job.wait(every)
                return status if status >= 0 else 128 - status
            except subprocess.TimeoutExpired:
                try:
                    look()
                except Exception as error:  # the job must not be left alone
                    if repr(error) not in printed:
                        print(f"poplar watch: {error!r}", file=sys.stderr)
                    printed.add(repr(error))
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _in_foreground() -> bool:
    """Whether Ctrl-C in a terminal interrupts this process and its children."""
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)
