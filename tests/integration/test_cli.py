"""The command line: text and JSON output, one line per error, exit codes."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import typing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torchrun
import typer
from clusters import cluster_of, device
from records import synthetic_record
from typer.testing import CliRunner

import poplar
from poplar.cli import checkpoint
from poplar.cli.app import app
from poplar.cli.options import of_rank
from poplar.cli.output import command_output
from poplar.cli.workload import Workload, load
from poplar.planner.search import CHOICES, POLICIES, plan_or_error
from poplar.programmes.graph.placement import Sharded
from poplar.programmes.graph.programme import Programme
from poplar.values.plan import Plan, UnitPlan
from poplar.values.profile import ClusterProfile, ModelProfile, NetworkProfile

ROOT = Path(poplar.__file__).parent.parent
GIB = 1 << 30

TRAIN = """
import torch
from torch import nn

def loss_fn(model, batch):
    return (model(batch["x"]) - batch["y"]).square().mean()

def workload():
    print("building the model")
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    return model, loss_fn, {"x": torch.randn(4, 8), "y": torch.randn(4, 1)}

def coupled():
    model, _, batch = workload()
    return model, lambda model, batch: loss_fn(model, batch) + model(batch["x"]).std(), batch

def broken():
    raise RuntimeError("no data here\\nsecond line")

def nothing():
    return None

SIZE = 3
"""


@pytest.fixture
def train(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(TRAIN)
    return path


def cluster(**more):
    one = {"memory": 8 * GIB, "latency": 0.01, "batches": (1, 4, 16), "sample_bytes": 1 << 20}
    one |= {"optimizer_seconds": 0.001, "peak_flops": 3e14, **more}
    return cluster_of(
        device(name="NVIDIA A100", **one),
        device(name="Tesla T4", sample=0.02, **one),
        units=(1000, 2000),
        communication=0.002,
        gather=0.001,
        notes=("rank 1 was throttled",),
    )


@pytest.fixture
def measured(tmp_path):
    path = tmp_path / "cluster.json"
    cluster().to_json(path)
    return path


def run(*arguments):
    """One command in this process."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def launch(*arguments, ranks=1):
    """One command in processes of its own, as a user starts it."""
    return torchrun.run(["-m", "poplar", *arguments], ranks=ranks if ranks > 1 else 0, folder=ROOT)


def test_doctor_prints_text_or_json():
    shown = run("doctor", "--device", "cpu")
    assert shown.exit_code == 0, shown.output
    assert "torch" in shown.stdout
    assert "can train" in shown.stdout
    printed = run("doctor", "--device", "cpu", "--json")
    document = json.loads(printed.stdout)
    assert document["ok"]
    assert document["ranks"][0]["versions"]["torch"] == torch.__version__


@pytest.mark.parametrize("options", [(), ("--json",)], ids=["text", "json"])
@pytest.mark.parametrize(
    ("stream", "code", "errors"),
    [("1>&-", 0, ""), ("1>/dev/full", 1, r"poplar: .* No space left .*: 'standard output'\n")],
    ids=["closed", "full"],
)
def test_output_that_cannot_be_printed(measured, tmp_path, options, stream, code, errors):
    path = tmp_path / "plan.json"
    words = ["-m", "poplar", "plan", measured, "--global-batch", 24, "-o", path, *options]
    command = shlex.join(map(str, [sys.executable, *words]))
    ended = subprocess.run(["sh", "-c", f"{command} {stream}"], capture_output=True, text=True)
    assert ended.returncode == code
    assert re.fullmatch(errors, ended.stderr)
    assert Plan.from_json(path).global_batch == 24


def test_characters_that_the_encoding_lacks_are_escaped(measured):
    words = [sys.executable, "-m", "poplar", "plan", measured, "--global-batch", "24", "--explain"]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    ended = subprocess.run(words, capture_output=True, text=True, env=environment)
    assert ended.returncode == 0, ended.stderr
    assert r"error \xb15 %" in ended.stdout


def test_a_full_stderr_does_not_replace_the_exit_status_of_a_watched_job():
    words = [sys.executable, "-m", "poplar", "watch", "--", "sh", "-c", "exit 3"]
    ended = subprocess.run(["sh", "-c", f"{shlex.join(words)} 2>/dev/full"])
    assert ended.returncode == 3
    assert run("watch", "--every", "inf", "--", "true").exit_code == 2


