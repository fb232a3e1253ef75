"""The state of one optimizer step on this rank, in one object."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from torch import Tensor

from poplar.zero.agreement import StepSummary
from poplar.zero.micro_batches import MicroBatch
from poplar.zero.step_settings import StepSettings

if TYPE_CHECKING:
    from poplar.zero.nonfinite import DeviceFlag


class Phase(IntEnum):
    """How far the gradient of the step is. Phases are passed through in this order."""

    EMPTY = 0
    """No pass has contributed."""
    ACCUMULATED = 1
    """Passes have contributed, but the last reduction has not been issued."""
    ISSUED = 2
    """The last reduction has been issued."""
    REDUCED = 3
    """This rank's slice of the mean gradient is final."""
    FINAL = 4
    """The gradient is final wherever the update and the user read it."""
    ABANDONED = 5
    """The loop of the step was left before its end; nothing will be applied."""


@dataclass(eq=False)
class StepState:
    """Replaced when a step begins."""

    phase: Phase = Phase.EMPTY
    samples: int = 0
    """Samples in the global batch."""
    waited_to_open: float = 0.0
    """Seconds spent waiting for other ranks to open the step."""
    pass_losses: list[Tensor] = field(default_factory=list)
    """The weighted losses of this rank's passes that count, as far as they are known."""
    open_micro_batch: MicroBatch | None = None
    """The input of the pass that is open now."""
    pass_began: Any = None
    """Its start, in the trace."""
    early_forward_began: Any = None
    """The start of the first pass with samples, if its forward ran before the step was opened."""
    too_large: int = 0
    """Samples of the micro-batch in which this rank ran out of memory; 0 if it has not."""
    summary: StepSummary | None = None
    """What the ranks agreed on; set when the step has been closed."""
    settings: StepSettings | None = None
    """Of this rank, with which the step was closed."""
    scale: Tensor | None = None
    """Product of the factors for the reduced gradient (loss scale, clipping): one float64 on the
    device, so that the host does not synchronize; None for 1."""
    factor: Tensor | None = None
    """The part of `scale` that the update still has to apply; None if there is none."""
    found_inf: Tensor | None = None
    """As in `torch.amp`: not 0 if the step is to be skipped."""
    skipped: bool | DeviceFlag = False
    is_updating: bool = False
    """The update has begun, so an error would leave parts of the parameters behind."""
    in_train_step: bool = False
    """In `train_step` no user code reads `.grad` before the update."""
    in_user_loop: bool = False
    """The passes are those of a `micro_batches` loop, whose body may read `.grad`."""

    def add_loss(self, loss: Tensor) -> None:
        """Add the loss of the open pass; the host does not wait for its value."""
        weight = 0.0 if self.open_micro_batch is None else self.open_micro_batch.weight
        if weight:  # the mean over an empty set is NaN
            self.pass_losses.append(loss.detach().double() * weight)

    @property
    def loss(self) -> Tensor | float:
        """This rank's part of the weighted loss."""
        return sum(self.pass_losses, start=0.0)
