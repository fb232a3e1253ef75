"""How exactly the ranks send what they send in a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from poplar.values.schema import Count, check_fields

Precision = Literal["exact", "int8", "int4"]
"""`exact`: as computed. `int8`, `int4`: as 8 or 4 bits per element, rounded at random without bias
in groups of 64 elements with one scale, and added in fp32."""
BITS = {"exact": 0, "int8": 8, "int4": 4}
"""Bits per element; 0: not encoded."""


@dataclass(frozen=True, slots=True)
class Communication:
    """The precision of what is sent. Less than `exact` adds noise to the gradient."""

    gradients: Precision = "exact"
    """Of each rank's weighted gradients, and of the sums that stage 0 sends back."""
    warmup_steps: Count = 0
    """So many first steps of the training send everything exactly."""

    def __post_init__(self) -> None:
        check_fields(self)

    @classmethod
    def of(cls, given: Precision | Communication) -> Communication:
        """One precision for everything, or what is given.

        Raises:
            ValueError: an unknown precision.
        """
        return given if isinstance(given, Communication) else cls(gradients=given)


EXACT = Communication()
"""Everything as computed."""
