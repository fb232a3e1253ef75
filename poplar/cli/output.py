"""The output of a command: text or one JSON document, an exit code, and one line per error.

Every rank of a job runs the command. Rank 0 prints the result; every rank prints its own errors to
stderr, with its rank in front.
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import typer

from poplar.values.errors import PoplarError
from poplar.values.formatting import format_table, printable
from poplar.values.schema import json_text

_SELF_EXPLANATORY = (PoplarError, ValueError, TypeError, OSError, ImportError)
"""Errors that are printed without their type."""


@dataclass
class Output:
    """What a command has found so far."""

    document: Any = None
    """What `--json` prints: JSON types."""
    shown: list[str] = field(default_factory=list)
    """What is printed otherwise, in order."""
    failed: bool = False
    """Whether the exit code is 1."""

    def show(self, *parts: str) -> None:
        """Add lines to print."""
        self.shown += parts

    def show_table(self, *rows: Sequence[str]) -> None:
        """Add a table to print, between empty lines; the first row is its header."""
        between = [] if self.shown[-1:] == [""] else [""]
        self.shown += [*between, format_table(*rows), ""]


@contextlib.contextmanager
def command_output(*, as_json: bool, debug: bool) -> Iterator[Output]:
    """Collect the output of a command, and print it when the command is done.

    Args:
        as_json: print exactly one JSON document on stdout, also after an error. Everything else
            that is printed meanwhile, by a model or by NCCL, goes to stderr.
        debug: print the traceback of an error.

    Raises:
        typer.Exit: code 1, if the command failed or found a problem.
    """
    output = Output()
    with _stdout_to_stderr() if as_json else contextlib.nullcontext():
        try:
            yield output
        except (typer.Exit, typer.Abort, typer.BadParameter):
            raise
        except Exception as error:
            if debug:
                print(printable(traceback.format_exc()), end="", file=sys.stderr)
            output.failed = True
            output.document, output.shown = {"error": _message(error)}, []
            print(printable(_error_line(error, debug)), file=sys.stderr)
    if _rank() == 0:
        if as_json:
            print(json_text(output.document, indent=2))
        else:
            print(*(f"{printable(part)}\n" for part in output.shown), sep="", end="")
    if output.failed:
        raise typer.Exit(1)


@contextlib.contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """Send everything that is printed to stderr, also by libraries that write to the descriptor."""
    sys.stdout.flush()
    saved = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(saved, 1)
        os.close(saved)


def _message(error: Exception) -> str:
    """One line: our own errors without line breaks, of others the type or the first line."""
    text = str(error).strip()
    if isinstance(error, PoplarError):
        return " ".join(text.split())
    line = text.splitlines()[0] if text else ""
    if line and isinstance(error, _SELF_EXPLANATORY):
        return line
    return f"{type(error).__name__}: {line}"


def _error_line(error: Exception, debug: bool) -> str:
    prefix = f"rank {_rank()}: " if "RANK" in os.environ else ""
    text = _message(error)
    if text.startswith(prefix):
        prefix = ""
    if not debug and not isinstance(error, _SELF_EXPLANATORY):
        text += " (run again with --debug for the traceback)"
    return f"poplar: {prefix}{text}"


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))
