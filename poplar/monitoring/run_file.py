"""`RunFile`: the record of a run, for `poplar report`."""

from __future__ import annotations

from pathlib import Path

from poplar.monitoring.progress import Progress
from poplar.monitoring.record import Run, RunRecord
from poplar.values.plan import Plan
from poplar.values.profile import ClusterProfile


class RunFile:
    """A JSON file with the profile, the plans and the measured steps; written at every report.

        monitor = Monitor(optimizer, [RunFile("run.json")], profile=tuned.profile)

    Then `poplar report run.json` draws it. If the plan changes in training, the record has one run
    per plan. The first step, which prepares kernels and buffers, does not count. Memory is bounded:
    the oldest runs and steps are dropped.

    Args:
        path: the file; its folder is made.
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
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._profile = profile

    def log(self, progress: Progress) -> None:
        assert self._profile is not None, "start() comes first"
        assert progress.plan is not None, "a plan stays a plan"
        seconds, losses = progress.step_seconds[self._is_first :], progress.losses
        self._is_first = False
        if self._runs and self._runs[-1].plan == progress.plan:
            last = self._runs.pop()
            seconds, losses = last.step_seconds + seconds, last.losses + losses
        elif seconds:
            self._plans += 1
        if seconds:
            self._runs.append(self._run(progress.plan, seconds, losses))
            while sum(len(run.step_seconds) for run in self._runs[1:]) >= self._keep:
                del self._runs[0]
            record = RunRecord(
                title=self._title,
                profile=self._profile,
                runs=tuple(self._runs),
                sum_of_speeds=progress.sum_of_speeds,
            )
            record.to_json(self._path)

    def close(self) -> None:
        """Nothing is left to write."""

    def _run(self, plan: Plan, seconds: tuple[float, ...], losses: tuple[float, ...]) -> Run:
        predicted = (plan.prediction or {}).get("step_seconds")
        return Run(
            name=f"plan {self._plans}",
            plan=plan,
            step_seconds=seconds[-self._keep :],
            losses=losses[-self._keep :],
            predicted_step_seconds=None if predicted is None else float(predicted),
        )
