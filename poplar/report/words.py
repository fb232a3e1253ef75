"""Numbers as a person reads them: few digits, always with a unit."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from poplar.profile import ClusterProfile

_BYTE_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


def seconds(value: float) -> str:
    """`1.05 s`, `48.0 ms`, `90 µs`."""
    size = abs(value)
    if size >= 100:
        return f"{value:.0f} s"
    if size >= 0.9995:
        return f"{value:.2f} s"
    if size == 0:
        return "0 s"
    if size >= 0.9995e-3:
        return f"{1e3 * value:.{0 if size >= 0.1 else 1}f} ms"
    return f"{1e6 * value:.0f} µs"


def seconds_range(values: Sequence[float]) -> str:
    """`1.02 s to 1.05 s`, or one of them where they read the same."""
    low, high = seconds(min(values)), seconds(max(values))
    return low if low == high else f"{low} to {high}"


def size(value: float) -> str:
    """`3.1 GiB`, `120 MiB`, `0 B`."""
    for unit, factor in _BYTE_UNITS:
        if value >= factor:
            scaled = value / factor
            return f"{scaled:.{0 if scaled >= 99.95 else 1}f} {unit}"
    return f"{value:.0f} B"


def byte_unit(largest: float) -> tuple[str, int]:
    """The unit, and its bytes, for an axis up to `largest` bytes."""
    return next(
        ((unit, factor) for unit, factor in _BYTE_UNITS if largest >= factor), _BYTE_UNITS[-1]
    )


def percent(fraction: float) -> str:
    """`95 %`."""
    return f"{100 * fraction:.0f} %"


def signed_percent(fraction: float) -> str:
    """`+3.1 %`, with a real minus."""
    text = f"{100 * fraction:+.1f} %"
    return "±0.0 %" if text in ("+0.0 %", "-0.0 %") else text.replace("-", "\N{MINUS SIGN}")


def count(value: float) -> str:
    """`4 700 000` as `4.7 million`."""
    for name, factor in (("billion", 1e9), ("million", 1e6)):
        if value >= factor:
            return f"{value / factor:.1f} {name}"
    return f"{value:,.0f}".replace(",", "\N{NARROW NO-BREAK SPACE}")


def passes(sizes: Sequence[int]) -> str:
    """`(3, 8, 8)` as `3 + 2 × 8`."""
    runs = [(batch, len(list(alike))) for batch, alike in groupby(sizes)]
    return " + ".join(f"{many} × {batch}" if many > 1 else str(batch) for batch, many in runs) or (
        "none"
    )


def ranks(numbers: Sequence[int]) -> str:
    """`rank 2`, `ranks 0-3`, `ranks 0, 2-4`."""
    parts, first = [], 0
    for i, number in enumerate(numbers):
        if i + 1 == len(numbers) or numbers[i + 1] != number + 1:
            low = numbers[first]
            parts.append(str(low) if low == number else f"{low}\N{EN DASH}{number}")
            first = i + 1
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(parts)}"


def rank_labels(profile: ClusterProfile) -> list[str]:
    """`rank 0`, with the device's name where ranks have different ones."""
    names = [device.name for device in profile.devices]
    if len(set(names)) == 1:
        return [f"rank {rank}" for rank in range(len(names))]
    return [f"rank {rank} · {name}" for rank, name in enumerate(names)]
