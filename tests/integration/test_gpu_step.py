"""`benchmarks/gpu_step.py` on a CPU: the same code with a tiny model and one rank on gloo."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torchrun

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import gpu_step
import watchdog
from single_gpu import step_measure
from single_gpu.cases import CASES
from single_gpu.clock import StepClock
from single_gpu.engines import OURS, PEER, PLAIN, WAYS
from single_gpu.step_row import StepRow, load_rows
from single_gpu.step_targets import verdicts

CPU = torch.device("cpu")
BENCHMARKS = Path(gpu_step.__file__).parent


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return torchrun.run([gpu_step.__file__, *arguments])


def test_all_ways_are_measured_and_agree(tmp_path):
    output = tmp_path / "rows.jsonl"
    done = run(
        *("--device", "cpu", "--sizes", "tiny x2", "--modes", "eager", "--rounds", "1"),
        *("--output", str(output)),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("4 of 4 targets met\n7 of 7 ways measured\n")
    rows = load_rows(output)
    assert [row.way for row in rows] == list(WAYS)
    for row in rows:
        assert row.loss == pytest.approx(rows[0].loss, rel=1e-3)
        assert row.steps == step_measure.TURN_STEPS
        assert (row.case, row.compiled, row.batch, row.passes) == ("tiny x2", False, 4, 2)
        assert row.commit
        assert row.ms > 0


def test_hang_is_reported_and_is_a_row_of_each_way(monkeypatch, capsys, tmp_path):
    ended = watchdog.Ended(verdict="hang", seconds=1.0, exit_codes=(None,), report="[stacks]")

    def watch(script, arguments, environments, folder, *, seconds):
        assert seconds == 5.0 + gpu_step.LATE_SECONDS
        folder.mkdir()
        (folder / "rank-0.log").write_text("350M, eager: 1 round\n")
        return ended

    monkeypatch.setattr(gpu_step, "watch", watch)
    output = tmp_path / "rows.jsonl"
    options = ["--device", "cpu", "--seconds", "5", "--output", str(output)]
    monkeypatch.setattr(sys, "argv", ["gpu_step.py", *options])
    with pytest.raises(SystemExit, match="1"):
        gpu_step.main()
    printed = capsys.readouterr().out
    assert printed.startswith("350M, eager: 1 round\n")
    assert printed.endswith("0 of 8 targets met\n[stacks]\n0 of 56 ways measured\n")
    rows = load_rows(output)
    assert [row.way for row in rows] == list(WAYS)
    assert {(row.case, row.failed) for row in rows} == {("350M", "the rank ended with: hang")}


def test_compiled_blocks_run_compiled():
    compiled = []

    def compiler(graph, inputs):
        compiled.append(graph)
        return graph.forward

    case = CASES["tiny"]
    model = step_measure.compiled(case.new_model(CPU), compiler)
    model(case.new_batch(2, CPU)["input"])
    assert len(compiled) == 1, "one graph for all blocks"


def test_way_that_fails_is_a_row_and_the_others_are_measured(monkeypatch):
    def make(way, model, plan):
        if way == PEER:
            raise RuntimeError("out of luck\nand more")
        return Nothing()

    monkeypatch.setattr(step_measure, "make_engine", make)
    plain, failed, other = step_measure.measure(
        CASES["tiny"],
        (PLAIN, PEER, "poplar 1"),
        CPU,
        compiler="",
        rounds=2,
        seconds=60.0,
        predict=False,
        log=print,
    )
    assert (failed.failed, failed.ms, failed.steps) == ("RuntimeError: out of luck", None, 0)
    assert plain.rounds == other.rounds == 2
    assert other.over_plain is not None
    assert other.over_fsdp2 is None
    (verdict,) = verdicts([plain, failed, other])
    assert (verdict.what, verdict.met) == ("loss off plain's", True)


class Nothing:
    """An engine that does not train."""

    def step(self, batch):
        return torch.ones(())

    def close(self):
        pass


def test_rounds_stop_when_the_time_is_up(monkeypatch):
    monkeypatch.setattr(step_measure, "make_engine", lambda way, model, plan: Nothing())
    (row,) = step_measure.measure(
        CASES["tiny"],
        (PLAIN,),
        CPU,
        compiler="",
        rounds=1000,
        seconds=0.0,
        predict=False,
        log=print,
    )
    assert row.rounds == 1


def test_clock_gives_the_seconds_between_marks():
    clock = StepClock(CPU)
    assert clock.seconds() == []
    for _ in range(4):
        clock.mark()
    assert len(clock.seconds()) == 3
    assert min(clock.seconds()) >= 0.0


# Rows and targets


def row(way: str, **values) -> StepRow:
    return StepRow(
        **{"case": "1.1B", "compiled": False, "way": way, "ms": 100.0, "GiB": 1.0} | values
    )


@pytest.mark.parametrize(
    ("values", "what", "met"),
    [
        ({"over_plain": 1.02}, "time over plain", True),
        ({"over_plain": 1.03}, "time over plain", False),
        ({"over_plain": None, "failed": "so"}, "time over plain", False),
        ({"over_fsdp2": 1.15}, "speed over FSDP2", True),
        ({"over_fsdp2": 1.14}, "speed over FSDP2", False),
        ({"GiB_reserved": 10.4, "GiB_predicted": 10.0}, "reserved off the plan", True),
        ({"GiB_reserved": 9.4, "GiB_predicted": 10.0}, "reserved off the plan", False),
        ({"GiB_reserved": 9.4}, "reserved off the plan", False),
        ({"loss": 3.0}, "loss off plain's", True),
        ({"loss": 3.1}, "loss off plain's", False),
    ],
)
def test_targets(values, what, met):
    judged = verdicts([row(PLAIN, loss=3.0), row("poplar 3", **values)])
    assert {verdict.what: verdict.met for verdict in judged}[what] is met


def test_targets_are_for_the_large_sizes():
    assert not list(verdicts([row("poplar 0", case="85M", over_plain=2.0)]))


def test_rows_measured_before_the_script_are_read(tmp_path):
    lines = [
        {"case": "350M", "compiled": True, "way": way, "ms": ms, "GiB": 1.0, "run": run}
        for run, own in ((1, (100.0, 150.0, 102.0)), (2, (50.0, 60.0, 40.0)))
        for way, ms in zip((PLAIN, PEER, "poplar 2"), own, strict=True)
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    ours = [row for row in load_rows(file) if row.way in OURS]
    assert [row.over_plain for row in ours] == [1.02, 0.8]
    assert [row.over_fsdp2 for row in ours] == pytest.approx([150 / 102, 1.5])


def test_saved_rows_are_shown(monkeypatch, capsys):
    saved = BENCHMARKS / "results" / "h100" / "overhead.jsonl"
    monkeypatch.setattr(sys, "argv", ["gpu_step.py", "--show", str(saved)])
    gpu_step.main()
    printed = capsys.readouterr().out
    assert "350M" in printed
    assert "targets met" in printed
