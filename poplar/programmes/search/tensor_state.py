"""Where one tensor is while the search places the nodes of a graph."""

from __future__ import annotations

from poplar.programmes.graph.placement import Placement

_NONE: frozenset[Placement] = frozenset()


class TensorState:
    """The placements of one tensor. Equal states are one object (`TensorStates`)."""

    __slots__ = ("copies", "noted", "placement", "without_copies")

    def __init__(
        self,
        placement: Placement,
        copies: frozenset[Placement],
        noted: frozenset[Placement],
        without_copies: TensorState | None,
    ) -> None:
        self.placement = placement
        """The placement in which the tensor was computed."""
        self.copies = copies
        """The placements to which it was moved, and in which a later node may read it. Parts of a
        replicated tensor cost nothing and are left out."""
        self.noted = noted
        """The placements in which a folded block has read it: the next repetitions need these of
        the tensor that they read in its place."""
        self.without_copies: TensorState = self if without_copies is None else without_copies


State = tuple[TensorState, ...]
"""The tensors that are still needed, in the order of the graph."""


class TensorStates:
    """One object for each state that a tensor can have, so that comparing states is cheap."""

    def __init__(self) -> None:
        self._known: dict[
            tuple[Placement, frozenset[Placement], frozenset[Placement]], TensorState
        ] = {}

    def of(
        self,
        placement: Placement,
        copies: frozenset[Placement] = _NONE,
        noted: frozenset[Placement] = _NONE,
    ) -> TensorState:
        """The state with these placements."""
        key = (placement, copies, noted)
        if key not in self._known:
            plain = self.of(placement, noted=noted) if copies else None
            self._known[key] = TensorState(placement, copies, noted, plain)
        return self._known[key]
