"""Profiling preserves the model, gives all ranks the same profile, and checks its arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import models
import pytest
import ranks as harness
import torch
from models import ModelSpec
from ranks import Pool, RanksFailed
from records import cluster
from subset import choose
from torch import Tensor, nn
from training import STAGES, ModelState

import poplar
from poplar import ClusterProfile, Plan
from poplar.comm import Group, host_topology
from poplar.profiler import batch_sizes, cluster_profiler, collectives, overlap, trial_runs
from poplar.profiler import session as sessions
from poplar.profiler.batch_curves import TIMES_EACH, measure_curves, measure_points
from poplar.profiler.job import Job
from poplar.profiler.memory import model_bytes, pass_bytes
from poplar.profiler.model_profile import model_profile
from poplar.profiler.session import Session
from poplar.profiler.timing import SHORTEST_SAMPLE_SECONDS
from poplar.profiler.trial_runs import PLAIN_PASSES, STEPS, measure_slowdowns
from poplar.step.units import StepUnits
from poplar.system import devices
from poplar.values.errors import RankFailed
from poplar.values.observation import Observation
from poplar.zero import unit
from poplar.zero.checks import model_checks

QUICK = {"seconds": 0.5, "max_batch": 8, "progress": False}


def batch(samples: int = 3) -> dict[str, Tensor]:
    return models.data(samples, seed=1)


def profiled(
    model: nn.Module | None = None, example: Any = None, loss: Any = None, **options: Any
) -> ClusterProfile:
    # On a busy machine, a pass may take longer than all of this short budget.
    with mock.patch.object(batch_sizes, "LONGEST_PASS", 100.0):
        return poplar.profile_cluster(
            model if model is not None else models.build(ModelSpec()),
            loss if loss is not None else models.mean_over_samples,
            example if example is not None else batch(),
            process_group=harness.group(),
            **{**QUICK, "cache": False, **options},
        )


def profile_and_compare(stages: tuple[int, ...]) -> None:
    model = models.Stateful()
    weight = model.inner.embedding.weight
    weight.grad = torch.full_like(weight, 3.0)
    before = ModelState.of(model)
    profiled(model, stages=stages, max_batch=4)
    before.assert_same(ModelState.of(model))


def test_profiling_preserves_the_model(ranks: Pool):
    ranks.run(profile_and_compare, STAGES)


def profile_as_dict() -> dict[str, Any]:
    return profiled().to_dict()


@pytest.fixture(scope="module")
def profiles(ranks: Pool) -> list[dict[str, Any]]:
    """What each rank gets."""
    return ranks.run(profile_as_dict)


def test_all_ranks_get_the_same_profile(profiles: list[dict[str, Any]], tmp_path: Path):
    first, *others = profiles
    assert others == [first] * 3
    profile = ClusterProfile.from_dict(first)
    assert [point.batch for point in profile.devices[0].points] == [1, 2, 4, 8]
    assert profile.devices[0].points[-1].activation_bytes > profile.devices[0].points[0].batch
    assert all("threads" in device.multiplication for device in profile.devices)
    assert profile.model.optimizer_bytes == 8.0
    assert len(profile.model.unit_forward_fraction) == len(profile.model.unit_numels)
    assert sum(profile.model.unit_backward_fraction) == pytest.approx(profile.backward_fraction)
    assert profile.model.numel >= sum(p.numel() for p in models.build(ModelSpec()).parameters())
    profile.to_json(tmp_path / "profile.json")
    assert ClusterProfile.from_json(tmp_path / "profile.json") == profile


def profile_between_hosts() -> float:
    """The overlap that this rank gets; the profile leaves the model as it is."""
    host = {"host_id": mock.Mock(return_value=(str(harness.rank()),))}
    timed = mock.Mock(wraps=overlap.seconds_of)
    with (
        mock.patch.multiple(host_topology, **host),
        mock.patch.multiple(collectives, **host),
        mock.patch.multiple(overlap, LEAST_PART=0.0, seconds_of=timed),
        mock.patch.multiple(cluster_profiler, OVERLAP=100.0),  # time for all rounds
    ):
        profile_and_compare((1,))
        found = profiled(stages=(1,)).overlap
    assert timed.call_count == 2 * 3 * overlap.ROUNDS
    return found


def test_overlap_is_measured_between_hosts(ranks: Pool):
    first, *others = ranks.run(profile_between_hosts)
    assert others == [first] * 3
    assert 0.0 <= first <= 1.0


def watched_session(
    spec: ModelSpec | None = None, units: Sequence[str] | None = None
) -> tuple[Session, list[int]]:
    """A session, and a list of the batches that passes on this rank run with."""
    ran: list[int] = []

    def loss(model: nn.Module, batch: Any) -> Tensor:
        ran.append(len(batch["tokens"]))
        return models.mean_over_samples(model, batch)

    job = Job(
        model=models.build(spec or ModelSpec(blocks=1)),
        loss_fn=loss,
        example=batch(),
        max_batch=8,
        stages=(0,),
        seconds=0.3,
        max_norm=None,
        units=units,
        process_group=harness.group(),
    )
    return Session(job, Group.of(job.process_group, job.timeout)), ran


def buffers_of_units(max_flat_bytes: int) -> tuple[list[StepUnits], list[tuple[Any, int]]]:
    """At each stage, the units of a step by the profile, and the buffers that the engine has, with
    its limit of reductions in flight.
    """
    spec, described, built = ModelSpec(blocks=3), [], []
    with mock.patch.object(unit, "MAX_FLAT_BYTES", max_flat_bytes):
        session, _ = watched_session(spec)
        profile = model_profile(session, 8.0)
        for stage in STAGES:
            optimizer = poplar.HeteroZeroOptimizer(
                models.build(spec), torch.optim.SGD, stage=stage, process_group=harness.group()
            )
            engine = optimizer._training.engine
            of_units = [tuple(flat.numel for flat in one.trained) for one in engine.units]
            described.append(StepUnits.of(profile, stage))
            built.append((tuple(filter(None, of_units)), engine.strategy.reductions.limit))
    return described, built


@pytest.mark.every_combination
@pytest.mark.parametrize("max_flat_bytes", [1, 9000, unit.MAX_FLAT_BYTES])
def test_step_is_described_with_the_buffers_of_the_engine(ranks: Pool, max_flat_bytes: int):
    described, built = ranks.run(buffers_of_units, max_flat_bytes, ranks=1)[0]
    for stage, units, (buffers, limit) in zip(STAGES, described, built, strict=True):
        assert units.buffers == buffers
        assert limit == (units.reductions_in_flight if stage >= 2 else 2)


def new_points(batches: list[tuple[int, ...]], known: ClusterProfile) -> tuple[Any, list[int]]:
    """The measured points, and the batches that this rank ran."""
    session, ran = watched_session()
    return measure_points(session, batches, [device.points[1] for device in known.devices]), ran


def slowdowns_now(plan: Plan, known: ClusterProfile, seconds: float) -> tuple[Any, list[int]]:
    """The slowdowns of the ranks, and the batches that this rank ran."""
    session, ran = watched_session()
    return measure_slowdowns(session, known, plan, seconds), ran


def steps_from_host_copies() -> tuple[int, list[str]]:
    """How often parameters were copied to the host for several plans, and which changed."""
    session, _ = watched_session()
    session.asynchronous = True  # as on CUDA
    model = session.job.model
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    with (
        mock.patch.object(sessions, "host_copies", side_effect=sessions.host_copies) as copies,
        session.measuring(),
    ):
        for stage in (0, 3, 2):
            plan = Plan.even(4, 8, 2, stage=stage)
            trial_runs.run_plan(session, plan, steps=1, report=lambda text: None)
    left = [name for name, p in model.named_parameters() if not p.equal(before[name])]
    return copies.call_count, left + [n for n, p in model.named_parameters() if p.grad is not None]


def test_parameters_are_copied_to_the_host_once_for_all_plans(ranks: Pool):
    assert ranks.run(steps_from_host_copies) == [(1, [])] * 4


def graphs_per_pass_of_a_compiled_model() -> list[float]:
    """Graphs that run in a pass at stage 0, then at stages 3 and 0, then after the profile."""
    session, _ = watched_session(ModelSpec(kind="mlp", blocks=2), ["blocks.0", "blocks.1"])
    model, ran, counts = session.job.model, [], []

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        def run(*args: Any) -> Any:
            ran.append(graph)
            return graph.forward(*args)

        return run

    model.compile(backend=backend)
    with session.measuring():
        for stage in (0, 3, 0):
            plan = Plan.even(2, 4, 2, stage=stage)
            trial_runs.run_plan(session, plan, steps=1, report=lambda text: None)
            ran.clear()
            trial_runs.run_plan(session, plan, steps=1, report=lambda text: None)
            counts.append(len(ran) / 2)  # a pass of the warm-up, which compiles nothing, and one
    ran.clear()
    models.mean_over_samples(model, batch()).backward()
    return [*counts, len(ran)]


def test_compiled_model_stays_compiled(ranks: Pool):
    """Stage 3 splits graphs at its hooks; a pass without hooks is one graph again afterwards."""
    for one, split, again, trained in ranks.run(graphs_per_pass_of_a_compiled_model, ranks=2):
        assert one == again == trained
        assert split > one


def reasons_of_throttling(hot: int) -> tuple[list[str], int]:
    """By rank, if rank 1 is too hot the first `hot` times; and how often it was asked."""
    session, _ = watched_session()
    asked = []

    def throttle_reason(device: torch.device) -> str:
        asked.append(device)
        return "too hot" if harness.rank() == 1 and len(asked) <= hot else ""

    with mock.patch.object(devices, "throttle_reason", throttle_reason):
        curves, _ = measure_curves(session, lambda text: None)
    return [curve.throttled for curve in curves], len(asked)


@pytest.mark.parametrize(("hot", "reason"), [(1, ""), (100, "too hot")])
def test_all_ranks_are_timed_again_after_one_was_throttled(ranks: Pool, hot, reason):
    answers = ranks.run(reasons_of_throttling, hot)
    assert [reasons for reasons, _ in answers] == [["", reason, "", ""]] * 4
    assert all(asked >= 4 for _, asked in answers)


def test_all_ranks_compute_while_new_batches_are_measured(ranks: Pool):
    known = cluster((10.0,) * 4, ["cpu"] * 4)  # its second points are of 2 samples
    answers = ranks.run(new_points, [(3,), (), (5, 6), ()], known)
    first = answers[0][0]
    assert [points for points, _ in answers] == [first] * 4
    assert [[point.batch for point in own] for own in first] == [[3], [], [5, 6], []]
    for (_, ran), own in zip(answers, ({2, 3}, {2}, {2, 5, 6}, {2}), strict=True):
        assert set(ran) == own
        assert all(ran.count(size) > TIMES_EACH for size in own)


def test_slowdowns_are_measured_with_a_profiled_batch(ranks: Pool):
    known = cluster((10.0,) * 4, ["cpu"] * 4)
    measured = [point.batch for point in known.devices[0].points]
    plan = Plan.manual((measured[-1], measured[1] + 1, 1, 0), stage=2)
    answers = ranks.run(slowdowns_now, plan, known, 0.05)
    first = answers[0][0]
    assert [slowdowns for slowdowns, _ in answers] == [first] * 4
    assert min(first) > 0.0
    for (_, ran), size in zip(answers, (measured[-1], measured[1], 1, 1), strict=True):
        assert set(ran) == {size}


def test_slowdowns_are_one_without_time_for_plain_passes(ranks: Pool):
    known = cluster((10.0,) * 4, ["cpu"] * 4)
    for slowdowns, ran in ranks.run(slowdowns_now, Plan.even(4, 8, 2, stage=2), known, 0.001):
        assert slowdowns == [1.0] * 4
        assert ran == []


@pytest.mark.parametrize(
    ("noise", "seconds", "turns"),
    [
        (1.0, 200.0, 1),  # a quiet machine
        (9.0, 200.0, 9),  # as many turns as the noise requires
        (9.0, 20.0, 3),  # as many turns as there is time for
        (9.0, 1.0, 1),
    ],
)
def test_noise_leads_to_more_turns(noise, seconds, turns):
    known, clock = cluster((10.0,) * 4, ["cpu"] * 4), [0.0]
    plans = [Plan.manual("2,2,2,2", stage=s, passes=n) for s in (2, 0) for n in (1, 3)]
    ran: list[tuple[Plan, int]] = []
    plain: list[float] = []

    def run(session: Any, plan: Plan, *, steps: int, report: Any) -> Observation:
        ran.append((plan, steps))
        clock[0] += 1.5
        return Observation(
            plan=plan, step_seconds=1.0, pass_seconds=((),) * 4, other_seconds=(0.0,) * 4
        )

    def slowdowns(session: Any, profile: Any, plan: Plan, seconds: float) -> list[float]:
        plain.append(seconds)
        return [float(len(plain))] * 4

    session = SimpleNamespace(from_first_rank=lambda value: value)
    with (
        mock.patch("time.perf_counter", side_effect=lambda: clock[0]),
        mock.patch.object(trial_runs, "run_plan", run),
        mock.patch.object(trial_runs, "measure_slowdowns", slowdowns),
    ):
        seen, errors = trial_runs.run_in_turns(
            session,  # type: ignore[arg-type]
            known,
            plans,
            seconds=seconds,
            noise=noise,
            report=lambda text: None,
        )
    assert ran == [(plan, STEPS) for plan in plans] * turns
    assert errors == {}
    assert [[observation.plan for observation in turn] for turn in seen] == [plans] * turns
    between = [observation.slowdowns[0] for observation in seen[0]]
    assert between == [1.5, 2.5, 3.5, 4.5], "the mean of the plain passes before and after"
    assert seen[0][1].slowdown_changes == (0.5,) * 4, "from 2 to 3"
    assert len(plain) == 5 * turns
    assert 5 * plain[0] <= PLAIN_PASSES * seconds * (1 + 1e-9)
    assert plain[0] >= SHORTEST_SAMPLE_SECONDS or seconds == 1.0


def limits(samples: list[int | None], memory: list[int | None]) -> list[int]:
    rank = harness.rank()
    own = {"max_batch": samples[rank], "memory_limit": memory[rank]}
    return [device.max_batch for device in profiled(stages=(0,), **own).devices]


def test_each_rank_has_its_own_limits(ranks: Pool):
    plenty = 1 << 30
    assert ranks.run(limits, [1, 3, 8, 5], [plenty] * 4)[0] == [1, 3, 8, 5]


def memory_by_rank(limit: dict[Any, Any]) -> list[int]:
    profile = profiled(stages=(0,), max_batch=1, memory_limit=limit)
    return [device.memory_bytes for device in profile.devices]


def test_limits_by_rank_and_device(ranks: Pool):
    found = ranks.run(memory_by_rank, {2: 3 << 30, "cpu": "2GiB"})
    assert found == [[2 << 30, 2 << 30, 3 << 30, 2 << 30]] * 4


def test_largest_batch_fits_in_memory(ranks: Pool, profiles: list[dict[str, Any]]):
    held = [point["activation_bytes"] for point in profiles[0]["devices"][0]["points"]]
    six = held[2] + (held[3] - held[2]) / 2
    whole = model_bytes(models.build(ModelSpec()), torch.device("cpu"))
    tight = round((whole + six) * 1.05 / 0.97 / 0.95)
    measured = ranks.run(limits, [8] * 4, [1 << 30, tight, 1 << 30, 1 << 30])[0]
    assert measured in ([8, 6, 8, 8], [8, 7, 8, 8]), "7 samples fit beside a shard"


def test_peak_memory_counts_live_tensors():
    def run() -> None:
        first = torch.ones(1000)
        second = first * 2
        del first
        third = second.view(10, 100) + 1
        del second, third
        torch.ones(500)

    run()
    assert pass_bytes(run, torch.device("cpu")).peak == 2 * 4000


def raising(case: str) -> None:
    on_one = harness.rank() == 1
    model = models.build(ModelSpec(hidden=31 if case == "models" and on_one else 61))
    options: dict[str, Any] = {}
    if case == "memory_limit of an unknown rank":
        options["memory_limit"] = {"cpu": "1GiB", 4: 1 << 30}
    if case == "memory_limit above the device" and on_one:
        options["memory_limit"] = 1 << 60
    if case == "stages differ":
        options["stages"] = (0, 1) if on_one else (0,)
    if case == "nan" and on_one:
        options["loss"] = nan_loss
    if case == "loss raises" and on_one:
        options["loss"] = raising_loss
    profiled(model, **options)


def _named(function: Any) -> Any:
    function.__qualname__ = models.mean_over_samples.__qualname__
    return function


@_named
def nan_loss(model: nn.Module, batch: Any) -> Tensor:
    return models.mean_over_samples(model, batch) * float("nan")


@_named
def raising_loss(model: nn.Module, batch: Any) -> Tensor:
    raise KeyError("labels")


def _fails_in_the_engine(error: Exception) -> Callable[..., Tensor]:
    """On one rank, and only while an optimizer holds the model."""

    @_named
    def loss(model: nn.Module, batch: Any) -> Tensor:
        if harness.rank() == 1 and id(next(model.parameters())) in model_checks._OWNERS:
            raise error
        return models.mean_over_samples(model, batch)

    return loss


def notes_of_a_shortage(stage: int) -> list[str]:
    loss = _fails_in_the_engine(MemoryError("no room"))
    profile = profiled(loss=loss, stages=(stage,), max_batch=4)
    return [note for note in profile.notes if "memory" in note]


@pytest.mark.parametrize("stage", choose(quick=[2], full=[0, 1, 2, 3]))
def test_step_that_runs_out_of_memory_is_left_out(ranks: Pool, stage):
    for notes in ranks.run(notes_of_a_shortage, stage):
        assert notes
        assert all(f"a step of stage {stage} with micro-batches" in note for note in notes)


def model_after_a_failed_step(stage: int) -> list[str]:
    model = models.build(ModelSpec(blocks=1))
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    loss = _fails_in_the_engine(ZeroDivisionError("no samples"))
    with pytest.raises((ZeroDivisionError, RankFailed)) as error:
        profiled(model, loss=loss, stages=(stage,), max_batch=4)
    assert error.value.__traceback__ is not None  # whose frames still hold references
    left = [name for name, p in model.named_parameters() if not p.equal(before[name])]
    poplar.HeteroZeroOptimizer(
        model, torch.optim.SGD, stage=stage, process_group=harness.group(), lr=0.1
    ).release()
    return left


@pytest.mark.parametrize("stage", [0, 3])
def test_model_is_usable_after_a_failed_step(ranks: Pool, stage):
    assert ranks.run(model_after_a_failed_step, stage) == [[]] * 4


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (
            "memory_limit above the device",
            r"rank 1: a memory_limit of 1073741824\.00 GiB, but cpu has .* GiB; lower it",
        ),
        (
            "memory_limit of an unknown rank",
            "entry for rank 4, which does not exist; there are ranks 0-3 on 'cpu'",
        ),
        (
            "stages differ",
            r"disagree on the stages: rank 0 has \[0\], rank\(s\) \[1\] have",
        ),
        ("models", "the ranks disagree on the model"),
        ("nan", "the loss of the first sample of example_batch is nan"),
        ("loss raises", "labels"),
    ],
)
def test_invalid_request_on_one_rank_raises_on_all_ranks(ranks: Pool, case, message):
    with pytest.raises(RanksFailed, match=f"(?s){message}") as caught:
        ranks.run(raising, case)
    assert len(caught.value.failures) == 4
    assert not caught.value.silent
