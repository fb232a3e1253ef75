"""Ranks that a plan leaves out cost the others nothing, and their loops stay in step."""

from __future__ import annotations

import copy
import gc
import os
import signal
import sys
import time
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import ranks as harness
import torch
import training
from models import LENGTH, WIDTH, ModelSpec
from ranks import Failure, Pool, one_off
from reference import Recipe
from subset import choose
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from training import STAGES, Run, assert_exact, assert_raised, train_many

import poplar
from poplar import CollectiveTimeout, HeteroZeroOptimizer, Plan
from poplar.comm import announcements
from poplar.elastic import MemoryCheckpoints
from poplar.monitoring import JsonLines, Monitor, Progress
from poplar.training import unsharded_model
from poplar.zero.streams import StepTiming

RECIPE = Recipe(max_norm=0.1, batches=(12, 12))
TIMEOUT = timedelta(minutes=1)
SHORT_TIMEOUT = timedelta(seconds=2)


def plan_of(stage: int, left_out: int = 1) -> Plan:
    active = Plan(
        stage=stage,
        global_batch=12,
        micro_batches=((2, 3), (1, 1), (0, 5)),
        shares=(0.6, 0.3, 0.1),
    )
    return active.beside((left_out,))


@pytest.mark.parametrize("left_out", [1, 0])
@pytest.mark.parametrize("stage", STAGES)
def test_training_equals_one_process(ranks: Pool, stage: int, left_out: int) -> None:
    """Losses, norms and full parameters are equal on all ranks, also on the one left out."""
    runs = [
        Run(RECIPE, plan_of(stage, left_out)),
        Run(RECIPE, plan_of(stage, left_out), open_form=True),
    ]
    for made in zip(*ranks.run(train_many, runs), strict=True):
        assert_exact(made, RECIPE)


def result_of(stage: int) -> tuple[bool, int, float, Any]:
    run = Run(RECIPE, plan_of(stage))
    _, optimizer = training.prepare(run)
    result = optimizer.train_step(training.loss_of(RECIPE), training.batch_of(run, 0))
    states = len(optimizer.state_dict()["state"]) if optimizer.is_active else 0
    return result.left_out, result.samples, result.loss, states


def test_the_result_says_which_rank_is_left_out(ranks: Pool) -> None:
    left_out, samples, losses, states = zip(*ranks.run(result_of, 2), strict=True)
    assert left_out == (False, True, False, False)
    assert set(samples) == {12}
    assert len(set(losses)) == 1
    assert [bool(entries) for entries in states] == [True, False, True, True]


def saved(read: Callable[[], Any]) -> str:
    """Why a state dict cannot be read here; empty if it can."""
    with harness.catching() as caught:
        read()
    return caught[0].message if caught else ""


def save_everywhere(stage: int) -> dict[str, list[str]]:
    """What state dicts of the model, of a block and of the optimizer raise, by situation."""
    run = Run(RECIPE, plan_of(stage, left_out=0))
    model, optimizer = training.prepare(run)
    training.take_step(run, model, optimizer, 0)
    block = model.blocks[0]
    reads = [model.state_dict, block.state_dict, optimizer.state_dict]
    found = {"left out": list(map(saved, reads))}
    with optimizer.full_parameters():
        found["inside"] = list(map(saved, reads[:2]))
        copied = copy.deepcopy(model)
    found["copy"] = [saved(copied.state_dict)]
    with optimizer.full_parameters(modules=[block]):
        found["of others"], found["of block"] = [saved(model.state_dict)], [saved(block.state_dict)]
    found["after"] = list(map(saved, reads))
    optimizer.apply_plan(plan_of(stage, left_out=1))
    found["back"] = list(map(saved, reads))
    optimizer.apply_plan(plan_of(stage, left_out=0))
    found["left out again"] = list(map(saved, reads))
    optimizer.release()
    found["released"] = list(map(saved, reads[:2]))
    model, optimizer = training.prepare(run)
    del optimizer
    gc.collect()
    found["without optimizer"] = [saved(model.state_dict)]
    return found


