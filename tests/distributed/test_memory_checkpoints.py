"""Training goes on from what ranks have saved in memory: with the same bits, and on other ranks."""

from __future__ import annotations

import errno
import logging
import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import ranks as harness
import torch
import torch.distributed as dist
from ranks import Failure, Pool, RanksFailed
from test_checkpoints import (
    FOUR,
    THREE,
    assert_close_values,
    build,
    plan_of_three,
    resume,
    train,
)
from test_materialization import values_of
from torch import Tensor

from poplar.elastic import MemoryCheckpoints
from poplar.elastic.memory_checkpoints import _Slots
from poplar.elastic.memory_state import find, path_of
from poplar.elastic.shard_file import START, ShardFile


@pytest.mark.parametrize("stage", [0, 2])
def test_spares_have_all_that_a_lost_host_had(ranks: Pool, stage: int, tmp_path: Path) -> None:
    ranks.run(resume, "memory", stage, {}, str(tmp_path), 1, ranks=3)


def save_on_four_hosts(stage: int, folder: str, spares: int) -> dict[str, Tensor]:
    """Three saved steps, and four that follow."""
    model, optimizer = build(replace(FOUR, stage=stage))
    own = f"{folder}/{harness.rank()}"
    memory = MemoryCheckpoints(optimizer, spare_shards=spares, folder=own)
    for step in (1, 2, 3):
        train(optimizer, step - 1, 1)
        memory.save(step)
    train(optimizer, 3, 4)
    return values_of(model, optimizer)


def load_on_three_hosts(folder: str) -> dict[str, Tensor]:
    """Saves again, too: the loss of another rank then costs nothing more."""
    model, optimizer = build(THREE, seed=1)
    own = f"{folder}/{harness.rank()}"
    memory = MemoryCheckpoints(optimizer, spare_shards=1, folder=own)
    assert memory.load_latest() == 3
    for step in (4, 5):
        train(optimizer, step - 1, 1)
        memory.save(step)
    assert len(list(Path(own).iterdir())) == 4  # two slots, of which each has a spare
    train(optimizer, 5, 2)
    return values_of(model, optimizer)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_training_goes_on_without_a_host(ranks: Pool, stage: int, tmp_path: Path) -> None:
    before = ranks.run(save_on_four_hosts, stage, str(tmp_path), 1)
    shutil.rmtree(tmp_path / "1")
    (tmp_path / "3").rename(tmp_path / "1")  # ranks have other numbers then
    after = ranks.run(load_on_three_hosts, str(tmp_path), ranks=3)
    assert_close_values(after[0], before[0])


@pytest.mark.parametrize("stage", [0, 3])
def test_a_part_that_is_torn_on_one_host_is_read_from_another(
    ranks: Pool, stage: int, tmp_path: Path
) -> None:
    before = ranks.run(save_on_four_hosts, stage, str(tmp_path), 1)
    shutil.rmtree(tmp_path / "1")  # its part is left as the spare of rank 2
    for rank in (0, 3):
        for slot, owner, _ in find(tmp_path / str(rank)):
            if owner != rank:
                spare = ShardFile(path_of(tmp_path / str(rank), slot, owner))
                spare.begin()
                spare.bytes[START:] = 255
    (tmp_path / "3").rename(tmp_path / "1")
    after = ranks.run(load_on_three_hosts, str(tmp_path), ranks=3)
    assert_close_values(after[0], before[0])


def load_nothing(folder: str) -> str:
    _, optimizer = build(THREE, seed=1)
    memory = MemoryCheckpoints(optimizer, folder=f"{folder}/{harness.rank()}")
    with mock.patch.object(logging.getLogger("poplar"), "warning") as warning:
        assert memory.load_latest() is None
    assert not find(memory.folder)
    return "".join(str(call.args) for call in warning.mock_calls)


def test_missing_parts_are_named(ranks: Pool, tmp_path: Path) -> None:
    ranks.run(save_on_four_hosts, 3, str(tmp_path), 0)
    said = ranks.run(load_nothing, str(tmp_path), ranks=3)
    assert "step 3 lacks the parts of ranks [3] of 4" in said[0]
    assert said[1:] == ["", ""]


