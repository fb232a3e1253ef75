"""Rows, verdicts, tables, figures and pages of a comparison, from constructed values."""

from __future__ import annotations

import importlib
import io
import json
import math
import re
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import provenance
from head_to_head import targets
from head_to_head.engine import Configuration
from head_to_head.outcome import Calibration, Comparison, Outcome
from head_to_head.page import write_page
from head_to_head.row import Row, read_rows, rows_of
from head_to_head.table import HEADINGS, cells_of, ideals_of, reasons_of, summary_of, table_of
from head_to_head.targets import ClusterVerdict, verdicts
from head_to_head.task import Task
from results import markdown
from rows import write_rows

from poplar import Plan
from poplar.system.trace import Span

BATCH = 96
"""As many samples per rank as thresholds require."""
TASK = Task(size="tiny", context=16, global_batch=BATCH)
CALIBRATION = Calibration(
    speeds=(160.0, 80.0, 80.0), batches=(64, 64, 64), rank_flops=(2e9, 1e9, 1e9), spins=(2, 1, 1)
)
EVEN, EXACT = "32,32,32", "48,24,24"


def outcome(
    name: str,
    provider: str,
    seconds: float,
    *,
    stage: int = 0,
    policy: str = "even",
    ranks: tuple[int, ...] = (0, 1, 2),
    over_gloo: bool = False,
    **more: object,
) -> Outcome:
    """Ten steps around a median; the last rank does not wait."""
    plan = Plan.manual(EXACT if policy == "exact" else EVEN, stage=stage)
    if len(ranks) < 3:
        plan = Plan.even(len(ranks), BATCH, BATCH // len(ranks), stage)
    configuration = Configuration(
        name=name,
        provider=provider,
        stage=stage,
        policy=policy,
        plan=plan,
        ranks=ranks,
        over_gloo=over_gloo,
    )
    spans = (
        Span("pass", "a pass", 0.0, 0.8 * seconds),
        Span("wait", "the reduction", 0.8 * seconds, 0.9 * seconds),
        Span("optimizer", "the update", 0.9 * seconds, seconds),
    )
    values: dict[str, object] = {
        "step_seconds": tuple(seconds * (1 + 0.01 * offset) for offset in range(-5, 6)),
        "losses": (3.0, 2.5, 2.25),
        "spans": (spans,) * len(ranks),
        "peak_memory": tuple((30 + rank) << 20 for rank in ranks),
    }
    return Outcome(configuration=configuration, **{**values, **more})


def of_poplar(stage: int, even: float, exact: float, on_gloo: float) -> list[Outcome]:
    names = (f"poplar even, stage {stage}", f"poplar exact, stage {stage}", f"on gloo, {stage}")
    return [
        outcome(names[0], "poplar", even, stage=stage, predicted_seconds=1.1 * even),
        outcome(names[1], "poplar", exact, stage=stage, policy="exact"),
        outcome(names[2], "poplar", on_gloo, stage=stage, over_gloo=True),
    ]


def absent(name: str, provider: str, stage: int, reason: str) -> Outcome:
    """An outcome that failed in the middle of the run."""
    began = outcome(name, provider, 0.01, stage=stage)
    return replace(began, losses=(9.0, 9.0), spans=(), absent=reason)


REASON = "ImportError: not installed\n`make peers` does that | " + "a long story " * 20
OUTCOMES = (
    *of_poplar(0, even=0.40, exact=0.30, on_gloo=0.44),
    *of_poplar(3, even=0.50, exact=0.32, on_gloo=0.60),
    outcome("DDP", "ddp", 0.45),
    outcome("DeepSpeed ZeRO-0", "deepspeed", 0.55),
    outcome("FSDP2", "fsdp2", 0.66, stage=3),
    absent("DeepSpeed ZeRO-3", "deepspeed", 3, REASON),
    outcome("strong ranks only", "poplar", 0.20, ranks=(0,)),
    outcome("weak ranks only", "poplar", 0.60, ranks=(1, 2)),
)


def comparison(**changes: object) -> Comparison:
    """Three ranks with speeds 2:1:1; the ideal over even is 4/3."""
    values: dict[str, object] = {
        "began": "2026-01-01T00:00:00",
        "cluster": "2:1:1",
        "described": "ranks on cores 0, 1, 1 (shared)",
        "unequal": True,
        "task": TASK,
        "flops_per_sample": 1e7,
        "parameters": 1_234_567,
        "before": CALIBRATION,
        "after": CALIBRATION,
        "ideal_over_even": {0: 4 / 3, 3: 4 / 3},
        "outcomes": OUTCOMES,
        "notes": ("a <note> of this run",),
    }
    return Comparison(**{**values, **changes})


def row(name: str, **changes: object) -> Row:
    return next(row for row in rows_of(comparison(**changes)) if row.configuration == name)


def but(name: str, **changes: object) -> tuple[Outcome, ...]:
    """All outcomes, with changes to one of them."""
    return tuple(replace(o, **changes) if o.configuration.name == name else o for o in OUTCOMES)


@pytest.fixture(autouse=True)
def peers_by_hand(monkeypatch):
    """Peers that must have a result for a verdict on the best peer."""
    monkeypatch.setattr(
        targets,
        "PEERS",
        {"DDP": ("ddp", 0), "DeepSpeed ZeRO-0": ("deepspeed", 0), "FSDP2": ("fsdp2", 3)},
    )


# Rows


def test_speed_is_global_batch_over_step_time():
    ddp = row("DDP")
    seconds = sorted(OUTCOMES[6].step_seconds)
    assert ddp.steps == 11
    assert (ddp.p50_seconds, ddp.p50_speed) == pytest.approx((0.45, BATCH / 0.45))
    assert seconds[0] < ddp.p20_seconds < ddp.p50_seconds < ddp.p80_seconds < seconds[-1]
    assert ddp.p20_speed < ddp.p50_speed < ddp.p80_speed
    assert ddp.mean_speed == pytest.approx(BATCH * 11 / sum(seconds))
    assert ddp.of_sum_of_speeds == pytest.approx(BATCH / 0.45 / 320)
    assert ddp.mfu == pytest.approx(BATCH / 0.45 * 1e7 / 4e9)
    assert ddp.prediction_error is None
    assert row("poplar even, stage 0").prediction_error == pytest.approx(0.1)


def test_percentiles_of_a_single_step():
    only = row("DDP", outcomes=but("DDP", step_seconds=(0.5,)))
    assert only.p20_seconds == only.p50_seconds == only.p80_seconds == 0.5


def test_balance_transport_and_engine_multiply_to_the_ratio_at_each_stage():
    for stage, peer, subset_configurations in (
        (0, "DDP", (0.40 / 0.30, 0.44 / 0.40, 0.45 / 0.44)),
        (3, "FSDP2", (0.50 / 0.32, 0.60 / 0.50, 0.66 / 0.60)),
    ):
        exact = row(f"poplar exact, stage {stage}")
        assert exact.best_peer_of_stage == peer
        assert (exact.balance, exact.transport, exact.engine) == pytest.approx(
            subset_configurations
        )
        assert math.prod(subset_configurations) == pytest.approx(exact.over_best_peer_of_stage[0])
        assert exact.balance_of_ideal == pytest.approx(subset_configurations[0] / (4 / 3))


@pytest.mark.parametrize("name", ["DDP", "on gloo, 0", "strong ranks only", "DeepSpeed ZeRO-3"])
def test_only_plans_of_all_ranks_on_their_own_transport_have_a_balance(name):
    other = row(name)
    assert (other.balance, other.transport, other.engine) == (None, None, None)
    assert not other.is_plan or other.absent


def test_faster_subsets_of_ranks_do_not_count():
    exact = row("poplar exact, stage 0")
    assert row("strong ranks only").p50_speed > exact.p50_speed
    assert set(exact.over) == {"DDP", "DeepSpeed ZeRO-0", "FSDP2"}
    assert all("ranks only" not in verdict.what for verdict in verdicts(rows_of(comparison())))
    best = {v.what: v.value for v in verdicts(rows_of(comparison()))}[
        "fastest plan over the best peer"
    ]
    assert best == pytest.approx(0.45 / 0.30)


def test_balance_needs_the_even_plan():
    left = tuple(o for o in OUTCOMES if o.configuration.name != "poplar even, stage 0")
    exact = row("poplar exact, stage 0", outcomes=left)
    assert (exact.balance, exact.transport, exact.balance_of_ideal) == (None, None, None)
    assert exact.engine == pytest.approx(0.45 / 0.44)


def test_interval_is_deterministic_and_contains_the_ratio():
    backwards = tuple(reversed(OUTCOMES[6].step_seconds))
    apart = but("DDP", step_seconds=backwards)
    first, again = (
        row("poplar exact, stage 0", outcomes=apart).over_best_peer_of_stage for _ in range(2)
    )
    assert first == again
    assert first[1] < first[0] < first[2]
    together = row("poplar exact, stage 0").over_best_peer_of_stage
    assert together == pytest.approx((1.5, 1.5, 1.5)), (
        "rounds that are slow for both change nothing"
    )
    alone = row("DeepSpeed ZeRO-0", outcomes=but("DDP", absent="gone"))
    assert alone.over_best_peer_of_stage[0] == 1.0


def test_steps_before_a_failure_are_not_a_result():
    gone = row("DeepSpeed ZeRO-3")
    assert gone.absent == REASON
    assert (gone.steps, gone.over, gone.peak_memory) == (0, {}, [])
    assert {gone.mean_speed, gone.p20_speed, gone.p50_speed, gone.last_loss} == {None}
    assert gone.loss_difference is None


def test_reference_losses_are_those_of_poplar_even_at_stage_0():
    first = replace(OUTCOMES[6], losses=(3.0, 2.6))
    apart = (first, *OUTCOMES[:6], *OUTCOMES[7:])
    assert row("DDP", outcomes=apart).loss_difference == pytest.approx(0.1)
    assert row("poplar exact, stage 3", outcomes=apart).loss_difference == 0.0


def test_reference_losses_without_poplar_even_are_those_of_the_first_result():
    first = (OUTCOMES[9], *OUTCOMES[6:9])
    assert row("FSDP2", outcomes=first).loss_difference == 0.0


def test_nan_loss_is_an_infinite_difference():
    wild = row("DDP", outcomes=but("DDP", losses=(3.5, math.nan, 2.25)))
    assert wild.loss_difference == math.inf


def test_losses_are_compared_over_twenty_steps():
    same = (1.0,) * 20
    outcomes = tuple(replace(o, losses=(*same, 5.0)) for o in OUTCOMES)
    late = tuple(
        replace(o, losses=(*same, 1.0)) if o.configuration.name == "DDP" else o for o in outcomes
    )
    assert row("DDP", outcomes=late).loss_difference == 0.0


def test_rows_are_read_back_and_other_lines_are_ignored(tmp_path):
    path = tmp_path / "folder" / "rows.jsonl"
    rows = rows_of(comparison())
    write_rows(path, rows)
    with path.open("a") as file:
        file.write('\n{"benchmark": "prediction", "seconds": 1.0}\n')
    assert read_rows(path) == rows
    names = {field.name for field in fields(Row)}
    assert json.loads(path.read_text().splitlines()[0]).keys() == names


def test_row_of_another_version_is_an_error_with_its_line(tmp_path):
    path = tmp_path / "rows.jsonl"
    write_rows(path, rows_of(comparison())[:2])
    first, second = path.read_text().splitlines()
    values = json.loads(second)
    del values["over_gloo"]
    path.write_text(f"{first}\n{json.dumps(values)}\n")
    with pytest.raises(ValueError, match=r"line 2: over_gloo .* another version"):
        read_rows(path)


def test_rows_without_git_have_an_unknown_commit(monkeypatch):
    def missing(*_: object, **__: object) -> None:
        raise FileNotFoundError("git")

    monkeypatch.setattr(subprocess, "run", missing)
    provenance.commit.cache_clear()
    try:
        assert row("DDP").commit == "unknown"
    finally:
        provenance.commit.cache_clear()


# Verdicts


def found(rows: list[Row]) -> dict[tuple[str, int | None, str], ClusterVerdict]:
    return {(v.cluster, v.stage, v.what): v for v in verdicts(rows)}


@pytest.mark.parametrize(
    ("cluster", "stage", "what", "wanted"),
    [
        ("2:1:1", 0, "of the sum of speeds", 0.95),
        ("2:1:1", 3, "of the sum of speeds", 0.90),
        ("8:1", 3, "of the sum of speeds", 0.85),
        ("4:2:1", 0, "balance over its ideal", 0.95),
        ("2:1:1", 0, "over DeepSpeed", 1.15),
        ("2:1:1", 3, "over DeepSpeed", 1.4),
        ("8:1", 0, "over DeepSpeed", 3.9),
        ("capped", 0, "fastest plan over the best peer", 1.12),
        ("1:1:1", None, "largest loss difference", 1e-4),
    ],
)
def test_thresholds_are_those_of_the_cluster_and_stage(cluster, stage, what, wanted):
    assert found(rows_of(comparison(cluster=cluster)))[cluster, stage, what].wanted == wanted


def test_clusters_have_no_thresholds_of_other_clusters():
    whats = {what for _, _, what in found(rows_of(comparison(cluster="slow-link")))}
    assert "of the sum of speeds" not in whats
    assert "over DeepSpeed" not in whats
    assert ("8:1", 0, "of the sum of speeds") not in found(rows_of(comparison(cluster="8:1")))


def test_equal_ranks_have_thresholds_for_the_even_plan():
    outcomes = but("poplar even, stage 3", peak_memory=(20 << 20, 40 << 20, 20 << 20))
    seen = found(rows_of(comparison(cluster="1:1:1", unequal=False, outcomes=outcomes)))
    assert seen["1:1:1", 0, "even over DDP"].value == pytest.approx(0.45 / 0.40)
    assert seen["1:1:1", 0, "peak memory over the peers' least"].met
    more = seen["1:1:1", 3, "peak memory over the peers' least"]
    assert more.value == pytest.approx(40 / 32)
    assert not more.met


def test_missing_measurement_misses_its_threshold():
    seen = found(rows_of(comparison()))
    missing = seen["2:1:1", 3, "over DeepSpeed"]
    assert not missing.met
    assert str(missing) == "not measured (>= 1.4, short)"
    failed = found(
        rows_of(comparison(outcomes=but("poplar exact, stage 3", absent="out of memory")))
    )
    assert failed["2:1:1", 3, "balance over its ideal"].value is None
    many = found(rows_of(comparison(outcomes=but("DDP", absent="gone"))))
    assert many["2:1:1", 0, "fastest plan over the best peer"].value is None
    without_peers = found(rows_of(comparison(unequal=False, outcomes=OUTCOMES[:3])))
    assert without_peers["2:1:1", 0, "even over the best peer"].value is None


@pytest.mark.parametrize(
    ("value", "wanted", "at_most", "texts"),
    [
        (0.9496, 0.95, False, "0.9496 (>= 0.95, short)"),
        (0.9501, 0.95, False, "0.9501 (>= 0.95)"),
        (1.396, 1.4, False, "1.396 (>= 1.4, short)"),
        (1.04, 1.0, True, "1.04 (<= 1, short)"),
        (1.04e-4, 1e-4, True, "0.000104 (<= 0.0001, short)"),
        (3e-7, 1e-4, True, "3e-07 (<= 0.0001)"),
        (1.0004, 1.0, True, "1.0004 (<= 1, short)"),
        (math.inf, 1e-4, True, "inf (<= 0.0001, short)"),
    ],
)
def test_verdict_shows_result_and_threshold(value, wanted, at_most, texts):
    verdict = ClusterVerdict(
        cluster="x", stage=0, what="y", value=value, wanted=wanted, at_most=at_most
    )
    assert str(verdict) == texts


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"model": "encoder"}, ("llama tiny, 96 samples of 16", "encoder tiny, 96 samples of 16")),
        ({"context": 8}, ("llama tiny, 96 samples of 16", "llama tiny, 96 samples of 8")),
        ({"global_batch": 9}, ("llama tiny, 96 samples of 16", "llama tiny, 9 samples of 16")),
    ],
)
def test_rows_that_are_not_comparable_are_separate(change, names, tmp_path):
    other = comparison(task=replace(TASK, **change), outcomes=but("DDP", losses=(9.0,)))
    rows = [*rows_of(comparison()), *rows_of(other)]
    seen = found(rows)
    one, two = (f"2:1:1, {name} bytes" for name in names)
    assert seen[one, None, "largest loss difference"].met
    assert not seen[two, None, "largest loss difference"].met
    write_rows(tmp_path / "rows.jsonl", rows)
    assert read_rows(tmp_path / "rows.jsonl") == rows
    text = "\n".join(markdown(rows))
    assert f"## {one}" in text
    assert f"## {two}" in text


