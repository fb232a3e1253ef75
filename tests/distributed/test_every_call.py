"""An error at any call that a rank makes in a step reaches all ranks.

A rank raises when it enters the n-th Python function of a step, of Poplar or of the user, for every
n. Then either all ranks raise, no rank applies the step, and the next step is right; or all ranks
stop, with the cause, and none goes on. No rank goes on with a part of the parameters left behind.
"""

from __future__ import annotations

import gc
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
from typing import Any

import pytest
import ranks as harness
import torch
from ranks import Pool
from subset import choose
from torch import Tensor, nn
from training import STAGES

from poplar import HeteroZeroOptimizer, Plan

RANKS = 2
DEADLINE = timedelta(seconds=20)
SECONDS = 10.0
"""In which all ranks raise: far less than the deadline; a loaded machine is slow."""
TRANSPORTS = ("shared_memory", "process_group")


class Fault(Exception):
    """What the program of one rank raises."""


@dataclass(frozen=True)
class Case:
    """How steps are taken, and which one fails."""

    stage: int
    open_form: bool
    transport: str
    step: int
    """0: the first, in which the order of collectives is agreed; 1: a later one."""
    interrupt: bool = False
    """A KeyboardInterrupt, as of Ctrl-C, and no error of a program."""


@dataclass(frozen=True)
class Place:
    """Where a rank fails."""

    rank: int
    call: int
    name: str = ""
    """Count calls of this function; default: of all."""


class Calls:
    """Raises at a call, or counts them: a profiling function."""

    def __init__(self, place: Place | None, kind: type[BaseException] = Fault) -> None:
        self.place, self.kind = place, kind
        self.count = 0
        self.fired = ""
        self.fired_at = 0.0

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        module = frame.f_globals.get("__name__", "")
        name = frame.f_code.co_name
        if event != "call" or self.fired or not is_of_step(module, name):
            return
        if self.place is not None and not name.startswith(self.place.name):
            return
        self.count += 1
        if self.place is not None and self.count == self.place.call:
            self.fired, self.fired_at = f"{module}.{frame.f_code.co_qualname}", time.monotonic()
            raise self.kind(f"at call {self.count}, {self.fired}")

    @contextmanager
    def running(self) -> Iterator[None]:
        sys.setprofile(self)
        try:
            yield
        finally:
            sys.setprofile(None)


def is_of_step(module: str, name: str) -> bool:
    """Whether a function is called in a step, other than the public methods themselves."""
    if module == __name__:
        return name.startswith("user_")
    if module == "poplar.zero.micro_batch_loop" and (name.startswith("__") or name == "close"):
        return False
    public = ("train_step", "micro_batches", "clip_grad_norm_", "step", "running", "__del__")
    return module.startswith("poplar.") and name not in public


# On ranks


class Training:
    """A model whose user has code at every place where a step calls it."""

    def __init__(self, case: Case) -> None:
        self.case = case
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)]
        self.model = nn.Sequential(*blocks, nn.Linear(8, 1)).to(harness.device())
        for block in blocks:
            block.register_forward_pre_hook(user_forward_hook)
        group = harness.separate_group()  # a stopped rank closes the connections of its group
        shares, micro_batches = (0.6, 0.4), ((2, 1), (1, 0))
        plan = Plan(stage=case.stage, global_batch=4, micro_batches=micro_batches, shares=shares)
        self.optimizer = HeteroZeroOptimizer(
            self.model,
            torch.optim.AdamW,
            plan=plan,
            units=["0", "1"],
            process_group=group,
            communicator=case.transport,
            timeout=DEADLINE,
            compute_dtype=torch.float32,
            lr=1e-2,
        )
        self.optimizer.register_step_pre_hook(user_step_hook)
        self.optimizer.register_step_post_hook(user_step_hook)
        self.steps = 0

    def take_step(self) -> None:
        generator = torch.Generator().manual_seed(self.steps)
        whole = torch.randn(4, 8, generator=generator)
        batch = (whole[:3] if harness.rank() == 0 else whole[3:]).to(harness.device())
        optimizer = self.optimizer
        if not self.case.open_form:
            optimizer.train_step(user_loss, batch, weight=user_weight, max_norm=1.0)
            return
        with optimizer.micro_batches(batch, weight=user_weight) as micro_batches:
            for micro_batch in micro_batches:
                user_loss(self.model, micro_batch).backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()

    def values(self) -> list[Tensor]:
        """This rank's part of the parameters; local."""
        return [flat.master.clone() for flat in self.optimizer._engine.trained]


def user_loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def user_weight(batch: Tensor) -> float:
    return float(len(batch))


def user_forward_hook(_module: nn.Module, _inputs: Any) -> None:
    return None


def user_step_hook(_optimizer: Any, _args: Any, _kwargs: Any) -> None:
    return None


@dataclass(frozen=True)
class Outcome:
    """What one rank did after a fault."""

    fired: str
    fired_at: float
    raised: str | None
    raised_at: float
    applied: bool
    later: str | None
    """What the next step raised."""
    later_at: float
    is_right: bool
    """The next step has the result of a run without the fault."""


def count_calls(case: Case) -> tuple[int, list[Tensor], list[Tensor]]:
    """Calls of this rank in the step that will fail; the values before it and after it."""
    training = Training(case)
    for _ in range(case.step):
        training.take_step()
    before, calls = training.values(), Calls(None)
    with calls.running():
        training.take_step()
    return calls.count, before, training.values()


