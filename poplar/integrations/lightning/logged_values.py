"""A step of Lightning's loop: its time, and what `self.log` receives, for the whole global batch.

Lightning logs the values of one batch on one rank. Here a step has several passes on each rank, so
`PassLog` collects what they log, and one exchange per step gives all ranks the mean.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.trainer.connectors.logger_connector.logger_connector import _LoggerConnector
from lightning.pytorch.trainer.connectors.logger_connector.result import (
    _Metadata,
    _ResultCollection,
    _ResultMetric,
    _Sync,
)
from torch import Tensor
from torchmetrics import Metric

from poplar.comm import Control
from poplar.optimizer import HeteroZeroOptimizer
from poplar.zero.micro_batches import counted
from poplar.zero.steps.step_result import StepResult, Stopwatch

Key = tuple[str, str]
"""The hook in which a value was logged, and its name."""
LOSS: Key = ("", "loss")

_OPERATORS = {
    "mean": dist.ReduceOp.SUM,
    "sum": dist.ReduceOp.SUM,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
}


@dataclass
class LoggedValue:
    """A value of the passes of this rank."""

    kind: str
    """ "mean", "sum", "min" or "max"."""
    options: dict[str, Any]
    """Further arguments of `log`."""
    weight: float = 0.0
    value: Tensor | None = None

    def add(self, value: Tensor, weight: float) -> None:
        """Add the value of a pass."""
        value = value.detach().double()
        self.weight += weight
        if self.kind == "mean":
            if not weight:  # the mean over an empty set is NaN
                return
            value = value * weight
        if self.value is None:
            self.value = value
        elif self.kind in ("mean", "sum"):
            self.value = self.value + value
        else:
            self.value = getattr(torch, f"{self.kind}imum")(self.value, value)


class PassLog(_ResultCollection):
    """Takes the place of Lightning's results during the passes of a step.

    Args:
        results: Lightning's, which get the values of the whole step.
        idle: a rank without samples in the plan; None if there is none.
    """

    def __init__(self, results: _ResultCollection, idle: int | None) -> None:
        super().__init__(training=True)
        self.weight = 0.0
        """Of the current pass."""
        self._results, self._idle = results, idle
        self._values: dict[Key, LoggedValue] = {}

    def add_loss(self, loss: Tensor) -> None:
        """Add the loss of the current pass."""
        self._values.setdefault(LOSS, LoggedValue("mean", {})).add(loss, self.weight)

    def log(self, fx: str, name: str, value: Any, **options: Any) -> None:
        """As Lightning's; values are kept until `finish`. Metrics count by themselves."""
        if not isinstance(value, Tensor):
            if self._idle is not None:
                raise RuntimeError(
                    f"the metric {name!r} is logged in a pass, and its result is exchanged by all "
                    f"ranks, but the plan gives rank {self._idle} no samples; log a value instead "
                    "of a Metric, or use a plan with samples for every rank"
                )
            self._results.log(fx, name, value, **options)
            return
        batch_size = options.pop("batch_size", None)
        weight = self.weight if batch_size is None else float(batch_size)
        for local in ("sync_dist", "sync_dist_fn", "sync_dist_group"):
            options.pop(local, None)
        kind = _kind(options.get("reduce_fx", "mean"))
        self._values.setdefault((fx, name), LoggedValue(kind, options)).add(value, weight)

    def reset(self, metrics: bool | None = None, fx: str | None = None) -> None:
        """Reset Lightning's results, at the start of an epoch."""
        self._results.reset(metrics, fx)

    def finish(self, control: Control, device: torch.device) -> Tensor:
        """Log the values of all ranks; returns the loss of the global batch. Collective."""
        mine = {key: (v.kind, v.options, v.weight) for key, v in self._values.items()}
        by_rank = control.exchange_objects(mine, what="the logged values of a step")
        found: dict[Key, tuple[str, dict[str, Any]]] = {}
        weights: dict[Key, float] = {}
        for of_rank in by_rank:
            for key, (kind, options, weight) in of_rank.items():
                found.setdefault(key, (kind, options))
                weights[key] = weights.get(key, 0.0) + weight
        values: dict[Key, Tensor] = {}
        for operator in (dist.ReduceOp.SUM, dist.ReduceOp.MIN, dist.ReduceOp.MAX):
            keys = [key for key, (kind, _) in found.items() if _OPERATORS[kind] == operator]
            values.update(self._reduced(keys, operator, device))
        for key, (kind, options) in found.items():
            value = values[key] / weights[key] if kind == "mean" else values[key]
            values[key] = value.float()
            if key != LOSS:
                self._results.log(
                    *key,
                    values[key],
                    **options,
                    batch_size=weights[key],
                    sync_dist=True,  # it is: Lightning warns of values that are not
                    sync_dist_fn=already_reduced,
                )
        return values[LOSS]

    def _reduced(self, keys: list[Key], operator: Any, device: torch.device) -> dict[Key, Tensor]:
        if not keys:
            return {}
        neutral = {dist.ReduceOp.MIN: torch.inf, dist.ReduceOp.MAX: -torch.inf}.get(operator, 0.0)
        absent = torch.tensor(neutral, dtype=torch.float64, device=device)
        own = [self._values[key].value if key in self._values else None for key in keys]
        vector = torch.stack([absent if v is None else v.to(device).reshape(()) for v in own])
        dist.all_reduce(vector, operator)
        return dict(zip(keys, vector.unbind(), strict=True))


