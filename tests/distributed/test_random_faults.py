"""Random faults of one rank at random moments: no rank hangs, and every error names the rank.

A killed or stopped rank: all others raise within the deadline, counted from the fault. Missing
memory: all ranks raise, no rank applies the step, and training continues as if the step had never
begun. If memory is missing in the update itself, training ends on all ranks. `test_every_call.py`
has the exceptions.

`POPLAR_FAULT_SEEDS=0-49,137 pytest tests/distributed/test_random_faults.py` runs these faults only.
"""

from __future__ import annotations

import os
import random
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from types import FrameType
from typing import Any

import models
import pytest
import ranks as harness
import reference
import torch
import training
from communicators import on_host
from ranks import Failure, Silent, one_off
from reference import Recipe
from subset import choose
from torch import Tensor, nn
from training import Run

from poplar import HeteroZeroOptimizer, Plan, PoplarError


def seeds_of(given: str) -> list[int]:
    """The seeds of a list of numbers and ranges: `0-2,7` is 0, 1, 2 and 7."""
    bounds = [part.partition("-") for part in given.split(",")]
    return [seed for a, _, b in bounds for seed in range(int(a), int(b or a) + 1)]


GIVEN = os.environ.get("POPLAR_FAULT_SEEDS")
SEEDS = seeds_of(GIVEN) if GIVEN else range(choose(quick=9, full=150))
DEADLINE = timedelta(seconds=5)
"""Of ranks that wait for a stopped rank. Others need not wait for the deadline."""
STEPS = 3
MOST_STEPS = 400
"""A killed rank dies before this step."""
RECIPE = Recipe(batches=(12,) * STEPS, max_norm=0.5)
BLOCKS = 3

SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
KINDS = ("kill", "stop", "out of memory")
TRANSPORTS = ("process_group", "shared_memory", "hierarchical")
OPERATIONS = ("step", "evaluate", "apply_plan", "construction")
PLACES = ("forward", "backward", "allocation", "allocation")
"""Where memory is missing."""
ALLOCATIONS = frozenset(
    [
        "empty",
        "zeros",
        "full",
        "empty_like",
        "zeros_like",
        "new_empty",
        "new_zeros",
        "clone",
        "resize_",
    ]
)
DEVICE_MEMORY = ("poplar.comm.communicator", "poplar.comm.process_group")
"""Modules outside of `poplar.zero` that allocate on the model's device. Transports of CPU tensors
use host memory, which does not run out with an exception."""
FEW_BYTES = ("poplar.zero.agreement", "poplar.zero.gradient_norm")
"""Modules whose tensors are a few bytes."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What happens to one rank, and in which run."""

    seed: int
    kind: str
    transport: str
    plan: Plan
    open_form: bool
    rank: int
    step: int
    """The step in which, or after which, it happens."""
    place: str
    """An operation of `OPERATIONS` for signals, otherwise one of `PLACES`."""
    moment: int
    """Calls of Poplar's functions, or allocations, after which it happens."""
    pass_index: int
    block: int

    @classmethod
    def draw(cls, seed: int) -> Fault:
        """The fault of a seed."""
        generator = random.Random(seed)
        kind = KINDS[seed % len(KINDS)]
        ranks = generator.choice((3, 4))
        plan = random_plan(generator, stage=generator.randrange(4), ranks=ranks)
        busy = [(r, s) for r, own in enumerate(plan.micro_batches) for s, b in enumerate(own) if b]
        rank, pass_index = generator.choice(busy)
        if kind in SIGNALS:
            rank = generator.randrange(ranks)
            place = generator.choice(OPERATIONS)
            moment = int(10 ** generator.uniform(0.0, 3.7))
        else:
            place = generator.choice(PLACES)
            moment = generator.randrange(40)
        return cls(
            seed=seed,
            kind=kind,
            transport=TRANSPORTS[seed // len(KINDS) % len(TRANSPORTS)],
            plan=plan,
            open_form=generator.random() < 0.3,
            rank=rank,
            step=generator.randrange(STEPS),
            place=place,
            moment=moment,
            pass_index=pass_index,
            block=generator.randrange(BLOCKS),
        )

    @property
    def run(self) -> Run:
        timeout = DEADLINE if self.kind == "stop" else timedelta(seconds=60)
        options = {
            "communicator": self.transport,
            "timeout": timeout,
            # Others compare what follows with exact steps; `test_every_call.py` compresses them.
            "communication": "int4" if self.kind in SIGNALS and self.seed % 3 else "exact",
            "on_out_of_memory": "raise",  # `test_smaller_batches.py` tests steps that run again
        }
        return Run(RECIPE, self.plan, open_form=self.open_form, engine=options)

    @property
    def ranks(self) -> int:
        return self.plan.world_size


def random_plan(generator: random.Random, *, stage: int, ranks: int) -> Plan:
    """12 samples in up to 3 passes; some passes of some ranks are empty, some shares are 0."""
    passes = generator.randint(1, 3)
    micro_batches = [[0] * passes for _ in range(ranks)]
    for _ in range(12):
        micro_batches[generator.randrange(ranks)][generator.randrange(passes)] += 1
    weights = [generator.choice((0, 1, 2, 5)) for _ in range(ranks)]
    weights[generator.randrange(ranks)] += 1
    return Plan(
        stage=stage,
        global_batch=12,
        micro_batches=tuple(map(tuple, micro_batches)),
        shares=tuple(weight / sum(weights) for weight in weights),
    )


# On ranks


def two_hosts(fault: Fault) -> AbstractContextManager[Any]:
    """For the hierarchical transport: ranks 0 and 1 are one host, the others another one."""
    return on_host(harness.rank() // 2) if fault.transport == "hierarchical" else nullcontext()


class Countdown:
    """Calls `act` when the profiled events that `counts` selects have occurred `moment` times."""

    def __init__(self, moment: int, counts: Callable[..., bool], act: Callable[[], None]) -> None:
        self.left, self.counts, self.act = moment, counts, act
        self.fired = False

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if self.fired or not self.counts(frame, event, argument):
            return
        self.left -= 1
        if self.left < 0:
            self.fired = True
            where = f"{frame.f_code.co_filename}, line {frame.f_lineno}"
            harness.note(f"the fault at {time.monotonic()} s in {where}")
            self.act()

    @contextmanager
    def running(self) -> Iterator[None]:
        sys.setprofile(self)
        try:
            yield
        finally:
            sys.setprofile(None)


def module_of(frame: FrameType) -> str:
    return frame.f_globals.get("__name__", "")


def is_call_of_poplar(frame: FrameType, event: str, _argument: Any) -> bool:
    return event == "call" and module_of(frame).startswith("poplar.")


def is_allocation(frame: FrameType, event: str, argument: Any) -> bool:
    if event != "c_call" or getattr(argument, "__name__", "") not in ALLOCATIONS:
        return False
    if frame.f_code.co_name == "reshard":  # resizes to 0
        return False
    module = module_of(frame)
    is_engine = module.startswith("poplar.zero.") and module not in FEW_BYTES
    return is_engine or module in DEVICE_MEMORY


def run_out_of_memory() -> None:
    raise torch.OutOfMemoryError("out of memory")


# Signals


def train_until_lost(fault: Fault) -> tuple[float, float, Failure | None]:
    """Train until a rank is lost; returns when this rank raised, and its error."""
    how = SIGNALS[fault.kind]
    lost = Countdown(fault.moment, is_call_of_poplar, lambda: os.kill(os.getpid(), how))
    with two_hosts(fault), harness.catching() as caught:
        operate(fault, lost if fault.rank == harness.rank() else None)
    return time.monotonic(), (caught or [None])[0]


def operate(fault: Fault, lost: Countdown | None) -> None:
    """Build the optimizer and train; `lost` begins to count at the operation of the fault."""
    if lost and fault.place == "construction":
        sys.setprofile(lost)
    model, optimizer = training.prepare(fault.run)
    for step in range(MOST_STEPS):
        if lost and step == fault.step:
            sys.setprofile(lost)
        harness.note(f"in step {step}")
        training.take_step(fault.run, model, optimizer, step % STEPS)
        if fault.place == "evaluate":
            optimizer.evaluate(models.mean_over_samples, batches_of(fault))
        if fault.place == "apply_plan":
            shares = fault.plan.shares[::-1] if step % 2 == 0 else fault.plan.shares
            optimizer.apply_plan(replace(fault.plan, shares=shares))


def batches_of(fault: Fault) -> list[dict[str, Any]]:
    """Batches for `evaluate`; ranks have different numbers."""
    return [training.on_device(models.data(2, seed=9))] * (harness.rank() + 1)


# Missing memory


@dataclass(frozen=True)
class Outcome:
    """How a rank trained through a fault."""

    fired: bool
    """This rank has failed."""
    failure: Failure | None
    """The error of the operation with the fault."""
    later: Failure | None
    """The error of a step after it."""
    parameters: dict[str, Tensor] | None
    """After all steps."""


def train_through_fault(fault: Fault) -> Outcome:
    """Train; once a rank fails."""
    fired: list[bool] = [False]
    failure, left = None, None
    with two_hosts(fault), harness.catching() as caught:
        model, optimizer = training.prepare(fault.run)
        for step in range(STEPS):
            if step == fault.step:
                with harness.catching() as found:
                    fail_in_step(fault, model, optimizer, fired)
                failure = (found or [None])[0]
            training.take_step(fault.run, model, optimizer, step)
        left = training.whole_parameters(model, optimizer)
    return Outcome(fired[0], failure, (caught or [None])[0], left)


def fail_in_step(
    fault: Fault, model: nn.Module, optimizer: HeteroZeroOptimizer, fired: list[bool]
) -> None:
    """Take the step of the fault, in which one rank fails."""
    harness.note(f"in the fault of step {fault.step}")
    bad, passes = harness.rank() == fault.rank, iter(range(100))
    loss = training.loss_of(RECIPE)

    def fail(*_: Any) -> None:
        fired[0] = True
        run_out_of_memory()

    def faulty(model: nn.Module, batch: Any) -> Tensor:
        if not bad or next(passes) != busy_passes_before(fault):
            return loss(model, batch)
        with failing_block(model.blocks[fault.block], fault.place, fail):
            return loss(model, batch)

    batch = training.batch_of(fault.run, fault.step)
    countdown = Countdown(fault.moment, is_allocation, run_out_of_memory)
    with countdown.running() if bad and fault.place == "allocation" else nullcontext():
        try:
            take_faulty_step(fault, optimizer, model, batch, faulty)
        finally:
            fired[0] = fired[0] or countdown.fired


def take_faulty_step(
    fault: Fault,
    optimizer: HeteroZeroOptimizer,
    model: nn.Module,
    batch: Any,
    loss: Callable[..., Tensor],
) -> None:
    """A step in the form of the run."""
    if not fault.open_form:
        optimizer.train_step(loss, batch, max_norm=RECIPE.max_norm)
        return
    for micro_batch in optimizer.micro_batches(batch):
        loss(model, micro_batch).backward()
    optimizer.clip_grad_norm_(RECIPE.max_norm)
    optimizer.step()
    optimizer.zero_grad()


def busy_passes_before(fault: Fault) -> int:
    """Passes with samples of the failing rank before the one that fails."""
    return sum(1 for b in fault.plan.micro_batches[fault.rank][: fault.pass_index] if b)


@contextmanager
def failing_block(block: nn.Module, place: str, fail: Callable[..., None]) -> Iterator[None]:
    """The forward of the block calls `fail`, or the backward that passes its output."""

    def watch(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
        output.register_hook(fail)

    handle = None
    if place == "forward":
        handle = block.register_forward_pre_hook(fail)
    elif place == "backward":
        handle = block.register_forward_hook(watch)
    try:
        yield
    finally:
        if handle is not None:
            handle.remove()


# In the test process


@pytest.mark.parametrize("seed", SEEDS)
def test_no_rank_hangs_and_errors_name_the_failed_rank(seed: int) -> None:
    fault = Fault.draw(seed)
    print(fault)
    if fault.kind in SIGNALS:
        check_survivors(fault)
    else:
        check_training_continues(fault)


def check_survivors(fault: Fault) -> None:
    answers = one_off(fault.ranks, train_until_lost, fault, lost=[fault.rank])
    lost_at = time_of_fault(answers.pop(fault.rank))
    for answer in answers:
        assert not isinstance(answer, Failure), f"{fault}\n{answer}"
        raised_at, failure = answer
        assert failure is not None, f"{fault}\na rank trained without rank {fault.rank}"
        check_named(fault, failure)
        print(f"rank {failure.rank} raised {raised_at - lost_at:.2f} s after the fault")


def time_of_fault(lost: Silent) -> float:
    """When the lost rank was killed or stopped, by the clock that all processes share."""
    found = re.search(r"at: the fault at ([\d.]+) s", lost.stacks)
    assert found, f"the fault did not occur\n{lost}"
    return float(found[1])


def check_training_continues(fault: Fault) -> None:
    answers = one_off(fault.ranks, train_through_fault, fault)
    for answer in answers:
        assert not isinstance(answer, Failure), f"{fault}\n{answer}"
    fired = answers[fault.rank].fired
    for rank, outcome in enumerate(answers):
        what = f"{fault}\nrank {rank}: {outcome.failure}\nlater: {outcome.later}"
        if not fired:
            assert outcome.failure is None, what
            assert outcome.later is None, what
        elif all(other.failure for other in answers):
            check_named(fault, outcome.failure)
            assert outcome.later is None, what
            training.assert_close(outcome.parameters, reference.train(RECIPE).parameters, what)
        else:  # in the update
            assert fault.place == "allocation", what
            assert outcome.later is not None, what
            check_named(fault, outcome.later)


def check_named(fault: Fault, failure: Failure) -> None:
    """A rank other than the failed one raises an error that names the failed one."""
    if failure.rank != fault.rank:
        assert failure.is_a(PoplarError), f"{fault}\n{failure}"
        assert names(failure.message, fault.rank), f"{fault}\n{failure}"


def names(message: str, rank: int) -> bool:
    """Whether a message says that it waited for the rank, or that the rank failed."""
    without_own_rank = re.sub(r"^rank \d+: ", "", message)
    return any(
        rank in map(int, re.findall(r"\d+", found))
        for found in re.findall(r"rank(?:\(s\)|s)? ([\d, ]+)", without_own_rank)
    )
