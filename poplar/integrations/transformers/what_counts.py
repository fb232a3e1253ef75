"""`WhatCounts`: what the loss of a trainer is a mean over, as the first steps show.

`Trainer` counts items (labels) for each model that takes any keyword argument, but some drop their
number: those with CTC (Wav2Vec2, HuBERT, WavLM) return a mean or a sum over utterances.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any, Literal, get_args

from torch import Tensor, nn
from transformers.utils import logging

from poplar.data.micro_batch_collation import MicroBatches
from poplar.integrations.transformers.loss import TrainerLoss, samples_of
from poplar.values.errors import CollectiveTimeout
from poplar.zero.checks.loss_mean import fitting_weights, is_compiled
from poplar.zero.checks.recorded_loss import RecordedLoss
from poplar.zero.preserved_state import random_state_preserved

Name = Literal["items", "samples", "sum"]
_NAMES: tuple[Name, ...] = get_args(Name)
"""The first of those that fit is taken."""

MOST_LOOKS = 10
"""Steps that are looked at, at most. Where samples have as many items, they tell nothing."""
_COUNTED, _SAMPLES = 16, 4
"""Of so many samples of a step, those are looked at whose numbers of items differ most."""
_SAME = 1e-3
"""Relative difference up to which two losses are the same."""

logger = logging.get_logger(__name__)


class WhatCounts:
    """Looks at the loss of a few samples, in evaluation mode, until it is known what counts."""

    def __init__(self, trainer: Any, *, given: bool) -> None:
        """
        Args:
            trainer: whose loss it is.
            given: the user says by an own `loss_weight` what counts, which is only checked.
        """
        self._trainer, self._given = trainer, given
        self._uses_items: bool | None = None
        self._looks_left = MOST_LOOKS
        self.name: Name = "items"
        """The loss is the mean over them, or the sum over samples."""

    def look(self, batch: MicroBatches) -> None:
        """Look at a batch of this rank before its step, unless it is known what counts. Collective.

        A loss that raises only in evaluation mode tells nothing; the step raises other errors.
        """
        if not self._looks_left:
            return
        self._looks_left -= 1
        self._trainer.optimizer._training.checks.loss.skip()  # this class checks the weight
        try:
            with self._trainer.pass_metrics.discarding():
                if self._uses_items is None and not self._given:
                    self._uses_items = self._changes_with_items(batch)
                    if self._uses_items is None:
                        return
                fits = {"items"} if self._uses_items else self._fitting(batch)
        except CollectiveTimeout:
            raise
        except Exception:  # agreed by all ranks
            fits = set()
        if {"items", "samples"} <= fits:
            return
        self._looks_left = 0
        if not self._given:
            self._decide(fits)
        elif fits and "items" not in fits:
            over = "mean over" if "samples" in fits else "sum over"
            self._warn(
                f"the loss is a {over} samples, but loss_weight(inputs) of the trainer counts "
                "something else, so the gradient is wrong; leave out loss_weight"
            )

    def _decide(self, fits: set[str]) -> None:
        for name in _NAMES:
            if name in fits:
                self.name = name
                return
        self._warn(
            "the loss does not use num_items_in_batch, and it cannot be told what it is a mean "
            "over. It is weighted as a mean over the labels that are not -100, or over samples "
            "with one label each. If it is another mean, override loss_weight(inputs) of the "
            "trainer; if it is a sum, make it a mean (ctc_loss_reduction='mean')"
        )

    def _warn(self, message: str) -> None:
        if self._trainer.is_world_process_zero():
            logger.warning(message)

    def _changes_with_items(self, batch: MicroBatches) -> bool | None:
        """Whether the loss is another one with twice the number of items. Collective.

        None: its value does not show it (0 if no label counts, or not finite).
        """
        loss = TrainerLoss(self._trainer)
        one, two = (
            self._evaluate(partial(loss.of, factor=factor), self._few(batch)) for factor in (1, 2)
        )
        if not one or not math.isfinite(one):
            return None
        return not abs(one - two) <= _SAME * max(abs(one), abs(two))

    def _fitting(self, batch: MicroBatches) -> set[str]:
        """What may count in the loss: nothing if it cannot be told. Collective."""
        trainer, loss = self._trainer, TrainerLoss(self._trainer)
        if is_compiled(trainer.model):
            return set()
        recorded: list[RecordedLoss] = []

        def recording(model: nn.Module, inputs: Any) -> Tensor:
            one = RecordedLoss(model, loss.of, inputs)
            recorded.append(one)
            with one.recording():
                return one.loss(inputs)

        self._evaluate(recording, self._few(batch))
        weights = {"items": trainer.loss_weight, "samples": samples_of}
        found: set[str] = set()
        for one in recorded:
            with suppress(Exception):  # nothing can be told of this loss, which was computed
                found |= fitting_weights(one, one.samples, weights) if one.samples > 1 else set()
        control = trainer.optimizer.control
        return found.union(*control.exchange_objects(found, what="what counts in the loss"))

    def _few(self, batch: MicroBatches) -> Iterator[Any]:
        """A micro-batch of a few samples, on the rank with the most samples."""
        plan = self._trainer.optimizer.plan
        looking = max(range(plan.world_size), key=plan.samples)
        if self._trainer.args.process_index == looking:
            counts = [
                self._trainer.loss_weight(batch.take([at]))
                for at in range(min(len(batch), _COUNTED))
            ]
            order = sorted(range(len(counts)), key=counts.__getitem__)
            yield batch.take(sorted({*order[:1], *order[1 - _SAMPLES :]}))

    def _evaluate(self, loss: Callable[[nn.Module, Any], Tensor], batches: Iterable[Any]) -> float:
        """The loss in evaluation mode, equal on all ranks. Collective."""
        optimizer = self._trainer.optimizer
        with random_state_preserved(self._trainer.args.device):
            return float(optimizer.loss_before_step(loss, batches))
