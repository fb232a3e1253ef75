"""Compressed gradients and parameters: every value is rounded once, without bias, alike for any
shares.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ranks as harness
import torch
import training
from models import ModelSpec
from ranks import Pool
from reference import Recipe
from torch import Tensor
from training import STAGES, Run

from poplar import HeteroZeroOptimizer, Plan, RankFailed, load_checkpoint, save_checkpoint
from poplar.elastic import MemoryCheckpoints
from poplar.values.communication import Communication
from poplar.values.errors import ReplicasDiffer

NOTHING = (torch.zeros(1), torch.zeros(1))
MICRO_BATCHES = ((3, 1), (1, 0), (0, 1))
SHARES = (0.6, 0.4, 0.0)
OTHER_SHARES = (0.1, 0.2, 0.7)
RELATIVE_ERROR = {"int8": 0.02, "int4": 0.3}
"""Above the error of a sum of these ranks, relative to its norm."""
SPEC = ModelSpec(kind="mlp", blocks=2, width=24, hidden=40)


def run_of(stage: int, sent: Any, shares: Sequence[float] = SHARES, **engine: Any) -> Run:
    plan = Plan(
        stage=stage,
        global_batch=6,
        micro_batches=MICRO_BATCHES,
        shares=tuple(shares),
        communication=Communication.of(sent, stage),
    )
    return Run(Recipe(spec=SPEC, batches=(6,) * 3), plan, engine=engine)


def gradients(run: Run, count: int = 1) -> list[Tensor]:
    """Full mean gradients of the same batch in `count` steps that do not change parameters."""
    model, optimizer = training.prepare(run)
    for group in optimizer.param_groups:
        group.update(lr=0.0, weight_decay=0.0)
    found = []
    for _ in range(count):
        for micro_batch in optimizer.micro_batches(training.batch_of(run, 0)):
            training.loss_of(run.recipe)(model, micro_batch).backward()
        parts = [gradient.flatten().clone() for gradient in optimizer.full_gradients().values()]
        found.append(torch.cat(parts))
        optimizer.step()
    return found


@pytest.mark.parametrize("transport", ["shared_memory", "process_group"])
@pytest.mark.parametrize("precision", RELATIVE_ERROR)
@pytest.mark.parametrize("stage", STAGES)
def test_gradients_are_near_the_exact_ones_and_without_bias(
    ranks: Pool, stage: int, precision: str, transport: str
) -> None:
    exact = ranks.run(gradients, run_of(stage, "exact"), ranks=3)[0][0]
    run = run_of(stage, Communication(gradients=precision), communicator=transport)
    by_rank = ranks.run(gradients, run, 16, ranks=3)
    for found in by_rank:
        assert all(map(torch.equal, found, by_rank[0]))
    errors = [float((one - exact).norm() / exact.norm()) for one in by_rank[0]]
    assert max(errors) < RELATIVE_ERROR[precision]
    assert min(errors) > 0.001
    mean = torch.stack(by_rank[0]).mean(0)
    assert float((mean - exact).norm() / exact.norm()) < 0.5 * max(errors)  # a quarter, if unbiased


@pytest.mark.parametrize("stage", STAGES)
def test_shares_and_transport_do_not_change_bits(ranks: Pool, stage: int) -> None:
    runs = [
        run_of(stage, "int4", shares, communicator=transport)
        for shares in (SHARES, OTHER_SHARES)
        for transport in ("shared_memory", "process_group")
    ]
    first, *others = (ranks.run(training.train, run, ranks=3)[0] for run in runs)
    for other in others:
        assert other.losses == first.losses
        assert all(torch.equal(other.parameters[n], p) for n, p in first.parameters.items())


@pytest.mark.parametrize("stage", STAGES)
def test_warmup_steps_are_exact(ranks: Pool, stage: int) -> None:
    run = run_of(stage, "int4")
    for warmup, is_equal in ((2, True), (1, False)):
        communication = replace(run.plan.communication, warmup_steps=warmup)
        warm = replace(run, plan=replace(run.plan, communication=communication))
        recipe = replace(run.recipe, batches=(6, 6))
        found, exact = (
            ranks.run(training.train, replace(each, recipe=recipe), ranks=3)[0]
            for each in (warm, run_of(stage, "exact"))
        )
        equal = [torch.equal(found.parameters[n], p) for n, p in exact.parameters.items()]
        assert all(equal) is is_equal


def differences(run: Run, settling: int) -> list[tuple[Tensor, Tensor]]:
    """The owned masters and all ranks' values, after each of some steps without a gradient."""
    model, optimizer = training.prepare(run)
    for step in range(3):
        training.take_step(run, model, optimizer, step)
    for group in optimizer.param_groups:
        group.update(lr=0.0, weight_decay=0.0)
    found = []
    for _ in range(settling):
        training.take_step(run, model, optimizer, 0)
        parts = [
            (flat.master[part].clone(), flat.shard[part].clone())
            for flat in optimizer._training.engine.trained
            for position in range(len(flat.parameters))
            if (part := flat.owned_part(position)) is not None
        ]
        found.append(tuple(map(torch.cat, zip(*parts, strict=True))) if parts else NOTHING)
    return found


