"""What is neither a parameter nor optimizer state comes back as it was saved, or is refused."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ranks as harness
import torch
import training
from models import ModelSpec
from ranks import Pool
from reference import Recipe
from safetensors.torch import load_file
from test_checkpoint_safety import TWO
from test_checkpoints import build, train
from test_materialization import LanguageModel
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from training import assert_raised, assert_same

import poplar
from poplar import Plan
from poplar.checkpoint.conversion import convert
from poplar.elastic import MemoryCheckpoints

SAVERS = ("disk", "memory")
EXTRA_STATES = ({5: 1.5, "a": {}}, [torch.ones(2), torch.zeros(1)], {}, {"a": (1, [2])}, [{}])


def save(saver: str, folder: str, optimizer: Any, **options: Any) -> None:
    if saver == "disk":
        poplar.save_checkpoint(f"{folder}/saved", optimizer, **options)
    else:
        MemoryCheckpoints(optimizer, folder=f"{folder}/memory", **options).save(1)


def load(saver: str, folder: str, optimizer: Any, **options: Any) -> None:
    if saver == "disk":
        poplar.load_checkpoint(f"{folder}/saved", optimizer, **options)
    else:
        memory = MemoryCheckpoints(optimizer, folder=f"{folder}/memory", **options)
        assert memory.load_latest() == 1


def save_differing(saver: str, folder: str) -> list[harness.Failure]:
    _, optimizer = build(TWO)
    state = {"curriculum": {"loss": np.array([float(harness.rank())])}, "epoch": 1}
    with harness.catching() as caught:
        save(saver, folder, optimizer, state=state)
    save(saver, folder, optimizer, state={"loss": np.array([0.5]), "names": {"a", "b", "c"}})
    return list(caught)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("saver", SAVERS)
def test_state_that_differs_between_ranks_is_refused(
    ranks: Pool, saver: str, tmp_path: Path
) -> None:
    by_rank = ranks.run(save_differing, saver, str(tmp_path), ranks=2)
    assert_raised([failures[0] for failures in by_rank], "['curriculum'] of rank 1")


class Holder(nn.Module):
    extra: Any = None

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


class Holders(LanguageModel):
    """With modules that have extra states."""

    def __init__(self) -> None:
        super().__init__()
        wrapped = checkpoint_wrapper(Holder())
        self.holders = nn.ModuleList([wrapped, *(Holder() for _ in EXTRA_STATES)])

    def each(self) -> list[Holder]:
        """Without wrappers."""
        return [module for module in self.holders.modules() if isinstance(module, Holder)]


def keep_extra_states(saver: str, folder: str) -> None:
    values = (*EXTRA_STATES, {"rank": harness.rank()})
    model, optimizer = build(TWO, model_class=Holders)
    for holder, value in zip(model.each(), values, strict=True):
        holder.extra = value
    save(saver, folder, optimizer)
    model, optimizer = build(TWO, model_class=Holders)
    load(saver, folder, optimizer)
    for holder, value in zip(model.each(), values, strict=True):
        assert repr(holder.extra) == repr(value)


@pytest.mark.parametrize("saver", SAVERS)
def test_extra_states_come_back_as_they_were(ranks: Pool, saver: str, tmp_path: Path) -> None:
    ranks.run(keep_extra_states, saver, str(tmp_path), ranks=2)
    if saver == "disk":
        convert(tmp_path / "saved", tmp_path / "converted.pt", "torch")
        found = torch.load(tmp_path / "converted.pt")["model"]
        for number, value in enumerate(EXTRA_STATES):
            assert repr(found[f"holders.{number}._extra_state"]) == repr(value)
        assert not any("_extra_state." in name for name in found)


def keep_group_values(saver: str, folder: str) -> None:
    options = {"ramp": {3: 0.5, "b": {}}, "bounds": [torch.zeros(1), torch.ones(1)], "none": {}}
    _, optimizer = build(TWO)
    optimizer.param_groups[1].update(options)
    save(saver, folder, optimizer)
    _, optimizer = build(TWO)
    load(saver, folder, optimizer)
    found = optimizer.param_groups[1]
    assert repr({key: found[key] for key in options}) == repr(options)
    assert "ramp" not in optimizer.param_groups[0]


@pytest.mark.parametrize("saver", SAVERS)
def test_values_of_param_groups_come_back_as_they_were(
    ranks: Pool, saver: str, tmp_path: Path
) -> None:
    ranks.run(keep_group_values, saver, str(tmp_path), ranks=2)


class Caching(LanguageModel):
    """With buffers that the forward makes, which are no part of its state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.empty(0), persistent=False)
        self.register_buffer("lazy", None, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        self.mask = torch.ones(4 + harness.rank(), device=tokens.device)
        self.lazy = torch.ones(harness.rank() + 1, device=tokens.device)
        return super().forward(tokens)


def resume_caching(saver: str, folder: str) -> None:
    model, optimizer = build(TWO, model_class=Caching)
    train(optimizer, 0, 1)
    model.steps.fill_(harness.rank() + 5)
    save(saver, folder, optimizer)
    model, optimizer = build(TWO, model_class=Caching)
    load(saver, folder, optimizer)
    assert set(model.steps.tolist()) == {harness.rank() + 5}
    train(optimizer, 1, 1)


@pytest.mark.parametrize("saver", SAVERS)
def test_buffers_that_the_forward_makes_are_not_saved(
    ranks: Pool, saver: str, tmp_path: Path
) -> None:
    ranks.run(resume_caching, saver, str(tmp_path), ranks=2)


class Refusing:
    """Cannot load anything, even its own state."""

    def state_dict(self) -> dict[str, int]:
        return {"a": 1}

    def load_state_dict(self, state: Any) -> None:
        raise KeyError("missing key")


def roll_back(saver: str, folder: str) -> list[harness.Failure]:
    _, optimizer = build(TWO)
    ema, refusing = nn.Linear(2, 2), Refusing()
    state = {"ema": ema, "refusing": refusing, "second": nn.Linear(1, 1)}
    torch.nn.init.ones_(ema.weight)
    torch.nn.init.zeros_(state["second"].weight)
    torch.nn.init.zeros_(ema.bias)
    torch.nn.init.zeros_(state["second"].bias)
    save(saver, folder, optimizer, state=state)
    torch.nn.init.zeros_(ema.weight)
    with harness.catching() as caught:
        load(saver, folder, optimizer, state=state)
    assert not ema.weight.any()
    return list(caught)


@pytest.mark.parametrize("saver", SAVERS)
def test_objects_keep_their_state_if_one_raises(ranks: Pool, saver: str, tmp_path: Path) -> None:
    by_rank = ranks.run(roll_back, saver, str(tmp_path), ranks=2)
    assert_raised([failures[0] for failures in by_rank], "missing key")


def schedule_with_numpy(saver: str, folder: str) -> list[str]:
    def scheduled(optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: np.cos(step / 9))

    _, optimizer = build(TWO)
    scheduler = scheduled(optimizer)
    train(optimizer, 0, 1)
    scheduler.step()
    expected = scheduler.get_last_lr()
    assert isinstance(expected[0], np.float64)
    save(saver, folder, optimizer, state={"scheduler": scheduler})
    _, optimizer = build(TWO)
    scheduler = scheduled(optimizer)
    load(saver, folder, optimizer, state={"scheduler": scheduler})
    assert scheduler.get_last_lr() == expected
    assert type(optimizer.param_groups[0]["lr"]) is float

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        manager = poplar.CheckpointManager(
            f"{folder}/manager", optimizer, state={"path": Path("a")}
        )
        manager.save(1)
        manager.save(2)
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize("saver", SAVERS)
def test_numbers_of_numpy_can_be_loaded_and_the_first_save_warns_of_what_cannot(
    ranks: Pool, saver: str, tmp_path: Path
) -> None:
    of_first, of_second = ranks.run(schedule_with_numpy, saver, str(tmp_path), ranks=2)
    assert len(of_first) == 1
    assert "Path in 'path', which load_checkpoint refuses" in of_first[0]
    assert of_second == []


def with_statistics(stage: int, samples: tuple[int, ...]) -> training.Run:
    recipe = Recipe(spec=ModelSpec(kind="batch_norm"), batches=(12,))
    plan = Plan.manual(samples, stage=stage)
    return training.Run(recipe, plan, engine={"allow_forward_state": True})


def buffers_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.cpu() for name, buffer in model.named_buffers()}


