"""A rank that becomes slower in mid-run gets fewer samples, and the losses do not change.

What the ranks measure is replaced, so that no test depends on the speed of the machine.
"""

from __future__ import annotations

import itertools
import multiprocessing
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any
from unittest import mock

import pytest
import ranks as harness
import torch
from ranks import Failure, Pool
from records import cluster
from subset import choose
from torch import Tensor, nn
from torch.utils.data import DataLoader

from poplar import HeteroBatchSampler, HeteroZeroOptimizer, Plan, split_stream
from poplar.comm import announcements
from poplar.drift import idle_speed
from poplar.training.trained_model import TrainedModel
from poplar.values.plan import UnitPlan
from poplar.values.profile import BatchPoint, ClusterProfile, ModelProfile
from poplar.zero.streams import RankTimes, StepTiming

RANKS, GLOBAL_BATCH = 3, 12
SECONDS = 0.004
"""Of a sample."""
SLOW = range(32, 64)
"""Steps in which rank 1 is slower."""
FACTOR = 2.5
STEPS = 96
NEW_ENGINE = 20
"""Step before which stage 0 becomes stage 1: the speeds are followed across the change."""
EVEN = Plan.even(RANKS, GLOBAL_BATCH, GLOBAL_BATCH, 1)


def profile(ranks: int = RANKS, collective: float = 1e-4) -> ClusterProfile:
    """Equal ranks. `collective`: seconds of a reduce-scatter or all-gather of the model."""
    made = cluster((1.0 / SECONDS,) * ranks, ("device",) * ranks)
    points = tuple(
        BatchPoint(batch=batch, seconds=SECONDS * batch, activation_bytes=1024 * batch)
        for batch in (1, GLOBAL_BATCH)
    )
    devices = tuple(
        replace(device, points=points, optimizer_seconds=1e-4) for device in made.devices
    )
    network = replace(
        made.network, reduce_scatter_seconds=collective, all_gather_seconds=collective
    )
    model = ModelProfile(unit_numels=(64, 64, 64, 9))
    return replace(made, devices=devices, network=network, model=model)


@dataclass(frozen=True)
class Outcome:
    losses: list[float]
    samples: list[int]
    """Of rank 1, by step."""
    messages: list[str]
    computed: list[list[float]]
    """By step, the compute seconds of all ranks."""


def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def an_optimizer(plan: Plan | None, **options: Any) -> HeteroZeroOptimizer:
    """SGD on a layer, which is the same on all ranks."""
    torch.manual_seed(0)
    model = nn.Linear(8, 1).to(harness.device())
    given = {"process_group": harness.group(), "lr": 1e-2, **options}
    return HeteroZeroOptimizer(model, torch.optim.SGD, plan=plan, **given)


def layers_and_adamw(plan: Plan) -> tuple[nn.Module, HeteroZeroOptimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)), nn.Linear(8, 1))
    given = {"plan": plan, "process_group": harness.group(), "lr": 1e-2}
    return model, HeteroZeroOptimizer(model.to(harness.device()), torch.optim.AdamW, **given)


def slower_by(factor: Callable[[], float]) -> Any:
    """A context in which a rank measures what the profile says, times this factor of a step."""
    times = StepTiming.times

    def measured(timing: StepTiming) -> RankTimes:
        expected = times(timing).work.expected_seconds
        return times(timing)._replace(compute_seconds=factor() * expected)

    return mock.patch.object(StepTiming, "times", measured)


def open_form_loss(optimizer: HeteroZeroOptimizer, model: nn.Module, batch: Tensor) -> float:
    """Train a step pass by pass; returns the loss of the global batch."""
    total = torch.zeros((), device=harness.device())
    for micro_batch in optimizer.micro_batches(batch):
        loss = loss_fn(model, micro_batch)
        loss.backward()
        total += loss.detach() * len(micro_batch) / GLOBAL_BATCH
    optimizer.step()
    optimizer.zero_grad()
    torch.distributed.all_reduce(total, group=harness.group())
    return float(total)