@pytest.mark.parametrize("stage", STAGES)
def test_old_weights_are_not_saved_by_mistake(ranks: Pool, stage: int) -> None:
    by_rank = ranks.run(save_everywhere, stage)
    for rank, found in enumerate(by_rank):
        refused = {0: ["left out", "after", "left out again"], 1: ["back"]}.get(rank, [])
        for situation, messages in found.items():
            if situation in refused:
                assert all(f"rank {rank} is left out" in text for text in messages), situation
                assert all("save_checkpoint()" in text for text in messages)
            elif (rank, stage, situation) == (0, 3, "of others"):  # elsewhere all are in one unit
                assert "rank 0 is left out" in messages[0]
            else:
                assert not any(messages), (rank, situation, messages)


EVERYONE = Plan.even(4, 12, 3, stage=0)


def release_and_build_again(
    stage: int, later: bool, on_meta: bool, dtype: torch.dtype
) -> dict[str, dict[str, torch.Tensor]]:
    """Train without rank 0, release, and let all ranks train all of the model.

    `later`: rank 0 has trained before. `dtype`: in which an fp32 model computes.
    """
    given: dict[str, Any] = {"lr": 0.1, "process_group": harness.group(), "compute_dtype": dtype}
    torch.manual_seed(harness.rank())
    with poplar.parameters_on_meta() if on_meta else nullcontext():
        model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
    model.register_buffer("counted", torch.zeros(3))
    if not on_meta:
        model.to(harness.device())
    model[0].requires_grad_(False)
    samples = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))

    def take_step(optimizer: HeteroZeroOptimizer) -> float:
        counts, rank = optimizer.plan.cut(12), harness.rank()
        own = samples.split(counts)[rank].to(harness.device()) if counts[rank] else None
        return optimizer.train_step(lambda m, batch: m(batch).square().mean(), own).loss

    without, everyone = plan_of(stage, left_out=0), replace(EVERYONE, stage=stage)
    optimizer = HeteroZeroOptimizer(
        model, torch.optim.SGD, plan=everyone if later else without, **given
    )
    take_step(optimizer)
    if later:
        optimizer.apply_plan(without)
        take_step(optimizer)
    if optimizer.is_active:
        model.counted.fill_(7.0)
    optimizer.release()
    released = {name: t.detach().cpu().clone() for name, t in model.state_dict().items()}
    model.requires_grad_(True)
    again = HeteroZeroOptimizer(
        model, torch.optim.SGD, plan=replace(EVERYONE, stage=3 - stage), **given
    )
    with again.full_parameters(masters=True):
        taken = {name: t.detach().cpu().clone() for name, t in model.state_dict().items()}
    return {"released": released, "taken": taken, "loss": {"": torch.tensor(take_step(again))}}


@pytest.mark.parametrize(
    ("later", "on_meta", "dtype"),
    [(False, False, torch.bfloat16), (True, False, torch.float32), (True, True, torch.bfloat16)],
)
@pytest.mark.parametrize("stage", STAGES)
def test_a_rank_that_was_left_out_gets_the_trained_values_by_release(
    ranks: Pool, stage: int, later: bool, on_meta: bool, dtype: torch.dtype
) -> None:
    by_rank = ranks.run(release_and_build_again, stage, later, on_meta, dtype)
    trained = by_rank[1]["released"]
    assert trained["counted"].tolist() == [7.0] * 3
    assert all(t.dtype is torch.float32 for t in trained.values())
    for found in by_rank:
        training.assert_same(found["released"], trained)
        training.assert_same(found["taken"], trained)
        assert found["loss"] == by_rank[0]["loss"]


