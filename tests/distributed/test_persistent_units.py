"""Persistent units are unsharded once per step, and nothing else changes.

Every rank must issue the same collectives. So some ranks here have empty passes, own nothing, skip
units or fail in a pass; afterwards no memory may be left allocated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import models
import pytest
import ranks as harness
import reference
import torch
import training
from communicators import RecordingCommunicator
from models import ModelSpec
from ranks import Failure, Pool
from reference import Recipe, Steering
from torch import Tensor, nn
from training import (
    TWO_PASSES,
    UNEVEN,
    Run,
    assert_close,
    assert_exact,
    assert_raised,
    assert_same,
    train_many,
)

import poplar
from poplar import HeteroZeroOptimizer, Plan, UnitPlan
from poplar.comm import Bucket, Group
from poplar.comm.process_group import ProcessGroupCommunicator
from poplar.zero import unit as units

BLOCKS = ("blocks.0", "blocks.1", "blocks.2")
ALL = ("root", *BLOCKS)
EVEN = (0.25,) * 4
AN_IDLE_RANK = ((0, 1, 2), (0, 0, 0), (1, 1, 2), (2, 1, 2))
BAD = 2
"""The rank that fails, if only one does."""
RECIPE = Recipe(batches=(12, 12))
RAISE = {"on_out_of_memory": "raise"}
"""Otherwise `train_step` runs the step again in smaller micro-batches."""


def plan_of(*persistent: str, micro_batches: tuple = TWO_PASSES, shares: tuple = UNEVEN) -> Plan:
    return with_persistent(training.uneven(3, micro_batches, shares), *persistent)


def with_persistent(plan: Plan, *names: str) -> Plan:
    """The plan with these persistent units."""
    return replace(
        plan,
        units=tuple(UnitPlan(name, persistent=True) for name in names),
    )


# Exactness


CASES = {
    "uneven batches and shares": (BLOCKS[:1], Run(Recipe(), plan_of())),
    "a rank without samples": (ALL, Run(Recipe(), plan_of(micro_batches=AN_IDLE_RANK))),
    "one pass": (
        ALL,
        Run(Recipe(), plan_of(micro_batches=((5,), (0,), (3,), (4,)), shares=EVEN)),
    ),
    "clipping": (BLOCKS, Run(Recipe(max_norm=0.1), plan_of())),
    "activation checkpointing": (
        ("root", "blocks.1"),
        Run(Recipe(spec=ModelSpec(checkpointing=True)), plan_of()),
    ),
    "a unit that is entered several times": (
        ("blocks.0",),
        Run(
            Recipe(spec=ModelSpec(kind="albert"), batches=(12,) * 2),
            plan_of(),
            engine={"units": ["blocks.0"]},
        ),
    ),
    "frozen, tied, unused, two groups": (
        ALL[:3],
        Run(
            Recipe(spec=ModelSpec(frozen=True, tied=True, unused=True, two_groups=True)), plan_of()
        ),
    ),
    "own loop, token weights": (
        BLOCKS[1:],
        Run(Recipe(loss="tokens", max_norm=0.1), plan_of(), open_form=True),
    ),
    "each rank skips another unit": (
        BLOCKS[:2],
        Run(
            Recipe(
                steering=(
                    Steering(0, 4, "skip", 0),
                    Steering(4, 7, "skip", 1),
                    Steering(7, 12, "skip", None),
                ),
                batches=(12,) * 3,
            ),
            plan_of(micro_batches=((1, 3), (1, 2), (2, 1), (0, 2))),
        ),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_steps_are_exact_and_persistent_units_change_no_bit(ranks: Pool, case: str) -> None:
    persistent, run = CASES[case]
    trained = ranks.run(
        train_many, [run, replace(run, plan=with_persistent(run.plan, *persistent))]
    )
    assert_exact([by_run[1] for by_run in trained], run.recipe, case)
    resharding, persisting = trained[0]
    assert_same(persisting.parameters, resharding.parameters)
    assert persisting.losses == resharding.losses
    assert persisting.norms == resharding.norms


def test_persistent_units_change_no_bit_of_16_bit_parameters(ranks: Pool) -> None:
    recipe = Recipe(spec=ModelSpec(dtype=torch.bfloat16), max_norm=0.1, batches=(12, 12))
    engine = {"compute_dtype": torch.bfloat16}
    runs = [Run(recipe, plan_of(*persistent), engine=engine) for persistent in ((), ALL)]
    for resharding, persisting in ranks.run(train_many, runs):
        assert_same(persisting.parameters, resharding.parameters)


def evaluate_between_passes(run: Run, writeback: bool) -> tuple[list[float], dict[str, Tensor]]:
    """Evaluate and read the full parameters between passes of the user's loop and afterwards."""
    model, optimizer = training.prepare(run)
    loss, evaluated = training.loss_of(run.recipe), []

    def evaluate_now() -> None:
        loader = [training.batch_of(run, 0)] * (1 + harness.rank())
        evaluated.append(optimizer.evaluate(loss, loader))
        with optimizer.full_parameters(writeback=writeback), torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.9)
        evaluated.append(optimizer.evaluate(loss, loader))

    for step in range(0, len(run.recipe.batches), 2):
        with optimizer.no_sync():
            loss(model, training.batch_of(run, step)).backward()
        evaluate_now()
        loss(model, training.batch_of(run, step + 1)).backward()
        optimizer.step()
        evaluate_now()
    return evaluated, training.whole_parameters(model, optimizer)


