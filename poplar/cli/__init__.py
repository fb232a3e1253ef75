"""The command line: `poplar --help` lists the commands.

An application on top of the library: it may start process groups, choose devices and print. Alone
it is one rank; under `torchrun -m poplar` every rank runs the command and rank 0 prints.
Exit codes: 0 success, 1 a problem was found or an error occurred, 2 invalid arguments.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from contextlib import suppress

from poplar.values.regular_files import naming


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command and end the process with its exit code.

    Args:
        arguments: without the program's name; None: those of this process.
    """
    _prepare_streams()
    from poplar.cli.app import app

    code = 0
    try:
        with naming("standard output"):
            try:
                app(arguments, prog_name="poplar")
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else int(end.code is not None)
            sys.stdout.flush()
    except OSError as error:  # commands print those of files
        code = 1
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the shutdown flushes again
        with suppress(OSError):  # stderr may be the same file
            print(f"poplar: {error}", file=sys.stderr)
    _exit(code)


def _prepare_streams() -> None:
    """Open the null device for streams that are closed, as under some service managers.

    Otherwise the next file or socket gets the descriptor, and what is printed. Characters that the
    encoding of stdout lacks are printed as escapes.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _exit(code: int) -> None:
    """End the process; skip the interpreter's shutdown if torch is loaded.

    A gloo thread that frees its last tensor during the shutdown may abort the process.
    """
    if "torch" not in sys.modules:
        sys.exit(code)
    sys.stderr.flush()
    os._exit(code)
