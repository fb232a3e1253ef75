"""The interface of the providers of collectives."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from collectives.case import Case


@dataclass(frozen=True)
class Prepared:
    """A case that is ready to run repeatedly. Collective: all ranks run it together."""

    run: Callable[[], None]
    result: Callable[[], Tensor]
    """The result on this rank after the first run; in-place runs change it afterwards."""


class Provider(ABC):
    """An implementation of collectives."""

    name: str
    """The name in tables."""
    transport: str
    """The transport: `gloo`, `shared_memory`, ..."""
    zero_copy = False
    """Inputs and results are in memory that all ranks can read; otherwise in ordinary tensors."""

    @abstractmethod
    def prepare(self, case: Case, mine: Tensor) -> Prepared | None:
        """Prepare a case; returns None if this provider does not support it. Collective.

        Args:
            case: the collective to run.
            mine: this rank's input, which must not be changed.
        """