class Cached(nn.Module):
    """Its forwards enlarge a buffer to the length of their batch, and add another one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("positions", torch.zeros(2), persistent=False)
        self.register_buffer("counted", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(self.positions) < len(x):
            positions = torch.arange(float(len(x)), device=x.device)
            self.register_buffer("positions", positions, persistent=False)
            self.register_buffer("mask", positions > 0, persistent=False)
        return self.layer(x) * self.positions[: len(x), None]


def share_beside_enlarged_buffers(stage: int) -> list[dict[str, torch.Tensor]]:
    """The state dicts in `full_parameters` and after `release`, and the positions."""
    model, plan = Cached().to(harness.device()), plan_of(stage, left_out=0)
    group = harness.group()
    optimizer = HeteroZeroOptimizer(
        model, torch.optim.SGD, plan=plan, lr=0.1, process_group=group, compute_dtype=torch.float32
    )
    own = torch.ones(plan.cut(12)[harness.rank()], 4, device=harness.device())
    optimizer.train_step(lambda m, x: m(x).square().mean(), own if optimizer.is_active else None)
    if optimizer.is_active:
        model.counted.fill_(7.0)

    def values() -> dict[str, torch.Tensor]:
        return {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}

    with optimizer.full_parameters():
        found = [values()]
    optimizer.release()
    return [*found, values(), {"positions": model.positions.cpu()}]


@pytest.mark.parametrize("stage", [1, 3])
def test_values_are_shared_beside_a_buffer_that_forwards_enlarge(ranks: Pool, stage: int) -> None:
    """As the tables of rotary embeddings, and masks: each rank keeps its own."""
    by_rank = ranks.run(share_beside_enlarged_buffers, stage)
    expected = by_rank[1][1]
    assert expected["counted"].tolist() == [7.0] * 3
    for inside, released, _ in by_rank:
        training.assert_same(inside, expected)
        training.assert_same(released, expected)
    assert [len(own["positions"]) for *_, own in by_rank] == [2, 3, 2, 5]


def release_a_changed_parameter(stage: int) -> list[Failure]:
    """The rank that is left out has changed the shape of a parameter."""
    model, optimizer = training.prepare(Run(RECIPE, plan_of(stage)))
    if not optimizer.is_active:
        parameter = next(model.parameters())
        parameter.data = parameter.data[:1].clone()
    with harness.catching() as caught:
        optimizer.release()
    return caught


def test_a_parameter_of_another_shape_gets_no_values(ranks: Pool) -> None:
    first, left_out, *_ = ranks.run(release_a_changed_parameter, 1)
    assert len(first) == len(left_out) == 1
    for failure in (*first, *left_out):
        assert "differs in shape or dtype on the ranks [0, 1]" in failure.message


def release_without_values(stage: int) -> bool:
    model, optimizer = training.prepare(Run(RECIPE, plan_of(stage)))
    optimizer.release(values=False)
    return all(parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize("stage", [1, 3])
def test_release_without_values_puts_all_ranks_on_meta(ranks: Pool, stage: int) -> None:
    assert all(ranks.run(release_without_values, stage))


def fail_to_release(stage: int) -> tuple[Failure, float]:
    """A rank that is left out has no memory for the values; the loss of the next step."""
    run = Run(RECIPE, plan_of(stage))
    model, optimizer = training.prepare(run)
    fails = mock.patch.object(
        unsharded_model, "_memory_of_left_out", side_effect=MemoryError("no memory here")
    )
    with fails, harness.catching() as caught:
        optimizer.release()
    return caught[0], training.take_step(run, model, optimizer, 0)[0]


@pytest.mark.parametrize("stage", [0, 3])
def test_a_release_that_fails_on_a_rank_that_is_left_out_is_one_on_no_rank(
    ranks: Pool, stage: int
) -> None:
    failures, losses = zip(*ranks.run(fail_to_release, stage), strict=True)
    assert_raised(failures, "no memory here")
    assert len(set(losses)) == 1


def loss_here(model: nn.Module) -> float | str:
    """The loss of two samples on this rank, or why it has none."""
    batch = training.on_device(RECIPE.part(0, 0, 2))
    with harness.catching() as caught, torch.no_grad():
        return float(training.loss_of(RECIPE)(model, batch))
    return caught[0].message


def call_everywhere(stage: int, compiled: str) -> dict[str, float | str]:
    """What forwards of the model and of a block give, by situation."""
    spec = ModelSpec(compiled=compiled)
    run = Run(replace(RECIPE, spec=spec), plan_of(stage, left_out=0))
    model, optimizer = training.prepare(run)
    training.take_step(run, model, optimizer, 0)
    block, found = model.blocks[0], {"left out": loss_here(model)}
    with optimizer.full_parameters():
        found["inside"] = loss_here(model)
        copied = copy.deepcopy(model)
    found["copy"] = loss_here(copied)
    with optimizer.full_parameters(modules=[block]), torch.no_grad():
        inputs = torch.ones(1, LENGTH, WIDTH, device=harness.device())
        found["of block"] = float(block(inputs).sum())
        if not optimizer.is_active:
            found["of others"] = loss_here(model)
    found["after"] = loss_here(model)
    optimizer.apply_plan(plan_of(stage, left_out=1))
    found["back"] = loss_here(model)
    optimizer.apply_plan(plan_of(stage, left_out=0))
    found["left out again"] = loss_here(model)
    optimizer.release()
    found["released"] = loss_here(model)
    model, optimizer = training.prepare(run)
    del optimizer
    gc.collect()
    if harness.rank() == 0:  # at stage 3 the others have nothing but their shards
        found["without optimizer"] = loss_here(model)
    return found


@pytest.mark.parametrize("compiled", choose(quick=[""], full=["", "eager"]))
@pytest.mark.parametrize("stage", STAGES)
def test_old_weights_are_not_used_by_mistake(ranks: Pool, stage: int, compiled: str) -> None:
    by_rank = ranks.run(call_everywhere, stage, compiled)
    for rank, found in enumerate(by_rank):
        refused = {0: ["left out", "after", "left out again"], 1: ["back"]}.get(rank, [])
        if (rank, stage) == (0, 3):  # elsewhere all are in one unit
            refused.append("of others")
        for situation, value in found.items():
            if situation not in refused:
                assert isinstance(value, float), (rank, situation, value)
                continue
            assert f"rank {rank} is left out" in str(value), (situation, value)
            assert "`with optimizer.full_parameters():`" in str(value)
    for situation in ("inside", "copy", "of block"):
        assert len({found[situation] for found in by_rank}) == 1, situation


def call_frozen_parts(stage: int) -> list[float | str]:
    """What a frozen encoder gives, and in `full_parameters(modules=...)` a partly frozen block."""
    device = harness.device()
    torch.manual_seed(0)
    encoder, head = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    encoder.requires_grad_(False)
    head[0].requires_grad_(False)
    model = nn.Sequential(encoder, head).to(device)
    optimizer = HeteroZeroOptimizer(
        model, torch.optim.SGD, plan=plan_of(stage), process_group=harness.group(), lr=0.1
    )
    inputs, found = torch.ones(2, 4, device=device), []
    with harness.catching() as caught, torch.no_grad():
        found.append(float(encoder(inputs).sum()) if stage < 3 else 0.0)
        with optimizer.full_parameters(modules=[head]):
            found.append(float(head(inputs).sum()))
    return [*found, *(failure.message for failure in caught)]


@pytest.mark.parametrize("stage", [1, 3])
def test_frozen_parameters_are_current_on_all_ranks(ranks: Pool, stage: int) -> None:
    by_rank = ranks.run(call_frozen_parts, stage)
    assert all(found == by_rank[0] and len(found) == 2 for found in by_rank), by_rank


def train_a_critic(stage: int) -> tuple[Failure, float, float]:
    """All ranks train a critic; rank 1 is left out by the plan of the generator in its loss.

    Returns the failure of a step, and the loss of the next one beside that of the whole batch.
    """
    device = harness.device()
    generator, critic = nn.Linear(4, 4).to(device), nn.Linear(4, 1).to(device)
    plans = plan_of(stage, left_out=1), Plan.even(4, 12, 3, stage=0)
    given = {"lr": 0.1, "process_group": harness.group(), "compute_dtype": torch.float32}
    first, second = (
        HeteroZeroOptimizer(model, torch.optim.SGD, plan=plan, **given)
        for model, plan in zip((generator, critic), plans, strict=True)
    )
    noise = torch.randn(12, 4).to(device)
    own, others = (noise.split(plan.cut(12))[harness.rank()] for plan in plans)

    def loss_of_critic(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            made = generator(batch)
        return model(made).square().mean()

    first.train_step(lambda model, batch: model(batch).square().mean(), own if len(own) else None)
    with harness.catching() as caught:
        second.train_step(loss_of_critic, others)
    with first.full_parameters():
        expected = float(loss_of_critic(critic, noise))
        found = float(second.train_step(loss_of_critic, others).loss)
    return caught[0], expected, found


@pytest.mark.parametrize("stage", [1, 3])
def test_a_loss_uses_no_old_weights_of_another_model(ranks: Pool, stage: int) -> None:
    failures, expected, found = zip(*ranks.run(train_a_critic, stage), strict=True)
    assert_raised(failures, "rank 1 is left out by the plan")
    assert "around the whole step" in failures[1].message
    assert len(set(expected)) == len(set(found)) == 1
    assert found[0] == pytest.approx(expected[0], rel=1e-5)


def use_every_call(stage: int, folder: Path) -> dict[str, Any]:
    run = Run(RECIPE, plan_of(stage))
    model, optimizer = training.prepare(run)
    training.take_step(run, model, optimizer, 0)
    loss = training.loss_of(RECIPE)
    batch = training.on_device(RECIPE.part(0, 0, 4))
    loader = [batch] if optimizer.is_active else []
    found = {"loss": optimizer.evaluate(loss, loader), "plan": optimizer.plan}
    schedule = RECIPE.scheduler(optimizer)
    state: dict[str, Any] = {"step": 1, "schedule": schedule}
    poplar.save_checkpoint(folder / "checkpoint", optimizer, state=state)
    found["saved plan"] = Plan.from_json(folder / "checkpoint" / "plan.json")
    manager = poplar.CheckpointManager(folder / "all", optimizer, state=state)
    manager.save(1)
    memory = MemoryCheckpoints(optimizer, state={"schedule": schedule}, folder=folder / "memory")
    memory.save(1)
    optimizer.save_model(folder / "model.safetensors")
    optimizer.consolidate_state_dict(to=2)
    found["state"] = len(optimizer.full_state_dict(to=3) or ())
    training.take_step(run, model, optimizer, 1)
    after = training.whole_parameters(model, optimizer)
    schedule.last_epoch = 5
    given = {"schedule": schedule}
    found["step"] = poplar.load_checkpoint(folder / "checkpoint", optimizer, state=given)["step"]
    found["loaded"] = manager.load_latest(), manager.values["step"], schedule.last_epoch
    training.take_step(run, model, optimizer, 1)
    schedule.last_epoch = 5
    found["from memory"] = memory.load_latest(), schedule.last_epoch
    training.take_step(run, model, optimizer, 1)
    again = training.whole_parameters(model, optimizer)
    optimizer.apply_plan(plan_of(stage).of_active_ranks().beside((1,)))
    optimizer.apply_plan(plan_of(stage, left_out=0))
    found["other plan"] = optimizer.plan, optimizer.is_active
    optimizer.apply_plan(plan_of(stage))
    monitor = Monitor(optimizer, [JsonLines(folder / "run.jsonl")])
    monitor(optimizer.train_step(loss, training.batch_of(run, 0)))
    monitor.close()
    found["equal"] = all(torch.equal(after[name], again[name]) for name in after)
    with harness.catching() as caught:
        optimizer.full_state_dict(to=1)
    found["no state"] = caught[0]
    optimizer.release()
    return found


@pytest.mark.parametrize("stage", STAGES)
def test_all_ranks_make_the_same_calls(ranks: Pool, stage: int, tmp_path: Path) -> None:
    by_rank = ranks.run(use_every_call, stage, tmp_path)
    assert len({found["loss"] for found in by_rank}) == 1
    assert all(found["plan"] == plan_of(stage) and found["equal"] for found in by_rank)
    assert all(found["saved plan"] == plan_of(stage) for found in by_rank)
    assert all(found["step"] == 1 and found["loaded"] == (1, 1, 0) for found in by_rank)
    assert all(found["from memory"] == (1, 0) for found in by_rank)
    assert [found["state"] > 0 for found in by_rank] == [False, False, False, True]
    other = [(plan_of(stage, left_out=0), rank > 0) for rank in range(4)]
    assert [found["other plan"] for found in by_rank] == other
    assert_raised([found["no state"] for found in by_rank], "rank 1 is left out")


def read_gradients(stage: int) -> tuple[int, float]:
    """The number of gradients, and the norm that a later call has."""
    run = Run(RECIPE, plan_of(stage))
    model, optimizer = training.prepare(run)
    for micro_batch in optimizer.micro_batches(training.batch_of(run, 0)):
        training.loss_of(RECIPE)(model, micro_batch).backward()
    return len(optimizer.full_gradients()), float(optimizer.clip_grad_norm_(1.0))


def test_a_rank_that_is_left_out_gets_no_gradients(ranks: Pool) -> None:
    numbers, norms = zip(*ranks.run(read_gradients, 1), strict=True)
    assert [number > 0 for number in numbers] == [True, False, True, True]
    assert len(set(norms)) == 1


def follow_one_cycle(optimizer: str, cyclic: bool) -> list[tuple[Any, ...]]:
    """Learning rate and momentum after each step, by schedulers that read the defaults."""
    options = {"SGD": (("lr", 0.1), ("momentum", 0.9)), "AdamW": (("lr", 1e-3),)}[optimizer]
    run = Run(replace(RECIPE, optimizer=optimizer, options=options), plan_of(1))
    model, made = training.prepare(run)
    schedulers = torch.optim.lr_scheduler
    if cyclic:
        schedule: Any = schedulers.CyclicLR(made, base_lr=0.1, max_lr=0.5, step_size_up=2)
    else:
        schedule = schedulers.OneCycleLR(made, max_lr=0.5, total_steps=4)
    found = []
    for step in range(2):
        training.take_step(run, model, made, step)
        schedule.step()
        group = made.param_groups[0]
        found.append((group["lr"], group.get("momentum"), group.get("betas"), made.defaults["lr"]))
    return found


@pytest.mark.parametrize(("optimizer", "cyclic"), [("SGD", False), ("AdamW", False), ("SGD", True)])
def test_schedulers_that_read_the_defaults_are_equal_on_all_ranks(
    ranks: Pool, optimizer: str, cyclic: bool
) -> None:
    by_rank = ranks.run(follow_one_cycle, optimizer, cyclic)
    assert all(found == by_rank[0] for found in by_rank)
    assert by_rank[0][0][0] != by_rank[0][1][0]


def save_by_torch() -> tuple[str, float, float]:
    """The error of torch's own functions, the learning rate then, and the loss of a later step."""
    run = Run(RECIPE, plan_of(1))
    model, optimizer = training.prepare(run)
    why = saved(lambda: get_optimizer_state_dict(model, optimizer))
    loss, _ = training.take_step(run, model, optimizer, 0)
    return why, optimizer.param_groups[0]["lr"], loss