def train(stage: int, *, open_form: bool, replan: str) -> Outcome:
    plan = Plan.even(RANKS, GLOBAL_BATCH, GLOBAL_BATCH, stage)
    model, optimizer = layers_and_adamw(plan)
    follower = optimizer.follow_drift(profile(), replan=replan)
    rank, outcome, step = harness.rank(), Outcome([], [], [], []), 0
    stack = ExitStack()
    if follower is not None:
        stack.enter_context(slower_by(lambda: FACTOR if rank == 1 and step in SLOW else 1.0))
    data = torch.randn(GLOBAL_BATCH * STEPS, 8, generator=torch.Generator().manual_seed(0))
    sampler = HeteroBatchSampler(len(data), plan, seed=0, rank=rank)
    batches = iter(DataLoader(data, batch_sampler=sampler))
    for step in range(STEPS):
        if step == NEW_ENGINE and stage == 0:
            optimizer.apply_plan(replace(plan, stage=1))
        current = optimizer.plan
        assert current is not None
        batch = next(batches).to(harness.device())
        outcome.samples.append(current.samples(1))
        if open_form:
            outcome.losses.append(open_form_loss(optimizer, model, batch))
        else:
            result = optimizer.train_step(loss_fn, batch)
            outcome.losses.append(result.loss)
            outcome.computed.append([each.compute_seconds for each in result.rank_times])
    stack.close()
    if follower is not None:
        outcome.messages.extend(follower.messages)
    return outcome


@pytest.mark.parametrize(("stage", "open_form"), [(0, False), (1, True), (3, False)])
def test_plan_follows_a_slower_rank_with_the_same_losses(
    ranks: Pool, stage: int, open_form: bool
) -> None:
    alone = ranks.run(train, stage, open_form=open_form, replan="off", ranks=RANKS)[0]
    outcomes = ranks.run(train, stage, open_form=open_form, replan="auto", ranks=RANKS)
    first = outcomes[0]
    assert first.losses == pytest.approx(alone.losses, rel=1e-4)
    assert all(other.messages == first.messages for other in outcomes)
    assert all(other.samples == first.samples for other in outcomes)
    assert first.samples[SLOW.start] == 4
    assert first.samples[SLOW.start + 20] == first.samples[SLOW.stop] == 2
    assert first.samples[SLOW.stop + 20] == first.samples[-1] == 4
    slowed, recovered = first.messages
    assert "rank 1 is 2.5x slower" in slowed
    assert "new batches 5,2,5; +" in slowed
    assert "rank 1 is 2.5x faster; new batches 4,4,4; +" in recovered


def test_advice_changes_no_plan_and_all_ranks_know_all_times(ranks: Pool) -> None:
    outcomes = ranks.run(train, 2, open_form=False, replan="advise", ranks=RANKS)
    assert all(outcome.samples == [4] * STEPS for outcome in outcomes)
    assert all(outcome.computed == outcomes[0].computed for outcome in outcomes)
    assert all(outcome.messages == outcomes[0].messages for outcome in outcomes)
    (message,) = outcomes[0].messages
    assert "rank 1 is 2.5x slower" in message
    assert outcomes[0].computed[SLOW.start] == pytest.approx([0.016, 0.04, 0.016])


@dataclass(frozen=True)
class Left:
    """What a rank saw of a rank that was left out for a while."""

    losses: list[float]
    samples: list[tuple[int, ...]]
    """By step and rank."""
    active: list[bool]
    messages: list[str]


