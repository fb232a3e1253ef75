"""The parts of the demo that need no ranks: noise warnings, summary, options."""

from __future__ import annotations

import dataclasses
import io
import json
import sys
from pathlib import Path

import pytest
from records import synthetic_record
from rich.console import Console

from poplar import Plan
from poplar.monitoring import RunRecord

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import demo
from other_load import describe, warnings_of

from poplar.pair.speed import Speed


class TestSummary:
    def test_last_line_is_json(self, capsys):
        record = synthetic_record()
        shown = io.StringIO()
        demo.summarize(Console(file=shown, width=80), record)
        outcome = json.loads(capsys.readouterr().out.splitlines()[-1])
        planned = record.chosen
        assert outcome["stage"] == 0
        assert outcome["predicted_step_seconds"] == round(planned.predicted_step_seconds, 4)
        assert outcome["measured_step_seconds"] == round(planned.measured_step_seconds, 4)
        assert outcome["speedup"] > 1.25
        assert outcome["max_loss_difference"] == 0.0
        assert "…" not in shown.getvalue(), "the table must fit 80 columns"

    def test_different_loss_curves_raise(self, capsys):
        record = synthetic_record()
        other = dataclasses.replace(
            record.chosen, losses=tuple(v + 1 for v in record.chosen.losses)
        )
        record = dataclasses.replace(record, runs=(record.runs[0], other))
        with pytest.raises(RuntimeError, match="loss curves differ by 1"):
            demo.summarize(Console(file=io.StringIO()), record)
        assert json.loads(capsys.readouterr().out)["max_loss_difference"] == pytest.approx(1.0)

    def test_outputs_are_written_to_one_folder(self, tmp_path):
        record = synthetic_record()
        demo.write_outputs(Console(file=io.StringIO()), record, tmp_path / "demo")
        assert RunRecord.from_json(tmp_path / "demo" / "run.json") == record
        written = {path.name for path in (tmp_path / "demo").iterdir()}
        assert written >= {"run.json", "report.html"}


class TestNoise:
    SPEEDS = (Speed(samples_per_second=40.0, batch=8), Speed(samples_per_second=10.0, batch=8))

    def test_quiet_machine_gives_no_warning(self):
        assert warnings_of(0.04, self.SPEEDS, self.SPEEDS) == []
        assert "passed" in describe([])

    def test_unknown_load_gives_no_warning(self):
        assert warnings_of(None, self.SPEEDS, self.SPEEDS) == []

    def test_other_processes_are_reported_with_the_limit(self):
        (warning,) = warnings_of(0.12, self.SPEEDS, self.SPEEDS)
        assert "12 %" in warning
        assert "limit: 5 %" in warning

    def test_changed_speed_names_the_rank(self):
        slower = (self.SPEEDS[0], Speed(samples_per_second=8.0, batch=8))
        (warning,) = warnings_of(0.0, self.SPEEDS, slower)
        assert "rank 1" in warning
        assert "-20 %" in warning
        assert "limit: 10 %" in warning

    @pytest.mark.parametrize(("high", "warnings"), [(1.05, 0), (1.3, 1)])
    def test_uncertain_prediction_is_reported(self, high, warnings):
        prediction = {"step_seconds": 1.0, "step_interval": [2.0 - high, high]}
        plan = dataclasses.replace(Plan.even(2, 8, 2, 0), prediction=prediction)
        found = warnings_of(0.0, self.SPEEDS, self.SPEEDS, plan)
        assert len(found) == warnings
        assert all("0.7 to 1.3 s, noisy" in warning for warning in found)

    def test_summary_and_json_contain_the_warnings(self, capsys):
        shown = io.StringIO()
        demo.summarize(Console(file=shown), synthetic_record(), ["other processes"])
        assert "too noisy" in shown.getvalue()
        assert json.loads(capsys.readouterr().out)["noise"] == ["other processes"]


@pytest.mark.parametrize("is_terminal", [False, True])
def test_progress_is_a_bar_in_a_terminal_and_ten_lines_elsewhere(is_terminal):
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=is_terminal, width=100)
    with demo.progress(console, 20) as advance:
        for step in range(20):
            advance(f"loss {step}")
    if is_terminal:
        assert "20/20" in shown.getvalue()
        assert "━" in shown.getvalue()
        assert "0:00:00" in shown.getvalue(), "the remaining time"
    else:
        lines = [f"{step}/20 loss {step - 1}" for step in range(2, 21, 2)]
        assert shown.getvalue().splitlines() == lines


class TestOptions:
    def test_stage_is_automatic_by_default(self):
        assert demo.parse_options([]).stage == "auto"
        assert demo.parse_options(["--stage", "2"]).stage == 2

    def test_quick_runs_fewer_steps(self):
        quick, full = demo.parse_options(["--quick"]), demo.parse_options([])
        assert quick.steps < full.steps
        assert quick.profile_seconds < full.profile_seconds
        assert demo.parse_options(["--quick", "--steps", "5"]).steps == 5

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--steps", "2"], "at least 3"),
            (["--steps", "0"], "at least 3"),
            (["--stage", "4"], "invalid choice"),
        ],
    )
    def test_invalid_option_is_reported(self, arguments, message, capsys):
        with pytest.raises(SystemExit):
            demo.parse_options(arguments)
        assert message in capsys.readouterr().err
