"""Whoever carries collectives: what a case becomes in their hands."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from collectives.case import Case


@dataclass(frozen=True)
class Prepared:
    """A case, ready to be run again and again. Collective: all ranks run it together."""

    run: Callable[[], None]
    result: Callable[[], Tensor]
    """What this rank has after its first run; where a run works in place, later ones differ."""


class Provider(ABC):
    """One way to carry collectives, in the processes of the benchmark."""

    name: str
    """As tables show it."""
    transport: str
    """What it goes by: `gloo`, `shared_memory`, ..."""
    zero_copy = False
    """Inputs and results lie where all ranks can reach them; else they are ordinary tensors."""

    @abstractmethod
    def prepare(self, case: Case, mine: Tensor) -> Prepared | None:
        """Get ready for a case; None if this provider has no such collective. Collective.

        Args:
            case: what is asked.
            mine: this rank's input, which stays as it is.
        """