def train_without_a_slow_rank(
    stage: int, slow_rank: int, *, open_form: bool, workers: int, replan: str
) -> Left:
    """A rank is 20x slower from `SLOW.start` on, and fast again once it has been left out."""
    plan, group = Plan.even(RANKS, GLOBAL_BATCH, GLOBAL_BATCH, stage), harness.group()
    model, optimizer = layers_and_adamw(plan)
    given = profile(collective=0.003 if stage == 3 else 0.01)
    follower = optimizer.follow_drift(given, replan=replan, steps=100_000)
    rank, step, seen = harness.rank(), 0, Left([], [], [], [])

    def factor() -> float:
        since = seen.active.index(False) if False in seen.active else step
        return 20.0 if rank == slow_rank and SLOW.start <= step < since + 10 else 1.0

    def seconds_of_work(_: torch.device) -> float:
        return factor()

    data = torch.randn(GLOBAL_BATCH * STEPS, 8, generator=torch.Generator().manual_seed(0))
    sampler = HeteroBatchSampler(len(data), plan, seed=0, rank=rank)
    multiprocessing.current_process()._config["daemon"] = False  # it may have children then
    loader = DataLoader(data, batch_sampler=sampler, num_workers=workers)
    with ExitStack() as stack:
        if follower is not None:
            stack.enter_context(slower_by(factor))
            stack.enter_context(mock.patch.object(idle_speed, "seconds_of_work", seconds_of_work))
            stack.enter_context(mock.patch.object(idle_speed, "REST_SECONDS", 0.0))
            stack.enter_context(mock.patch.object(announcements, "_REPLY_SECONDS", 0.0))
        for step, batch in enumerate(loader):  # noqa: B007 (`factor` reads it)
            current = optimizer.plan
            assert current is not None
            seen.samples.append(tuple(map(current.samples, range(RANKS))))
            seen.active.append(optimizer.is_active)
            own = batch.to(harness.device())
            if open_form:
                seen.losses.append(open_form_loss(optimizer, model, own))
            else:
                seen.losses.append(optimizer.train_step(loss_fn, own).loss)
            if follower is not None and 0 in seen.samples[-1]:
                # Else the active ranks may end before the one that is left out can be taken back.
                torch.distributed.barrier(group)
    if follower is not None:
        seen.messages.extend(follower.messages)
    return seen


@pytest.mark.parametrize(
    ("stage", "slow_rank", "open_form", "workers"),
    choose(
        quick=[(2, 2, True, 0)],
        full=[(0, 1, False, 0), (1, 0, True, 0), (3, 0, False, 1), (2, 2, True, 1)],
    ),
)
def test_a_slow_rank_is_left_out_and_taken_back_with_the_same_losses(
    ranks: Pool, stage: int, slow_rank: int, open_form: bool, workers: int
) -> None:
    run = partial(ranks.run, train_without_a_slow_rank, stage, slow_rank, ranks=RANKS)
    given = {"open_form": open_form, "workers": workers}
    alone = run(**given, replan="off")[0]
    outcomes = run(**given, replan="auto")
    for rank, seen in enumerate(outcomes):
        assert seen.losses == pytest.approx(alone.losses, rel=1e-4)
        assert seen.samples == outcomes[0].samples
        left, back = seen.messages
        assert f"rank {slow_rank} is 20x slower; rank {slow_rank} left out; new batches" in left
        assert f"rank {slow_rank} is 20x faster; rank {slow_rank} taken back; new b" in back
        assert all(seen.active) == (rank != slow_rank)
    samples = outcomes[0].samples
    without = tuple(0 if rank == slow_rank else 6 for rank in range(RANKS))
    assert list(dict.fromkeys(samples)) == [(4, 4, 4), without]
    assert samples[SLOW.start + 20] == without
    assert samples[-1] == (4, 4, 4)


def fail_in_a_change(failing: int) -> tuple[list[Failure], list[Failure]]:
    """What the step raises at whose end rank 0 is taken back and rank 2 left out, and the next."""
    plan = Plan.even(2, GLOBAL_BATCH, GLOBAL_BATCH, 1).beside((0,))
    with harness.separate_group() as group:
        optimizer = an_optimizer(plan, process_group=group, timeout=timedelta(seconds=20))
        follower = optimizer.follow_drift(profile(), replan="auto")
        order = Plan.even(2, GLOBAL_BATCH, GLOBAL_BATCH, 1).beside((2,)), "another plan"
        regroup = TrainedModel.regroup

        def failing_regroup(*args: Any) -> None:
            if harness.rank() == failing:
                raise OverflowError("planted")
            regroup(*args)

        with mock.patch.object(TrainedModel, "regroup", failing_regroup):
            if optimizer.is_active:
                optimizer._training.calls.end_by(order, partial(follower.obey, order))
            batch = torch.ones(6, 8, device=harness.device()) if optimizer.is_active else None
            with harness.catching() as caught:
                optimizer.train_step(loss_fn, batch)
        with harness.catching() as later:
            optimizer.train_step(loss_fn, batch)
        return caught, later


