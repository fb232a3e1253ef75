"""`apply_plan` leaves ranks out and takes them back, and training goes on with the same result."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import models
import pytest
import ranks as harness
import torch
import training
from failing_calls import DEADLINE, Calls, Place, gathered, places_to_fail
from ranks import Failure, Pool, one_off
from reference import Recipe
from subset import choose
from test_plan_changes import SPEC, one_process, train, train_with_loader
from torch import Tensor, nn
from training import STAGES, Run, assert_exact

import poplar
from poplar import CollectiveTimeout, HeteroZeroOptimizer, Plan, UnitPlan
from poplar.elastic import MemoryCheckpoints
from poplar.training.plan_changes import PlanChanges
from poplar.values.communication import Communication

RANKS = range(4)
SHARES = (0.4, 0.3, 0.2, 0.1)
PASSES = ((2, 2), (1, 2), (2, 1), (0, 2))


def plan_of(
    stage: int, *left_out: int, own: bool = False, hosted: bool = False, turn: int = 0
) -> Plan:
    """A plan of 12 samples that leaves out these ranks."""
    active = [rank for rank in RANKS if rank not in left_out]
    shares = {rank: SHARES[(rank + turn) % 4] for rank in active}
    whole = sum(shares.values())
    even = Plan.even(len(active), 12, 3, stage=stage)
    units = (UnitPlan("blocks.1", shares=(1.0, *[0.0] * (len(active) - 1))),) if own else ()
    return replace(
        even,
        shares=tuple(share / whole for share in shares.values()),
        units=units,
        host_state=(0.5, *[0.0] * (len(active) - 1)) if hosted else (),
    ).beside(left_out)


@pytest.mark.parametrize("open_form", [False, True])
@pytest.mark.parametrize("stage", STAGES)
def test_ranks_leave_come_back_and_change_places(ranks: Pool, stage: int, open_form: bool) -> None:
    recipe = Recipe(spec=SPEC, batches=(12,) * 8, max_norm=0.1, decaying=True)
    changes = [
        None,
        plan_of(stage, 1),
        plan_of(stage, 0),
        plan_of(stage, 0, 3),
        plan_of(stage, 1, 2),
        plan_of(stage),
        plan_of(stage, 0, 1, 2),
        plan_of(stage, 3),
    ]
    run = Run(recipe, plan_of(stage), open_form=open_form)
    assert_exact(ranks.run(train, run, changes), recipe)


def random_plan(chance: random.Random) -> Plan:
    left_out = [rank for rank in RANKS if chance.random() < 0.4]
    stage = chance.choice(STAGES)
    own, hosted = chance.random() < 0.3, chance.random() < 0.2
    return plan_of(stage, *left_out[:3], own=own, hosted=hosted, turn=chance.randrange(4))


def random_changes(seed: int, steps: int) -> Sequence[Plan | None]:
    chance = random.Random(seed)
    return [None if chance.random() < 0.3 else random_plan(chance) for _ in range(steps)]


@pytest.mark.parametrize("seed", choose(quick=[1, 2], full=range(4)))
def test_random_changes_equal_one_process(ranks: Pool, seed: int) -> None:
    recipe = Recipe(spec=SPEC, batches=(12,) * 8, max_norm=0.1, decaying=True)
    if seed % 2:
        momentum = (("lr", 0.1), ("momentum", 0.9))
        recipe = replace(recipe, optimizer="SGD", options=momentum, max_norm=None)
    changes = random_changes(seed, len(recipe.batches))
    run = Run(recipe, random_plan(random.Random(-seed)), open_form=seed >= 2)
    assert_exact(ranks.run(train, run, changes), recipe, f"{run.plan}\n{changes}")


def change_by(run: Run, plan: Plan, folder: Path | None) -> tuple[dict[str, Tensor], Any]:
    """Take a step, change to a plan, through memory if there is a folder, and take another one."""
    model, optimizer = training.prepare(run)
    training.take_step(run, model, optimizer, 0)
    after = replace(run, plan=plan)
    if folder is None:
        optimizer.apply_plan(plan)
    else:
        MemoryCheckpoints(optimizer, folder=folder).save(1)
        optimizer.release()
        model, optimizer = training.prepare(after)
        assert MemoryCheckpoints(optimizer, folder=folder).load_latest() == 1
    training.take_step(after, model, optimizer, 1)
    state = optimizer.full_state_dict(to=plan.active_ranks[0])
    return training.whole_parameters(model, optimizer), state and state["state"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("before", "after"),
    [((0, (1,)), (3, (0,))), ((3, ()), (0, (0, 2))), ((2, (0,)), (1, (2,))), ((1, (3,)), (1, ()))],
)
def test_change_has_the_bits_of_a_new_optimizer_with_the_saved_state(
    ranks: Pool, tmp_path: Path, before: Any, after: Any, dtype: torch.dtype
) -> None:
    recipe = Recipe(spec=replace(SPEC, dtype=dtype), batches=(12, 12))
    run, plan = Run(recipe, plan_of(before[0], *before[1])), plan_of(after[0], *after[1])
    changed = ranks.run(change_by, run, plan, None)
    built = ranks.run(change_by, run, plan, tmp_path)
    for (found, state), (wanted, wanted_state) in zip(changed, built, strict=True):
        training.assert_same(found, wanted)
        torch.testing.assert_close(state, wanted_state, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("workers", "open_form"),  # `test_plan_changes.py` has workers, which start slowly
    choose(quick=[(0, False)], full=[(0, False), (0, True), (1, False), (1, True)]),
)
def test_sampler_follows_with_loader_workers_and_resuming(
    ranks: Pool, tmp_path: Path, workers: int, open_form: bool
) -> None:
    plans = [plan_of(2, 1), plan_of(3, 0, 2), plan_of(0), plan_of(1, 3)]
    given = {"open_form": open_form, "resume_at": 8, "folder": str(tmp_path / "saved")}
    losses, parameters = one_process()
    for own, changes, found in ranks.run(train_with_loader, plans, workers, **given):
        assert (max(changes) > 0) == (workers > 0), changes
        if not open_form:
            torch.testing.assert_close(own, losses, rtol=1e-5, atol=0)
        training.assert_close(found, parameters)


@pytest.mark.parametrize(("workers", "open_form"), [(0, False), (1, True)])
def test_a_rank_comes_back_after_plans_that_it_was_not_told(
    ranks: Pool, tmp_path: Path, workers: int, open_form: bool
) -> None:
    plans = [plan_of(2, 1), plan_of(2, 1, turn=1), plan_of(1, 1, turn=2), plan_of(2)]
    given = {"open_form": open_form, "resume_at": 14, "folder": str(tmp_path / "saved")}
    losses, parameters = one_process()
    for own, _, found in ranks.run(train_with_loader, plans, workers, **given):
        if not open_form:
            torch.testing.assert_close(own, losses, rtol=1e-5, atol=0)
        training.assert_close(found, parameters)


def train_from_meta(stages: Sequence[int], changing: bool) -> dict[str, Tensor] | None:
    """Train a model that was built on `meta`, and leave out other ranks before each step."""
    torch.manual_seed(0)
    with poplar.parameters_on_meta():
        model = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 16), nn.Linear(16, 4))
    model[1].requires_grad_(False)
    model.register_buffer("scale", torch.tensor([1.0 + harness.rank()]))
    plans = [plan_of(s, *out) for s, out in zip(stages, [(1,), (0,), (), (2, 3)], strict=True)]
    given: dict[str, Any] = {"lr": 0.01, "process_group": harness.group()}
    first = plans[0] if changing else plans[2]
    optimizer = HeteroZeroOptimizer(model, torch.optim.AdamW, plan=first, **given)
    data = torch.randn(12, 16, generator=torch.Generator().manual_seed(1))
    for plan in plans:
        if changing:
            optimizer.apply_plan(plan)
        counts = optimizer.plan.cut(12)
        start = sum(counts[: harness.rank()])
        batch = data[start : start + counts[harness.rank()]].to(harness.device())
        optimizer.train_step(lambda m, x: (m(x) * m.scale).square().mean(), batch)
    if not optimizer.is_active:
        assert model[0].weight.is_meta
        return None
    state = optimizer.full_state_dict(to=0)
    return None if state is None else state["state"]


@pytest.mark.parametrize("stages", [(3, 3, 3, 3), (0, 2, 1, 3), (3, 1, 0, 2)])
def test_model_from_meta_follows(ranks: Pool, stages: Sequence[int]) -> None:
    changed = ranks.run(train_from_meta, stages, True)
    steady = ranks.run(train_from_meta, stages, False)
    torch.testing.assert_close(changed[0], steady[0], rtol=1e-5, atol=1e-7)


# Faults


def optimizer_of(plan: Plan, group: Any, **options: Any) -> HeteroZeroOptimizer:
    model = models.build(models.ModelSpec())
    given = {"lr": 1e-3, "process_group": group, **options}
    return HeteroZeroOptimizer(model, torch.optim.AdamW, plan=plan, **given)


def step_under(optimizer: HeteroZeroOptimizer) -> float:
    run = Run(Recipe(), optimizer.plan)
    return optimizer.train_step(training.loss_of(run.recipe), training.batch_of(run, 0)).loss


def said_its_last(calls: Calls) -> bool:
    """Whether a rank failed in the exchange that ends a change of ranks."""
    last = f"{PlanChanges.__module__}.{PlanChanges.__name__}._change_active_ranks"
    callers = zip(calls.fired_inside, calls.fired_inside[1:], strict=False)
    return any(name.endswith(".exchange_objects") and by == last for name, by in callers)


def fail_at(before: Plan, after: Plan) -> dict[Place, tuple[str, str, str, bool]]:
    """For each place: where this rank failed, what the change and the next step raised, and whether
    it `said_its_last`.
    """
    found = {}
    with harness.separate_group() as group:
        optimizer, calls = optimizer_of(before, group), Calls(None)
        step_under(optimizer)
        with calls.running():
            optimizer.apply_plan(after)
        called = gathered(calls.names, group)
    for place in places_to_fail(called, f"{before} {after}", quick=1, full=12):
        harness.note(str(place))
        calls = Calls(place if place.rank == harness.rank() else None)
        with harness.separate_group() as group:
            optimizer = optimizer_of(before, group, timeout=DEADLINE)
            step_under(optimizer)
            with harness.catching() as caught, calls.running():
                optimizer.apply_plan(after)
            with harness.catching() as later:
                step_under(optimizer)
        messages = [one[0].message if one else "" for one in (caught, later)]
        found[place] = (calls.fired, *messages, said_its_last(calls))
    return found


@pytest.mark.parametrize(
    ("before", "after"), [(plan_of(0, 1), plan_of(2, 0)), (plan_of(3), plan_of(3, 1))]
)
def test_an_error_at_any_call_of_a_change_reaches_all_ranks(
    ranks: Pool, before: Plan, after: Plan
) -> None:
    by_rank = ranks.run(fail_at, before, after, timeout=1200)
    for place in by_rank[0]:
        outcomes = [outcomes[place] for outcomes in by_rank]
        fired = outcomes[place.rank][0]
        raised, later = ([outcome[at] for outcome in outcomes] for at in (1, 2))
        failed_late = place.rank in after.left_out and outcomes[place.rank][3]
        if failed_late and not any(outcomes[r][1] for r in after.active_ranks):
            # The others, which train without it, have heard from it. It may raise in its next call.
            assert not any(later[rank] for rank in after.active_ranks), (place, outcomes)
            continue
        assert all(raised) or not any(raised) or all(later), (place, outcomes)
        assert all(later) or not any(later), (place, outcomes)
        if any(later):  # a rank that is left out may fail before it takes part, and is missed then
            causes = [fired, *[f"rank(s) {rank}" for rank in before.left_out if rank == place.rank]]
            for messages in zip(raised, later, strict=True):
                assert any(cause in "".join(messages) for cause in causes), (place, outcomes)


def lose(lost: int, left_out: int) -> Failure | list[float]:
    """A rank is killed, and the others leave out the rank that is given; the losses after that."""
    with harness.separate_group() as group:
        optimizer = optimizer_of(plan_of(2, 1), group, timeout=DEADLINE)
        step_under(optimizer)
        if harness.rank() == lost:
            os.kill(os.getpid(), signal.SIGKILL)
        with harness.catching() as caught:
            optimizer.apply_plan(plan_of(2, left_out))
            losses = [step_under(optimizer), step_under(optimizer)]
    return caught[0] if caught else losses


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_lost_rank_is_named_on_all_others(lost: int) -> None:
    for rank, failure in enumerate(one_off(4, lose, lost, 3, lost=[lost])):
        if rank != lost:
            assert isinstance(failure, Failure)
            assert failure.is_a(CollectiveTimeout), failure
            assert f"rank {lost}" in failure.message or f"rank(s) {lost}" in failure.message


def test_a_lost_rank_that_stays_left_out_is_not_missed() -> None:
    by_rank = one_off(4, lose, 1, 1, lost=[1])
    first, *others = (by_rank[rank] for rank in (0, 2, 3))
    assert isinstance(first, list)
    assert others == [first] * 2


def pass_wrong_plans() -> list[Failure]:
    with harness.separate_group() as group:
        optimizer = optimizer_of(plan_of(1, 1), group)
        step_under(optimizer)
        failures = []
        differing = plan_of(1, 0) if harness.rank() == 1 else plan_of(1, 2)
        for plan in (differing, "no plan", plan_of(1, 0).of_active_ranks()):
            with harness.catching() as caught:
                optimizer.apply_plan(plan)
            failures.append(caught[0])
        step_under(optimizer)
        optimizer.apply_plan(plan_of(1, 0))
        step_under(optimizer)
    return failures


def test_wrong_plans_raise_on_all_ranks_and_change_nothing(ranks: Pool) -> None:
    differing, no_plan, too_few = zip(*ranks.run(pass_wrong_plans), strict=True)
    training.assert_raised(differing, "the ranks disagree on the plan")
    training.assert_raised(no_plan, "plan")
    training.assert_raised(too_few, "the plan is for 3 ranks, but the process group has 4")


def steps_without_micro_batches() -> tuple[list[Failure | None], int]:
    """The errors of three steps, before the second of which ranks change, and the steps counted."""
    model, optimizer = training.prepare(Run(Recipe(spec=SPEC), plan_of(0)))
    optimizer.apply_plan(plan_of(0, 1), at_step=1)
    failures = []
    for _ in range(3):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        with harness.catching() as caught:
            optimizer.step()
        failures.append(caught[0] if caught else None)
    return failures, optimizer._changes.schedule.steps


def test_a_step_that_cannot_change_ranks_counts(ranks: Pool) -> None:
    for (first, *later), counted in ranks.run(steps_without_micro_batches):
        assert first is not None
        assert "The step was applied, with the plan of before" in first.message
        assert (later, counted) == ([None, None], 3)


def test_a_plan_leaves_at_least_one_rank() -> None:
    with pytest.raises(ValueError, match="at least one is active"):
        replace(plan_of(0, 0, 1, 2), left_out=(0, 1, 2, 3))


def steps_between_changes(run: Run, plans: Sequence[Plan]) -> Any:
    """Losses and parameters of three steps per plan, with equal replicas after each.

    They are compared before anything sends the exact values.
    """
    model, optimizer = training.prepare(run)
    losses = []
    for plan in plans:
        optimizer.apply_plan(plan)
        for step in range(3):
            losses.append(training.take_step(run, model, optimizer, step)[0])
            optimizer.verify_replicas()
    return losses, training.whole_parameters(model, optimizer)


@pytest.mark.parametrize("stage", STAGES[:3])
def test_ranks_agree_after_changes_under_compressed_communication(ranks: Pool, stage: int) -> None:
    sent = Communication.of("int8", stage)
    around = [plan_of(stage, 1), plan_of(stage, 0), plan_of(stage), plan_of(stage, 2, 3)]
    run = Run(Recipe(spec=SPEC, batches=(12,) * 3), plan_of(stage))
    compressed = replace(run, plan=replace(run.plan, communication=sent))
    plans = [replace(plan, communication=sent) for plan in around]
    (losses, parameters), *others = ranks.run(steps_between_changes, compressed, plans)
    for other in others:
        training.assert_same(other[1], parameters)
        assert other[0] == losses
    (exact, _), *_ = ranks.run(steps_between_changes, run, around)
    assert losses == pytest.approx(exact, rel=0.02)


def random_precision(chance: random.Random, plan: Plan) -> Plan:
    """The plan with a random precision of what is sent."""
    given = chance.choice(("exact", "int8", "int8", "int4"))
    communication = Communication.of(given, plan.stage)
    if plan.host_state:
        communication = replace(communication, parameters="exact")
    return replace(plan, communication=communication)


@pytest.mark.parametrize("seed", choose(quick=range(3), full=range(6)))
def test_ranks_agree_after_random_changes_of_plan_and_precision(ranks: Pool, seed: int) -> None:
    chance = random.Random(seed)
    exact = [random_plan(chance) for _ in range(6)]
    plans = [random_precision(chance, plan) for plan in exact]
    run = Run(Recipe(spec=SPEC, batches=(12,) * 3), plan_of(1))
    (losses, parameters), *others = ranks.run(steps_between_changes, run, plans)
    for other in others:
        training.assert_same(other[1], parameters)
        assert other[0] == losses
    (of_exact, _), *_ = ranks.run(steps_between_changes, run, exact)
    assert losses == pytest.approx(of_exact, rel=0.1), plans
