"""Reports: records survive JSON, activities of ranks, labels, and a self-contained page."""

from __future__ import annotations

import builtins
import dataclasses
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from records import synthetic_record

from poplar.monitoring import Run, RunRecord, Span, write_report
from poplar.monitoring.activity import (
    COMMUNICATION,
    COMPUTE,
    OPTIMIZER,
    WAITING,
    Stretch,
    seconds_by_activity,
    stretches,
)
from poplar.monitoring.pictures import draw_steps
from poplar.monitoring.report import prediction_of, reasons
from poplar.planner.explain import explain
from poplar.planner.search import search
from poplar.values.plan import Plan

VOID_ELEMENTS = {"meta", "link", "img", "input", "br"}
"""HTML elements without an end tag."""


@pytest.fixture(scope="module")
def record() -> RunRecord:
    return synthetic_record()


@pytest.fixture(scope="module")
def folder(record, tmp_path_factory):
    """A folder with a report."""
    folder = tmp_path_factory.mktemp("report")
    write_report(record, folder / "deep" / "report.html")
    return folder


@pytest.fixture(scope="module")
def text(folder):
    """The report's page."""
    return (folder / "deep" / "report.html").read_text(encoding="utf-8")


class TestRecords:
    def test_a_record_survives_json(self, record, tmp_path):
        record.to_json(tmp_path / "run.json")
        assert RunRecord.from_json(tmp_path / "run.json") == record

    @pytest.mark.parametrize(
        ("change", "complaint"),
        [
            (lambda c: c.update(runs=[]), "at least one run"),
            (lambda c: c["runs"][0].update(step_seconds=[]), "at least one step"),
            (lambda c: c["runs"][0]["spans"][0][0].update(kind="sleep"), "one of pass, wait"),
            (lambda c: c["profile"]["devices"].pop(), "ranks"),
        ],
    )
    def test_a_damaged_record_says_what_is_wrong(self, record, tmp_path, change, complaint):
        content = json.loads(json.dumps(record.to_dict()))
        change(content)
        path = tmp_path / "run.json"
        path.write_text(json.dumps(content))
        with pytest.raises(ValueError, match=complaint) as caught:
            RunRecord.from_json(path)
        assert str(path) in str(caught.value)

    def test_the_first_step_may_be_untimed(self):
        run = Run(name="a", plan=Plan.even(1, 4, 4, 0), step_seconds=(2.0, 4.0), losses=(3, 2, 1))
        assert run.measured_step_seconds == 3.0
        assert run.samples_per_second == pytest.approx(4 / 3)
        assert run.prediction_error is None


class TestActivity:
    def test_waiting_ends_when_the_last_rank_arrives(self):
        fast = [Span("pass", "", 10.0, 12.0), Span("wait", "unit a", 12.0, 15.5)]
        slow = [Span("pass", "", 10.0, 15.0), Span("wait", "unit a", 15.0, 15.5)]
        assert stretches([fast, slow]) == [
            [
                Stretch(COMPUTE, 0.0, 2.0),
                Stretch(WAITING, 2.0, 5.0),
                Stretch(COMMUNICATION, 5.0, 5.5),
            ],
            [Stretch(COMPUTE, 0.0, 5.0), Stretch(COMMUNICATION, 5.0, 5.5)],
        ]

    def test_a_wait_inside_a_pass_is_not_compute(self):
        fast = [Span("pass", "", 0.0, 4.0), Span("wait", "a", 1.0, 3.0)]
        slow = [Span("pass", "", 0.0, 4.0), Span("wait", "a", 2.0, 3.0)]
        first, second = (seconds_by_activity(rank) for rank in stretches([fast, slow]))
        assert first == {COMPUTE: 2.0, OPTIMIZER: 0.0, COMMUNICATION: 1.0, WAITING: 1.0}
        assert second == {COMPUTE: 3.0, OPTIMIZER: 0.0, COMMUNICATION: 1.0, WAITING: 0.0}

    def test_the_second_wait_with_one_name_is_another_collective(self):
        fast = [Span("wait", "a", 0.0, 2.0), Span("wait", "a", 3.0, 6.0)]
        slow = [Span("wait", "a", 1.0, 2.0), Span("wait", "a", 5.0, 6.0)]
        assert [part.activity for part in stretches([fast, slow])[0]] == [
            WAITING,
            COMMUNICATION,
            WAITING,
            COMMUNICATION,
        ]

    def test_a_rank_without_waits_does_not_delay_others(self):
        (only, none) = stretches([[Span("wait", "a", 0.0, 1.0)], []])
        assert only == [Stretch(COMMUNICATION, 0.0, 1.0)]
        assert none == []

    def test_a_wait_inside_the_optimizer_is_a_wait(self):
        rank = [Span("optimizer", "", 0.0, 3.0), Span("wait", "norm", 1.0, 2.0)]
        assert [part.activity for part in stretches([rank])[0]] == [
            OPTIMIZER,
            COMMUNICATION,
            OPTIMIZER,
        ]

    @settings(max_examples=60, deadline=None)
    @given(
        st.lists(
            st.lists(
                st.tuples(
                    st.sampled_from(["pass", "wait", "optimizer"]),
                    st.integers(0, 30),
                    st.integers(0, 10),
                ),
                max_size=8,
            ),
            min_size=1,
            max_size=3,
        )
    )
    def test_every_moment_of_a_span_counts_once(self, spans):
        ranks = [[Span(kind, "x", float(a), float(a + b)) for kind, a, b in own] for own in spans]
        for own, parts in zip(ranks, stretches(ranks), strict=True):
            covered = {t for span in own for t in range(int(span.start), int(span.stop))}
            assert sum(part.seconds for part in parts) == pytest.approx(len(covered))
            assert all(a.stop <= b.start for a, b in pairwise(parts))


