"""The pieces of the demo that need no ranks: neighbours of a plan, the summary, the options."""

from __future__ import annotations

import dataclasses
import io
import json
import sys
from pathlib import Path

import pytest
from records import SPEEDS, cluster, synthetic_record
from rich.console import Console

from poplar import predict, search
from poplar.report import RunRecord

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import demo
from neighbours import neighbours, own_part

PROFILE = cluster(SPEEDS, ["a device"] * len(SPEEDS))


@pytest.fixture(params=[0, 1, 2, 3])
def chosen(request):
    return search(PROFILE, global_batch=72, stages=(request.param,))


class TestNeighbours:
    def test_they_are_legal_and_all_different(self, chosen):
        near = neighbours(chosen, PROFILE, 20)
        assert len(near) == 20
        assert len({chosen, *near}) == 21
        for plan in near:
            assert (plan.stage, plan.global_batch) == (chosen.stage, 72)
            assert predict(PROFILE, plan).step_seconds > 0

    def test_they_differ_in_samples_in_passes_and_where_sharded_in_shares(self, chosen):
        near = neighbours(chosen, PROFILE, 20)
        samples = [[plan.samples(rank) for rank in range(4)] for plan in (chosen, *near)]
        assert any(one != samples[0] for one in samples)
        assert any(
            one == samples[0] and plan.micro_batches != chosen.micro_batches
            for one, plan in zip(samples[1:], near, strict=True)
        )
        assert any(plan.shares != chosen.shares for plan in near) == (chosen.stage > 0)

    def test_every_rank_finds_the_same(self, chosen):
        assert neighbours(chosen, PROFILE, 9) == neighbours(chosen, PROFILE, 9)

    def test_none_needs_more_than_there_is(self, chosen):
        longest = max(max(sizes) for sizes in chosen.micro_batches)
        tight = dataclasses.replace(
            PROFILE,
            devices=tuple(
                dataclasses.replace(
                    device, points=tuple(p for p in device.points if p.batch <= longest)
                )
                for device in PROFILE.devices
            ),
        )
        for plan in neighbours(chosen, tight, 20):
            for device, sizes in zip(tight.devices, plan.micro_batches, strict=True):
                assert max(sizes) <= device.max_batch

    def test_fewer_come_back_where_there_are_no_more(self):
        profile = cluster((10.0,), ["a device"])
        plan = search(profile, global_batch=2, stages=(0,))
        assert len(neighbours(plan, profile, 20)) < 20


class TestOwnPart:
    def test_the_parts_of_all_ranks_are_one_global_batch(self, chosen):
        parts = [own_part(chosen, rank, list) for rank in range(4)]
        assert [index for part in parts for index in part] == list(range(72))

    def test_a_rank_without_samples_gives_one_that_is_dropped(self):
        plan = demo.Plan(stage=0, global_batch=4, micro_batches=((4,), ()), shares=(0.5, 0.5))
        assert own_part(plan, 1, list) == [4]


class TestSummary:
    def test_the_last_line_is_for_programs(self, capsys):
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
        best = min(near.step_seconds for near in record.neighbours[1:])
        assert outcome["best_neighbour_ratio"] == pytest.approx(
            best / record.neighbours[0].step_seconds, abs=1e-4
        )
        assert "…" not in shown.getvalue(), "the table must fit 80 columns"

    def test_without_neighbours_nothing_is_said_of_them(self, capsys):
        record = dataclasses.replace(synthetic_record(), neighbours=None)
        demo.summarize(Console(file=io.StringIO()), record)
        assert "best_neighbour_ratio" not in json.loads(capsys.readouterr().out)

    def test_two_loss_curves_are_an_error(self, capsys):
        record = synthetic_record()
        other = dataclasses.replace(
            record.chosen, losses=tuple(v + 1 for v in record.chosen.losses)
        )
        record = dataclasses.replace(record, runs=(record.runs[0], other))
        with pytest.raises(RuntimeError, match="loss curves differ by 1"):
            demo.summarize(Console(file=io.StringIO()), record)
        assert json.loads(capsys.readouterr().out)["max_loss_difference"] == pytest.approx(1.0)

    def test_everything_is_kept_in_one_folder(self, tmp_path):
        record = synthetic_record()
        demo.keep(Console(file=io.StringIO()), record, tmp_path / "demo")
        assert RunRecord.from_json(tmp_path / "demo" / "run.json") == record
        kept = {path.name for path in (tmp_path / "demo").iterdir()}
        assert kept >= {"run.json", "report.html", "curves.png", "timeline.png", "losses.png"}


class TestOptions:
    def test_the_stage_is_found_unless_given(self):
        assert demo.parse_options([]).stage == "auto"
        assert demo.parse_options(["--stage", "2"]).stage == 2

    def test_quick_takes_less(self):
        quick, full = demo.parse_options(["--quick"]), demo.parse_options([])
        assert quick.steps < full.steps
        assert quick.profile_seconds < full.profile_seconds
        assert demo.parse_options(["--quick", "--steps", "5"]).steps == 5

    @pytest.mark.parametrize(
        ("given", "complaint"),
        [
            (["--steps", "2"], "at least 3"),
            (["--steps", "0"], "at least 3"),
            (["--neighbours", "-1"], "0 or more"),
            (["--stage", "4"], "invalid choice"),
        ],
    )
    def test_what_makes_no_sense_is_said(self, given, complaint, capsys):
        with pytest.raises(SystemExit):
            demo.parse_options(given)
        assert complaint in capsys.readouterr().err
