"""How messages, tables and reports write numbers: few digits, always with a unit."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Collection, Sequence
from itertools import groupby

NOISY = 0.1
"""Half of an interval, as a fraction, above which a figure is called noisy everywhere: twice the
error of predictions on a quiet machine."""
_BYTE_UNITS = (("GiB", 2**30, 2), ("MiB", 2**20, 1), ("KiB", 2**10, 1), ("B", 1, 0))
_PARSED_UNITS = {
    "": 1,
    "b": 1,
    **{letter + "ib": 1 << 10 * power for power, letter in enumerate("kmgt", start=1)},
    **{letter + "b": 10 ** (3 * power) for power, letter in enumerate("kmgt", start=1)},
}
_CONTROL = ("Cc", "Cf", "Cs", "Zl", "Zp")
"""Categories of characters that move the cursor, change the direction of writing or are hidden."""
_MAX_NAMES = 5
"""Names that are listed; of further ones, only the number."""
_MAX_RUNS = 6
"""Runs of consecutive ranks that are listed; of more, only the number and the range."""


def format_bytes(count: float, *, round_up: bool = False) -> str:
    """`1.50 GiB`, `20.0 MiB`, `19.5 KiB`, `12 B`.

    Args:
        round_up: never write less than `count`, for amounts that have to be enough.
    """
    unit, factor, decimals = byte_unit(count)
    scaled = count / factor
    if round_up:
        scaled = math.ceil(scaled * 10**decimals) / 10**decimals
    return f"{scaled:.{decimals}f} {unit}"


def parse_bytes(text: str) -> int:
    """Bytes of a size such as `8GiB`, `500 MB` or `1024`; the inverse of `format_bytes`.

    Raises:
        ValueError: not a size above 0.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", text.lower())
    size = int(float(found[1]) * _PARSED_UNITS.get(found[2], 0)) if found else 0
    if size < 1:
        raise ValueError(f"expected a size above 0, as in 8GiB or 500MB; got {text!r}")
    return size


def byte_unit(count: float) -> tuple[str, int, int]:
    """The unit in which this many bytes are written, its bytes, and decimals."""
    units = (unit for unit in _BYTE_UNITS if abs(count) >= unit[1])
    return next(units, _BYTE_UNITS[-1])


def format_usage(used: float, limit: float) -> str:
    """`3.10 of 8.00 GiB`, or `700.0 MiB of 8.00 GiB` where the units differ."""
    used_text, limit_text = format_bytes(used), format_bytes(limit)
    number, _, unit = used_text.partition(" ")
    return f"{number if limit_text.endswith(f' {unit}') else used_text} of {limit_text}"


def format_seconds(seconds: float) -> str:
    """`123 s`, `1.05 s`, `48.2 ms`, `90 µs`."""
    size = abs(seconds)
    if size >= 100:
        return f"{seconds:.0f} s"
    if size >= 0.1:
        return f"{seconds:.3g} s"
    return f"{1e3 * seconds:.3g} ms" if size >= 1e-4 or not size else f"{1e6 * seconds:.3g} µs"


def format_interval(step: float, interval: Sequence[float]) -> str:
    """`80 %: 0.902 to 0.981 s`, with `noisy` if it is wider than `NOISY` on both sides."""
    low, high = map(format_seconds, interval)
    number, _, unit = low.partition(" ")
    low = number if high.endswith(f" {unit}") else low
    return f"80 %: {low} to {high}" + (", noisy" if is_noisy(step, interval) else "")


def is_noisy(step: float, interval: Sequence[float]) -> bool:
    """Whether half of an 80 % interval is more than the part `NOISY` of the step."""
    return interval[1] - interval[0] > 2.0 * NOISY * step


def format_rate(samples_per_second: float) -> str:
    """`1234 samples/s`, `27.6 samples/s`."""
    digits = ".0f" if samples_per_second >= 100 else ".3g"
    return f"{samples_per_second:{digits}} samples/s"


def format_percent(fraction: float) -> str:
    """`95 %`."""
    return f"{100 * fraction:.0f} %"


def format_signed_percent(fraction: float) -> str:
    """`+12 %`, `-0.4 %`: whole percents from 10 % on, else one decimal."""
    percent = 100 * fraction
    text = f"{percent:+.0f} %" if abs(percent) >= 9.95 else f"{percent:+.1f} %"
    return "+0.0 %" if text == "-0.0 %" else text


def format_count(value: float) -> str:
    """`4.7 million`, `512`."""
    for name, factor in (("billion", 1e9), ("million", 1e6)):
        if value >= factor:
            return f"{value / factor:.1f} {name}"
    return f"{value:,.0f}"


def format_passes(sizes: Sequence[int]) -> str:
    """The micro-batches of one rank: `(3, 8, 8)` is `1x3 + 2x8`."""
    runs = [f"{len(list(run))}x{size}" for size, run in groupby(sizes)]
    return " + ".join(runs) or "none"


def format_ranks(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 0-2, 5`, `1000 ranks from 0 to 1998`."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    if len(runs) > _MAX_RUNS:
        return f"{len(ranks)} ranks from {runs[0][0]} to {runs[-1][-1]}"
    written = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {written}"


def format_layers(names: Sequence[str]) -> str:
    """`first, blocks.*.up (12)`: layers that differ only in numbers are counted together."""
    by_pattern: dict[str, list[str]] = {}
    for name in names:
        parts = ("*" if part.isdigit() else part for part in name.split("."))
        by_pattern.setdefault(".".join(parts), []).append(name)
    return ", ".join(
        each[0] if len(each) == 1 else f"{pattern} ({len(each)})"
        for pattern, each in by_pattern.items()
    )


def format_names(names: Sequence[str]) -> str:
    """`'a', 'b'`, `'a', 'b', 'c', 'd', 'e' and 7 more`, `none`."""
    shown = ", ".join(map(repr, names[:_MAX_NAMES])) or "none"
    more = len(names) - _MAX_NAMES
    return f"{shown} and {more} more" if more > 0 else shown


def format_table(*rows: Sequence[str], right: Collection[int] = ()) -> str:
    """The rows as lines with aligned columns; the first row is the header.

    Args:
        *rows: cells, equally many in each row.
        right: columns that are aligned to the right.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def printable(text: str) -> str:
    r"""The text with control characters, which terminals obey, as escapes such as `\x1b`.

    Names of devices and tensors, paths and errors may come from the file of a stranger.
    """
    return "".join(
        ascii(char)[1:-1] if unicodedata.category(char) in _CONTROL and char not in "\n\t" else char
        for char in text
    )
