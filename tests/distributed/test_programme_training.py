"""Training by a programme is the training of one process, with its state and its errors."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import ranks as harness
import torch
from ranks import Pool
from safetensors.torch import load_file
from subset import choose
from test_exported_graph import TASKS
from torch import Tensor, nn
from virtual_programme import following, random_programme

import poplar
from poplar import HeteroZeroOptimizer, Plan
from poplar.comm import Group, connect, connect_control
from poplar.comm.process_group import ProcessGroupCommunicator
from poplar.data import pytree
from poplar.programmes.graph.placement import Sharded
from poplar.programmes.graph.programme import Programme
from poplar.programmes.run import checked_export, execution
from poplar.programmes.run.distributed_job import DistributedJob
from poplar.programmes.run.distributed_training import DistributedTraining
from poplar.programmes.run.exported_graph import ExportedLoss, export_loss
from poplar.programmes.run.programme_training import ProgrammeTraining, sampling_plan
from poplar.programmes.search.composition import batch_placements, data_parallel
from poplar.zero import unit

RATIOS = ((2, 1), (4, 2, 1), (1, 0, 2))
SAMPLES, STEPS = 6, 3
CLIP = 0.05
"""Smaller than every norm, so all steps are clipped."""
OPTIONS = {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-4}
EXPERTS = {f"blocks.0.mixture.experts.{name}": Sharded(0) for name in ("up", "down")}


def new_model(task: str) -> nn.Module:
    torch.manual_seed(1)
    new, config, _, _ = TASKS[task]
    return new(config)


def global_batches(task: str) -> list[Any]:
    _, _, _, draw = TASKS[task]
    torch.manual_seed(2)
    return [as_float32(draw(SAMPLES)) for _ in range(STEPS)]


def as_float32(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {k: v.float() if v.is_floating_point() else v for k, v in batch.items()}


def part_of(batch: dict[str, Tensor], plan: Plan, rank: int) -> Any:
    start = plan.offset(rank)
    if plan.samples(rank) == 0:
        return None
    return {key: value[start : start + plan.samples(rank)] for key, value in batch.items()}


@functools.cache
def exported_loss(task: str, samples: int = SAMPLES) -> ExportedLoss:
    batch = pytree.take(global_batches(task)[0], range(samples))
    return export_loss(new_model(task), TASKS[task][2], batch)


@contextmanager
def exported_once(task: str) -> Iterator[None]:
    """Take graphs from `exported_loss`: an export takes longer than the rest of a test."""

    def export(model: nn.Module, loss_fn: Any, batch: Any) -> ExportedLoss:
        known = exported_loss(task, pytree.samples_in(batch))
        constants = {name: value.clone() for name, value in known.constants.items()}
        return replace(known, constants=constants)

    with mock.patch.object(checked_export, "export_loss", export):
        yield


def job_of(task: str, timeout: timedelta | None = None, **options: Any) -> DistributedJob:
    group = Group.of(harness.group(), timeout)
    return DistributedJob.of(
        new_model(task),
        TASKS[task][2],
        global_batches(task)[0],
        global_batch=SAMPLES,
        group=group,
        control=connect_control(group),
        process_group=harness.group(),
        timeout=timeout,
        **{**OPTIONS, **options},
    )


def start(
    task: str,
    programme: Programme,
    transport: str = "auto",
    seconds: float | None = None,
    **options: Any,
) -> ProgrammeTraining:
    job = job_of(task, None if seconds is None else timedelta(seconds=seconds), **options)
    comm = connect(job.group, transport)
    with exported_once(task):
        checked = job.exported()
    return ProgrammeTraining(job, comm, checked, programme, reason="a test")


def results_of(training: DistributedTraining, task: str) -> list[Any]:
    """The loss, norm and samples of each step."""
    results = []
    for batch in global_batches(task):
        own = part_of(batch, training.plan, harness.rank())
        result = training.train_step(own, max_norm=CLIP)
        results.append((result.loss, result.grad_norm, result.samples))
    return results


def train(task: str, programme: Programme, transport: str) -> dict[str, Any]:
    """Losses, norms and the whole state after the last step."""
    training = start(task, programme, transport)
    results = results_of(training, task)
    parts = [part_of(b, training.plan, harness.rank()) for b in global_batches(task)[:2]]
    loss = training.evaluate([part for part in parts if part is not None])
    state = training.state_dict(to=1)
    training.release()
    values = {name: value.detach().clone() for name, value in training.model.named_parameters()}
    return {"results": results, "evaluated": loss, "state": state, "values": values}


def train_in_one_process(task: str) -> dict[str, Any]:
    model, loss_fn = new_model(task), TASKS[task][2]
    optimizer = torch.optim.AdamW(model.parameters(), **OPTIONS)
    results = []
    for batch in global_batches(task):
        optimizer.zero_grad()
        loss = loss_fn(model, batch)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        results.append((float(loss), float(norm), SAMPLES))
    return {
        "results": results,
        "model": model,
        "state": {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        "values": dict(model.named_parameters()),
    }


def evaluate_in_one_process(task: str, model: nn.Module, programme: Programme) -> float:
    """The mean loss of the ranks' parts, weighted by samples, as `evaluate` of a plan."""
    plan, total = sampling_plan(programme, SAMPLES), 0.0
    for batch in global_batches(task)[:2]:
        for rank in range(programme.world_size):
            part = part_of(batch, plan, rank)
            if part is not None:
                with torch.no_grad():
                    total += plan.samples(rank) * float(TASKS[task][2](model, part))
    return total / (2 * SAMPLES)


