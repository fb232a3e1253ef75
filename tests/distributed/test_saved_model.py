"""Saved models equal the unsharded one, at all stages, and a failed save leaves no file behind."""

from __future__ import annotations

import copy
import json
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import ranks as harness
import torch
import torch.distributed as dist
import training
from ranks import Pool
from safetensors.torch import load_file, save_file
from test_checkpoint_safety import files_limited_to
from test_materialization import RANKS, LanguageModel, optimizer_of, values_of
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from training import STAGES

import poplar
from poplar.checkpoint.state_dicts.shard_tensor import ShardTensor

DTYPES = (torch.float32, torch.bfloat16)


def save_both(stage: int, dtype: torch.dtype, folder: str) -> dict[str, Tensor]:
    torch.manual_seed(harness.rank())
    model = LanguageModel()
    model.register_buffer("flags", torch.tensor([True, False]))
    model.empty = nn.Parameter(torch.empty(0, 3))
    optimizer = optimizer_of(model.to(harness.device()), stage, compute_dtype=dtype)
    for _ in range(2):  # a file that exists is replaced
        optimizer.save_model(Path(folder) / "one.safetensors")
        optimizer.save_model(Path(folder) / "sharded", sharded=True)
    dist.barrier(harness.group())
    return values_of(model, optimizer)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_saved_files_hold_the_unsharded_values(
    ranks: Pool, stage: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    expected = ranks.run(save_both, stage, dtype, str(tmp_path), ranks=RANKS)[0]
    del expected["head.weight"]  # tied
    index = json.loads((tmp_path / "sharded" / "model.safetensors.index.json").read_text())
    files = {name: load_file(tmp_path / "sharded" / name) for name in index["weight_map"].values()}
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in expected.values())
    assert {name for part in files.values() for name in part} == set(index["weight_map"])
    assert len(files) == RANKS - 1 if stage else len(files) <= RANKS
    sharded = {name: files[file][name] for name, file in index["weight_map"].items()}
    for saved in (load_file(tmp_path / "one.safetensors"), sharded):
        assert saved.keys() == expected.keys()
        for name, value in saved.items():
            assert value.dtype == expected[name].dtype
            torch.testing.assert_close(value, expected[name], rtol=0, atol=0)
    assert not list(tmp_path.rglob("*.incomplete"))


def save_changed(stage: int, folder: str) -> None:
    model = LanguageModel().to(harness.device())
    optimizer = optimizer_of(model, stage)
    with optimizer.full_parameters(modules=[model.norm]), torch.no_grad():
        model.norm.bias.fill_(3)  # lost at stage 3 when the context ends
        optimizer.save_model(f"{folder}/written")
        model.norm.bias.data = torch.full_like(model.norm.bias, 4)  # as an average is swapped in
        optimizer.save_model(f"{folder}/replaced")


@pytest.mark.parametrize("stage", [1, 3])
def test_values_that_the_user_sees_are_saved(ranks: Pool, stage: int, tmp_path: Path) -> None:
    ranks.run(save_changed, stage, str(tmp_path), ranks=RANKS)
    assert load_file(tmp_path / "written")["norm.bias"].eq(3).all()
    assert load_file(tmp_path / "replaced")["norm.bias"].eq(4).all()


def wrapped(model: nn.Module, how: str) -> nn.Module:
    """The model as users wrap it, which adds parts to the names of its parameters."""
    if how == "compiled":
        return torch.compile(model, backend="eager")
    model.blocks[0] = torch.compile(model.blocks[0], backend="eager")
    model.blocks[1] = checkpoint_wrapper(model.blocks[1])
    return model