def test_torch_saves_no_state_of_a_rank_that_is_left_out(ranks: Pool) -> None:
    messages, rates, losses = zip(*ranks.run(save_by_torch), strict=True)
    assert "rank 1 is left out" in messages[1]
    assert not messages[0] + messages[2] + messages[3]
    assert len(set(rates)) == len(set(losses)) == 1
    assert rates[0] > 0


class Kept:
    """A logger that keeps what it gets."""

    def __init__(self) -> None:
        self.reports: list[Progress] = []

    def start(self, plan: Plan | None, profile: Any) -> None:
        pass

    def log(self, progress: Progress) -> None:
        self.reports.append(progress)

    def close(self) -> None:
        pass


def report_while_the_plan_changes() -> list[Progress]:
    """Rank 0 trains in the first two of four steps. The plan changes before a result is passed."""
    run, kept = Run(RECIPE, plan_of(1, 3)), Kept()
    _, optimizer = training.prepare(run)
    monitor = Monitor(optimizer, [kept], every=10)
    loss, times = training.loss_of(RECIPE), StepTiming.times

    def measured(timing: StepTiming) -> Any:
        return times(timing)._replace(waiting_seconds=1.0 + harness.rank())

    with mock.patch.object(StepTiming, "times", measured):
        for step in range(4):
            batch = training.batch_of(replace(run, plan=optimizer.plan), 0)
            result = optimizer.train_step(loss, batch)
            if step == 1:
                optimizer.apply_plan(plan_of(1, 0))
            monitor(result)
    monitor.close()
    return kept.reports


