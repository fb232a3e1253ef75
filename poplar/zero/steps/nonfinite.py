"""What happens to a step whose loss or gradient norm is not finite: all ranks leave it out.

The same happens if settings that are tensors on the device differ between ranks.

The device decides, from values that all ranks have with the same bits, so that the host does not
wait between backward and update. On a CUDA device the host reads the decision when the next step is
closed, by when the device has long passed it, or before it reads or saves the trained values;
elsewhere it reads it at once.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from poplar.comm import Control
from poplar.values.errors import PoplarError, agreed
from poplar.zero.agreement import (
    StepSummary,
    raise_on_all_ranks,
    reject_different_settings,
    run_on_all_ranks,
)
from poplar.zero.steps.step_settings import StepSettings
from poplar.zero.streams import HostCopies, Streams
from poplar.zero.update import ShardedUpdate

OnNonFinite = Literal["raise", "skip"]

_RESTART = (
    "Load the last checkpoint, and look for a too large learning rate or values that were written "
    "into parameters or optimizer state"
)


@dataclass(frozen=True, eq=False)
class IssuedStep:
    """A step whose update has been issued."""

    summary: StepSummary
    passes: Sequence[Tensor]
    """The losses of this rank's passes."""
    settings: StepSettings
    """Of this rank."""
    applied: bool
    """The update did not depend on the flag."""
    scaled: bool = False
    """The flag is that of a loss scaler, which skips steps without an error."""

    def ranks_at_fault(self) -> list[int]:
        """The ranks whose loss was not finite, in their group."""
        losses = self.summary.losses.tolist()
        return [rank for rank, loss in enumerate(losses) if not math.isfinite(loss)]


def differ(by_rank: Tensor) -> Tensor:
    """Whether the values of the ranks differ; on the device."""
    return (by_rank != by_rank[0]).any()


class NonFiniteSteps:
    """Finds the steps of one optimizer that are not finite."""

    def __init__(
        self, choice: OnNonFinite, update: ShardedUpdate, streams: Streams, control: Control
    ) -> None:
        self._choice = choice
        self._update, self._streams, self._control = update, streams, control
        self._unread: tuple[HostCopies, IssuedStep] | None = None
        self._found: IssuedStep | None = None

    def flag(self, summary: StepSummary) -> Tensor:
        """One fp32 on the device: 1 if no rank may apply the step, else 0.

        That is if a loss that is known or the norm is not finite, or if settings differ.
        """
        checked = torch.cat([summary.losses, summary.norm.view(1)])
        found = (~torch.isfinite(checked)).any()
        if summary.settings is not None:
            found = found | differ(summary.settings)
        return found.float()

    def skips(self) -> bool:
        """Whether the update gets the flag: not if its class would make the host wait for it."""
        waits = self._streams.asynchronous and not self._update.skips_on_device
        return self._choice == "skip" or not waits

    def record(self, flag: Tensor, step: IssuedStep) -> HostCopies:
        """The update of a step has been issued. The caller may read the flag later."""
        found = HostCopies([flag], self._streams, self._control.group, "the end of a step")
        self._unread = found, step
        if not step.applied:
            self._update.undo_if(found)
        if not self._streams.asynchronous:
            self._settle()
        return found

    def _settle(self) -> None:
        """Read the flag of the last step. Local."""
        unread, self._unread = self._unread, None
        self._update.settle()
        if unread is not None and unread[0].wait()[0]:
            self._found = unread[1]

    def raise_if_found(self) -> None:
        """Raise on all ranks, or warn, if the last step was not finite. Collective then.

        It waits until the device has decided that.
        """
        self._settle()
        self.raise_if_read()

    def raise_if_read(self) -> None:
        """As `raise_if_found`, if the flag of the last step has been read."""
        step, self._found = self._found, None
        if step is None:
            return
        self._reject_settings(step)
        if step.scaled:  # no loss scale would end it if the parameters are the cause
            self.reject_parameters("a skipped step")
            return
        rank, at_fault = self._control.group.rank, step.ranks_at_fault()
        if self._choice == "skip":
            names = [self._control.group.names[rank] for rank in at_fault]
            who = f"the loss of rank(s) {names}" if names else "the gradient norm"
            warning = f"a step was skipped: {who} was not finite"
            self.reject_parameters("a skipped step", warning=warning)
            return
        error = None
        if rank in at_fault or not at_fault:
            error = PoplarError(self._message(step, rank))
        raise_on_all_ranks(self._control, error, doing="a step")

    def _reject_settings(self, step: IssuedStep) -> None:
        """Raise on all ranks if settings that are tensors differed. Collective then."""
        by_rank = step.summary.settings
        if by_rank is not None and bool(differ(by_rank)):
            reject_different_settings(self._control, step.settings.by_name())
            names = ", ".join(name for name, _ in step.settings.tensors)
            raise agreed(ValueError(f"the ranks took a step with different values of {names}"))

    def reject_parameters(self, doing: str, *, warning: str | None = None) -> None:
        """Raise on all ranks if trained parameters are not finite. Collective.

        The first rank gives the warning, which may be an error.
        """

        def check() -> None:
            if warning is not None and self._control.group.rank == 0:
                warnings.warn(warning, stacklevel=8)
            name = self._update.nonfinite_parameter()
            if name is not None:
                raise PoplarError(
                    f"rank {self._control.group.name}: {doing}: parameter {name!r} has values that "
                    f"are NaN or infinite, so later steps would have them too. {_RESTART}"
                )

        run_on_all_ranks(self._control, check, doing=doing)

    def reject_state(self, doing: str) -> None:
        """As `raise_if_found`, and also if trained parameters are not finite. Collective."""
        self.raise_if_found()
        self.reject_parameters(doing)

    def raise_here(self) -> None:
        """Raise if the last step was not finite, in a call that other ranks may not make. Local.

        The next collective call raises it again, on all ranks.
        """
        self._settle()
        step, own = self._found, self._control.group.rank
        if step is not None and self._choice == "raise" and not step.scaled:
            at_fault = step.ranks_at_fault()
            rank = own if own in at_fault else min(at_fault, default=own)
            raise PoplarError(self._message(step, rank))

    def _message(self, step: IssuedStep, rank: int) -> str:
        known = ", although all losses are" if step.passes else ""
        what = f"the gradient norm is not finite{known}"
        if rank in step.ranks_at_fault():
            own = step.passes if rank == self._control.group.rank else ()
            values = [float(value) for value in own]
            bad = [place for place, value in enumerate(values) if not math.isfinite(value)]
            where = f" in pass {bad[0] + 1} of {len(values)}" if bad else ""
            what = (
                f"the loss is {values[bad[0]] if bad else float(step.summary.losses[rank])}{where}"
            )
        outcome = (
            "the parameters were updated with it, so load a checkpoint"
            if step.applied
            else "no rank applied the step"
        )
        who = f"rank {self._control.group.names[rank]}"
        name = None if step.applied else self._update.nonfinite_parameter()
        if name is not None:
            return f"{who}: {what}, and parameter {name!r} is not finite; {outcome}. {_RESTART}"
        return (
            f"{who}: {what}; {outcome}. Look for bad samples, a too large learning rate or "
            "an overflow in low precision. on_nonfinite='skip' leaves such steps out and continues"
        )
