"""A programme: where each tensor of a graph is, and which collectives move it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from poplar.programmes.graph.placement import PARTIAL, Placement, from_json
from poplar.values.regular_files import read_regular
from poplar.values.schema import parse_json, to_json_types

_KIND = "poplar programme"
_TOLERANCE = 1e-9
_FIELDS = ("ratios", "shares", "placements", "parameters", "collectives", "inputs")


@dataclass(frozen=True, slots=True)
class Collective:
    """The output of `node` is also needed in another placement."""

    node: str
    source: Placement
    target: Placement

    def __post_init__(self) -> None:
        if self.source == self.target or self.target is PARTIAL:
            raise ValueError(
                f"Collective of {self.node!r}: there is none from {self.source} to {self.target}"
            )


@dataclass(frozen=True, kw_only=True)
class Programme:
    """How the ranks compute one forward and backward pass together."""

    ratios: tuple[int, ...]
    """Part of each rank of every dimension that is sharded; see `cut`."""
    placements: Mapping[str, Placement]
    """The placement of the output of each node, by its name, as the node computes it."""
    parameters: Mapping[str, Placement]
    """The placement of each parameter, by its name in the model."""
    collectives: tuple[Collective, ...]
    inputs: Mapping[str, tuple[Placement | None, ...]]
    """For each node: the placements in which it reads its tensors, in the order of the arguments;
    None for one that it does not read."""
    shares: tuple[float, ...] = ()
    """Part of each rank of the gradients and the optimizer state of replicated parameters; they sum
    to 1. Empty: even parts."""

    def __post_init__(self) -> None:
        if not self.ratios or min(self.ratios) < 0 or not any(self.ratios):
            raise ValueError(
                "Programme.ratios must be at least 0 and one of them above 0, got "
                f"{tuple(self.ratios)}"
            )
        adds_up = abs(math.fsum(self.shares) - 1.0) <= _TOLERANCE
        is_valid = adds_up and len(self.shares) == self.world_size and min(self.shares) >= 0.0
        if self.shares and not is_valid:
            raise ValueError(
                f"Programme.shares must have one entry for each of {self.world_size} ranks, none "
                f"below 0, and sum to 1, or be empty; got {tuple(self.shares)}"
            )

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.ratios)

    def to_dict(self) -> dict[str, Any]:
        """This value as JSON types, for `from_dict`."""
        content: dict[str, Any] = to_json_types(self)
        return content

    def to_json(self, path: str | Path) -> None:
        """Write this programme to a file, for `from_json`."""
        text = json.dumps({"kind": _KIND, **self.to_dict()}, indent=1)
        Path(path).write_text(text + "\n", encoding="utf-8")

    @classmethod
    def from_json(cls, path: str | Path) -> Programme:
        """The programme that `to_json` wrote.

        Raises:
            OSError: the file cannot be read.
            ValueError: it is not the file of a programme.
        """
        try:
            content = parse_json(read_regular(path).decode())
            if content.pop("kind", None) != _KIND:
                raise ValueError("it has another kind")
            return cls.from_dict(content)
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            raise ValueError(
                f"{path} is not a programme: {error}; write one with Programme.to_json"
            ) from error

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Programme:
        """The programme that `to_dict` wrote.

        Raises:
            ValueError: a field is missing or unknown, or a value is not of its field.
        """
        if set(content) != set(_FIELDS):
            raise ValueError(f"a programme has the fields {_FIELDS}, got {tuple(content)}")
        return cls(
            ratios=tuple(content["ratios"]),
            shares=tuple(content["shares"]),
            placements={name: from_json(value) for name, value in content["placements"].items()},
            parameters={name: from_json(value) for name, value in content["parameters"].items()},
            collectives=tuple(
                Collective(c["node"], from_json(c["source"]), from_json(c["target"]))
                for c in content["collectives"]
            ),
            inputs={
                name: tuple(None if value is None else from_json(value) for value in values)
                for name, values in content["inputs"].items()
            },
        )
