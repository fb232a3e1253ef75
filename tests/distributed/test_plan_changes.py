"""`apply_plan` changes batches, passes, shares, units and the stage between two steps.

Training across changes equals training in one process on the same global batches.
"""

from __future__ import annotations

import multiprocessing
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import models
import pytest
import ranks as harness
import torch
import training
from models import ModelSpec
from ranks import Failure, Pool
from reference import Recipe, Trajectory
from subset import choose
from test_memory import live_bytes
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from training import STAGES, Run, assert_exact

import poplar
from poplar import HeteroBatchSampler, HeteroZeroOptimizer, Plan, UnitPlan
from poplar.comm import Communicator, Work
from poplar.comm.communicator import Splits
from poplar.comm.shard_layout import Layout
from poplar.training import moved_engine
from poplar.zero import unit as units

SPEC = ModelSpec(frozen=True, tied=True, unused=True, two_groups=True)
SHARES = ((0.25,) * 4, (0.55, 0.25, 0.15, 0.05), (0.6, 0.0, 0.4, 0.0), (0.0, 1.0, 0.0, 0.0))
BATCHES = (
    ((3,), (3,), (3,), (3,)),
    ((1, 3), (1, 2), (2, 2), (0, 1)),
    ((5,), (0,), (3,), (4,)),
    ((1, 2, 2), (4,), (1, 2), ()),
)
OWN_SHARES = (UnitPlan("blocks.1", shares=(0.1, 0.2, 0.3, 0.4)),)


def plan_of(stage: int, batches: int = 1, shares: int = 1, *, own: bool = False) -> Plan:
    passes = BATCHES[batches]
    if stage >= 2 and batches == 3:  # where all ranks have the same number of passes
        passes = ((1, 2, 2), (0, 0, 4), (0, 1, 2), (0, 0, 0))
    units = OWN_SHARES if own else ()
    return Plan(
        stage=stage, global_batch=12, micro_batches=passes, shares=SHARES[shares], units=units
    )


def train(run: Run, plans: Sequence[Plan | None]) -> Trajectory:
    """Train with a change to a plan, if there is one, before each step."""
    model, optimizer = training.prepare(run)
    identities = [id(parameter) for parameter in model.parameters()]
    scheduler = run.recipe.scheduler(optimizer)
    made = []
    for step, plan in enumerate(plans):
        if plan is not None:
            optimizer.apply_plan(plan)
            run = replace(run, plan=plan)
            assert optimizer.plan == plan
        made.append(training.take_step(run, model, optimizer, step))
        scheduler.step()
    assert identities == [id(parameter) for parameter in model.parameters()]
    return Trajectory(
        parameters=training.whole_parameters(model, optimizer),
        losses=tuple(loss for loss, _ in made),
        norms=tuple(norm for _, norm in made),
    )


def random_plan(chance: random.Random) -> Plan:
    own = chance.random() < 0.3
    return plan_of(chance.choice(STAGES), chance.randrange(4), chance.randrange(4), own=own)


@pytest.mark.parametrize("seed", choose(quick=[1, 2], full=range(4)))
def test_random_changes_equal_one_process(ranks: Pool, seed: int) -> None:
    chance = random.Random(seed)
    recipe = Recipe(spec=SPEC, batches=(12,) * 8, max_norm=0.1, decaying=True)
    if seed % 2:
        momentum = (("lr", 0.1), ("momentum", 0.9))
        recipe = replace(recipe, optimizer="SGD", options=momentum, max_norm=None)
    changes = [None if chance.random() < 0.3 else random_plan(chance) for _ in recipe.batches]
    run = Run(recipe, random_plan(chance), open_form=seed >= 2)
    assert_exact(ranks.run(train, run, changes), recipe, f"{run.plan}\n{changes}")


def whole_state(run: Run, plans: Sequence[Plan]) -> list[object]:
    """Parameters and whole optimizer state after changes to plans and back."""
    model, optimizer = training.prepare(run)
    training.take_step(run, model, optimizer, 0)
    found = []
    for plan in (*plans, run.plan):
        found.append((optimizer.full_state_dict(to=0) or {}).get("state"))
        optimizer.apply_plan(plan)
    found.append((optimizer.full_state_dict(to=0) or {}).get("state"))
    return [*found, training.whole_parameters(model, optimizer)]


@pytest.mark.parametrize(("dtype", "host"), [(torch.bfloat16, ()), (torch.float32, (1, 0, 0.5, 0))])
def test_state_keeps_its_bits_through_all_stages(
    ranks: Pool, dtype: torch.dtype, host: tuple[float, ...]
) -> None:
    recipe = Recipe(spec=replace(SPEC, dtype=dtype), batches=(12,))
    plans = [replace(plan_of(stage, shares=stage), host_state=host) for stage in (3, 1, 0, 2, 3, 0)]
    run = Run(recipe, plan_of(2))
    *states, changed = ranks.run(whole_state, run, plans)[0]
    *_, unchanged = ranks.run(whole_state, run, [])[0]
    training.assert_same(changed, unchanged)
    for state in states:
        torch.testing.assert_close(state, states[0], rtol=0, atol=0)


