"""`benchmarks/paper.py`: its cases, rows marked as simulated, and findings."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torchrun

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import paper

CASE = paper.Case(
    cluster="C",
    strong="A800-80",
    weak="V100S-PCIe-32",
    strong_count=1,
    weak_count=1,
    links="100g",
    model="bert-large",
    stage=1,
)


@pytest.fixture(scope="module")
def rows():
    return [row for stage in (1, 3) for row in paper.rows_of(replace(CASE, stage=stage))]


def test_cases_are_the_product_of_the_options():
    everything = list(paper.cases(paper.CLUSTERS, paper.MODELS, paper.STAGES, list(paper.LINKS)))
    assert len(everything) == len(set(everything)) == 3 * 4 * 3 * 4 * 3
    for case in everything:
        assert case.global_batch * case.job.sequence == paper.TOKENS


def test_links_are_between_devices_of_one_host_or_between_hosts():
    hosts = {
        links: {device.host for device in replace(CASE, links=links).simulated().middle.devices}
        for links in paper.LINKS
    }
    assert len(hosts["pcie"]) == 1
    assert len(hosts["100g"]) == len(hosts["10g"]) == 2
    seconds = [
        replace(CASE, links=links).simulated().middle.network.reduce_scatter_seconds
        for links in ("100g", "10g")
    ]
    assert seconds[0] < seconds[1] / 5


def test_one_kind_of_device_alone():
    alone = replace(CASE, strong_count=3).simulated(weak=False)
    assert [device.name for device in alone.middle.devices] == ["A800-80"] * 3


def test_rows_are_marked_as_simulated_and_have_an_interval(rows):
    assert {row.policy for row in rows} == {"weak", "strong", *paper.POLICIES}
    for row in rows:
        assert row.simulated is True
        assert row.tflops_low < row.tflops < row.tflops_high
        assert row.why_not == ""
        assert json.loads(json.dumps(asdict(row)))["policy"] == row.policy


def test_the_exact_policy_is_the_fastest(rows):
    for stage in (1, 3):
        by_policy = {row.policy: row.tflops for row in rows if row.stage == stage}
        assert max(by_policy.values()) <= by_policy["exact"] * 1.01
        assert by_policy["even"] < by_policy["exact"]


def test_speedups_compare_the_same_stage(rows):
    for row in rows:
        if row.over_even is not None:
            even = next(r for r in rows if (r.policy, r.stage) == ("even", row.stage))
            assert row.over_even == pytest.approx(row.tflops / even.tflops)
            assert row.over_even_low <= row.over_even <= row.over_even_high


def test_a_case_that_does_not_fit_has_a_reason():
    case = replace(CASE, strong="V100-SXM2-16", weak="T4", model="llama-1.1b", stage=0)
    for row in paper.rows_of(case):
        assert row.tflops is None
        assert row.over_even is None
        assert "rank" in row.why_not


def test_findings_name_the_reconstruction_and_the_calibration(rows):
    lines = list(paper.findings(rows))
    text = "\n".join(lines)
    assert lines[0].startswith("simulated")
    assert "Calibration" in text
    assert "17 % (worst)" in text
    assert "our reconstruction" in text
    assert "faster than Poplar" not in text
    assert "the effect of links on gains was not evaluated" in text
    assert "3.92x, is not reached" in text


def test_findings_report_the_effect_of_links(rows):
    slower = [
        replace(row, links="10g", over_even=row.over_even and row.over_even / 2) for row in rows
    ]
    text = "\n".join(paper.findings([*rows, *slower]))
    assert "stage 1: the exact policy's gain over even changes by more than 10 %" in text
    assert "in 1 of 1 cases, at most by 100 %" in text


def test_runs_as_a_script(tmp_path):
    output = tmp_path / "rows.jsonl"
    command = [paper.__file__, "--quick", "--stages", "1"]
    more = ["--clusters", "A", "--models", "bert-large", "--output", str(output)]
    done = torchrun.run([*command, *more], timeout=120)
    assert done.returncode == 0, done.stderr
    assert "simulated" in done.stdout
    written = [json.loads(line) for line in output.read_text().splitlines()]
    assert len(written) == 6
    assert all(row["simulated"] for row in written)