@pytest.mark.parametrize("failing", range(RANKS))
def test_a_rank_that_fails_in_the_change_is_named_on_all_ranks(ranks: Pool, failing: int) -> None:
    for rank, (caught, later) in enumerate(ranks.run(fail_in_a_change, failing, ranks=RANKS)):
        assert "planted" in caught[0].message, (rank, caught)
        assert later, "no rank goes on"


def follow_plan_that_was_not_profiled(plan: Plan) -> tuple[list[str], Plan | None]:
    """Messages and the last plan, if rank 1 becomes slower a while after `apply_plan`."""
    optimizer = an_optimizer(Plan.even(RANKS, GLOBAL_BATCH, 4, plan.stage))
    measured = profile()
    small = tuple(replace(device, points=POINTS) for device in measured.devices)
    follower = optimizer.follow_drift(replace(measured, devices=small), replan="auto")
    assert follower is not None
    rank, times, slower = harness.rank(), StepTiming.times, 1.0

    def seconds(timing: StepTiming) -> RankTimes:
        return times(timing)._replace(compute_seconds=slower * SECONDS * 4)

    batch = torch.ones(plan.samples(rank), 8, device=harness.device())
    optimizer.apply_plan(plan)
    with mock.patch.object(StepTiming, "times", seconds):
        for step in range(SLOW.start + 20):
            slower = FACTOR if rank == 1 and step >= SLOW.start else 1.0
            optimizer.train_step(loss_fn, batch)
    return follower.messages, optimizer.plan


POINTS = tuple(
    BatchPoint(batch=batch, seconds=SECONDS * batch, activation_bytes=1024 * batch)
    for batch in (1, 4)
)


@pytest.mark.parametrize(
    "plan",
    [
        Plan.manual("6,4,2", stage=1),
        replace(
            Plan.even(RANKS, GLOBAL_BATCH, 4, 1), units=(UnitPlan("root", shares=(0.5, 0.5, 0.0)),)
        ),
    ],
    ids=["samples", "units"],
)
def test_training_goes_on_with_a_plan_that_was_not_profiled(ranks: Pool, plan: Plan) -> None:
    outcomes = ranks.run(follow_plan_that_was_not_profiled, plan, ranks=RANKS)
    assert outcomes == [([], plan)] * RANKS


def evaluate_while_ranks_change(replan: str) -> tuple[list[float], list[str], list[Failure]]:
    """Losses, warnings and errors of evaluations: of all ranks, without rank 2, of all again.

    The plans change as if `follow_drift` had found them, and all ranks pass a loader each time.
    """
    plan = EVEN
    without = Plan.even(2, GLOBAL_BATCH, GLOBAL_BATCH, 1).beside((2,))
    own = torch.full((2, 8), float(harness.rank()), device=harness.device())
    losses: list[float] = []
    with harness.separate_group() as group:
        optimizer = an_optimizer(plan, process_group=group, timeout=timedelta(seconds=20))
        follower = optimizer.follow_drift(profile(), replan=replan)
        assert follower is not None

        def evaluate_by(following: Plan) -> None:
            if following != optimizer.plan:
                order = following, "another plan"
                if optimizer.is_active:
                    optimizer._training.calls.end_by(order, partial(follower.obey, order))
                optimizer.zero_grad()  # a call of all ranks
            for _ in range(2):
                losses.append(optimizer.evaluate(lambda model, rows: rows.mean(), [own]))

        with warnings.catch_warnings(record=True) as caught, harness.catching() as failed:
            warnings.simplefilter("always")
            for following in (plan, without, plan) if replan == "auto" else (plan, without):
                evaluate_by(following)
    warned = [str(each.message) for each in caught if "evaluate" in str(each.message)]
    return losses, warned, failed