LARGE = ModelSpec(kind="mlp", blocks=8, width=300, hidden=420, dtype=torch.bfloat16)


class CountingCommunicator:
    """Counts the bytes that this rank receives in a change of plan."""

    def __init__(self, comm: Communicator) -> None:
        self.received, self.comm = 0, comm
        self._all_to_all, self._all_gather = comm.all_to_all, comm.all_gather

    def all_to_all(self, received: Tensor, sent: Tensor, sizes: Splits, *, what: str) -> Work:
        others = sum(sizes.received) - sizes.received[harness.rank()]
        self.received += others * received.element_size()
        return self._all_to_all(received, sent, sizes, what=what)

    def all_gather(self, data: Tensor, layout: Layout, **options: Any) -> Work:
        others = layout.numel - layout.size(harness.rank())
        self.received += others * data.element_size()
        return self._all_gather(data, layout, **options)


@dataclass
class Counted:
    """Of a change of plan, on one rank."""

    received: int
    least: int
    """Bytes of what the rank has afterwards and had not before."""
    above: int
    """Bytes above the larger one of the two steady states."""
    unit: int
    """Elements of the largest unit."""


def count_change(run: Run, plan: Plan) -> Counted:
    with mock.patch.object(units, "MAX_FLAT_BYTES", 1 << 20):
        model, optimizer = training.prepare(run)
    training.take_step(run, model, optimizer, 0)
    counting = CountingCommunicator(optimizer._training.engine.comm)
    owned, largest = owned_ranges(optimizer), largest_unit(optimizer)
    peak, before = 0, live_bytes()
    take = moved_engine.EngineMove._take_state

    def take_and_look(move: Any, *given: Any) -> None:
        nonlocal peak
        take(move, *given)
        peak = max(peak, live_bytes())

    with (
        mock.patch.object(units, "MAX_FLAT_BYTES", 1 << 20),
        mock.patch.object(counting.comm, "all_to_all", counting.all_to_all),
        mock.patch.object(counting.comm, "all_gather", counting.all_gather),
        mock.patch.object(moved_engine.EngineMove, "_take_state", take_and_look),
    ):
        optimizer.apply_plan(plan)
    least = 0
    for name, after in owned_ranges(optimizer).items():
        for (low, high), (first, last), size in zip(after, owned[name], (2, 12), strict=True):
            least += size * (high - low - max(0, min(high, last) - max(low, first)))
    steady = max(before, live_bytes())
    largest = max(largest, largest_unit(optimizer))
    return Counted(counting.received, least, peak - steady, largest)


def owned_ranges(optimizer: HeteroZeroOptimizer) -> dict[str, list[tuple[int, int]]]:
    """The elements of each parameter whose values, and whose state, this rank has."""
    found, sharded = {}, optimizer._training.engine.strategy.shards_parameters
    for flat in optimizer._training.engine.trained:
        for position, parameter in enumerate(flat.parameters):
            state = flat.owned_range(position)
            values = state if sharded else (0, parameter.numel())
            found[flat.names[position]] = [values, state]
    return found


def largest_unit(optimizer: HeteroZeroOptimizer) -> int:
    return max(sum(flat.numel for flat in unit.flats) for unit in optimizer._training.engine.units)


@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 2), (2, 0), (0, 3), (1, 2)])
def test_change_moves_the_least_bytes_and_holds_one_more_unit(
    ranks: Pool, before: int, after: int
) -> None:
    shares = ((0.5, 0.3, 0.2, 0.0), (0.1, 0.2, 0.3, 0.4))
    old, new = (
        replace(Plan.even(4, 4, 1, stage=stage), shares=own)
        for stage, own in zip((before, after), shares, strict=True)
    )
    counted = ranks.run(count_change, Run(Recipe(spec=LARGE, batches=(4,)), old), new)
    for each in counted:
        # Parameters are padded to 64 elements; step counters and scalars are small.
        assert each.received <= 1.01 * each.least + 20_000, each
        # 14 bytes of state per element, and the transport's buffer.
        assert each.above <= (14 + 4) * each.unit + 50_000, each
    assert sum(each.received for each in counted) > 0 or (before, after) == (0, 3)


# With samplers and loaders


class Samples(Dataset[dict[str, Tensor]]):
    def __init__(self, samples: int) -> None:
        self._data = models.data(samples, seed=7)

    def __len__(self) -> int:
        return len(self._data["tokens"])

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: values[index] for name, values in self._data.items()}


SAMPLES = 64
EPOCHS = 2


