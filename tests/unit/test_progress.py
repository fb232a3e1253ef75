"""Progress of a measurement: lines without a terminal, the time that is left on one."""

from __future__ import annotations

import io
import sys

import pytest

from poplar.profiler.progress import show_progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, *, enabled: bool = True, seconds: float
) -> str:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", Terminal())
    with show_progress(enabled, seconds) as report:
        report("the collectives")
    return sys.stderr.getvalue()


def test_a_terminal_shows_the_time_that_is_left_and_what_is_measured(monkeypatch):
    shown = shown_on_a_terminal(monkeypatch, seconds=75.0)
    assert "75 s left, profiling: the collectives" in shown


def test_a_measurement_that_takes_longer_has_no_time_left(monkeypatch):
    shown = shown_on_a_terminal(monkeypatch, seconds=0.0)
    assert "0 s left, profiling: the collectives" in shown


def test_only_the_rank_that_shows_prints(monkeypatch):
    assert shown_on_a_terminal(monkeypatch, enabled=False, seconds=75.0) == ""


def test_without_a_terminal_each_step_is_a_line(capsys):
    with show_progress(True, 75.0) as report:
        report("the collectives")
        report("steps at stage 0")
    assert capsys.readouterr().err == "profiling: the collectives\nprofiling: steps at stage 0\n"
