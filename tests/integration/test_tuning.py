"""One call gives all ranks one plan or one error: how it is found, tried, and agreed upon.

What the tuner decides is tested on a `Bench`, where steps take what a known cluster says; that
ranks agree, and a model is left alone, on real ranks.
"""

from __future__ import annotations

import os
import random
import re
import signal
import time
import traceback
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import models
import pytest
import ranks as harness
import torch
from models import ModelSpec
from ranks import Failure, Pool, one_off
from records import cluster as measured_cluster
from torch import Tensor, nn

import poplar
from poplar import (
    ClusterProfile,
    HeteroZeroOptimizer,
    Plan,
    Tuned,
    active_measurement,
    trial_race,
    tuning,
)
from poplar.planner.baselines import POLICIES
from poplar.planner.cost_model import StageCosts
from poplar.planner.prediction import predict
from poplar.planner.search import alternatives
from poplar.profile import BatchPoint
from poplar.profiler.engine_steps import Observation
from poplar.tuning import Tuner

SMALL = ModelSpec(kind="mlp", blocks=1)
GLOBAL_BATCH = 12
STAGES = (0, 1, 2, 3)


def tuned(model: nn.Module | None = None, loss: Any = None, **options: Any) -> Tuned:
    """`poplar.tune` on this rank, quickly."""
    usual = {
        "global_batch": GLOBAL_BATCH,
        "process_group": harness.group(),
        "max_batch": 16,
        "seconds": 2.0,
        "cache": False,
        "progress": False,
    }
    return poplar.tune(
        model if model is not None else models.build(SMALL),
        loss if loss is not None else models.mean_over_samples,
        models.data(3, seed=1),
        **{**usual, **options},
    )


def profile() -> ClusterProfile:
    return poplar.profile_cluster(
        models.build(SMALL),
        models.mean_over_samples,
        models.data(3, seed=1),
        process_group=harness.group(),
        max_batch=4,
        seconds=2.0,
        cache=False,
        progress=False,
    )


@pytest.fixture(scope="module")
def measured(ranks: Pool) -> ClusterProfile:
    """The four ranks of the pool, really measured."""
    return ranks.run(profile)[0]


def known(speeds: tuple[float, ...] = (40.0, 30.0, 20.0, 10.0), **changes: Any) -> ClusterProfile:
    """Ranks of which everything is known; it says nothing of a model, so it is any model's."""
    cluster = measured_cluster(speeds, ["cpu"] * len(speeds))
    return replace(cluster, identity={}, **changes)


# All ranks, one plan


@pytest.mark.parametrize("stage", ["auto", *STAGES])
def test_all_ranks_end_with_the_same_plan_and_its_prediction(ranks: Pool, measured, stage):
    first, *others = ranks.run(tuned, profile=measured, stage=stage)
    plan = first.plan
    for other in others:
        assert other == first
        assert other.plan.digest() == plan.digest()
        assert other.plan.prediction == plan.prediction
    assert plan.global_batch == GLOBAL_BATCH
    assert stage in ("auto", plan.stage)
    assert plan.prediction["policy"] == "exact"
    assert plan.prediction["step_seconds"] > 0
    assert len(plan.prediction["devices"]) == len(plan.prediction["memory_limit_bytes"]) == 4
    assert plan.prediction["bound"] in str(plan)
    tried = [observation.plan.stage for observation in first.observations]
    assert len(set(tried[:2])) == (2 if stage == "auto" else 1)


def tuned_and_trained(**options: Any) -> tuple[Plan, list[float]]:
    model = models.build(SMALL)
    plan = tuned(model, lr=1e-2, **options).plan
    optimizer = HeteroZeroOptimizer(
        model, torch.optim.AdamW, plan=plan, process_group=harness.group(), lr=1e-2
    )
    rank, cuts = harness.rank(), plan.cut(plan.global_batch)
    start = sum(cuts[:rank])
    own = models.part(models.data(plan.global_batch, seed=2), start, start + cuts[rank])
    batch = own if cuts[rank] else None
    steps = [optimizer.train_step(models.mean_over_samples, batch) for _ in range(3)]
    return plan, [step.loss for step in steps]