def save_and_build_wrapped(stage: int, path: str) -> list[dict[str, Tensor]]:
    values = []
    for how, weights in (("compiled", None), ("blocks", path), ("compiled", path)):
        with poplar.parameters_on_meta() if weights else nullcontext():
            plain = LanguageModel()
        optimizer = optimizer_of(wrapped(plain, how), stage, weights=weights)
        values.append(list(values_of(plain, optimizer).values()))
        optimizer.save_model(path)
        if weights is None and harness.rank() == 0:  # as others save the compiled model
            save_file({f"_orig_mod.{n}": value for n, value in load_file(path).items()}, path)
        dist.barrier(harness.group())
    return values


@pytest.mark.parametrize("stage", [1, 3])
def test_names_in_files_are_those_of_the_model_that_is_not_wrapped(
    ranks: Pool, stage: int, tmp_path: Path
) -> None:
    path = tmp_path / "model.safetensors"
    first, *built = ranks.run(save_and_build_wrapped, stage, str(path), ranks=RANKS)[0]
    for values in built:
        torch.testing.assert_close(values, first, rtol=0, atol=0)
    found = LanguageModel().load_state_dict(load_file(path), strict=False)
    assert (found.missing_keys, found.unexpected_keys) == (["head.weight"], [])  # it is tied


def fail_to_save(stage: int, folder: str, sharded: bool) -> tuple[str, list[str]]:
    optimizer = optimizer_of(LanguageModel().to(harness.device()), stage)
    path = Path(folder) / ("folder" if sharded else "file")
    optimizer.save_model(path, sharded=sharded)
    dist.barrier(harness.group())
    before = {file.name: file.read_bytes() for file in Path(folder).rglob("*") if file.is_file()}
    dist.barrier(harness.group())
    limited = files_limited_to(10) if harness.rank() == 0 else nullcontext()
    with harness.catching() as caught, limited:
        optimizer.save_model(path, sharded=sharded)
    dist.barrier(harness.group())
    after = {file.name: file.read_bytes() for file in Path(folder).rglob("*") if file.is_file()}
    assert after == before, "what was saved before stays, and nothing else"
    optimizer.save_model(path, sharded=sharded)
    return caught[0].type, caught[0].message


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("stage", [1, 3])
def test_failed_save_raises_on_all_ranks_and_changes_no_file(
    ranks: Pool, stage: int, sharded: bool, tmp_path: Path
) -> None:
    seen = ranks.run(fail_to_save, stage, str(tmp_path), sharded, ranks=RANKS)
    assert seen[0][0] == "OSError"
    name = r"folder/model-00001-of-\d+.safetensors'" if sharded else "file'"
    assert all(re.search(f"File too large: '.*/{name}", message) for _, message in seen)
    assert {kind for kind, _ in seen[1:]} == {"RankFailed"}


def save_in_own_folders(folder: str) -> tuple[harness.Failure, bool]:
    """As on hosts of which each has a disk of its own."""
    optimizer = optimizer_of(LanguageModel().to(harness.device()), 1)
    own = Path(folder) / str(harness.rank())
    with harness.catching() as caught:
        optimizer.save_model(own, sharded=True)
    return caught[0], any(file.is_file() for file in own.rglob("*"))


def test_folder_that_ranks_do_not_share_is_refused(ranks: Pool, tmp_path: Path) -> None:
    answers = ranks.run(save_in_own_folders, str(tmp_path), ranks=RANKS)
    assert answers[0][0].type == "FileNotFoundError"
    for failure, has_files in answers:
        assert "save to a folder that all ranks share" in failure.message
        assert not has_files