def test_small_batches_have_no_threshold_on_the_sum_of_speeds():
    few = comparison(task=replace(TASK, global_batch=BATCH - 3))
    assert ("2:1:1", 0, "of the sum of speeds") not in found(rows_of(few))


# Tables


def printed(table: object, width: int) -> str:
    console = Console(file=io.StringIO(), width=width, soft_wrap=True, highlight=False)
    console.print(table)
    return console.file.getvalue()


@pytest.mark.parametrize("width", [60, 200])
def test_table_is_not_cut_in_narrow_terminals(width):
    rows = rows_of(comparison())
    lines = printed(table_of(rows), width).splitlines()
    assert not any("…" in line for line in lines)
    assert all(heading in lines[2] for heading in HEADINGS)
    for one in rows:
        assert any(one.configuration in line for line in lines)
    ddp = next(line for line in lines if " DDP " in line)
    for cell in ("213.3", "66.7 %", "1.000", "32"):
        assert cell in ddp


def test_reason_of_an_absence_is_below_the_table():
    rows = rows_of(comparison())
    present = [one for one in rows if not one.absent]
    lines = printed(table_of(rows), 200).splitlines()
    (open_cluster,) = [number for number, line in enumerate(lines) if "absent: see below" in line]
    assert any(
        "DeepSpeed ZeRO-3 is absent: ImportError" in line for line in lines[open_cluster + 1 :]
    )
    rule = next(line for line in lines if "───" in line)
    assert (
        len(rule)
        < len(next(r for r in printed(table_of(present), 200).splitlines() if "───" in r)) + 20
    )
    assert list(reasons_of(rows)) == [f"DeepSpeed ZeRO-3 is absent: {' '.join(REASON.split())}"]


