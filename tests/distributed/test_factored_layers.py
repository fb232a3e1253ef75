"""Layers whose weight gradients travel as factors: training is the same as in one process."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import ranks as harness
import reference
import torch
import training
from models import ModelSpec
from ranks import Failure, Pool, RanksFailed
from reference import Recipe
from subset import choose
from torch import Tensor, nn
from training import STAGES, Run, assert_exact, train_many

from poplar import HeteroZeroOptimizer, Plan, RankFailed, UnitPlan
from poplar.comm.collective_queue import CollectiveQueue
from poplar.planner.factored_costs import factored_traffic
from poplar.values.profile import LinearLayer
from poplar.zero.factors.capture import CapturingForward
from poplar.zero.factors.parameter import FactoredParameter, RowReduction

RANKS = 3
UNEVEN = (0.55, 0.3, 0.15)
FACTORED = ("blocks.0.attention", "blocks.1.up", "blocks.2.down", "head")

UNEVEN_BATCHES = ((2,), (1,), (5,))
A_RANK_WITHOUT_SAMPLES = ((5,), (0,), (3,))
SEVERAL_PASSES = ((1, 3), (1, 1), (0, 2))
OWN_NUMBERS_OF_PASSES = ((1, 2, 2), (3,), ())
PADDED_PASSES = ((1, 2, 2), (0, 0, 3), (0, 0, 0))


def recipe(**changes: object) -> Recipe:
    return Recipe(**{"batches": (8, 8, 8), **changes})


CASES = {
    "uneven batches": (UNEVEN_BATCHES, UNEVEN, recipe(), False),
    "a rank without samples": (A_RANK_WITHOUT_SAMPLES, (0.4, 0.6, 0.0), recipe(), False),
    "several passes, clipped": (SEVERAL_PASSES, UNEVEN, recipe(max_norm=0.1), False),
    "own numbers of passes": (OWN_NUMBERS_OF_PASSES, (0.0, 1.0, 0.0), recipe(), True),
    "checkpointing": (
        SEVERAL_PASSES,
        UNEVEN,
        recipe(spec=ModelSpec(checkpointing=True, two_groups=True), loss="tokens"),
        False,
    ),
    "a block that runs several times": (
        UNEVEN_BATCHES,
        UNEVEN,
        recipe(spec=ModelSpec(kind="albert"), max_norm=0.1),
        True,
    ),
    "a short last batch": (SEVERAL_PASSES, UNEVEN, recipe(batches=(8, 8, 5)), True),
    "compiled, and recomputed on one rank": (
        SEVERAL_PASSES,
        UNEVEN,
        recipe(spec=ModelSpec(compiled="eager")),
        False,
    ),
    "a model without repeated blocks": (
        UNEVEN_BATCHES,
        UNEVEN,
        recipe(spec=ModelSpec(kind="mlp", blocks=1)),
        False,
    ),
}


def run_of(case: str, stage: int) -> Run:
    """The run of a case at one stage, with SGD at every other stage, which detects wrong scales."""
    micro_batches, shares, recipe, open_form = CASES[case]
    if micro_batches is OWN_NUMBERS_OF_PASSES and stage >= 2:
        micro_batches = PADDED_PASSES
    if stage % 2:
        recipe = replace(recipe, optimizer="SGD", options=(("lr", 0.1), ("momentum", 0.9)))
    kind = recipe.spec.kind
    factored = {
        "transformer": FACTORED,
        "albert": ("blocks.0.attention", "blocks.0.up", "head"),
        "mlp": ("blocks.0.0", "head"),
    }[kind]
    recomputed = (UnitPlan("blocks.1", recomputed_on=(0,)),)
    plan = Plan(
        stage=stage,
        global_batch=8,
        micro_batches=micro_batches,
        shares=shares,
        factored=factored,
        units=recomputed if recipe.spec.compiled else (),
    )
    # It sends to each rank only the columns that it needs; others send the same to all.
    options = {"communicator": "process_group"} if 0.0 in shares else {}
    return Run(recipe, plan, open_form=open_form, engine=options)


@pytest.mark.parametrize("stage", STAGES)
def test_training_equals_one_process(ranks: Pool, stage: int) -> None:
    runs = [run_of(case, stage) for case in choose(quick=list(CASES)[stage::4], full=CASES)]
    trained = ranks.run(train_many, runs, ranks=RANKS)
    for number, run in enumerate(runs):
        assert_exact([each[number] for each in trained], run.recipe, str(run.plan))


# A rank that fails


BAD_RANK = 1


Failing = Callable[[nn.Module], AbstractContextManager[object]]
"""Makes a model fail on this rank."""


class LossError(Exception):
    """An exception in a user's loss function."""


