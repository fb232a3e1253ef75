"""`benchmarks/gpu_step.py` on a CPU: the same code with a tiny model and one rank on gloo."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torchrun
from subset import choose

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import gpu_step
import watchdog
from rows import Row, read_rows
from single_gpu import step_measure
from single_gpu.cases import CASES
from single_gpu.engines import ON_HOST, OURS, PEER, PLAIN, WAYS
from single_gpu.step_report import targets

CPU = torch.device("cpu")


def test_all_ways_are_measured_and_agree(tmp_path):
    output = tmp_path / "rows.jsonl"
    ways = choose(quick=(PLAIN, PEER, "poplar 3", ON_HOST), full=WAYS)
    options = ["--device", "cpu", "--sizes", "tiny x2", "--modes", "eager", "--rounds", "1"]
    options += ["--ways", *ways]
    done = torchrun.run([gpu_step.__file__, *options, "--output", output])
    assert done.returncode == 0, done.stdout + done.stderr
    met, count = len({*ways} & {*OURS}), len(ways)
    summary = f"{met} of {met} targets met\n{count} of {count} ways measured\n"
    assert done.stdout.endswith(summary)
    rows = read_rows(output, gpu_step.BENCHMARK)
    assert [row["way"] for row in rows] == list(ways)
    for row in rows:
        assert row["loss"] == pytest.approx(rows[0]["loss"], rel=1e-3)
        assert row["steps"] == step_measure.TURN_STEPS
        case = [row[name] for name in ("size", "compiled", "batch", "passes")]
        assert case == ["tiny x2", False, 4, 2]
        assert row["ms"] > 0


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
    assert printed.endswith("0 of 8 targets met\n[stacks]\n0 of 64 ways measured\n")
    rows = read_rows(output, gpu_step.BENCHMARK)
    assert [row["way"] for row in rows] == list(WAYS)
    assert {(row["size"], row["failed"]) for row in rows} == {("350M", "the rank ended with: hang")}


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
    assert (failed["failed"], failed["ms"], failed["steps"]) == (
        "RuntimeError: out of luck",
        None,
        0,
    )
    assert plain["rounds"] == other["rounds"] == 2
    assert other["over_plain"] is not None
    assert other["over_fsdp2"] is None
    (target,) = targets([plain, failed, other])
    assert (target.what, target.met) == ("loss off plain's", True)


class Nothing:
    """An engine that does not train."""

    def step(self, batch):
        return torch.ones(())

    def close(self):
        pass


def row(way: str, **values: object) -> Row:
    case = {"size": "1.1B", "compiled": False, "way": way, "run": 1}
    figures = {"ms": 100.0, "over_plain": None, "over_fsdp2": None, "loss": None}
    return Row.of("gpu_step", case, figures | values)


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
    found = targets([row(PLAIN, loss=3.0), row("poplar 3", **values)])
    assert {target.what: target.met for target in found}[what] is met
