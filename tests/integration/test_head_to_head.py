"""The head-to-head benchmark: tasks, configurations, workers, engines, figures, command line."""

from __future__ import annotations

import importlib.util
import math
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from head_to_head import configurations, runner, targets, worker_calls
from head_to_head.clusters import Cluster
from head_to_head.engine import Configuration
from head_to_head.figures import rows_of
from head_to_head.notes import notes
from head_to_head.outcome import Calibration, Comparison, Outcome
from head_to_head.row import latest_rows
from head_to_head.task import MODELS, Task
from head_to_head.worker_calls import Turn
from head_to_head.workers import WorkerContext, Workers, WorkersFailed
from rows import Row, write_rows

from poplar import Plan

TINY = Task(size="tiny", context=16, global_batch=8, learning_rate=1e-2)
TWO = Cluster(name="two", cores=(0, 1))


def configuration(name: str, provider: str, plan: Plan, **more: object) -> Configuration:
    fields = {"stage": plan.stage, "policy": "even", "ranks": tuple(range(plan.world_size))}
    return Configuration(name=name, provider=provider, plan=plan, **{**fields, **more})


def indices_of(plan: Plan, steps: int, task: Task = TINY) -> list[Counter[bytes]]:
    """The samples of each global batch, over all ranks."""
    streams = [task.batches(plan, rank) for rank in range(plan.world_size)]
    seen = []
    for _ in range(steps):
        parts = [part for part in map(next, streams) if part is not None]
        seen.append(Counter(row.numpy().tobytes() for part in parts for row in part["input"]))
    return seen


@pytest.mark.parametrize("model", MODELS)
def test_every_plan_cuts_the_same_global_batches(model):
    task = replace(TINY, model=model)
    even = indices_of(Plan.even(2, 8, 4, 0), 3, task)
    for sizes in ("7,1", "8,0"):
        assert indices_of(Plan.manual(sizes, stage=0), 3, task) == even
    assert all(batch.total() == 8 for batch in even)


@pytest.mark.parametrize("model", MODELS)
def test_losses_and_gradients_are_means_over_samples(model):
    """Also with experts: tokens of one sample share their capacity, so no other sample matters."""
    task = replace(TINY, model=model)
    net = task.new_model().double()
    batch = {
        name: value.double() if value.is_floating_point() else value
        for name, value in task.example(5).items()
    }
    results = []
    for part in (slice(0, 5), slice(0, 2), slice(2, 5)):
        loss = task.loss_fn(net, {name: value[part] for name, value in batch.items()})
        gradients = torch.autograd.grad(loss, list(net.parameters()))
        weight = (part.stop - part.start) / 5
        results.append([weight * value for value in (loss, *gradients)])
    for value, one, other in zip(*results, strict=True):
        torch.testing.assert_close(one + other, value, rtol=1e-5, atol=1e-8)


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


def test_step_time_is_that_of_the_slowest_rank():
    turns = [Turn(10.0, (11.0, 13.5), ()), Turn(10.2, (12.0, 13.0), ())]
    assert runner.durations(turns) == pytest.approx([1.8, 1.5])


def test_losses_are_weighted_by_samples():
    one = configuration("x", "poplar", Plan.manual("3,0,1", stage=0))
    turns = [Turn(0, (1,), (1.0,)), Turn(0, (1,), (math.nan,)), Turn(0, (1,), (2.0,))]
    assert runner.mean_losses(one, turns) == pytest.approx([1.25])


@pytest.fixture(autouse=True)
def peers_by_hand(monkeypatch):
    """Peers that must have a result for a verdict on the best peer."""
    monkeypatch.setattr(
        targets,
        "PEERS",
        {"DeepSpeed ZeRO-1": ("deepspeed", 1), "DeepSpeed ZeRO-0": ("deepspeed", 0)},
    )


