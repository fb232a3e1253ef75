"""The command line: `poplar doctor`, `profile`, `plan`, `simulate`, `verify`, `report`.

An application on top of the library, so it may do what the library never does: start process
groups, choose devices, print. Alone it is one rank; under `torchrun -m poplar` all of them run it,
and rank 0 prints. Exit codes: 0 fine, 1 a problem was found or something failed, 2 a command that
makes no sense.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

_EXTRA = frozenset({"typer", "rich", "click"})


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command and end the process with its exit code.

    Args:
        arguments: without the program's name; None: those of this process.
    """
    try:
        from poplar.cli.app import app
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in _EXTRA:
            raise
        sys.exit(
            f"poplar: the command line needs {error.name}, which is not installed; "
            "pip install 'poplar-zero[cli]'"
        )
    code = 0
    try:
        app(arguments, prog_name="poplar")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    _leave(code)


def _leave(code: int) -> None:
    """End the process. A rank ends without the interpreter's shutdown, in which a gloo thread that
    lets go of its last tensor may abort it.
    """
    if "torch" not in sys.modules:
        sys.exit(code)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