def test_from_nothing_to_training_in_one_call(ranks: Pool):
    answers = ranks.run(tuned_and_trained, max_batch=2)
    assert answers == [answers[0]] * 4
    losses = answers[0][1]
    assert losses == sorted(losses, reverse=True)


@pytest.mark.parametrize("stage", STAGES)
def test_a_rank_too_slow_to_help_gets_no_samples_and_takes_part(ranks: Pool, stage):
    slow = known((40.0, 40.0, 40.0, 0.2))
    answers = ranks.run(tuned_and_trained, profile=slow, stage=stage)
    plan, losses = answers[0]
    assert answers == [answers[0]] * 4
    assert plan.samples(3) == 0
    assert losses == sorted(losses, reverse=True)


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_every_policy_decides_if_asked_to(ranks: Pool, policy):
    cluster = known()
    first, *others = ranks.run(tuned, profile=cluster, policy=policy, verify=False)
    assert others == [first] * 3
    assert first.plan.prediction["policy"] == policy
    expected = alternatives(cluster, global_batch=GLOBAL_BATCH, policy=policy)[0]
    assert first.plan == expected


def refusing_loss(model: nn.Module, batch: Any) -> Tensor:
    raise AssertionError("the model ran")


def test_on_a_given_profile_unverified_no_model_runs(ranks: Pool):
    everything = {"loss": refusing_loss, "profile": known(), "verify": False, "max_batch": 64}
    for answer in ranks.run(tuned, **everything):
        assert answer.observations == ()
        assert answer.profile == known()


# The model is left alone