def unsharded_part(stage: int) -> None:
    torch.manual_seed(0)
    plain = LanguageModel()
    model = copy.deepcopy(plain).to(harness.device())
    optimizer = optimizer_of(model, stage, units=["blocks.0", "blocks.1"])
    block = model.blocks[1]
    expected = plain.blocks[1].state_dict()
    for modules in ([block], ["blocks.1.norm1"]):
        with optimizer.full_parameters(modules=modules):
            assert_equal(block.state_dict(), expected)
            assert training.is_absent(model.blocks[0].up.weight) == (stage == 3)
            x = torch.randn(2, 3, 26, device=harness.device())
            torch.testing.assert_close(block(x), plain.blocks[1].to(harness.device())(x))
            plain.cpu()
            if stage == 3:
                state = model.state_dict()
                assert isinstance(state["blocks.0.up.weight"], ShardTensor)
                assert type(state["blocks.1.up.weight"]) is Tensor
                with pytest.raises(RuntimeError, match="forward needs unit 'root', which is sh"):
                    model(torch.zeros(1, 2, dtype=torch.long, device=harness.device()))
                with pytest.raises(RuntimeError, match="inside full_parameters"):
                    optimizer.evaluate(lambda m, b: m(b).mean(), [])
            with optimizer.full_parameters():  # nested: unshards the rest
                assert_equal(model.state_dict(), plain.state_dict())
            assert_equal(block.state_dict(), expected)
    with optimizer.full_parameters(writeback=True, modules=["blocks.1"]), torch.no_grad():
        for parameter in block.parameters():
            parameter.fill_(0.5)
    after = values_of(model, optimizer)
    for name, value in plain.state_dict().items():
        wanted = torch.full_like(value, 0.5) if name.startswith("blocks.1.") else value
        torch.testing.assert_close(after[name], wanted, rtol=0, atol=0)
    with pytest.raises(ValueError, match=r"'blocks\.7' is not in the model"):
        optimizer.full_parameters(modules=["blocks.7"]).__enter__()
    if stage < 3:
        return
    with pytest.raises(ValueError, match="passed different modules"):
        optimizer.full_parameters(modules=[f"blocks.{harness.rank() % 2}"]).__enter__()


def assert_equal(state: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert state.keys() == expected.keys()
    for name, value in state.items():
        torch.testing.assert_close(value.cpu(), expected[name].cpu(), rtol=0, atol=0)


@pytest.mark.parametrize("stage", [1, 3])
def test_parts_of_a_model_can_be_unsharded(ranks: Pool, stage: int) -> None:
    ranks.run(unsharded_part, stage, ranks=RANKS)


def average_while_training(stage: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = LanguageModel().to(harness.device())
    optimizer = optimizer_of(model, stage, compute_dtype=dtype)
    expected = values_of(model, optimizer)
    with optimizer.full_parameters():
        average = copy.deepcopy(model)
    assert_equal(average.state_dict(), expected)  # without a guard
    own = {id(p) for p in model.parameters()}
    assert not own & {id(p) for p in average.parameters()}
    assert average.head.weight is average.embedding.weight
    assert all(p.untyped_storage().nbytes() == p.nbytes for p in average.parameters())
    reached: list[Any] = [vars(module) for module in average.modules()]
    assert not any(refers_to(value, optimizer._training.engine) for value in reached)
    tokens = torch.zeros(2, 3, dtype=torch.long, device=harness.device())
    if harness.rank() == 0:  # a plain model: no other rank takes part
        average(tokens).mean().backward()
        average.load_state_dict(expected)
    optimizer.release()


def refers_to(value: Any, target: object, depth: int = 6) -> bool:
    """Whether `target` can be reached from `value` through containers, closures and attributes."""
    if value is target:
        return True
    if depth == 0 or isinstance(value, (str, int, float, type, Tensor)) or value is None:
        return False
    inside: list[Any] = []
    if isinstance(value, dict):
        inside = list(value.values())
    elif isinstance(value, (list, tuple, set)):
        inside = list(value)
    elif hasattr(value, "__closure__"):
        inside = [cell.cell_contents for cell in value.__closure__ or ()]
    elif hasattr(value, "__self__"):
        inside = [value.__self__]
    elif hasattr(value, "__dict__") and not isinstance(value, nn.Module):
        inside = [vars(value)]
    return any(refers_to(part, target, depth - 1) for part in inside)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_deep_copy_inside_full_parameters_is_a_plain_model(
    ranks: Pool, stage: int, dtype: torch.dtype
) -> None:
    ranks.run(average_while_training, stage, dtype, ranks=RANKS)