def save_after_loading(folder: str) -> None:
    """Training goes back to the last saved step, and on with the same objects."""
    _, optimizer = build(THREE)
    memory = MemoryCheckpoints(optimizer, folder=folder)
    for step in (1, 2):
        memory.save(step)
    assert memory.load_latest() == 2
    for step in (3, 4):
        memory.save(step)
        assert {mark.step for *_, mark in find(memory.folder)} >= {step}


def test_steps_are_saved_after_loading(ranks: Pool, tmp_path: Path) -> None:
    ranks.run(save_after_loading, str(tmp_path), ranks=3)


def go_back(folder: str, by_object: Sequence[Sequence[int]]) -> int | None:
    """Save steps, with an object for each sequence of them. Returns what is loaded then."""
    _, optimizer = build(THREE)
    for steps in by_object:
        memory = MemoryCheckpoints(optimizer, folder=folder)
        for step in steps:
            memory.save(step)
        del memory
    return MemoryCheckpoints(optimizer, folder=folder).load_latest()


@pytest.mark.parametrize("by_object", [[(99, 100, 51)], [(99, 100), (51,)]])
def test_steps_after_the_one_that_training_went_back_to_are_discarded(
    ranks: Pool, tmp_path: Path, by_object: list[tuple[int, ...]]
) -> None:
    found = ranks.run(go_back, str(tmp_path), by_object, ranks=3)
    assert found == [by_object[-1][-1]] * 3


TWO_OF_THREE = replace(THREE, micro_batches=((4,), (4,), ()), shares=(0.5, 0.5, 0.0), left_out=(2,))


def return_after_other_ranks_saved(folder: str) -> list[int]:
    """The steps of which this host has parts when a rank that was left out saves again."""
    _, optimizer = build(THREE)
    memory = MemoryCheckpoints(optimizer, folder=folder)
    memory.save(1)
    optimizer.apply_plan(TWO_OF_THREE)
    for step in (2, 3):
        memory.save(step)
    optimizer.apply_plan(THREE)
    with mock.patch.object(_Slots, "save"):
        memory.save(4)
    dist.barrier(harness.group())
    return sorted({mark.step for *_, mark in find(memory.folder)})


def test_a_rank_that_returns_keeps_what_the_others_have_saved(ranks: Pool, tmp_path: Path) -> None:
    assert ranks.run(return_after_other_ranks_saved, str(tmp_path), ranks=3) == [[3]] * 3


def count_copies(folder: str, spares: int) -> list[int]:
    """How many times the parts of this host's ranks are in memory after each save."""
    folder = f"{folder}/{harness.rank()}"
    counts: list[int] = []

    def save(memory: MemoryCheckpoints, *steps: int) -> None:
        for step in steps:
            memory.save(step)
            counts.append(len(list(Path(folder).iterdir())))

    _, optimizer = build(THREE)
    save(MemoryCheckpoints(optimizer, folder=folder, spare_shards=spares), 1, 2)
    _, optimizer = build(THREE, seed=1)  # after a restart
    memory = MemoryCheckpoints(optimizer, folder=folder, spare_shards=spares)
    assert memory.load_latest() == 2
    save(memory, 3, 4, 5)
    optimizer.apply_plan(TWO_OF_THREE)
    save(memory, 6, 7)
    _, optimizer = build(THREE, seed=1)
    memory = MemoryCheckpoints(optimizer, folder=folder, spare_shards=spares)
    assert memory.load_latest() == 7
    save(memory, 8)
    optimizer.apply_plan(TWO_OF_THREE)
    save(memory, 9)
    return counts


@pytest.mark.parametrize("spares", [0, 1])
def test_memory_is_twice_that_of_the_parts(ranks: Pool, tmp_path: Path, spares: int) -> None:
    for counts in ranks.run(count_copies, str(tmp_path), spares, ranks=3):
        assert counts == [2 * (1 + spares)] * 9