class Page(HTMLParser):
    """The unclosed tags of a page, what it loads, its ids and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []
        self.ids: list[str] = []
        self.text: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        if tag not in VOID_ELEMENTS:
            self.open.append(tag)
        self._look(attrs)

    def handle_startendtag(self, tag, attrs):
        self._look(attrs)

    def _look(self, attrs):
        for name, value in attrs:
            if name == "id":
                self.ids.append(value)
            if name in ("src", "href", "xlink:href") and not value.startswith("#"):
                self.loads.append(value)

    def handle_endtag(self, tag):
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


class TestPages:
    def test_the_page_is_well_formed_and_self_contained(self, text):
        page = Page(text)
        assert not page.open
        assert not page.loads
        assert "<script" not in text
        assert "@import" not in text
        assert not re.findall(r"url\((?!#)", text)

    def test_ids_of_pictures_are_distinct_and_defined(self, text):
        ids = Page(text).ids
        used = re.findall(r'(?:href="#|url\(#)([^")]+)', text)
        assert set(used) <= set(ids)
        assert text.count("<svg") == 4
        for name in ("curves", "timeline", "losses", "predictions"):
            assert any(identifier.startswith(f"{name}-") for identifier in ids)

    def test_every_color_of_a_picture_is_a_css_variable(self, text):
        style, body = text.split("</style>", 1)
        assert set(re.findall("#[0-9a-f]{6}", body)) == set()
        light, dark = style.split("@media screen")
        for name in set(re.findall(r"var\((--[a-z0-9-]+)\)", text)):
            assert f"{name}:" in light
            assert f"{name}:" in dark or name == "--alarm"

    def test_the_page_contains_plan_reasons_and_notes(self, text, record):
        content = " ".join(Page(text).text)
        assert record.title in content
        assert "Why this plan" in content
        assert "36 13 12 11" in content or str(record.chosen.plan.samples(0)) in content
        assert "rank 3 shared its core" in content
        assert "2.13.0" in content

    def test_the_same_record_gives_the_same_page(self, record, text, tmp_path):
        write_report(record, tmp_path / "again.html")
        assert (tmp_path / "again.html").read_text(encoding="utf-8") == text

    def test_text_from_outside_is_escaped(self, record, tmp_path):
        mean = dataclasses.replace(record, title="<script>alert(1)</script> & more")
        write_report(mean, tmp_path / "report.html")
        text = (tmp_path / "report.html").read_text(encoding="utf-8")
        assert "<script" not in text
        assert "&lt;script&gt;alert(1)&lt;/script&gt; &amp; more" in text

    def test_the_callers_matplotlib_settings_are_unchanged(self, record, tmp_path):
        import matplotlib

        with matplotlib.rc_context({"font.size": 33.0, "svg.fonttype": "none"}):
            write_report(record, tmp_path / "report.html")
            assert matplotlib.rcParams["font.size"] == 33.0
            assert matplotlib.rcParams["svg.fonttype"] == "none"


class TestTimelines:
    def test_the_time_axis_includes_every_run_and_prediction(self, record):
        late = dataclasses.replace(record.runs[0], predicted_step_seconds=5.0)
        figure = draw_steps([late, record.chosen])
        assert figure is not None
        assert [axes.get_xlim()[0] for axes in figure.axes] == [0.0, 0.0]
        assert all(axes.get_xlim()[1] > 5.0 for axes in figure.axes)


def why(profile, plan) -> list[str]:
    return list(reasons(profile, plan, prediction_of(profile, plan)))


class TestReasons:
    def test_the_stored_prediction_of_the_chosen_plan_is_used(self, record):
        chosen = search(record.profile, global_batch=72, stages=(0,))
        tried = {**(chosen.prediction or {}), "step_seconds": 9.0}
        sentences = why(record.profile, dataclasses.replace(chosen, prediction=tried))
        assert "predicted to take 9 s" in sentences[0]

    def test_a_manual_plan_has_no_optimality_gap(self, record):
        plan = Plan.even(record.profile.world_size, 72, 4, 0)
        prediction = prediction_of(record.profile, plan)
        assert prediction is not None
        assert prediction.optimality_gap is None
        assert not any("is faster by more than" in one for one in why(record.profile, plan))

    def test_sentences_name_what_would_help(self, record):
        chosen = search(record.profile, global_batch=72, stages=(2,))
        sentences = why(record.profile, chosen)
        explanation = explain(record.profile, chosen)
        assert any("Over an even plan" in sentence for sentence in sentences)
        assert f"What would help: {explanation.changes[0]}." in sentences


class TestUnusualRuns:
    def test_one_rank_and_one_run_without_trace_losses_or_prediction(self, tmp_path):
        record = synthetic_record(speeds=(20.0,))
        run = Run(name="only", plan=record.chosen.plan, step_seconds=(1.0,))
        bare = dataclasses.replace(record, sum_of_speeds=None, runs=(run,))
        write_report(bare, tmp_path / "report.html")
        text = (tmp_path / "report.html").read_text(encoding="utf-8")
        assert not Page(text).open
        assert text.count("<figure>") == 2, "curves and predictions"

    def test_ranks_without_samples_and_losses_that_are_not_finite(self, record, tmp_path):
        plan = Plan(
            stage=2,
            global_batch=24,
            micro_batches=((4, 8), (0, 0), (6, 6), (0, 0)),
            shares=(0.5, 0.25, 0.25, 0.0),
        )
        losses = (2.0, float("nan"), float("inf"), 1.0)
        run = Run(name="planned", plan=plan, step_seconds=(1.0, 1.1, 1.0), losses=losses)
        write_report(dataclasses.replace(record, runs=(run,)), tmp_path / "report.html")
        assert not Page((tmp_path / "report.html").read_text(encoding="utf-8")).open

    def test_more_ranks_than_colors_are_drawn_by_device_name(self, tmp_path):
        names = ["NVIDIA A100-SXM4-80GB"] * 6 + ["Tesla V100-SXM2-16GB"] * 6
        speeds = [30.0 + r for r in range(6)] + [12.0 + r / 2 for r in range(6)]
        write_report(synthetic_record(speeds, names=names, stage=1), tmp_path / "report.html")

    def test_a_plan_beyond_the_profile_is_shown_without_a_prediction(self, record, tmp_path):
        plan = Plan.even(4, 400, 100, 0)
        run = Run(name="manual", plan=plan, step_seconds=(9.0,))
        write_report(dataclasses.replace(record, runs=(run,)), tmp_path / "report.html")
        content = (tmp_path / "report.html").read_text(encoding="utf-8")
        assert "goes beyond what was measured" in content


@pytest.mark.parametrize("package", ["matplotlib", "jinja2"])
def test_without_a_package_the_error_says_what_to_install(package, record, tmp_path, monkeypatch):
    real = builtins.__import__

    def missing(name, *args, **kwargs):
        if name.partition(".")[0] == package:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(name, *args, **kwargs)

    for module in [name for name in sys.modules if name.startswith("poplar.monitoring.")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ImportError, match=rf"need {package}, .*pip install jinja2 matplotlib"):
        write_report(record, tmp_path / "report.html")
    assert not list(tmp_path.iterdir())


def test_records_need_neither_torch_nor_matplotlib():
    program = (
        "import sys; sys.modules.update(dict.fromkeys(('torch', 'matplotlib', 'jinja2')))\n"
        "from poplar.monitoring import RunRecord"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
