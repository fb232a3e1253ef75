"""`Monitor` reports steps to loggers, reads the device only then, and records runs for reports."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import ranks as pool
import torch
import torchrun
from readme import launch, program_of
from records import cluster
from torch import nn

import poplar
from poplar.monitoring import (
    JsonLines,
    Monitor,
    Progress,
    RunFile,
    RunRecord,
    TensorBoard,
    WandB,
    write_report,
)
from poplar.values.errors import RankFailed

PLAN = poplar.Plan(
    stage=1, global_batch=6, micro_batches=((2, 1), (2,), (1,)), shares=(0.5, 0.3, 0.2)
)
PROFILE = cluster((30.0, 20.0, 10.0), ["CPU"] * 3)


def train(monitored: Any, steps: int, watch: Any = None) -> list[float]:
    """Train, with a monitor that `monitored(optimizer)` makes."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    optimizer = poplar.HeteroZeroOptimizer(
        model, torch.optim.SGD, plan=PLAN, process_group=pool.group(), lr=0.1
    )
    monitor = monitored(optimizer)
    results = []
    for _ in range(steps):
        batch = torch.randn(PLAN.samples(pool.rank()), 8)
        results.append(optimizer.train_step(lambda m, b: m(b).square().mean(), batch, max_norm=1.0))
        monitor(results[-1])
        if watch is not None:
            watch(results)
    monitor.close()
    return [result.loss for result in results]


def report_to_files(folder: Path) -> tuple[list[float], list[list[bool]]]:
    """Losses, and after each step which results had been read."""
    loggers = [JsonLines(folder / "a" / "log.jsonl"), TensorBoard(folder / "tb")]
    loggers.append(RunFile(folder / "b" / "run.json", "A test"))
    read: list[list[bool]] = []
    losses = train(
        lambda optimizer: Monitor(optimizer, loggers, every=4, profile=PROFILE),
        10,
        lambda results: read.append(["loss" in vars(result) for result in results]),
    )
    return losses, read


def test_results_are_read_for_reports_of_losses_speed_waiting_and_the_run(ranks, tmp_path):
    found = ranks.run(report_to_files, tmp_path, ranks=3)
    losses, _ = found[0]
    for _, read in found:
        for step, of_results in enumerate(read, start=1):
            reported = step - step % 4
            assert of_results == [True] * reported + [False] * (step - reported)
    first, *reports = map(json.loads, (tmp_path / "a" / "log.jsonl").read_text().splitlines())
    assert poplar.Plan.from_dict(first["plan"]) == PLAN
    assert [report["step"] for report in reports] == [4, 8, 10]
    for report in reports:
        assert report["loss"] == pytest.approx(losses[report["step"] - 1])
        assert report["percent_of_sum_of_speeds"] > 0
        assert {f"waiting_percent/rank_{rank}" for rank in range(3)} <= report.keys()
    assert list((tmp_path / "tb").glob("events.out.tfevents.*"))
    record = RunRecord.from_json(tmp_path / "b" / "run.json")
    assert record.chosen.plan == PLAN
    assert record.chosen.losses == pytest.approx(losses)
    assert len(record.chosen.step_seconds) == 9  # without the first one


class Kept:
    """A logger that keeps the reports; the first one fails."""

    def __init__(self) -> None:
        self.reports: list[Progress] = []

    def start(self, plan: Any, profile: Any) -> None:
        pass

    def log(self, progress: Progress) -> None:
        self.reports.append(progress)
        if len(self.reports) == 1:
            raise OSError("no space left on device")

    def close(self) -> None:
        pass


def report_to_a_logger_that_fails() -> None:
    train(lambda optimizer: Monitor(optimizer, [Kept()], every=2), 2)


def test_logger_that_fails_raises_on_all_ranks(ranks):
    first, *others = ranks.run_expecting_errors(report_to_a_logger_that_fails, ranks=3)
    assert first.is_a(OSError)
    assert all(other.is_a(RankFailed) and "no space left" in other.message for other in others)


def reports_of_two_plans() -> list[tuple[int, int, float]]:
    """Last step, steps and seconds of each report; the clock is at 1, 2 and 10 after a step."""
    optimizer = poplar.HeteroZeroOptimizer(
        nn.Linear(8, 1), torch.optim.SGD, plan=PLAN, process_group=pool.group(), lr=0.1
    )
    batch = torch.randn(PLAN.samples(pool.rank()), 8)
    result = optimizer.train_step(lambda m, b: m(b).square().mean(), batch)
    other = copy.copy(result)
    other.plan = PLAN.with_largest_batches({0: 1})
    kept = Kept()
    with mock.patch("poplar.monitoring.monitor.time.perf_counter", return_value=0.0) as clock:
        monitor = Monitor(optimizer, [kept])
        for seconds, each in ((1.0, result), (2.0, result), (10.0, other)):
            clock.return_value = seconds
            with contextlib.suppress(OSError, RankFailed):
                monitor(each)
        clock.return_value = 11.0
        monitor.close()
    return [(each.step, len(each.losses), each.wall_seconds) for each in kept.reports]


