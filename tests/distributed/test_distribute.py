"""`distribute` trains by a programme or by the plan, and says why."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import ranks as harness
import torch
from ranks import Failure, Pool, one_off
from records import cluster as measured_cluster
from test_programme_training import (
    OPTIONS,
    SAMPLES,
    TASKS,
    close,
    experts_divided,
    exported_loss,
    exported_once,
    global_batches,
    job_of,
    new_model,
    results_of,
    train_in_one_process,
)
from torch import Tensor, nn
from torch.nn import functional as F

import poplar
from poplar.programmes.graph.programme import Programme
from poplar.programmes.run import execution
from poplar.programmes.run.distributed_training import DistributedTraining
from poplar.programmes.run.execution import Execution
from poplar.programmes.run.trials import Comparison, _Turn, compare
from poplar.programmes.search.composition import data_parallel
from poplar.programmes.search.decision import ProgrammeDecision
from poplar.values.communication import Communication
from poplar.values.errors import CollectiveTimeout, NotExportable
from poplar.zero import setup

Loss = Callable[[nn.Module, Any], Tensor]


def squares(model: nn.Module, x: Tensor) -> Tensor:
    return F.mse_loss(model(x), x)


class ByRank(nn.Module):
    """Computes the same by other operators on other ranks, as by the kind of the GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * 1.0 if harness.rank() else self.layer(x)


WITHOUT: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], str]] = {
    "dropout": (lambda: nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)), {}, "draws random"),
    "batch norm": (
        lambda: nn.Sequential(nn.Unflatten(1, (2, 4)), nn.BatchNorm1d(2), nn.Flatten()),
        {"allow_forward_state": True},
        "the forward pass changes 1.",
    ),
    "other operators": (ByRank, {}, "other operators, dtypes or shapes on rank(s) [1]"),
    "an error in the export": (lambda: nn.Linear(8, 8), {}, "rank 1: RuntimeError: a test"),
    "whole tensors": (
        lambda: nn.Linear(8, 8, bias=False),
        {"optimizer_class": torch.optim.Muon},
        "the granularity 'parameter'",
    ),
    "compute dtype": (lambda: nn.Linear(8, 8), {"compute_dtype": torch.bfloat16}, "bfloat16"),
    "never": (lambda: nn.Linear(8, 8), {"programme": "never"}, "programme='never'"),
}


def train_without(kind: str) -> tuple[str, bool, list[Tensor]]:
    """The reason; whether there is a programme; the values after a step."""
    new, options, _ = WITHOUT[kind]
    if kind == "an error in the export" and harness.rank() == 1:
        fails = mock.Mock(side_effect=RuntimeError("a test"))
        with mock.patch("poplar.programmes.run.distributed_job.CheckedExport", fails):
            return train_by(new, options)
    return train_by(new, options)


def train_by(
    new: Callable[[], nn.Module], options: dict[str, Any]
) -> tuple[str, bool, list[Tensor]]:
    """As `train_without`."""
    torch.manual_seed(harness.rank())  # the first rank's values are used
    model, batch = new(), torch.arange(6 * 8.0).reshape(6, 8) / 48
    training = poplar.distribute(
        model,
        squares,
        batch,
        global_batch=6,
        seconds=0.5,
        cache=False,
        progress=False,
        process_group=harness.group(),
        lr=1e-2,
        **options,
    )
    start = training.plan.offset(harness.rank())
    samples = training.plan.samples(harness.rank())
    training.train_step(batch[start : start + samples] if samples else None, max_norm=1.0)
    state = training.state_dict()
    assert (state is None) == (harness.rank() != 0)
    training.release()
    values = [parameter.detach().clone() for parameter in model.parameters()]
    return training.reason, training.programme is not None, values


@pytest.mark.parametrize("kind", WITHOUT)
def test_models_without_a_programme_are_trained_by_the_plan(ranks: Pool, kind: str) -> None:
    by_rank = ranks.run(train_without, kind, ranks=2)
    for reason, has_programme, values in by_rank:
        assert not has_programme
        assert WITHOUT[kind][2] in reason
        assert reason == by_rank[0][0]
        close(values, by_rank[0][2])