@pytest.mark.parametrize("writeback", [False, True])
def test_evaluation_between_passes_is_unaffected(ranks: Pool, writeback: bool) -> None:
    recipe = Recipe(batches=(12,) * 4)
    each_three = ((3,),) * 4
    resharding, persisting = (
        ranks.run(
            evaluate_between_passes,
            Run(recipe, plan_of(*persistent, micro_batches=each_three)),
            writeback,
        )
        for persistent in ((), ALL)
    )
    for (expected, there), (found, here) in zip(resharding, persisting, strict=True):
        assert found == expected
        assert_same(here, there)


# Unshards


def unshards_of_steps(
    run: Run, act: Callable[[Run, nn.Module, HeteroZeroOptimizer, int], None]
) -> list[list[str]]:
    """Names of the units that were unsharded in each step, in order."""
    comm = RecordingCommunicator(Group.of(harness.group(), None))
    model, optimizer = training.prepare(replace(run, engine={"communicator": comm}))
    found = []
    for step in range(len(run.recipe.batches)):
        comm.events.clear()
        act(run, model, optimizer, step)
        found.append(units_unsharded(comm))
    return found


def units_unsharded(comm: RecordingCommunicator) -> list[str]:
    head = "the unshard of unit "
    return [event.removeprefix(head) for event in comm.events if event.startswith(head)]


def take_step(run: Run, model: nn.Module, optimizer: HeteroZeroOptimizer, step: int) -> None:
    training.take_step(run, model, optimizer, step)


def accumulate(run: Run, model: nn.Module, optimizer: HeteroZeroOptimizer, step: int) -> None:
    """Two backwards in a step of the user's loop; every rank has samples."""
    loss = training.loss_of(run.recipe)
    with optimizer.no_sync():
        loss(model, training.batch_of(run, step)).backward()
    loss(model, training.batch_of(run, step)).backward()
    optimizer.step()
    optimizer.zero_grad()


def accumulate_without_sync(
    run: Run, model: nn.Module, optimizer: HeteroZeroOptimizer, step: int
) -> None:
    """All backwards run inside `no_sync`, so `step` reduces the gradients."""
    loss = training.loss_of(run.recipe)
    with optimizer.no_sync():
        for _ in range(2):
            loss(model, training.batch_of(run, step)).backward()
    optimizer.step()
    optimizer.zero_grad()