class Remembering(nn.Module):
    """Draws random numbers and counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = models.build(SMALL)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens: Tensor) -> Tensor:
        self.calls += 1
        random.random()
        return self.inner(tokens) + 0.0 * torch.rand(1)


def traces_left(**options: Any) -> list[str]:
    model = Remembering().train()
    gradient = model.inner.head.weight.grad = torch.ones_like(model.inner.head.weight)
    values = {name: value.clone() for name, value in model.state_dict().items()}
    places = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    states = torch.get_rng_state(), random.getstate()
    tuned(model, **options)
    left = [name for name, value in model.state_dict().items() if not value.equal(values[name])]
    left += [f"memory of {n}" for n, p in model.named_parameters() if p.data_ptr() != places[n]]
    left += [
        n for n, p in model.named_parameters() if p.grad is not None and p.grad is not gradient
    ]
    if model.inner.head.weight.grad is not gradient or not bool(gradient.eq(1).all()):
        left.append("gradient")
    if not torch.get_rng_state().equal(states[0]):
        left.append("random state of torch")
    if random.getstate() != states[1]:
        left.append("random state of Python")
    if any(m._forward_hooks or m._forward_pre_hooks for m in model.modules()):
        left.append("hooks")
    return left


def test_trials_leave_no_trace(ranks: Pool):
    """Of two stages, on a profile so wrong that more is measured and tried."""
    assert ranks.run(traces_left, profile=known()) == [[]] * 4


# What was given is wrong


Case = tuple[dict[str, Any], dict[int, dict[str, Any]]]
"""What is wrong on all ranks, and what on some."""


def failures_in(cases: list[Case]) -> list[Failure | None]:
    """What this rank raises in each case."""
    raised: list[Failure | None] = []
    for everywhere, only in cases:
        own = only.get(harness.rank(), {})
        with harness.catching() as caught:
            tuned(**{"profile": known(), "verify": False, **everywhere, **own})
        raised.append((caught or [None])[0])
    return raised


def assert_all_raise(
    ranks: Pool, cases: list[Case], messages: Sequence[str], size: int = harness.WORLD
) -> list[list[Failure]]:
    """Every rank raises a ValueError in every case; returns them by case, then by rank."""
    by_case = list(zip(*ranks.run(failures_in, cases, ranks=size), strict=True))
    for case, failures, message in zip(cases, by_case, messages, strict=True):
        for failure in failures:
            assert failure is not None, case
            assert failure.is_a(ValueError), failure
            assert re.search(message, failure.message), failure
    return by_case


BAD_ARGUMENTS = [
    ({"global_batch": 0}, "global_batch must be a whole number above 0, got 0"),
    ({"global_batch": -4}, "global_batch must be a whole number above 0, got -4"),
    ({"global_batch": True}, "global_batch must be a whole number above 0, got True"),
    ({"global_batch": 8.0}, "global_batch must be a whole number above 0, got 8.0"),
    ({"global_batch": "8"}, "global_batch must be a whole number above 0, got '8'"),
    ({"policy": "best"}, "policy='best' is not known; use one of .*'exact'"),
    ({"stage": 4}, r"stages must name ZeRO stages 0 to 3, got \(4,\)"),
    ({"stage": "fastest"}, "stages must name ZeRO stages 0 to 3, got .*fastest"),
    ({"max_batch": 0}, "max_batch must be a whole number, at least 1, got 0"),
    ({"seconds": 0}, "seconds must be above 0"),
]


def test_a_bad_argument_is_a_clear_error(ranks: Pool):
    cases = [(options, {}) for options, _ in BAD_ARGUMENTS]
    assert_all_raise(ranks, cases, [message for _, message in BAD_ARGUMENTS])


def test_a_bad_argument_on_one_rank_is_an_error_on_all_that_names_it(ranks: Pool):
    cases = [({}, {2: options}) for options, _ in BAD_ARGUMENTS]
    answers = zip(*ranks.run(failures_in, cases), strict=True)
    for failures, (_, message) in zip(answers, BAD_ARGUMENTS, strict=True):
        for rank, failure in enumerate(failures):
            assert failure.is_a(ValueError if rank == 2 else poplar.RankFailed), failure
            assert re.search(message, failure.message), failure
            assert rank == 2 or "rank 2: ValueError" in failure.message


def test_ranks_that_ask_for_different_things_are_told_so(ranks: Pool):
    differing = {
        "global_batch": {"global_batch": 16},
        "policy": {"policy": "even"},
        "verify": {"verify": True},
        "profile": {"profile": known((1.0, 2.0, 3.0, 4.0))},
    }
    cases = [({"max_batch": 4}, {1: options}) for options in differing.values()]
    cases += [({"max_batch": 4}, {1: {"profile": None}})]
    expected = [rf"the ranks disagree on {what}: \{{0: .*1: " for what in [*differing, "profile"]]
    assert_all_raise(ranks, cases, expected)


def test_what_does_not_fit_is_said_with_its_rank_and_bytes(ranks: Pool):
    case = {"profile": None, "max_batch": 2}, {2: {"memory_limit": 1000}}
    (failures,) = assert_all_raise(ranks, [case], ["rank 2 .* needs at least .* MiB too little"])
    assert all(failure.is_a(poplar.NoPlanFits) for failure in failures)


def test_a_profile_of_another_job_is_refused_and_what_differs_is_named(ranks: Pool, measured):
    elsewhere = replace(measured, identity={**measured.identity, "device": "Another 9000"})
    wider = models.build(replace(SMALL, hidden=67))
    refused = [
        ({"model": wider}, "another model: measured 'Perceptron .*', here 'Perceptron "),
        ({"compute_dtype": torch.bfloat16}, "another compute dtype: measured 'as the model is'"),
        ({"reduce_dtype": torch.bfloat16}, "another reduce dtype: measured 'torch.float32'"),
        ({"optimizer_class": torch.optim.SGD}, "another optimizer: measured .AdamW .* here .SGD "),
        ({"amsgrad": True}, "another optimizer: measured"),
        ({"profile": elsewhere}, "another device: measured 'Another 9000', here"),
    ]
    assert_all_raise(
        ranks,
        [({"profile": measured, **options}, {}) for options, _ in refused],
        [f"{message}.*; measure again with profile_cluster" for _, message in refused],
    )


def test_a_profile_of_another_world_is_refused(ranks: Pool, measured):
    message = "the profile is of 4 ranks, but there are 2; measure again with profile_cluster"
    assert_all_raise(ranks, [({"profile": measured}, {})], [message], size=2)


def searching_fails_on_the_first_rank() -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise ZeroDivisionError("in the search")

    search = tuning.alternatives
    if harness.rank() == 0:
        tuning.alternatives = fail
    try:
        tuned(profile=known())
    finally:
        tuning.alternatives = search


def test_a_search_that_fails_on_its_rank_fails_on_all(ranks: Pool):
    for failure in ranks.run_expecting_errors(searching_fails_on_the_first_rank):
        assert failure.type == "ZeroDivisionError"
        assert failure.message == "in the search"


# What the tuner decides


class Bench:
    """In the place of a profiler: steps take what the `true` cluster says, and nothing runs."""

    def __init__(self, known: ClusterProfile, true: ClusterProfile, stages: Sequence[int]) -> None:
        self.known, self.true = known, true
        size = known.world_size
        self.control = SimpleNamespace(
            group=SimpleNamespace(rank=0, size=size),
            exchange=lambda values, what: lambda: [values] * size,
            exchange_objects=lambda value, what: [value] * size,
        )
        self.request = SimpleNamespace(
            model=nn.Linear(1, 1),
            stages=tuple(stages),
            max_batch=None,
            memory_limit=None,
            seconds=45.0,
        )
        self.agreed = SimpleNamespace(identity={})
        self.device, self.show, self.asynchronous = torch.device("cpu"), False, False
        self.verified: dict[str, Plan] = {}
        self.tried: list[Plan] = []
        self.seen: list[Plan] = []
        self.points_asked: list[tuple[int | None, ...]] = []
        self.before_trials: list[tuple[tuple[int | None, ...], list[int]]] = []
        """What was asked for before any plan ran, and the batches that ran beside it."""
        self.kept: list[tuple[ClusterProfile, dict[str, Plan]]] = []

    def profile(self) -> ClusterProfile:
        return self.known

    def keep(self, profile: ClusterProfile) -> None:
        self.kept.append((profile, dict(self.verified)))

    def steps_of(self, plans: Sequence[Plan], *, steps: int, tell: Any) -> tuple[Observation, ...]:
        self.tried += [plan for plan in plans if plan not in self.tried]
        return tuple(map(self._observation, plans))

    def points_at(
        self, batches: Sequence[int | None], beside: Sequence[BatchPoint] = ()
    ) -> list[BatchPoint | None]:
        self.points_asked.append(tuple(batches))
        if not self.seen:
            self.before_trials.append((tuple(batches), [point.batch for point in beside]))
        return [
            None
            if batch is None
            else BatchPoint(
                batch=batch,
                seconds=device.seconds(batch),
                activation_bytes=int(device.activation_bytes(batch)),
            )
            for batch, device in zip(batches, self.true.devices, strict=True)
        ]

    def _observation(self, plan: Plan) -> Observation:
        self.seen.append(plan)
        costs = StageCosts(self.true, plan.stage)
        return Observation(
            plan=plan,
            step_seconds=costs.step_seconds(plan.micro_batches, plan.shares),
            pass_seconds=tuple(
                tuple(costs.pass_seconds(rank, size) for size in sizes if size)
                for rank, sizes in enumerate(plan.micro_batches)
            ),
            other_seconds=tuple(d.step_overhead_seconds[plan.stage] for d in self.true.devices),
        )

    def tune(self, **options: Any) -> Tuned:
        return Tuner(self, global_batch=40, policy="exact").tune(**options)  # type: ignore[arg-type]


def with_step_seconds(cluster: ClusterProfile, by_stage: tuple[float, ...]) -> ClusterProfile:
    return replace(cluster, network=replace(cluster.network, step_seconds=by_stage))


def at_speeds(cluster: ClusterProfile, factors: Sequence[float]) -> ClusterProfile:
    """Each rank so many times as slow at every batch."""
    return replace(
        cluster,
        devices=tuple(
            replace(d, points=tuple(replace(p, seconds=factor * p.seconds) for p in d.points))
            for factor, d in zip(factors, cluster.devices, strict=True)
        ),
    )


def predicted_order(cluster: ClusterProfile) -> list[int]:
    return [plan.stage for plan in alternatives(cluster, global_batch=40)]


def test_the_best_plans_of_two_stages_are_tried_and_what_was_right_is_measured_no_further():
    bench = Bench(thorough(known()), known(), STAGES)
    decided = bench.tune()
    assert [plan.stage for plan in bench.tried] == predicted_order(known())[:2]
    assert bench.points_asked == []
    assert decided.plan == bench.tried[0]


def test_the_plan_is_the_one_that_ran_fastest_not_the_one_predicted_so():
    first, second, *_ = predicted_order(known())
    slower = tuple(0.03 if stage == first else 0.0 for stage in STAGES)
    bench = Bench(known(), with_step_seconds(known(), slower), STAGES)
    assert bench.tune().plan.stage == second


class Lucky(Bench):
    """The second plan has a quiet moment in its first turn, and never again."""

    def _observation(self, plan: Plan) -> Observation:
        seen = super()._observation(plan)
        first_time = len(self.seen) == 2
        return replace(seen, step_seconds=0.97 * seen.step_seconds) if first_time else seen


def test_luck_in_a_turn_does_not_decide():
    best, lucky = predicted_order(known())[:2]
    slower = tuple(0.005 if stage == lucky else 0.0 for stage in STAGES)
    bench = Lucky(known(), with_step_seconds(known(), slower), STAGES)
    assert bench.tune().plan.stage == best
    turns = [plan.stage for plan in bench.seen]
    assert turns[:4] == [best, lucky, lucky, best]  # nobody always comes last
    assert turns.count(best) == turns.count(lucky) == trial_race.TURNS


class Warming(Bench):
    """Each turn is slower than the one before: the devices get hot."""

    def _observation(self, plan: Plan) -> Observation:
        seen = super()._observation(plan)
        heat = 1.0 + 0.1 * (len(self.seen) // 2)
        return replace(
            seen,
            step_seconds=heat * seen.step_seconds,
            pass_seconds=tuple(tuple(heat * took for took in own) for own in seen.pass_seconds),
        )


def test_who_joins_when_the_devices_have_become_slower_may_still_win():
    """The ranks' true speeds show once a plan has run, so the best one is found after that."""
    changed = at_speeds(known(), [0.93, 1.06, 1.0, 0.9])
    bench = Warming(known(), changed, [1])
    decided = bench.tune()
    assert len(set(bench.seen)) > 1
    first, best = (predict(changed, plan).step_seconds for plan in (bench.seen[0], decided.plan))
    assert best < first
    assert bench.seen.count(decided.plan) >= trial_race.LEAST_TURNS