def check(ranks: Pool, task: str, programme: Programme, transport: str = "auto") -> None:
    expected = train_in_one_process(task)
    evaluated = evaluate_in_one_process(task, expected["model"], programme)
    by_rank = ranks.run(train, task, programme, transport, ranks=programme.world_size)
    for rank, got in enumerate(by_rank):
        close(got["results"], expected["results"])
        close(got["evaluated"], evaluated)
        close(got["values"], {n: p.detach() for n, p in expected["values"].items()})
        if rank != 1:
            assert got["state"] is None
            continue
        close(got["state"]["model"], dict(expected["state"]["model"]))
        close(got["state"]["optimizer"]["state"], expected["state"]["optimizer"]["state"])


def close(got: Any, expected: Any) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def experts_divided(exported: ExportedLoss, ratios: tuple[int, ...]) -> Programme:
    graph = exported.graph
    placed = {graph.parameters[name].name: placement for name, placement in EXPERTS.items()}
    return following(graph, ratios, {**batch_placements(graph), **placed})


@pytest.mark.parametrize("transport", ["shared_memory", "process_group"])
@pytest.mark.parametrize("ratios", RATIOS)
def test_experts_on_several_ranks_train_as_in_one_process(
    ranks: Pool, transport: str, ratios: tuple[int, ...]
) -> None:
    exported = exported_loss("mixture")
    check(ranks, "mixture", experts_divided(exported, ratios), transport)


@pytest.mark.parametrize("task", ["encoder", "mixture", "vgg", "vit", "llama", "tied"])
@pytest.mark.parametrize("ratios", RATIOS)
def test_any_programme_trains_as_one_process(
    ranks: Pool, task: str, ratios: tuple[int, ...]
) -> None:
    exported = exported_loss(task)
    draw = random.Random(len(task))
    programmes = [
        random_programme(exported.graph, ratios, draw) for _ in range(choose(quick=1, full=4))
    ]
    for programme in [data_parallel(exported.graph, ratios), *programmes]:
        check(ranks, task, programme)


def resume(task: str, programme: Programme, other: Programme | None) -> list[Tensor]:
    """Two steps, the state loaded into another training, one step: the values of the model."""
    first, *rest = global_batches(task)
    before = start(task, programme)
    before.train_step(part_of(first, before.plan, harness.rank()), max_norm=CLIP)
    state = share(before.state_dict())
    after = start(task, other) if other is not None else start_data_parallel(task)
    after.load_state_dict(state)
    for batch in rest:
        after.train_step(part_of(batch, after.plan, harness.rank()), max_norm=CLIP)
    after.release()
    return [parameter.detach().clone() for parameter in after.model.parameters()]


def share(state: Any) -> Any:
    """What rank 0 has, on all ranks, as from a file."""
    received = [state]
    torch.distributed.broadcast_object_list(received, 0, group=harness.group())
    return received[0]


def start_data_parallel(task: str) -> DistributedTraining:
    return DistributedTraining(job_of(task), Plan.manual([4, 2], stage=2), reason="a test")


@pytest.mark.parametrize("ratios", [(1, 2), (0, 1), None])
def test_the_state_loads_under_other_programmes_and_plans(
    ranks: Pool, ratios: tuple[int, ...] | None
) -> None:
    exported = exported_loss("mixture")
    programme = experts_divided(exported, (2, 1))
    other = None if ratios is None else experts_divided(exported, ratios)
    expected = [p.detach() for p in train_in_one_process("mixture")["values"].values()]
    for got in ranks.run(resume, "mixture", programme, other, ranks=2):
        close(got, expected)


