"""How exactly the ranks send what they send in a step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from poplar.values.schema import Count, check_fields

Precision = Literal["exact", "int8", "int4"]
"""`exact`: as computed. `int8`, `int4`: as 8 or 4 bits per element, rounded at random without bias
in groups of 64 elements with one scale, and added in fp32."""
BITS = {"exact": 0, "int8": 8, "int4": 4}
"""Bits per element; 0: not encoded."""
GROUP = 64
"""Elements with one scale, of 2 bytes."""


@dataclass(frozen=True, slots=True)
class Communication:
    """The precision of what is sent. Less than `exact` adds noise to the training."""

    gradients: Precision = "exact"
    """Of each rank's weighted gradients, and of the sums that stage 0 sends back."""
    parameters: Precision = "exact"
    """Of what owners send after an update (stages 1 and 2): its difference to the values of all
    ranks, so that an error is corrected by the next update. Of the weights that are unsharded in a
    pass (stage 3): their values, so at least `int8`. Stage 0 sends no parameters."""
    warmup_steps: Count = 0
    """So many first steps of the training send everything exactly."""

    def __post_init__(self) -> None:
        check_fields(self)

    @classmethod
    def of(cls, given: Precision | Communication, stage: int) -> Communication:
        """What is given; one precision stands for everything that the stage sends.

        With `int4`, stage 3 sends weights as `int8`.

        Raises:
            ValueError: an unknown precision.
        """
        if isinstance(given, Communication):
            return given
        return cls(gradients=given, parameters=given).at(stage)

    def at(self, stage: int) -> Communication:
        """The same, as far as a stage can communicate like this."""
        if stage == 0:
            return replace(self, parameters="exact")
        too_short = stage == 3 and self.parameters == "int4"
        return replace(self, parameters="int8") if too_short else self

    def before_updates(self, stage: int) -> Communication:
        """What changes the gradient of a step before which nothing was updated.

        At stages 1 and 2 updates are sent, and there are none yet.
        """
        parameters = self.parameters if stage == 3 else "exact"
        return replace(self, parameters=parameters, warmup_steps=0)

    def __str__(self) -> str:
        """What is sent in which precision, such as `gradients sent as int8: ...`."""
        if not self.compresses:
            return "everything sent exactly"
        sent = (f"gradients sent as {self.gradients}", f"parameters sent as {self.parameters}")
        precisions = zip(sent, (self.gradients, self.parameters), strict=True)
        text = ", ".join(part for part, precision in precisions if BITS[precision])
        warmup = f" after {self.warmup_steps} exact steps" if self.warmup_steps else ""
        return f"{text}{warmup}: the gradient is not exact"

    @property
    def compresses(self) -> bool:
        """Whether anything is sent less than exactly."""
        return bool(BITS[self.gradients] or BITS[self.parameters])

    def check(self, stage: int, *, host_state: bool) -> None:
        """Raise ValueError if a plan of this stage cannot communicate like this."""
        if self.parameters == "exact":
            return
        if stage == 0:
            raise ValueError(
                "communication.parameters must be 'exact' at stage 0, which sends no parameters, "
                f"got {self.parameters!r}"
            )
        if self.at(stage) != self:
            raise ValueError(
                "communication.parameters must be 'exact' or 'int8' at stage 3, which sends whole "
                "weights, got 'int4'"
            )
        if host_state:
            raise ValueError(
                "communication.parameters must be 'exact' if a rank keeps state in host memory, "
                f"got {self.parameters!r}; leave out host_state or compress gradients only"
            )


def encoded_bytes(precision: Precision) -> float:
    """Bytes on the wire of an element that is encoded: 66 for each 64 at 8 bits, 34 at 4 bits."""
    return BITS[precision] / 8 + 2 / GROUP


EXACT = Communication()
"""Everything as computed."""
