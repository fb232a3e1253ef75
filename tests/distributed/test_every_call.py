"""An error at any call that a rank makes in a collective method reaches all ranks.

A rank raises when it enters a Python function of a step, of Poplar or of the user, or of another
collective method (see `failing_calls.py`). Then either all ranks raise, no rank applies the step,
and the next step is right; or all ranks stop, with the cause, and none goes on. No rank goes on
with a part of the parameters left behind.
"""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ranks as harness
import torch
import torch.distributed as dist
from failing_calls import (
    DEADLINE,
    SECONDS,
    Calls,
    Fault,
    Place,
    attempt,
    gathered,
    places_to_fail,
)
from ranks import Pool
from records import cluster
from subset import choose
from torch import Tensor, nn
from training import STAGES

import poplar
from poplar import HeteroZeroOptimizer, Plan
from poplar.values.communication import Precision

RANKS = 2
CALL_SECONDS = 600.0
TRANSPORTS = ("shared_memory", "process_group")


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
    method: str = ""
    """In `METHODS`, and called after the steps; default: the next step."""
    communication: Precision = "exact"
    """Of gradients and parameters."""


# On ranks


class Training:
    """A model whose user has code at every place where a step calls it."""

    def __init__(self, case: Case, group: dist.ProcessGroup) -> None:
        self.case = case
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)]
        self.model = nn.Sequential(*blocks, nn.Linear(8, 1)).to(harness.device())
        for block in blocks:
            codes = torch.ones(2048, dtype=torch.int8, device=harness.device())
            block.codes = nn.Parameter(codes, requires_grad=False)  # sharded as bytes at stage 3
            block.register_forward_pre_hook(user_forward_hook)
        shares, micro_batches = (0.6, 0.4), ((2, 1), (1, 0))
        plan = Plan(stage=case.stage, global_batch=4, micro_batches=micro_batches, shares=shares)
        self.plan = plan
        self.optimizer = HeteroZeroOptimizer(
            self.model,
            torch.optim.AdamW,
            plan=plan,
            units=["0", "1"],
            process_group=group,
            communicator=case.transport,
            communication=case.communication,
            timeout=DEADLINE,
            compute_dtype=torch.float32,
            lr=1e-2,
        )
        self.optimizer.register_step_pre_hook(user_step_hook)
        self.optimizer.register_step_post_hook(user_step_hook)
        self.steps = 0

    def take_step(self) -> None:
        optimizer = self.optimizer
        if not self.case.open_form:
            optimizer.train_step(user_loss, self.batch(), weight=user_weight, max_norm=1.0)
            return
        self.run_passes()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()

    def batch(self) -> Tensor:
        generator = torch.Generator().manual_seed(self.steps)
        whole = torch.randn(4, 8, generator=generator)
        return (whole[:3] if harness.rank() == 0 else whole[3:]).to(harness.device())

    def run_passes(self) -> None:
        with self.optimizer.micro_batches(self.batch(), weight=user_weight) as micro_batches:
            for micro_batch in micro_batches:
                user_loss(self.model, micro_batch).backward()

    def begin(self, folder: Path) -> None:
        """What precedes the call that fails."""
        for _ in range(self.case.step):
            self.take_step()
        # Made here, because an error in what is no collective call is of one rank alone.
        self.state = self.optimizer.state_dict()
        self.other_plan = replace(self.plan, shares=(0.3, 0.7))
        self.profile = cluster((2.0, 1.0), ("fast", "slow"))
        self.manager = poplar.CheckpointManager(folder, self.optimizer)
        if self.case.method == "full_gradients":
            self.run_passes()
        elif self.case.method == "load_checkpoint":
            poplar.save_checkpoint(folder / "saved", self.optimizer)
        elif self.case.method == "load_latest":
            self.manager.save(1)

    def act(self, folder: Path) -> None:
        """The call that fails."""
        if self.case.method:
            METHODS[self.case.method](self, folder)
        else:
            self.take_step()

    def values(self) -> list[Tensor]:
        """This rank's part of the parameters; local."""
        return [flat.master.clone() for flat in self.optimizer._training.engine.trained]