def test_who_is_clearly_slower_is_out_after_one_turn():
    first, second, *_ = predicted_order(known())
    slower = tuple(0.3 if stage == second else 0.0 for stage in STAGES)
    bench = Bench(known(), with_step_seconds(known(), slower), STAGES)
    assert bench.tune().plan.stage == first
    turns = [plan.stage for plan in bench.seen]
    assert turns.count(second) == 1
    assert turns.count(first) == trial_race.LEAST_TURNS  # alone, it need not run any longer


def test_a_budget_that_is_spent_leaves_the_first_two_plans_one_turn():
    bench = Bench(known(), known(), STAGES)
    bench.request.seconds = 0.0
    bench.tune()
    turns = [plan.stage for plan in bench.seen]
    assert turns == predicted_order(known())[:2]


def straight_lines(*speeds: float) -> ClusterProfile:
    """Ranks that need exactly so long for any batch, in samples per second, and hardly to meet."""
    devices = zip(known(speeds).devices, speeds, strict=True)
    network = known(speeds).network
    return replace(
        known(speeds),
        network=replace(network, reduce_scatter_seconds=1e-6, all_gather_seconds=1e-6),
        devices=tuple(
            replace(
                device,
                points=tuple(
                    BatchPoint(batch=batch, seconds=batch / speed, activation_bytes=batch * 2**20)
                    for batch in (1, 96)
                ),
            )
            for device, speed in devices
        ),
    )


