"""`poplar.integrations.fsdp2`: stock FSDP2 with unequal passes trains as one process does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ranks as harness
import torch.distributed.checkpoint as dcp
import unequal_passes as training
from ranks import Pool
from subset import choose
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import default_collate
from unequal_passes import Job, assert_equal_losses

from poplar import Plan
from poplar.data import CollateMicroBatches
from poplar.integrations import fsdp2
from poplar.values.communication import Communication

SHARES = (1 / 3,) * 3
PLANS = {
    1: ((3, 3, 2), (2,), (1, 1)),
    2: ((3, 3), (2, 1), (0, 3)),
    3: ((3, 3), (2, 1), (0, 3)),
}
WITHOUT_SAMPLES = {
    1: ((1, 1, 1), (), (4,)),
    2: ((1, 2), (0, 0), (2, 2)),
    3: ((1, 2), (0, 0), (2, 2)),
}
"""Rank 0 has micro-batches without a label, rank 1 has no samples."""

STEPS = choose(quick=6, full=20)
"""Of the models of transformers."""


def plan_of(micro_batches: tuple[tuple[int, ...], ...], stage: int) -> Plan:
    samples = sum(map(sum, micro_batches))
    return Plan(stage=stage, global_batch=samples, micro_batches=micro_batches, shares=SHARES)


@pytest.mark.every_combination
@pytest.mark.parametrize(("stage", "model"), [(1, "llama"), (2, "bert"), (3, "gpt2")])
def test_losses_are_those_of_one_process(ranks: Pool, stage: int, model: str) -> None:
    jobs = [Job("tagger", plan_of(WITHOUT_SAMPLES[stage], stage), max_norm=0.1)]
    job = Job("tagger", plan_of(PLANS[stage], stage))
    jobs += [replace(job, model=model, steps=STEPS), replace(job, optimizer="SGD")]
    by_rank = ranks.run(training.train_many, jobs, ranks=3)
    for number, job in enumerate(jobs):
        assert_equal_losses([losses[number] for losses in by_rank], job)


def test_what_scripts_use_with_fsdp2_still_works(ranks: Pool) -> None:
    plain = Job("tagger", plan_of(WITHOUT_SAMPLES[3], 3))
    jobs = [replace(plain, variant=variant) for variant in ("checkpointing", "scaler")]
    jobs.append(replace(plain, optimizer="Muon"))
    jobs.append(Job("tagger", plan_of(WITHOUT_SAMPLES[1], 1), variant="checkpointing"))
    by_rank = ranks.run(training.train_many, jobs, ranks=3)
    for number, job in enumerate(jobs):
        assert_equal_losses([losses[number] for losses in by_rank], job)


def sizes_of_collated_batches(job: Job) -> list[int]:
    """Of one step whose micro-batches are collated one by one; in it, rank 2 has an empty one."""
    model = training.wrap(job)
    passes = fsdp2.UnequalPasses(model, job.plan)
    part = training.part_of(job, 0)
    samples = [dict(zip(part, row, strict=True)) for row in zip(*part.values(), strict=True)]
    sizes: list[int] = []

    def collate(chosen: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        sizes.append(len(chosen))
        return default_collate(chosen)

    batch = CollateMicroBatches(collate, job.plan, harness.rank())(samples)
    for micro_batch in passes(batch, weight=job.weight):
        passes.backward(training.loss_fn(model, micro_batch))
    return sizes


def test_micro_batches_are_collated_once_beside_one_sample_for_an_empty_pass(ranks: Pool) -> None:
    sizes = ranks.run(sizes_of_collated_batches, Job("tagger", plan_of(PLANS[3], 3)), ranks=3)
    assert sizes == [[3, 3], [2, 1], [3, 1]]


def resume_from_a_checkpoint(job: Job, folder: str) -> tuple[list[float], list[float]]:
    """Losses of a training, and of another one from a checkpoint in its middle."""
    losses = []
    for resumes in (False, True):
        model = training.wrap(job)
        optimizer = training.optimizer_of(job, model)
        passes = fsdp2.UnequalPasses(model, job.plan)
        steps = range(job.steps)
        if resumes:
            model_state, optim_state = get_state_dict(model, optimizer)
            state = {"model": model_state, "optim": optim_state}
            dcp.load(state, checkpoint_id=folder, process_group=harness.group())
            set_state_dict(
                model,
                optimizer,
                model_state_dict=state["model"],
                optim_state_dict=state["optim"],
            )
            steps = range(job.steps // 2, job.steps)
        own = []
        for step in steps:
            own.append(training.step_with(job, model, optimizer, passes, step))
            if not resumes and step == job.steps // 2 - 1:
                model_state, optim_state = get_state_dict(model, optimizer)
                state = {"model": model_state, "optim": optim_state}
                dcp.save(state, checkpoint_id=folder, process_group=harness.group())
        losses.append(own)
    return losses[0], losses[1]


def test_dtensor_checkpoints_resume(ranks: Pool, tmp_path: Path) -> None:
    job = Job("tagger", plan_of(PLANS[1], 1), steps=4)
    for whole, resumed in ranks.run(resume_from_a_checkpoint, job, str(tmp_path), ranks=3):
        assert resumed == pytest.approx(whole[2:], abs=1e-6)


def mistakes(job: Job) -> list[str]:
    """The messages of a direct backward, and of wrong models and plans."""
    messages = []
    with harness.separate_group() as group:
        model = training.wrap(job, group=group)
        passes = fsdp2.UnequalPasses(model, job.plan)
        with harness.catching() as caught:
            for micro_batch in passes(training.part_of(job, 0), weight=job.weight):
                training.loss_fn(model, micro_batch).backward()
        messages.append(caught[0].message)
        with harness.catching() as caught:
            list(passes(training.part_of(job, 0), weight=job.weight))
        messages.append(caught[0].message)
    model = training.wrap(job)
    plain = training.build("tagger")
    mesh = DeviceMesh.from_group(harness.group(), "cpu")
    inner = training.build("tagger")
    fully_shard(inner.head, mesh=mesh)
    uneven = replace(job.plan, shares=(0.5, 0.25, 0.25))
    cases: list[tuple[Any, Plan]] = [
        (plain, job.plan),
        (inner, job.plan),
        (model, Plan.manual("3,3,3", stage=0)),
        (model, Plan.manual("3,3", stage=3)),
        (model, uneven),
        (model, replace(uneven, communication=Communication("int8", "int8"))),
    ]
    for wrong, plan in cases:
        with harness.catching() as caught:
            fsdp2.UnequalPasses(wrong, plan)
        messages.append(caught[0].message)
    return messages


def raise_in_the_second_pass(job: Job) -> tuple[str, str]:
    """Class and message of what a loop raises in whose second pass the first rank raises."""
    with harness.separate_group() as group:
        model = training.wrap(job, group=group)
        passes = fsdp2.UnequalPasses(model, job.plan)
        with harness.catching() as caught:
            batch = training.part_of(job, 0)
            for number, micro_batch in enumerate(passes(batch, weight=job.weight)):
                loss = training.loss_fn(model, micro_batch)
                if harness.rank() == 0 and number == 1:
                    raise KeyError("lost on rank 0")
                passes.backward(loss)
        return caught[0].type, caught[0].message


@pytest.mark.filterwarnings("ignore:rank .* left the loop")
@pytest.mark.every_combination
@pytest.mark.parametrize("stage", [1, 3])
def test_a_rank_that_raises_in_the_loop_stops_all_ranks(ranks: Pool, stage: int) -> None:
    job = Job("tagger", plan_of(PLANS[stage], stage))
    (own, _), *others = ranks.run(raise_in_the_second_pass, job, ranks=3)
    assert own == "KeyError"
    for kind, message in others:
        assert kind == "CollectiveTimeout"
        assert "rank 0 left the loop over its passes before its end" in message


def drop_gradients_in_the_loop(job: Job) -> str:
    """The message of a loop body that zeroes the gradients before each backward."""
    with harness.separate_group() as group:
        model = training.wrap(job, group=group)
        optimizer = training.optimizer_of(job, model)
        passes = fsdp2.UnequalPasses(model, job.plan)
        with harness.catching() as caught:
            for micro_batch in passes(training.part_of(job, 0), weight=job.weight):
                optimizer.zero_grad()
                passes.backward(training.loss_fn(model, micro_batch))
        return caught[0].message


@pytest.mark.filterwarnings("ignore:rank .* left the loop")
@pytest.mark.parametrize("stage", [2, 3])
def test_zero_grad_in_the_loop_raises(ranks: Pool, stage: int) -> None:
    job = Job("tagger", plan_of(PLANS[stage], stage))
    for message in ranks.run(drop_gradients_in_the_loop, job, ranks=3):
        assert "call step() and zero_grad() after the loop" in message


def sum_gradients_from_the_second_step_on(job: Job) -> list[str]:
    """The messages of the second step and of a new `UnequalPasses`."""
    model = training.wrap(job)
    optimizer = training.optimizer_of(job, model)
    passes = fsdp2.UnequalPasses(model, job.plan)
    training.step_with(job, model, optimizer, passes, 0)
    model.blocks[1].set_gradient_divide_factor(3)  # the number of ranks
    training.step_with(job, model, optimizer, passes, 1)
    model.blocks[1].set_gradient_divide_factor(1.0)
    messages = []
    with harness.catching() as caught:
        training.step_with(job, model, optimizer, passes, 2)
    messages.append(caught[0].message)
    with harness.catching() as caught:
        fsdp2.UnequalPasses(model, job.plan)
    return [*messages, caught[0].message]


def test_gradients_that_are_not_averaged_over_ranks_are_refused(ranks: Pool) -> None:
    """As torchtitan sets them, whose losses are divided by the tokens of the global batch."""
    job = Job("tagger", plan_of(PLANS[3], 3))
    for messages in ranks.run(sum_gradients_from_the_second_step_on, job, ranks=3):
        for message in messages:
            assert "call set_gradient_divide_factor(3) instead" in message


@pytest.mark.filterwarnings("ignore:rank .* left the loop")
def test_mistakes_raise_with_the_fix(ranks: Pool) -> None:
    expected = [
        "call it instead of loss.backward()",
        "start again on all ranks, from a checkpoint",
        "and it is not sharded by FSDP2",
        "only modules of it are sharded by FSDP2",
        "the plan is of stage 0, but FSDP2 is of stage 1",
        "the plan is for 2 ranks, but FSDP2 has 3",
        "the plan sets uneven shares, which only poplar.HeteroZeroOptimizer carries out, not FSDP2",
        "the plan sets uneven shares and communication, which only",
    ]
    for messages in ranks.run(mistakes, Job("tagger", plan_of(PLANS[1], 1)), ranks=3):
        for message, part in zip(messages, expected, strict=True):
            assert part in message
