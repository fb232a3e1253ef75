"""An error at any call of a step with DDP or FSDP2 reaches all ranks.

A rank raises when it enters a Python function of Poplar in the constructor of
`UnequalPasses`, in its loop, in `backward` or in `global_loss`. Then all ranks raise at once, or
are stopped with the cause, and none goes on alone.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from types import FrameType
from typing import Any

import pytest
import ranks as harness
import torch.distributed as dist
import unequal_passes as training
from failing_calls import (
    DEADLINE,
    SECONDS,
    Calls,
    Place,
    attempt,
    gathered,
    places_to_fail,
)
from ranks import Pool
from test_every_call import Outcome
from unequal_passes import Job

from poplar import Plan

RANKS = 2
PARTS = ("building", "a step")
BEFORE = {"__call__", "__iter__", "__next__", "__init__", "__enter__", "__exit__", "__del__"}
"""Functions that are entered before a collective method begins, or at any time."""


class CallsOfPasses(Calls):
    """Counts the calls of Poplar's functions in the methods of `UnequalPasses`."""

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        module, name = frame.f_globals.get("__name__", ""), frame.f_code.co_name
        loop = module == "poplar.zero.micro_batch_loop" and name == "close"
        if name not in BEFORE and not loop:
            super().__call__(frame, event, argument)


def job_of(stage: int) -> Job:
    micro_batches = ((2, 1), (1,)) if stage < 2 else ((2, 1), (1, 0))
    plan = Plan(stage=stage, global_batch=4, micro_batches=micro_batches, shares=(0.5, 0.5))
    return Job("tagger", plan)


class Training:
    """A model in an engine, and its steps."""

    def __init__(self, job: Job, group: dist.ProcessGroup) -> None:
        self.job = job
        self.model = training.wrap(job, group=group)
        self.optimizer = training.optimizer_of(job, self.model)
        self.batch = training.part_of(job, 0)
        self.passes: Any = None

    def build(self) -> None:
        self.passes = self.job.engine.UnequalPasses(self.model, self.job.plan, timeout=DEADLINE)

    def take_step(self) -> None:
        for micro_batch in self.passes(self.batch, weight=self.job.weight):
            self.passes.backward(training.loss_fn(self.model, micro_batch))
        self.passes.global_loss()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def reach(self, part: str) -> Any:
        """What fails, after what precedes it."""
        if part == "building":
            return self.build
        self.build()
        self.take_step()
        return self.take_step


def count_calls(stage: int, part: str) -> list[Counter[str]]:
    """Calls of all ranks."""
    with harness.separate_group() as group:
        act = Training(job_of(stage), group).reach(part)
        calls = CallsOfPasses(None, after=after(part))
        with calls.running():
            act()
        return gathered(calls.names, group)


def after(part: str) -> str:
    """In the constructor, once the process group of the engine is known."""
    return "of" if part == "building" else ""


def fail_at(stage: int, part: str) -> dict[Place, Outcome]:
    """What this rank does if a rank fails at each of the places."""
    outcomes = {}
    called = count_calls(stage, part)
    for place in places_to_fail(called, f"{part} {stage}", quick=2, full=40):
        harness.note(f"{stage} {part} {place}")
        with harness.separate_group() as group:  # a stopped rank closes its connections
            outcomes[place] = fail_once(Training(job_of(stage), group), part, place)
    return outcomes


def fail_once(trained: Training, part: str, place: Place) -> Outcome:
    act = trained.reach(part)
    mine = place if place.rank == harness.rank() else None
    calls = CallsOfPasses(mine, after=after(part))
    raised = attempt(act, calls)
    raised_at = time.monotonic()
    later = attempt(trained.take_step) if trained.passes is not None else raised
    return Outcome(calls.fired, calls.fired_at, raised, raised_at, later)


def problem_of(place: Place, outcomes: Sequence[Outcome]) -> str | None:
    """What is wrong with what the ranks did; None: nothing."""
    fault = outcomes[place.rank]
    if not fault.fired or not any(outcome.raised for outcome in outcomes):
        return None  # fewer calls than in another step, or a weak reference's callback
    if any(o.raised is not None and o.raised_at - fault.fired_at > SECONDS for o in outcomes):
        return "a rank raised late"
    if all(o.raised and not o.later for o in outcomes):
        return None  # all ranks have dropped the step, and training continues
    if not all(o.raised or o.later for o in outcomes):
        return "some ranks went on"
    causes = (fault.fired, "left the loop over its passes")  # of an error in the body of the loop
    named = all(any(c in f"{o.raised} {o.later}" for c in causes) for o in outcomes)
    return None if named else "the ranks stopped without the cause"


@pytest.mark.every_combination
@pytest.mark.filterwarnings("ignore:rank . left the loop")
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_an_error_at_any_call_reaches_all_ranks(ranks: Pool, stage: int, part: str) -> None:
    by_rank = ranks.run(fail_at, stage, part, ranks=RANKS, timeout=1200)
    found = [
        f"{place}: {problem}: {outcomes}"
        for place in by_rank[0]
        if (problem := problem_of(place, outcomes := [o[place] for o in by_rank])) is not None
    ]
    assert not found, "\n".join(found)