def save_two_optimizers(folder: str, names: Sequence[str]) -> None:
    """As a GAN does."""
    trained = [build(THREE, seed=seed) for seed in (0, 1)]
    memories = [
        MemoryCheckpoints(optimizer, folder=folder, name=name)
        for (_, optimizer), name in zip(trained, names, strict=True)
    ]
    for step in (1, 2, 3):
        for (_, optimizer), memory in zip(trained, memories, strict=True):
            train(optimizer, step, 1)
            memory.save(step)
    for (model, optimizer), name in zip(trained, names, strict=True):
        other, loaded = build(THREE, seed=2)
        assert MemoryCheckpoints(loaded, folder=folder, name=name).load_latest() == 3
        assert_close_values(values_of(other, loaded), values_of(model, optimizer))


def test_two_optimizers_have_files_of_their_own_or_raise(ranks: Pool, tmp_path: Path) -> None:
    ranks.run(save_two_optimizers, str(tmp_path), ("generator", "discriminator"), ranks=3)
    with pytest.raises(RanksFailed, match="give each of them another name="):
        ranks.run(save_two_optimizers, str(tmp_path), ("", ""), ranks=3)
    with pytest.raises(ValueError, match="name must consist of letters"):
        MemoryCheckpoints(mock.Mock(), folder=tmp_path, name="../other")


def tear_last_step(folder: str) -> None:
    """Rank 1 is killed while it writes step 3; the others have saved it."""
    plan = plan_of_three(3)
    _, optimizer = build(plan)
    memory = MemoryCheckpoints(optimizer, folder=folder)
    for step in (1, 2, 3):
        train(optimizer, step - 1, 1)
        memory.save(step)
    for slot, owner, mark in find(memory.folder):
        if owner == harness.rank() == 1 and mark.step == 3:
            ShardFile(path_of(memory.folder, slot, owner)).begin()
    _, optimizer = build(plan, seed=1)
    assert MemoryCheckpoints(optimizer, folder=folder).load_latest() == 2


def test_step_that_a_rank_has_not_saved_is_done_again(ranks: Pool, tmp_path: Path) -> None:
    ranks.run(tear_last_step, str(tmp_path), ranks=3)


def save_after_a_failed_save(stage: int, folder: str, failing: str) -> list[Failure]:
    """What a save raises that fails on a rank; training and saves then go on.

    Rank 1 cannot write, cannot reserve memory for a spare, or passes a wrong or another step.
    """
    plan = plan_of_three(stage)
    model, optimizer = build(plan)
    settings: dict[str, Any] = {"spare_shards": 1, "folder": f"{folder}/{harness.rank()}"}
    memory = MemoryCheckpoints(optimizer, **settings)
    for step in (1, 2):
        train(optimizer, step - 1, 1)
        memory.save(step)
    train(optimizer, 2, 1)
    with ExitStack() as stack:
        if harness.rank() == 1 and "step" not in failing:
            error = OSError(errno.ENOSPC, "planted")
            stack.enter_context(mock.patch.object(ShardFile, failing, side_effect=error))
        with harness.catching() as caught:
            wrong = {"step": -1, "another step": 4}.get(failing, 3)
            memory.save(wrong if harness.rank() == 1 else 3)
    dist.barrier(harness.group())
    last = {mark.step for _, owner, mark in find(memory.folder) if owner == harness.rank()}
    assert 2 in last
    train(optimizer, 3, 1)
    memory.save(4)
    expected = values_of(model, optimizer)
    model, optimizer = build(plan, seed=1)
    assert MemoryCheckpoints(optimizer, **settings).load_latest() == 4
    for name, value in values_of(model, optimizer).items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=0)
    return caught


@pytest.mark.parametrize("failing", ["finish", "reserve", "step", "another step"])
@pytest.mark.parametrize("stage", [0, 3])
def test_training_goes_on_after_a_save_that_failed_on_a_rank(
    ranks: Pool, stage: int, failing: str, tmp_path: Path
) -> None:
    outcomes = ranks.run(save_after_a_failed_save, stage, str(tmp_path), failing, ranks=3)
    if stage == 0 and failing == "reserve":  # what is written there is written by each rank
        assert outcomes == [[]] * 3
        return
    for rank, (caught,) in enumerate(outcomes):
        if failing == "another step":
            assert caught.type == "ValueError"
            assert "different steps; by rank: {0: 3, 1: 4, 2: 3}" in caught.message
            continue
        own, message = ("ValueError", "at least 0") if failing == "step" else ("OSError", "planted")
        assert caught.type == (own if rank == 1 else "RankFailed")
        assert message in caught.message