class Sharing(Bench):
    """Ranks 1 and 2 share a core: what one leaves of it while it waits, the other uses."""

    def _observation(self, plan: Plan) -> Observation:
        seen = super()._observation(plan)
        first, *sharing = (sum(own) for own in seen.pass_seconds)
        passes = (first, *[1.01 * sum(sharing) / 2] * 2)
        return replace(
            seen, step_seconds=max(passes), pass_seconds=tuple((busy,) for busy in passes)
        )


def test_ranks_that_share_a_core_are_balanced_further_than_the_closed_form_sees():
    """By the form, the last of these two decides: a sample less at one of them saves nothing."""
    bench = Sharing(*[thorough(straight_lines(203.5, 100.0, 100.0))] * 2, [1])
    decided = Tuner(bench, global_batch=96, policy="exact").tune()
    assert [sum(own) for own in bench.seen[0].micro_batches] == [48, 24, 24]
    assert decided.plan.samples(0) == 49
    assert bench.seen.count(decided.plan) >= trial_race.LEAST_TURNS


def luring(cluster: ClusterProfile) -> ClusterProfile:
    """Noise made 12 samples look 8 % cheaper than they are."""
    return replace(
        cluster,
        devices=tuple(
            replace(
                d,
                points=(
                    d.points[0],
                    BatchPoint(batch=12, seconds=0.92 * d.seconds(12), activation_bytes=12 * 2**20),
                    d.points[-1],
                ),
            )
            for d in cluster.devices
        ),
    )


