"""`poplar simulate`: a plan for described devices, with an interval for every figure."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest
from readme import REPOSITORY
from subset import choose
from typer.testing import CliRunner

from poplar.cli.app import app
from poplar.hardware.cluster_file import ClusterFile
from poplar.hardware.estimate import Interval, estimate, gain, sum_of_speeds
from poplar.hardware.model_shapes import TrainingJob, architecture
from poplar.hardware.simulated_cluster import simulated_cluster
from poplar.planner.prediction import predict
from poplar.planner.search import search
from poplar.simulator.step_simulation import simulate
from poplar.values.plan import Plan
from poplar.values.profile import ClusterProfile

CLUSTER = """
network_gbit_per_s = 100
[[host]]
[[host.device]]
gpu = "A100-SXM-80"
count = 2
[[host]]
[[host.device]]
gpu = "V100-SXM2-16"
count = 2
"""
ALONE = '[[host]]\n[[host.device]]\ngpu = "A100-SXM-40"\n'


@pytest.fixture
def described(tmp_path):
    path = tmp_path / "cluster.toml"
    path.write_text(CLUSTER)
    return path


def run(path, *arguments, model="opt-350m", batch=256):
    command = ["simulate", path, "--model", model, "--global-batch", batch, *arguments]
    return CliRunner().invoke(app, [str(part) for part in command])


def simulated(path, model="opt-350m", **more):
    job = TrainingJob(architecture=architecture(model), **more)
    return simulated_cluster(ClusterFile.read(path), job)


def test_output_is_labelled_simulated_and_lists_roofline_devices(described):
    shown = run(described, model="llama-0.5b")
    assert shown.exit_code == 0, shown.output
    assert "nothing was measured here" in shown.stdout
    for row in ("step", "samples/s", "TFLOP/s", "of the sum of speeds", "over policy even"):
        assert row in shown.stdout


def test_json_has_the_plan_and_every_interval(described):
    document = json.loads(run(described, "--json", "--stage", "1").stdout)
    assert document["simulated"] is True
    plan = Plan.from_dict(document["plan"])
    assert (plan.stage, plan.global_batch, plan.world_size) == (1, 256, 4)
    assert plan.samples(0) > plan.samples(2)
    names = ("step_seconds", "samples_per_second", "tflops", "of_sum_of_speeds")
    for figure in (*(document["estimate"][name] for name in names),):
        assert 0 < figure["low"] <= figure["middle"] <= figure["high"]
        assert figure["low"] < figure["high"], "never a bare figure"
    assert document["gain_over"]["policy even"]["middle"] > 1.2


def test_options_apply_to_the_job_and_the_plan(described):
    options = ("--json", "--sequence", 512, "--checkpointing", "--policy", "even", "--stage", "3")
    document = json.loads(run(described, *options, "--max-micro-batch", 4).stdout)
    assert (document["sequence"], document["checkpointing"]) == (512, True)
    plan = Plan.from_dict(document["plan"])
    assert plan.stage == 3
    assert max(map(max, plan.micro_batches)) <= 4
    assert len(set(map(sum, plan.micro_batches))) == 1
    alone = {"A100-SXM-80 alone", "V100-SXM2-16 alone"}
    assert set(document["gain_over"]) == {"policy flops", *alone}, "not over itself"


def test_poplar_plan_reads_the_written_profile(described, tmp_path):
    path = tmp_path / "middle.json"
    assert run(described, "--write-profile", path).exit_code == 0
    assert ClusterProfile.from_json(path) == simulated(described).middle
    planned = CliRunner().invoke(app, ["plan", str(path), "--global-batch", "256"])
    assert planned.exit_code == 0, planned.output


def test_the_trace_shows_the_plan_on_the_expected_cluster(described, tmp_path):
    path = tmp_path / "step.json"
    shown = run(described, "--stage", "1", "--trace", path)
    assert shown.exit_code == 0, shown.output
    assert f"written to {path}" in shown.stdout
    written = path.read_text()
    clusters = simulated(described)
    step = simulate(clusters.middle, search(clusters.middle, global_batch=256, stages=(1,)))
    step.to_perfetto(path)
    assert path.read_text() == written


def test_a_trace_that_cannot_be_written_is_refused_before_the_simulation(described, tmp_path):
    (tmp_path / "file").touch()
    shown = run(described, "--stage", "1", "--trace", tmp_path / "file" / "step.json")
    assert shown.exit_code == 2
    assert "step.json" in shown.stderr
    assert not shown.stdout


def test_invalid_input_is_a_one_line_error(described, tmp_path):
    unknown = run(described, model="llama-9000b")
    assert unknown.exit_code == 1
    assert "use one of llama-0.5b" in unknown.stderr
    bad = tmp_path / "bad.toml"
    bad.write_text(CLUSTER.replace("count = 2", "count = 0"))
    shown = run(bad, "--json")
    assert shown.exit_code == 1
    assert "bad.toml: host[0].device[0].count" in json.loads(shown.stdout)["error"]


# What the figures are.


def test_an_estimate_covers_every_outlook_around_the_prediction(described):
    clusters = simulated(described, model="llama-0.5b")
    plan = search(clusters.middle, global_batch=256, stages=[1], max_micro_batch=2)
    figures, predicted = estimate(clusters, plan), predict(clusters.middle, plan)
    steps = [predict(cluster, plan).step_seconds for cluster in clusters.outlooks]
    assert figures.step_seconds == Interval(middle=steps[0], low=min(steps), high=max(steps))
    assert figures.may_not_fit == ""
    assert figures.samples_per_second.middle == pytest.approx(predicted.samples_per_second)
    flops = clusters.job.flops_per_sample * figures.samples_per_second.middle
    assert figures.tflops.middle == pytest.approx(flops / 1e12)
    assert [one.middle for one in figures.memory_bytes] == list(predicted.memory_bytes)


def test_a_plan_that_fills_a_device_has_a_warning(described):
    clusters = simulated(described, model="llama-0.5b")
    plan = search(clusters.middle, global_batch=256)
    figures = estimate(clusters, plan)
    assert "needs" in figures.may_not_fit
    assert figures.step_seconds.high > figures.step_seconds.middle


def test_errors_common_to_all_devices_cancel_in_a_gain(described):
    clusters = simulated(described, model="llama-0.5b")
    plan = search(clusters.middle, global_batch=256)
    even = search(clusters.middle, global_batch=256, policy="even")
    together = dataclasses.replace(clusters, tilted=())
    narrow, wide = gain(together, plan, even), gain(clusters, plan, even)
    assert narrow.middle == wide.middle > 1.0
    assert wide.low < narrow.low
    assert gain(clusters, plan, plan) == Interval(middle=1.0, low=1.0, high=1.0)


def test_the_sum_of_speeds_uses_the_best_batch_of_each_rank(described):
    cluster = simulated(described).middle
    fast, slow = cluster.devices[0], cluster.devices[2]
    expected = 2 * 16 / fast.seconds(16) + 2 * 4 / slow.seconds(4)
    assert sum_of_speeds(cluster, [16, 16, 4, 4]) == pytest.approx(expected, rel=0.02)
    assert sum_of_speeds(cluster, [0, -1, 0, 0]) == 0.0


def test_devices_behind_a_slow_network_are_left_out(described):
    over_100g = json.loads(run(described, "--json", "--stage", "3").stdout)["gain_over"]
    assert over_100g["A100-SXM-80 alone"]["middle"] > 1.0
    described.write_text(CLUSTER.replace("gbit_per_s = 100", "gbit_per_s = 1"))
    over_1g = json.loads(run(described, "--json", "--stage", "3").stdout)["gain_over"]
    assert over_1g["A100-SXM-80 alone"]["middle"] == pytest.approx(1.0, rel=0.02)


def test_an_alternative_that_does_not_fit_is_listed(described):
    shown = run(described, "--stage", "0", model="llama-0.5b")
    assert "no plan fits" not in shown.stdout
    shown = run(described, "--stage", "3", "--checkpointing", model="gpt-neo-2.7b", batch=16)
    assert shown.exit_code == 0, shown.output
    assert "over V100-SXM2-16 alone" in shown.stdout
    assert "no plan fits" in shown.stdout


def test_one_device_type_alone_has_the_outlooks_of_the_cluster(described):
    whole = ClusterFile.read(described)
    job = TrainingJob(architecture=architecture("opt-350m"))
    types = whole.device_types
    part = simulated_cluster(whole.only(types[1]), job, vary=types)
    assert [device.name for device in part.middle.devices] == ["V100-SXM2-16"] * 2
    for ours, theirs in zip(part.outlooks, simulated_cluster(whole, job).outlooks, strict=True):
        assert ours.devices == theirs.devices[2:]


def test_a_published_run_is_within_the_interval(tmp_path):
    # TinyLlama: 16 A100-40GB, 2 million tokens a batch, 24,000 tokens/s on each.
    path = tmp_path / "cluster.toml"
    path.write_text(
        "network_gbit_per_s = 200\n[[host]]\ncount = 4\n"
        '[[host.device]]\ngpu = "A100-SXM-40"\ncount = 4\n'
    )
    clusters = simulated(path, model="llama-1.1b")
    even = search(clusters.middle, global_batch=1024, policy="even", max_micro_batch=8)
    tokens = estimate(clusters, even).samples_per_second.scaled(2048 / 16)
    assert tokens.low < 24_000 < tokens.high
    assert tokens.middle == pytest.approx(24_000, rel=0.1)


def test_one_device_reaches_its_own_speed(tmp_path):
    path = tmp_path / "cluster.toml"
    path.write_text(ALONE)
    clusters = simulated(path, model="llama-0.5b")
    figures = estimate(clusters, search(clusters.middle, global_batch=64))
    assert figures.of_sum_of_speeds.middle == pytest.approx(1.0, abs=0.05)


PAGES = sorted((REPOSITORY / "docs").rglob("*.md"))
DOCUMENTED = sorted(
    {
        command
        for page in PAGES
        for command in re.findall(
            r"poplar simulate (docs/assets/clusters/[^`#\n]+)", page.read_text("utf-8")
        )
    }
)


@pytest.mark.parametrize("command", DOCUMENTED)
def test_documented_commands_run(command):
    path, *arguments = command.split()
    quick = choose(quick=["--policy", "even"], full=[])
    shown = CliRunner().invoke(app, ["simulate", str(REPOSITORY / path), *arguments, *quick])
    assert shown.exit_code == 0, shown.output
