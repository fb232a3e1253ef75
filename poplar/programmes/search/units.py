"""Which multiples cuts must have: heads of attention, tokens of samples whose rows are joined."""

from __future__ import annotations

from collections.abc import Mapping

from poplar.programmes.graph.graph import LEAVES, Graph
from poplar.programmes.rules.pattern import Dims, Pattern

AxisUnits = dict[str, dict[str, set[int]]]
"""The units to consider for each node and axis."""


def axis_units(graph: Graph, patterns: Mapping[str, Pattern]) -> AxisUnits:
    """Units with which an operator's axis is cut as an operator before or after it needs.

    A linear layer before attention has the units 1 and the channels of a head, because `view` in
    between makes heads of its columns.

    Args:
        graph: with the nodes.
        patterns: of all nodes that are no leaves.
    """
    units: AxisUnits = {
        name: {axis: {1} for axis in pattern.divisible_axes()} for name, pattern in patterns.items()
    }
    has_changed = True
    while has_changed:
        has_changed = False
        for name, pattern in patterns.items():
            for source, dims in zip(graph.nodes[name].inputs, pattern.inputs, strict=True):
                if graph.nodes[source].operator not in LEAVES:
                    before = (patterns[source], patterns[source].output, units[source])
                    after = (pattern, dims, units[name])
                    has_changed |= _exchange(before, after) | _exchange(after, before)
    return units


_Side = tuple[Pattern, Dims, dict[str, set[int]]]


def _exchange(giver: _Side, taker: _Side) -> bool:
    """Let one operator consider the units of another one that has the same tensor."""
    has_changed = False
    for dim, axes in enumerate(giver[1]):
        other = taker[1][dim][:1]
        if not axes or axes[0] not in giver[2] or not other or other[0] not in taker[2]:
            continue
        given_inner = giver[0].inner_size(giver[1], dim)
        taken_inner = taker[0].inner_size(taker[1], dim)
        size, known = taker[0].sizes[other[0]], taker[2][other[0]]
        for unit in sorted(giver[2][axes[0]]):
            taken, rest = divmod(unit * given_inner, taken_inner)
            if rest == 0 and taken and size % taken == 0 and taken not in known:
                known.add(taken)
                has_changed = True
    return has_changed
