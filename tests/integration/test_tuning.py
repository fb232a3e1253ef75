"""`autotune` gives all ranks the same plan or an error.

Decisions are tested on a `Bench`, where steps take what a known cluster predicts. Agreement between
ranks, and that the model is preserved, are tested on real ranks.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import re
import signal
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock

import clusters
import models
import pytest
import ranks as harness
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import ModelSpec
from ranks import Failure, Pool, one_off
from records import cluster as measured_cluster
from subset import choose
from torch import Tensor, nn
from training import ModelState

import poplar
from poplar import ClusterProfile, HeteroZeroOptimizer, Plan
from poplar.planner.cost_model import StageCosts
from poplar.planner.memory_shortfall import NoPlanFits
from poplar.planner.prediction import fits, predict
from poplar.planner.search import POLICIES, alternatives
from poplar.profiler.trial_runs import OutOfMemoryInTrial
from poplar.tuning import autotune
from poplar.tuning.autotune import Tuned, Tuner, TuningJob
from poplar.values.communication import Communication
from poplar.values.errors import agreed
from poplar.values.observation import Observation
from poplar.values.profile import (
    BatchPoint,
    DeviceProfile,
    LinearLayer,
    ModelProfile,
    NetworkProfile,
)

SMALL = ModelSpec(kind="mlp", blocks=1)
GLOBAL_BATCH = 12
STAGES = (0, 1, 2, 3)


def tuned(model: nn.Module | None = None, loss: Any = None, **options: Any) -> Tuned:
    """`poplar.tune` on this rank with a small budget."""
    usual = {
        "global_batch": GLOBAL_BATCH,
        "process_group": harness.group(),
        "max_batch": 16,
        "seconds": 0.5,
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
        seconds=0.5,
        cache=False,
        progress=False,
    )


@pytest.fixture(scope="module")
def measured(ranks: Pool) -> ClusterProfile:
    """A measured profile of the four ranks of the pool."""
    return ranks.run(profile)[0]


def known(speeds: tuple[float, ...] = (40.0, 30.0, 20.0, 10.0), **changes: Any) -> ClusterProfile:
    """A profile without identity, so that it can be used for any model, and of little memory."""
    cluster = measured_cluster(speeds, ["cpu"] * len(speeds))
    cluster = cluster.with_devices(lambda device: replace(device, memory_bytes=1 << 30))
    return replace(cluster, **{"identity": {}, **changes})


# All ranks, one plan


@pytest.mark.parametrize("stage", choose(quick=["auto", 3], full=["auto", *STAGES]))
def test_all_ranks_get_the_same_plan_with_prediction(ranks: Pool, measured, stage):
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


def tune_and_train(**options: Any) -> tuple[Plan, list[float]]:
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


def test_autotuned_plan_trains(ranks: Pool):
    answers = ranks.run(tune_and_train, max_batch=2, ranks=2)
    assert answers == [answers[0]] * 2
    losses = answers[0][1]
    assert losses == sorted(losses, reverse=True)


@pytest.mark.parametrize("stage", STAGES)
def test_very_slow_rank_gets_no_samples_and_takes_part(ranks: Pool, stage):
    slow = known((40.0, 40.0, 40.0, 0.2))
    answers = ranks.run(tune_and_train, profile=slow, stage=stage)
    plan, losses = answers[0]
    assert answers == [answers[0]] * 4
    assert plan.samples(3) == 0
    assert losses == sorted(losses, reverse=True)


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_every_policy_gives_its_plan(ranks: Pool, policy):
    cluster = known()
    first, *others = ranks.run(tuned, profile=cluster, policy=policy, verify=False)
    assert others == [first] * 3
    assert first.plan.prediction["policy"] == policy
    expected = alternatives(cluster, global_batch=GLOBAL_BATCH, policy=policy)[0]
    assert first.plan == expected


def refusing_loss(model: nn.Module, batch: Any) -> Tensor:
    raise AssertionError("the model ran")


def test_unverified_plan_on_a_given_profile_runs_no_model(ranks: Pool):
    everything = {"loss": refusing_loss, "profile": known(), "verify": False, "max_batch": 64}
    for answer in ranks.run(tuned, **everything):
        assert answer.observations == ()
        assert answer.profile == known()


# The model is preserved


def tune_and_compare(**options: Any) -> None:
    model = models.Stateful()
    model.inner.head.weight.grad = torch.ones_like(model.inner.head.weight)
    before = ModelState.of(model)
    tuned(model, **options)
    before.assert_same(ModelState.of(model))


def test_trial_runs_preserve_the_model(ranks: Pool):
    """On a wrong profile, so that batches are measured and more plans run."""
    ranks.run(tune_and_compare, profile=known())


# Errors


Case = tuple[dict[str, Any], dict[int, dict[str, Any]]]
"""Wrong arguments on all ranks, and by rank."""


def failures_in(cases: list[Case]) -> list[Failure | None]:
    """The exception of this rank in each case."""
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
    ({"global_batch": 0}, "global_batch must be an integer above 0, got 0"),
    ({"global_batch": -4}, "global_batch must be an integer above 0, got -4"),
    ({"global_batch": True}, "global_batch must be an integer above 0, got True"),
    ({"global_batch": 8.0}, "global_batch must be an integer above 0, got 8.0"),
    ({"global_batch": "8"}, "global_batch must be an integer above 0, got '8'"),
    ({"policy": "best"}, "policy must be one of exact, .*, got 'best'"),
    ({"stage": 4}, r"stages must be a non-empty subset of \(0, 1, 2, 3\), got \(4,\)"),
    ({"stage": "fastest"}, "stages must be a non-empty subset of .*, got .*fastest"),
    ({"max_batch": 0}, "max_batch must be an integer above 0, got 0"),
    ({"seconds": 0}, "seconds must be a finite number above 0, got 0"),
    ({"seconds": math.inf}, "seconds must be a finite number above 0, got inf"),
    ({"seconds": math.nan}, "seconds must be a finite number above 0, got nan"),
    ({"seconds": "60"}, "seconds must be a finite number above 0, got '60'"),
    ({"max_norm": -1.0}, "max_norm must be a number above 0, or None .*, got -1.0"),
    ({"max_norm": math.nan}, "max_norm must be a number above 0, or None .*, got nan"),
    ({"length_quantile": 7}, "length_quantile must be above 0 and below 1, got 7"),
    ({"cache": None}, "cache must be True, False or a folder, got None"),
]


def test_unknown_arguments_and_those_of_the_optimizer_raise(ranks: Pool):
    cases: list[Case] = [({"polcy": "even"}, {}), ({"params": [{"params": [], "lr": 1.0}]}, {})]
    for failures in ranks.run(failures_in, cases):
        for failure, message in zip(
            failures, ("'polcy'", "params= is for the optimizer"), strict=True
        ):
            assert failure is not None
            assert failure.is_a(TypeError), failure
            assert message in failure.message


def test_invalid_argument_on_one_rank_raises_on_all_ranks(ranks: Pool):
    cases = [({}, {2: options}) for options, _ in BAD_ARGUMENTS]
    answers = zip(*ranks.run(failures_in, cases), strict=True)
    for failures, (_, message) in zip(answers, BAD_ARGUMENTS, strict=True):
        for rank, failure in enumerate(failures):
            assert failure.is_a(ValueError if rank == 2 else poplar.RankFailed), failure
            assert re.search(message, failure.message), failure
            assert rank == 2 or "rank 2: ValueError" in failure.message


def test_different_arguments_on_ranks_raise(ranks: Pool):
    differing = {
        "global_batch": {"global_batch": 16},
        "policy": {"policy": "even"},
        "verify": {"verify": True},
        "profile": {"profile": known((1.0, 2.0, 3.0, 4.0))},
    }
    cases = [({"max_batch": 4}, {1: options}) for options in differing.values()]
    cases += [({"max_batch": 4}, {1: {"profile": None}})]
    expected = [
        rf"the ranks disagree on the {what}: rank 0 has .*, rank\(s\) \[1\] have "
        for what in [*differing, "profile"]
    ]
    assert_all_raise(ranks, cases, expected)


def test_no_plan_fits_names_rank_and_bytes(ranks: Pool):
    case = {"profile": None, "max_batch": 2, "leave_out": "never"}, {2: {"memory_limit": 1000}}
    (failures,) = assert_all_raise(ranks, [case], ["rank 2 .* needs at least .* too little"])
    assert all(failure.is_a(poplar.NoPlanFits) for failure in failures)


def suggestions_for_muon() -> tuple[str, ...]:
    """What is suggested where stage 2 does not fit, and stage 3 would."""
    devices = [clusters.device(memory=memory * 10**6) for memory in (200, 66)]
    cluster = clusters.cluster_of(*devices)
    with pytest.raises(NoPlanFits) as none_fits:
        alternatives(cluster, global_batch=4, stages=(2,), policy="even", leave_out="never")
    assert none_fits.value.suggestions[0] == "stage 3"
    with (
        mock.patch.object(Tuner, "tune", side_effect=none_fits.value),
        pytest.raises(NoPlanFits) as caught,
    ):
        tuned(torch.nn.Linear(2, 2, bias=False), optimizer_class=torch.optim.Muon)
    return caught.value.suggestions


def test_only_stages_at_which_the_optimizer_can_train_are_suggested(ranks: Pool):
    for suggestions in ranks.run(suggestions_for_muon, ranks=2):
        assert suggestions[0] == "policy exact at stage 2"


def test_profile_of_another_job_raises(ranks: Pool, measured):
    def measured_with(**entries: str) -> dict[str, Any]:
        return {"profile": replace(measured, identity={**measured.identity, **entries})}

    wider = models.build(replace(SMALL, hidden=67))
    refused = [
        ({"model": wider}, "another model: measured 'Perceptron .*', here 'Perceptron "),
        ({"compute_dtype": torch.bfloat16}, "another compute dtype: measured 'as the model is'"),
        ({"reduce_dtype": torch.bfloat16}, "another reduce dtype: measured 'torch.float32'"),
        (
            {"optimizer_class": torch.optim.SGD},
            "another optimizer: measured .*AdamW.* here .*SGD.*",
        ),
        ({"amsgrad": True}, "another optimizer: measured"),
        (measured_with(device="Another 9000"), "another device: measured 'Another 9000', here"),
        (measured_with(cores="99"), "another number of cores: measured '99', here"),
        (measured_with(quota="0.5"), "another quota: measured '0.5', here"),
        (measured_with(threads="99"), "another number of threads: measured '99', here '"),
        (measured_with(backend="nccl"), "another backend: measured 'nccl', here 'gloo'"),
    ]
    assert_all_raise(
        ranks,
        [({"profile": measured, **options}, {}) for options, _ in refused],
        [f"{message}.*; measure again with profile_cluster" for _, message in refused],
    )


def test_profile_of_another_world_size_raises(ranks: Pool, measured):
    message = "the profile is of 4 ranks, but there are 2; measure again with profile_cluster"
    assert_all_raise(ranks, [({"profile": measured}, {})], [message], size=2)


# Decisions of the tuner


class Session:
    """Replaces the session of a profiler: one process acts for all ranks."""

    def __init__(self, size: int) -> None:
        self.group = SimpleNamespace(rank=0, size=size)
        self.control = SimpleNamespace(
            group=self.group,
            exchange=lambda values, what: lambda: [values] * size,
            exchange_objects=lambda value, what: [value] * size,
        )
        self.memory_limit = None
        self.identity: dict[str, str] = {}
        self.asynchronous = False
        self.measuring = contextlib.nullcontext

    def exchange(self, value: Any) -> list[Any]:
        return [value] * self.group.size

    def from_first_rank(self, value: Any) -> Any:
        return value

    def on_first_rank(self, work: Any, doing: str) -> Any:
        return work()


class Bench:
    """Replaces profiler and cache: steps take what the `true` cluster predicts, nothing runs."""

    show = False

    def __init__(self, known: ClusterProfile, true: ClusterProfile, stages: Sequence[int]) -> None:
        self.known, self.true = known, true
        self.profiler = self
        self.session = Session(known.world_size)
        self.stages, self.seconds = stages, 60.0
        self.plans: dict[str, Plan] = {}
        self.tried: list[Plan] = []
        self.seen: list[Plan] = []
        self.measured: list[tuple[list[tuple[int, ...]], list[int]]] = []
        """Batches that were measured, and the batches of their references, by rank."""
        self.saved: list[tuple[ClusterProfile, dict[str, Plan]]] = []

    def profile(self) -> ClusterProfile:
        return self.known

    def within_present_memory(self, profile: ClusterProfile) -> ClusterProfile:
        return profile

    def use(self, profile: ClusterProfile) -> None:
        """The model that runs fits whole on each rank, whatever the profile says."""

    def save(self, profile: ClusterProfile) -> None:
        self.saved.append((profile, dict(self.plans)))

    def run_plan(self, plan: Plan, *, steps: int, report: Any) -> Observation:
        if plan not in self.tried:
            self.tried.append(plan)
        return self._observation(plan)

    def measure_points(
        self, batches: Sequence[tuple[int, ...]], references: Sequence[BatchPoint]
    ) -> list[list[BatchPoint]]:
        assert not self.seen, "planned batches are measured before any plan runs"
        self.measured.append((list(batches), [point.batch for point in references]))
        return [
            [
                device.point(batch).times(known.seconds / device.seconds(known.batch))
                for batch in own
            ]
            for own, known, device in zip(batches, references, self.true.devices, strict=True)
        ]

    def _observation(self, plan: Plan) -> Observation:
        self.seen.append(plan)
        costs = StageCosts(self.true, plan.stage)
        return Observation(
            plan=plan,
            step_seconds=predict(self.true, plan).step_seconds,
            pass_seconds=tuple(
                tuple(costs.pass_seconds(rank, size) for size in sizes if size)
                for rank, sizes in enumerate(plan.micro_batches)
            ),
            other_seconds=tuple(d.step_overhead_seconds[plan.stage] for d in self.true.devices),
        )

    def tune(
        self, given: ClusterProfile | None = None, *, global_batch: int = 40, **options: Any
    ) -> Tuned:
        job = TuningJob.of(
            nn.Linear(1, 1),
            lambda model, batch: batch,
            (),
            global_batch=global_batch,
            stages=self.stages,
            seconds=self.seconds,
            loss="sum",  # no warning: the model cannot run
            profile=given,
            **options,
        )
        return Tuner(self, job).tune()  # type: ignore[arg-type]


def behind_a_link(seconds: float) -> ClusterProfile:
    """Three ranks; the last one takes so long to send or to receive the model."""
    rates = (0.01, 0.01, seconds)
    network = NetworkProfile(
        reduce_scatter_seconds=seconds * 2 / 3,
        all_gather_seconds=seconds * 2 / 3,
        send_seconds_per_byte=rates,
        receive_seconds_per_byte=rates,
    )
    return known((40.0, 40.0, 40.0), network=network)


@pytest.mark.parametrize(("true", "left_out"), [(30.0, (2,)), (0.01, ())])
def test_a_rank_is_left_out_if_that_is_faster_in_trials(true, left_out):
    bench = Bench(behind_a_link(30.0), behind_a_link(true), (1,))
    decided = bench.tune()
    assert decided.plan.left_out == left_out
    assert {plan.left_out for plan in bench.tried} == {(), (2,)}
    assert [*bench.saved[-1][1].values()] == [decided.plan]
    bench = Bench(behind_a_link(30.0), behind_a_link(true), (1,))
    assert bench.tune(leave_out="never").plan.left_out == ()


def that_encodes(cluster: ClusterProfile) -> ClusterProfile:
    codec = (1e-12,) * 3
    return cluster.with_devices(
        lambda device: replace(device, encode_seconds=codec, decode_seconds=codec)
    )


@pytest.mark.parametrize(("true", "precision"), [(30.0, "int4"), (0.01, "exact")])
def test_fewer_bits_are_sent_if_that_is_faster_in_trials(true, precision):
    both = (that_encodes(behind_a_link(seconds)) for seconds in (30.0, true))
    bench = Bench(*both, (1,))
    decided = bench.tune(leave_out="never", communication="auto")
    assert decided.plan.communication == Communication.of(precision, 1)
    assert {plan.communication.gradients for plan in bench.tried} == {"exact", "int4"}
    assert [*bench.saved[-1][1].values()] == [decided.plan]


def test_fewer_bits_are_sent_if_no_exact_plan_fits_after_the_trials():
    """In less memory than the profile has, because a plan ran out of it."""
    cluster = that_encodes(behind_a_link(30.0))
    bench = Bench(cluster, cluster, (1,))
    with pytest.raises(NoPlanFits) as none_fits:
        alternatives(with_memory(known(), 0, 1.0), global_batch=40, leave_out="never")
    with (
        mock.patch.object(autotune, "search", side_effect=none_fits.value),
        pytest.warns(UserWarning, match="no plan with exact communication fits"),
    ):
        decided = bench.tune(communication="auto")
    assert decided.plan.communication == Communication.of("int4", 1)


class NoisyBench(Bench):
    """Every measurement of this bench is disturbed, also to values that no device can have."""

    def __init__(self, known: ClusterProfile, stages: Sequence[int], noise: random.Random) -> None:
        super().__init__(known, known, stages)
        self._noise = noise

    def measure_points(
        self, batches: Sequence[tuple[int, ...]], references: Sequence[BatchPoint]
    ) -> list[list[BatchPoint]]:
        return [
            [point.times(self._factor()) for point in own]
            for own in super().measure_points(batches, references)
        ]

    def _observation(self, plan: Plan) -> Observation:
        seen = super()._observation(plan)
        self.seen.clear()
        return replace(
            seen,
            step_seconds=seen.step_seconds * self._factor(),
            pass_seconds=tuple(
                tuple(self._time() if self._noise.random() < 0.3 else s for s in own)
                for own in seen.pass_seconds
            ),
            other_seconds=tuple(self._noise.uniform(-1.0, 1.0) for _ in seen.other_seconds),
        )

    def _factor(self) -> float:
        return 10.0 ** self._noise.uniform(-3.0, 3.0)

    def _time(self) -> float:
        return self._noise.choice([0.0, 1e-9, 10.0 ** self._noise.uniform(-6.0, 2.0)])


@settings(max_examples=choose(quick=5, full=25), deadline=None)
@given(noise=st.randoms(use_true_random=False), asynchronous=st.booleans())
def test_no_noise_makes_tuning_fail(noise, asynchronous):
    """Nor does it give anything but a valid profile, which checks all of its times."""
    bench = NoisyBench(in_powers_of_two(in_steps(8, 3)), STAGES, noise)
    bench.session.asynchronous = asynchronous
    decided = bench.tune(global_batch=noise.choice([5, 42]))
    assert 0.0 < predict(decided.profile, decided.plan).step_seconds < float("inf")
    assert ClusterProfile.from_dict(decided.profile.to_dict()) == decided.profile


def with_step_seconds(cluster: ClusterProfile, by_stage: tuple[float, ...]) -> ClusterProfile:
    return replace(cluster, network=replace(cluster.network, step_seconds=by_stage))


def at_speeds(cluster: ClusterProfile, factors: Sequence[float]) -> ClusterProfile:
    """Scale the times of each rank by a factor."""
    return replace(
        cluster,
        devices=tuple(
            replace(d, points=tuple(replace(p, seconds=factor * p.seconds) for p in d.points))
            for factor, d in zip(factors, cluster.devices, strict=True)
        ),
    )


def predicted_order(cluster: ClusterProfile) -> list[int]:
    return [plan.stage for plan in alternatives(cluster, global_batch=40)]


def test_best_plans_of_two_stages_are_timed():
    bench = Bench(thorough(known()), known(), STAGES)
    decided = bench.tune()
    assert [plan.stage for plan in bench.tried] == predicted_order(known())[:2]
    assert bench.measured == []
    assert decided.plan == bench.tried[0]


def test_fastest_measured_plan_wins_over_fastest_predicted_plan():
    first, second, *_ = predicted_order(known())
    slower = tuple(0.03 if stage == first else 0.0 for stage in STAGES)
    bench = Bench(known(), with_step_seconds(known(), slower), STAGES)
    assert bench.tune().plan.stage == second


class ShortBench(Bench):
    """Plans run out of memory if they do not fit on the `true` cluster, or are of `short_stage`."""

    short_stage: int | None = None

    def run_plan(self, plan: Plan, *, steps: int, report: Any) -> Observation:
        if plan.stage == self.short_stage or not fits(self.true, plan):
            raise OutOfMemoryInTrial(str(plan), [0])
        return super().run_plan(plan, steps=steps, report=report)


def with_memory(cluster: ClusterProfile, rank: int, memory: float) -> ClusterProfile:
    return cluster.with_devices(lambda d: replace(d, memory_bytes=round(memory)), [rank])


@pytest.mark.parametrize("missing", [0.03, 0.08])
def test_plans_that_run_out_of_memory_are_replaced(missing):
    best = alternatives(known(), global_batch=40, stages=(3,))[0]
    needed = best.prediction["memory_bytes"][0] / (1.0 - known().memory_reserve)
    profiled = with_memory(known(), 0, 1.001 * needed)
    true = with_memory(known(), 0, (1.0 - missing) * needed)
    bench = ShortBench(profiled, true, [3])
    assert not fits(true, alternatives(profiled, global_batch=40, stages=(3,))[0])
    assert fits(true, bench.tune().plan)


def test_a_plan_of_a_stage_that_ran_out_of_memory_joins_with_fewer_samples():
    """A much slower stage, whose plan fits, does not win because it was the only one left."""
    slow = with_step_seconds(known(), (0.0, 0.0, 0.0, 1.0))
    first, *_, last = alternatives(slow, global_batch=40, stages=(1, 3))
    assert (first.stage, last.stage) == (1, 3)
    needed = [plan.prediction["memory_bytes"][0] for plan in (first, last)]
    in_all = 1.0 - slow.memory_reserve
    profiled = with_memory(slow, 0, 1.001 * needed[0] / in_all)
    true = with_memory(slow, 0, sum(needed) / 2 / in_all)
    assert fits(profiled, first)
    assert not fits(true, first)
    assert fits(true, last)
    bench = ShortBench(profiled, true, [1, 3])
    decided = bench.tune()
    assert decided.plan.stage == 1
    assert fits(decided.profile, decided.plan)
    assert {plan.stage for plan in bench.tried} == {1, 3}


def test_a_plan_that_runs_is_chosen_if_none_fits_in_less_memory():
    """Less than the profile has, because another plan ran out of memory."""
    with pytest.raises(NoPlanFits) as none_fits:
        alternatives(with_memory(known(), 0, 1.0), global_batch=40, leave_out="never")
    first, last, *_ = alternatives(known(), global_batch=40)
    searches = mock.Mock(side_effect=[(first, last), *[none_fits.value] * 9])
    bench = ShortBench(thorough(known()), known(), STAGES)
    bench.short_stage = first.stage
    with mock.patch.object(autotune, "alternatives", searches):
        assert bench.tune(leave_out="never").plan == last
    assert searches.call_count > 1


def test_no_plan_is_chosen_if_all_run_out_of_memory():
    bench = ShortBench(known(), with_memory(known(), 0, 1.0), [0])
    with pytest.raises((torch.OutOfMemoryError, NoPlanFits)):
        bench.tune()


def least_memory(stage: int) -> ClusterProfile:
    """Rank 0 has only enough memory to take part."""
    for size in range(1 << 20, 1 << 30, 1 << 20):
        cluster = with_memory(known(), 0, size)
        with contextlib.suppress(NoPlanFits):
            alternatives(cluster, global_batch=40, stages=(stage,), leave_out="never")
            return cluster
    raise AssertionError("no plan fits")


class ShortWithAllRanks(Bench):
    """Plans of all ranks run out of memory on rank 0."""

    def run_plan(self, plan: Plan, *, steps: int, report: Any) -> Observation:
        if not plan.left_out:
            raise OutOfMemoryInTrial(str(plan), [0])
        return super().run_plan(plan, steps=steps, report=report)


@pytest.mark.parametrize("stage", STAGES[:3])
def test_a_plan_that_leaves_ranks_out_runs_if_the_others_ran_out_of_memory(stage):
    cluster = least_memory(stage)
    bench = ShortWithAllRanks(cluster, cluster, [stage])
    decided = bench.tune()
    assert decided.plan.left_out == (0,)
    seen = [each for each in decided.observations if each.plan == decided.plan]
    step = decided.plan.prediction["step_seconds"]
    assert step == pytest.approx(seen[0].step_seconds)
    assert decided.profile.network == cluster.network


class RefusingBench(Bench):
    """Some plans fail on all ranks in a trial."""

    def __init__(self, refuses: Callable[[Plan], bool], *, is_agreed: bool = True) -> None:
        super().__init__(known(), known(), STAGES)
        self._refuses, self._is_agreed = refuses, is_agreed
        self.refused: list[Plan] = []

    def run_plan(self, plan: Plan, *, steps: int, report: Any) -> Observation:
        if self._refuses(plan):
            self.refused.append(plan)
            error = ValueError(f"plan {len(self.refused)} cannot run")
            raise agreed(error) if self._is_agreed else error
        return super().run_plan(plan, steps=steps, report=report)


@pytest.mark.parametrize("place", [0, 1])
def test_a_plan_that_fails_on_all_ranks_is_dropped(place):
    stage = predicted_order(known())[place]
    bench = RefusingBench(lambda plan: plan.stage == stage)
    assert bench.tune().plan.stage == predicted_order(known())[1 - place]
    assert len(bench.refused) == len(set(bench.refused)) > 0


def test_the_error_is_raised_if_no_plan_can_run():
    bench = RefusingBench(lambda plan: True)
    with pytest.raises(ValueError, match="cannot run"):
        bench.tune()
    assert 1 < len(bench.refused) <= autotune.CONTENDERS


def test_an_error_that_leaves_other_ranks_in_a_step_is_raised_at_once():
    bench = RefusingBench(lambda plan: True, is_agreed=False)
    with pytest.raises(ValueError, match="plan 1 cannot run"):
        bench.tune()


WIDE = 256
PENALTY = 1e-4


def layered() -> ClusterProfile:
    """Two equal ranks behind links of 1 Gbit/s, on which all plans send both layers as factors."""
    layers = tuple(
        LinearLayer(name=name, unit=0, outputs=WIDE, inputs=WIDE, rows_per_sample=1)
        for name in ("0", "2")
    )
    numel, rate = sum(layer.numel for layer in layers), 8e-9
    whole = 4 * numel / 2 * rate
    return clusters.cluster_of(
        *[clusters.device(name="CPU", sample=0.001)] * 2,
        model=ModelProfile(unit_numels=(numel + 2 * WIDE,), linear_layers=layers),
        network=clusters.network_of((rate,) * 2, whole, whole),
    )


def tuned_with_layers(penalty: float, threads: Sequence[int], **options: Any) -> Tuned:
    """Of a loss that may also use a weight, on ranks with these numbers of threads."""
    model = nn.Sequential(nn.Linear(WIDE, WIDE), nn.Tanh(), nn.Linear(WIDE, WIDE))

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).square().mean() + penalty * model[0].weight.norm()

    before = torch.get_num_threads()
    torch.set_num_threads(threads[harness.rank()])
    try:
        return poplar.tune(
            model,
            loss,
            torch.ones(2, WIDE),
            global_batch=8,
            profile=layered(),
            weight=len,
            process_group=harness.group(),
            seconds=0.1,
            progress=False,
            **options,
        )
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("penalty", "threads", "stage"), [(PENALTY, (1, 1), "auto"), (0.0, (1, 2), 0)]
)
def test_plans_without_factors_run_where_those_with_factors_cannot(
    ranks: Pool, penalty, threads, stage
):
    stages = STAGES if stage == "auto" else (stage,)
    predicted = alternatives(layered(), global_batch=8, stages=stages, leave_out="never")
    assert all(plan.factored for plan in predicted[: autotune.CANDIDATES])
    for answer in ranks.run(tuned_with_layers, penalty, threads, stage=stage, ranks=2):
        assert not answer.plan.factored
        assert {seen.plan.factored for seen in answer.observations} == {()}


def fails_on_one_rank() -> None:
    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        if harness.rank() == 1:
            raise KeyError("in the loss")
        return models.mean_over_samples(model, batch)

    tuned(loss=loss, profile=known())


def test_an_error_of_the_loss_ends_the_trials_on_all_ranks(ranks: Pool):
    for rank, failure in enumerate(ranks.run_expecting_errors(fails_on_one_rank)):
        assert failure.is_a(KeyError if rank == 1 else poplar.RankFailed), failure
        assert "in the loss" in failure.message


class Lucky(Bench):
    """The second plan is faster in its first turn only."""

    def _observation(self, plan: Plan) -> Observation:
        seen = super()._observation(plan)
        first_time = len(self.seen) == 2
        return replace(seen, step_seconds=0.97 * seen.step_seconds) if first_time else seen


def test_one_fast_turn_does_not_decide():
    best, lucky = predicted_order(known())[:2]
    slower = tuple(0.005 if stage == lucky else 0.0 for stage in STAGES)
    bench = Lucky(known(), with_step_seconds(known(), slower), STAGES)
    assert bench.tune().plan.stage == best
    turns = [plan.stage for plan in bench.seen]
    assert turns[:4] == [best, lucky, lucky, best]  # the order alternates
    assert turns.count(best) == turns.count(lucky) == autotune.TURNS


class Warming(Bench):
    """Each turn is slower than the one before, as on devices that become hot."""

    def _observation(self, plan: Plan) -> Observation:
        seen = super()._observation(plan)
        heat = 1.0 + 0.1 * (len(self.seen) // 2)
        return replace(
            seen,
            step_seconds=heat * seen.step_seconds,
            pass_seconds=tuple(tuple(heat * took for took in own) for own in seen.pass_seconds),
        )


def test_late_plan_can_win_on_devices_that_become_slower():
    """The best plan is found only after the first turn has shown the present speeds."""
    changed = at_speeds(known(), [0.93, 1.06, 1.0, 0.9])
    bench = Warming(known(), changed, [1])
    decided = bench.tune()
    assert len(set(bench.seen)) > 1
    first, best = (predict(changed, plan).step_seconds for plan in (bench.seen[0], decided.plan))
    assert best < first
    assert bench.seen.count(decided.plan) >= autotune.LEAST_TURNS


class Alternating(Bench):
    """Passes of rank 0 take longer in every second run of a plan; its steps do not."""

    def _observation(self, plan: Plan) -> Observation:
        seen = super()._observation(plan)
        slower = 1.2 if self.seen.count(plan) % 2 else 1.0
        first, *others = seen.pass_seconds
        return replace(seen, pass_seconds=(tuple(slower * took for took in first), *others))


def test_interval_includes_speeds_that_changed_while_the_steps_did_not():
    steady, changing = (kind(thorough(known()), known(), [0]) for kind in (Bench, Alternating))
    half = {}
    for bench in (steady, changing):
        low, high = bench.tune().plan.prediction["step_interval"]
        half[bench] = (high - low) / (high + low)
    assert half[steady] < 0.02 < 0.05 < half[changing]


def test_clearly_slower_plan_is_dropped_after_one_turn():
    first, second, *_ = predicted_order(known())
    slower = tuple(0.3 if stage == second else 0.0 for stage in STAGES)
    bench = Bench(known(), with_step_seconds(known(), slower), STAGES)
    assert bench.tune().plan.stage == first
    turns = [plan.stage for plan in bench.seen]
    assert turns.count(second) == 1
    assert turns.count(first) == autotune.LEAST_TURNS  # without rivals


def test_plan_on_measured_batches_is_tried_after_those_of_two_stages(monkeypatch):
    """Time is up before the planned batches are measured."""
    monkeypatch.setattr(autotune, "ROUNDS", 0)
    cluster = luring(straight_lines(200.0, 100.0, 100.0))
    bench = Bench(cluster, cluster, STAGES)
    bench.tune(global_batch=97)
    assert bench.measured == []
    assert len({plan.stage for plan in bench.tried[:2]}) == 2
    assert len(bench.tried) == autotune.CONTENDERS


def straight_lines(*speeds: float) -> ClusterProfile:
    """Ranks with exactly these samples per second and almost no communication."""
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


def luring(cluster: ClusterProfile) -> ClusterProfile:
    """Noise made 12 samples look 8 % faster than they are."""
    return cluster.with_devices(
        lambda d: replace(d, points=(d.points[0], d.point(12).times(0.92), d.points[-1]))
    )


@pytest.mark.parametrize("stage", STAGES)
def test_plan_with_many_passes_must_beat_a_simpler_plan(stage):
    true = straight_lines(200.0, 100.0, 100.0)
    true = with_residuals(true, stage, overhead=0.002)
    bench = Bench(luring(true), true, [stage])
    decided = bench.tune(global_batch=96)
    assert max(map(len, bench.seen[0].micro_batches)) > 1
    assert [len(sizes) for sizes in decided.plan.micro_batches] == [1, 1, 1]
    assert decided.plan.shares == pytest.approx([1 / 3] * 3)


def with_residuals(cluster: ClusterProfile, stage: int, *, overhead: float) -> ClusterProfile:
    """With this overhead of every pass."""
    overheads = tuple(overhead if other == stage else 0.0 for other in STAGES)
    return cluster.with_devices(lambda d: replace(d, pass_overhead_seconds=overheads))


def test_prediction_of_the_plan_equals_its_observation():
    true = with_step_seconds(known(), (0.3, 0.2, 0.1, 0.4))
    decided = Bench(known(), true, STAGES).tune()
    costs = StageCosts(true, decided.plan.stage)
    ran = costs.step_seconds(decided.plan.micro_batches, decided.plan.shares)
    assert decided.plan.prediction["step_seconds"] == pytest.approx(ran)
    assert predict(decided.profile, decided.plan).step_seconds == pytest.approx(ran)


def ends_of(cluster: ClusterProfile) -> ClusterProfile:
    """The cluster with the first and the last point of every rank."""
    return cluster.with_devices(lambda d: replace(d, points=(d.points[0], d.points[-1])))


def in_steps(*sizes: int) -> ClusterProfile:
    """Ranks whose pass times grow at multiples of these sizes, up to 64 samples."""
    equal = straight_lines(*[100.0] * len(sizes))
    return replace(
        equal,
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
            for device, size in zip(equal.devices, sizes, strict=True)
        ),
    )


def in_powers_of_two(cluster: ClusterProfile) -> ClusterProfile:
    """Only the points that a profile has."""
    return cluster.with_devices(
        lambda d: replace(d, points=tuple(p for p in d.points if p.batch.bit_count() == 1))
    )


@pytest.mark.parametrize("stage", STAGES)
def test_planned_batches_are_measured_before_trial_runs(stage):
    """21 samples per rank are interpolated at two thirds of 32, but take as long as 24."""
    true = in_steps(8, 8)
    bench = Bench(in_powers_of_two(true), true, [stage])
    decided = bench.tune(global_batch=42)
    assert bench.measured[0] == ([(21,), (21,)], [16, 16])
    assert len(bench.measured) <= autotune.ROUNDS
    best = alternatives(true, global_batch=42, stages=(stage,))[0]
    seconds = [predict(true, plan).step_seconds for plan in (decided.plan, best)]
    assert seconds[0] == pytest.approx(seconds[1], rel=0.01)
    for device in decided.profile.devices:
        assert 21 in [point.batch for point in device.points]


def test_ranks_without_new_batches_run_their_reference():
    true = in_steps(8, 1)
    first, second = in_powers_of_two(true).devices[0], true.devices[1]
    measured = replace(true, devices=(first, second))
    bench = Bench(measured, true, [0])
    bench.tune(global_batch=42)
    (batches, references), *_ = bench.measured
    assert batches[0]
    assert not {*batches[0]} & {point.batch for point in first.points}
    assert batches[1] == ()
    assert references[0] in [point.batch for point in first.points]
    (plan,) = alternatives(measured, global_batch=42, stages=[0])
    assert references[1] == max(plan.micro_batches[1])


@pytest.mark.parametrize(
    ("policy", "seconds", "verify"),
    [("even", 60.0, True), ("paper", 60.0, True), ("exact", 0.0, True), ("exact", 60.0, False)],
)
def test_no_batches_are_measured_without_need(policy, seconds, verify):
    true = in_steps(8, 8)
    bench = Bench(in_powers_of_two(true), true, [0])
    bench.seconds = seconds
    bench.tune(global_batch=42, policy=policy, verify=verify)
    assert bench.measured == []


@pytest.mark.parametrize("stage", STAGES)
def test_changed_speeds_of_ranks_change_the_plan(stage):
    changed = at_speeds(known(), [0.93, 1.06, 1.0, 0.9])
    bench = Bench(known(), changed, [stage])
    decided = bench.tune()
    best = alternatives(changed, global_batch=40, stages=(stage,))[0]
    fastest = predict(changed, best).step_seconds
    assert predict(changed, decided.plan).step_seconds <= 1.005 * fastest
    assert predict(changed, bench.tried[0]).step_seconds > 1.01 * fastest


def thorough(cluster: ClusterProfile) -> ClusterProfile:
    """With a point for every batch of every rank."""
    return cluster.with_devices(
        lambda d: replace(d, points=tuple(map(d.point, range(1, d.max_batch + 1))))
    )


def test_planned_batch_that_does_not_fit_when_measured_is_not_planned():
    limit = 128 * 2**20

    def greedy(device: DeviceProfile) -> DeviceProfile:
        points = (
            replace(point, activation_bytes=limit * 2 if point.batch > 1 else 2**20)
            for point in device.points
        )
        return replace(device, memory_bytes=limit, points=tuple(points))

    tight = ends_of(known()).with_devices(lambda d: replace(d, memory_bytes=limit))
    bench = Bench(tight, thorough(known()).with_devices(greedy), [0])
    decided = bench.tune()
    predict(decided.profile, decided.plan)
    assert decided.plan in bench.tried


def test_given_profiles_and_unverified_plans_are_not_saved():
    bench = Bench(known(), known(), STAGES)
    bench.tune(given=known())
    bench.tune(verify=False)
    assert bench.saved == []


# A rank is lost


TIMEOUT = timedelta(seconds=10)
LOST = 1


def profile_until(moment: str) -> Failure | None:
    calls = 0

    def lose_one(model: nn.Module, batch: Any) -> Tensor:
        nonlocal calls
        calls += 1
        in_a_step = any(frame.name == "train_step" for frame in traceback.extract_stack())
        if harness.rank() == LOST and (in_a_step if moment == "a step" else calls == 5):
            os.kill(os.getpid(), signal.SIGKILL)
        return models.mean_over_samples(model, batch)

    with harness.catching() as caught:
        tuned(loss=lose_one, stage=2, max_batch=2, timeout=TIMEOUT)
    return (caught or [None])[0]


@pytest.mark.parametrize("moment", ["a plain pass", "a step"])
def test_lost_rank_is_named(moment):
    answers = one_off(3, profile_until, moment, lost=[LOST])
    for rank in {0, 1, 2} - {LOST}:
        failure = answers[rank]
        assert failure is not None, f"rank {rank} has a plan without rank {LOST}"
        assert failure.is_a(poplar.CollectiveTimeout), failure
        assert re.search(rf"rank(\(s\))? (\d+, )*{LOST}\b", failure.message), failure
