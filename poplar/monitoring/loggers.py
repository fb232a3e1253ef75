"""Loggers of `Monitor`: what they are, JSON lines, TensorBoard and Weights & Biases."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Protocol, TextIO

from poplar.monitoring.progress import Progress
from poplar.values.plan import Plan
from poplar.values.profile import ClusterProfile


class Logger(Protocol):
    """Where progress goes. Its methods are called on rank 0 only."""

    def start(self, plan: Plan | None, profile: ClusterProfile | None) -> None:
        """Called before the first report."""

    def log(self, progress: Progress) -> None:
        """Called once per report."""

    def close(self) -> None:
        """Called when training has ended."""


class JsonLines:
    """One JSON object per report, appended to a file.

    Args:
        path: the file; its folder is made.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._file: TextIO | None = None

    def start(self, plan: Plan | None, profile: ClusterProfile | None) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._path.open("a", encoding="utf-8")
        self._write({"plan": None if plan is None else plan.to_dict()})

    def log(self, progress: Progress) -> None:
        self._write({"step": progress.step, **progress.scalars()})

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, values: dict[str, Any]) -> None:
        assert self._file is not None, "start() comes first"
        # JSON has no NaN: a loss that is not finite is null.
        finite = {k: None if _is_not_finite(v) else v for k, v in values.items()}
        self._file.write(json.dumps(finite, allow_nan=False) + "\n")
        self._file.flush()


class TensorBoard:
    """Scalars and the plan for TensorBoard; needs the package `tensorboard`.

    Args:
        folder: for the event files.
    """

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        self._writer: Any = None

    def start(self, plan: Plan | None, profile: ClusterProfile | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(self._folder))
        self._writer.add_text("plan", f"```\n{plan}\n```")

    def log(self, progress: Progress) -> None:
        for name, value in progress.scalars().items():
            self._writer.add_scalar(name, value, progress.step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class WandB:
    """Scalars and the plan for Weights & Biases; needs the package `wandb`.

    Args:
        **options: of `wandb.init`, such as `project`, `name`, and `mode="offline"`.
    """

    def __init__(self, **options: Any) -> None:
        self._options = options
        self._run: Any = None

    def start(self, plan: Plan | None, profile: ClusterProfile | None) -> None:
        import wandb

        config = {"plan": None if plan is None else plan.to_dict()}
        given = self._options.get("config", {})
        self._run = wandb.init(**{**self._options, "config": {**config, **given}})

    def log(self, progress: Progress) -> None:
        self._run.log(progress.scalars(), step=progress.step)

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()


def _is_not_finite(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)
