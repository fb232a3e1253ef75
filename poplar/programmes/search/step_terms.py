"""What a programme computes, moves and holds, as sums over its nodes and collectives.

How much of a tensor a rank has depends only on the number of units of the dimension that is cut, so
the sums are by that number. With them, a step is predicted for any ratios without another look at
the graph.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from functools import lru_cache

from poplar.programmes.graph.graph import LEAVES, PARAMETER, Graph, TensorType
from poplar.programmes.graph.placement import PARTIAL, REPLICATED, Placement, Sharded, part_sizes
from poplar.programmes.graph.programme import Programme
from poplar.programmes.rules.pattern import Pattern
from poplar.programmes.rules.registry import pattern_of
from poplar.programmes.rules.strategy import Strategy, strategy_of

WHOLE = 0
"""Number of units that stands for all of a tensor on every rank."""
EVEN = -1
"""Number of units that stands for equal parts."""
_WITH_BACKWARD = 3.0
"""Work of forward and backward, relative to forward."""
_ELEMENT_WORK = 32.0
"""Operations in the time in which an element is read and written. On a CPU core of 40 GFLOP/s and
10 GB/s; more on GPUs, whose products are also less of their time."""


@lru_cache(4096)
def parts_of(units: int, ratios: tuple[int, ...]) -> tuple[float, ...]:
    """The part of each rank of a dimension of so many units."""
    if units == WHOLE:
        return (1.0,) * len(ratios)
    if units == EVEN:
        return (1.0 / len(ratios),) * len(ratios)
    return tuple(size / units for size in part_sizes(units, ratios))


def work_of(pattern: Pattern, *, trained: bool) -> float:
    """Operations of a node, counting the memory traffic of its output; views have none."""
    if not pattern.flops:
        return 0.0
    elements = math.prod(pattern.sizes[axis] for dim in pattern.output for axis in dim)
    return (pattern.flops + _ELEMENT_WORK * elements) * (_WITH_BACKWARD if trained else 1.0)


def divided_units(pattern: Pattern, strategy: Strategy) -> int:
    """Number of units of the axis along which a node is divided."""
    if not strategy.axis:
        return WHOLE
    return max(1, pattern.sizes[strategy.axis] // strategy.unit)


def units_of(kind: TensorType, placement: Placement) -> int:
    """Number of units of the dimension that is cut."""
    if not isinstance(placement, Sharded):
        return WHOLE
    return max(1, kind.shape[placement.dim] // placement.unit)


@dataclass(frozen=True, slots=True)
class Transfer:
    """One collective, as the parts of its two sides."""

    kind: str
    """`"gather"`, `"reduce"` or `"exchange"`."""
    units: tuple[int, ...]
    """Numbers of units of the cut side, or of both."""


def transfers_of(
    kind: TensorType, source: Placement, target: Placement, *, trained: bool
) -> list[Transfer]:
    """What a change of placement communicates, with its adjoint in the backward pass."""
    if source is REPLICATED or source == target:
        return []
    before, after = units_of(kind, source), units_of(kind, target)
    if source is PARTIAL and target is REPLICATED:
        forward = [Transfer("reduce", (EVEN,)), Transfer("gather", (EVEN,))]
        backward = forward
    elif source is PARTIAL:
        forward, backward = [Transfer("reduce", (after,))], [Transfer("gather", (after,))]
    elif target is REPLICATED:
        forward, backward = [Transfer("gather", (before,))], [Transfer("reduce", (before,))]
    else:
        forward = [Transfer("exchange", (before, after))]
        backward = [Transfer("exchange", (after, before))]
    return forward + backward if trained and kind.is_floating else forward


@dataclass(frozen=True)
class StepTerms:
    """The sums of a programme."""

    work: Counter[int] = field(default_factory=Counter)
    """Work by number of units of the divided axis."""
    transfers: Counter[Transfer] = field(default_factory=Counter)
    """Bytes of whole tensors."""
    calls: Counter[Transfer] = field(default_factory=Counter)
    """Number of collectives."""
    sharded: Counter[int] = field(default_factory=Counter)
    """Elements of sharded parameters that are trained, by number of units."""
    frozen: Counter[int] = field(default_factory=Counter)
    """Bytes of sharded parameters that are not trained, by number of units."""
    replicated: int = 0
    """Elements of other parameters that are trained."""
    held: Counter[int] = field(default_factory=Counter)
    """Bytes of tensors that the backward may need, by number of units."""

    @property
    def replicated_fraction(self) -> float:
        """Part of the trained parameters that every rank has."""
        total = self.replicated + sum(self.sharded.values())
        return self.replicated / total if total else 1.0

    @classmethod
    def of(cls, graph: Graph, programme: Programme) -> StepTerms:
        """The sums of a programme of a graph."""
        trained = graph.depending(lambda node: node.is_trained)  # these have a backward pass
        replicated = [
            node.output.numel
            for name, node in graph.nodes.items()
            if node.is_trained and not isinstance(programme.placements[name], Sharded)
        ]
        terms = cls(replicated=sum(replicated))
        for name, node in graph.nodes.items():
            placement = programme.placements[name]
            if node.operator == PARAMETER and isinstance(placement, Sharded):
                units = units_of(node.output, placement)
                if node.is_trained:
                    terms.sharded[units] += node.output.numel
                else:
                    terms.frozen[units] += node.output.nbytes
            elif node.operator not in LEAVES:
                pattern = pattern_of(graph, node)
                strategy = strategy_of(pattern, programme.inputs[name], placement)
                own = work_of(pattern, trained=name in trained)
                terms.work[divided_units(pattern, strategy)] += own  # type: ignore[assignment]
                if own and name in trained:
                    terms.held[units_of(node.output, placement)] += node.output.nbytes
        for moved in programme.collectives(graph):
            kind, is_trained = graph.nodes[moved.node].output, moved.node in trained
            found = transfers_of(kind, moved.source, moved.target, trained=is_trained)
            for transfer in found:
                terms.transfers[transfer] += kind.nbytes
                terms.calls[transfer] += 1
            if found and is_trained:
                terms.held[units_of(kind, moved.target)] += kind.nbytes
        return terms
