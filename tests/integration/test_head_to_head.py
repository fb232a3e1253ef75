"""The head-to-head benchmark: tasks, configurations, workers, engines, results, command line."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import train
from head_to_head import calibration, configurations, runner, targets, worker_calls
from head_to_head.clusters import CLUSTERS, Cluster, find_cluster
from head_to_head.engine import Configuration
from head_to_head.ideal import ideals
from head_to_head.notes import notes
from head_to_head.outcome import Calibration, Comparison, Outcome
from head_to_head.page import write_page
from head_to_head.row import read_rows, rows_of
from head_to_head.table import HEADINGS, cells_of, summary_of, table_of
from head_to_head.targets import ClusterVerdict, verdicts
from head_to_head.task import Task
from head_to_head.worker_calls import Turn
from head_to_head.workers import WorkerContext, Workers, WorkersFailed
from results import markdown
from rows import write_rows

from poplar import Plan
from poplar.system.trace import Span

TINY = Task(size="tiny", context=16, global_batch=8, learning_rate=1e-2)
TWO = Cluster(name="two", cores=(0, 1))


def configuration(name: str, provider: str, plan: Plan, **more: object) -> Configuration:
    fields = {"stage": plan.stage, "policy": "even", "ranks": tuple(range(plan.world_size))}
    return Configuration(name=name, provider=provider, plan=plan, **{**fields, **more})


# What every engine trains


def indices_of(plan: Plan, steps: int, task: Task = TINY) -> list[Counter[bytes]]:
    """Sample indices of each global batch, over all ranks."""
    streams = [task.batches(plan, rank) for rank in range(plan.world_size)]
    seen = []
    for _ in range(steps):
        subset_configurations = [part for part in map(next, streams) if part is not None]
        seen.append(
            Counter(
                row.numpy().tobytes() for part in subset_configurations for row in part["input"]
            )
        )
    return seen


@pytest.mark.parametrize("model", ["llama", "encoder"])
def test_every_plan_cuts_the_same_global_batches(model):
    task = replace(TINY, model=model)
    even = indices_of(Plan.even(2, 8, 4, 0), 3, task)
    assert indices_of(Plan.manual("7,1", stage=0), 3, task) == even
    assert all(batch.total() == 8 for batch in even)


def test_a_rank_without_samples_has_no_batch():
    plan = Plan.manual("8,0", stage=0)
    assert next(TINY.batches(plan, 1)) is None
    assert next(TINY.batches(plan, 0))["input"].shape == (8, 16)


@pytest.mark.parametrize("model", ["llama", "encoder"])
def test_every_engine_starts_from_the_same_weights(model):
    task = replace(TINY, model=model)
    pairs = zip(task.new_model().parameters(), task.new_model().parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    assert len(task.blocks(task.new_model())) > 1
    assert calibration.flops_per_sample(task) > 2 * 3 * 16 * 10_000


# Who enters


def test_peers_get_the_largest_even_micro_batch_that_all_ranks_hold():
    free = configurations.even_micro_batch(
        Cluster(name="x", cores=(0, 1)), replace(TINY, global_batch=64)
    )
    capped = Cluster(name="x", cores=(0, 1), capped=(1,))
    assert free == 32
    assert configurations.even_micro_batch(capped, replace(TINY, global_batch=64)) == 4
    assert configurations.even_micro_batch(capped, replace(TINY, global_batch=56)) == 2
    for peer in configurations.peers(capped, replace(TINY, global_batch=64), (0, 3)):
        assert peer.plan.micro_batches == ((4,) * 8,) * 2
        assert peer.stage in (0, 3)


def test_a_batch_that_peers_cannot_divide_is_refused():
    with pytest.raises(ValueError, match="cannot be divided evenly among 3 ranks"):
        configurations.even_micro_batch(
            Cluster(name="x", cores=(0, 1, 1)), replace(TINY, global_batch=8)
        )


def test_unequal_ranks_add_configurations_of_strong_and_of_weak_ranks_only():
    cluster = Cluster(name="x", quotas=(0.8, 0.4, 0.2))
    strong, weak = configurations.subset_configurations(cluster, TINY, (80.0, 41.0, 19.0))
    assert strong.ranks == (0, 1)
    assert weak.ranks == (2,)
    assert weak.samples(2) == 8
    assert weak.samples(0) == 0
    assert (
        list(
            configurations.subset_configurations(Cluster(name="x", cores=(1, 1)), TINY, (1.0, 1.0))
        )
        == []
    )


# Clusters


def test_named_clusters_have_the_speeds_of_their_names():
    assert {name for name, cluster in CLUSTERS.items() if not cluster.unequal} == {"1:1:1"}
    quotas = find_cluster("4:2:1").quotas
    assert [quota / quotas[-1] for quota in quotas] == pytest.approx([4, 2, 1])
    assert find_cluster("capped").cap(1, 64) == 4
    assert find_cluster("capped").cap(0, 64) is None
    assert find_cluster("slow-link").hosts == (0, 1)
    assert "Gbit/s" in str(find_cluster("slow-link"))


def test_relative_speeds_define_a_cluster():
    assert find_cluster("3:2:2").size == 3
    for name in ("fast", "3", "3:0", "3:-1", "3:2@", "3:2@2G"):
        with pytest.raises(ValueError, match="relative speeds with colons"):
            find_cluster(name)


def test_a_link_puts_each_rank_on_its_own_host():
    cluster = find_cluster("4:2:1@100M")
    assert cluster.quotas == find_cluster("4:2:1").quotas
    assert cluster.hosts == (0, 1, 2)
    assert "0.1 Gbit/s" in str(cluster)


# Crews


def who(context: WorkerContext, text: str) -> str:
    return f"{text} {context.rank} of {context.size}"


def fail_everywhere(context: WorkerContext) -> None:
    raise ValueError(f"rank {context.rank} says no")


def fail_on_one(context: WorkerContext) -> None:
    if context.rank == 1:
        raise ValueError("only I fail")


def test_workers_run_functions_and_stay_usable_if_all_ranks_raise():
    with TWO.opened() as open_cluster, Workers(open_cluster, "test") as workers_:
        assert workers_.call(who, "rank") == ("rank 0 of 2", "rank 1 of 2")
        with pytest.raises(WorkersFailed, match="rank 1 says no"):
            workers_.call(fail_everywhere)
        assert workers_.call(who, "still") == ("still 0 of 2", "still 1 of 2")
        with pytest.raises(WorkersFailed, match="only I fail"):
            workers_.call(fail_on_one)
        assert workers_.is_closed
        with pytest.raises(WorkersFailed, match="have ended"):
            workers_.call(who, "gone")


# Engines


def one_process(task: Task, steps: int) -> list[float]:
    """Losses of the same training in one process."""
    model = task.new_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=task.learning_rate)
    whole = Plan.even(1, task.global_batch, task.global_batch, 0)
    losses = []
    for _, batch in zip(range(steps), task.batches(whole, 0), strict=False):
        loss = task.loss_fn(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


OURS = [
    configuration("poplar", "poplar", Plan.manual("3,1", stage=1, passes=2)),
    configuration("poplar on gloo", "poplar", Plan.even(2, 8, 4, 3), over_gloo=True),
    configuration("one rank", "poplar", Plan.even(1, 8, 8, 0), ranks=(1,)),
]


def peers(*engines: tuple[str, int]) -> list[Configuration]:
    """Configurations of these providers and stages, with one pass and with two."""
    return [
        configuration(f"{provider} {stage}, {size}", provider, Plan.even(2, 8, size, stage))
        for provider, stage in engines
        for size in (4, 2)
    ]


needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None,
    reason="DeepSpeed is not installed; `make peers` does that",
)


@pytest.mark.parametrize(
    "members",
    [
        pytest.param(OURS, id="poplar"),
        pytest.param(
            peers(("ddp", 0), ("fsdp2", 2), ("fsdp2", 3)),
            id="torch",
            marks=pytest.mark.full,  # as test_head_to_head_peers.py
        ),
        pytest.param(
            peers(*[("deepspeed", stage) for stage in range(3)]),
            id="deepspeed",
            marks=needs_deepspeed,
        ),
        pytest.param(peers(("deepspeed", 3)), id="deepspeed-3", marks=needs_deepspeed),
    ],
)
def test_losses_of_every_engine_equal_one_process(members):
    expected = one_process(TINY, 5)
    with (
        TWO.opened() as open_cluster,
        Workers(open_cluster, runner.worker_group(members[0])) as workers_,
    ):
        for member in members:
            workers_.call(worker_calls.build, TINY, member)
            turns = workers_.call(worker_calls.take_turn, member.name, 5)
            losses = runner.mean_losses(member, turns)
            assert losses == pytest.approx(expected, abs=2e-5), member.name
            spans = workers_.call(worker_calls.trace_step, member.name)
            kinds = {span.kind for span in spans[member.ranks[0]]}
            assert {"pass", "optimizer"} <= kinds, member.name
            workers_.call(worker_calls.drop, member.name)


def test_peak_memory_grows_with_the_state_of_a_rank():
    task = replace(TINY, size="small", context=8, global_batch=2)
    plans = [Plan.even(2, 2, 1, stage) for stage in (0, 3)]
    with TWO.opened() as open_cluster, Workers(open_cluster, "poplar") as workers_:
        whole, sharded = (
            max(
                workers_.call(
                    worker_calls.peak_memory, task, configuration(f"stage {p.stage}", "poplar", p)
                )
            )
            for p in plans
        )
    parameters = sum(p.numel() for p in task.new_model().parameters())
    assert whole > 16 * parameters
    assert sharded < 0.95 * whole


def test_missing_engine_error_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    sys.modules.pop("head_to_head.deepspeed_engine", None)
    with pytest.raises(ImportError, match="make peers"):
        worker_calls.make_engine(TINY, configuration("x", "deepspeed", Plan.even(2, 8, 4, 1)), 0)


# Steps and losses


def test_step_time_is_that_of_the_slowest_rank():
    turns = [Turn(10.0, (11.0, 13.5), ()), Turn(10.2, (12.0, 13.0), ())]
    assert runner.durations(turns) == pytest.approx([1.8, 1.5])


def test_losses_are_weighted_by_samples():
    one = configuration("x", "poplar", Plan.manual("3,0,1", stage=0))
    turns = [Turn(0, (1,), (1.0,)), Turn(0, (1,), (math.nan,)), Turn(0, (1,), (2.0,))]
    assert runner.mean_losses(one, turns) == pytest.approx([1.25])


def test_rounds_alternate_order_and_skip_failed_trials():
    trials = [
        runner.Trial(configuration(name, "ddp", Plan.even(2, 8, 4, 0)), None) for name in "abc"
    ]
    trials[1].absent = "failed"
    rounds = runner.rounds(trials, 12)
    turns_run = [
        (trial.configuration.name, round_.steps) for round_ in rounds for trial in round_.trials
    ]
    assert turns_run == [("a", 5), ("c", 5), ("c", 5), ("a", 5), ("a", 2), ("c", 2)]


# Comparisons from given values


@pytest.fixture(autouse=True)
def peers_by_hand(monkeypatch):
    """Peers that must have a result for a verdict on the best peer."""
    monkeypatch.setattr(
        targets,
        "PEERS",
        {"DeepSpeed ZeRO-1": ("deepspeed", 1), "DeepSpeed ZeRO-0": ("deepspeed", 0)},
    )


ALONE = Plan.even(1, 8, 8, 0)
SPANS = (
    (Span("pass", "a pass", 0.0, 0.1), Span("optimizer", "the update", 0.1, 0.12)),
    (Span("pass", "a pass", 0.0, 0.12), Span("wait", "the reduction", 0.12, 0.13)),
)


def outcome(name: str, provider: str, seconds: float, plan: Plan, **more: object) -> Outcome:
    own = {key: more.pop(key) for key in ("policy", "ranks", "over_gloo") if key in more}
    fields = {
        "step_seconds": tuple(seconds * factor for factor in (0.9, 0.98, 1.0, 1.02, 1.1)),
        "losses": (3.0, 2.5, 2.25),
        "spans": SPANS,
        "peak_memory": (40 << 20, 50 << 20),
    }
    return Outcome(configuration=configuration(name, provider, plan, **own), **{**fields, **more})


def comparison(**changes: object) -> Comparison:
    """Two ranks with speeds 3:1; the ideal over even is 2."""
    even = Plan.even(2, 8, 4, 1)
    calibration = Calibration(
        speeds=(30.0, 10.0), batches=(8, 8), rank_flops=(3e9, 1e9), spins=(3.0, 1.0)
    )
    fields = {
        "began": "2026-01-01T00:00:00",
        "cluster": "3:1",
        "described": "given values",
        "unequal": True,
        "task": TINY,
        "flops_per_sample": 1e7,
        "parameters": 1000,
        "before": calibration,
        "after": replace(calibration, speeds=(29.0, 9.5)),
        "turns": ((30.0, 10.0), (31.0, 9.0), (20.0, 11.0)),
        "ideal_over_even": {1: 2.0},
        "outcomes": (
            outcome("even", "poplar", 0.4, even, predicted_seconds=0.42),
            outcome("even on gloo", "poplar", 0.5, even, over_gloo=True),
            outcome("exact", "poplar", 0.2, Plan.manual("6,2", stage=1), policy="exact"),
            outcome("DeepSpeed ZeRO-1", "deepspeed", 0.6, even),
            outcome("DeepSpeed ZeRO-0", "deepspeed", 0.45, Plan.even(2, 8, 4, 0)),
            outcome(
                "strong only", "poplar", 0.3, Plan.even(1, 8, 8, 0), ranks=(0,), spans=SPANS[:1]
            ),
            replace(outcome("FSDP2", "fsdp2", 1, even), step_seconds=(), losses=(), absent="gone"),
        ),
    }
    return Comparison(**{**fields, **changes})


def row(name: str, **changes: object):
    return next(row for row in rows_of(comparison(**changes)) if row.configuration == name)


def test_speed_up_is_the_product_of_balance_transport_and_engine():
    exact = row("exact")
    assert exact.p50_speed == pytest.approx(40.0)
    assert exact.of_sum_of_speeds == pytest.approx(1.0)
    assert exact.of_sum_in_step is None
    assert exact.tflops == pytest.approx(40e7 / 1e12)
    assert exact.mfu == pytest.approx(0.1)
    assert exact.balance == pytest.approx(2.0)
    assert exact.balance_of_ideal == pytest.approx(1.0)
    assert exact.transport == pytest.approx(1.25)
    assert exact.engine == pytest.approx(1.2)
    assert exact.balance * exact.transport * exact.engine == pytest.approx(
        exact.over["DeepSpeed ZeRO-1"]
    )
    assert exact.over_best_peer_of_stage[0] == pytest.approx(3.0)
    low, high = exact.over_best_peer_of_stage[1:]
    assert low <= 3.0 + 1e-9
    assert high >= 3.0 - 1e-9


def test_sum_of_speeds_is_the_median_over_rounds():
    assert comparison().speeds == (30.0, 10.0)
    assert comparison().sum_of_speeds == pytest.approx(40.0)
    slower = comparison(turns=(), after=replace(comparison().after, speeds=(20.0, 6.0)))
    assert slower.speeds == (25.0, 8.0)
    assert slower.largest_sum_of_speeds == pytest.approx(40.0)


def test_rows_have_predicted_and_measured_step_time():
    assert row("even").prediction_error == pytest.approx(0.05)
    assert row("exact").prediction_error is None


def test_subsets_of_ranks_have_no_balance_and_are_not_peers():
    strong = row("strong only")
    assert not strong.takes_all_ranks
    assert strong.balance is None
    assert "strong only" not in row("exact").over


def test_absent_engines_give_a_reason_and_are_not_peers():
    absent = row("FSDP2")
    assert (absent.absent, absent.p50_speed, absent.over) == ("gone", None, {})
    assert "FSDP2" not in row("exact").over
    assert any("absent: gone" in cells for cells in cells_of(rows_of(comparison())))


def test_rows_are_read_back_and_the_later_run_counts(tmp_path):
    rows = rows_of(comparison())
    earlier = [
        replace(row, run="the day before", configuration=row.configuration + "!") for row in rows
    ]
    write_rows(tmp_path / "rows.jsonl", earlier)
    write_rows(tmp_path / "rows.jsonl", rows)
    assert read_rows(tmp_path / "rows.jsonl") == rows
    assert json.loads((tmp_path / "rows.jsonl").read_text().splitlines()[1])["benchmark"] == "train"


def judged(**changes: object) -> dict[str, bool]:
    return {verdict.what: verdict.met for verdict in verdicts(rows_of(comparison(**changes)))}


def test_results_are_compared_with_thresholds():
    assert judged() == {
        "balance over its ideal": True,
        "fastest plan over the best peer": True,
        "largest loss difference": True,
    }
    assert not judged(ideal_over_even={1: 2.2})["balance over its ideal"]
    named = judged(cluster="2:1:1", task=replace(TINY, global_batch=64))
    assert named["over DeepSpeed"]
    assert named["of the sum of speeds"]


def test_equal_ranks_have_thresholds_on_speed_and_memory():
    equal = judged(unequal=False)
    assert equal["even over DeepSpeed ZeRO-1"]
    assert equal["peak memory over the peers' least"]
    assert "balance over its ideal" not in equal


def test_different_loss_misses_its_threshold():
    others = comparison().outcomes
    apart = replace(others[3], losses=(3.0, 2.6, 2.25))
    assert not judged(outcomes=(*others[:3], apart))["largest loss difference"]
    verdict = ClusterVerdict(cluster="x", stage=1, what="y", value=0.9, wanted=0.95)
    assert "short" in str(verdict)


def test_plain_steps_with_barriers_are_compared_round_by_round():
    split = ((6,), (2,))
    measured = {split: ((0.25, 0.25), (0.2, 0.3), (0.3, 0.35))}  # of 40, 40 and 31 samples/s
    assert row("exact", in_step=measured).of_sum_in_step == pytest.approx(32 / 40)
    assert row("even", in_step=measured).of_sum_in_step is None


def test_ideal_includes_the_transfer_time_of_a_slow_link():
    plain = ideals(Cluster(name="x", quotas=(0.6, 0.2)), comparison())[1]
    assert plain == pytest.approx((30 + 10) / (2 * 10))
    measured = comparison(even_seconds=(0.38, 0.36, 0.5))
    assert ideals(Cluster(name="x", quotas=(0.6, 0.2)), measured)[1] == pytest.approx(0.38 * 40 / 8)
    linked = Cluster(name="x", quotas=(0.6, 0.2), hosts=(0, 1))
    large = comparison(parameters=10**9)
    assert 1.0 < ideals(linked, large)[1] < plain


def test_notes_report_drift_and_pauses_of_small_quotas(monkeypatch):
    monkeypatch.setattr("head_to_head.notes.can_prevent_idle_states", lambda: True)
    calm = Cluster(name="x", quotas=(0.6, 0.3))
    assert list(notes(calm, comparison())) == []
    later = replace(comparison().after, speeds=(20.0, 10.0))
    assert "rank 0" in next(iter(notes(calm, comparison(after=later))))
    stalling = Cluster(name="x", quotas=(0.8, 0.1))
    assert "stands still for up to 9.0 ms" in next(iter(notes(stalling, comparison())))
    monkeypatch.setattr("head_to_head.notes.can_prevent_idle_states", lambda: False)
    assert "cores sleep when ranks wait" in next(iter(notes(calm, comparison())))


# Reports


def test_page_shows_every_configuration_and_is_self_contained(tmp_path):
    write_page([comparison()], tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    for one in comparison().outcomes:
        assert one.configuration.name in page
    assert "<svg" in page
    assert "src=" not in page
    assert "only one of the three that says anything about GPUs" in page


def test_results_page_names_hardware_versions_commit_and_missed_thresholds():
    rows = rows_of(comparison(ideal_over_even={1: 3.0}))
    text = "\n".join(markdown(rows))
    for texts in (rows[0].device, rows[0].versions, rows[0].commit):
        assert texts in text
    assert "stage 1: balance over its ideal 0.66667 (>= 0.95, short)" in text
    assert text.count("| --- ") >= len(HEADINGS)


def test_tables_contain_every_row():
    rows = rows_of(comparison())
    assert table_of(rows).row_count == len(rows)
    assert summary_of(rows).row_count == len(list(verdicts(rows)))


# The command line


def test_quick_settings_can_be_overridden():
    options = train.parse_options(["--quick"])
    assert [cluster.name for cluster in options.clusters] == ["2:1:1"]
    assert (options.settings.steps, options.settings.memory) == (5, False)
    assert train.parse_options(["--quick", "--steps", "9"]).settings.steps == 9
    assert train.parse_options(["--stages", "3", "--peers"]).settings.peers == ()
    assert len(train.parse_options([]).clusters) == len(CLUSTERS)


@pytest.mark.parametrize(
    ("arguments", "texts"),
    [
        (["--clusters", "slow"], "relative speeds with colons"),
        (["--size", "huge"], "huge"),
        (["--steps", "1"], "at least 3"),
        (["--context", "0"], "context"),
    ],
)
def test_wrong_options_are_reported(arguments, texts, capsys):
    with pytest.raises(SystemExit):
        train.parse_options(arguments)
    assert texts in capsys.readouterr().err


def test_the_loss_of_a_batch_is_the_mean_of_its_samples():
    model = TINY.new_model()
    batch = TINY.example(4)

    def loss(part: dict[str, Tensor]) -> float:
        return TINY.loss_fn(model, part).item()

    single = [loss({key: value[i : i + 1] for key, value in batch.items()}) for i in range(4)]
    assert loss(batch) == pytest.approx(sum(single) / 4, rel=1e-5)