def test_a_rank_left_out_by_itself_drops_its_batches_with_one_warning(ranks: Pool) -> None:
    for rank, outcome in enumerate(ranks.run(evaluate_while_ranks_change, "auto", ranks=RANKS)):
        losses, warned, failed = outcome
        assert not failed
        assert losses == [1.0, 1.0, 0.5, 0.5, 1.0, 1.0]
        assert len(warned) == (rank == 2)
        assert all("rank 2 is left out" in text for text in warned)


def test_batches_of_a_rank_that_the_user_left_out_are_an_error(ranks: Pool) -> None:
    *_, left_out = ranks.run(evaluate_while_ranks_change, "advise", ranks=RANKS)
    assert "evaluate() on rank 2, which the plan leaves out" in left_out[2][0].message


def follow_beside_a_rank_that_is_left_out() -> tuple[list[str], list[int]]:
    """Messages, and the samples of the last step; rank 2 is slower."""
    optimizer = an_optimizer(EVEN.beside((0,)))
    follower = optimizer.follow_drift(profile(RANKS + 1), replan="auto", leave_out="never")
    assert follower is not None
    rank, step = harness.rank(), 0
    with slower_by(lambda: FACTOR if rank == 2 and step in SLOW else 1.0):
        for step in range(SLOW.start + 20):  # noqa: B007 (it is read above)
            samples = optimizer.plan.samples(rank) if optimizer.plan else 0
            batch = torch.ones(samples, 8, device=harness.device()) if samples else None
            optimizer.train_step(loss_fn, batch)
    assert optimizer.plan is not None
    return follower.messages, list(map(optimizer.plan.samples, range(RANKS + 1)))


def test_plan_follows_ranks_beside_one_that_is_left_out(ranks: Pool) -> None:
    left_out, *active = ranks.run(follow_beside_a_rank_that_is_left_out, ranks=RANKS + 1)
    assert left_out[0] == []
    (message,), samples = active[0]
    assert active == [active[0]] * RANKS
    assert "rank 2 is 2.5x slower" in message
    assert "new batches 0,5,2,5; +" in message
    assert samples == [0, 5, 2, 5]


def follow_beside_changes_of_the_user(change: str) -> tuple[int, list[str], tuple[int, ...]]:
    """A plan for a slow rank is searched while the plan changes for another reason.

    Args:
        change: "pending": a change waits for its step; "applied": right after a search, the user
            doubles the global batch.

    Returns:
        The step of the last message, all messages, and the samples of the ranks in the end.
    """
    plan, group = EVEN, harness.group()
    optimizer = an_optimizer(plan)
    follower = optimizer.follow_drift(profile(), replan="auto")
    assert follower is not None
    rank, step, noted = harness.rank(), 0, 0

    def pending() -> Plan | None:
        return plan if change == "pending" and step < PENDING_UNTIL else None

    property_of_class = mock.PropertyMock(side_effect=pending)
    with (
        slower_by(lambda: FACTOR if rank == 1 and step in SLOW else 1.0),
        mock.patch.object(HeteroZeroOptimizer, "pending_plan", property_of_class),
    ):
        for step in range(SLOW.stop):
            found = torch.tensor(float(follower.wants_to_agree), device=harness.device())
            torch.distributed.all_reduce(found, group=group)
            if found and change == "applied" and plan == optimizer.plan:
                optimizer.apply_plan(Plan.even(RANKS, 2 * GLOBAL_BATCH, GLOBAL_BATCH, 1))
            assert optimizer.plan is not None
            samples = optimizer.plan.samples(rank)
            optimizer.train_step(loss_fn, torch.ones(samples, 8, device=harness.device()))
            noted = noted or (step if follower.messages else 0)
    assert optimizer.plan is not None
    return noted, follower.messages, tuple(map(optimizer.plan.samples, range(RANKS)))


PENDING_UNTIL = SLOW.start + 24


@pytest.mark.parametrize(("change", "samples"), [("pending", (5, 2, 5)), ("applied", (10, 4, 10))])
def test_a_plan_is_compared_with_the_one_that_it_replaces(
    ranks: Pool, change: str, samples: tuple[int, ...]
) -> None:
    by_rank = ranks.run(follow_beside_changes_of_the_user, change, ranks=RANKS)
    assert by_rank == [by_rank[0]] * RANKS
    step, (message,), found = by_rank[0]
    assert found == samples
    assert message.endswith("%"), "no advice: it is applied"
    assert change == "applied" or step >= PENDING_UNTIL