class RunningStep:
    """Measures one step. Made before its first pass.

    Args:
        optimizer: of the step.
        log: what its passes log.
    """

    def __init__(self, optimizer: HeteroZeroOptimizer, log: PassLog) -> None:
        self._optimizer, self._parts = optimizer, optimizer._training_parts()
        self._log = log
        self._stopwatch = Stopwatch(
            self._parts.engine.strategy.streams, self._parts.engine.control.group
        )

    def add_loss(self, loss: Tensor) -> None:
        """Add the loss of the current pass, so that one that is not finite is found."""
        self._log.add_loss(loss)
        self._parts.engine.step.add_loss(loss)

    def passes_done(self) -> None:
        """Called after the last pass, before the update, which drops the state of the step."""
        engine = self._parts.engine
        self._state, self._timing = engine.step, engine.strategy.timing.step
        self._plan = self._optimizer.plan

    def finish(self, device: torch.device) -> tuple[Tensor, StepResult]:
        """Log the values of the step; returns the loss of the global batch. Collective."""
        self._stopwatch.stop()
        loss = self._log.finish(self._parts.engine.control, device)
        state, timing = self._state, self._timing
        result = StepResult(
            samples=state.samples,
            waiting_on=None,
            skipped=state.was_skipped,
            losses=loss.reshape(1),
            norm=None,
            plan=self._plan,
            stopwatch=self._stopwatch,
            waiting_seconds=lambda: state.waited_to_open + timing.waited_seconds(),
        )
        return loss, result


class EvaluationLog(_ResultCollection):
    """Results of validation or test over all ranks: means over the samples of the dataset.

    Ranks may log other names, and in another order. As in training, a name that only some ranks
    have logged gets the value of these ranks on all.

    Args:
        weight: of a batch; None: its number of samples.
    """

    def __init__(self, weight: Callable[[Any], Any] | None) -> None:
        super().__init__(training=False)
        self._weight = weight

    def log(self, fx: str, name: str, value: Any, **options: Any) -> None:
        counts = isinstance(value, Tensor) and self._weight is not None and self.batch is not None
        if counts and options.get("batch_size") is None:
            options["batch_size"] = float(counted(self._weight, self.batch))  # type: ignore[arg-type]
        super().log(fx, name, value, **options)

    def update_metrics(self, key: str, value: Any, batch_size: Any) -> None:
        """As Lightning's; a mean over nothing is NaN, and counts nothing."""
        found = self[key]
        is_mean = found.is_tensor and found.meta.on_epoch and found.meta.is_mean_reduction
        sum_before = found.value if is_mean and not batch_size else None
        super().update_metrics(key, value, batch_size)
        if sum_before is not None:
            found.value = sum_before

    def exchange(self, device: torch.device) -> None:
        """Give all ranks the values of the epoch so far, on their device. Collective."""
        mine = {
            key: (
                replace(found.meta, _sync=_Sync()),
                float(found.value),
                float(found.cumulated_batch_size) if found.meta.is_mean_reduction else 0.0,
            )
            for key, found in self.valid_items()
            if found.is_tensor and found.meta.on_epoch and not found.meta.sync.rank_zero_only
        }
        by_rank: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(by_rank, mine)
        parts: dict[str, list[tuple[_Metadata, float, float]]] = {}
        for of_rank in by_rank:
            for key, part in of_rank.items():
                parts.setdefault(key, []).append(part)
        for key, of_name in parts.items():
            meta = of_name[0][0]
            numbers = [part[1:] for part in of_name]
            values, weights = torch.tensor(numbers, dtype=torch.float64, device="cpu").unbind(1)
            value = meta.reduce_fx(values)
            if meta.is_mean_reduction:
                value = values.sum() / weights.sum()
            result = self.setdefault(key, _ResultMetric(meta, is_tensor=True))
            # Lightning takes this instead of the reduction of its own.
            result._computed = value.to(device, result.value.dtype)

    def reset(self, metrics: bool | None = None, fx: str | None = None) -> None:
        """As Lightning's; at the end of a run names are dropped, too: some are of other ranks."""
        super().reset(metrics, fx)
        if fx is None:
            self.clear()


class EvaluationConnector(_LoggerConnector):
    """Exchanges the values of an evaluation before Lightning's loops read them, as all ranks do.

    Callbacks may read them on one rank, so the results themselves cannot tell when to exchange.
    """

    def on_epoch_end(self) -> None:
        self._exchange()
        super().on_epoch_end()

    def update_eval_epoch_metrics(self) -> dict[str, Tensor]:
        self._exchange()
        return super().update_eval_epoch_metrics()

    def _exchange(self) -> None:
        results = self.trainer._results
        if isinstance(results, EvaluationLog):
            results.exchange(self.trainer.strategy.root_device)


@contextmanager
def discarding(trainer: Any, module: pl.LightningModule) -> Iterator[None]:
    """A context for passes that do not count: nothing is logged, and metrics are reset."""
    loop, connector = trainer.fit_loop.epoch_loop, trainer._logger_connector
    before = loop._results, connector._current_fx, module._current_fx_name
    loop._results = PassLog(_ResultCollection(training=True), None)
    module._current_fx_name = "training_step"
    try:
        yield
    finally:
        loop._results, connector._current_fx, module._current_fx_name = before
        for metric in module.modules():
            if isinstance(metric, Metric):
                metric.reset()


def already_reduced(value: Any, *_: Any, **__: Any) -> Any:
    """The reduction of a value that is equal on all ranks."""
    return value


def _kind(reduce_fx: Any) -> str:
    name = reduce_fx if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", "")
    name = {"avg": "mean"}.get(name.lower(), name.lower())
    if name not in _OPERATORS:
        raise ValueError(f"self.log(reduce_fx={reduce_fx!r}): use 'mean', 'sum', 'min' or 'max'")
    return name
