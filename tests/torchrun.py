"""`torchrun` whose agents and ranks are forks of a process that has imported torch.

They start in a fraction of the time of new processes.
"""

from __future__ import annotations

import gc
import os
import runpy
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ranks as harness
import torch


def start(arguments: Sequence[str], output: Path, environment: Mapping[str, str]) -> Any:
    """Start the agent of one host; returns its process.

    Args:
        arguments: of torchrun: its options, a script, and the script's arguments.
        output: a file that gets what agent and ranks print.
        environment: further variables.
    """
    options = ["--start-method=fork", "--local-addr=localhost", *arguments]
    variables = {"GLOO_SOCKET_IFNAME": "lo", **environment}
    agent = harness.forkserver().Process(target=_run_agent, args=(options, output, variables))
    agent.start()
    return agent


def _run_agent(arguments: list[str], output: Path, environment: Mapping[str, str]) -> None:
    """What `torchrun` does with these arguments."""
    with output.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ |= environment
    from torch.distributed import run
    from torch.distributed.launcher.api import elastic_launch

    config, _, (_, script, *options) = run.config_from_args(run.parse_args(arguments))
    elastic_launch(config, _run_script)(script, *options)


def _run_script(script: str, *options: str) -> None:
    """One rank."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the fork has the agent's handler
    torch.set_num_threads(1)
    gc.freeze()  # tuning collects garbage often, and what was imported is none
    sys.argv = [script, *options]
    runpy.run_path(script, run_name="__main__")
