"""The other side of the comparison: the whole batch in one process, by plain autograd.

Nothing of the engine takes part. The batch is cut only where it does not fit into memory, and then
its parts are weighted by what they count for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from poplar.data import pytree
from poplar.verification.outcome import Tolerance, relative_error
from poplar.zero.micro_batches import Loss, Weight

LossFunction = Callable[[nn.Module, Any], Tensor]

_NAMED = 3
"""Modules that a note names; the others are counted."""


@dataclass(frozen=True)
class Gradient:
    """Loss and mean gradient of a whole batch."""

    loss: float
    gradients: dict[str, Tensor]
    """By parameter, fp32; without those that no sample uses."""
    micro_batch: int
    """Samples that were run at once."""


@dataclass(frozen=True, kw_only=True)
class OneProcess:
    """A model and its loss, as one process trains it."""

    model: nn.Module
    loss_fn: LossFunction
    weight: Weight | None
    loss: Loss
    scale: float
    """What losses are multiplied by before the backward, and gradients divided by after it."""
    heartbeat: Callable[[], object]
    """Called after every pass: others wait meanwhile."""

    def gradient(self, batch: Any, micro_batch: int) -> Gradient:
        """The gradient of the whole batch.

        Args:
            batch: all its samples.
            micro_batch: most samples to run at once; halved while they don't fit into memory.

        Raises:
            RuntimeError: not even one sample fits.
        """
        while True:
            try:
                return self._gradient(batch, micro_batch)
            except torch.OutOfMemoryError as error:
                for parameter in self.model.parameters():
                    parameter.grad = None
                if micro_batch == 1:
                    raise RuntimeError(
                        "the whole model, its gradients and one sample do not fit into this "
                        f"rank's memory, so there is no one process to compare with ({error}); "
                        "verify a smaller copy of the model: fewer layers, a shorter context"
                    ) from error
            micro_batch = (micro_batch + 1) // 2

    def _gradient(self, batch: Any, micro_batch: int) -> Gradient:
        parts = cut_into(batch, micro_batch)
        total = self._total(parts)
        gradients: dict[str, Tensor] = {}
        loss = 0.0
        for part in parts:
            factor = self._factor(part, total)
            if factor:  # a mean over nothing is NaN, and counts for nothing
                value = self.run(part)
                (value * (factor * self.scale)).backward()
                loss += float(value.detach().double()) * factor
                self._take_gradients(gradients)
            self.heartbeat()
        return Gradient(loss, gradients, micro_batch)

    def loss_of(self, parts: Sequence[Any]) -> float:
        """The loss of a batch that was cut into these parts; forward only."""
        total, loss = self._total(parts), 0.0
        for part in parts:
            factor = self._factor(part, total)
            if factor:
                loss += float(self.run(part).detach().double()) * factor
            self.heartbeat()
        return loss

    def run(self, part: Any) -> Tensor:
        """The loss of a micro-batch.

        Raises:
            TypeError: it is no scalar.
        """
        value = self.loss_fn(self.model, part)
        if not isinstance(value, Tensor) or value.numel() != 1:
            shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise TypeError(
                f"loss_fn(model, micro_batch) must return a scalar tensor, got {shape}; return the "
                "mean over the micro-batch"
            )
        return value

    def part_of_sum(self, value: Tensor, counted: float) -> float:
        """What a micro-batch adds to the sum of losses that the total count divides."""
        factor = counted if self.loss == "mean" else 1.0
        return float(value.detach().double()) * factor if factor else 0.0

    def _total(self, parts: Sequence[Any]) -> float:
        return sum(map(self.count, parts))

    def count(self, part: Any) -> float:
        """What a micro-batch counts for."""
        return float(pytree.samples_in(part) if self.weight is None else self.weight(part))

    def _factor(self, part: Any, total: float) -> float:
        """What the loss of a part is multiplied by: the definition of the gradient, once more."""
        if self.loss == "global_mean":
            return 1.0
        return (1.0 if self.loss == "sum" else self.count(part)) / total

    def _take_gradients(self, gradients: dict[str, Tensor]) -> None:
        """Add what a backward left, in fp32: parameters may hold 16 bits."""
        for name, parameter in self.model.named_parameters():
            gradient, parameter.grad = parameter.grad, None
            if gradient is None:
                continue
            exact = gradient.float() / self.scale
            gradients[name] = exact if name not in gradients else gradients[name] + exact


def cut_into(batch: Any, micro_batch: int) -> list[Any]:
    """Parts of at most so many samples, in order."""
    samples = pytree.samples_in(batch)
    full, remainder = divmod(samples, micro_batch)
    return pytree.split(batch, [micro_batch] * full + [remainder] * bool(remainder))


def find_batch_dependence(process: OneProcess, sample: Any, tolerance: Tolerance) -> list[str]:
    """What makes the loss of a batch depend on how it is cut, whatever the engine does.

    Args:
        process: the model, in the mode in which it trains.
        sample: some samples that fit into memory; their loss is computed three times.
        tolerance: what rounding explains.

    Returns:
        Notes for a person: modules that are known for it, and what was seen.
    """
    notes = _known_modules(process.model)
    first, second = process.loss_of([sample]), process.loss_of([sample])
    if not relative_error(second, first) <= tolerance.relative:
        return [
            *notes,
            f"the same {pytree.samples_in(sample)} samples twice gave losses {first:.7g} and "
            f"{second:.7g}: the loss is random (dropout, sampling) or changes state. Verify with "
            "model.eval(), or draw from a seed that belongs to the sample",
        ]
    samples = pytree.samples_in(sample)
    if samples > 1:
        halves = process.loss_of(cut_into(sample, (samples + 1) // 2))
        if not relative_error(halves, first) <= tolerance.relative:
            notes.append(
                f"{samples} samples at once have a loss of {first:.7g}, in two parts of "
                f"{halves:.7g}: the loss is no weighted mean over samples (contrastive, balancing, "
                "batch statistics, or a mean over tokens without weight=), so no cut of a batch "
                "gives the gradient of the whole"
            )
    return notes


def _known_modules(model: nn.Module) -> list[str]:
    in_training = [(name, module) for name, module in model.named_modules() if module.training]
    norms = [name for name, module in in_training if isinstance(module, _BatchNorm)]
    dropouts = [
        name for name, module in in_training if isinstance(module, _DropoutNd) and module.p > 0
    ]
    notes = []
    if norms:
        notes.append(
            f"{_names(norms)}: BatchNorm in training mode takes its statistics per micro-batch; "
            "use GroupNorm or LayerNorm, or freeze it with .eval()"
        )
    if dropouts:
        notes.append(
            f"{_names(dropouts)}: dropout draws anew in every pass; verify with model.eval()"
        )
    return notes


def _names(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:_NAMED])
    rest = len(names) - _NAMED
    return f"{shown} and {rest} more" if rest > 0 else shown