def test_the_first_step_of_a_changed_plan_belongs_to_its_report(ranks):
    """With its seconds, and also if the report of the plan before it could not be logged."""
    reports, *_ = ranks.run(reports_of_two_plans, ranks=3)
    assert reports == [(2, 2, 2.0), (3, 1, 9.0)]


def progress(**changed: Any) -> Progress:
    values: dict[str, Any] = {
        "step": 2,
        "losses": (2.0, 1.0),
        "grad_norm": None,
        "samples": 12,
        "step_seconds": (0.5, 0.25),
        "wall_seconds": 1.0,
        "waiting_seconds": (0.0, 0.075),
        "skipped": 0,
        "sum_of_speeds": 32.0,
        "plan": PLAN,
    }
    return Progress(**{**values, **changed})


def test_scalars_of_a_report():
    scalars = progress().scalars()
    assert scalars["samples_per_second"] == 16.0
    assert scalars["samples_per_second_with_loading"] == 12.0
    assert scalars["percent_of_sum_of_speeds"] == 50.0
    assert scalars["waiting_percent/rank_1"] == pytest.approx(20.0)
    assert "grad_norm" not in scalars
    assert "percent_of_sum_of_speeds" not in progress(sum_of_speeds=None).scalars()


def test_a_changed_plan_is_another_run_with_losses_that_are_not_compared(tmp_path):
    """After a change of the plan, the losses of the next steps are others for another reason."""
    run_file = RunFile(tmp_path / "run.json", keep=3)
    run_file.start(PLAN, PROFILE)
    smaller = PLAN.with_largest_batches({0: 1})
    for step, plan in ((2, PLAN), (4, PLAN), (6, smaller)):
        run_file.log(progress(plan=plan, step=step))
    record = RunRecord.from_json(tmp_path / "run.json")
    assert [(run.plan, run.first_step) for run in record.runs] == [(PLAN, 2), (smaller, 5)]
    assert [len(run.step_seconds) for run in record.runs] == [3, 2]
    write_report(record, tmp_path / "report.html")
    assert "differ by" not in (tmp_path / "report.html").read_text("utf-8")


def start_training(path: Path, reports: Sequence[Progress], profile: Any = PROFILE) -> RunRecord:
    """The record after a training made these reports."""
    run_file = RunFile(path)
    run_file.start(PLAN, profile)
    for report in reports:
        run_file.log(report)
    return RunRecord.from_json(path)


def steps_until(step: int, plan: poplar.Plan = PLAN) -> Progress:
    """A report of four steps, whose losses are their numbers."""
    numbers = tuple(float(number) for number in range(step - 3, step + 1))
    return progress(
        step=step, losses=numbers, step_seconds=tuple(n / 8.0 for n in numbers), plan=plan
    )


def test_a_resumed_training_continues_the_record(tmp_path):
    """From a checkpoint of step 10, after which the first start had trained two more steps."""
    path = tmp_path / "run.json"
    start_training(path, [steps_until(4), steps_until(8), steps_until(12)])
    (run,) = start_training(path, [steps_until(14)]).runs
    assert run.losses == tuple(range(1, 15))
    assert run.step_seconds == tuple(n / 8 for n in range(1, 15) if n not in (1, 11)), "not timed"
    assert (run.first_step, run.next_step) == (1, 15)
    write_report(RunRecord.from_json(path), tmp_path / "report.html")


def test_a_resumed_training_with_other_steps_or_another_plan_adds_a_run(tmp_path):
    path = tmp_path / "run.json"
    smaller = PLAN.with_largest_batches({0: 1})
    start_training(path, [steps_until(4), steps_until(8, smaller)])
    start_training(path, [steps_until(20, smaller)])  # steps 9 to 16 were not reported
    runs = start_training(path, [steps_until(24)]).runs
    assert [run.name for run in runs] == [f"plan {number}" for number in (1, 2, 3, 4)]
    assert [run.plan for run in runs] == [PLAN, smaller, smaller, PLAN]
    assert [run.first_step for run in runs] == [1, 5, 17, 21]
    (run,) = start_training(path, [steps_until(8)]).runs
    assert run.losses == tuple(range(1, 9)), "the steps after the checkpoint are trained again"


def test_a_training_from_the_first_step_replaces_the_record(tmp_path):
    path = tmp_path / "run.json"
    start_training(path, [steps_until(4), steps_until(8)])
    (run,) = start_training(path, [steps_until(4)]).runs
    assert (run.first_step, run.next_step) == (1, 5)


