"""`Progress`, the steps since the last report, and the loggers to which `Monitor` passes it."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TextIO

from poplar.monitoring.record import Run, RunRecord
from poplar.values.plan import Plan
from poplar.values.profile import ClusterProfile
from poplar.values.schema import json_text


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Some consecutive steps of one plan; the same on every rank that trains.

    A rank that is left out has the step times of the first active rank.
    """

    step: int
    """Trained so far."""
    losses: tuple[float, ...]
    """Of the global batches, step by step."""
    grad_norm: float | None
    """Before clipping, in the last step; None if it was not computed."""
    samples: int
    """In these steps."""
    step_seconds: tuple[float, ...]
    """Of the slowest rank, step by step, without the time between steps."""
    wall_seconds: float
    """From the last report to this one, with loading and all that the loop does."""
    waiting_seconds: tuple[float, ...]
    """By rank, the mean per step of the time in which it waited for other ranks: 0 for a rank that
    the plan leaves out."""
    skipped: int
    """Steps that were not applied, because a loss or the gradient was not finite."""
    sum_of_speeds: float | None
    """Samples per second of all devices at once, each at its best batch; None without a profile."""
    plan: Plan | None
    """That the steps ran under."""

    @property
    def samples_per_second(self) -> float:
        """In the steps."""
        return self.samples / sum(self.step_seconds)

    @property
    def of_sum_of_speeds(self) -> float | None:
        """`samples_per_second` as a fraction of the sum of speeds."""
        if self.sum_of_speeds is None:
            return None
        return self.samples_per_second / self.sum_of_speeds

    def scalars(self) -> dict[str, float]:
        """What a chart shows, by name."""
        mean_step = sum(self.step_seconds) / len(self.step_seconds)
        values = {
            "loss": self.losses[-1],
            "grad_norm": self.grad_norm,
            "samples_per_second": self.samples_per_second,
            "samples_per_second_with_loading": self.samples / self.wall_seconds,
            "percent_of_sum_of_speeds": None
            if self.of_sum_of_speeds is None
            else 100.0 * self.of_sum_of_speeds,
            "step_seconds": mean_step,
            "skipped_steps": float(self.skipped),
        }
        waiting = {
            f"waiting_percent/rank_{rank}": 100.0 * seconds / mean_step
            for rank, seconds in enumerate(self.waiting_seconds)
        }
        return {name: v for name, v in {**values, **waiting}.items() if v is not None}


class Logger(Protocol):
    """Where progress goes. Its methods are called on one rank only; see `Monitor`."""

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
        self._file.write(json_text(values) + "\n")
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
        given = self._options.get("config") or {}
        self._run = wandb.init(**{**self._options, "config": {**config, **given}})

    def log(self, progress: Progress) -> None:
        self._run.log(progress.scalars(), step=progress.step)

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()


class RunFile:
    """A JSON file with the profile, the plans and the measured steps; written at every report.

        monitor = Monitor(optimizer, [RunFile("run.json")], profile=tuned.profile)

    Then `poplar report run.json` draws it. If the plan changes in training, the record has one run
    per plan. The first step, which prepares kernels and buffers, does not count. Memory is bounded:
    the oldest runs and steps are dropped.

    A resumed training (`Monitor(start_step=)`) continues the record of the steps before it, if the
    file has one of a profile of the same model, settings and devices.

    Args:
        path: the file; its folder is made. It is replaced at every report, so it must be a regular
            file, or a link to one, in a folder in which files can be replaced.
        title: of the report.
        keep: the number of latest steps that are recorded, over all plans.
    """

    def __init__(self, path: str | Path, title: str = "Training", *, keep: int = 10_000) -> None:
        self._path, self._title, self._keep = Path(path), title, keep
        self._profile: ClusterProfile | None = None
        self._runs: list[Run] = []
        self._plans = 0
        self._is_first = True

    def start(self, plan: Plan | None, profile: ClusterProfile | None) -> None:
        if plan is None or profile is None:
            raise ValueError(
                "RunFile records a run under a plan, with the profile that it was made from; pass "
                "plan= to HeteroZeroOptimizer and Monitor(..., profile=tuned.profile)"
            )
        if self._path.exists() and not self._path.is_file():
            raise ValueError(
                f"RunFile({str(self._path)!r}) is no regular file, which it must be, because every "
                "report replaces it; pass the path of a file, or use JsonLines for a stream"
            )
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path = self._path.resolve()  # a link stays one
        self._profile = profile

    def log(self, progress: Progress) -> None:
        assert self._profile is not None, "start() comes first"
        assert progress.plan is not None, "a plan stays a plan"
        seconds = progress.step_seconds[self._is_first :]
        losses: tuple[float | None, ...] = progress.losses
        first_step = progress.step - len(losses) + 1
        if self._is_first and first_step > 1:
            self._runs = self._recorded_before(first_step, self._profile)
            self._plans = len(self._runs)
        self._is_first = False
        last = self._runs[-1] if self._runs else None
        if last and last.plan == progress.plan and last.next_step == first_step:
            self._runs.pop()
            seconds, losses = last.step_seconds + seconds, last.losses + losses
        elif seconds:
            self._plans += 1
        if seconds:
            losses = losses[-self._keep :]
            self._runs.append(
                Run(
                    name=f"plan {self._plans}",
                    plan=progress.plan,
                    step_seconds=seconds[-self._keep :],
                    losses=losses,
                    first_step=progress.step - len(losses) + 1,
                    predicted_step_seconds=(progress.plan.prediction or {}).get("step_seconds"),
                )
            )
            while sum(len(run.step_seconds) for run in self._runs[1:]) >= self._keep:
                del self._runs[0]
            record = RunRecord(
                title=self._title,
                profile=self._profile,
                runs=tuple(self._runs),
                sum_of_speeds=progress.sum_of_speeds,
            )
            # A job that is stopped while it writes leaves the record of the report before.
            written = self._path.with_name(f"{self._path.name}.new")
            record.to_json(written)
            written.replace(self._path)

    def close(self) -> None:
        """Nothing is left to write."""

    def _recorded_before(self, step: int, profile: ClusterProfile) -> list[Run]:
        """What the file has of the steps before this one; nothing if it is of another job."""
        if not self._path.exists():
            return []
        try:
            record = RunRecord.from_json(self._path)
            known = record.profile
            if (known.identity, known.world_size) != (profile.identity, profile.world_size):
                raise ValueError(
                    f"{self._path} has the record of another model, other settings or other devices"
                )
        except (OSError, ValueError) as error:
            warnings.warn(f"the record begins at step {step}: {error}", stacklevel=2)
            return []
        before = [kept for run in record.runs if (kept := run.before(step)) is not None]
        return [replace(run, name=f"plan {number}") for number, run in enumerate(before, 1)]