def test_error_of_a_full_disk_names_the_file(measured):
    shown = run("plan", measured, "--global-batch", 24, "-o", "/dev/full")
    assert (shown.exit_code, shown.stdout) == (1, "")
    assert "No space left on device: '/dev/full'" in shown.stderr


def test_doctor_exits_with_1_if_there_is_a_problem(monkeypatch):
    monkeypatch.setattr("poplar.doctor.facts._transport", lambda info: "none: not built")
    shown = run("doctor", "--device", "cpu")
    assert shown.exit_code == 1
    assert "problem: rank 0: no transport" in shown.stdout
    printed = run("doctor", "--device", "cpu", "--json")
    assert printed.exit_code == 1
    assert json.loads(printed.stdout)["findings"][0]["kind"] == "problem"


def test_plan_prints_a_table_and_writes_the_plan(measured, tmp_path):
    path = tmp_path / "plan.json"
    shown = run("plan", measured, "--global-batch", 24, "--stage", "1", "-o", path)
    assert shown.exit_code == 0, shown.output
    chosen = Plan.from_json(path)
    assert (chosen.stage, chosen.global_batch) == (1, 24)
    assert chosen.samples(0) > chosen.samples(1), "the first device is twice as fast"
    assert "stage 1" in shown.stdout
    assert "note: rank 1 was throttled" in shown.stdout
    assert f"written to {path}" in shown.stdout
    printed = run("plan", measured, "--global-batch", 24, "--stage", "1", "--json")
    assert Plan.from_dict(json.loads(printed.stdout)) == chosen


def test_plan_compares_stages_and_policies(measured):
    shown = run("plan", measured, "--global-batch", 24, "--compare")
    assert shown.exit_code == 0, shown.output
    for name in (*POLICIES, "stage 0", "stage 3"):
        assert name in shown.stdout
    document = json.loads(run("plan", measured, "--global-batch", 24, "--compare", "--json").stdout)
    assert set(document["policies"]) == set(POLICIES)
    assert len(document["stages"]) == 4
    assert document["plan"] == document["policies"]["exact"]


def test_plans_are_compared_with_plans_of_the_same_choices(measured, monkeypatch):
    given = {name: "never" if "never" in words else "int8" for name, words in CHOICES.items()}
    del given["policy"]
    asked = []

    def recorded(profile, **request):
        asked.append({name: request.get(name) for name in given})
        return plan_or_error(profile, **request)

    monkeypatch.setattr("poplar.cli.plan.plan_or_error", recorded)
    options = [f"--{name.replace('_', '-')}={word}" for name, word in given.items()]
    shown = run("plan", measured, "--global-batch", 24, "--compare", "--explain", *options)
    assert shown.exit_code == 0, shown.output
    assert asked == [given] * len(POLICIES)


def test_plan_explains_bottleneck_changes_and_contributions(measured):
    shown = run("plan", measured, "--global-batch", 24, "--explain")
    assert shown.exit_code == 0, shown.output
    for text in ("bound by rank", "error ±5 %: worth it", "what would help", "without"):
        assert text in shown.stdout
    assert "rank 0's device (NVIDIA A100)" in shown.stdout
    printed = run("plan", measured, "--global-batch", 24, "--explain", "--json")
    document = json.loads(printed.stdout)
    explanation = document["explanation"]
    assert explanation["step_seconds"] == document["plan"]["prediction"]["step_seconds"]
    assert explanation["error"] == pytest.approx(0.05)
    assert {change["what"] for change in explanation["changes"]} >= {"device"}


WIDE = """
import torch
from torch import nn

from poplar.cli.workload import Workload

def workload():
    model = nn.Sequential(nn.Linear(64, 4096), nn.ReLU(), nn.Linear(4096, 64))
    return model, lambda model, x: (model(x) - x).square().mean(), torch.randn(2, 64)

def with_dropout():
    model, loss_fn, batch = workload()
    return nn.Sequential(model, nn.Dropout(0.5)), loss_fn, batch

def with_sums():
    return Workload(*workload(), loss="sum")

def with_muon():
    return Workload(*workload(), optimizer_class=torch.optim.Muon)
"""


@pytest.fixture
def wide(tmp_path):
    path = tmp_path / "wide.py"
    path.write_text(WIDE)
    return path