def order_of_collectives(programme: Programme) -> tuple[list[list[str]], list[float]]:
    """What programme and engine issue in each step, of several reductions; and the losses."""
    issued: list[str] = []

    def recorded(method: Callable[..., Any]) -> Callable[..., Any]:
        def run(self: ProcessGroupCommunicator, *args: Any, what: str, **options: Any) -> Any:
            issued.append(what)
            return method(self, *args, what=what, **options)

        return run

    names = ("reduce_scatter", "all_gather", "all_to_all", "broadcast")
    methods = {name: recorded(getattr(ProcessGroupCommunicator, name)) for name in names}
    with (
        mock.patch.object(unit, "MAX_FLAT_BYTES", 1 << 10),
        mock.patch.multiple(ProcessGroupCommunicator, **methods),
    ):
        training = start("mixture", programme, "process_group", communicator="process_group")
        steps, losses = [], []
        for batch in global_batches("mixture"):
            issued.clear()
            own = part_of(batch, training.plan, harness.rank())
            losses.append(training.train_step(own, max_norm=CLIP).loss)
            steps.append(issued.copy())
    return steps, losses


@pytest.mark.parametrize("ratios", [(2, 1, 1), (1, 0, 2)], ids=str)
def test_all_collectives_of_a_step_are_issued_in_one_order(
    ranks: Pool, ratios: tuple[int, ...]
) -> None:
    """NCCL matches those of one communicator by their order, and both use the user's group.

    A rank that learns of a reduction later is in a collective of the backward until then, so no
    rank waits for reductions.
    """
    expected = [loss for loss, _, _ in train_in_one_process("mixture")["results"]]
    exported = exported_loss("mixture")
    drawn = random_programme(exported.graph, ratios, random.Random(1))
    for programme in (experts_divided(exported, ratios), drawn):
        by_rank = ranks.run(order_of_collectives, programme, ranks=len(ratios))
        for _, losses in by_rank:
            close(losses, expected)
        first, *others = (steps for steps, _ in by_rank)
        assert sum(what.startswith("the reduction of unit") for what in first[0]) > 2
        assert [steps == first for steps in others] == [True] * len(others)
        gradients = max(i for i, what in enumerate(first[1]) if what.startswith("the gradient of"))
        assert any(what.startswith("the reduction of unit") for what in first[1][:gradients])


def load_wrong_states(programme: Programme) -> list[str]:
    training = start("mixture", programme)
    state = share(training.state_dict())
    before = [p.detach().clone() for p in training.model.parameters()]
    name = "blocks.0.mixture.experts.up"
    wrong = {**state, "model": {**state["model"], name: torch.ones(2, 3)}}
    missing = {**state, "model": {k: v for k, v in state["model"].items() if k != name}}
    messages = []
    for given in (wrong, missing):
        with harness.catching() as caught:
            training.load_state_dict(given)
        messages += [failure.message for failure in caught]
    assert all(map(torch.equal, before, training.model.parameters()))
    return messages


def test_states_of_other_models_are_refused(ranks: Pool) -> None:
    programme = experts_divided(exported_loss("mixture"), (2, 1))
    for wrong, missing in ranks.run(load_wrong_states, programme, ranks=2):
        assert "'blocks.0.mixture.experts.up' has the shape (2, 3) in the state" in wrong
        assert "the names ['blocks.0.mixture.experts.up'] differ" in missing


def save(programme: Programme, path: Path) -> None:
    training = start("mixture", programme)
    training.save_model(path)


def test_a_saved_model_is_whole(ranks: Pool, tmp_path: Path) -> None:
    programme = experts_divided(exported_loss("mixture"), (1, 0, 2))
    path = tmp_path / "model.safetensors"
    ranks.run(save, programme, path, ranks=3)
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    close(load_file(path), {n: p.detach() for n, p in new_model("mixture").named_parameters()})


def save_nan(programme: Programme, path: Path) -> list[str]:
    training = start("mixture", programme)
    if harness.rank() == 1:
        training.optimizer._training.engine.trained[0].master.fill_(float("nan"))
    with harness.catching() as caught:
        training.save_model(path)
    return [failure.message for failure in caught]


def test_values_that_are_not_finite_are_not_saved(ranks: Pool, tmp_path: Path) -> None:
    programme = experts_divided(exported_loss("mixture"), (2, 1))
    for (message,) in ranks.run(save_nan, programme, tmp_path / "model.safetensors", ranks=2):
        assert "rank 1: save_model(): parameter" in message
    assert not list(tmp_path.iterdir())