def user_loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def user_weight(batch: Tensor) -> float:
    return float(len(batch))


def user_forward_hook(_module: nn.Module, _inputs: Any) -> None:
    return None


def user_step_hook(_optimizer: Any, _args: Any, _kwargs: Any) -> None:
    return None


def user_batches(training: Training) -> Iterator[Tensor]:
    yield training.batch()


def use_full_parameters(training: Training, _folder: Path) -> None:
    modules = ["0", "1", "2"]  # which the ranks compare; without, it is collective at stage 3 only
    with training.optimizer.full_parameters(writeback=True, modules=modules):
        pass


METHODS: dict[str, Callable[[Training, Path], object]] = {
    "evaluate": lambda t, _: t.optimizer.evaluate(user_loss, user_batches(t), user_weight),
    "full_parameters": use_full_parameters,
    "full_gradients": lambda t, _: t.optimizer.full_gradients(),
    "verify_replicas": lambda t, _: t.optimizer.verify_replicas(),
    "apply_plan": lambda t, _: t.optimizer.apply_plan(t.other_plan),
    "follow_drift": lambda t, _: t.optimizer.follow_drift(t.profile),
    "full_state_dict": lambda t, _: t.optimizer.full_state_dict(1),
    "consolidate_state_dict": lambda t, _: t.optimizer.consolidate_state_dict(1),
    "load_state_dict": lambda t, _: t.optimizer.load_state_dict(t.state),
    "save_model": lambda t, folder: t.optimizer.save_model(folder, sharded=True),
    "save_checkpoint": lambda t, folder: poplar.save_checkpoint(folder / "saved", t.optimizer),
    "load_checkpoint": lambda t, folder: poplar.load_checkpoint(folder / "saved", t.optimizer),
    "save": lambda t, _: t.manager.save(1),
    "load_latest": lambda t, _: t.manager.load_latest(),
    "release": lambda t, _: t.optimizer.release(),
}
IN_STEPS = {
    *("train_step", "micro_batches", "clip_grad_norm_", "step", "_multiply_gradient"),
}
"""Collective methods of steps."""


@dataclass(frozen=True)
class Outcome:
    """What one rank did after a fault."""

    fired: str
    fired_at: float
    raised: str | None
    raised_at: float
    later: str | None = None
    """What the next step raised."""
    later_at: float = 0.0
    applied: bool = False
    is_right: bool = True
    """The next step has the result of a run without the fault."""


def count_calls(case: Case, folder: str) -> tuple[list[Counter[str]], list[Tensor], list[Tensor]]:
    """Calls of all ranks in what will fail; the values before it, and after the next step."""
    with harness.separate_group() as group:
        training = Training(case, group)
        training.begin(Path(folder, "counted"))
        before, calls = training.values(), Calls(None)
        with calls.running():
            training.act(Path(folder, "counted"))
        if case.method:
            training = Training(case, group)
            training.begin(Path(folder, "undisturbed"))
            training.take_step()
        return gathered(calls.names, group), before, training.values()


def fail_at(
    case: Case, places: Sequence[Place] = (), folder: str = "", *, full: int = 1
) -> dict[Place, Outcome]:
    """What this rank does if a rank fails at each of the places.

    `full`: places of each rank with `--full`, if none are given.
    """
    called, before, after = count_calls(case, f"{folder}/again")
    places = places or places_to_fail(called, str(case), quick=1, full=full)
    outcomes = {}
    for number, place in enumerate(places):
        harness.note(f"{case} {place}")
        with harness.separate_group() as group:  # a stopped rank closes its connections
            own = Path(folder, str(number))
            outcomes[place] = fail_once(Training(case, group), place, own, before, after)
        gc.collect()
    return outcomes


