"""Peers have the losses and gradients of one process on the whole batch."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from head_to_head import configurations, runner, worker_calls
from head_to_head.clusters import Cluster
from head_to_head.engine import Configuration
from head_to_head.task import Task
from head_to_head.workers import WorkerContext, Workers

from poplar import Plan

STEPS = 5
EACH = 4
"""Samples per rank and step."""
TINY = Task(size="tiny", context=16, learning_rate=1e-2)

needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None,
    reason="DeepSpeed is not installed; `make peers` does that",
)
# One crew, and so one set of processes, per family: ZeRO-3 of DeepSpeed changes torch itself.
FAMILIES = [
    pytest.param((("ddp", 0), ("fsdp2", 2), ("fsdp2", 3)), id="torch"),
    pytest.param(
        (("deepspeed", 0), ("deepspeed", 1), ("deepspeed", 2)),
        id="zero-0-to-2",
        marks=needs_deepspeed,
    ),
    pytest.param((("deepspeed", 3),), id="zero-3", marks=needs_deepspeed),
]


def configuration(provider: str, stage: int, ranks: int, passes: int) -> Configuration:
    return Configuration(
        name=f"{provider}, stage {stage}, {ranks} ranks, {passes} passes",
        provider=provider,
        stage=stage,
        policy="even",
        plan=Plan.even(ranks, EACH * ranks, EACH // passes, stage),
        ranks=tuple(range(ranks)),
    )


def one_process(task: Task) -> list[float]:
    """Losses of the same training in one process."""
    model = task.new_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=task.learning_rate)
    batches = task.batches(Plan.even(1, task.global_batch, task.global_batch, 0), 0)
    losses = []
    for _ in range(STEPS):
        loss = task.loss_fn(model, next(batches))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def trained(workers_: Workers, task: Task, one: Configuration) -> tuple[list[float], set[str]]:
    """The global batch's mean loss at each step of a new engine, and the names of its spans."""
    workers_.call(worker_calls.build, task, one)
    turns = workers_.call(worker_calls.take_turn, one.name, STEPS)
    spans = workers_.call(worker_calls.trace_step, one.name)
    workers_.call(worker_calls.drop, one.name)
    return runner.mean_losses(one, turns), {span.what for span in spans[0]}


@pytest.mark.parametrize(("ranks", "model"), [(2, "llama"), (3, "encoder")])
@pytest.mark.parametrize("peers", FAMILIES)
def test_losses_of_peers_equal_one_process(peers, ranks, model):
    task = replace(TINY, model=model, global_batch=EACH * ranks)
    expected = one_process(task)
    assert expected[-1] < expected[0]
    candidates = [
        (configuration(*peer, ranks, passes), passes) for peer in peers for passes in (1, 2)
    ]
    cluster = Cluster(name="equal", cores=(0, 1, 1)[:ranks])
    with (
        cluster.opened() as open_cluster,
        Workers(open_cluster, runner.worker_group(candidates[0][0])) as workers_,
    ):
        for one, passes in candidates:
            losses, texts = trained(workers_, task, one)
            assert losses == pytest.approx(expected, abs=1e-5), one.name
            numbers = range(1, passes + 1)
            backwards = {f"backward of pass {number}" for number in numbers}
            forwards = {f"forward of pass {number}" for number in numbers}
            assert texts == backwards | forwards | {"the update"}, one.name


UNEVEN = Task(size="tiny", context=16, global_batch=32)
SPEEDS = (2.5, 1.0, 1.2)


def gradients(context: WorkerContext, task: Task, one: Configuration) -> list[torch.Tensor]:
    """The unsharded gradient of the engine's first step."""
    loaded = worker_calls.load_engine(context, task, one)
    engine, seen = loaded.engine, []

    def keep(*_: object) -> None:
        for parameter in engine.model.parameters():
            gradient = parameter.grad
            seen.append(gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient)

    engine.optimizer.register_step_pre_hook(keep)
    engine.step(next(loaded.batches))
    return [gradient.clone() for gradient in seen]


def test_uneven_peers_have_the_gradient_of_one_process():
    cluster = Cluster(name="unequal", cores=(0, 1, 1), capped=(1,))
    members = list(configurations.uneven_peers(cluster, UNEVEN, (0, 2, 3), SPEEDS))
    assert [(one.provider, one.stage) for one in members] == [
        ("ddp", 0),
        ("fsdp2", 3),
        ("fsdp2", 2),
    ]
    assert all(len({one.plan.samples(rank) for rank in range(3)}) == 3 for one in members)
    assert any(one.plan.passes(0) > 1 for one in members)
    model = UNEVEN.new_model()
    batch = next(UNEVEN.batches(Plan.even(1, 32, 32, 0), 0))
    UNEVEN.loss_fn(model, batch).backward()
    expected = [parameter.grad for parameter in model.parameters()]
    with cluster.opened() as open_cluster, Workers(open_cluster, "torch") as workers_:
        for one in members:
            for found in workers_.call(gradients, UNEVEN, one):
                torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6, msg=one.name)


def test_uneven_peers_share_samples_by_measured_speed():
    cluster = Cluster(name="unequal", cores=(0, 1, 1))
    member = next(configurations.uneven_peers(cluster, UNEVEN, (0,), (4.4, 1.0, 1.0)))
    assert member.plan.micro_batches == ((22,), (5,), (5,))
    assert member.policy == "uneven"


def test_equal_ranks_have_no_uneven_peers():
    cluster = Cluster(name="equal", cores=(1, 1, 1))
    assert list(configurations.uneven_peers(cluster, UNEVEN, (0, 3), (1.0, 1.1, 1.0))) == []