def save_statistics(saver: str, folder: str, stage: int) -> dict[str, Tensor]:
    run = with_statistics(stage, (0, 7, 5))
    model, optimizer = training.prepare(run)
    training.take_step(run, model, optimizer, 0)
    save(saver, folder, optimizer)
    optimizer.save_model(f"{folder}/one.safetensors")
    optimizer.save_model(f"{folder}/parts", sharded=True)
    return buffers_of(model)


def load_statistics(
    saver: str, folder: str, stage: int, samples: tuple[int, ...]
) -> dict[str, Tensor]:
    model, optimizer = training.prepare(with_statistics(stage, samples))
    load(saver, folder, optimizer)
    return buffers_of(model)


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("saver", SAVERS)
def test_buffers_of_the_first_rank_with_samples_are_saved_for_all(
    ranks: Pool, saver: str, stage: int, tmp_path: Path
) -> None:
    folder = str(tmp_path)
    idle, expected, other = by_rank = ranks.run(save_statistics, saver, folder, stage, ranks=3)
    for name in expected:
        assert not idle[name].equal(expected[name])
        assert name == "norm.num_batches_tracked" or not other[name].equal(expected[name])
    again = ranks.run(load_statistics, saver, folder, stage, (4, 4, 4), ranks=3)
    for found, own in zip(again, by_rank, strict=True):
        assert_same(found, own)
    for found in ranks.run(load_statistics, saver, folder, stage, (6, 6), ranks=2):
        assert_same(found, expected)
    parts = (load_file(path) for path in (tmp_path / "parts").glob("*.safetensors"))
    whole = {name: value for part in parts for name, value in part.items()}
    for saved in (load_file(tmp_path / "one.safetensors"), whole):
        assert_same({name: saved[name] for name in expected}, expected)
