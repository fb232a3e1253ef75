"""`Monitor`: reads the results of steps now and then, and passes them to loggers on one rank."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from poplar.hardware.estimate import sum_of_speeds
from poplar.monitoring.loggers import Logger, Progress
from poplar.optimizer import HeteroZeroOptimizer
from poplar.values.profile import ClusterProfile
from poplar.zero.agreement import run_on_all_ranks
from poplar.zero.steps.step_result import StepResult


class Monitor:
    """Reports the progress of training to loggers.

        monitor = Monitor(optimizer, [TensorBoard("logs"), JsonLines("run.jsonl")], every=20)
        for batch in loader:
            monitor(optimizer.train_step(loss_fn, batch))
        monitor.close()

    Between reports it only keeps the results: nothing is read from the device, and no message is
    sent. A report waits for the device and exchanges one message.

    Args:
        optimizer: whose results it gets.
        loggers: where reports go; the same on all ranks, used on the first rank that trains now,
            also if a later plan leaves it out.
        every: steps per report, at most: a report is about steps of one plan.
        start_step: steps that were trained before, if training was resumed.
        profile: of `poplar.tune(...).profile`, for the percentage of the sum of speeds and for
            `RunFile`; the same on all ranks.

    Raises:
        ValueError: `every` is less than 1.
    """

    def __init__(
        self,
        optimizer: HeteroZeroOptimizer,
        loggers: Sequence[Logger],
        *,
        every: int = 20,
        start_step: int = 0,
        profile: ClusterProfile | None = None,
    ) -> None:
        if every < 1:
            raise ValueError(f"Monitor(every={every}); report every step or less often")
        self._optimizer, self._every, self._profile = optimizer, every, profile
        logs = optimizer.control.group.rank == 0 and optimizer.is_active
        self._loggers = tuple(loggers) if logs else ()
        self._sum_of_speeds: float | None = None
        if profile is not None:
            largest = [device.max_batch for device in profile.devices]
            self._sum_of_speeds = sum_of_speeds(profile, largest)
        self._pending: list[StepResult] = []
        self._step = start_step
        self._on_loggers(lambda logger: logger.start(optimizer.plan, profile))
        self._since = self._last = time.perf_counter()
        """When the steps of the next report began, and when the last step ended."""

    def __call__(self, result: StepResult) -> Progress | None:
        """Take the result of a step. Every rank must call it.

        Collective if there are `every` results, or if the plan is another one than before.

        Returns:
            What was logged, on all ranks; None if it is not time to.

        Raises:
            RankFailed: a logger failed on its rank, which raises the cause.
        """
        progress = None
        try:
            if self._pending and result.plan != self._pending[-1].plan:
                progress = self._report(until=self._last)
        finally:  # training may go on if a logger fails
            self._step += 1
            self._pending.append(result)
            self._last = time.perf_counter()
        if len(self._pending) == self._every:
            progress = self._report(until=self._last)
        return progress

    def close(self) -> None:
        """Report the last steps and close the loggers. Collective."""
        self.report()
        self._on_loggers(lambda logger: logger.close())

    def report(self) -> Progress | None:
        """Report the steps since the last report now. Collective.

        Returns:
            What was logged, on all ranks; None if there was no step.

        Raises:
            RankFailed: a logger failed on its rank, which raises the cause. If the plan leaves that
                rank out now, the active ranks train on.
        """
        return self._report(until=time.perf_counter())

    def _report(self, until: float) -> Progress | None:
        """Report the steps since the last report, which ended at `until`."""
        results, self._pending = self._pending, []
        if not results:
            return None
        since, self._since = self._since, until
        mine = [
            (result.seconds, 0.0 if result.left_out else result.waiting_seconds)
            for result in results
        ]
        control, plan = self._optimizer.control, results[-1].plan
        by_rank = control.exchange_objects(mine, what="the progress of training")
        steps = list(zip(*by_rank, strict=True))
        # The other ranks have been left out since, or this one has: their last times are known.
        waiting = {
            rank: [waited for _, waited in each]
            for rank, each in control.group.by_name(by_rank).items()
            if self._optimizer.is_active
        }
        progress = Progress(
            step=self._step,
            losses=tuple(result.loss for result in results),
            grad_norm=results[-1].grad_norm,
            samples=sum(result.samples for result in results),
            step_seconds=tuple(max(seconds for seconds, _ in step) for step in steps),
            wall_seconds=until - since,
            waiting_seconds=tuple(
                sum(waiting.get(rank) or _reported_waiting(results, rank)) / len(results)
                for rank in range(plan.world_size if plan else control.group.size)
            ),
            skipped=sum(result.skipped for result in results),
            sum_of_speeds=self._sum_of_speeds,
            plan=plan,
        )
        self._on_loggers(lambda logger: logger.log(progress))
        return progress

    def _on_loggers(self, call: Callable[[Logger], None]) -> None:
        """Call all loggers; if one fails, all ranks raise. Collective."""

        def call_all() -> None:
            for logger in self._loggers:
                call(logger)

        control = self._optimizer.control  # of the ranks that train now
        run_on_all_ranks(control, call_all, doing="logging the progress of training")


def _reported_waiting(results: Sequence[StepResult], rank: int) -> list[float]:
    """Seconds that a rank waited in each step, as all ranks know them; 0 if unknown."""
    times = [result.rank_times[rank] for result in results if result.rank_times]
    return [each.waiting_seconds for each in times if math.isfinite(each.waiting_seconds)]
