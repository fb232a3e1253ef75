"""A programme: where each tensor of a graph is, and so which collectives move it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from poplar.programmes.graph.graph import LEAVES, Graph
from poplar.programmes.graph.placement import PARTIAL, Placement
from poplar.values.schema import Document


class Collective(NamedTuple):
    """The output of `node` is also needed in another placement."""

    node: str
    source: Placement
    target: Placement


@dataclass(frozen=True, kw_only=True)
class Programme(Document):
    """How the ranks compute one forward and backward pass together."""

    _noun = "programme"
    _version = 4
    _remedy = "write one with Programme.to_json"

    ratios: tuple[int, ...]
    """Part of each rank of every dimension that is sharded; see `cut`."""
    placements: Mapping[str, Placement]
    """The placement of the output of each node, by its name, as the node computes it."""
    inputs: Mapping[str, tuple[Placement, ...]]
    """The placements in which each node reads its tensors, in the order of the arguments."""
    shares: tuple[float, ...] = ()
    """Part of each rank of the gradients and the optimizer state of replicated parameters; they sum
    to 1. Empty: even parts."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.ratios)

    def parameters(self, graph: Graph) -> dict[str, Placement]:
        """The placement of each parameter of a graph, by its name in the model."""
        return {source: self.placements[node.name] for source, node in graph.parameters.items()}

    def collectives(self, graph: Graph) -> tuple[Collective, ...]:
        """The collectives between the nodes of a graph, in the order of the first reads.

        Raises:
            ValueError: the programme lacks a placement of a node or of what it reads, or values
                would have to become partial.
        """
        found: dict[Collective, None] = {}
        for name, node in graph.nodes.items():
            if name not in self.placements:
                raise ValueError(f"Programme.placements must have the graph's node {name!r}")
            if node.operator in LEAVES:
                continue
            targets = self.inputs.get(name, ())
            if len(targets) != len(node.inputs):
                raise ValueError(
                    f"Programme.inputs must have {len(node.inputs)} placements of the inputs of "
                    f"{name!r}, got {self.inputs.get(name)}"
                )
            for read, target in zip(node.inputs, targets, strict=True):
                source = self.placements[read]
                if target == source:
                    continue
                if target is PARTIAL:
                    raise ValueError(
                        f"{name!r} reads {read!r} as {target!r}, and no collective makes that of "
                        f"{source!r}"
                    )
                found[Collective(read, source, target)] = None
        return tuple(found)