def attempt(training: Training, calls: Calls | None) -> str | None:
    """Take a step; returns what it raised."""
    try:
        if calls is None:
            training.take_step()
        else:
            with calls.running():
                training.take_step()
    except (Exception, KeyboardInterrupt) as error:
        return f"{type(error).__name__}: {error}"
    return None


def fail_at(case: Case, places: Sequence[Place]) -> list[Outcome]:
    """What this rank does if a rank fails at each of the places."""
    kind = KeyboardInterrupt if case.interrupt else Fault
    _, before, after = count_calls(case)
    outcomes = []
    for place in places:
        harness.note(f"{case} {place}")
        training = Training(case)
        for _ in range(case.step):
            training.take_step()
        calls = Calls(place if place.rank == harness.rank() else None, kind)
        raised = attempt(training, calls)
        raised_at = time.monotonic()
        applied = not same(training.values(), before)
        later = attempt(training, None)
        wanted = after if not applied else None
        outcomes.append(
            Outcome(
                fired=calls.fired,
                fired_at=calls.fired_at,
                raised=raised,
                raised_at=raised_at,
                applied=applied,
                later=later,
                later_at=time.monotonic(),
                is_right=wanted is not None and same(training.values(), wanted),
            )
        )
        del training
        gc.collect()
    return outcomes


def same(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    return all(map(torch.equal, one, other))


# In the test process


def problem_of(case: Case, place: Place, outcomes: Sequence[Outcome]) -> str | None:
    """What is wrong with what the ranks did; None: nothing."""
    fault = outcomes[place.rank]
    if not fault.fired:  # the number of calls differs a little from step to step
        return None
    raised = [outcome.raised for outcome in outcomes]
    late = [o for o in outcomes if o.raised is not None and o.raised_at - fault.fired_at > SECONDS]
    if late:
        return "a rank raised late"
    if not any(raised):  # a warning's code, which ignores errors
        return None if not any(o.later for o in outcomes) else "only the next step raised"
    if all(raised) and not any(outcome.later for outcome in outcomes):
        if len({outcome.applied for outcome in outcomes}) > 1:
            return "some ranks applied the step"
        if "post" in fault.fired or fault.applied:
            return None
        return None if all(o.is_right for o in outcomes) else "the next step is wrong"
    if not all(outcome.later for outcome in outcomes):
        return "some ranks went on"
    if ".user_" in fault.fired and not case.interrupt:
        return "an error of the user's code stopped all ranks"
    named = all(fault.fired in str(o.raised) + str(o.later) for o in outcomes)
    stopped = all("CollectiveTimeout" in str(o.later) for o in outcomes)
    return None if named and stopped else "the ranks stopped without the cause"


def sampled_places(case: Case, counts: Sequence[int], number: int) -> list[Place]:
    """Places of both ranks, spread over the calls of the step."""
    seed = hash((case.stage, case.open_form, case.step, case.interrupt)) + len(case.transport)
    return [
        Place(rank, 1 + (seed + place * (count - 1)) // number % count)
        for rank, count in enumerate(counts)
        for place in range(number)
    ]


CASES = [
    Case(stage, open_form, transport, step, interrupt)
    for stage in STAGES
    for open_form in (False, True)
    for transport in TRANSPORTS
    for step in (0, 1)
    for interrupt in (False, True)
]
FEW = [case for number, case in enumerate(CASES) if number % 4 == number // 4 % 4]
"""Each stage, form and transport once."""


@pytest.mark.every_combination
@pytest.mark.parametrize("case", choose(quick=FEW, full=CASES), ids=str)
def test_an_error_at_any_call_reaches_all_ranks(ranks: Pool, case: Case) -> None:
    counts = [count for count, _, _ in ranks.run(count_calls, case, ranks=RANKS)]
    places = sampled_places(case, counts, choose(quick=1, full=10))
    check(case, places, ranks.run(fail_at, case, places, ranks=RANKS, timeout=60 * len(places)))


@pytest.mark.every_combination
@pytest.mark.parametrize("open_form", [False, True])
@pytest.mark.parametrize("stage", STAGES)
def test_after_an_error_of_the_user_training_continues(
    ranks: Pool, stage: int, open_form: bool
) -> None:
    case = Case(stage, open_form, TRANSPORTS[stage % 2], step=stage % 2)
    names = ("user_loss", "user_weight", "user_forward_hook", "user_step_hook")
    places = [Place((stage + number) % RANKS, 1, name) for number, name in enumerate(names)]
    by_rank = ranks.run(fail_at, case, places, ranks=RANKS, timeout=240)
    check(case, places, by_rank)
    for outcomes in by_rank:
        assert all(outcome.raised and not outcome.later for outcome in outcomes), outcomes


def check(case: Case, places: Sequence[Place], by_rank: Sequence[Sequence[Outcome]]) -> None:
    problems, counts, slowest = [], Counter[str](), 0.0
    for number, place in enumerate(places):
        outcomes = [outcomes[number] for outcomes in by_rank]
        problem = problem_of(case, place, outcomes)
        if problem is not None:
            problems.append(f"{place}: {problem}: {outcomes}")
        counts[what_happened(place, outcomes)] += 1
        fired_at = outcomes[place.rank].fired_at
        raised = [o.raised_at - fired_at for o in outcomes if fired_at and o.raised]
        slowest = max([slowest, *raised])
    print(f"{dict(counts)}, last raise after {slowest:.2f} s: {case}")  # pytest -rP shows it
    assert not problems, "\n".join(problems)


def what_happened(place: Place, outcomes: Sequence[Outcome]) -> str:
    if not outcomes[place.rank].fired or not any(o.raised or o.later for o in outcomes):
        return "no error"
    return "stopped" if any(o.later for o in outcomes) else "raised"