def fail_once(
    training: Training, place: Place, folder: Path, before: list[Tensor], after: list[Tensor]
) -> Outcome:
    case = training.case
    training.begin(folder)
    kind = KeyboardInterrupt if case.interrupt else Fault
    calls = Calls(place if place.rank == harness.rank() else None, kind)
    raised = attempt(partial(training.act, folder), calls)
    raised_at = time.monotonic()
    applied = not case.method and not same(training.values(), before)
    later = attempt(training.take_step)
    return Outcome(
        fired=calls.fired,
        fired_at=calls.fired_at,
        raised=raised,
        raised_at=raised_at,
        applied=applied,
        later=later,
        later_at=time.monotonic(),
        is_right=later is None and not applied and same(training.values(), after),
    )


def fail_to_build(case: Case) -> dict[Place, Outcome]:
    """What this rank does if a rank fails in the constructor."""
    calls = Calls(None, after="of")
    with harness.separate_group() as group:
        with calls.running():
            Training(case, group)
        called = gathered(calls.names, group)
    outcomes = {}
    for place in [Place(1, 1), *places_to_fail(called, str(case), quick=1, full=10)]:
        mine = place if place.rank == harness.rank() else None
        with harness.separate_group() as group:
            outcomes[place] = build_once(case, mine, group)
        gc.collect()
        with harness.separate_group() as group:
            Training(case, group).take_step()
    return outcomes


def build_once(case: Case, place: Place | None, group: dist.ProcessGroup) -> Outcome:
    built: list[Training] = []
    calls = Calls(place, after="of")
    raised = attempt(lambda: built.append(Training(case, group)), calls)
    raised_at = time.monotonic()
    later = attempt(built[0].take_step) if built else raised
    return Outcome(
        fired=calls.fired,
        fired_at=calls.fired_at,
        raised=raised,
        raised_at=raised_at,
        applied=False,
        later=later,
        later_at=time.monotonic(),
        is_right=True,
    )


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
    if not any(raised):  # in a warning's code or a finalizer's, whose errors nobody hears of
        released = case.method == "release"  # after which every step raises
        went_on = released or not any(o.later for o in outcomes)
        return None if went_on else "only the next step raised"
    if all(raised) and not any(outcome.later for outcome in outcomes):
        if len({outcome.applied for outcome in outcomes}) > 1:
            return "some ranks applied the step"
        if "post" in fault.fired or fault.applied:
            return None
        return None if all(o.is_right for o in outcomes) else "the next step is wrong"
    if not all(outcome.later for outcome in outcomes):
        return "some ranks went on"
    if case.method == "release":  # a rank that has released its model does not hear of it
        return None
    if ".user_" in fault.fired and not case.interrupt:
        return "an error of the user's code stopped all ranks"
    named = all(fault.fired in str(o.raised) + str(o.later) for o in outcomes)
    stopped = all("CollectiveTimeout" in str(o.later) for o in outcomes) or all(
        "load a state dict or a checkpoint on all ranks first" in str(o.later) for o in outcomes
    )
    return None if named and stopped else "the ranks stopped without the cause"


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
COMPRESSED = [replace(case, communication="int4") for case in CASES]


@pytest.mark.every_combination
@pytest.mark.parametrize(
    "case", choose(quick=[*FEW, *COMPRESSED[::11]], full=[*CASES, *COMPRESSED]), ids=str
)
def test_an_error_at_any_call_reaches_all_ranks(ranks: Pool, case: Case) -> None:
    check(case, ranks.run(fail_at, case, full=10, ranks=RANKS, timeout=CALL_SECONDS))


def test_an_error_where_a_rank_begins_the_next_pass_reaches_all_ranks(ranks: Pool) -> None:
    case = Case(1, open_form=True, transport="process_group", step=1, interrupt=True)
    names = ("__next__", "running", "_raising")
    places = [Place(number % RANKS, 2, name) for number, name in enumerate(names)]
    by_rank = ranks.run(fail_at, case, places, ranks=RANKS)
    check(case, by_rank)
    for place in places:
        assert by_rank[place.rank][place].fired.endswith(place.name)