def follow_in_vain(plan: Plan | None, steps: Any) -> None:
    optimizer = an_optimizer(plan, stage=1 if plan is None else None)
    optimizer.follow_drift(profile(), steps=harness.rank() if steps == "rank" else steps)


@pytest.mark.parametrize(
    ("plan", "steps", "message"),
    [
        (EVEN, "rank", "the ranks passed different arguments"),
        (EVEN, -1, "steps must be at least 0"),
        (None, None, "needs an optimizer that was built"),
    ],
)
def test_wrong_arguments_are_refused_on_all_ranks(
    ranks: Pool, plan: Plan | None, steps: Any, message: str
) -> None:
    failures = ranks.run_expecting_errors(follow_in_vain, plan, steps, ranks=RANKS)
    assert all(message in failure.message for failure in failures)


def train_on_data_that_cannot_follow(data: str, left_out: bool) -> tuple[int, list[str], Plan]:
    """Steps, messages and the last plan. Rank 1 becomes slower, much slower if it is left out."""
    plan = Plan.manual("4,4,4" if left_out else "6,6,0", stage=1)
    optimizer = an_optimizer(plan)
    given = profile(collective=0.01) if left_out else profile()
    follower = optimizer.follow_drift(given, replan="auto", steps=100_000)
    assert follower is not None
    rank, step, factor = harness.rank(), 0, 20.0 if left_out else FACTOR
    length = GLOBAL_BATCH * (SLOW.start + 20) + 2
    rows = torch.randn(length, 8, generator=torch.Generator().manual_seed(0))
    evaluated = DataLoader(rows, batch_sampler=HeteroBatchSampler(length, plan, rank=rank))
    if "stream" in data:
        stream = split_stream(rows, plan, rank=rank)
        multiprocessing.current_process()._config["daemon"] = False  # it may have children then
        loader = DataLoader(stream, batch_size=None, collate_fn=collate, num_workers=1)
    else:
        sampler = HeteroBatchSampler(length, plan, drop_last=data != "tail", rank=rank)
        loader = DataLoader(rows, batch_sampler=sampler)
    others = iter(evaluated) if data == "zipped" else itertools.repeat(None)
    with slower_by(lambda: factor if rank == 1 and step >= SLOW.start else 1.0):
        for step, (batch, _) in enumerate(zip(loader, others, strict=False)):
            if data == "stream, evaluated" and step % 20 == 1:
                optimizer.evaluate(loss_fn, evaluated)
            optimizer.train_step(loss_fn, batch.to(harness.device()))
    assert optimizer.plan is not None
    return step + 1, follower.messages, optimizer.plan


def collate(rows: list[Tensor]) -> Tensor:
    """A rank without samples gets one, which the step drops."""
    return torch.stack(rows) if rows else torch.zeros(1, 8)


@pytest.mark.every_combination
@pytest.mark.parametrize(
    ("data", "left_out", "reason"),
    [
        ("stream", False, "DataLoader workers read a split_stream"),
        ("stream", True, "DataLoader workers read a split_stream"),
        ("stream, evaluated", False, "DataLoader workers read a split_stream"),
        ("zipped", False, "the steps take batches of several samplers"),
        ("tail", False, "its last global batch has 2 samples (of 12), too few for the 3 ranks"),
    ],
)
def test_training_goes_on_if_the_data_cannot_follow(
    ranks: Pool, data: str, left_out: bool, reason: str
) -> None:
    outcomes = ranks.run(train_on_data_that_cannot_follow, data, left_out, ranks=RANKS)
    steps, messages, plan = outcomes[0]
    assert all(outcome == outcomes[0] for outcome in outcomes)
    assert steps == SLOW.start + 20 + (data == "tail")
    assert plan == Plan.manual("4,4,4" if left_out else "6,6,0", stage=1)
    (message,) = messages
    assert "rank 1 is" in message
    assert "; not applied, because rank 0 cannot follow: " in message
    assert reason in message