LOOPS = {
    "train_step": (take_step, TWO_PASSES, False),
    "a rank without samples": (take_step, AN_IDLE_RANK, False),
    "own loop": (take_step, TWO_PASSES, True),
    "no_sync": (accumulate, ((3,),) * 4, False),
    "no_sync to the end": (accumulate_without_sync, ((3,),) * 4, False),
}


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("persistent", [("blocks.1",), ("root", "blocks.0", "blocks.2"), ALL])
def test_persistent_unit_is_unsharded_once_per_step(
    ranks: Pool, loop: str, persistent: tuple[str, ...]
) -> None:
    act, micro_batches, open_form = LOOPS[loop]
    recipe = Recipe(batches=(12,) * 3)  # the first step records the order
    plan = plan_of(micro_batches=micro_batches)
    before = ranks.run(unshards_of_steps, Run(recipe, plan, open_form), act)
    after = ranks.run(
        unshards_of_steps, Run(recipe, with_persistent(plan, *persistent), open_form), act
    )
    assert all(per_rank == after[0] for per_rank in after)
    for resharding, persisting in zip(before[0], after[0], strict=True):
        passes = Counter(resharding)["root"]
        assert passes == max(2, len(micro_batches[0]))
        assert Counter(resharding)["blocks.0"] == 2 * passes
        assert Counter(persisting) == {
            name: 1 if name in persistent else count for name, count in Counter(resharding).items()
        }


def evaluate_between_steps(
    run: Run, model: nn.Module, optimizer: HeteroZeroOptimizer, step: int
) -> None:
    for _ in range(2):
        optimizer.evaluate(training.loss_of(run.recipe), [training.batch_of(run, step)])


def test_evaluation_between_steps_unshards_every_unit(ranks: Pool) -> None:
    run = Run(Recipe(batches=(12, 12)), plan_of(micro_batches=((3,),) * 4))
    before = ranks.run(unshards_of_steps, run, evaluate_between_steps)
    run = replace(run, plan=with_persistent(run.plan, *ALL))
    assert ranks.run(unshards_of_steps, run, evaluate_between_steps) == before
    assert Counter(before[0][0])["blocks.1"] == 2


# Memory