@pytest.mark.parametrize("stage", STAGES)
def test_cuts_that_noise_suggests_have_to_beat_the_plan_without_them(stage, monkeypatch):
    monkeypatch.setattr(active_measurement, "QUESTIONS", 0)  # or the noise would be found out
    true = straight_lines(200.0, 100.0, 100.0)
    true = with_residuals(true, stage, overhead=0.002)
    bench = Bench(luring(true), true, [stage])
    decided = Tuner(bench, global_batch=96, policy="exact").tune()
    assert max(map(len, bench.seen[0].micro_batches)) > 1
    assert [len(sizes) for sizes in decided.plan.micro_batches] == [1, 1, 1]
    assert decided.plan.shares == pytest.approx([1 / 3] * 3)


def with_residuals(cluster: ClusterProfile, stage: int, *, overhead: float) -> ClusterProfile:
    """Each pass takes so much longer on the engine."""
    overheads = tuple(overhead if other == stage else 0.0 for other in STAGES)
    devices = (replace(device, pass_overhead_seconds=overheads) for device in cluster.devices)
    return replace(cluster, devices=tuple(devices))


@pytest.mark.parametrize("stage", STAGES)
def test_a_plainer_plan_keeps_to_the_memory(stage):
    plan = Plan(
        stage=stage,
        global_batch=40,
        micro_batches=((5, 6, 5), (1, 10, 1), (4, 4, 0), (2, 1, 1)),
        shares=(0.4, 0.3, 0.2, 0.1),
    )
    plain = trial_race.plainer(known(), plan)
    assert plain.micro_batches == ((16,), (12,), (8,), (4,))
    assert plain.shares == (0.25,) * 4
    first, *others = known().devices
    tight = replace(
        known(), devices=(replace(first, memory_bytes=9 * 7.1 * 2**20 + 64 * 2**20), *others)
    )
    plain = trial_race.plainer(tight, plan)
    assert plain.micro_batches[0] == (8, 8)
    assert plain.micro_batches[1] == ((12,) if stage < 2 else (6, 6))
    predict(tight, plain)


def test_a_fixed_stage_is_tried_once():
    bench = Bench(known(), known(), [3])
    assert bench.tune().plan.stage == 3
    assert len(bench.tried) == 1


def test_the_prediction_of_the_plan_is_what_was_observed_of_it():
    true = with_step_seconds(known(), (0.3, 0.2, 0.1, 0.4))
    decided = Bench(known(), true, STAGES).tune()
    costs = StageCosts(true, decided.plan.stage)
    ran = costs.step_seconds(decided.plan.micro_batches, decided.plan.shares)
    assert decided.plan.prediction["step_seconds"] == pytest.approx(ran)
    assert predict(decided.profile, decided.plan).step_seconds == pytest.approx(ran)


def bent() -> ClusterProfile:
    """As `known()` at 1 and 20 samples; in between, passes are much faster than a straight line."""
    devices = []
    for device in known().devices:
        ends = device.points[0], device.points[-1]
        middle = [
            replace(point, seconds=ends[0].seconds + 0.2 * (point.seconds - ends[0].seconds))
            for point in device.points[1:-1]
        ]
        devices.append(replace(device, points=(ends[0], *middle, ends[1])))
    return replace(known(), devices=tuple(devices))


def straight() -> ClusterProfile:
    """What of `bent()` was measured: its ends."""
    return replace(
        known(),
        devices=tuple(replace(d, points=(d.points[0], d.points[-1])) for d in known().devices),
    )


