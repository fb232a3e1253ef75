"""`apply_plan` changes batches, passes, shares, units and the stage between two steps.

Training across changes equals training in one process on the same global batches.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pytest
import ranks as harness
import torch
import training
from models import ModelSpec
from ranks import Pool
from reference import Recipe, Trajectory
from test_memory import live_bytes
from torch import Tensor
from training import STAGES, Run, assert_exact

from poplar import HeteroZeroOptimizer, Plan, UnitPlan
from poplar.checkpoint import plan_change
from poplar.comm import Communicator, Work
from poplar.comm.communicator import Splits
from poplar.comm.shard_layout import Layout
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


@pytest.mark.parametrize("seed", range(4))
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
    counting = CountingCommunicator(optimizer._engine.comm)
    owned, largest = owned_ranges(optimizer), largest_unit(optimizer)
    peak, before = 0, live_bytes()
    take = plan_change._EngineMove._take_state

    def take_and_look(move: Any, *given: Any) -> None:
        nonlocal peak
        take(move, *given)
        peak = max(peak, live_bytes())

    with (
        mock.patch.object(units, "MAX_FLAT_BYTES", 1 << 20),
        mock.patch.object(counting.comm, "all_to_all", counting.all_to_all),
        mock.patch.object(counting.comm, "all_gather", counting.all_gather),
        mock.patch.object(plan_change._EngineMove, "_take_state", take_and_look),
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
    found, sharded = {}, optimizer._engine.strategy.shards_parameters
    for flat in optimizer._engine.trained:
        for position, parameter in enumerate(flat.parameters):
            state = flat.owned_range(position)
            values = state if sharded else (0, parameter.numel())
            found[flat.names[position]] = [values, state]
    return found


def largest_unit(optimizer: HeteroZeroOptimizer) -> int:
    return max(sum(flat.numel for flat in unit.flats) for unit in optimizer._engine.units)


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