def test_cells_are_sorted_by_stage_with_subsets_last():
    cells = list(cells_of(rows_of(comparison())))
    assert {len(line) for line in cells} == {len(HEADINGS)}
    assert not any("\n" in cell for line in cells for cell in line)
    assert [line[0] for line in cells] == ["0"] * 5 + ["3"] * 5 + ["0"] * 2
    assert [line[1] for line in cells[-2:]] == ["strong ranks only", "weak ranks only"]


def test_ideal_is_shown_by_stage_where_stages_differ():
    assert ideals_of(rows_of(comparison())) == "ideal over even 1.333"
    apart = rows_of(comparison(ideal_over_even={0: 1.3, 3: 1.2}))
    assert ideals_of(apart) == "ideal over even 1.300 at stage 0, 1.200 at stage 3"


def test_summary_marks_missed_thresholds():
    text = printed(summary_of(rows_of(comparison())), 60)
    assert re.search(r"balance over its ideal +1 +>= 0\.95 +\(✓\)", text)
    assert re.search(r"over DeepSpeed +not measured +>= 1\.4 +\(short\)", text)
    assert "in brackets: too few steps" in text
    enough = [replace(row, steps=50) for row in rows_of(comparison())]
    text = printed(summary_of(enough), 60)
    assert re.search(r"balance over its ideal +1 +>= 0\.95 +✓", text)
    assert "in brackets" not in text