@pytest.mark.parametrize("precision", RELATIVE_ERROR)
@pytest.mark.parametrize("stage", [1, 2])
def test_the_next_update_corrects_the_error_of_the_last_one(
    ranks: Pool, stage: int, precision: str
) -> None:
    for found in ranks.run(differences, run_of(stage, precision), 6, ranks=3):
        errors = [float((master - sent).norm()) for master, sent in found]
        assert errors[0] == 0.0 or errors[-1] < 0.01 * errors[0]


def steps_under_changing_plans(run: Run, plans: Sequence[Plan], steps: int = 3) -> Tensor:
    """The values to compute with after `steps` steps of each plan.

    They are compared after every step, before anything sends the exact values.
    """
    model, optimizer = training.prepare(run)
    for plan in plans:
        optimizer.apply_plan(plan)
        for step in range(steps):
            training.take_step(run, model, optimizer, step)
            optimizer.verify_replicas()
    return torch.cat([parameter.detach().flatten().clone() for parameter in model.parameters()])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("precisions", [("exact", "int8"), ("int8", "exact", "int4"), ("int8",)])
@pytest.mark.parametrize("stage", [1, 2])
def test_all_ranks_compute_with_the_same_parameters_after_a_change_of_plan(
    ranks: Pool, stage: int, precisions: Sequence[str], dtype: torch.dtype
) -> None:
    run = run_of(stage, "exact", compute_dtype=dtype)
    sent = [
        replace(run.plan, communication=Communication.of(each, stage), shares=shares)
        for each in precisions
        for shares in (SHARES, OTHER_SHARES)
    ]
    found, exact = (
        ranks.run(steps_under_changing_plans, run, plans, ranks=3)
        for plans in (sent, [run.plan] * len(sent))
    )
    assert all(torch.equal(values, found[0]) for values in found)
    assert 0 < (found[0] - exact[0]).abs().max() < 0.02


def write_between_steps(run: Run) -> list[float]:
    """What became of parameters that the user has set to 3, after a step that changes nothing."""
    model, optimizer = training.prepare(run)
    training.take_step(run, model, optimizer, 0)
    for group in optimizer.param_groups:
        group.update(lr=0.0, weight_decay=0.0)
    with optimizer.full_parameters(writeback=True):
        for parameter in model.parameters():
            parameter.data.fill_(3.0)
    training.take_step(run, model, optimizer, 1)
    values = training.whole_parameters(model, optimizer).values()
    return [float((value - 3.0).abs().max()) for value in values]


@pytest.mark.parametrize("stage", STAGES)
def test_values_that_the_user_has_written_are_kept(ranks: Pool, stage: int) -> None:
    for error in ranks.run(write_between_steps, run_of(stage, "int4"), ranks=3):
        assert max(error) < 1e-4  # what was not sent yet of other values in the same groups


def change_shares(run: Run, shares: Sequence[Sequence[float]]) -> dict[str, Tensor]:
    """The parameters after steps, each with other shares."""
    model, optimizer = training.prepare(run)
    for step, each in enumerate(shares):
        optimizer.apply_plan(replace(run.plan, shares=tuple(each)))
        training.take_step(run, model, optimizer, step)
    return training.whole_parameters(model, optimizer)


@pytest.mark.parametrize("stage", STAGES)
def test_a_change_of_shares_does_not_change_bits(ranks: Pool, stage: int) -> None:
    run = run_of(stage, "int4")
    first, second = (
        ranks.run(change_shares, run, shares, ranks=3)[0]
        for shares in ((SHARES,) * 3, (OTHER_SHARES, SHARES, OTHER_SHARES))
    )
    assert all(torch.equal(first[name], second[name]) for name in first)


