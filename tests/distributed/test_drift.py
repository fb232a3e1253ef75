"""A rank that becomes slower in mid-run gets fewer samples, and the losses do not change.

What the ranks measure is replaced, so that no test depends on the speed of the machine.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from unittest import mock

import pytest
import ranks as harness
import torch
from ranks import Pool
from records import cluster
from torch import Tensor, nn
from torch.utils.data import DataLoader

from poplar import HeteroBatchSampler, HeteroZeroOptimizer, Plan
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


def profile(ranks: int = RANKS) -> ClusterProfile:
    """Equal ranks."""
    made = cluster((1.0 / SECONDS,) * ranks, ("device",) * ranks)
    points = tuple(
        BatchPoint(batch=batch, seconds=SECONDS * batch, activation_bytes=1024 * batch)
        for batch in (1, GLOBAL_BATCH)
    )
    devices = tuple(
        replace(device, points=points, optimizer_seconds=1e-4) for device in made.devices
    )
    network = replace(made.network, reduce_scatter_seconds=1e-4, all_gather_seconds=1e-4)
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


def train(stage: int, *, open_form: bool, replan: str) -> Outcome:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)), nn.Linear(8, 1))
    plan = Plan.even(RANKS, GLOBAL_BATCH, GLOBAL_BATCH, stage)
    group = harness.group()
    optimizer = HeteroZeroOptimizer(
        model.to(harness.device()), torch.optim.AdamW, plan=plan, process_group=group, lr=1e-2
    )
    follower = optimizer.follow_drift(profile(), replan=replan)
    rank, outcome, step = harness.rank(), Outcome([], [], [], []), 0

    def measured(timing: StepTiming) -> RankTimes:
        slower = FACTOR if rank == 1 and step in SLOW else 1.0
        return times(timing)._replace(compute_seconds=slower * times(timing).work.expected_seconds)

    times = StepTiming.times
    stack = ExitStack()
    if follower is not None:
        stack.enter_context(mock.patch.object(StepTiming, "times", measured))
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
            parts = []
            for micro_batch in optimizer.micro_batches(batch):
                loss = loss_fn(model, micro_batch)
                loss.backward()
                parts.append(loss.detach() * len(micro_batch) / GLOBAL_BATCH)
            total = torch.stack(parts).sum()
            torch.distributed.all_reduce(total, group=group)
            outcome.losses.append(float(total))
            optimizer.step()
            optimizer.zero_grad()
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


def follow_beside_a_rank_that_is_left_out() -> tuple[list[str], list[int]]:
    """Messages, and the samples of the last step; rank 2 is slower."""
    plan = Plan.even(RANKS, GLOBAL_BATCH, GLOBAL_BATCH, 1).beside((0,))
    model, group = nn.Linear(8, 1).to(harness.device()), harness.group()
    optimizer = HeteroZeroOptimizer(model, torch.optim.SGD, plan=plan, process_group=group, lr=1e-2)
    follower = optimizer.follow_drift(profile(RANKS + 1), replan="auto")
    assert (follower is None) == (harness.rank() == 0)
    rank, times, slower = harness.rank(), StepTiming.times, 1.0

    def measured(timing: StepTiming) -> RankTimes:
        return times(timing)._replace(compute_seconds=slower * times(timing).work.expected_seconds)

    with mock.patch.object(StepTiming, "times", measured):
        for step in range(SLOW.start + 20):
            slower = FACTOR if rank == 2 and step in SLOW else 1.0
            samples = optimizer.plan.samples(rank) if optimizer.plan else 0
            batch = torch.ones(samples, 8, device=harness.device()) if samples else None
            optimizer.train_step(loss_fn, batch)
    if follower is None or optimizer.plan is None:
        return [], []
    return follower.messages, list(map(optimizer.plan.samples, range(RANKS + 1)))


def test_plan_follows_ranks_beside_one_that_is_left_out(ranks: Pool) -> None:
    left_out, *active = ranks.run(follow_beside_a_rank_that_is_left_out, ranks=RANKS + 1)
    assert left_out == ([], [])
    (message,), samples = active[0]
    assert active == [active[0]] * RANKS
    assert "rank 2 is 2.5x slower" in message
    assert "new batches 0,5,2,5; +" in message
    assert samples == [0, 5, 2, 5]


def follow_in_vain(*, with_plan: bool) -> None:
    plan = Plan.even(RANKS, GLOBAL_BATCH, GLOBAL_BATCH, 1) if with_plan else None
    stage = None if with_plan else 1
    model, group = nn.Linear(8, 1).to(harness.device()), harness.group()
    optimizer = HeteroZeroOptimizer(
        model, torch.optim.SGD, plan=plan, stage=stage, process_group=group, lr=1e-2
    )
    optimizer.follow_drift(profile(), steps=harness.rank())


@pytest.mark.parametrize(
    ("with_plan", "message"),
    [(True, "the ranks passed different arguments"), (False, "needs an optimizer that was built")],
)
def test_wrong_arguments_are_refused_on_all_ranks(
    ranks: Pool, with_plan: bool, message: str
) -> None:
    failures = ranks.run_expecting_errors(follow_in_vain, with_plan=with_plan, ranks=RANKS)
    assert all(message in failure.message for failure in failures)
