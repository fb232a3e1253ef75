"""A private MPS daemon: ranks of unequal speed on one GPU, by their percentage of its threads.

With the multi-process service (MPS), kernels of several processes run on a GPU at the same time,
and `CUDA_MPS_ACTIVE_THREAD_PERCENTAGE` limits the multiprocessors of each process.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

CONTROL = "nvidia-cuda-mps-control"
START_SECONDS = 10.0
STOP_SECONDS = 5.0


class MpsUnavailable(RuntimeError):
    """The MPS daemon is not installed or does not start; the message says why."""


@contextmanager
def mps_daemon() -> Iterator[dict[str, str]]:
    """Run a daemon with folders of its own; yields the environment of its clients.

    Raises:
        MpsUnavailable: it does not run here.
    """
    program = shutil.which(CONTROL)
    if program is None:
        raise MpsUnavailable(f"{CONTROL} is not on the path")
    # A short path: it holds sockets, whose names are limited to 108 bytes.
    with tempfile.TemporaryDirectory(prefix="mps-") as name:
        folder = Path(name)
        clients = {
            "CUDA_MPS_PIPE_DIRECTORY": str(folder / "pipe"),
            "CUDA_MPS_LOG_DIRECTORY": str(folder / "log"),
        }
        for path in clients.values():
            Path(path).mkdir()
        environment = {**os.environ, **clients}
        output = folder / "output"
        with output.open("wb") as file:
            daemon = subprocess.Popen(
                [program, "-f"],  # in the foreground, so that it is a child of this process
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environment,
            )
        try:
            _wait_until_it_answers(daemon, program, environment, output)
            yield clients
        finally:
            _stop(daemon, program, environment)


def thread_percentage(percent: float) -> dict[str, str]:
    """Environment of a client that may use this part of the GPU's multiprocessors."""
    return {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": f"{percent:g}"}


def _wait_until_it_answers(
    daemon: subprocess.Popen[bytes], program: str, environment: dict[str, str], output: Path
) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and daemon.poll() is None:
        if _ask(program, environment, "get_server_list"):
            return
        time.sleep(0.1)
    said = output.read_text(errors="replace").strip().splitlines()[-3:]
    state = "does not answer" if daemon.poll() is None else f"ended with {daemon.returncode}"
    raise MpsUnavailable(f"{program} {state}: {' / '.join(said) or 'no output'}")


def _stop(daemon: subprocess.Popen[bytes], program: str, environment: dict[str, str]) -> None:
    if daemon.poll() is None:
        # Clients have ended or were killed; `-t` ends a server that still waits for one.
        _ask(program, environment, f"quit -t {STOP_SECONDS:.0f}")
        with suppress(subprocess.TimeoutExpired):
            daemon.wait(2 * STOP_SECONDS)
    if daemon.poll() is None:
        daemon.kill()
        daemon.wait()


def _ask(program: str, environment: dict[str, str], command: str) -> bool:
    """Whether the daemon carries out a command."""
    try:
        asked = subprocess.run(
            [program],
            input=f"{command}\n",
            text=True,
            capture_output=True,
            env=environment,
            timeout=2 * STOP_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return False
    return asked.returncode == 0
