"""Positions of labels, moved apart where they would overlap."""

from __future__ import annotations

from collections.abc import Sequence


def spread(positions: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Move positions as little as possible so that adjacent ones are `gap` apart.

    Args:
        positions: preferred position of each label, in any order.
        gap: least distance between two labels.
        low: lower limit, unless the labels do not fit.
        high: upper limit.

    Returns:
        One position per label, in the order of `positions`.

    Least squares: labels that collide form a group around the mean of their preferred positions.
    """
    order = sorted(range(len(positions)), key=lambda i: positions[i])
    groups: list[tuple[float, int]] = []  # sum of (wish - offset in the group), members
    for index in order:
        groups.append((positions[index], 1))
        while len(groups) > 1 and _overlap(groups[-2], groups[-1], gap):
            (total, many), (more_total, more) = groups[-2:]
            groups[-2:] = [(total + more_total - more * many * gap, many + more)]
    placed: list[float] = []
    for total, many in groups:
        placed += [total / many + i * gap for i in range(many)]
    for i in range(len(placed)):
        placed[i] = max(placed[i], low if i == 0 else placed[i - 1] + gap)
    for i in reversed(range(len(placed))):
        placed[i] = min(placed[i], high if i == len(placed) - 1 else placed[i + 1] - gap)
    result = [0.0] * len(placed)
    for index, position in zip(order, placed, strict=True):
        result[index] = position
    return result


def _overlap(below: tuple[float, int], above: tuple[float, int], gap: float) -> bool:
    total, many = below
    last = total / many + (many - 1) * gap
    return above[0] / above[1] < last + gap