def test_reports_go_on_when_their_rank_is_left_out(ranks: Pool) -> None:
    first, *others = ranks.run(report_while_the_plan_changes)
    assert not any(others)
    assert [(report.step, report.plan, len(report.losses)) for report in first] == [
        (2, plan_of(1, 3), 2),
        (4, plan_of(1, 0), 2),
    ]
    # The least of the waits in a step is communication.
    before, after = ([round(waited) for waited in report.waiting_seconds] for report in first)
    assert (before, after) == ([0, 1, 2, 0], [0, 0, 1, 2])


def lose(lost: int) -> Failure | None:
    """A rank is killed; the others take another step."""
    run = Run(RECIPE, plan_of(2), engine={"timeout": TIMEOUT})
    model, optimizer = training.prepare(run)
    training.take_step(run, model, optimizer, 0)
    if harness.rank() == lost:
        os.kill(os.getpid(), signal.SIGKILL)
    with harness.catching() as caught:
        training.take_step(run, model, optimizer, 1)
    return (caught or [None])[0]


def test_the_loss_of_an_active_rank_is_raised_on_all_others() -> None:
    for rank, failure in enumerate(one_off(4, lose, 2, lost=[2])):
        if rank != 2:
            assert failure.is_a(CollectiveTimeout), failure
            assert "rank(s) 2" in failure.message or "rank 2" in failure.message, failure