def fail_in_backward(model: nn.Module) -> AbstractContextManager[object]:
    """A hook in the middle of the backward raises."""

    def fail(_gradient: Tensor) -> None:
        raise LossError("no more samples")

    def hook(_module: nn.Module, _inputs: object, output: Tensor) -> None:
        output.register_hook(fail)

    return model.blocks[0].register_forward_hook(hook)


def fail_once(owner: type, name: str) -> AbstractContextManager[object]:
    """The first call of a method runs out of memory."""
    method, calls = getattr(owner, name), []

    def failing(self: object, *args: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            raise torch.OutOfMemoryError("no memory for rows")
        return method(self, *args, **options)

    return mock.patch.object(owner, name, failing)


def no_memory_to_capture(_model: nn.Module) -> AbstractContextManager[object]:
    return fail_once(CapturingForward, "capture")


def no_memory_for_the_gradient(_model: nn.Module) -> AbstractContextManager[object]:
    return fail_once(FactoredParameter, "_new_gradient")


def no_memory_to_send(_model: nn.Module) -> AbstractContextManager[object]:
    return fail_once(RowReduction, "send")


def no_memory_to_multiply(_model: nn.Module) -> AbstractContextManager[object]:
    return fail_once(RowReduction, "_multiply")


FAILURES: dict[Failing, type[Exception]] = {
    fail_in_backward: LossError,
    no_memory_to_capture: torch.OutOfMemoryError,
    no_memory_for_the_gradient: torch.OutOfMemoryError,
    no_memory_to_send: torch.OutOfMemoryError,
    no_memory_to_multiply: torch.OutOfMemoryError,
}
MAY_SUCCEED = (no_memory_to_send, no_memory_to_multiply)
"""What all ranks have to complete is tried again. After the passes, nothing is lost then."""


def fail_on_one_rank(run: Run) -> list[tuple[Failure | None, dict[str, Tensor]]]:
    """For each failure: a good step, and one that is repeated if it fails."""
    found = []
    for failing in FAILURES:
        model, optimizer = training.prepare(run)
        training.take_step(run, model, optimizer, 0)
        is_bad = harness.rank() == BAD_RANK
        with harness.catching() as caught, failing(model) if is_bad else nullcontext():
            training.take_step(run, model, optimizer, 1)
        if caught:
            training.take_step(run, model, optimizer, 1)
        found.append(((caught or [None])[0], training.whole_parameters(model, optimizer)))
    return found


@pytest.mark.parametrize(
    ("stage", "communicator"),
    choose(
        quick=[(1, "shared_memory"), (3, "process_group")],
        full=[(stage, name) for stage in STAGES for name in ("shared_memory", "process_group")],
    ),
)
def test_a_rank_that_fails_is_named(ranks: Pool, stage: int, communicator: str) -> None:
    plan = Plan(
        stage=stage,
        global_batch=8,
        micro_batches=SEVERAL_PASSES,
        shares=UNEVEN,
        factored=FACTORED,
    )
    options = {"on_out_of_memory": "raise", "communicator": communicator}
    run = Run(recipe(batches=(8, 8)), plan, engine=options)
    expected = reference.train(run.recipe).parameters
    by_rank = ranks.run(fail_on_one_rank, run, ranks=RANKS)
    for number, (failing, error) in enumerate(FAILURES.items()):
        failures = [results[number][0] for results in by_rank]
        succeeded = failing in MAY_SUCCEED and failures == [None] * RANKS
        for rank, failure in enumerate(() if succeeded else failures):
            assert failure is not None, f"{failing.__name__}: rank {rank} raised nothing"
            assert failure.is_a(error if rank == BAD_RANK else RankFailed), failure
            assert rank == BAD_RANK or f"rank {BAD_RANK}" in failure.message, failure
        for rank, results in enumerate(by_rank):
            what = f"{failing.__name__}, rank {rank}"
            training.assert_close(results[number][1], expected, what)


# Mistakes


def model_of(kind: str) -> nn.Module:
    """A model whose layer `layer` cannot be factored."""
    layer: nn.Module = nn.Linear(5, 3)
    model = nn.ModuleDict({"layer": layer, "other": nn.Linear(5, 3)})
    if kind == "frozen":
        layer.weight.requires_grad_(False)
    elif kind == "tied":
        model["other"].weight = layer.weight
    elif kind == "subclass":
        model["layer"] = type("MyLinear", (nn.Linear,), {})(5, 3)
    elif kind == "weight norm":
        nn.utils.parametrizations.weight_norm(layer)
    elif kind == "old weight norm":
        nn.utils.weight_norm(layer)
    elif kind == "hook":
        layer.weight.register_hook(lambda gradient: gradient)
    elif kind == "own forward":
        layer.forward = lambda x: nn.Linear.forward(layer, x)
    elif kind == "convolution":
        model["layer"] = nn.Conv1d(5, 3, 1)
    elif kind == "missing":
        del model["layer"]
    return model


MISTAKES = {
    "missing": "not a module of the model, whose nn.Linear modules are: 'other'",
    "frozen": "has a frozen weight",
    "tied": "shares its weight with 'other.weight'",
    "subclass": "is a MyLinear, not a plain nn.Linear",
    "weight norm": "is a ParametrizedLinear, not a plain nn.Linear",
    "old weight norm": "has no parameter 'weight' of its own",
    "hook": "has hooks on the gradient of its weight",
    "own forward": "has a forward of its own",
    "convolution": "is a Conv1d, not a plain nn.Linear",
}


def build_with(kinds: Sequence[str]) -> dict[str, Failure | None]:
    """What building an optimizer for each model raises."""
    plan = replace(Plan.even(harness.size(), 4, 2, 1), factored=("layer",))
    found: dict[str, Failure | None] = {}
    for kind in kinds:
        with harness.catching() as caught:
            HeteroZeroOptimizer(
                model_of(kind), torch.optim.SGD, plan=plan, process_group=harness.group(), lr=0.1
            )
        found[kind] = (caught or [None])[0]
    return found


def test_layers_that_cannot_be_factored_raise_on_all_ranks(ranks: Pool) -> None:
    for found in ranks.run(build_with, list(MISTAKES), ranks=2):
        for kind, expected in MISTAKES.items():
            failure = found[kind]
            assert failure is not None, kind
            assert failure.is_a(ValueError), failure
            assert expected in failure.message, failure
            assert "leave it out of Plan.factored" in failure.message


class Layers(nn.Module):
    """Two layers; the second one runs twice. `misuse` reads a weight in another way."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(7, 5), nn.Linear(5, 5)
        self.misuse = ""

    def forward(self, x: Tensor) -> Tensor:
        if self.misuse == "weight":
            return (x @ self.first.weight.t()).relu_()
        y = self.second(self.second(self.first(x).relu_()).relu_())
        if self.misuse == "input":
            x.zero_()
        return y


def square_loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def penalized_loss(model: nn.Module, batch: Tensor) -> Tensor:
    batch = batch.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(square_loss(model, batch), batch, create_graph=True)
    return gradient.square().sum()


def misuse_layers(stage: int) -> dict[str, Failure | None]:
    """What each wrong use raises, between good steps."""
    torch.manual_seed(0)
    model = Layers()
    plan = replace(Plan.even(harness.size(), 4, 2, stage), factored=("first", "second"))
    optimizer = HeteroZeroOptimizer(
        model, torch.optim.SGD, plan=plan, process_group=harness.group(), lr=0.1
    )
    found: dict[str, Failure | None] = {}

    def attempt(what: str, action: Callable[[], object]) -> None:
        model.misuse = what
        with harness.catching() as caught:
            action()
        found[what] = (caught or [None])[0]
        model.misuse = ""
        optimizer.zero_grad()
        optimizer.train_step(square_loss, torch.ones(2, 7))

    def set_gradients() -> None:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()

    attempt("weight", lambda: optimizer.train_step(square_loss, torch.ones(2, 7)))
    attempt("input", lambda: optimizer.train_step(square_loss, torch.ones(2, 7)))
    attempt("second order", lambda: optimizer.train_step(penalized_loss, torch.ones(2, 7)))
    attempt("other plan", lambda: optimizer.apply_plan(replace(plan, factored=("first",))))
    if stage < 3:
        attempt("set gradients", set_gradients)
    with optimizer.full_parameters():
        copied = copy.deepcopy(model)
    square_loss(copied, torch.ones(2, 7)).backward()
    assert copied.first.weight.grad is not None  # a copy is a plain model
    optimizer.evaluate(square_loss, [torch.ones(2, 7)])
    optimizer.release()
    assert not any("forward" in vars(module) for module in model.modules())
    return found


MISUSES = {
    "weight": "first.weight got a gradient of its own, but Plan.factored names its layer",
    "input": "modified by an inplace operation",
    "second order": "second-order gradients (create_graph=True) through the layer of",
    "other plan": "apply_plan cannot change which layers are factored; got ['first']",
    "set gradients": "first.weight got a gradient of its own",
}


@pytest.mark.parametrize("stage", choose(quick=(1,), full=STAGES))
def test_misused_layers_raise(ranks: Pool, stage: int) -> None:
    for found in ranks.run(misuse_layers, stage, ranks=2):
        for what, failure in found.items():
            assert failure is not None, what
            assert MISUSES[what] in failure.message, failure


def build_with_other_threads() -> None:
    """Stage 0 on ranks whose products may round differently."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1 + harness.rank())
    try:
        plan = replace(Plan.even(harness.size(), 4, 2, 0), factored=("layer",))
        HeteroZeroOptimizer(
            model_of(""), torch.optim.SGD, plan=plan, process_group=harness.group(), lr=0.1
        )
    finally:
        torch.set_num_threads(threads)


def test_stage_0_needs_ranks_that_multiply_alike(ranks: Pool) -> None:
    with pytest.raises(RanksFailed) as raised:
        ranks.run(build_with_other_threads, ranks=2)
    training.assert_raised(raised.value.failures, "1 threads", "use stage 1", kind=ValueError)


# Bytes


OUTPUTS, INPUTS = 1024, 64
ROWS = (3, 0, 5)
PASSES = 2
WIRE_BYTES = 4
OWNERS = (0.6, 0.0, 0.4)


def bytes_sent(stages: Sequence[int]) -> list[int]:
    """The bytes that this rank sends for a layer's gradient, in a step at each stage."""
    found = []
    for stage in stages:
        micro_batches = tuple((rows,) * PASSES if rows else () for rows in ROWS)
        if stage >= 2:
            micro_batches = tuple((rows,) * PASSES for rows in ROWS)
        plan = Plan(
            stage=stage,
            global_batch=PASSES * sum(ROWS),
            micro_batches=micro_batches,
            shares=OWNERS,
            factored=("0",),
        )
        model = nn.Sequential(nn.Linear(INPUTS, OUTPUTS, bias=False))
        optimizer = HeteroZeroOptimizer(
            model,
            torch.optim.SGD,
            plan=plan,
            process_group=harness.group(),
            communicator="process_group",
            lr=0.1,
        )
        sent: dict[str, int] = defaultdict(int)
        exchange = CollectiveQueue.exchange

        def counted(
            queue: CollectiveQueue,
            received: Any,
            parts: Sequence[Tensor],
            what: str,
            *args: Any,
            **kw: Any,
        ) -> Any:
            peers = {*range(RANKS)} - {harness.rank()}
            sent[what] += sum(parts[peer].nbytes for peer in peers)  # noqa: B023
            return exchange(queue, received, parts, what, *args, **kw)  # noqa: B023

        samples = PASSES * ROWS[harness.rank()]
        with mock.patch.object(CollectiveQueue, "exchange", counted):
            optimizer.train_step(square_loss, torch.ones(samples, INPUTS) if samples else None)
        assert not any("reduction" in what for what in sent), sent
        found.append(sent["the rows of layer 0.weight"])
        optimizer.release()
    return found


def test_ranks_send_the_predicted_bytes(ranks: Pool) -> None:
    stages = choose(quick=(0, 3), full=STAGES)
    by_rank = ranks.run(bytes_sent, stages, ranks=RANKS)
    for number, stage in enumerate(stages):
        rows = [PASSES * each for each in ROWS]
        layer = LinearLayer(name="0", unit=0, outputs=OUTPUTS, inputs=INPUTS, rows_per_sample=1)
        predicted = factored_traffic(layer, rows, OWNERS if stage else (1.0,) * RANKS)
        for rank, traffic in enumerate(predicted):
            sent = by_rank[rank][number]
            assert sent == pytest.approx(WIRE_BYTES * traffic.leaving, rel=0.01), (stage, rank)