def train_in_another_dtype() -> tuple[str, bool, list[Tensor]]:
    """The engine casts the model, as it does on GPUs; the profile does not say so."""
    agree = setup.agree_on_request

    def casting(*args: Any, **options: Any) -> setup.Request:
        return replace(agree(*args, **options), cast_to=torch.bfloat16)

    profile = replace(measured_cluster((2.0, 1.0), ["cpu"] * 2), identity={})
    with mock.patch.object(setup, "agree_on_request", casting):
        return train_by(lambda: nn.Linear(8, 8), {"profile": profile, "verify": False})


def test_the_dtype_of_the_plan_is_known_without_that_of_the_profile(ranks: Pool) -> None:
    for reason, has_programme, _ in ranks.run(train_in_another_dtype, ranks=2):
        assert not has_programme
        assert "compute_dtype is torch.bfloat16" in reason


def planned_stage(stage: int) -> int:
    profile = replace(measured_cluster((2.0, 1.0), ["cpu"] * 2), identity={})
    training = poplar.distribute(
        nn.Linear(8, 8),
        squares,
        torch.ones(6, 8),
        global_batch=6,
        stage=stage,
        programme="never",
        profile=profile,
        verify=False,
        process_group=harness.group(),
        lr=1e-2,
    )
    training.release()
    return training.plan.stage


@pytest.mark.parametrize("stage", [0, 3])
def test_the_plan_has_the_given_stage(ranks: Pool, stage: int) -> None:
    assert ranks.run(planned_stage, stage, ranks=2) == [stage, stage]


def reason_against(device: str) -> str:
    with exported_once("mixture"), pytest.raises(NotExportable) as raised:
        job_of("mixture", device=device).exported()
    return str(raised.value)


def test_programmes_compute_where_the_parameters_are(ranks: Pool) -> None:
    for reason in ranks.run(reason_against, "cuda", ranks=2):
        assert "device='cuda', but the parameters are on cpu" in reason


def distributed(
    task: str, programme: Programme, model: nn.Module | None = None, **options: Any
) -> DistributedTraining:
    torch.manual_seed(harness.rank())
    new, config, loss_fn, _ = TASKS[task]
    if model is None:
        model = new_model(task) if harness.rank() == 0 else new(config)
    return poplar.distribute(
        model,
        loss_fn,
        {key: value[:2] for key, value in global_batches(task)[0].items()},
        global_batch=SAMPLES,
        programme=programme,
        process_group=harness.group(),
        **{**OPTIONS, **options},
    )


def train(task: str, programme: Programme) -> tuple[list[Any], list[Tensor]]:
    with exported_once(task):
        training = distributed(task, programme)
    results = results_of(training, task)
    training.release()
    return results, [p.detach().clone() for p in training.model.parameters()]


def failing_with(programme: Programme, communication: Any) -> str:
    with pytest.raises(ValueError, match="communication") as raised:
        distributed("mixture", programme, communication=communication)
    return str(raised.value)


@pytest.mark.parametrize("given", ["int8", Communication(gradients="int4", warmup_steps=1)])
def test_a_given_programme_sends_nothing_with_fewer_bits(ranks: Pool, given: Any) -> None:
    programme = experts_divided(exported_loss("mixture"), (2, 1))
    for message in ranks.run(failing_with, programme, given, ranks=2):
        assert "programmes send everything exactly" in message


