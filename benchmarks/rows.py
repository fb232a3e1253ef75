"""Rows of the benchmarks: one schema, one file format, one table, one set of options.

A row says what was run (`case`), what was found (`figures`) and where it was measured
(`provenance`). `benchmarks/README.md` explains the figures of each script.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import provenance
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

NOTHING = "–"
"""Shown for a value that was not measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One result. Names are unique over case, figures and provenance: `row["stage"]` finds each."""

    benchmark: str
    """Rows of several benchmarks may be in one file."""
    case: Mapping[str, Any]
    """What was run: equal for all results that answer the same question."""
    figures: Mapping[str, Any]
    """What was found; None: not measured, or there is nothing to compare with."""
    provenance: Mapping[str, str]
    """Device, versions, commit and day."""

    @classmethod
    def of(
        cls,
        benchmark: str,
        case: Mapping[str, Any],
        figures: Mapping[str, Any],
        *,
        packages: Sequence[str] = ("torch",),
        device: str = "cpu",
    ) -> Row:
        """A row that is measured here and now, with the versions of `packages`."""
        where = {
            "device": provenance.device(device),
            "versions": provenance.versions(*packages),
            "commit": provenance.commit(),
            "day": date.today().isoformat(),
        }
        return cls(benchmark=benchmark, case=case, figures=figures, provenance=where)

    def __getitem__(self, name: str) -> Any:
        for part in (self.case, self.figures, self.provenance):
            if name in part:
                return part[name]
        raise KeyError(f"a row of {self.benchmark!r} has no {name!r}")

    def get(self, name: str) -> Any:
        """The value of this name; None if the row has none."""
        return next(
            (part[name] for part in (self.case, self.figures, self.provenance) if name in part),
            None,
        )


def write_rows(path: str | Path, rows: Iterable[Row]) -> None:
    """Append one JSON object per row; missing folders are created."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as output:
        for row in rows:
            values = {name: getattr(row, name) for name in Row.__slots__}
            output.write(json.dumps(values) + "\n")


def read_rows(path: str | Path, benchmark: str = "") -> list[Row]:
    """The rows of one benchmark in a file; default: of all.

    Raises:
        ValueError: a line that is no row; the message names it.
    """
    rows = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), start=1):
        try:
            row = Row(**json.loads(line))
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"{path}, line {number} is not a row with benchmark, case, figures and "
                f"provenance: {error}; remove it or measure again"
            ) from None
        if benchmark in ("", row.benchmark):
            rows.append(row)
    return rows