@pytest.fixture
def slow_network(tmp_path):
    """A profile of the wide model: its gradients take much longer than its activations."""
    path = tmp_path / "slow.json"
    seconds = 4 * 2**19 * 1e-7 / 2
    network = NetworkProfile(
        reduce_scatter_seconds=seconds,
        all_gather_seconds=seconds,
        send_seconds_per_byte=(1e-7, 1e-7),
        receive_seconds_per_byte=(1e-7, 1e-7),
    )
    model = ModelProfile(unit_numels=(2**18 + 4096, 2**18 + 64))
    replace(cluster(), model=model, network=network).to_json(path)
    return path


def test_plan_divides_the_tensors_of_a_workload(slow_network, wide):
    arguments = ("--global-batch", 8, "--programme", f"{wide}:workload")
    shown = run("plan", slow_network, *arguments)
    assert shown.exit_code == 0, shown.output
    assert "times as fast as data parallelism" in shown.stdout
    assert "sharded on dimension 0" in shown.stdout
    document = json.loads(run("plan", slow_network, *arguments, "--json").stdout)
    programme = Programme.from_dict(document["programme"]["programme"])
    assert programme.placements["p_model_0_weight"] == Sharded(0)
    assert Plan.from_dict(document["plan"]).global_batch == 8


@pytest.mark.parametrize(
    ("workload", "dtype", "reason"),
    [
        ("with_dropout", "torch.float32", "aten.dropout.default draws random numbers"),
        ("with_sums", "as the model is", "loss='sum', but programmes need"),
        ("with_muon", "torch.float32", "the granularity 'parameter'"),
        ("workload", "torch.bfloat16", "compute_dtype is torch.bfloat16, but"),
    ],
)
def test_plan_says_why_there_is_no_programme(slow_network, wide, tmp_path, workload, dtype, reason):
    """The plan is written nevertheless."""
    profile = ClusterProfile.from_json(slow_network)
    replace(profile, identity={"compute_dtype": dtype}).to_json(slow_network)
    path = tmp_path / "plan.json"
    arguments = ("--global-batch", 8, "--programme", f"{wide}:{workload}", "--output", path)
    shown = run("plan", slow_network, *arguments, "--json")
    assert shown.exit_code == 0, shown.output
    document = json.loads(shown.stdout)["programme"]
    assert document["programme"] is None
    assert document["reason"].startswith("No programme: ")
    assert reason in document["reason"]
    assert Plan.from_json(path).global_batch == 8


def test_plan_refuses_a_workload_that_was_not_profiled(measured, wide):
    failed = run("plan", measured, "--global-batch", 8, "--programme", f"{wide}:workload")
    assert failed.exit_code == 1
    assert "a model with 3000 trained elements, but that of" in failed.stderr


def test_a_policy_without_a_plan_is_listed_with_its_reason(tmp_path):
    path = tmp_path / "cluster.json"
    cluster(peak_flops=None).to_json(path)
    shown = run("plan", path, "--global-batch", 24, "--compare")
    assert shown.exit_code == 0, shown.output
    assert "no peak_flops" in shown.stdout


def test_a_plan_that_does_not_fit_is_a_one_line_error(tmp_path):
    path = tmp_path / "cluster.json"
    cluster(memory=1 << 10).to_json(path)
    shown = run("plan", path, "--global-batch", 24)
    assert shown.exit_code == 1
    assert shown.stdout == ""
    assert shown.stderr.startswith("poplar: ")
    assert "rank" in shown.stderr
    assert shown.stderr.count("\n") == 1
    printed = run("plan", path, "--global-batch", 24, "--json")
    assert printed.exit_code == 1
    assert "rank" in json.loads(printed.stdout)["error"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--global-batch", "0"],
        ["--global-batch", "8", "--stage", "4"],
        ["--global-batch", "8", "--stage", "fast"],
        ["--global-batch", "8", "--policy", "best"],
    ],
)
def test_invalid_arguments_exit_with_2(measured, arguments):
    shown = run("plan", measured, *arguments)
    assert shown.exit_code == 2
    assert shown.stdout == ""


def test_an_unknown_device_type_exits_with_2():
    shown = run("doctor", "--device", "abacus")
    assert shown.exit_code == 2
    assert "auto, cuda, cpu" in shown.stderr


