"""The argument `memory_limit`: bytes of this rank, or of several ranks by number or device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from poplar.values.formatting import format_ranks, parse_bytes
from poplar.values.schema import positive_count

Size = int | str
"""Bytes, or text such as "10GiB"."""
MemoryLimit = Size | Mapping[int | str, Size] | None
"""Bytes of this rank; or by rank number or device, the same on all ranks; or none."""


def check(limit: Any) -> None:
    """Check the argument on this rank alone.

    Raises:
        ValueError, TypeError: says what is expected.
    """
    if isinstance(limit, Mapping):
        for key, size in limit.items():
            if isinstance(key, bool) or not isinstance(key, (int, str)):
                raise TypeError(
                    f"memory_limit: expected a rank number or a device such as 'cuda:1' as key, "
                    f"got {key!r}"
                )
            in_bytes(size, f"memory_limit[{key!r}]")
    elif limit is not None:
        in_bytes(limit, "memory_limit")


def in_bytes(size: Any, name: str) -> int:
    """A size as a number of bytes.

    Raises:
        ValueError: neither an integer above 0 nor a text such as "10GiB"; starts with `name`.
    """
    if isinstance(size, str):
        try:
            return parse_bytes(size)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    if (count := positive_count(size)) is None:
        raise ValueError(
            f"{name} must be an integer above 0, got {size!r}; it is the bytes that a rank may "
            "use, or text such as '10GiB'; default: what is free"
        )
    return count


def by_rank(limits: Sequence[MemoryLimit], devices: Sequence[str]) -> list[int | None]:
    """Bytes of each rank, from the arguments and devices of all ranks; None without a limit.

    An entry for a rank takes precedence over one for its device. An entry for a device counts for
    every rank on a device of this name, on any host.

    Raises:
        ValueError: the ranks were given different mappings, or one for a rank or device that does
            not exist; the same on all ranks.
    """
    if not any(isinstance(limit, Mapping) for limit in limits):
        sizes = [limit for limit in limits if not isinstance(limit, Mapping)]
        return [None if size is None else in_bytes(size, "memory_limit") for size in sizes]
    first = limits[0]
    different = [rank for rank, limit in enumerate(limits) if limit != first]
    if different or not isinstance(first, Mapping):
        raise ValueError(
            f"a memory_limit by rank or device must be the same on all ranks, but rank 0 has "
            f"{first!r} and rank {different[0]} has {limits[different[0]]!r}"
        )
    for key in first:
        if key not in devices and key not in range(len(devices)):
            raise ValueError(
                f"memory_limit has an entry for {_named(key)}, which does not exist; there are "
                f"{_existing(devices)}"
            )
    found = (first.get(rank, first.get(device)) for rank, device in enumerate(devices))
    return [None if size is None else in_bytes(size, "memory_limit") for size in found]


def _named(key: int | str) -> str:
    return f"rank {key}" if isinstance(key, int) else f"device {key!r}"


def _existing(devices: Sequence[str]) -> str:
    """`ranks 0-1 on 'cuda:0', rank 2 on 'cuda:1'`."""
    ranks: dict[str, list[int]] = {}
    for rank, device in enumerate(devices):
        ranks.setdefault(device, []).append(rank)
    return ", ".join(f"{format_ranks(own)} on {device!r}" for device, own in ranks.items())