def block_bytes() -> int:
    """Bytes of a block's flat parameter, in which each parameter is padded to 64 elements."""
    block = models.build(RECIPE.spec).blocks[1]
    return 4 * sum(-(-parameter.numel() // 64) * 64 for parameter in block.parameters())


def bytes_of_parameters(run: Run) -> tuple[int, int, int, bool]:
    """Bytes between steps, between two passes, after the last; and whether all are resharded."""
    model, optimizer = training.prepare(run)
    loss = training.loss_of(run.recipe)
    held = [optimizer.memory()["unsharded"]]
    with optimizer.no_sync():
        loss(model, training.batch_of(run, 0)).backward()
    held.append(optimizer.memory()["unsharded"])
    loss(model, training.batch_of(run, 0)).backward()
    held.append(optimizer.memory()["unsharded"])
    hidden = all(map(training.is_absent, model.parameters()))
    optimizer.step()
    return *held, hidden


@pytest.mark.parametrize("persistent", [(), ("blocks.1",), BLOCKS[1:]])
def test_only_persistent_units_use_memory_between_passes(
    ranks: Pool, persistent: tuple[str, ...]
) -> None:
    run = Run(RECIPE, plan_of(*persistent, micro_batches=((3,),) * 4))
    for between_steps, between_passes, after, hidden in ranks.run(bytes_of_parameters, run):
        assert between_passes - between_steps == len(persistent) * block_bytes()
        assert after == between_steps
        assert hidden


# Abandoned steps


def fail_in_second_pass(run: Run, model: nn.Module, optimizer: HeteroZeroOptimizer) -> None:
    passes, loss_fn = iter((1, 2)), training.loss_of(run.recipe)

    def loss(model: nn.Module, micro_batch: dict) -> Tensor:
        value = loss_fn(model, micro_batch)
        if harness.rank() == BAD and next(passes) == 2:
            raise ZeroDivisionError("in the middle of the step")
        return value

    optimizer.train_step(loss, training.batch_of(run, 1))


@contextmanager
def limited_memory(bad: int) -> Iterator[None]:
    """One rank has no memory to unshard until its pass has failed and freed some."""
    real, unshards = torch.UntypedStorage.resize_, iter(range(100))

    def resize(storage: torch.UntypedStorage, size: int) -> None:
        if harness.rank() == bad and size and next(unshards) == 2:
            raise torch.OutOfMemoryError("no memory to unshard")
        real(storage, size)

    torch.UntypedStorage.resize_ = resize
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = real


def run_out_of_memory(run: Run, model: nn.Module, optimizer: HeteroZeroOptimizer) -> None:
    with limited_memory(BAD):
        training.take_step(run, model, optimizer, 1)


def leave_the_loop(run: Run, model: nn.Module, optimizer: HeteroZeroOptimizer) -> None:
    for micro_batch in optimizer.micro_batches(training.batch_of(run, 1)):
        training.loss_of(run.recipe)(model, micro_batch).backward()
        if harness.rank() == BAD:
            break
    optimizer.step()


def skip_a_pass(run: Run, model: nn.Module, optimizer: HeteroZeroOptimizer) -> None:
    with optimizer.no_sync():
        training.loss_of(run.recipe)(model, training.batch_of(run, 1)).backward()
    optimizer.zero_grad()


def fail_in_implicit_pass(run: Run, model: nn.Module, optimizer: HeteroZeroOptimizer) -> None:
    def fail(_gradient: Tensor) -> None:
        raise ZeroDivisionError("in the middle of a backward")

    def watch(_module: nn.Module, _inputs: object, output: Tensor) -> None:
        output.register_hook(fail)

    handle = model.blocks[1].register_forward_hook(watch)
    try:
        skip_a_pass(run, model, optimizer)
    finally:
        handle.remove()
        optimizer.zero_grad()


Mistake = Callable[[Run, nn.Module, HeteroZeroOptimizer], None]


def between_good_steps(run: Run, mistake: Mistake) -> tuple[Failure | None, int, dict]:
    """Run a correct step, a failing one, a correct one; returns failure, leaked bytes, weights."""
    model, optimizer = training.prepare(run)
    training.take_step(run, model, optimizer, 0)
    before = optimizer.memory()["unsharded"]
    with harness.catching() as caught:
        mistake(run, model, optimizer)
    persisting = optimizer.memory()["unsharded"] - before
    training.take_step(run, model, optimizer, 1)
    return (caught or [None])[0], persisting, training.whole_parameters(model, optimizer)


@pytest.mark.parametrize(
    "mistake",
    [
        fail_in_second_pass,
        run_out_of_memory,
        leave_the_loop,
        skip_a_pass,
        fail_in_implicit_pass,
    ],
)
def test_abandoned_step_frees_memory_and_training_continues(ranks: Pool, mistake: Mistake) -> None:
    run = Run(RECIPE, plan_of("root", "blocks.1"), engine=RAISE)
    results = ranks.run(between_good_steps, run, mistake)
    for rank, (failure, persisting, left) in enumerate(results):
        assert failure is not None, f"rank {rank}"
        assert persisting == 0, f"rank {rank} holds {persisting} bytes"
        assert_close(left, reference.train(RECIPE).parameters, f"rank {rank}")


def out_of_memory_at_first(run: Run, bad: int) -> tuple[Failure | None, dict]:
    """Run out of memory in the first step, while the leader records the order; then two steps."""
    model, optimizer = training.prepare(run)
    with harness.catching() as caught, limited_memory(bad):
        training.take_step(run, model, optimizer, 0)
    for step in range(2):
        training.take_step(run, model, optimizer, step)
    return (caught or [None])[0], training.whole_parameters(model, optimizer)


@pytest.mark.parametrize("persistent", [(), ("blocks.1",)])
@pytest.mark.parametrize("bad", range(4))
@pytest.mark.parametrize("own_loop", [False, True], ids=["train_step", "own loop"])
def test_out_of_memory_in_first_pass_blocks_no_rank(
    ranks: Pool, own_loop: bool, bad: int, persistent: tuple[str, ...]
) -> None:
    plan = plan_of(*persistent, micro_batches=((3,),) * 4)
    run = Run(RECIPE, plan, open_form=own_loop, engine=RAISE)
    for rank, (failure, left) in enumerate(ranks.run(out_of_memory_at_first, run, bad)):
        assert failure is not None, f"rank {rank} took a step without rank {bad}"
        assert_close(left, reference.train(RECIPE).parameters, f"rank {rank}")


class FailingBuffer(ProcessGroupCommunicator):
    """Fails to allocate, once, the second buffer of a unit with several flat parameters."""

    def __init__(self, group: Group, bad: int) -> None:
        super().__init__(group)
        self.bad = bad
        self.refuses = False
        self.buffers = 0

    def buffer(self, *arguments: Any, **options: Any) -> Bucket:
        self.buffers += self.refuses
        if self.refuses and self.buffers == 2 and harness.rank() == self.bad:
            raise torch.OutOfMemoryError("no memory for a bucket")
        return super().buffer(*arguments, **options)


def out_of_memory_for_a_bucket(
    run: Run, bad: int, good_steps: int
) -> tuple[Failure | None, dict[str, Tensor]]:
    """Fail in the step after some correct ones; then run a correct step."""
    comm = FailingBuffer(Group.of(harness.group(), None), bad)
    units.MAX_FLAT_BYTES, before = 1, units.MAX_FLAT_BYTES  # one flat parameter per parameter
    try:
        model, optimizer = training.prepare(replace(run, engine={"communicator": comm, **RAISE}))
    finally:
        units.MAX_FLAT_BYTES = before
    for step in range(good_steps):
        training.take_step(run, model, optimizer, step)
    comm.refuses = True
    with harness.catching() as caught:
        training.take_step(run, model, optimizer, good_steps)
    comm.refuses = False
    for step in range(good_steps, 2):
        training.take_step(run, model, optimizer, step)
    return (caught or [None])[0], training.whole_parameters(model, optimizer)


@pytest.mark.parametrize("good_steps", [0, 1], ids=["first step", "second step"])
@pytest.mark.parametrize("bad", [0, 2])
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("micro_batches", [(3,), (2, 1)], ids=["one pass", "two passes"])
@pytest.mark.parametrize("own_loop", [False, True], ids=["train_step", "own loop"])
def test_issued_reductions_are_not_repeated_after_out_of_memory(
    ranks: Pool,
    own_loop: bool,
    micro_batches: tuple[int, ...],
    stage: int,
    bad: int,
    good_steps: int,
) -> None:
    plan = replace(plan_of(micro_batches=(micro_batches,) * 4), stage=stage)
    run = Run(RECIPE, plan, open_form=own_loop)
    results = ranks.run(out_of_memory_for_a_bucket, run, bad, good_steps)
    for rank, (failure, left) in enumerate(results):
        assert failure is not None, f"rank {rank} took a step without rank {bad}"
        assert_close(left, reference.train(RECIPE).parameters, f"rank {rank}")


# Plans


def change_plans(run: Run, plans: Sequence[Plan]) -> tuple[list[list[str]], dict[str, Tensor]]:
    """Run a step under the run's plan, and one under each other plan."""
    comm = RecordingCommunicator(Group.of(harness.group(), None))
    model, optimizer = training.prepare(replace(run, engine={"communicator": comm}))
    found = []
    for step, plan in enumerate([run.plan, *plans]):
        if step:
            optimizer.apply_plan(plan)
        comm.events.clear()
        training.take_step(replace(run, plan=plan), model, optimizer, step)
        found.append(units_unsharded(comm))
    return found, training.whole_parameters(model, optimizer)


def test_new_plan_may_change_persistent_units(ranks: Pool) -> None:
    recipe = Recipe(batches=(12,) * 4)
    persistent = [(), ("blocks.0",), ("root", "blocks.1"), ()]
    first, *others = [
        plan_of(*names, shares=shares)
        for names, shares in zip(persistent, (UNEVEN, UNEVEN, EVEN, EVEN), strict=True)
    ]
    for unshards, parameters in ranks.run(change_plans, Run(recipe, first), others):
        for names, unsharded in zip(persistent, unshards, strict=True):
            once = {name for name, count in Counter(unsharded).items() if count == 1}
            assert once == set(names)
        assert_close(parameters, reference.train(recipe).parameters)


def test_new_persistent_units_keep_unit_shares(ranks: Pool) -> None:
    recipe = Recipe(batches=(12, 12))
    own = UnitPlan("blocks.1", shares=(0, 0, 0.9, 0.1))
    plan = replace(plan_of(), units=(own,))
    later = replace(plan_of("blocks.0", shares=EVEN))
    later = replace(later, units=(*later.units, own))
    for unshards, parameters in ranks.run(change_plans, Run(recipe, plan), [later]):
        assert [Counter(step)["blocks.0"] for step in unshards] == [4, 1]
        assert_close(parameters, reference.train(recipe).parameters)


def apply(run: Run, plan: Plan) -> tuple[Failure | None, dict[str, Tensor]]:
    model, optimizer = training.prepare(run)
    training.take_step(run, model, optimizer, 0)
    with harness.catching() as caught:
        optimizer.apply_plan(plan)
    training.take_step(run, model, optimizer, 1)
    return (caught or [None])[0], training.whole_parameters(model, optimizer)


@pytest.mark.parametrize(
    ("plan", "patterns"),
    [
        (plan_of("blocks.7"), ("['blocks.7']", "does not have", "'root', 'blocks.0'")),
        (Plan.even(3, 12, 4, stage=3), ("the plan is for 3 ranks", "has 4")),
    ],
)
def test_unsupported_plan_change_raises_and_changes_nothing(
    ranks: Pool, plan: Plan, patterns: tuple[str, ...]
) -> None:
    results = ranks.run(apply, Run(RECIPE, plan_of("blocks.0")), plan)
    assert_raised([failure for failure, _ in results], *patterns, kind=ValueError)
    for _, parameters in results:
        assert_close(parameters, reference.train(RECIPE).parameters)


# Profiles


def train_with_names_of_a_profile(recipe: Recipe) -> tuple[tuple[str, ...], dict[str, Tensor]]:
    """Merge small blocks in the profile and in training; all units are persistent."""
    units.MERGED_UNIT_BYTES, before = 2 << 20, units.MERGED_UNIT_BYTES
    try:
        profile = poplar.profile_cluster(
            models.build(recipe.spec),
            training.loss_of(recipe),
            training.on_device(recipe.part(0, 0, 1)),
            process_group=harness.group(),
            max_batch=1,
            stages=(3,),
            seconds=0.1,
            cache=False,
        )
        names = profile.model.unit_names
        trajectory = training.train(Run(recipe, plan_of(*names)))
    finally:
        units.MERGED_UNIT_BYTES = before
    return names, trajectory.parameters


def test_profile_names_the_units_of_the_model(ranks: Pool) -> None:
    torch.manual_seed(0)
    for names, parameters in ranks.run(train_with_names_of_a_profile, RECIPE):
        assert names == ("root", "blocks.0..blocks.2")
        assert_close(parameters, reference.train(RECIPE).parameters)