def test_a_given_programme_trains_as_one_process(ranks: Pool) -> None:
    programme = experts_divided(exported_loss("mixture"), (2, 1))
    expected = train_in_one_process("mixture")
    for results, values in ranks.run(train, "mixture", programme, ranks=2):
        close(results, expected["results"])
        close(values, [p.detach() for p in expected["values"].values()])


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the tests find the plan that the first one of them measured."""
    return tmp_path_factory.mktemp("cache")


def train_found(
    cache: Path, programme: Programme, measured: Comparison | None, **options: Any
) -> tuple[str, bool, list[Any], int]:
    """As if the search had found a programme, which only the first rank does.

    Args:
        measured: of both trainings; None: measure.
    """
    found = ProgrammeDecision(
        programme=programme,
        reason="a test",
        step_seconds=1.0,
        data_parallel_seconds=2.0,
        memory_bytes=(1 << 20, 1 << 20),
    )
    calls = mock.Mock(return_value=found)
    comparison = mock.Mock(wraps=compare, side_effect=lambda *_, **__: measured or mock.DEFAULT)
    with (
        mock.patch("poplar.programmes.run.distribute.plan_programme", calls),
        mock.patch("poplar.programmes.run.distribute.compare", comparison),
        mock.patch.dict(os.environ, POPLAR_CACHE=str(cache)),
        exported_once("mixture"),
    ):
        training = poplar.distribute(
            new_model("mixture"),
            TASKS["mixture"][2],
            global_batches("mixture")[0],
            global_batch=SAMPLES,
            seconds=0.5,
            progress=False,
            process_group=harness.group(),
            **OPTIONS,
            **options,
        )
    assert calls.call_count == (harness.rank() == 0)
    results = results_of(training, "mixture")
    assert training.programme in (None, programme)
    return training.explain(), training.programme is not None, results, comparison.call_count


FASTER = Comparison(programme_seconds=0.1, plan_seconds=0.2, ratio=0.5)
SLOWER = Comparison(programme_seconds=0.3, plan_seconds=0.2, ratio=1.5)


def test_a_programme_that_computes_something_else_is_not_used(ranks: Pool, cache: Path) -> None:
    programme = experts_divided(exported_loss("mixture"), (2, 1))
    measured = replace(FASTER, difference="the loss of a first step was 1 by the programme")
    for explained, by_programme, _, _ in ranks.run(
        train_found, cache, programme, measured, ranks=2
    ):
        assert not by_programme
        assert "computes something else (the loss of a first step was 1 by" in explained


def test_first_steps_with_another_loss_or_gradient_differ() -> None:
    turn = _Turn(seconds=0.1, loss=2.0, grad_norm=1.0, rounding=1e-3)
    assert not turn.difference(turn._replace(loss=2.001))
    assert "the loss of a first step" in turn.difference(turn._replace(loss=2.01))
    assert "grad_norm of a first step" in turn.difference(turn._replace(grad_norm=1.1))


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_first_step_that_is_not_finite_differs_from_one_that_is(value: float) -> None:
    turn = _Turn(seconds=0.1, loss=2.0, grad_norm=1.0, rounding=1e-3)
    overflowed = turn._replace(loss=value)
    assert "the loss of a first step" in turn.difference(overflowed)
    assert "the loss of a first step" in overflowed.difference(turn)
    assert not overflowed.difference(overflowed)


@pytest.mark.parametrize("is_faster", [True, False])
def test_all_ranks_train_by_what_was_faster_in_trials(
    ranks: Pool, cache: Path, is_faster: bool
) -> None:
    programme = experts_divided(exported_loss("mixture"), (2, 1))
    expected = train_in_one_process("mixture")["results"]
    measured = FASTER if is_faster else SLOWER
    for explained, by_programme, results, _ in ranks.run(
        train_found, cache, programme, measured, ranks=2
    ):
        assert by_programme == is_faster
        took = (
            "measured in trials: 0.1 s per step, and 0.2 s with data parallelism"
            if is_faster
            else "faster in trials: 0.2 s per step, and 0.3 s with this programme"
        )
        assert took in explained
        close(results, expected)


def test_trials_leave_the_model_as_it_was(ranks: Pool, cache: Path) -> None:
    """Training afterwards is that of one process, whichever was faster."""
    programme = experts_divided(exported_loss("mixture"), (2, 1))
    expected = train_in_one_process("mixture")["results"]
    outcomes = ranks.run(train_found, cache, programme, None, ranks=2)
    for explained, by_programme, results, trials in outcomes:
        assert trials == 1
        assert (explained, by_programme) == outcomes[0][:2]
        close(results, expected)


class Full(torch.autograd.Function):
    """Runs out of memory in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")


def train_after_a_shortage(
    cache: Path, programme: Programme, fault: str
) -> tuple[str, bool, list[Any], int]:
    """Rank 1 runs out of memory in its trial of the programme."""
    real = execution.function

    def function(name: str) -> Callable[..., Any]:
        if harness.rank() != 1 or "gelu" not in name:
            return real(name)
        if fault == "backward":
            return lambda x, *args, **kwargs: Full.apply(x)
        return mock.Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory"))

    def failing(*args: Any) -> Execution:
        with mock.patch.object(execution, "function", function):
            return Execution(*args)

    with mock.patch("poplar.programmes.run.programme_training.Execution", failing):
        return train_found(cache, programme, None)


