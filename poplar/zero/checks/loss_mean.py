"""Notices a loss that is not the mean of its samples' losses, as that of a language model.

The loss of a few samples is compared with those of two parts, under the weights that would fit.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from poplar.data import pytree
from poplar.data.token_weights import IGNORE_INDEX, is_integer, tokens
from poplar.zero.micro_batch_loss import LossFunction, check_scalar
from poplar.zero.preserved_state import model_preserved

MOST_SAMPLES = 8
"""Samples that are compared, at most."""
_CLEAR = 10.0
"""A weight fits if its error is so many times smaller than that of the number of samples."""
_ROUNDING = {torch.float32: 1e-4, torch.float64: 1e-4, torch.float16: 1e-2, torch.bfloat16: 2e-2}
"""Relative errors of a loss that rounding may explain, with a margin."""
_COUPLED = 1e-2
"""Relative error from which on no weight may explain a loss."""
_TAKES_WEIGHT = "here and to train_step or micro_batches"
"""Where `weight=` belongs."""


@dataclass(frozen=True)
class _Labels:
    """Labels in a batch, some of which are ignored."""

    expression: str
    """The call of `poplar.tokens` that counts them."""
    weight: Callable[[Any], Tensor]


def wrong_weight(
    loss_fn: LossFunction, model: nn.Module, batch: Any, *, where: str = _TAKES_WEIGHT
) -> str | None:
    """Why the number of samples is the wrong weight for a loss, and what to do; None: it is right.

    The model runs a few forwards in evaluation mode, so dropout plays no part. Losses that raise
    there, that are random or too close to each other, and compiled models tell nothing: None.

    Args:
        loss_fn: as for `train_step`.
        model: whose parameters have their values.
        batch: samples as in training.
        where: where the user passes `weight=`, after "pass weight=...".
    """
    compiled = any(getattr(m, "_compiled_call_impl", None) is not None for m in model.modules())
    if compiled or any(hasattr(module, "_orig_mod") for module in model.modules()):
        return None
    samples = min(pytree.samples_in(batch), MOST_SAMPLES)
    if samples < 2:
        return None
    batch = pytree.take(batch, range(samples))
    labels = list(_ignoring_labels(batch))
    cut = _cut(batch, samples, labels)
    parts = pytree.split(batch, [cut, samples - cut])
    try:
        with _evaluating(model) as has_autocast:
            whole, *losses, again = (_value(loss_fn, model, b) for b in (batch, *parts, batch))
    except Exception:
        return None
    if whole != again:
        return None
    rounding = max(_ROUNDING.get(p.dtype, 1.0) for p in model.parameters())
    rounding = max(rounding, _ROUNDING[torch.bfloat16] if has_autocast() else 0.0)
    scale = max(abs(whole), *(abs(loss) for loss in losses if loss == loss), 1e-12)

    def error(weights: list[float], total: float) -> float:
        parts = (w * loss for w, loss in zip(weights, losses, strict=True) if w)
        difference = abs(sum(parts) / total - whole) / scale if total else float("inf")
        return difference if difference == difference else float("inf")

    by_samples = error([cut, samples - cut], samples)
    if not by_samples > rounding:
        return None
    found = f"{samples} samples have the loss {whole:.6g}, but the mean of their losses is another"
    for own in labels:
        counts = [float(own.weight(part)) for part in parts]
        if error(counts, sum(counts)) * _CLEAR < by_samples:
            return (
                f"the loss is a mean over tokens, not over samples ({found}): pass "
                f"weight={own.expression} {where}, or the gradient depends on how a batch is split"
            )
    if error([1.0, 1.0], 1.0) * _CLEAR < by_samples:
        return (
            f"the loss is a sum over samples, not a mean ({found}): return the mean, or pass "
            f"loss='sum' {_TAKES_WEIGHT}, or the gradient depends on how a batch is split"
        )
    if by_samples > max(_COUPLED, rounding):
        return (
            f"this loss is not the mean of its samples' losses ({found}): if it is a mean over "
            f"something else, pass weight= {where}, such as poplar.tokens(). If it couples samples "
            "(contrastive, balancing), the gradient depends on how a batch is split"
        )
    return None


class FirstLossCheck:
    """Warns in the first step if the loss of a language model is weighted by samples.

    One rank looks, without communication, and only if its batch has ignored labels.
    """

    def __init__(self, *, looks: bool) -> None:
        """`looks`: this is the rank that looks, and it has the values of all parameters."""
        self._looks = looks
        self._loss_fn: LossFunction | None = None
        self._where = _TAKES_WEIGHT

    def expect(self, loss_fn: LossFunction, where: str) -> None:
        """Take the loss function of a loop that does not pass it, and where its weight belongs."""
        if self._looks:
            self._loss_fn, self._where = loss_fn, where

    def look_at_loop(self, model: nn.Module, batch: Any) -> None:
        """As `look`, for a loop whose loss function is not known, unless it was told.

        Language models return their own loss if they are called with a batch that has labels.
        """
        if self._loss_fn is None:
            self._where = "to the loop over micro-batches, if it uses the model's own loss"
        self.look(self._loss_fn or _own_loss, model, batch)

    def look(self, loss_fn: LossFunction, model: nn.Module, batch: Any) -> None:
        """Look at the first batch that is given; ignore later ones."""
        looks, self._looks, self._loss_fn = self._looks, False, None
        if not looks:
            return
        try:
            has_labels = next(_ignoring_labels(batch), None) is not None
            found = wrong_weight(loss_fn, model, batch, where=self._where) if has_labels else None
        except Exception:  # the step reports a wrong batch on all ranks
            return
        if found is not None:
            warnings.warn(found, stacklevel=4)


def _own_loss(model: nn.Module, batch: Any) -> Tensor:
    """The loss that a model returns, as those of Hugging Face do; it raises for other models."""
    output = model(**batch)
    loss: Tensor = output["loss"] if isinstance(output, Mapping) else output.loss
    return loss


def _value(loss_fn: LossFunction, model: nn.Module, batch: Any) -> float:
    return float(check_scalar(loss_fn(model, batch)).detach().double())


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[Callable[[], bool]]:
    """Evaluation mode without gradients; the model and random states are as before at the end.

    Yields a function that tells whether the model has run under autocast.
    """
    device = next(model.parameters()).device
    seen: list[bool] = []

    def look(module: nn.Module, args: Any) -> None:
        seen.append(torch.is_autocast_enabled(device.type))

    handle = model.register_forward_pre_hook(look)
    try:
        with model_preserved(model, device), torch.no_grad():
            model.eval()
            yield lambda: any(seen)
    finally:
        handle.remove()


def _ignoring_labels(batch: Any) -> Iterator[_Labels]:
    """The integer tensors of a batch that have an ignored value, shifted and not shifted."""
    for where, value in _members(batch):
        if not isinstance(value, Tensor) or value.dim() < 2 or not is_integer(value):
            continue
        if not bool((value == IGNORE_INDEX).any()):
            continue
        named = "" if where == "labels" else f"labels={where!r}"
        if value.dim() == 2:
            yield _Labels(f"poplar.tokens({named})", tokens(labels=where))
        options = ", ".join(filter(None, ("shift=False", named)))
        yield _Labels(f"poplar.tokens({options})", tokens(shift=False, labels=where))


def _members(batch: Any) -> list[tuple[str | int, Any]]:
    """What `tokens(labels=...)` can name."""
    if isinstance(batch, Mapping):
        return list(batch.items())
    if is_dataclass(batch):
        return [(member.name, getattr(batch, member.name)) for member in fields(batch)]
    return list(enumerate(batch)) if isinstance(batch, (list, tuple)) else []


def _cut(batch: Any, samples: int, labels: list[_Labels]) -> int:
    """Where to cut a batch, so that the parts differ most in tokens per sample."""
    if not labels:
        return (samples + 1) // 2
    counts = [float(labels[0].weight(one)) for one in pytree.split(batch, [1] * samples)]
    total = sum(counts) or 1.0

    def difference(cut: int) -> float:
        return abs(sum(counts[:cut]) / total - cut / samples)

    return max(range(1, samples), key=difference)