def test_a_trial_far_from_its_prediction_leads_to_one_more_point_and_another_search(monkeypatch):
    monkeypatch.setattr(
        active_measurement, "QUESTIONS", 0
    )  # or nothing would be far from its prediction
    bench = Bench(straight(), bent(), [0])
    decided = bench.tune()
    planned = [max(passes) for passes in bench.tried[0].micro_batches]
    assert bench.points_asked == [tuple(planned)]
    for device, batch in zip(decided.profile.devices, planned, strict=True):
        assert batch in [point.batch for point in device.points]
    trials = {observation.plan: observation.step_seconds for observation in decided.observations}
    assert list(trials) == bench.tried
    assert decided.plan == min(trials, key=trials.__getitem__)


def in_steps(*sizes: int) -> ClusterProfile:
    """Ranks whose passes take as long as the next multiple of so many samples, up to 64."""
    alike = straight_lines(*[100.0] * len(sizes))
    return replace(
        alike,
        devices=tuple(
            replace(
                device,
                name=f"with tiles of {size}",
                points=tuple(
                    BatchPoint(
                        batch=batch,
                        seconds=-(-batch // size) * size / 100.0,
                        activation_bytes=batch * 2**20,
                    )
                    for batch in range(1, 65)
                ),
            )
            for device, size in zip(alike.devices, sizes, strict=True)
        ),
    )


def in_powers_of_two(cluster: ClusterProfile) -> ClusterProfile:
    """What a profile has of it."""
    return replace(
        cluster,
        devices=tuple(
            replace(d, points=tuple(p for p in d.points if p.batch.bit_count() == 1))
            for d in cluster.devices
        ),
    )


@pytest.mark.parametrize("stage", STAGES)
def test_what_decides_and_nobody_has_measured_is_measured_before_a_trial(stage):
    """21 samples each look a third cheaper than 32, and cost as much as 24."""
    true = in_steps(8, 8)
    bench = Bench(in_powers_of_two(true), true, [stage])
    decided = Tuner(bench, global_batch=42, policy="exact").tune()  # type: ignore[arg-type]
    assert bench.before_trials[0] == ((21, 21), [16, 16])
    assert len(bench.before_trials) <= active_measurement.QUESTIONS
    best = alternatives(true, global_batch=42, stages=(stage,))[0]
    seconds = [predict(true, plan).step_seconds for plan in (decided.plan, best)]
    assert seconds[0] == pytest.approx(seconds[1], rel=0.01)
    for device in decided.profile.devices:
        assert 21 in [point.batch for point in device.points]


def test_ranks_that_are_asked_nothing_compute_beside_those_that_are():
    true = in_steps(8, 1)
    first, second = in_powers_of_two(true).devices[0], true.devices[1]
    measured = replace(true, devices=(first, second))
    bench = Bench(measured, true, [0])
    Tuner(bench, global_batch=42, policy="exact").tune()  # type: ignore[arg-type]
    (batches, beside), *_ = bench.before_trials
    assert batches[0] not in (None, *(point.batch for point in first.points))
    assert batches[1] is None
    assert beside[0] in [point.batch for point in first.points]
    (plan,) = alternatives(measured, global_batch=42, stages=[0])
    assert beside[1] == max(plan.micro_batches[1])


def test_a_given_profile_gets_the_points_that_decide_if_its_plan_is_verified():
    true = in_steps(8, 8)
    given = in_powers_of_two(true)
    bench = Bench(true, true, [0])
    tuner = Tuner(bench, global_batch=42, policy="exact")  # type: ignore[arg-type]
    decided = tuner.tune(given)
    assert bench.before_trials != []
    assert len(decided.profile.devices[0].points) > len(given.devices[0].points)


@pytest.mark.parametrize(
    ("policy", "seconds", "verify"),
    [("even", 45.0, True), ("paper", 45.0, True), ("exact", 0.0, True), ("exact", 45.0, False)],
)
def test_nothing_is_asked_of_other_policies_without_time_or_without_trials(policy, seconds, verify):
    true = in_steps(8, 8)
    bench = Bench(in_powers_of_two(true), true, [0])
    bench.request.seconds = seconds
    Tuner(bench, global_batch=42, policy=policy).tune(verify=verify)  # type: ignore[arg-type]
    assert bench.before_trials == []


@pytest.mark.parametrize("stage", STAGES)
def test_ranks_whose_speeds_have_changed_since_the_profile_get_what_they_can_do_now(stage):
    changed = at_speeds(known(), [0.93, 1.06, 1.0, 0.9])
    bench = Bench(known(), changed, [stage])
    decided = bench.tune()
    best = alternatives(changed, global_batch=40, stages=(stage,))[0]
    fastest = predict(changed, best).step_seconds
    assert predict(changed, decided.plan).step_seconds <= 1.005 * fastest
    assert predict(changed, bench.tried[0]).step_seconds > 1.01 * fastest


def test_what_is_known_already_is_not_measured_again():
    """The residuals alone were wrong: all planned batches are points of the curve."""
    single = thorough(known())
    bench = Bench(single, with_step_seconds(single, (1.0,) * 4), [1])
    bench.tune()
    assert bench.points_asked == [(None,) * 4]


def thorough(cluster: ClusterProfile) -> ClusterProfile:
    """Every batch of every rank was measured."""
    return replace(
        cluster,
        devices=tuple(
            replace(
                device,
                points=tuple(
                    BatchPoint(
                        batch=batch,
                        seconds=device.seconds(batch),
                        activation_bytes=int(device.activation_bytes(batch)),
                    )
                    for batch in range(1, device.max_batch + 1)
                ),
            )
            for device in cluster.devices
        ),
    )


def test_a_planned_batch_that_turns_out_not_to_fit_is_not_planned():
    """One more point shows that the largest batches hold more than the curve between two said."""
    limit = 64 * 2**20
    tight = [replace(d, memory_bytes=limit * 2) for d in straight().devices]
    greedy = [
        replace(
            d,
            memory_bytes=limit * 2,
            points=tuple(
                replace(point, activation_bytes=limit * 4 if point.batch > 1 else 2**20)
                for point in d.points
            ),
        )
        for d in bent().devices
    ]
    bench = Bench(
        replace(straight(), devices=tuple(tight)), replace(bent(), devices=tuple(greedy)), [0]
    )
    decided = bench.tune()
    predict(decided.profile, decided.plan)
    assert decided.plan == bench.tried[-1]


def test_what_was_verified_is_kept_with_its_profile_and_found_without_a_trial():
    bench = Bench(known(), with_step_seconds(known(), (0.01,) * 4), STAGES)
    decided = bench.tune()
    ((profile, plans),) = bench.kept
    assert profile == decided.profile
    assert list(plans.values()) == [decided.plan]
    bench.tried.clear()
    assert bench.tune().plan == decided.plan
    assert bench.tried == []
    assert Tuner(bench, global_batch=41, policy="exact").tune().plan.global_batch == 41
    assert bench.tried != []


def test_nothing_is_kept_of_a_given_profile_or_of_a_plan_that_was_not_tried():
    bench = Bench(known(), known(), STAGES)
    bench.tune(given=known())
    bench.tune(verify=False)
    assert bench.kept == []
    assert bench.verified == {}


# A rank is lost


TIMEOUT = timedelta(seconds=10)
LOST = 1


def profile_until(moment: str) -> tuple[float, Failure | None]:
    calls = 0

    def lose_one(model: nn.Module, batch: Any) -> Tensor:
        nonlocal calls
        calls += 1
        in_a_step = any(frame.name == "train_step" for frame in traceback.extract_stack())
        if harness.rank() == LOST and (in_a_step if moment == "a step" else calls == 5):
            os.kill(os.getpid(), signal.SIGKILL)
        return models.mean_over_samples(model, batch)

    began = time.monotonic()
    with harness.catching() as caught:
        tuned(loss=lose_one, stage=2, max_batch=2, timeout=TIMEOUT)
    return time.monotonic() - began, (caught or [None])[0]


@pytest.mark.parametrize("moment", ["a plain pass", "a step"])
def test_a_rank_lost_while_profiling_is_named_by_the_others_in_time(moment):
    answers = one_off(3, profile_until, moment, lost=[LOST], timeout=90)
    for rank in {0, 1, 2} - {LOST}:
        assert not isinstance(answers[rank], Failure), answers[rank]
        seconds, failure = answers[rank]
        assert failure is not None, f"rank {rank} has a plan without rank {LOST}"
        assert failure.is_a(poplar.CollectiveTimeout), failure
        assert re.search(rf"rank(\(s\))? (\d+, )*{LOST}\b", failure.message), failure
        assert seconds < 6 * TIMEOUT.total_seconds()