def shown_rows(path: str | Path, *benchmarks: str) -> list[Row]:
    """The rows of these benchmarks in a file that `--show` names.

    Raises:
        SystemExit: the file has none; the message says what it has.
    """
    rows = read_rows(path)
    if found := [row for row in rows if row.benchmark in benchmarks]:
        return found
    others = ", ".join(repr(name) for name in dict.fromkeys(row.benchmark for row in rows))
    raise SystemExit(
        f"--show {path}: no row of {' or '.join(map(repr, benchmarks))} in this file; "
        f"it has {f'rows of {others}' if others else 'no rows'}"
    )


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table."""

    heading: str
    value: str | Callable[[Row], Any]
    """Name of a value, or a function of the row."""
    form: str = "{}"
    """Format string of the value; a tuple fills several places."""

    def cell(self, row: Row) -> str:
        """The value as text."""
        value = row.get(self.value) if isinstance(self.value, str) else self.value(row)
        if value is None or value == "":
            return NOTHING
        return self.form.format(*value) if isinstance(value, tuple) else self.form.format(value)


def table_of(rows: Sequence[Row], columns: Sequence[Column], title: str = "") -> Table:
    """Rows as a table for a terminal."""
    cells = [[column.cell(row) for column in columns] for row in rows]
    return text_table([column.heading for column in columns], cells, title)


def text_table(headings: Sequence[str], lines: Iterable[Sequence[str]], title: str = "") -> Table:
    """Text cells as a table for a terminal. Columns that begin with a digit are right-aligned."""
    lines = list(lines)
    table = Table(title=title or None, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for place, heading in enumerate(headings):
        cells = [line[place] for line in lines if line[place] != NOTHING]
        is_number = all(cell[:1].isdigit() or cell[:1] in "+-" for cell in cells)
        table.add_column(heading, justify="right" if is_number else "left", no_wrap=is_number)
    for line in lines:
        table.add_row(*map(escape, line))
    return table


def markdown_of(rows: Sequence[Row], columns: Sequence[Column]) -> Iterator[str]:
    """Rows as the lines of a Markdown table."""
    cells = [[column.cell(row) for column in columns] for row in rows]
    yield from markdown_table([column.heading for column in columns], cells)


def markdown_table(headings: Sequence[str], lines: Iterable[Sequence[str]]) -> Iterator[str]:
    """Text cells as the lines of a Markdown table."""
    yield "| " + " | ".join(headings) + " |"
    yield "|" + "---|" * len(headings)
    for line in lines:
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |"


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """A measured value beside what was wanted."""

    HEADINGS = ("case", "what", "value", "wanted", "")

    case: str
    what: str
    value: float | None
    """None: it should have been measured, which misses the target."""
    wanted: float
    at_most: bool = False

    @property
    def met(self) -> bool:
        """Whether the value reaches the target."""
        if self.value is None:
            return False
        return self.value <= self.wanted if self.at_most else self.value >= self.wanted

    @property
    def cells(self) -> tuple[str, ...]:
        """As text, in the order of `HEADINGS`."""
        value = "not measured" if self.value is None else f"{self.value:.5g}"
        condition = f"{'<=' if self.at_most else '>='} {self.wanted:g}"
        return self.case, self.what, value, condition, "✓" if self.met else "short"


def print_targets(targets: Iterable[Target], console: Console) -> None:
    """Print a table of targets and how many are met; nothing without targets."""
    found = list(targets)
    if found:
        console.print(text_table(Target.HEADINGS, [one.cells for one in found], "targets"))
        console.print(f"{sum(one.met for one in found)} of {len(found)} targets met")


def new_console() -> Console:
    """A console whose tables wrap in a terminal, but not in a file."""
    width = None if sys.stdout.isatty() else 200
    return Console(width=width, soft_wrap=True, highlight=False)


@dataclass(frozen=True, slots=True)
class Kind:
    """How rows of one benchmark are shown."""

    benchmark: str
    columns: Sequence[Column]
    targets: Callable[[Sequence[Row]], Iterable[Target]] = lambda rows: ()
    title: str = ""


def report(
    options: argparse.Namespace,
    measured: Iterable[Row],
    *kinds: Kind,
    expected: tuple[type[Exception], ...] = (),
) -> list[Row]:
    """Print the rows that `--show` names, else those that are measured, and their targets.

    A later row may fail after minutes. So measured rows are appended to `--output` one by one, and
    those before a failure are printed.

    Args:
        options: from `new_parser`.
        measured: measures a row when it is asked for the next one.
        kinds: how the rows are shown.
        expected: failures of a measurement that end the script with their message only.

    Raises:
        SystemExit: an expected failure, or no row in the file to show.
    """
    names = [kind.benchmark for kind in kinds]
    rows = shown_rows(options.show, *names) if options.show else []
    console = new_console()
    try:
        for row in () if options.show else measured:
            rows.append(row)
            if options.output:
                write_rows(options.output, [row])
    except expected as failure:
        raise SystemExit(str(failure)) from None
    finally:
        by_kind = [
            (kind, own)
            for kind in kinds
            if (own := [row for row in rows if row.benchmark == kind.benchmark])
        ]
        for kind, own in by_kind:
            console.print(table_of(own, kind.columns, kind.title))
    print_targets((target for kind, own in by_kind for target in kind.targets(own)), console)
    return rows


def new_parser(
    description: str | None, *, rounds: int | None = None, quick: str = ""
) -> argparse.ArgumentParser:
    """A parser with the options that benchmarks share.

    Args:
        description: the docstring of the script; its first line is shown.
        rounds: default of `--rounds`; None: the script has no such option.
        quick: what `--quick` does; empty: the script has no such option.
    """
    parser = argparse.ArgumentParser(
        description=(description or "").partition("\n")[0],
        formatter_class=_Formatter,
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="append the rows")
    parser.add_argument("--show", type=Path, metavar="FILE", help="show saved rows, measure none")
    if rounds is not None:
        parser.add_argument("--rounds", type=at_least(1), default=rounds, help="turns of each")
    if quick:
        parser.add_argument("--quick", action="store_true", help=quick)
    return parser


class _Formatter(argparse.ArgumentDefaultsHelpFormatter):
    """Adds defaults to the help of options that have one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default in (None, False) or "default" in (action.help or ""):
            return action.help
        return super()._get_help_string(action)


def at_least(least: float) -> Callable[[str], Any]:
    """A type of options: a number of the same kind as `least`, which is the smallest one."""

    def number(text: str) -> Any:
        value = type(least)(text)
        if not value >= least:
            raise argparse.ArgumentTypeError(f"must be at least {least:g}, got {text}")
        return value

    return number
