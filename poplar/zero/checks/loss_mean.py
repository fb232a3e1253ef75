"""Notices a loss that is not the mean over what its weight counts, as that of a language model.

What the model returns for some samples is recorded. The gradient of their loss with respect to it
is compared with the gradients of the losses of three parts. With `G` and `G_p` the gradients with
respect to the outputs of part `p`, of `n_p` of `n` samples:

    G = (n_p / n) G_p    mean over samples: their number is the right weight
    G = G_p              sum over samples
    G = r_p G_p          mean in which the part counts `r_p`; `weight=` must return what counts
    else                 the loss couples samples, so no weight is exact
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from poplar.data import pytree
from poplar.data.token_weights import IGNORE_INDEX, is_integer, tokens
from poplar.zero.checks.recorded_loss import (
    OtherCallsError,
    RecordedLoss,
    WrittenState,
    alone,
    calls_by,
    is_loss,
)
from poplar.zero.micro_batch_loss import LossFunction
from poplar.zero.micro_batches import Weight, counted
from poplar.zero.preserved_state import (
    model_preserved,
    random_state_preserved,
    set_evaluation_mode,
)

MOST_SAMPLES = 16
"""Samples that are compared, at most."""
_MOST_BYTES = 256 << 20
"""Bytes of outputs that are kept from one micro-batch of one sample to the next."""
_ROUNDING, _ROUNDING_IN_16_BITS = 1e-3, 3e-2
"""Relative errors of a gradient that rounding may explain, with a margin."""
_COUPLED = 1e-2
"""Relative error from which on no weight may explain a loss."""
_VOID = 255
"""The label that segmentation usually ignores."""
_MOST_CLASSES = 64
"""Integers of a tensor that may be the one that is ignored, at most."""
_TAKES_WEIGHT = "here and to train_step or micro_batches"
"""Where `weight=` belongs."""
_ELSE = "or the gradient depends on how a batch is split (poplar.verify shows by how much)"


def wrong_weight(
    loss_fn: LossFunction,
    model: nn.Module,
    batch: Any,
    *,
    weight: Weight | None = None,
    where: str = _TAKES_WEIGHT,
) -> str | None:
    """Why the weight of a loss is wrong, and what to do; None: it is right.

    The model runs in evaluation mode, so dropout plays no part, on this rank alone. It returns None
    if it cannot tell: for losses that raise there, write frozen parameters or need other ranks, for
    random losses and for compiled models.

    Args:
        loss_fn: as for `train_step`.
        model: whose parameters have their values.
        batch: samples as in training.
        weight: as for `train_step`; None: the number of samples.
        where: where the user passes `weight=`, after "pass weight=...".
    """
    try:
        samples = min(pytree.samples_in(batch), MOST_SAMPLES)
        if samples < 2 or is_compiled(model):
            return None
        recorded = RecordedLoss(model, loss_fn, pytree.take(batch, range(samples)))
        preserved = model_preserved(model, next(model.parameters()).device)
        with preserved, alone(WrittenState()), torch.no_grad():
            set_evaluation_mode(model)
            with recorded.recording():
                whole = recorded.loss(recorded.batch).item()
            try:
                found = _wrong_weight(recorded, samples, where, weight)
            except Exception:
                found = None
            if weight is not None:
                return found
            return found or (_coupled(samples, where) if _couples(recorded, whole) else None)
    except Exception:
        return None


class FirstLossCheck:
    """Warns in the first step if the weight of the loss is wrong.

    One rank looks, without communication.
    """

    def __init__(self, *, looks: bool) -> None:
        """`looks`: whether this is the rank that looks."""
        self._looks, self._reads = looks, False
        self._loss_fn: LossFunction | None = None
        self._weight: Weight | None = None
        self._where = "to the loop over micro-batches, if it uses the model's own loss"
        self._first: RecordedLoss | None = None
        """A micro-batch of one sample, which is compared together with the next one."""
        self._has_looked = False
        """At a micro-batch of one sample. The next one is looked at, too, but no further ones."""

    def skip(self) -> None:
        """Look at nothing."""
        self._looks = False

    def may_read(self, reads: bool) -> None:
        """Whether this rank has the values of all parameters."""
        self._reads = reads

    def expect(self, loss_fn: LossFunction, where: str, weight: Weight | None = None) -> None:
        """Take the loss function of a loop that does not pass it, and where its weight belongs.

        `weight`: what the user passes there, if the loop passes another function.
        """
        self._loss_fn, self._where, self._weight = loss_fn, where, weight

    def watch_loop(self, model: nn.Module, batch: Any, weight: Weight | None = None) -> None:
        """Look at the first batch of a loop, whose `weight` is as for `train_step`.

        If its loss function was not told and it has no weight, the first call of the model shows
        its own loss, as language models return it. A loss that the loop computes from outputs
        cannot be seen.
        """
        looks, self._looks = self._looks, False
        if not looks or is_compiled(model):
            return
        if self._loss_fn is not None and self._reads:
            given = self._weight or weight
            found = wrong_weight(self._loss_fn, model, batch, weight=given, where=self._where)
            _warn(found, stacklevel=5)
        elif weight is None:
            self._watch_own_loss(model)

    def _watch_own_loss(self, model: nn.Module) -> None:
        """Look at the next call of the model, or of a module of it, if that returns a loss."""
        watch = ExitStack()

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            def own_loss(_model: nn.Module, inputs: Any) -> Tensor:
                positional = [inputs[key] for key in inputs if isinstance(key, int)]
                named = {key: inputs[key] for key in inputs if isinstance(key, str)}
                return next(t for t in pytree.tensors(module(*positional, **named)) if is_loss(t))

            watch.close()
            inputs = pytree.copied({**dict(enumerate(args)), **kwargs})
            recorded = RecordedLoss(model, own_loss, inputs)
            with recorded.recording():
                output = module(*args, **kwargs)
            returns_loss = bool(recorded.calls) and recorded.calls[0].computes_loss
            if returns_loss and torch.is_grad_enabled():
                self._look(recorded, self._where, 5)
                if self._first is not None:
                    self._watch_own_loss(model)
            return output

        watch.enter_context(calls_by(model, call))

    def watched(self, loss_fn: LossFunction, weight: Weight | None = None) -> LossFunction:
        """The loss function, which looks at the first micro-batches for which it is called.

        Afterwards it calls `loss_fn` again for parts of them. `weight` is as for `train_step`.
        """

        def watched(model: nn.Module, batch: Any) -> Tensor:
            if not self._looks or is_compiled(model):
                return loss_fn(model, batch)
            recorded = RecordedLoss(model, loss_fn, pytree.copied(batch))
            with recorded.recording():
                loss = loss_fn(model, batch)
            self._look(recorded, "to train_step", 10)
            return loss

        self._weight = weight
        return watched if self._looks else loss_fn

    def _look(self, recorded: RecordedLoss, where: str, stacklevel: int) -> None:
        try:
            found = self._found(recorded, where)
        except Exception:  # nothing can be told of this loss, and its own errors have been raised
            self._looks, self._first, found = False, None, None
        _warn(found, stacklevel)

    def _found(self, recorded: RecordedLoss, where: str) -> str | None:
        first, self._first = self._first, None
        if first is not None:
            recorded = first.join(recorded)
        samples = recorded.samples
        if samples == 1 and not self._has_looked:
            self._has_looked = True
            self._first = recorded.copied() if recorded.bytes() <= _MOST_BYTES else None
            return None
        self._looks = False
        if samples < 2:
            return None
        few = max(2, min(samples, MOST_SAMPLES, _MOST_BYTES * samples // (recorded.bytes() + 1)))
        with random_state_preserved(next(recorded.model.parameters()).device):
            return _wrong_weight(recorded, few, where, self._weight)


def _warn(found: str | None, stacklevel: int) -> None:
    if found is not None:
        warnings.warn(found, stacklevel=stacklevel)


def _wrong_weight(
    recorded: RecordedLoss, samples: int, where: str, weight: Weight | None
) -> str | None:
    """As `wrong_weight`, of the first samples of a loss that was recorded.

    It may raise if nothing can be told. Rows of equal samples fit both orders; then the loss must
    be wrong in both.
    """
    found = None
    for views_first in (True, False):
        with suppress(OtherCallsError):
            parts = _Parts.of(replace(recorded, views_first=views_first), samples)
            found = None if parts is None else _explained(parts, where, weight)
            if found is None:
                return None
    return found


def fitting_weights(
    recorded: RecordedLoss, samples: int, weights: Mapping[str, Weight]
) -> set[str]:
    """The names of the weights with which parts of a recorded loss add up to the whole.

    "sum" is among them if the loss is a sum. It may raise if nothing can be told.
    """
    names: set[str] = set()
    for views_first in (True, False):
        with suppress(OtherCallsError):
            parts = _Parts.of(replace(recorded, views_first=views_first), samples)
            if parts is not None:
                names |= {name for name, weight in weights.items() if parts.fit_weight(weight)}
                names |= {"sum"} if parts.fit_sum() else set()
    return names


def _explained(parts: _Parts, where: str, weight: Weight | None) -> str | None:
    if parts.fit_weight(weight):
        return None
    counted = "samples" if weight is None else "what weight= returns"
    if weight is not None and parts.fit_weight(None):
        return f"the loss is a mean over samples, not over {counted}: pass no weight= {where}"
    if parts.fit_sum():
        return (
            "the loss is a sum over samples, perhaps divided by a constant, and not their mean: "
            f"return the mean, or pass loss='sum' {where} (loss='global_mean' if it is divided by "
            f"the number of samples on all ranks), {_ELSE}"
        )
    for expression, other in _countings(parts.batch):
        if parts.fit_weight(other):
            over = "tokens" if "tokens(" in expression else "what counts in it"
            return (
                f"the loss is a mean over {over}, not over {counted}: pass weight={expression} "
                f"{where}, {_ELSE}"
            )
    shares = parts.shares()
    if shares is None:
        # A loss that couples samples has no exact weight, so the given one may be meant.
        return None if weight is not None else _coupled(parts.samples, where)
    listed = ", ".join(f"{share:.3g}" for share in shares)
    return (
        "the loss is a mean in which samples count differently (class weights, ignored labels, a "
        f"mask): of {parts.samples} samples, consecutive parts of {parts.sizes} count {listed}. "
        f"Pass weight= {where}, a function that returns the sum of these weights in a micro-batch, "
        f"such as lambda batch: class_weights[batch[1]].sum(), {_ELSE}"
    )


def _coupled(samples: int, where: str) -> str:
    return (
        f"this loss is not the mean of its samples' losses: the gradient of {samples} samples "
        f"differs from that of their parts. If it is a mean over something else, pass weight= "
        f"{where}, such as poplar.tokens(). If it couples samples (contrastive, balancing, batch "
        "statistics, the root of a mean), the gradient depends on how a batch is split; "
        "poplar.verify shows by how much"
    )


@dataclass(frozen=True)
class _Parts:
    """The gradient of a loss of some samples beside those of the losses of three parts of them.

    All are with respect to the outputs of the model; of large ones, to some elements.
    """

    samples: int
    batch: Any
    sizes: list[int]
    batches: list[Any]
    wholes: list[Tensor]
    """By part, what the gradient of all samples has in its rows."""
    parts: list[Tensor]
    """By part, its own gradient."""
    tolerance: float

    @classmethod
    def of(cls, recorded: RecordedLoss, samples: int) -> _Parts | None:
        """None if the loss is random, or its gradient 0, to which any weights would fit.

        It raises if the loss cannot be computed for the parts.
        """
        batch = pytree.take(recorded.batch, range(samples))
        value, whole, replay = recorded.gradient(batch)
        again, same, _ = recorded.gradient(batch)
        if value != again or not bool(whole.isfinite().all() and whole.any()):
            return None
        if not torch.allclose(whole, same, rtol=1e-4, atol=0.0):
            return None
        sizes = _sizes(samples)
        bounds = list(pairwise(accumulate(sizes, initial=0)))
        batches = pytree.split(batch, sizes)
        parts = [
            recorded.gradient(part, start, replay)[1]
            for part, (start, _) in zip(batches, bounds, strict=True)
        ]
        tolerance = _ROUNDING_IN_16_BITS if recorded.is_rounded else _ROUNDING
        wholes = [whole[a:b] for a, b in bounds]
        return cls(samples, batch, sizes, batches, wholes, parts, tolerance)

    @property
    def count(self) -> int:
        """How many parts have a gradient. A single one fits a sum and a mean over what counts."""
        return sum(bool(part.any()) for part in self.parts)

    def fit(self, factors: Sequence[float]) -> bool:
        """Whether the parts add up to the whole with these factors."""
        # 0 times what is not finite is 0.
        added = [
            part.mul(factor) if factor else torch.zeros_like(part)
            for part, factor in zip(self.parts, factors, strict=True)
        ]
        error = _norm([whole - own for whole, own in zip(self.wholes, added, strict=True)])
        return error <= self.tolerance * max(_norm(self.wholes), _norm(added))

    def fit_weight(self, weight: Weight | None) -> bool:
        """Whether the loss is a mean over what `weight` counts; None: over samples."""
        counts = self.sizes if weight is None else [float(counted(weight, p)) for p in self.batches]
        total = sum(counts)
        return total > 0 and self.fit([count / total for count in counts])

    def fit_sum(self) -> bool:
        """Whether the loss is a sum."""
        return self.count > 1 and self.fit([1.0] * len(self.sizes))

    def shares(self) -> list[float] | None:
        """The factors that fit, if there are some and they sum to 1."""
        factors = []
        for whole, part in zip(self.wholes, self.parts, strict=True):
            squares = float(part.square().sum())
            factors.append(float((whole * part).sum()) / squares if squares > 0.0 else 0.0)
        is_mean = abs(sum(factors) - 1.0) <= self.tolerance and min(factors) >= 0.0
        return factors if is_mean and self.fit(factors) else None


def _norm(tensors: Sequence[Tensor]) -> float:
    return math.hypot(*(float(tensor.norm()) for tensor in tensors))


def _sizes(samples: int) -> list[int]:
    """Three parts of different sizes; two of two or three samples."""
    if samples < 4:
        return [1, samples - 1]
    return [samples // 4, samples // 3, samples - samples // 4 - samples // 3]


def _couples(recorded: RecordedLoss, whole: float) -> bool:
    """Whether forwards of two parts have other losses, so that a module couples samples."""
    half = (recorded.samples + 1) // 2
    sizes = [half, recorded.samples - half]
    losses = [recorded.loss(part).item() for part in pytree.split(recorded.batch, sizes)]
    if whole != recorded.loss(recorded.batch).item():
        return False
    mean = sum(size * loss for size, loss in zip(sizes, losses, strict=True)) / sum(sizes)
    rounding = max(_COUPLED, _ROUNDING_IN_16_BITS if recorded.is_rounded else 0.0)
    return not abs(mean - whole) <= rounding * max(abs(whole), *map(abs, losses), 1e-12)


def is_compiled(model: nn.Module) -> bool:
    """Whether the model or a part of it is compiled, so calls of its modules are not seen."""
    return any(
        getattr(module, "_compiled_call_impl", None) is not None or hasattr(module, "_orig_mod")
        for module in model.modules()
    )


def _countings(batch: Any) -> Iterator[tuple[str, Callable[[Any], Any]]]:
    """What may count in a micro-batch: expressions for `weight=`, and their functions."""
    for where, get, value in _members(batch):
        if not isinstance(value, Tensor) or value.dim() == 0:
            continue
        if not is_integer(value):
            access = f"batch.{where}" if is_dataclass(batch) else f"batch[{where!r}]"
            yield f"lambda batch: {access}.sum()", partial(_sum, get)
            continue
        ignored = value.unique()[: _MOST_CLASSES + 1].tolist()
        if len(ignored) > _MOST_CLASSES:
            ignored = [label for label in ignored if label < 0 or label == _VOID]
        for label in sorted(ignored, key=lambda label: label != IGNORE_INDEX):
            named = [] if label == IGNORE_INDEX else [f"ignore_index={label}"]
            labels = [] if where == "labels" else [f"labels={where!r}"]
            for shift in [["shift=False"]] if value.dim() != 2 else [[], ["shift=False"]]:
                expression = ", ".join([*named, *shift, *labels])
                yield f"poplar.tokens({expression})", tokens(label, not shift, where)


def _sum(get: Callable[[Any], Any], part: Any) -> Any:
    return get(part).sum()


def _members(batch: Any) -> list[tuple[str | int, Callable[[Any], Any], Any]]:
    """What `tokens(labels=...)` can name, how to get it, and its value."""
    if is_dataclass(batch):
        return [(each.name, get := attrgetter(each.name), get(batch)) for each in fields(batch)]
    if isinstance(batch, Mapping):
        return [(key, itemgetter(key), value) for key, value in batch.items()]
    items = enumerate(batch) if isinstance(batch, (list, tuple)) else ()
    return [(place, itemgetter(place), value) for place, value in items]