# Pictures and the page


def test_every_configuration_has_a_bar_or_is_marked_absent():
    plots = importlib.import_module("head_to_head.plots")
    figure = plots.draw_speeds(comparison())
    names = [label.get_text() for axes in figure.axes for label in axes.get_yticklabels()]
    assert sorted(names) == sorted(o.configuration.name for o in OUTCOMES)
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert titles == ["stage 0", "stage 3", "parts of the cluster"]
    texts = [text.get_text() for axes in figure.axes for text in axes.texts]
    assert texts.count("absent") == 1
    assert {"213.3", "67 %"} <= {*texts}
    for axes in figure.axes:
        assert any(320.0 in line.get_xdata() for line in axes.get_lines())


def test_timelines_show_the_engines_of_a_stage_without_subsets():
    plots = importlib.import_module("head_to_head.plots")
    figure = plots.draw_timelines(comparison(), 0)
    titles = [axes.get_title(loc="left").partition(":")[0] for axes in figure.axes]
    assert titles == [*(o.configuration.name for o in OUTCOMES[:3]), "DDP", "DeepSpeed ZeRO-0"]
    limits = {axes.get_xlim() for axes in figure.axes}
    assert len(limits) == 1
    assert limits.pop()[1] < 0.6
    untraced = tuple(replace(o, spans=()) for o in OUTCOMES)
    assert plots.draw_timelines(comparison(outcomes=untraced), 0) is None
    assert plots.draw_timelines(comparison(), 2) is None