def one_process() -> tuple[list[float], dict[str, Tensor]]:
    """Losses and parameters of plain torch on the same global batches."""
    model = models.build(ModelSpec())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-5)
    sampler = HeteroBatchSampler(SAMPLES, Plan.even(1, 12, 12, stage=0), seed=3, rank=0)
    losses = []
    for _ in range(EPOCHS):
        for batch in DataLoader(Samples(SAMPLES), batch_sampler=sampler):
            loss = models.mean_over_samples(model, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses, dict(model.named_parameters())


def loader_of(sampler: HeteroBatchSampler, workers: int) -> DataLoader[Any]:
    # Ranks draw differently far ahead.
    workers = workers and workers + harness.rank() % 2
    # The processes of the pool are daemons, which must not have children otherwise.
    multiprocessing.current_process()._config["daemon"] = False
    return DataLoader(Samples(SAMPLES), batch_sampler=sampler, num_workers=workers)


def step_on(optimizer: HeteroZeroOptimizer, batch: Any, *, open_form: bool) -> float | None:
    if not open_form:
        return float(optimizer.train_step(models.mean_over_samples, batch).loss)
    for micro_batch in optimizer.micro_batches(batch):
        models.mean_over_samples(optimizer._training.model, micro_batch).backward()
    optimizer.step()
    optimizer.zero_grad()
    return None


def train_with_loader(
    plans: Sequence[Plan], workers: int, *, open_form: bool, resume_at: int, folder: str
) -> tuple[list[float | None], list[int], dict[str, Tensor]]:
    """Train two epochs, change the plan after steps 0, 3, 6, ..., and resume once."""

    def start(plan: Plan) -> HeteroZeroOptimizer:
        model = models.build(ModelSpec())
        given: dict[str, Any] = {"lr": 1e-3, "eps": 1e-5, "process_group": harness.group()}
        return HeteroZeroOptimizer(model, torch.optim.AdamW, plan=plan, **given)

    optimizer = start(plans[0])
    sampler = HeteroBatchSampler(SAMPLES, plans[0], seed=3)
    losses, changes, later, done = [], [], list(plans[1:]), 0
    while sampler.epoch < EPOCHS and len(losses) < EPOCHS * len(sampler):
        for batch in loader_of(sampler, workers):
            losses.append(step_on(optimizer, batch, open_form=open_form))
            done = len(losses) % len(sampler)
            if len(losses) % 3 == 1 and later:
                changes.append(optimizer.apply_plan(later.pop(0)) - optimizer.steps)
            if len(losses) == resume_at:
                break
        if len(losses) == resume_at:
            poplar.save_checkpoint(folder, optimizer)
            state = sampler.state_dict(steps_done=done)
            optimizer = start(plans[-1])
            poplar.load_checkpoint(folder, optimizer)
            sampler = HeteroBatchSampler(SAMPLES, plans[-1], seed=3)
            sampler.load_state_dict(state)
            later = [plans[0], plans[1]]
    return losses, changes, training.whole_parameters(optimizer._training.model, optimizer)


@pytest.mark.parametrize(("workers", "open_form"), [(0, True), (1, False)])
def test_sampler_follows_with_loader_workers_and_resuming(
    ranks: Pool, tmp_path: Path, workers: int, open_form: bool
) -> None:
    plans = [plan_of(2), plan_of(3, 2, 2), plan_of(1, 3, 0), plan_of(0, 0, 1)]
    given = {"open_form": open_form, "resume_at": 8, "folder": str(tmp_path / "saved")}
    losses, parameters = one_process()
    for own, changes, found in ranks.run(train_with_loader, plans, workers, **given):
        assert (max(changes) > 0) == (workers > 0), changes
        if not open_form:
            torch.testing.assert_close(own, losses, rtol=1e-5, atol=0)
        training.assert_close(found, parameters)


def apply_early(plans: Sequence[Plan]) -> tuple[Failure, int, float, Failure]:
    """Pass `at_step` for a batch that a worker has drawn; then train a batch twice."""
    optimizer = HeteroZeroOptimizer(
        models.build(ModelSpec()),
        torch.optim.AdamW,
        plan=plans[0],
        process_group=harness.group(),
        lr=1e-3,
    )
    sampler = HeteroBatchSampler(SAMPLES, plans[0], seed=3, rank=harness.rank())
    batches = iter(loader_of(sampler, 1))
    step_on(optimizer, next(batches), open_form=False)
    with harness.catching() as early:
        optimizer.apply_plan(plans[1], at_step=2)
    at = optimizer.apply_plan(plans[1], at_step=5)
    for _ in range(4):
        loss = step_on(optimizer, next(batches), open_form=False)
    old = optimizer.plan
    with harness.catching() as wrong:
        step_on(optimizer, models.part(models.data(12, seed=1), 0, 6), open_form=False)
    assert (old, optimizer.plan) == (plans[0], plans[1])
    return early[0], at, loss or 0.0, wrong[0]


def test_change_before_drawn_batches_and_batch_of_another_plan_raise(ranks: Pool) -> None:
    plans = [Plan.manual("6,6", stage=1), Plan.manual("4,8", stage=2)]
    failures = ranks.run(apply_early, plans, ranks=2)
    # Workers draw 2 batches each ahead; odd ranks have 2 workers.
    text = "up to the steps before {0: 3, 1: 5}"
    training.assert_raised([early for early, *_ in failures], text, "at_step=5", kind=ValueError)
    assert [at for _, at, *_ in failures] == [5] * 2
    wrong = [failure for *_, failure in failures]
    training.assert_raised(wrong, "but the plan gives this rank")
