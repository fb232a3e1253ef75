"""`PoplarMonitor`: `poplar.monitoring.Monitor` as a callback of Lightning."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl

from poplar.monitoring import Logger, Monitor
from poplar.values.profile import ClusterProfile


class PoplarMonitor(pl.Callback):
    """Reports speed, waiting by rank and the plan of a `PoplarStrategy` to loggers.

        Trainer(strategy="poplar", callbacks=[PoplarMonitor([JsonLines("progress.jsonl")])])

    Args:
        loggers: see `poplar.monitoring`.
        every: steps per report.
        profile: default: that of the strategy, if it has made the plan.
    """

    def __init__(
        self,
        loggers: Sequence[Logger],
        *,
        every: int = 20,
        profile: ClusterProfile | None = None,
    ) -> None:
        self._loggers, self._every, self._profile = loggers, every, profile
        self._monitor: Monitor | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        strategy = trainer.strategy
        profile = self._profile if self._profile is not None else strategy.profile
        self._monitor = Monitor(
            strategy.optimizer,
            self._loggers,
            every=self._every,
            start_step=trainer.global_step,
            profile=profile,
        )

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert self._monitor is not None, "on_train_start comes first"
        self._monitor(trainer.strategy.last_result)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if self._monitor is not None:
            self._monitor.close()
            self._monitor = None