def test_peers_without_recorded_waits_have_no_busy_fraction():
    plots = importlib.import_module("head_to_head.plots")
    silent = tuple(
        tuple(span for span in rank if span.kind != "wait") for rank in OUTCOMES[6].spans
    )
    figure = plots.draw_timelines(comparison(outcomes=but("DDP", spans=silent)), 0)
    texts = [[text.get_text() for text in axes.texts] for axes in figure.axes]
    assert texts[3] == ["with waits"] * 3
    assert all("busy" in text for text in texts[4])


def test_page_is_self_contained_and_complete(tmp_path):
    path = tmp_path / "folder" / "page.html"
    write_page([comparison(), comparison(cluster="8:1")], path)
    page = path.read_text()
    for one in OUTCOMES:
        assert one.configuration.name in page
    for texts in (row("DDP").versions, row("DDP").commit, row("DDP").day, "a &lt;note&gt;"):
        assert texts in page
    assert "is absent: ImportError" in page
    assert "only one of the three that says anything about GPUs" in page
    assert not re.search(r"<script|<link|<img|src=|@import|url\((?!#)", page)
    assert not re.search(r'href="(?!#)', page)
    ids = re.findall(r'\bid="([^"]*)"', page)
    assert len(ids) == len({*ids})


def test_page_without_matplotlib_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "head_to_head.plots", None)
    with pytest.raises(ImportError, match=r"pip install 'poplar-zero\[report\]'"):
        write_page([comparison()], tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()


def test_results_page_has_provenance_and_missed_thresholds():
    rows = rows_of(comparison())
    text = "\n".join(markdown(rows))
    for texts in (rows[0].device, rows[0].versions, rows[0].commit, rows[0].day):
        assert texts in text
    short = text[text.index("## Missed thresholds") : text.index("## Thresholds")]
    assert "2:1:1, stage 3: over DeepSpeed not measured (>= 1.4, short)" in short
    assert all(one.configuration in text for one in rows)