def written_files():
    """How each command checks each of the files that it writes."""
    for command in (*app.registered_commands, *checkpoint.commands.registered_commands):
        hints = typing.get_type_hints(command.callback, include_extras=True)
        for name, hint in hints.items():
            kind, *given = typing.get_args(hint) if hasattr(hint, "__metadata__") else (None,)
            is_path = kind is Path or Path in typing.get_args(kind)
            if is_path and not given[0].exists and name not in ("records", "folder"):
                label = f"{command.callback.__name__} {name}"
                yield pytest.param(given[0].callback, id=label)


@pytest.mark.parametrize("check", list(written_files()))
def test_a_file_that_cannot_be_written_is_refused_before_the_work(check, tmp_path):
    (tmp_path / "file").touch()
    for path in (tmp_path / "file" / "output", tmp_path):
        with pytest.raises(typer.BadParameter, match="cannot write"):
            check(path)
    path = tmp_path / "new" / "folder" / "output"
    assert check(path) == path
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "folder", "new"]


def test_memory_limits_are_one_for_all_or_one_per_rank():
    assert [of_rank("5GiB,6mb", rank, 2) for rank in range(2)] == ["5GiB", "6mb"]
    assert of_rank("5GiB", 1, 2) == "5GiB"
    assert of_rank(None, 1, 2) is None
    with pytest.raises(ValueError, match="2 memory limits for 3 ranks"):
        of_rank("5,6", 0, 3)


def test_an_unexpected_error_is_one_line_unless_debug(capsys):
    for debug in (False, True):
        with pytest.raises(typer.Exit), command_output(as_json=False, debug=debug):
            raise KeyError("surprise\nmore")
        printed = capsys.readouterr().err
        assert "poplar: KeyError: " in printed
        assert ("Traceback" in printed) == debug
        assert ("--debug" in printed) != debug


def test_json_has_null_for_nan_and_infinity(capsys):
    with command_output(as_json=True, debug=False) as output:
        print("chatter")
        output.document = {"error": float("nan"), "by_rank": (1.0, float("inf"))}
    printed = capsys.readouterr()
    assert json.loads(printed.out) == {"error": None, "by_rank": [1.0, None]}
    assert "chatter" in printed.err