class Broken(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise ArithmeticError("the operator does not work")


def fail(programme: Programme, transport: str, fault: str) -> tuple[list[str], list[Any]]:
    """In the second step, rank 1 has an operator whose forward or backward pass fails, too few
    samples, or a number of another type.

    Returns:
        The errors, and the losses of three steps besides.
    """
    real, is_faulty, is_broken = execution.function, harness.rank() == 1, []

    def function(name: str) -> Callable[..., Any]:
        called = real(name)

        def run(*args: Any, **kwargs: Any) -> Any:
            if is_broken and "gelu" in name:
                if fault == "forward":
                    raise ArithmeticError("the operator does not work")
                return Broken.apply(*args)
            return called(*args, **kwargs)

        return run

    with mock.patch.object(execution, "function", function):
        training = start("mixture", programme, transport, seconds=15.0)
    losses, messages = [], []
    for step, batch in enumerate(global_batches("mixture")):
        own = part_of(batch, training.plan, harness.rank())
        if is_faulty and step == 1:
            is_broken.append(True)
            bad = {key: value[:1] for key, value in own.items()} if fault == "batch" else own
        else:
            bad = own
        if step == 1 and fault == "backward":
            training.train_step(bad, max_norm=CLIP)
        elif step == 1:
            with harness.catching() as caught:
                training.train_step(bad, max_norm=CLIP)
            messages += [f"{failure.type}: {failure.message}" for failure in caught]
            is_broken.clear()
        losses.append(training.train_step(own, max_norm=CLIP).loss)
    total = torch.ones(())
    torch.distributed.all_reduce(total, group=harness.group())
    assert total == 3.0
    return messages, losses


@pytest.mark.parametrize("transport", ["shared_memory", "process_group"])
@pytest.mark.parametrize(
    ("fault", "own"),
    [
        ("batch", "must have the shape (2, 12), got (1, 12)"),
        ("forward", "does not work"),
        ("backward", "does not work"),
    ],
)
def test_a_rank_that_fails_is_named_by_the_others(
    ranks: Pool, transport: str, fault: str, own: str
) -> None:
    """After an error before the backward pass, the training goes on as if there was none."""
    programme = experts_divided(exported_loss("mixture"), (1, 1, 1))
    if fault == "backward":
        failures = ranks.run_expecting_errors(fail, programme, transport, fault, ranks=3)
        assert own in failures[1].message
        for failure in (failures[0], failures[2]):
            assert failure.type == "CollectiveTimeout"
            assert "rank 1" in failure.message
        return
    expected = [loss for loss, _, _ in train_in_one_process("mixture")["results"]]
    outcomes = ranks.run(fail, programme, transport, fault, ranks=3)
    for rank, ((message,), losses) in enumerate(outcomes):
        if rank == 1:
            assert own in message
        else:
            assert message.startswith("RankFailed")
            assert "rank 1" in message
        close(losses, expected[: len(losses)])


def misuse(programme: Programme) -> list[str]:
    training = start("mixture", programme)
    batch = global_batches("mixture")[0]
    attempts: list[Callable[[], Any]] = [
        lambda: TASKS["mixture"][2](training.model, batch),
        lambda: training.model.blocks[0](torch.zeros(1, 2, 32)),
        lambda: training.model.blocks[0].mixture.experts(torch.zeros(1, 2, 32)),
        lambda: training.model.state_dict(),
        lambda: training.model.blocks.state_dict(),
        lambda: training.optimizer.save_model("model.safetensors"),
        lambda: poplar.save_checkpoint("checkpoint", optimizer=training.optimizer),
        lambda: HeteroZeroOptimizer(
            new_model("mixture"), torch.optim.AdamW, stage=2, _local=list(EXPERTS),
            process_group=harness.group(),
        ),
    ]  # fmt: skip
    messages = []
    for attempt in attempts:
        with harness.catching() as caught:
            attempt()
        messages += [failure.message for failure in caught]
    return messages


def test_misuses_are_refused(ranks: Pool) -> None:
    programme = experts_divided(exported_loss("mixture"), (2, 1))
    expected = (
        "the parameters of this Mixture are divided over ranks by a programme, so its forward has "
        "no meaning; call train_step() or evaluate() of the training, or release() it first",
        "the parameters of this PairOfBlocks are divided over ranks",
        "the parameters of this Experts are divided over ranks",
        "model.state_dict() would have only this rank's parts",
        "model.state_dict() would have only this rank's parts",
        "save_model(): every rank has a part of its own of 'blocks.0.mixture.experts.up'",
        "save_checkpoint() and load_checkpoint(): every rank has a part of its own",
        "local parameters need stage 1, got stage 2",
    )
    for messages in ranks.run(misuse, programme, ranks=2):
        for message, text in zip(messages, expected, strict=True):
            assert text in message
