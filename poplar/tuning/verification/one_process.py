"""The reference of a verification: the gradient of the global batch in one process, by autograd.

It does not use the engine. The batch is split only if it does not fit into memory; then its parts
are weighted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from poplar.data import pytree
from poplar.system.out_of_memory import is_out_of_memory
from poplar.tuning.verification.outcome import Tolerance, relative_error
from poplar.values.formatting import format_names
from poplar.zero.checks.loss_mean import wrong_weight
from poplar.zero.checks.model_checks import batch_norms, taking_batch_statistics
from poplar.zero.micro_batch_loss import LossFunction, check_scalar
from poplar.zero.micro_batches import Loss, Weight, counted


class Part(NamedTuple):
    """A micro-batch."""

    batch: Any
    samples: int


@dataclass(frozen=True)
class Gradient:
    """Loss and mean gradient of a global batch."""

    loss: float
    gradients: dict[str, Tensor]
    """Gradients by parameter, fp32; without parameters that no sample uses."""
    micro_batch: int
    """Samples per pass."""


@dataclass(frozen=True, kw_only=True)
class OneProcess:
    """A model and its loss in one process."""

    model: nn.Module
    loss_fn: LossFunction
    weight: Weight | None
    loss: Loss
    scale: float
    """Loss scale: multiplies the loss before the backward and divides the gradients after it."""
    heartbeat: Callable[[], object]
    """Called after every pass, because other ranks wait."""

    def gradient(self, batch: Any, micro_batch: int) -> Gradient:
        """The gradient of the global batch.

        Args:
            micro_batch: maximum samples per pass; halved until a pass fits into memory.

        Raises:
            RuntimeError: one sample does not fit.
        """
        while True:
            try:
                return self._gradient(batch, micro_batch)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                for parameter in self.model.parameters():
                    parameter.grad = None
                if micro_batch == 1:
                    raise RuntimeError(
                        "the whole model, its gradients and one sample do not fit into this "
                        f"rank's memory, so it cannot compute the reference ({error}); verify a "
                        "smaller copy of the model: fewer layers, a shorter context"
                    ) from error
            micro_batch = (micro_batch + 1) // 2

    def _gradient(self, batch: Any, micro_batch: int) -> Gradient:
        parts = split_into(batch, micro_batch)
        total = sum(map(self.count, parts))
        gradients: dict[str, Tensor] = {}
        loss = 0.0
        for part in parts:
            factor = self._factor(part, total)
            if factor:  # the mean over an empty set is NaN
                value = self.run(part.batch)
                (value * (factor * self.scale)).backward()
                loss += float(value.detach().double()) * factor
                self._take_gradients(gradients)
            self.heartbeat()
        return Gradient(loss, gradients, micro_batch)

    def loss_of(self, parts: Sequence[Part]) -> float:
        """The loss of a batch that was split into these parts; forward only."""
        total, loss = sum(map(self.count, parts)), 0.0
        for part in parts:
            factor = self._factor(part, total)
            if factor:
                loss += float(self.run(part.batch).detach().double()) * factor
            self.heartbeat()
        return loss

    def run(self, batch: Any) -> Tensor:
        """The loss of a micro-batch.

        Raises:
            TypeError: it is not a scalar.
        """
        return check_scalar(self.loss_fn(self.model, batch))

    def part_of_sum(self, value: Tensor, counted: float) -> float:
        """What a micro-batch adds to the sum of losses, before the division by the total weight."""
        factor = counted if self.loss == "mean" else 1.0
        return float(value.detach().double()) * factor if factor else 0.0

    def count(self, part: Part) -> float:
        """The weight of a micro-batch: its samples, or what `weight` returns."""
        return float(part.samples if self.weight is None else counted(self.weight, part.batch))

    def _factor(self, part: Part, total: float) -> float:
        """Factor for the loss of a part, by the definition of the gradient."""
        if self.loss == "global_mean":
            return 1.0
        return (1.0 if self.loss == "sum" else self.count(part)) / total

    def _take_gradients(self, gradients: dict[str, Tensor]) -> None:
        """Add the gradients of a backward in fp32; parameters may have 16 bits."""
        for name, parameter in self.model.named_parameters():
            gradient, parameter.grad = parameter.grad, None
            if gradient is None:
                continue
            exact = gradient.float() / self.scale
            gradients[name] = exact if name not in gradients else gradients[name] + exact


def split_into(batch: Any, micro_batch: int) -> list[Part]:
    """Consecutive parts of at most `micro_batch` samples."""
    samples = pytree.samples_in(batch)
    full, remainder = divmod(samples, micro_batch)
    sizes = [micro_batch] * full + [remainder] * bool(remainder)
    return list(map(Part, pytree.split(batch, sizes), sizes))


def find_batch_dependence(process: OneProcess, sample: Any, tolerance: Tolerance) -> list[str]:
    """Find reasons why the loss of a batch depends on how it is split.

    Args:
        process: the model, in training or evaluation mode as the user trains it.
        sample: a batch that fits into memory; its loss is computed several times.
        tolerance: the error that rounding explains.

    Returns:
        Notes for the user: modules with this property, and observations on the loss.
    """
    notes = _known_modules(process.model)
    weight_is_unstated = process.weight is None and process.loss == "mean"
    suggestion = None
    if process.loss == "mean":
        suggestion = wrong_weight(process.loss_fn, process.model, sample, weight=process.weight)
        notes += [suggestion] if suggestion else []
    samples = pytree.samples_in(sample)
    first, second = (process.loss_of(split_into(sample, samples)) for _ in range(2))
    if not relative_error(second, first) <= tolerance.relative:
        return [
            *notes,
            f"two passes on the same {samples} samples have losses {first:.7g} "
            f"and {second:.7g}: the loss is random (dropout, sampling) or changes state. Verify "
            "with model.eval(), or derive the random seed from the sample",
        ]
    if samples > 1 and suggestion is None:
        halves = split_into(sample, (samples + 1) // 2)
        split_loss = process.loss_of(halves)
        if not relative_error(split_loss, first) <= tolerance.relative:
            hint = ""
            if weight_is_unstated:
                hint = (
                    " If it is a mean over tokens, pass weight=, a function that returns the "
                    "number of tokens that count in a micro-batch, here and to train_step or "
                    "micro_batches"
                )
            notes.append(
                f"{samples} samples have a loss of {first:.7g} in one pass and {split_loss:.7g} in "
                "two passes: the loss is not a weighted mean over samples (contrastive, balancing "
                "or batch statistics), so the gradient depends on how the batch is split."
                f"{hint}"
            )
    return notes


def _known_modules(model: nn.Module) -> list[str]:
    norms = taking_batch_statistics(batch_norms(model))
    in_training = [norm.name for norm in norms if not norm.keeps_none]
    without_statistics = [norm.name for norm in norms if norm.keeps_none]
    dropouts = [
        name
        for name, module in model.named_modules()
        if module.training and isinstance(module, _DropoutNd) and module.p > 0
    ]
    notes = []
    if in_training:
        notes.append(
            f"{format_names(in_training)}: BatchNorm in training mode takes its statistics per "
            "micro-batch; use GroupNorm or LayerNorm, or freeze it with .eval()"
        )
    if without_statistics:
        notes.append(
            f"{format_names(without_statistics)}: BatchNorm with track_running_stats=False takes "
            "its statistics per micro-batch, also in evaluation mode; use GroupNorm or LayerNorm, "
            "or build it with track_running_stats=True and freeze it with .eval()"
        )
    if dropouts:
        notes.append(
            f"{format_names(dropouts)}: dropout is random in every pass; verify with model.eval()"
        )
    return notes
