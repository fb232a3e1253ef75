"""An error at any call that a rank makes in a collective method reaches all ranks.

A rank raises when it enters the n-th Python function of a step, of Poplar or of the user, for every
n, or of another collective method. Then either all ranks raise, no rank applies the step, and the
next step is right; or all ranks stop, with the cause, and none goes on. No rank goes on with a part
of the parameters left behind.
"""

from __future__ import annotations

import gc
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import ranks as harness
import torch
import torch.distributed as dist
from ranks import Pool
from records import cluster
from subset import choose
from torch import Tensor, nn
from training import STAGES

import poplar
from poplar import HeteroZeroOptimizer, Plan
from poplar.values.communication import Precision
from poplar.zero import collective_calls

RANKS = 2
DEADLINE = timedelta(seconds=20)
SECONDS = 10.0
"""In which all ranks raise: far less than the deadline; a loaded machine is slow."""
TRANSPORTS = ("shared_memory", "process_group")


_OPTIMIZER = "poplar.optimizer.HeteroZeroOptimizer"
_FULL = "poplar.training.unsharded_model"
_CHECKPOINT = "poplar.checkpoint"
_CALLS = "poplar.zero.collective_calls"
_LOOP = "poplar.zero.micro_batch_loop.MicroBatchLoop"
BEFORE = {
    *(f"{_OPTIMIZER}.{name}" for name in ("micro_batches", "collective_calls", "full_parameters")),
    *(f"{_FULL}.full_parameters{part}" for part in ("", ".<locals>.running")),
    *(f"{_CHECKPOINT}.save.{name}" for name in ("save_checkpoint", "save_now")),
    *(f"{_CHECKPOINT}.load.{name}" for name in ("load_checkpoint", "load_as")),
    *(f"{_CHECKPOINT}.manager.CheckpointManager.{n}" for n in ("load_latest", "collective_calls")),
    *(f"{_CALLS}.{name}" for name in ("_raising", "_Nesting.enter")),
    *(f"{_CALLS}.CollectiveCalls.{name}" for name in ("call", "running")),
    *(f"{_CALLS}.{name}.<locals>.collective_call" for name in ("collective", "begins_step")),
    *(f"{_OPTIMIZER}.micro_batches.<locals>.{name}" for name in ("begin", "running")),
    *(f"{_LOOP}.{name}" for name in ("__init__", "__enter__", "__exit__", "close", "is_running")),
    f"{_LOOP}._takes_part",
}
"""Functions that a rank enters before it begins a collective call, or between two calls. An error
there is its own alone: the program may go on with the call that the others make."""
AT_ANY_TIME = ("__del__", "leave")


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
    method: str = ""
    """In `METHODS`, and called after the steps; default: the next step."""
    communication: Precision = "exact"
    """Of gradients and parameters."""


@dataclass(frozen=True)
class Place:
    """Where a rank fails."""

    rank: int
    call: int
    name: str = ""
    """Count calls of this function; default: of all."""


class Calls:
    """Raises at a call, or counts them: a profiling function."""

    def __init__(
        self, place: Place | None, kind: type[BaseException] = Fault, *, after: str = ""
    ) -> None:
        """`after`: count from the first call of this function on, `Group.of` for instance."""
        self.place, self.kind, self.after = place, kind, after
        self.has_begun = False
        self.count = 0
        self.fired = ""
        self.fired_at = 0.0

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        module = frame.f_globals.get("__name__", "")
        name = frame.f_code.co_name
        if event != "call" or self.fired or not is_of_step(frame, self.has_begun):
            return
        if self.after:
            if name == self.after:
                self.after, self.has_begun = "", True
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


def is_of_step(frame: FrameType, begun: bool) -> bool:
    """Whether a function is called in a collective method, and not before it begins.

    `begun`: it has begun in any case.
    """
    module, code = frame.f_globals.get("__name__", ""), frame.f_code
    if module == __name__:
        return code.co_name.startswith("user_")
    # The end of an `any` finalizes its expression, and no error of a finalizer leaves it.
    if not module.startswith("poplar.") or code.co_name in (*AT_ANY_TIME, "<genexpr>"):
        return False
    return f"{module}.{code.co_qualname}" not in BEFORE or begun or has_begun(frame)


def has_begun(frame: FrameType | None) -> bool:
    """Whether this rank is in a collective call, or in the loop over a step's micro-batches."""
    if collective_calls._NESTING.depth:
        return True
    while frame is not None and frame.f_code.co_qualname != "MicroBatchLoop.__next__":
        frame = frame.f_back
    return frame is not None and frame.f_locals["self"].is_running


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


