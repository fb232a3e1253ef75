"""The command line: `poplar --help` lists the commands.

An application on top of the library: it may start process groups, choose devices and print. Alone
it is one rank; under `torchrun -m poplar` every rank runs the command and rank 0 prints.
Exit codes: 0 success, 1 a problem was found or an error occurred, 2 invalid arguments.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command and end the process with its exit code.

    Args:
        arguments: without the program's name; None: those of this process.
    """
    from poplar.cli.app import app

    code = 0
    try:
        app(arguments, prog_name="poplar")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    _exit(code)


def _exit(code: int) -> None:
    """End the process; skip the interpreter's shutdown if torch is loaded.

    A gloo thread that frees its last tensor during the shutdown may abort the process.
    """
    if "torch" not in sys.modules:
        sys.exit(code)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
