"""What people type on a command line, as values."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

import typer

from poplar.plan import STRATEGIES

_STAGES = range(len(STRATEGIES))
_UNITS = {
    "": 1,
    "b": 1,
    **{letter + "ib": 1 << 10 * power for power, letter in enumerate("kmgt", start=1)},
    **{letter + "b": 10 ** (3 * power) for power, letter in enumerate("kmgt", start=1)},
}


def sizes(text: str) -> tuple[int, ...]:
    """Bytes: one size as in `8GiB`, or one per rank, as in `8GiB,4GiB`."""
    return tuple(_size(part) for part in text.split(","))


def one_of(choices: Iterable[str]) -> Callable[[str], str]:
    """A parser of one of several words."""
    known = tuple(choices)

    def parser(text: str) -> str:
        if text not in known:
            raise typer.BadParameter(f"expected one of {', '.join(known)}; got {text!r}")
        return text

    return parser


def of_rank(sizes: tuple[int, ...] | None, rank: int, world_size: int) -> int | None:
    """The size that is meant for this rank.

    Raises:
        ValueError: neither one size nor one per rank.
    """
    if sizes is None:
        return None
    if len(sizes) not in (1, world_size):
        raise ValueError(
            f"{len(sizes)} memory limits for {world_size} ranks; give one for all, or one per rank"
        )
    return sizes[0] if len(sizes) == 1 else sizes[rank]


def stages(text: str) -> tuple[int, ...]:
    """ZeRO stages: `auto` (all of them), or some, as in `0,2`."""
    if text.strip() == "auto":
        return tuple(_STAGES)
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() and int(part) in _STAGES for part in parts):
        raise typer.BadParameter(
            f"expected auto or stages from 0 to 3, as in 0,2; got {text!r}", param_hint="stage"
        )
    return tuple(sorted({int(part) for part in parts}))


def _size(text: str) -> int:
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", text.lower())
    if not found or found[2] not in _UNITS or not float(found[1]):
        raise typer.BadParameter(
            f"expected a size above 0, as in 8GiB or 500MB; got {text!r}",
            param_hint="memory limit",
        )
    return int(float(found[1]) * _UNITS[found[2]])