def test_only_rank_0_prints_results(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    with command_output(as_json=False, debug=False) as output:
        output.show("a result")
    with pytest.raises(typer.Exit), command_output(as_json=False, debug=False):
        raise ValueError("an error")
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == "poplar: rank 1: an error\n"


def test_a_workload_is_loaded_from_a_file(train):
    work = load(f"{train}:workload")
    assert isinstance(work, Workload)
    assert work.optimizer_class is torch.optim.AdamW
    again = load(f"{train}:workload")
    torch.testing.assert_close(again.model[0].weight, work.model[0].weight)
    batch = work.batch_of(10)
    assert batch["x"].shape == (10, 8)
    torch.testing.assert_close(batch["x"][8:], work.example_batch["x"][:2])


def test_the_workload_of_the_examples_loads():
    work = load(f"{ROOT}/examples/workload.py:tiny")
    assert work.loss_fn(work.model, work.batch_of(2)).requires_grad


@pytest.mark.parametrize(
    ("address", "error", "pattern"),
    [
        ("train.py", ValueError, "expected a file, a colon and a function"),
        ("{}/none.py:workload", ValueError, "does not exist"),
        ("{}/train.py:SIZE", ValueError, "no function 'SIZE'"),
        ("{}/train.py:nothing", ValueError, "got NoneType"),
        ("{}/train.py:broken", RuntimeError, "no data here"),
    ],
)
def test_a_missing_or_invalid_workload_is_refused(train, address, error, pattern):
    with pytest.raises(error, match=pattern):
        load(address.format(train.parent))


def test_profile_plan_and_verify_on_one_rank(train, tmp_path):
    path, plan = tmp_path / "c.json", tmp_path / "p.json"
    shown = launch(
        *("profile", f"{train}:workload", "-o", path, "--seconds", 0.5, "--max-batch", 4),
        *("--memory-limit", "1GiB", "--stages", "0,3", "--no-cache", "--device", "cpu"),
    )
    assert shown.returncode == 0, shown.stderr
    assert "rank" in shown.stdout
    profile = ClusterProfile.from_json(path)
    (alone,) = profile.devices
    assert alone.max_batch <= 4
    assert profile.observed_stages == (0, 3)
    assert run("plan", path, "--global-batch", 8, "--stage", "3", "-o", plan).exit_code == 0
    printed = launch("verify", f"{train}:workload", "--plan", plan, "--json", "--device", "cpu")
    assert printed.returncode == 0, printed.stderr
    assert json.loads(printed.stdout)["ok"], "and what the workload prints is not on stdout"


def test_verify_on_two_ranks_finds_a_loss_that_couples_samples(train, tmp_path):
    plan = tmp_path / "p.json"
    Plan.manual("4,1", stage=1).to_json(plan)  # both ranks begin with the first of 4 samples
    arguments = ("--plan", plan, "--json", "--device", "cpu")
    printed = launch("verify", f"{train}:coupled", *arguments, ranks=2)
    assert printed.returncode == 1
    assert not json.loads(printed.stdout)["ok"]
    assert "same first sample" not in printed.stderr


TOKENS_IN_16_BITS = """
import torch
from torch import nn
import poplar
from poplar.cli.workload import Workload

def loss_fn(model, batch):
    kept = batch["labels"] >= 0
    return (model(batch["x"]).squeeze(-1) - batch["labels"])[kept].square().mean()

def build():
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))

def made_of(model):
    labels = torch.randint(0, 5, (4, 6))
    labels[0, 1:] = labels[2, 3:] = -100
    batch = {"x": torch.randn(4, 6, 8), "labels": labels}
    options = {"lr": 0.1, "units": [nn.Linear], "compute_dtype": torch.bfloat16}
    weight = poplar.tokens(shift=False)
    return Workload(model, loss_fn, batch, optimizer_arguments=options, weight=weight)

def workload():
    return made_of(build())

def on_meta():
    with poplar.parameters_on_meta():
        return made_of(build())
"""


def test_a_model_on_meta_is_profiled_and_not_verified(tmp_path):
    script, path, plan = tmp_path / "train.py", tmp_path / "c.json", tmp_path / "p.json"
    script.write_text(TOKENS_IN_16_BITS)
    Plan.manual("2", stage=3).to_json(plan)
    shown = launch(
        *("profile", f"{script}:on_meta", "-o", path, "--seconds", 0.5, "--max-batch", 2),
        *("--memory-limit", "1GiB", "--stages", "3", "--no-cache", "--device", "cpu"),
    )
    assert shown.returncode == 0, shown.stderr
    assert ClusterProfile.from_json(path).model.unit_names == ("0", "1")
    printed = launch("verify", f"{script}:on_meta", "--plan", plan, "--device", "cpu")
    assert printed.returncode == 1
    assert "this command needs the whole model on every rank" in printed.stderr


def test_verify_uses_the_weight_units_and_dtypes_of_the_workload(tmp_path):
    script, plan = tmp_path / "train.py", tmp_path / "p.json"
    script.write_text(TOKENS_IN_16_BITS)
    units = (UnitPlan("0", recomputed_on=(0,)), UnitPlan("1"))
    replace(Plan.manual("2", stage=3, passes=2), units=units).to_json(plan)
    arguments = ("--plan", plan, "--json", "--device", "cpu")
    printed = launch("verify", f"{script}:workload", *arguments)
    assert printed.returncode == 0, printed.stderr
    assert json.loads(printed.stdout)["tolerance"] > 1e-3, "that of bfloat16"


def test_a_plan_for_other_ranks_names_the_torchrun_command(train, tmp_path):
    plan = tmp_path / "p.json"
    Plan.manual("3,1", stage=1).to_json(plan)
    printed = run("verify", f"{train}:workload", "--plan", plan, "--device", "cpu")
    assert printed.exit_code == 1
    assert "torchrun --nproc-per-node 2 -m poplar verify" in printed.stderr
    assert "Traceback" not in printed.stderr


def test_a_recorded_run_becomes_a_report(tmp_path):
    record = synthetic_record()
    source, page = tmp_path / "run.json", tmp_path / "out" / "report.html"
    record.to_json(source)
    printed = run("report", source, "-o", page, "--json")
    assert printed.exit_code == 0, printed.output
    assert json.loads(printed.stdout)["report"] == str(page)
    assert record.title in page.read_text()
