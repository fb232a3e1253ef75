"""Savers look at storages: none drops a value, and a state dict keeps its values.

`torch.save` writes the whole storage of a tensor, and safetensors takes tensors of one storage for
tied weights, of which it writes one.
"""

from __future__ import annotations

import gc
import io
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import models
import pytest
import ranks as harness
import torch
import training
from models import ModelSpec
from ranks import Pool
from reference import Recipe
from safetensors.torch import load_file, load_model, save_file, save_model
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from training import STAGES, Run, assert_same, uneven

SPEC = ModelSpec(two_groups=True, tied=True, frozen=True)
RECIPE = Recipe(batches=(12,) * 3, spec=SPEC)
BF16 = replace(RECIPE, spec=ModelSpec(dtype=torch.bfloat16))


def with_torch(model: nn.Module, folder: Path) -> dict[str, Tensor]:
    torch.save(model.state_dict(), folder / "all.pt")
    loaded: dict[str, Tensor] = torch.load(folder / "all.pt")
    return loaded


def with_safetensors(model: nn.Module, folder: Path) -> dict[str, Tensor]:
    save_model(model, str(folder / "model.safetensors"))
    plain = models.build(SPEC).to(next(model.parameters()).dtype)
    load_model(plain, folder / "model.safetensors")
    return plain.state_dict()


def with_safetensors_of_a_state_dict(model: nn.Module, folder: Path) -> dict[str, Tensor]:
    values = dict(model.named_parameters())  # tied ones once
    save_file({name: value.detach() for name, value in values.items()}, folder / "a.safetensors")
    return load_file(folder / "a.safetensors")


def with_huggingface_hub(model: nn.Module, folder: Path) -> dict[str, Tensor]:
    from huggingface_hub import save_torch_model  # only where it is used: it takes seconds

    save_torch_model(model, folder)
    plain = models.build(SPEC).to(next(model.parameters()).dtype)
    load_model(plain, folder / "model.safetensors")
    return plain.state_dict()


SAVERS: tuple[Callable[[nn.Module, Path], dict[str, Tensor]], ...] = (
    with_torch,
    with_safetensors,
    with_safetensors_of_a_state_dict,
    with_huggingface_hub,
)


def bytes_in_torch_file(value: Any) -> int:
    file = io.BytesIO()
    torch.save(value, file)
    return file.tell()


def save_in_every_way(run: Run, folder: str) -> None:
    model, optimizer = training.prepare(run)
    training.take_step(run, model, optimizer, 0)
    expected = training.whole_parameters(model, optimizer)
    sharded = run.plan.stage == 3
    if not sharded:
        first = next(model.parameters())
        first.data = first.data.clone()  # the next step takes it over
        training.take_step(run, model, optimizer, 1)
        expected = training.whole_parameters(model, optimizer)
    with optimizer.full_parameters() if sharded else nullcontext():
        number = 1 if run.recipe.spec != SPEC else len(SAVERS) - (harness.rank() > 0)
        for saver in SAVERS[:number]:
            own = Path(folder) / f"{harness.rank()}-{saver.__name__}"
            own.mkdir()
            found = saver(model, own)
            assert_same({name: found[name] for name in expected}, expected)
        for parameter in model.parameters():
            for tensor in (parameter, parameter.detach()):
                assert tensor.untyped_storage().nbytes() == tensor.nbytes
                assert bytes_in_torch_file(tensor) < tensor.nbytes + 2000
    for values in optimizer.state.values() if run.plan.stage == 0 else ():
        for value in values.values():
            assert value.untyped_storage().nbytes() == value.nbytes


@pytest.mark.parametrize("recipe", [RECIPE, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("stage", STAGES)
def test_every_saver_writes_every_value(
    ranks: Pool, stage: int, recipe: Recipe, tmp_path: Path
) -> None:
    ranks.run(save_in_every_way, Run(recipe, uneven(stage)), str(tmp_path))


def keep_what_full_parameters_gives(run: Run) -> None:
    model, optimizer = training.prepare(run)
    training.take_step(run, model, optimizer, 0)
    expected = training.whole_parameters(model, optimizer)
    names = list(expected)
    with torch.inference_mode(), optimizer.full_parameters():
        kept = [p.data[:1].clone() for p in model.parameters()]
    with optimizer.full_parameters():
        state, plain = model.state_dict(), [p.detach() for p in model.parameters()]
        views = [p.data.view(-1)[1:] for p in model.parameters()]
        options = StateDictOptions(full_state_dict=True)
        whole = get_model_state_dict(model, options=options)
    sharded = run.plan.stage == 3
    assert not sharded or optimizer.memory()["unsharded"] == 0
    # Elsewhere they are the model's own values, as in torch.
    for step in range(1, len(run.recipe.batches)) if sharded else ():
        training.take_step(run, model, optimizer, step)
        training.whole_parameters(model, optimizer)
    optimizer.release()
    del optimizer, model
    gc.collect()
    assert_same({name: state[name] for name in names}, expected)
    assert_same({name: whole[name] for name in names}, expected)
    assert_same(dict(zip(names, plain, strict=True)), expected)
    for view, first, value in zip(views, kept, expected.values(), strict=True):
        torch.testing.assert_close(view.cpu(), value.view(-1)[1:], rtol=0, atol=0)
        torch.testing.assert_close(first.cpu(), value[:1], rtol=0, atol=0)
    fresh = models.build(run.recipe.spec)
    fresh.load_state_dict(state)
    assert bytes_in_torch_file(state) > sum(value.nbytes for value in expected.values())


@pytest.mark.parametrize("stage", STAGES)
def test_values_that_outlive_full_parameters_stay(ranks: Pool, stage: int) -> None:
    ranks.run(keep_what_full_parameters_gives, Run(RECIPE, uneven(stage)))


def write_through_the_state_dict(run: Run) -> None:
    """As torch's own state dicts: they are the model's memory."""
    model, optimizer = training.prepare(run)
    with optimizer.full_parameters(writeback=True):
        for value in model.state_dict().values():
            value.mul_(0.5)
    halved = training.whole_parameters(model, optimizer)
    fresh = models.build(run.recipe.spec)
    expected = {name: p.detach() / 2 for name, p in fresh.named_parameters()}
    assert_same(halved, expected)
    training.take_step(run, model, optimizer, 0)
    after = training.whole_parameters(model, optimizer)
    assert any(not torch.equal(after[name], halved[name]) for name in halved)


@pytest.mark.parametrize("stage", STAGES)
def test_writes_into_a_state_dict_reach_the_model(ranks: Pool, stage: int) -> None:
    recipe = replace(RECIPE, spec=ModelSpec(two_groups=True))
    ranks.run(write_through_the_state_dict, Run(recipe, uneven(stage)))
