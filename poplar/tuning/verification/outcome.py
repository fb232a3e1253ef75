"""The result of a verification: an error per parameter, and a verdict.

A parameter's error is the norm of the difference divided by the norm of its gradient. If that norm
is close to zero (the true gradient is 0, so only rounding remains), the norm of an average
parameter of its size, times `Tolerance.floor`, is used instead.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from poplar.values.communication import EXACT, Communication
from poplar.values.formatting import format_table
from poplar.values.schema import to_json_types

_ROWS = 10
"""Parameters that `str` lists."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tolerance:
    """The largest error that rounding alone explains."""

    relative: float
    """Relative error of a parameter's gradient, and of the loss."""
    floor: float
    """Fraction of an average gradient below which a gradient counts as zero."""

    @classmethod
    def of(cls, *dtypes: torch.dtype, relative: float | None = None) -> Tolerance:
        """The tolerance for the least precise of the compute and reduction dtypes.

        fp32: samples are added in another order, a few hundred roundings of 6e-8. With 16 bits each
        pass rounds its activations and gradients (by 1e-3 or 8e-3 of an element), and another split
        of the batch rounds other values.
        """
        if torch.bfloat16 in dtypes:
            usual = cls(relative=5e-2, floor=1.0)
        elif torch.float16 in dtypes:
            usual = cls(relative=1e-2, floor=1.0)
        else:
            usual = cls(relative=2e-5, floor=0.1)
        return usual if relative is None else cls(relative=relative, floor=usual.floor)


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterError:
    """The error of one parameter's gradient under the plan, compared with one process."""

    name: str
    elements: int
    max_error: float
    """Largest absolute difference of an element."""
    gradient_norm: float
    """Norm of the gradient from one process."""
    relative_error: float
    """Norm of the difference, divided by `gradient_norm` or by the floor if that is larger."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verification:
    """The result of `poplar.verify`, equal on every rank."""

    stage: int
    ranks: int
    global_batch: int
    tolerance: float
    """Largest relative error that rounding explains."""
    loss: float
    """Loss of the global batch under the plan."""
    reference_loss: float
    """Loss of the same batch in one process."""
    parameters: tuple[ParameterError, ...]
    """Largest relative error first."""
    notes: tuple[str, ...] = ()
    """Properties of the model or loss that make the result depend on how a batch is split."""
    reference_rank: int = 0
    """The rank that ran the one process."""
    reference_micro_batch: int = 0
    """Samples that the one process ran at once."""
    communication: Communication = EXACT
    """Of the plan. `parameters` are of gradients that were sent exactly."""
    gradient_noise: float | None = None
    """If the plan compresses gradients, or weights at stage 3: the relative error of the whole
    gradient that it gives, against the exact one."""

    @property
    def loss_error(self) -> float:
        """Relative error of the loss."""
        return relative_error(self.loss, self.reference_loss)

    @property
    def failures(self) -> tuple[ParameterError, ...]:
        """Parameters whose error is larger than the tolerance."""
        return tuple(p for p in self.parameters if not p.relative_error <= self.tolerance)

    @property
    def ok(self) -> bool:
        """Whether the plan gives the loss and the gradient of one process, if it sends exactly.

        A plan that compresses must also give a gradient whose error is smaller than the gradient.
        """
        return not self.failures and self.loss_error <= self.tolerance and not self._is_only_noise

    @property
    def _is_only_noise(self) -> bool:
        return self.gradient_noise is not None and not self.gradient_noise < 1.0

    def to_dict(self) -> dict[str, Any]:
        """The result as JSON types, including `loss_error` and `ok`."""
        return {**to_json_types(self), "loss_error": self.loss_error, "ok": self.ok}

    def __str__(self) -> str:
        lines = [self._verdict()]
        if self.gradient_noise is not None:
            sent = self.communication.before_updates(self.stage)
            lines.append(f"{sent}; its relative error is {self.gradient_noise:.1e}")
        lines.append(
            f"loss {self.loss:.7g}, one process {self.reference_loss:.7g}, "
            f"relative error {self.loss_error:.1e}"
        )
        return "\n".join([*lines, *self._table(), *(f"note: {note}" for note in self.notes)])

    def _verdict(self) -> str:
        what = f"stage {self.stage}, {self.ranks} ranks, {self.global_batch} samples"
        if self.ok:
            exactly = "" if self.gradient_noise is None else "sent exactly, "
            return f"ok: {exactly}the plan gives the gradient of one process ({what})"
        if self._is_only_noise and not self.failures:
            return f"NOT OK: what the plan sends is no gradient any more ({what})"
        wrong = f"{len(self.failures)} of {len(self.parameters)} parameters"
        if not self.failures:
            wrong = "the loss"
        return (
            f"NOT OK: {wrong} differ from one process by more than rounding "
            f"({self.tolerance:.0e}; {what})"
        )

    def _table(self) -> list[str]:
        shown = self.parameters[:_ROWS]
        rows = [("relative error", "max error", "gradient norm", "parameter")]
        for worst in shown:
            numbers = (worst.relative_error, worst.max_error, worst.gradient_norm)
            low, high, norm = (f"{number:.1e}" for number in numbers)
            rows.append((low, high, norm, worst.name))
        lines = format_table(*rows, right=(0, 1, 2)).splitlines()
        rest = len(self.parameters) - len(shown)
        return [*lines, f"... and {rest} more with smaller errors"] if rest else lines


def noise(gradients: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> float:
    """The norm of the error of a whole gradient, over its norm; NaN if either has one."""
    errors = [float((gradients[name] - value).double().norm()) for name, value in exact.items()]
    norms = [float(value.double().norm()) for value in exact.values()]
    return math.hypot(*errors) / (math.hypot(*norms) or 1.0)


def relative_error(value: float, expected: float) -> float:
    """Relative error of one number; NaN if either number is NaN."""
    difference = abs(value - expected)
    return difference / max(abs(expected), 1e-12) if difference else 0.0


def compare(
    gradients: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: Tolerance
) -> tuple[ParameterError, ...]:
    """Errors of gradients, largest first.

    Args:
        gradients: by parameter, fp32.
        expected: the same parameters, without those that have no gradient in one process.
        tolerance: its `floor` is the norm below which a gradient counts as zero.
    """
    norms = {name: float(value.double().norm()) for name, value in expected.items()}
    elements = sum(value.numel() for value in expected.values())
    average = math.hypot(*norms.values()) / math.sqrt(elements) if elements else 0.0
    errors = []
    for name, gradient in gradients.items():
        wanted = expected.get(name)
        difference = (gradient if wanted is None else gradient - wanted).double()
        norm = norms.get(name, 0.0)
        size = max(norm, tolerance.floor * average * math.sqrt(gradient.numel()))
        distance = float(difference.norm())
        errors.append(
            ParameterError(
                name=name,
                elements=gradient.numel(),
                max_error=float(difference.abs().max()) if gradient.numel() else 0.0,
                gradient_norm=norm,
                relative_error=distance / size if size else (math.inf if distance else 0.0),
            )
        )

    def sort_key(error: ParameterError) -> float:
        return math.inf if math.isnan(error.relative_error) else error.relative_error

    return tuple(sorted(errors, key=sort_key, reverse=True))
