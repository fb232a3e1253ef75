"""How a command answers: for people or as one JSON document, with an exit code, never a traceback.

Every rank of a job runs the command. Rank 0 gives the answer; errors come from whoever has them,
with the rank in front.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import typer
from rich.console import Console, RenderableType
from rich.text import Text

from poplar.errors import PoplarError

_PLAIN_WIDTH = 160
"""Columns where nobody watches: a log is not to be wrapped like a narrow terminal."""

_SAY_IT_ALL = (PoplarError, ValueError, TypeError, OSError, ImportError)
"""Errors whose message was written for the reader; of others the type belongs to it."""


@dataclass
class Answer:
    """What a command has found so far."""

    document: Any = None
    """What `--json` prints: JSON's types."""
    shown: list[RenderableType] = field(default_factory=list)
    """What people see, in order."""
    failed: bool = False
    """Whether it ends with exit code 1."""

    def show(self, *parts: RenderableType) -> None:
        """Add what people see. A plain string is printed as it is, without markup."""
        self.shown += [Text(part) if isinstance(part, str) else part for part in parts]


@contextlib.contextmanager
def answering(*, as_json: bool, debug: bool) -> Iterator[Answer]:
    """Collect a command's answer and give it when the command is done.

    Args:
        as_json: exactly one JSON document on stdout, also after an error; whatever else is printed
            meanwhile, by a model or by NCCL, goes to stderr.
        debug: show where an error comes from.

    Raises:
        typer.Exit: code 1, if the command failed or found a problem.
    """
    answer = Answer()
    with _stdout_kept_free() if as_json else contextlib.nullcontext():
        try:
            yield answer
        except (typer.Exit, typer.Abort, typer.BadParameter):
            raise
        except Exception as error:
            if debug:
                traceback.print_exc()
            answer.failed = True
            answer.document, answer.shown = {"error": _message(error)}, []
            print(_complaint(error, debug), file=sys.stderr)
    if _rank() == 0:
        _give(answer, as_json)
    if answer.failed:
        raise typer.Exit(1)


def _give(answer: Answer, as_json: bool) -> None:
    if as_json:
        print(json.dumps(_finite(answer.document), indent=2))
        return
    # What a device or an error is called is no markup, whatever brackets are in it.
    width = None if sys.stdout.isatty() else _PLAIN_WIDTH
    console = Console(highlight=False, markup=False, emoji=False, width=width)
    for part in answer.shown:
        console.print(part)


@contextlib.contextmanager
def _stdout_kept_free() -> Iterator[None]:
    """Send what is printed to stderr, by Python and by libraries that know nothing of it."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def _message(error: Exception) -> str:
    """One line. Our own errors are one; of others the first says what happened."""
    text = str(error).strip()
    if isinstance(error, PoplarError):
        return " ".join(text.split())
    line = text.splitlines()[0] if text else ""
    return line if line and isinstance(error, _SAY_IT_ALL) else f"{type(error).__name__}: {line}"


def _complaint(error: Exception, debug: bool) -> str:
    whose = f"rank {_rank()}: " if "RANK" in os.environ else ""
    text = _message(error)
    if text.startswith(whose):
        whose = ""
    where = "" if debug or isinstance(error, _SAY_IT_ALL) else " (--debug shows where)"
    return f"poplar: {whose}{text}{where}"


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _finite(value: Any) -> Any:
    """JSON knows neither NaN nor infinity: null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(entry) for key, entry in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_finite(entry) for entry in value]
    return value