def test_the_plan_trains_if_the_programme_runs_out_of_memory(ranks: Pool, cache: Path) -> None:
    programme = experts_divided(exported_loss("mixture"), (2, 1))
    expected = train_in_one_process("mixture")["results"]
    outcomes = ranks.run(train_after_a_shortage, cache, programme, "forward", ranks=2)
    for explained, by_programme, results, _ in outcomes:
        assert not by_programme
        assert "because rank 1 ran out of memory in a trial of the programme" in explained
        assert "2.00 times as fast as data parallelism" in explained
        close(results, expected)


def test_a_programme_out_of_memory_in_the_backward_says_what_to_do(cache: Path) -> None:
    """Ranks that wait for it in the backward cannot go on."""
    programme = experts_divided(exported_loss("mixture"), (2, 1))
    first, second = one_off(2, failing_after_a_shortage, cache, programme)
    assert isinstance(first, Failure)
    assert isinstance(second, Failure)
    assert first.is_a(CollectiveTimeout)
    assert "rank 1" in first.message
    assert second.is_a(torch.OutOfMemoryError)
    for failure in (first, second):
        assert "call distribute(programme='never')" in failure.message


def failing_after_a_shortage(cache: Path, programme: Programme) -> Failure | None:
    with harness.catching() as caught:
        train_after_a_shortage(cache, programme, "backward")
    return caught[0] if caught else None


def train_without_trials(cache: Path, programme: Programme) -> tuple[str, bool, list[Any], int]:
    return train_found(cache, programme, None, verify=False)


def test_without_trials_the_prediction_decides(ranks: Pool, cache: Path) -> None:
    programme = experts_divided(exported_loss("mixture"), (2, 1))
    for explained, by_programme, _, trials in ranks.run(
        train_without_trials, cache, programme, ranks=2
    ):
        assert by_programme
        assert trials == 0
        assert "2.00 times as fast as data parallelism" in explained


def attempt(programmes: list[Any]) -> list[str]:
    with exported_once("mixture"), harness.catching() as caught:
        distributed("mixture", programmes[harness.rank()])
    return [failure.message for failure in caught]


def test_wrong_programmes_are_refused_on_all_ranks(ranks: Pool) -> None:
    exported = exported_loss("mixture")
    programme, other = (experts_divided(exported, ratios) for ratios in ((2, 1), (1, 1)))
    encoder = data_parallel(exported_loss("encoder").graph, (2, 1))
    wrong_shares = replace(programme, shares=(0.5, 0.4))
    cases = (
        ([programme, other], "the ranks passed different programmes to distribute()"),
        (["always", "always"], "programme='always' must be 'auto', 'never' or a Programme"),
        ([encoder, encoder], "Programme.placements must have the graph's node"),
        ([wrong_shares, wrong_shares], "which sum to 0.9"),
    )
    for programmes, expected in cases:
        for (message,) in ranks.run(attempt, programmes, ranks=2):
            assert expected in message


WRONG = {
    "the name of an option": ([{"learning_rate": 1e-3}] * 2, "'learning_rate' is neither"),
    "a value on one rank": ([{"lr": -1.0}, {}], "Invalid learning rate: -1.0"),
    "different values": ([{"lr": 1e-2}, {"lr": 2e-2}], "optimizer options"),
    "the optimizer": ([{"granularity": "parameter"}] * 2, "the granularity 'parameter'"),
}
"""Options by rank, and the error."""


def start_wrongly(
    programme: Programme, by_rank: list[dict[str, Any]]
) -> tuple[str, dict[str, Any]]:
    """The error, and the state of the model after it."""
    model = new_model("mixture")
    with exported_once("mixture"), harness.catching() as caught:
        distributed("mixture", programme, model, **by_rank[harness.rank()])
    return caught[0].message, dict(model.state_dict())


@pytest.mark.parametrize("kind", WRONG)
def test_wrong_options_leave_the_model_whole(ranks: Pool, kind: str) -> None:
    by_rank, expected = WRONG[kind]
    programme = experts_divided(exported_loss("mixture"), (2, 1))
    before = dict(new_model("mixture").state_dict())
    for message, state in ranks.run(start_wrongly, programme, by_rank, ranks=2):
        assert expected in message
        torch.testing.assert_close(state, before, rtol=0, atol=0)