def outcome(name: str, provider: str, seconds: float, plan: Plan, **more: object) -> Outcome:
    own = {key: more.pop(key) for key in ("policy", "ranks", "over_gloo") if key in more}
    fields = {
        "step_seconds": tuple(seconds * factor for factor in (0.9, 0.98, 1.0, 1.02, 1.1)),
        "losses": (3.0, 2.5, 2.25),
        "peak_memory": (40 << 20, 50 << 20),
    }
    return Outcome(configuration=configuration(name, provider, plan, **own), **{**fields, **more})


def comparison(**changes: object) -> Comparison:
    """Two ranks with speeds 3:1; the ideal over even is 2."""
    even = Plan.even(2, 8, 4, 1)
    calibration = Calibration(speeds=(30.0, 10.0), batches=(8, 8), rank_flops=(3e9, 1e9))
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
            outcome("strong only", "poplar", 0.3, Plan.even(1, 8, 8, 0), ranks=(0,)),
            replace(outcome("FSDP2", "fsdp2", 1, even), step_seconds=(), losses=(), absent="gone"),
        ),
    }
    return Comparison(**{**fields, **changes})


def row(name: str, **changes: object) -> Row:
    return next(r for r in rows_of(comparison(**changes)) if r["configuration"] == name)


def test_a_rank_whose_plain_passes_vary_from_round_to_round_is_named():
    (noise,) = [
        note
        for note in notes(TWO, comparison(turns=((10.0, 20.0), (10.5, 30.0), (10.0, 21.0))))
        if note.startswith("noise")
    ]
    assert "rank 1 ran 20.0 to 30.0 samples/s" in noise


def test_speed_up_is_the_product_of_balance_transport_and_engine():
    exact = row("exact")
    assert exact["p50_speed"] == pytest.approx(40.0)
    assert exact["of_sum_of_speeds"] == pytest.approx(1.0)
    assert exact["of_sum_in_step"] is None
    assert exact["tflops"] == pytest.approx(40e7 / 1e12)
    assert exact["mfu"] == pytest.approx(0.1)
    assert exact["balance"] == pytest.approx(2.0)
    assert exact["balance_of_ideal"] == pytest.approx(1.0)
    assert exact["transport"] == pytest.approx(1.25)
    assert exact["engine"] == pytest.approx(1.2)
    assert exact["balance"] * exact["transport"] * exact["engine"] == pytest.approx(
        exact["over"]["DeepSpeed ZeRO-1"]
    )
    assert exact["over_best_peer_of_stage"][0] == pytest.approx(3.0)
    low, high = exact["over_best_peer_of_stage"][1:]
    assert low <= 3.0 + 1e-9
    assert high >= 3.0 - 1e-9


def test_absent_engines_give_a_reason_and_are_not_peers():
    absent = row("FSDP2")
    assert (absent["absent"], absent["p50_speed"], absent["over"]) == ("gone", None, {})
    assert "FSDP2" not in row("exact")["over"]


def judged(**changes: object) -> dict[str, bool]:
    return {one.what: one.met for one in targets.targets(rows_of(comparison(**changes)))}


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


def test_different_loss_misses_its_threshold():
    others = comparison().outcomes
    apart = replace(others[3], losses=(3.0, 2.6, 2.25))
    assert not judged(outcomes=(*others[:3], apart))["largest loss difference"]
    wild = replace(others[3], losses=(3.0, math.nan, 2.25))
    assert row(wild.configuration.name, outcomes=(*others[:3], wild))["loss_difference"] == math.inf


def test_later_run_counts(tmp_path):
    rows = rows_of(comparison())
    earlier = [replace(row, case={**row.case, "run": "the day before"}) for row in rows]
    write_rows(tmp_path / "rows.jsonl", [*earlier, *rows])
    found = latest_rows(tmp_path / "rows.jsonl")
    assert [(row["run"], row["configuration"]) for row in found] == [
        (row["run"], row["configuration"]) for row in rows
    ]
