"""The state of one optimizer step on this rank, in one object, which changes in its own methods."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from torch import Tensor

from poplar.zero.agreement import StepSizes, StepSummary
from poplar.zero.micro_batches import MicroBatch
from poplar.zero.steps.step_settings import StepSettings
from poplar.zero.streams import ComputeSpan, HostCopies

if TYPE_CHECKING:
    from poplar.zero.grad_scaler import GradScaler


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


@dataclass(frozen=True)
class EarlyForward:
    """The first forward of this rank, if it ran before the weights were known."""

    began: Any = None
    """Its start, in the trace; None: it has not run."""
    pass_is_open: bool = False
    """On all ranks the first pass is open, whose weight is not known yet."""
    computed: ComputeSpan | None = None
    """What it has computed."""


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
    computing: ComputeSpan | None = None
    """What it computes."""
    too_large: int = 0
    """Samples of the micro-batch in which this rank ran out of memory; 0 if it has not."""
    summary: StepSummary | None = None
    """What the ranks agreed on; set when the step has been closed."""
    settings: StepSettings | None = None
    """Of this rank, with which the step was closed."""
    later: list[str] = field(default_factory=list)
    """Settings of this rank that came later, as text."""
    scaler: GradScaler | None = None
    """By which `train_step` scales the losses; None: it does not, or a loop runs the passes."""
    is_unscaled: bool = False
    """The gradient has been divided by the scale of the losses."""
    scale: Tensor | None = None
    """Product of the factors for the reduced gradient (loss scale, clipping): one float64 on the
    device, so that the host does not synchronize; None for 1."""
    factor: Tensor | None = None
    """The part of `scale` that the update still has to apply; None if there is none."""
    found_inf: Tensor | None = None
    """As in `torch.amp`: not 0 if the step is to be skipped."""
    skips: HostCopies | None = None
    """Whether the device has skipped the step; None: it was not issued."""
    is_updating: bool = False
    """The update has begun, so an error would leave parts of the parameters behind."""
    in_user_loop: bool = False
    """The passes are those of a `micro_batches` loop, whose body may read `.grad`."""
    norm_is_current: bool = False
    """No code of the user has run since the step was closed: `train_step` takes it."""
    gradients_are_hidden: bool = False
    """No code of the user reads `.grad` before the update."""

    def open(self, sizes: StepSizes) -> None:
        """All ranks have opened the step."""
        self.samples, self.waited_to_open = sum(sizes.samples), sizes.waited

    def advance(self, phase: Phase) -> None:
        """The gradient is at least as far as this phase."""
        self.phase = max(self.phase, phase)

    def enter_user_loop(self) -> None:
        self.in_user_loop = True

    def hide_gradients(self) -> None:
        self.gradients_are_hidden = True

    def begin_pass(
        self, micro_batch: MicroBatch | None, began: Any, computing: ComputeSpan
    ) -> None:
        """A pass has been opened; None: it has nothing to issue."""
        self.open_micro_batch, self.pass_began, self.computing = micro_batch, began, computing

    def end_pass(self) -> MicroBatch | None:
        """The open pass ends; returns its input."""
        ended, self.open_micro_batch = self.open_micro_batch, None
        return ended

    def add_loss(self, loss: Tensor) -> None:
        """Add the loss of the open pass; the host does not wait for its value."""
        weight = 0.0 if self.open_micro_batch is None else self.open_micro_batch.weight
        if weight:  # the mean over an empty set is NaN
            self.pass_losses.append(loss.detach().double() * weight)

    @property
    def loss(self) -> Tensor | float:
        """This rank's part of the weighted loss."""
        return sum(self.pass_losses, start=0.0)

    def run_out_of_memory(self, samples: int) -> None:
        self.too_large = samples

    def close(self, summary: StepSummary, settings: StepSettings) -> None:
        """The ranks agree to apply the step."""
        self.summary, self.settings = summary, settings

    def use(self, settings: StepSettings) -> None:
        """The closed step is taken with these settings."""
        assert self.settings is not None
        if later := settings.later_than(self.settings):
            self.later.append(later)

    def enter_train_step(self, scaler: GradScaler | None) -> None:
        """`train_step` has just closed the step."""
        self.scaler, self.norm_is_current = scaler, True

    def leave_train_step(self) -> None:
        """Code of the user may run: the hooks of the update."""
        self.norm_is_current = False

    def unscale(self) -> None:
        self.is_unscaled = True

    def multiply(self, factor: Tensor, *, in_update: bool) -> None:
        """The reduced gradient is multiplied, in the update or by the caller."""
        self.scale = factor if self.scale is None else self.scale * factor
        if in_update:
            self.factor = factor if self.factor is None else self.factor * factor

    def find_inf(self, found_inf: Tensor) -> None:
        self.found_inf = found_inf

    def begin_update(self) -> None:
        self.is_updating = True

    def skip_by(self, flag: HostCopies) -> None:
        self.skips = flag

    def was_skipped(self) -> bool:
        """Wait until the device has decided it."""
        return self.skips is not None and bool(self.skips.wait()[0])
