"""Programs, alone or under `torchrun`, as forks of a process that has imported what they import.

They start in a fraction of the time of new processes.
"""

from __future__ import annotations

import functools
import gc
import inspect
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import fork_server
import torch


def start(
    arguments: Sequence[str],
    output: Path,
    environment: Mapping[str, str],
    *,
    errors: Path | None = None,
    folder: Path | None = None,
) -> Any:
    """Start the agent of one host; returns its process.

    Args:
        arguments: of torchrun: its options, a script, and the script's arguments.
        output: a file that gets what agent and ranks print.
        environment: further variables.
        errors: a file for stderr, by default `output`.
        folder: the working directory, by default that of the tests.
    """
    options = ["--start-method=fork", "--local-addr=localhost", *arguments]
    variables = {"GLOO_SOCKET_IFNAME": "lo", **environment}
    return _start(_run_agent, options, output, errors, variables, folder)


def run(
    arguments: Sequence[Any],
    *,
    ranks: int = 0,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
    timeout: float = 240.0,
) -> subprocess.CompletedProcess[str]:
    """What `python *arguments` does, or `torchrun --nproc-per-node=ranks *arguments`.

    Raises:
        subprocess.TimeoutExpired: it has not ended after `timeout` seconds, and was killed.
    """
    words = list(map(str, arguments))
    with tempfile.TemporaryDirectory() as printed:
        output, errors = Path(printed, "output"), Path(printed, "errors")
        if ranks:
            launch = ("--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0")
            launched = [*launch, f"--nproc-per-node={ranks}", *words]
            process = start(launched, output, environment or {}, errors=errors, folder=folder)
        else:
            process = _start(_run_alone, words, output, errors, environment or {}, folder)
        process.join(timeout)
        code = process.exitcode
        if code is None:
            process.terminate()  # the agent ends its ranks
            process.join(10)
            process.kill()
        texts = [path.read_text() if path.exists() else "" for path in (output, errors)]
    if code is None:
        raise subprocess.TimeoutExpired(words, timeout, *texts)
    return subprocess.CompletedProcess(words, code, *texts)


def _start(
    target: Any,
    arguments: Sequence[str],
    output: Path,
    errors: Path | None,
    environment: Mapping[str, str],
    folder: Path | None,
) -> Any:
    given = (target, arguments, output, errors, {**environment}, folder or Path.cwd())
    process = fork_server.context().Process(target=_run, args=given)
    process.start()
    return process


def _run(
    target: Any,
    arguments: Sequence[str],
    output: Path,
    errors: Path | None,
    environment: Mapping[str, str],
    folder: Path,
) -> None:
    """In the fork: what a shell does before it starts a program."""
    for number, path in ((1, output), (2, errors or output)):
        with path.open("a") as file:
            os.dup2(file.fileno(), number)
    os.environ |= environment
    os.chdir(folder)
    target(arguments)


def _run_agent(arguments: Sequence[str]) -> None:
    """What `torchrun` does with these arguments."""
    # The rendezvous asks often who calls. Reading the lines of all frames would take seconds.
    inspect.stack = functools.partial(inspect.stack, 0)
    from torch.distributed import run
    from torch.distributed.launcher.api import elastic_launch

    config, _, (_, *command) = run.config_from_args(run.parse_args(arguments))
    elastic_launch(config, _run_rank)(*command)


def _run_rank(*command: str) -> None:
    """One rank."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the fork has the agent's handler
    # The agent waits for the result of a rank that ends without an error, which `os._exit` skips.
    with mock.patch.object(os, "_exit", sys.exit):
        try:
            _run_alone(command)
        except SystemExit as end:
            if end.code:
                raise


def _run_alone(command: Sequence[str]) -> None:
    """What `python *command` does."""
    torch.set_num_threads(1)
    gc.freeze()  # tuning collects garbage often, and what was imported is none
    if command[0] == "-m":
        sys.argv = list(command[1:])
        sys.path.insert(0, str(Path.cwd()))
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(command)
        sys.path.insert(0, str(Path(command[0]).parent))
        runpy.run_path(command[0], run_name="__main__")