def save_in_the_middle(run: Run, folder: str) -> dict[str, Tensor]:
    """The parameters after three steps, of which two were taken after a checkpoint."""
    model, optimizer = training.prepare(run)
    training.take_step(run, model, optimizer, 0)
    save_checkpoint(folder, optimizer)
    for step in (1, 2):
        training.take_step(run, model, optimizer, step)
    return training.whole_parameters(model, optimizer)


def resume(run: Run, folder: str) -> dict[str, Tensor]:
    model, optimizer = training.prepare(run)
    load_checkpoint(folder, optimizer)
    for step in (1, 2):
        training.take_step(run, model, optimizer, step)
    return training.whole_parameters(model, optimizer)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stage", STAGES)
def test_training_resumes_with_the_same_bits_under_other_shares(
    ranks: Pool, stage: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    def run(sent: str, shares: Sequence[float]) -> Run:
        return run_of(stage, sent, shares, compute_dtype=dtype)

    folder = str(tmp_path / "saved")
    saved = ranks.run(save_in_the_middle, run("int4", SHARES), folder, ranks=3)[0]
    for shares in (SHARES, OTHER_SHARES):
        resumed = ranks.run(resume, run("int4", shares), folder, ranks=3)[0]
        assert all(torch.equal(saved[name], resumed[name]) for name in saved)
    exact = ranks.run(resume, run("exact", SHARES), folder, ranks=3)[0]
    assert not all(torch.equal(saved[name], exact[name]) for name in saved)


def go_on_from_memory(run: Run, folder: Path, after: Plan) -> list[dict[str, Tensor]]:
    """The parameters after three steps: without an end, and from memory under another plan."""
    found = []
    for ends in (False, True):
        model, optimizer = training.prepare(run)
        training.take_step(run, model, optimizer, 0)
        memory = MemoryCheckpoints(optimizer, folder=folder)
        memory.save(1)
        if ends:
            optimizer.release()
            model, optimizer = training.prepare(replace(run, plan=after))
            assert MemoryCheckpoints(optimizer, folder=folder).load_latest() == 1
        for step in (1, 2):
            training.take_step(run, model, optimizer, step)
            optimizer.verify_replicas()
        found.append(training.whole_parameters(model, optimizer))
        optimizer.release()
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stage", STAGES)
def test_training_goes_on_from_memory_with_the_same_bits(
    ranks: Pool, stage: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    run = run_of(stage, "int4", compute_dtype=dtype)
    after = replace(run.plan, shares=OTHER_SHARES)
    for whole, resumed in ranks.run(go_on_from_memory, run, tmp_path, after, ranks=3):
        assert all(torch.equal(resumed[name], value) for name, value in whole.items())


def skip_a_step(run: Run) -> list[dict[str, Tensor]]:
    """The parameters after a step and after the next one, whose gradient is not finite."""
    model, optimizer = training.prepare(run)
    training.take_step(run, model, optimizer, 0)
    found = [training.whole_parameters(model, optimizer)]
    hook = next(model.parameters()).register_hook(lambda gradient: gradient * float("nan"))
    training.take_step(run, model, optimizer, 1)
    optimizer.verify_replicas()
    found.append(training.whole_parameters(model, optimizer))
    hook.remove()
    training.take_step(run, model, optimizer, 2)
    optimizer.verify_replicas()
    return found


@pytest.mark.parametrize("stage", STAGES)
def test_a_skipped_step_changes_no_exact_value(ranks: Pool, stage: int) -> None:
    run = run_of(stage, "int8", on_nonfinite="skip")
    clipping = replace(run, recipe=replace(run.recipe, max_norm=1.0))
    for before, after in ranks.run(skip_a_step, clipping, ranks=3):
        assert all(torch.equal(after[name], value) for name, value in before.items())


def resume_from_state_dicts(run: Run, whole: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The parameters after three steps: without a break, and with state dicts after the second."""
    model, optimizer = training.prepare(run)
    for step in (0, 1):
        training.take_step(run, model, optimizer, step)
    state = optimizer.state_dict()
    if whole:
        state = [optimizer.full_state_dict(rank) for rank in range(3)][harness.rank()]
    shards = run.plan.stage == 3
    values = training.whole_parameters(model, optimizer) if shards else model.state_dict()
    saved = io.BytesIO()
    torch.save([values, state], saved)
    found = []
    for resumes in (False, True):
        if resumes:
            model, optimizer = training.prepare(run)
            saved.seek(0)
            of_model, of_optimizer = torch.load(saved, weights_only=False)
            model.load_state_dict(of_model)
            optimizer.load_state_dict(of_optimizer)
        training.take_step(run, model, optimizer, 2)
        found.append(training.whole_parameters(model, optimizer))
    return found[0], found[1]


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("stage", STAGES)
def test_training_resumes_with_the_same_bits_from_state_dicts(
    ranks: Pool, stage: int, whole: bool
) -> None:
    run = run_of(stage, "int4")
    warm = replace(run.plan, communication=replace(run.plan.communication, warmup_steps=2))
    for each in (run, replace(run, plan=warm)):
        for first, resumed in ranks.run(resume_from_state_dicts, each, whole, ranks=3):
            assert all(torch.equal(first[name], resumed[name]) for name in first)


def load_other_steps(run: Run) -> str:
    model, optimizer = training.prepare(run)
    training.take_step(run, model, optimizer, 0)
    state = optimizer.state_dict()
    state["poplar"]["steps"] += harness.rank() == 1
    with pytest.raises(ValueError, match="steps") as raised:
        optimizer.load_state_dict(state)
    return str(raised.value)


def test_state_dicts_of_different_steps_are_refused(ranks: Pool) -> None:
    for message in ranks.run(load_other_steps, run_of(1, "int8"), ranks=3):
        assert "{0: 1, 1: 2, 2: 1}" in message


def change_precision_of_parameters(run: Run, before: str, after: str) -> list[float]:
    """How far parameters and masters are from what was written, after changes of plan."""
    model, optimizer = training.prepare(run)
    for group in optimizer.param_groups:
        group.update(lr=0.0, weight_decay=0.0)
    optimizer.apply_plan(replace(run.plan, communication=Communication(parameters=before)))
    training.take_step(run, model, optimizer, 0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.3)  # in place, and no multiple of a bf16
    written = float(torch.tensor(0.3, dtype=run.engine["compute_dtype"]))
    found = []
    for precision in (after, before):
        optimizer.apply_plan(replace(run.plan, communication=Communication(parameters=precision)))
        training.take_step(run, model, optimizer, 1)
        masters = [
            flat.master[part]
            for flat in optimizer._training.engine.trained
            for position in range(len(flat.parameters))
            if (part := flat.owned_part(position)) is not None
        ]
        values = [*masters, *(parameter.float() for parameter in model.parameters())]
        found += [float((value - written).abs().max()) for value in values]
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("before", "after"), [("exact", "int4"), ("int4", "exact")])
@pytest.mark.parametrize("stage", [1, 2])
def test_a_change_of_precision_keeps_written_values(
    ranks: Pool, stage: int, before: str, after: str, dtype: torch.dtype
) -> None:
    run = run_of(stage, "exact", compute_dtype=dtype)
    for changes in ranks.run(change_precision_of_parameters, run, before, after, ranks=3):
        assert max(changes) < (1e-4 if dtype is torch.float32 else 1e-3)  # half a bf16


def saved_and_masters(run: Run, folder: str) -> list[float]:
    """How far what is saved and shown of parameters is from the fp32 values of the owners."""
    model, optimizer = training.prepare(run)
    for step in range(3):
        training.take_step(run, model, optimizer, step)
    masters = [flat.master.clone() for flat in optimizer._training.engine.trained]
    optimizer.save_model(folder, sharded=True)
    shown = [flat.shard.clone() for flat in optimizer._training.engine.trained]
    pairs = zip(masters, shown, strict=True)
    return [float((one - other).abs().max()) for one, other in pairs if len(one)]


@pytest.mark.parametrize("stage", [1, 2])
def test_a_saved_model_has_the_exact_values(ranks: Pool, stage: int, tmp_path: Path) -> None:
    run = run_of(stage, "int4")
    for found in ranks.run(saved_and_masters, run, str(tmp_path / "model"), ranks=3):
        assert not any(found)


def load_state_dicts_elsewhere(run: Run, other: Run) -> tuple[Any, Any]:
    """The fp32 values that `run` has saved, and those of `other` once it has loaded them."""
    found = []
    saved: list[Any] = []
    for each in (run, other):
        model, optimizer = training.prepare(each)
        if each is run:
            for step in range(3):
                training.take_step(run, model, optimizer, step)
            whole = [optimizer.full_state_dict(rank) for rank in range(3)][harness.rank()]
            saved = [{n: v.clone() for n, v in model.state_dict().items()}, whole]
        else:
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
        values = training.whole_parameters(model, optimizer)
        state = [optimizer.full_state_dict(rank) for rank in range(3)][harness.rank()]
        assert state is not None
        names = [name for group in state["param_groups"] for name in group["param_names"]]
        masters = {
            names[at]: own["master"] for at, own in state["state"].items() if "master" in own
        }
        found.append((values, {**values, **masters}))
    return found[0], found[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("other", STAGES)
def test_exact_training_continues_from_the_exact_values(
    ranks: Pool, other: int, dtype: torch.dtype
) -> None:
    run, exact = (
        run_of(stage, sent, compute_dtype=dtype) for stage, sent in ((1, "int4"), (other, "exact"))
    )
    for saved, loaded in ranks.run(load_state_dicts_elsewhere, run, exact, ranks=3):
        torch.testing.assert_close(loaded, saved, rtol=0, atol=0)


@pytest.mark.parametrize("stage", STAGES)
def test_one_rank_sends_nothing_and_stays_exact(ranks: Pool, stage: int) -> None:
    recipe = Recipe(spec=SPEC, batches=(6,) * 3)
    plan = Plan.manual("6", stage=stage)
    exact, compressed = (
        ranks.run(training.train, Run(recipe, plan, engine={"communication": each}), ranks=1)[0]
        for each in ("exact", "int4")
    )
    assert compressed.losses == exact.losses


def write_on_one_rank(run: Run) -> str:
    model, optimizer = training.prepare(run)
    training.take_step(run, model, optimizer, 0)
    if harness.rank() == 2:  # which owns nothing
        next(model.parameters()).data[0] += 1.0
    with pytest.raises(ReplicasDiffer) as raised:
        optimizer.verify_replicas()
    return str(raised.value)


@pytest.mark.parametrize("stage", [1, 2])
def test_values_that_differ_between_ranks_are_noticed(ranks: Pool, stage: int) -> None:
    for message in ranks.run(write_on_one_rank, run_of(stage, "int4"), ranks=3):
        assert "rank(s) (2,)" in message or "rank(s) [2]" in message


def train_with_nan(run: Run, rank: int) -> str:
    """The error of a step in which one rank has a NaN in its gradient."""
    model, optimizer = training.prepare(run)

    def spoil(gradient: Tensor) -> Tensor:
        return gradient.index_fill(0, torch.zeros(1, dtype=torch.long), float("nan"))

    if harness.rank() == rank:
        next(model.parameters()).register_hook(spoil)
    for micro_batch in optimizer.micro_batches(training.batch_of(run, 0)):
        training.loss_of(run.recipe)(model, micro_batch).backward()
    with pytest.raises(RuntimeError, match="finite") as raised:
        step_with_clipping(optimizer)
    return str(raised.value)


def step_with_clipping(optimizer: HeteroZeroOptimizer) -> None:
    optimizer.clip_grad_norm_(1.0)
    optimizer.step()


@pytest.mark.parametrize("precision", RELATIVE_ERROR)
@pytest.mark.parametrize("stage", STAGES)
def test_a_nan_on_one_rank_is_noticed(ranks: Pool, stage: int, precision: str) -> None:
    for message in ranks.run(train_with_nan, run_of(stage, precision), 0, ranks=3):
        assert "finite" in message


def build_with(precision: Any, own: Any) -> str:
    run = run_of(1, "exact")
    given = precision if harness.rank() == 0 else own
    with pytest.raises((ValueError, RankFailed)) as raised:
        training.prepare(replace(run, engine={"communication": given}))
    return str(raised.value)


def test_unknown_and_unequal_precisions_are_errors(ranks: Pool) -> None:
    for message in ranks.run(build_with, "int7", "int8", ranks=3):
        assert "int7" in message
    for message in ranks.run(build_with, "int4", "int8", ranks=3):
        assert "communication" in message
