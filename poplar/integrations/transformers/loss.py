"""`TrainerLoss`: the loss of a micro-batch, as `Trainer` computes it, and its weight."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import torch
from accelerate.utils import gather_object
from torch import Tensor, nn

from poplar.data import pytree
from poplar.zero.micro_batches import counted

IGNORED = -100
"""The label of tokens that do not count."""


class TrainerLoss:
    """The mean loss of a micro-batch over its items, whose number is its weight.

    Items are what `Trainer` counts as `num_items_in_batch`: labels that are not ignored, shifted if
    the loss shifts them. Each micro-batch is given its own number. So the weighted mean of all
    micro-batches is the sum over the global batch divided by its number of items, as on one
    process.
    """

    def __init__(self, trainer: Any, about: str = "") -> None:
        """
        Args:
            trainer: whose `compute_loss` is called.
            about: what times of passes depend on beside the model; part of a profile's identity.
        """
        self._trainer = trainer
        self.__qualname__ = f"{type(trainer).__qualname__}.compute_loss {about}".strip()

    def __call__(self, model: nn.Module, inputs: Any) -> Tensor:
        """The loss of collated inputs."""
        weight = self._trainer.loss_weight(inputs)
        loss = self.of(model, inputs)
        self._trainer.pass_metrics.passed(weight)
        return loss

    def of(self, model: nn.Module, inputs: Any, factor: int = 1) -> Tensor:
        """The loss of collated inputs, with this multiple of their number of items."""
        trainer = self._trainer
        items = items_in(trainer, inputs)
        if items is not None:
            # A micro-batch without items has a loss and a gradient of 0, not 0 / 0.
            items = factor * items.clamp(min=1).to(trainer.args.device)
        inputs = trainer._prepare_inputs(inputs)
        with trainer.compute_loss_context_manager():
            return cast(Tensor, trainer.compute_loss(model, inputs, num_items_in_batch=items))

    def weight(self, inputs: Any) -> float:
        """What the mean loss of a micro-batch counts. It is asked before the passes of a step."""
        self._trainer.pass_metrics.restart_step()  # after running out of memory
        return float(counted(self._trainer.loss_weight, inputs))


def items_in(trainer: Any, inputs: Any) -> Tensor | None:
    """The number of items that `Trainer` passes to the loss; None if it passes none."""
    items = trainer._get_num_items_in_batch([inputs], torch.device("cpu"))
    return None if items is None else torch.as_tensor(items, device="cpu")


def own_mean_weight(inputs: Any, shifted: bool) -> float:
    """What the loss of a model counts that takes no `num_items_in_batch`.

    Args:
        inputs: of one micro-batch.
        shifted: the loss leaves out the first label of each row.

    Returns:
        The labels that are not ignored, if there are several per sample, else the samples.
    """
    labels = inputs.get("labels") if isinstance(inputs, Mapping) else None
    if isinstance(labels, Tensor) and not labels.is_floating_point() and labels.dim() > 1:
        return float((labels[..., 1:] if shifted else labels).ne(IGNORED).sum())
    return samples_of(inputs)


def samples_of(inputs: Any) -> float:
    """The number of samples in the inputs of a micro-batch."""
    try:
        return float(pytree.samples_in(inputs))
    except ValueError:
        tensors = [t for t in pytree.tensors(inputs) if t.dim() and not t.is_nested]
        rows = sorted(set(map(len, tensors)))
        raise ValueError(
            f"the tensors of a micro-batch have {rows} rows, so its samples cannot be counted: "
            "override loss_weight(inputs) of the trainer to return what its mean loss counts. "
            "Losses that communicate, as those of detection models (DETR, Mask2Former) do, are "
            "not supported"
        ) from None


class PassMetrics:
    """Metrics that TRL's trainers collect in `compute_loss`; merged over ranks to be logged.

    These trainers gather values over all ranks in every pass. Ranks may run different numbers of
    passes, so here every rank collects its own, with the weights of its passes. What a step has
    collected before it ran out of memory is dropped when it runs again.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._weights: list[float] = []
        self._collects = False
        self._merged_tokens = 0
        """Of all ranks, at the last merge; the trainer's count may be ahead by this rank's own."""
        self._at_start: tuple[int, dict[str, int], int] = (0, {}, 0)
        """Passes, values by metric, and tokens that were collected before this step."""
        for name in ("gather", "gather_for_metrics", "reduce", "pad_across_processes"):
            original = getattr(trainer.accelerator, name)
            setattr(trainer.accelerator, name, self._unless_collecting(original))

    def passed(self, weight: float) -> None:
        """A pass of this rank has computed its loss."""
        self._weights.append(weight)

    @contextlib.contextmanager
    def collecting(self) -> Iterator[None]:
        """A context for the passes of a step, in which gathering returns this rank's values.

        For other trainers than TRL's it raises there.
        """
        values = {name: len(values) for name, values in self._metrics().items()}
        tokens = getattr(self._trainer, "_total_train_tokens", 0)
        self._at_start = (len(self._weights), values, tokens)
        self._collects = True
        try:
            yield
        finally:
            self._collects = False

    @contextlib.contextmanager
    def discarding(self) -> Iterator[None]:
        """As `collecting`, of passes that are not in the step; drops what they collect."""
        own, names = vars(self._trainer), ("_metrics", "_total_train_tokens")
        before = copy.deepcopy({name: own[name] for name in names if name in own})
        passes = len(self._weights)
        try:
            with self.collecting():
                yield
        finally:
            own.update(before)
            del self._weights[passes:]

    def restart_step(self) -> None:
        """Drop what was collected in this step."""
        passes, values, tokens = self._at_start
        del self._weights[passes:]
        metrics = self._metrics()
        for name in list(metrics):
            del metrics[name][values.get(name, 0) :]
            if not metrics[name]:
                del metrics[name]
        if hasattr(self._trainer, "_total_train_tokens"):
            self._trainer._total_train_tokens = tokens

    def _metrics(self) -> dict[str, list[float]]:
        """By name, the values of passes that are not logged yet."""
        metrics: dict[str, list[float]] = getattr(self._trainer, "_metrics", {}).get("train", {})
        return metrics

    def merge_tokens(self) -> None:
        """Let the trainer count the tokens of all ranks, before it logs the number. Collective."""
        if hasattr(self._trainer, "_total_train_tokens"):
            own = self._trainer._total_train_tokens - self._merged_tokens
            self._merged_tokens += sum(gather_object([own]))
            self._trainer._total_train_tokens = self._merged_tokens

    def merge(self) -> None:
        """Replace what was collected since the last call by its mean over all ranks. Collective."""
        weights, self._weights = self._weights, []
        if not hasattr(self._trainer, "_metrics"):
            return
        self.merge_tokens()
        metrics = self._metrics()
        by_rank = gather_object([(dict(metrics), weights)])
        for name in sorted({name for own, _ in by_rank for name in own}):
            values = [
                (value, weight)
                for own, rank_weights in by_rank
                for value, weight in zip(own.get(name, ()), rank_weights, strict=False)
            ]
            total = sum(weight for _, weight in values)
            metrics[name] = [sum(v * w for v, w in values) / total if total else 0.0]
        if "num_tokens" in metrics:
            metrics["num_tokens"] = [self._merged_tokens]

    def _unless_collecting(self, gather: Callable[..., Any]) -> Callable[..., Any]:
        """`gather`, which in a step returns this rank's values, or raises."""

        @functools.wraps(gather)
        def gather_or_own(data: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._collects:
                return gather(data, *args, **kwargs)
            if hasattr(self._trainer, "_metrics"):
                return data
            raise RuntimeError(
                "compute_loss communicates (accelerator.gather, reduce or pad_across_processes), "
                "but ranks may run different numbers of passes, so they would wait for each other; "
                "collect the values, and gather them in a callback (on_step_end)"
            )

        return gather_or_own