@pytest.mark.every_combination
@pytest.mark.parametrize("method", ["", "save_checkpoint", "load_latest"])
def test_an_error_at_the_first_call_reaches_all_ranks(
    ranks: Pool, method: str, tmp_path: Path
) -> None:
    case = Case(1, False, "process_group", step=0, interrupt=True, method=method)
    check(case, ranks.run(fail_at, case, [Place(1, 1)], str(tmp_path), ranks=RANKS))


@pytest.mark.every_combination
@pytest.mark.parametrize("open_form", [False, True])
@pytest.mark.parametrize("stage", STAGES)
def test_after_an_error_of_the_user_training_continues(
    ranks: Pool, stage: int, open_form: bool
) -> None:
    case = Case(stage, open_form, TRANSPORTS[stage % 2], step=stage % 2)
    names = ("user_loss", "user_weight", "user_forward_hook", "user_step_hook")
    places = [Place((stage + number) % RANKS, 1, name) for number, name in enumerate(names)]
    by_rank = ranks.run(fail_at, case, places, ranks=RANKS)
    check(case, by_rank)
    for outcomes in by_rank:
        assert all(o.raised and not o.later for o in outcomes.values()), outcomes


ALL_METHODS = [
    Case(stage, False, transport, step=1, method=method)
    for method in METHODS
    for stage in STAGES
    for transport in TRANSPORTS
]
SOME_METHODS = [case for number, case in enumerate(ALL_METHODS) if number % 8 == number // 8 % 8]
"""Each method once."""


@pytest.mark.every_combination
@pytest.mark.parametrize("case", choose(quick=SOME_METHODS, full=ALL_METHODS), ids=str)
def test_an_error_in_any_method_reaches_all_ranks(ranks: Pool, case: Case, tmp_path: Path) -> None:
    check(case, ranks.run(fail_at, case, folder=str(tmp_path), full=3, ranks=RANKS))


@pytest.mark.every_combination
@pytest.mark.parametrize("stage", choose(quick=[3], full=STAGES))
def test_an_error_in_the_constructor_reaches_all_ranks(ranks: Pool, stage: int) -> None:
    case = Case(stage, False, TRANSPORTS[stage % 2], step=0)
    by_rank = ranks.run(fail_to_build, case, ranks=RANKS, timeout=CALL_SECONDS)
    for place in by_rank[0]:
        outcomes = [outcomes[place] for outcomes in by_rank]
        fault = outcomes[place.rank]
        if not any(o.raised or o.later for o in outcomes):
            continue  # in code that may fail, as in a finalizer
        causes = [fault.fired in (o.raised or o.later or "") for o in outcomes]
        assert all(causes), (place, outcomes)
        late = [o.raised_at - fault.fired_at for o in outcomes if fault.fired and o.raised]
        assert max(late, default=0.0) < SECONDS, (place, outcomes)


def test_every_method_that_all_ranks_call_is_tested() -> None:
    public = {n: m for n, m in vars(HeteroZeroOptimizer).items() if not n.startswith("_")}
    named = {n for n, m in public.items() if "Collective" in (m.__doc__ or "")}
    assert named == (METHODS.keys() | IN_STEPS) & public.keys()
    contexts = {"micro_batches", "full_parameters"}
    covered = {n for n, m in public.items() if getattr(m, "is_collective", False)}
    assert covered == (named - contexts) | {"zero_grad"}


def check(case: Case, by_rank: Sequence[Mapping[Place, Outcome]]) -> None:
    problems, counts, slowest = [], Counter[str](), 0.0
    for place in by_rank[0]:
        outcomes = [outcomes[place] for outcomes in by_rank]
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