def count_calls(case: Case, folder: str = "") -> tuple[int, list[Tensor], list[Tensor]]:
    """Calls of this rank in what will fail; the values before it, and after the next step."""
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
        return calls.count, before, training.values()


def attempt(act: Callable[[], object], calls: Calls | None = None) -> str | None:
    """What a call raised."""
    try:
        with nullcontext() if calls is None else calls.running():
            act()
    except (Exception, KeyboardInterrupt) as error:
        return f"{type(error).__name__}: {error}"
    return None


def fail_at(case: Case, places: Sequence[Place], folder: str = "") -> list[Outcome]:
    """What this rank does if a rank fails at each of the places."""
    _, before, after = count_calls(case, f"{folder}/again")
    outcomes = []
    for number, place in enumerate(places):
        harness.note(f"{case} {place}")
        with harness.separate_group() as group:  # a stopped rank closes its connections
            own = Path(folder, str(number))
            outcomes.append(fail_once(Training(case, group), place, own, before, after))
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


def fail_to_build(case: Case, places: Sequence[Place]) -> list[Outcome]:
    """What this rank does if a rank fails in the constructor."""
    outcomes = []
    for place in places:
        mine = place if place.rank == harness.rank() else None
        with harness.separate_group() as group:
            outcomes.append(build_once(case, mine, group))
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


def count_calls_to_build(case: Case) -> int:
    calls = Calls(None, after="of")
    with harness.separate_group() as group, calls.running():
        Training(case, group)
    return calls.count


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
COMPRESSED = [replace(case, communication="int4") for case in CASES]


@pytest.mark.every_combination
@pytest.mark.parametrize(
    "case", choose(quick=[*FEW, *COMPRESSED[::11]], full=[*CASES, *COMPRESSED]), ids=str
)
def test_an_error_at_any_call_reaches_all_ranks(ranks: Pool, case: Case) -> None:
    counts = [count for count, _, _ in ranks.run(count_calls, case, ranks=RANKS)]
    places = sampled_places(case, counts, choose(quick=1, full=10))
    check(case, places, ranks.run(fail_at, case, places, ranks=RANKS, timeout=60 * len(places)))


def test_an_error_where_a_rank_begins_the_next_pass_reaches_all_ranks(ranks: Pool) -> None:
    case = Case(1, open_form=True, transport="process_group", step=1, interrupt=True)
    names = ("__next__", "running", "_raising")
    places = [Place(number % RANKS, 2, name) for number, name in enumerate(names)]
    by_rank = ranks.run(fail_at, case, places, ranks=RANKS, timeout=240)
    check(case, places, by_rank)
    for place, outcomes in zip(places, zip(*by_rank, strict=True), strict=True):
        assert outcomes[place.rank].fired.endswith(place.name)


@pytest.mark.every_combination
@pytest.mark.parametrize("method", ["", "save_checkpoint", "load_latest"])
def test_an_error_at_the_first_call_reaches_all_ranks(
    ranks: Pool, method: str, tmp_path: Path
) -> None:
    case = Case(1, False, "process_group", step=0, interrupt=True, method=method)
    places = [Place(1, 1)]
    check(case, places, ranks.run(fail_at, case, places, str(tmp_path), ranks=RANKS))


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
    folder = str(tmp_path)
    counts = [count for count, _, _ in ranks.run(count_calls, case, folder, ranks=RANKS)]
    places = sampled_places(case, counts, choose(quick=1, full=3))
    seconds = 60 * (1 + len(places))
    check(case, places, ranks.run(fail_at, case, places, folder, ranks=RANKS, timeout=seconds))


@pytest.mark.every_combination
@pytest.mark.parametrize("stage", choose(quick=[3], full=STAGES))
def test_an_error_in_the_constructor_reaches_all_ranks(ranks: Pool, stage: int) -> None:
    case = Case(stage, False, TRANSPORTS[stage % 2], step=0)
    counts = ranks.run(count_calls_to_build, case, ranks=RANKS)
    places = [Place(1, 1), *sampled_places(case, counts, choose(quick=2, full=10))]
    seconds = 60 * len(places)
    by_rank = ranks.run(fail_to_build, case, places, ranks=RANKS, timeout=seconds)
    for place, *outcomes in zip(places, *by_rank, strict=True):
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