def call_differently() -> str:
    _, optimizer = training.prepare(Run(RECIPE, plan_of(0)))
    with harness.catching() as caught:
        if optimizer.is_active:
            optimizer.verify_replicas()
        else:
            optimizer.release()
    return caught[0].message if caught else ""


def test_another_call_on_a_rank_that_is_left_out_is_an_error_there(ranks: Pool) -> None:
    first, left_out, *others = ranks.run(call_differently)
    assert {first, *others} == {""}
    assert "calls release(), but the active ranks call verify_replicas()" in left_out


def evaluate_for_long() -> float:
    """Evaluate for longer than the deadline of the ranks."""
    _, optimizer = training.prepare(Run(RECIPE, plan_of(1), engine={"timeout": SHORT_TIMEOUT}))
    loss = training.loss_of(RECIPE)

    def slow(model, batch):
        time.sleep(0.2)
        return loss(model, batch)

    batch = training.on_device(RECIPE.part(0, 0, 1))
    return optimizer.evaluate(slow, [batch] * 15 if optimizer.is_active else [])


def test_a_call_may_last_longer_than_the_deadline(ranks: Pool) -> None:
    assert len(set(ranks.run(evaluate_for_long))) == 1


def announcing_threads() -> int:
    """Threads of this process that write announcements."""
    count = 0
    for frame in sys._current_frames().values():
        while frame.f_back is not None:
            frame = frame.f_back
        count += frame.f_code.co_filename == announcements.__file__
    return count


def leave_out_in_turns(changes: int) -> dict[str, bool]:
    """Whether threads end with the announcements that they are for, and the ranks with both."""
    before = announcing_threads()

    def are_at_most(more: int) -> bool:
        deadline = time.monotonic() + 5
        while announcing_threads() > before + more and time.monotonic() < deadline:
            time.sleep(0.02)
        return announcing_threads() <= before + more

    model, optimizer = training.prepare(Run(RECIPE, plan_of(1, left_out=1)))
    for change in range(changes):
        optimizer.apply_plan(plan_of(1, left_out=2 - change % 2))
    found = {"changed": are_at_most(int(harness.rank() == 0))}
    optimizer.release()
    found["released"] = are_at_most(0)
    whole = weakref.ref(optimizer._training.ranks.whole)
    del model, optimizer
    gc.collect()
    found["deleted"] = whole() is None
    return found


def test_changes_and_release_leave_no_threads(ranks: Pool) -> None:
    for found in ranks.run(leave_out_in_turns, 4):
        assert all(found.values()), found