def test_steps_of_another_job_are_not_continued(tmp_path):
    path = tmp_path / "run.json"
    start_training(path, [steps_until(4)])
    other = dataclasses.replace(PROFILE, identity={"model": "another"})
    with pytest.warns(
        UserWarning, match=r"begins at step 5: .*run\.json has the record of another"
    ):
        (run,) = start_training(path, [steps_until(8)], other).runs
    assert (run.first_step, run.losses) == (5, (5.0, 6.0, 7.0, 8.0))
    path.write_text("{")
    with pytest.warns(UserWarning, match=r"begins at step 9: .*run\.json is damaged"):
        (run,) = start_training(path, [steps_until(12)]).runs
    assert run.first_step == 9


def test_a_job_that_is_stopped_while_it_writes_leaves_a_record(tmp_path, monkeypatch):
    run_file = RunFile(tmp_path / "run.json")
    run_file.start(PLAN, PROFILE)
    run_file.log(progress())

    def stopped(path: Path, text: str, **options: Any) -> None:
        path.open("w").write(text[:100])
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", stopped)
    with pytest.raises(KeyboardInterrupt):
        run_file.log(progress(step=4))
    monkeypatch.undo()
    (run,) = RunRecord.from_json(tmp_path / "run.json").runs
    assert len(run.step_seconds) == 1


def test_losses_that_are_not_finite_are_null_in_a_record(tmp_path):
    run_file = RunFile(tmp_path / "run.json")
    run_file.start(PLAN, PROFILE)
    run_file.log(progress(step=3, losses=(2.0, math.nan, math.inf), step_seconds=(0.5,) * 3))

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    json.loads((tmp_path / "run.json").read_text("utf-8"), parse_constant=refuse)
    record = RunRecord.from_json(tmp_path / "run.json")
    assert record.chosen.losses == (2.0, None, None)
    write_report(record, tmp_path / "report.html")


def test_a_record_replaces_a_file_or_what_a_link_leads_to(tmp_path):
    with pytest.raises(ValueError, match=r"no regular file.* JsonLines for a stream"):
        RunFile("/dev/null").start(PLAN, PROFILE)
    (tmp_path / "link.json").symlink_to(tmp_path / "run.json")
    run_file = RunFile(tmp_path / "link.json")
    run_file.start(PLAN, PROFILE)
    run_file.log(progress())
    assert (tmp_path / "link.json").is_symlink()
    assert (tmp_path / "run.json").is_file()


def test_options_of_weights_and_biases_may_be_none(monkeypatch):
    given: dict[str, Any] = {}
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **all: given.update(all)))
    WandB(config=None, project="poplar").start(PLAN, None)
    assert given == {"project": "poplar", "config": {"plan": PLAN.to_dict()}}


def test_a_long_run_takes_no_more_memory_or_disk(tmp_path):
    """Also if the plan changes again and again."""
    run_file = RunFile(tmp_path / "run.json", keep=10)
    run_file.start(PLAN, PROFILE)
    plans = [dataclasses.replace(PLAN, stage=stage) for stage in (0, 1)]
    for number in range(40):
        steps = {"step_seconds": (0.1,) * 4, "losses": (1.0,) * 4}
        run_file.log(progress(step=4 * number + 4, plan=plans[number // 2 % 2], **steps))
        assert sum(len(run.step_seconds) for run in run_file._runs) < 2 * 10
    names = [run.name for run in RunRecord.from_json(tmp_path / "run.json").runs]
    assert names == ["plan 19", "plan 20"]
    run_file = RunFile(tmp_path / "run.json", keep=10)
    run_file.start(PLAN, PROFILE)
    for number in range(10):
        steps = {"step_seconds": (0.1,) * 4, "losses": (1.0,) * 4}
        run_file.log(progress(step=4 * number + 4, **steps))
    (run,) = RunRecord.from_json(tmp_path / "run.json").runs
    assert len(run.step_seconds) == len(run.losses) == 10


def test_a_record_needs_a_profile(tmp_path):
    with pytest.raises(ValueError, match=r"profile=tuned\.profile"):
        RunFile(tmp_path / "run.json").start(PLAN, None)


@pytest.mark.full
def test_weights_and_biases_offline(tmp_path):
    run = WandB(project="poplar", mode="offline", dir=str(tmp_path))
    run.start(PLAN, None)
    run.log(progress())
    run.close()
    assert list(tmp_path.rglob("*.wandb"))


@pytest.mark.slow
def test_program_of_the_guide_writes_what_the_report_reads(tmp_path):
    launch(program_of("monitoring.md", tmp_path), 2, str(tmp_path / "logs"))
    report = ("-m", "poplar", "report", "logs/run.json", "-o", "report.html")
    torchrun.run(report, folder=tmp_path).check_returncode()
    assert "sum of speeds" in (tmp_path / "report.html").read_text("utf-8")
