"""Damaged and unfitting checkpoints are never loaded; a crash while saving loses none."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pickle
import random
import resource
import shutil
import signal
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import ranks as harness
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import Pool
from safetensors.torch import load_file
from subset import choose
from test_checkpoints import build, content, train
from test_materialization import values_of
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from training import assert_raised, whole_parameters

import poplar
from poplar import Plan
from poplar.checkpoint import save_plan
from poplar.checkpoint.files import manifest, save_job
from poplar.checkpoint.files.data_file import DataFile
from poplar.checkpoint.files.opened import OpenedCheckpoint
from poplar.checkpoint.save import save_now
from poplar.checkpoint.saved_model import Writer
from poplar.checkpoint.state_dicts.loaded_state import LoadedState
from poplar.values.communication import Communication

TWO = Plan(stage=3, global_batch=8, micro_batches=((2, 2), (2, 2)), shares=(0.7, 0.3))


def save_two(folder: str) -> None:
    for seed, name in enumerate(("saved", "other")):
        _, optimizer = build(TWO, seed=seed)
        train(optimizer, seed, 1)
        poplar.save_checkpoint(f"{folder}/{name}", optimizer, state={"note": name})


@pytest.fixture(scope="module")
def saved(ranks: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint, `saved`, beside one of another training, `other`."""
    folder = tmp_path_factory.mktemp("checkpoints")
    ranks.run(save_two, str(folder), ranks=2)
    return folder


def truncate(path: Path, draw: random.Random) -> None:
    os.truncate(path, draw.randrange(path.stat().st_size))


def flip_bits(path: Path, draw: random.Random) -> None:
    data = bytearray(path.read_bytes())
    for _ in range(draw.choice((1, 1, 8))):
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    path.write_bytes(data)


def remove(path: Path, _draw: random.Random) -> None:
    path.unlink()


def replace_by_other(path: Path, draw: random.Random) -> None:
    """By the file of another checkpoint with the same name, or by random bytes."""
    other = (path.parent.parent / "other" / path.name).read_bytes()
    if draw.random() < 0.5 or other == path.read_bytes():
        other = draw.randbytes(len(other))
    path.write_bytes(other)


def make_newer(path: Path, _draw: random.Random) -> None:
    path = path.parent / manifest.NAME
    data = json.loads(path.read_text())
    path.write_text(json.dumps({**data, "version": manifest.VERSION + 1}))


DAMAGES = (truncate, flip_bits, remove, replace_by_other, make_newer)


@pytest.mark.parametrize("damage", DAMAGES)
def test_random_damage_is_found_and_names_the_file(
    saved: Path, tmp_path: Path, damage: Callable[[Path, random.Random], None]
) -> None:
    draw = random.Random(damage.__name__)
    shutil.copytree(saved / "other", tmp_path / "other")
    names = sorted(path.name for path in (saved / "saved").iterdir())
    assert len(names) == 5  # two data files, metadata, plan, manifest
    for number in range(choose(quick=40, full=400)):
        folder = tmp_path / f"damaged-{number}"
        shutil.copytree(saved / "saved", folder)
        name = draw.choice(names)
        damage(folder / name, draw)
        with pytest.raises((poplar.PoplarError, ValueError)) as caught:
            OpenedCheckpoint(folder).verify()
        # The manifest of another checkpoint does not fit the first file that is checked.
        expected = {name} if name != manifest.NAME else set(names)
        expected = {manifest.NAME} if damage is make_newer else expected
        assert any(str(folder / other) in str(caught.value) for other in expected), caught.value
        shutil.rmtree(folder)


def load_damaged(folders: list[str]) -> list[harness.Failure]:
    model, optimizer = build(TWO, seed=3)
    train(optimizer, 5, 1)
    before = values_of(model, optimizer)
    state = {n: v.clone() for n, v in flat_state(optimizer).items()}
    failures = []
    for folder in folders:
        with harness.catching() as caught:
            poplar.load_checkpoint(folder, optimizer)
        failures += caught
    for name, value in values_of(model, optimizer).items():
        assert torch.equal(value, before[name])
    for name, value in flat_state(optimizer).items():
        assert torch.equal(value, state[name])
    train(optimizer, 6, 1)
    return failures


def flat_state(optimizer: poplar.HeteroZeroOptimizer) -> dict[str, torch.Tensor]:
    runs = enumerate(optimizer._training.update.runs)
    return {
        f"{number}.{key}": value
        for number, run in runs
        for key, value in optimizer._training.update.state_of(run).items()
    }


def test_damage_raises_on_all_ranks_and_changes_nothing(
    ranks: Pool, saved: Path, tmp_path: Path
) -> None:
    shutil.copytree(saved / "other", tmp_path / "other")
    draw, folders = random.Random(0), []
    for damage in DAMAGES:
        folders.append(str(tmp_path / damage.__name__))
        shutil.copytree(saved / "saved", folders[-1])
        damage(Path(folders[-1]) / "__1_0.distcp", draw)
    by_rank = ranks.run(load_damaged, [*folders, str(tmp_path / "absent")], ranks=2)
    for number, damage in enumerate(DAMAGES):
        name = manifest.NAME if damage is make_newer else "__1_0.distcp"
        assert_raised([failures[number] for failures in by_rank], name)
    assert_raised([failures[-1] for failures in by_rank], "there is no checkpoint")


class Other(nn.Module):
    def __init__(self, *, width: int = 3) -> None:
        super().__init__()
        self.one = nn.Linear(width, 2)


def load_elsewhere(folder: str) -> list[harness.Failure]:
    failures = []

    def expect_error(optimizer: Any, **options: Any) -> None:
        with harness.catching() as caught:
            poplar.load_checkpoint(folder, optimizer, **options)
        failures.extend(caught)

    group = {"process_group": harness.group(), "compute_dtype": torch.float32}
    other = Other().to(harness.device())
    expect_error(poplar.HeteroZeroOptimizer(other, torch.optim.AdamW, plan=TWO, **group))
    expect_error(build(TWO, cls=torch.optim.SGD)[1])
    _, adopting = build(TWO, amsgrad=True)
    poplar.load_checkpoint(folder, adopting)  # hyper-parameters are loaded, as by torch
    assert not adopting.param_groups[0]["amsgrad"]
    train(adopting, 1, 1)
    model, optimizer = build(TWO)
    expect_error(optimizer, state={"sampler": poplar.GradScaler("cpu")})
    with mock.patch.object(poplar.GradScaler, "load_state_dict", side_effect=KeyError("scale")):
        expect_error(optimizer, state={"note": poplar.GradScaler("cpu")})
    optimizer.release()
    whole = poplar.HeteroZeroOptimizer(model, torch.optim.AdamW, plan=TWO, **group)
    expect_error(whole)
    return failures


def test_checkpoint_of_another_model_or_optimizer_is_refused(ranks: Pool, saved: Path) -> None:
    by_rank = ranks.run(load_elsewhere, str(saved / "saved"), ranks=2)
    expected = (
        ("another model", "lacks 'one.bias', 'one.weight'"),
        ("the state of AdamW, but this optimizer is SGD",),
        ("no state of ['sampler']; it has that of ['note']",),
        ("scale",),
        ("has 2 param groups, but this optimizer has 1",),
    )
    for number, patterns in enumerate(expected):
        assert_raised([failures[number] for failures in by_rank], *patterns)


MATRIX, KINDS = "embedding.weight", ("master", "exp_avg", "sent")


def load_wider_tensors(folder: str) -> list[harness.Failure]:
    """Load what torch saved of a matrix, each kind once with a column more than the model's."""
    plan = replace(TWO, stage=1, communication=Communication.of("int8", 1))
    model, optimizer = build(plan, compute_dtype=torch.bfloat16)
    train(optimizer, 0, 1)
    wider = torch.zeros(37, 27, device=harness.device())
    failures = []
    for kind in KINDS:
        values, state = get_state_dict(model, optimizer)
        assert values[MATRIX].shape == (37, 26)
        saved = {"model": values, "optim": state}
        if kind == "sent":
            saved["communication"] = {"sent": {MATRIX: wider}}
        else:
            state["state"][MATRIX] |= {kind: wider}
        dcp.save(saved, checkpoint_id=f"{folder}/{kind}", process_group=harness.group())
        with harness.catching() as caught:
            poplar.load_checkpoint(f"{folder}/{kind}", optimizer)
        failures += caught
    return failures


@pytest.mark.filterwarnings("ignore")
def test_tensors_of_other_shapes_are_refused(ranks: Pool, tmp_path: Path) -> None:
    by_rank = ranks.run(load_wider_tensors, str(tmp_path), ranks=2)
    for number, kind in enumerate(KINDS):
        found = [failures[number] for failures in by_rank]
        assert_raised(found, f"{kind} does not fit", MATRIX, "has shape (37, 27) there, but")


def fail_to_apply(folder: str) -> list[harness.Failure]:
    """The second rank has no memory for the optimizer state, when values have changed."""
    _, optimizer = build(TWO, seed=4)
    failing = mock.patch.object(LoadedState, "apply", side_effect=MemoryError("no memory left"))
    with failing if harness.rank() == 1 else contextlib.nullcontext(), harness.catching() as caught:
        poplar.load_checkpoint(folder, optimizer)
    with harness.catching() as refused:
        train(optimizer, 1, 1)
    poplar.load_checkpoint(folder, optimizer)
    train(optimizer, 1, 1)
    return [*caught, *refused]


def test_failure_to_apply_optimizer_state_raises_on_all_ranks(ranks: Pool, saved: Path) -> None:
    by_rank = ranks.run(fail_to_apply, str(saved / "saved"), ranks=2)
    assert_raised([failures[0] for failures in by_rank], "no memory left")
    assert_raised([failures[1] for failures in by_rank], "when values had changed")


def fail_to_save(folder: str) -> list[harness.Failure]:
    model, optimizer = build(TWO)
    failures = []

    def expect_error(name: str, **options: Any) -> None:
        with harness.catching() as caught:
            poplar.save_checkpoint(f"{folder}/{name}", optimizer, **options)
        failures.extend(caught)

    with files_limited_to(20_000 if harness.rank() == 1 else resource.RLIM_INFINITY):
        expect_error("full")
    no_thread = mock.patch.object(
        save_job.threading, "Thread", side_effect=RuntimeError("can't start new thread")
    )
    with no_thread if harness.rank() == 1 else contextlib.nullcontext():
        expect_error("threads")
    expect_error(f"rank-{harness.rank()}")
    expect_error("file/below")
    expect_error("used")
    expect_error("pickle", state={"function": lambda: 0})
    expect_error("differing", state={"position": harness.rank(), "epoch": 1})
    with optimizer.full_parameters():
        expect_error("unsharded")
    for batch in optimizer.micro_batches(batch_of_two()):
        (model(batch["tokens"]).sum() / 8).backward()
    expect_error("step")
    optimizer.step()
    poplar.save_checkpoint(f"{folder}/fine", optimizer)
    with_path: Any = f"{folder}/fine" if harness.rank() == 0 else None
    with_state: Any = None if harness.rank() == 0 else [1]
    for call in (
        lambda: poplar.save_checkpoint(f"{folder}/new", optimizer, state=with_state),
        lambda: poplar.save_checkpoint(with_path and f"{folder}/new", optimizer),
        lambda: poplar.load_checkpoint(with_path, optimizer),
        lambda: poplar.load_checkpoint(f"{folder}/fine", optimizer, state=with_state),
        lambda: optimizer.save_model(with_path and f"{folder}/model"),
    ):
        with harness.catching() as caught:
            call()
        failures.extend(caught)
    poplar.load_checkpoint(f"{folder}/fine", optimizer)
    return failures


@contextlib.contextmanager
def files_limited_to(size: int) -> Iterator[None]:
    """Writing beyond this size fails, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def batch_of_two() -> dict[str, torch.Tensor]:
    from test_checkpoints import batch_of

    return batch_of(0, 4 * harness.rank(), 4 * harness.rank() + 4)


def test_failed_save_raises_on_all_ranks_and_leaves_nothing(ranks: Pool, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for name in ("used", "used.incomplete"):
        (tmp_path / name).mkdir()
    by_rank = ranks.run(fail_to_save, str(tmp_path), ranks=2)
    expected = (
        "full.incomplete/__1_0.distcp",
        "can't start new thread",
        "{0: 'rank-0', 1: 'rank-1'",
        "Not a directory",
        "exists",
        "pickle",
        "['position']",
        "inside full_parameters()",
        "step()",
        "'list' object",
        "not NoneType",
        "not NoneType",
        "'list' object",
        "not NoneType",
    )
    for number, pattern in enumerate(expected):
        assert_raised([failures[number] for failures in by_rank], pattern)
    names = ["file", "fine", "used", "used.incomplete"]  # what is refused removes nothing
    assert sorted(path.name for path in tmp_path.iterdir()) == names


def save_and_prune(folder: str, asynchronous: bool) -> list[Any]:
    _, optimizer = build(TWO)
    sampler = poplar.HeteroBatchSampler(80, TWO, rank=harness.rank())
    state = {"sampler": sampler, "best": 0.5}
    options = {"state": state, "keep": 2, "asynchronous": asynchronous}
    manager = poplar.CheckpointManager(folder, optimizer, **options)
    seen: list[Any] = [manager.load_latest()]
    for step in range(1, 5):
        train(optimizer, step, 1)
        manager.save(step)
    manager.save(3)  # back to an earlier step; it is replaced and kept
    manager.wait()
    train(optimizer, 9, 1)
    names = sorted(path.name for path in Path(folder).iterdir())
    dist.barrier(harness.group())
    if harness.rank() == 0:
        shutil.rmtree(f"{folder}/step-00000004")
    seen.append(poplar.CheckpointManager(folder, optimizer, state=state).load_latest())
    seen.append(names)
    return seen


@pytest.mark.parametrize("asynchronous", [False, True])
def test_manager_keeps_the_last_checkpoints(
    ranks: Pool, tmp_path: Path, asynchronous: bool
) -> None:
    for seen in ranks.run(save_and_prune, str(tmp_path), asynchronous, ranks=2):
        assert seen == [None, 3, ["step-00000003", "step-00000004"]]


def save_two_optimizers(folder: str, asynchronous: bool) -> list[harness.Failure]:
    """As a GAN with both in one folder; both see it under another name."""
    (model, generator), (_, discriminator) = (build(TWO, seed=seed) for seed in (0, 1))
    first = poplar.CheckpointManager(folder, generator, asynchronous=asynchronous)
    second = poplar.CheckpointManager(f"{folder}-link", discriminator, keep=1)
    for step in (1, 2):
        first.save(step)
    with harness.catching() as caught:
        second.save(3)
    first.wait()
    expected = whole_parameters(model, generator)
    del first
    loaded, optimizer = build(TWO, seed=2)
    assert poplar.CheckpointManager(folder, optimizer).load_latest() == 2
    found = whole_parameters(loaded, optimizer)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    second.save(3)
    return caught


@pytest.mark.parametrize("asynchronous", [False, True])
def test_folder_with_checkpoints_of_another_manager_is_refused(
    ranks: Pool, tmp_path: Path, asynchronous: bool
) -> None:
    (tmp_path / "saved-link").symlink_to("saved")
    folder = str(tmp_path / "saved")
    for caught in ranks.run(save_two_optimizers, folder, asynchronous, ranks=2):
        assert caught[0].type == "ValueError"
        assert "give each CheckpointManager another folder" in caught[0].message


def save_under_two_plans(folder: str) -> None:
    """What the ranks write is agreed on again only when it has changed."""
    model, optimizer = build(TWO)
    manager = poplar.CheckpointManager(folder, optimizer, asynchronous=True)
    real = save_plan.dedup_save_plans
    divide = mock.patch.object(save_plan, "dedup_save_plans", side_effect=real)
    with divide as divided:
        for step in range(1, 4):
            train(optimizer, step, 1)
            manager.save(step)
        assert divided.call_count == 1
        optimizer.apply_plan(replace(TWO, shares=(0.2, 0.8)))
        for step in range(4, 6):
            train(optimizer, step, 1)
            manager.save(step)
        assert divided.call_count == 2
    values = values_of(model, optimizer)
    model, optimizer = build(TWO, seed=1)
    manager.wait()
    assert poplar.CheckpointManager(folder, optimizer).load_latest() == 5
    for name, value in values_of(model, optimizer).items():
        assert torch.equal(value, values[name])


def test_manager_agrees_again_when_the_plan_changes(ranks: Pool, tmp_path: Path) -> None:
    ranks.run(save_under_two_plans, str(tmp_path), ranks=2)


def interrupt_a_replacement(folder: str) -> None:
    """A kill between the two renames; and an error of the second one."""
    optimizer = build(plan_of_one())[1]
    saved = Path(folder)
    save_now(saved, optimizer, step=1)
    rename = Path.rename

    def failing(path: Path, target: Path) -> Path:
        if target == saved and path.name.endswith(".incomplete"):
            raise OSError(errno.EIO, "no answer")
        return rename(path, target)

    with mock.patch.object(Path, "rename", failing), pytest.raises(OSError, match="no answer"):
        save_now(saved, optimizer, step=2, replaces=True)
    assert OpenedCheckpoint(saved).manifest.step == 1
    assert [path.name for path in saved.parent.iterdir()] == [saved.name]

    saved.rename(f"{folder}.replaced")
    OpenedCheckpoint(saved).verify()
    poplar.load_checkpoint(folder, build(plan_of_one())[1])
    save_now(saved, optimizer, step=3, replaces=True)
    assert OpenedCheckpoint(saved).manifest.step == 3
    assert [path.name for path in saved.parent.iterdir()] == [saved.name]


def test_checkpoint_whose_replacement_was_interrupted_is_found(ranks: Pool, tmp_path: Path) -> None:
    ranks.run(interrupt_a_replacement, str(tmp_path / "saved"), ranks=1)


def save_beside_another_program(folder: str) -> list[harness.Failure]:
    """Step 1 is saved; step 2 is being saved by another program, and so is the model."""
    _, optimizer = build(TWO)
    manager = poplar.CheckpointManager(folder, optimizer)
    manager.save(1)
    failures: list[harness.Failure] = []
    for save in (
        lambda: manager.save(2),
        lambda: poplar.save_checkpoint(f"{folder}/step-00000002", optimizer),
        lambda: optimizer.save_model(f"{folder}/model.safetensors"),
    ):
        with harness.catching() as caught:
            save()
        failures.extend(caught)
    return failures


def save_alone(folder: str) -> None:
    _, optimizer = build(TWO)
    poplar.CheckpointManager(folder, optimizer).save(2)
    optimizer.save_model(f"{folder}/model.safetensors")


def test_files_that_another_program_writes_stay(ranks: Pool, tmp_path: Path) -> None:
    aside = tmp_path / "step-00000002.incomplete"
    aside.mkdir()
    file = DataFile(aside / "__1_0.distcp")
    file.write(b"a part")
    values = torch.ones(4)
    model = Writer(tmp_path / "model.safetensors", [("weight", values)], {})
    model.write("weight", values)
    model.finish()
    by_rank = ranks.run(save_beside_another_program, str(tmp_path), ranks=2)
    for number in range(3):
        failures = [failures[number] for failures in by_rank]
        assert_raised(failures, f"another save is writing {tmp_path}/")
    assert file.path.read_bytes() == b"a part"
    model.publish()
    assert torch.equal(load_file(tmp_path / "model.safetensors")["weight"], values)
    file.close()
    ranks.run(save_alone, str(tmp_path), ranks=2)  # what is left is removed
    names = ["model.safetensors", "step-00000001", "step-00000002"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert load_file(tmp_path / "model.safetensors").keys() != {"weight"}


def fail_to_prune(folder: str) -> list[harness.Failure]:
    _, optimizer = build(TWO)
    manager = poplar.CheckpointManager(folder, optimizer, keep=1)
    manager.save(1)
    failing = mock.patch.object(manager, "_remove", side_effect=OSError(13, "denied", "old"))
    with failing, harness.catching() as caught:
        manager.save(2)
    assert manager.load_latest() == 2
    return caught


def test_error_of_pruning_says_that_the_checkpoint_is_complete(ranks: Pool, tmp_path: Path) -> None:
    by_rank = ranks.run(fail_to_prune, str(tmp_path), ranks=2)
    assert_raised([failures[0] for failures in by_rank], "step-00000002' is complete, but older")


def fail_in_background(folder: str) -> list[harness.Failure]:
    _, optimizer = build(TWO)
    manager = poplar.CheckpointManager(folder, optimizer, asynchronous=True)
    manager.save(1)
    manager.wait()
    failures = []
    with files_limited_to(20_000 if harness.rank() == 1 else resource.RLIM_INFINITY):
        manager.save(2)
        train(optimizer, 1, 1)
        with harness.catching() as caught:
            manager.save(3)
    failures += caught
    dist.barrier(harness.group())  # the first rank removes what was written
    assert [path.name for path in Path(folder).iterdir()] == ["step-00000001"]
    dist.barrier(harness.group())
    manager.save(4)
    train(optimizer, 2, 1)
    assert manager.load_latest() == 4
    return failures


def test_error_of_an_asynchronous_save_is_raised_by_the_next_call(
    ranks: Pool, tmp_path: Path
) -> None:
    by_rank = ranks.run(fail_in_background, str(tmp_path), ranks=2)
    assert_raised([failures[0] for failures in by_rank], "step-00000002.incomplete/__1_0.distcp")


def snapshot(folder: str) -> None:
    model, optimizer = build(TWO)
    train(optimizer, 0, 1)
    manager = poplar.CheckpointManager(folder, optimizer, asynchronous=True)
    values = values_of(model, optimizer)
    started, go_on = threading.Event(), threading.Event()

    def slow(self: DataFile, *arguments: Any) -> Any:
        started.set()
        go_on.wait()
        return write_items(self, *arguments)

    write_items = DataFile.write_items
    with mock.patch.object(DataFile, "write_items", slow):
        manager.save(1)
        started.wait()
        train(optimizer, 1, 2)  # changes what the thread has not written yet
        go_on.set()
        manager.wait()
    assert manager.load_latest() == 1
    for name, value in values_of(model, optimizer).items():
        assert torch.equal(value, values[name])


def test_asynchronous_save_holds_the_values_of_its_step(ranks: Pool, tmp_path: Path) -> None:
    ranks.run(snapshot, str(tmp_path), ranks=2)


def save_while_a_rank_is_stopped(folder: str) -> harness.Failure:
    _, optimizer = build(TWO, timeout=timedelta(seconds=2))
    train(optimizer, 0, 1)
    if harness.rank() == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    with harness.catching() as caught:
        poplar.save_checkpoint(folder, optimizer)
    return caught[0]


def test_survivors_of_a_stopped_rank_raise(tmp_path: Path) -> None:
    folder = str(tmp_path / "saved")
    failure = harness.one_off(2, save_while_a_rank_is_stopped, folder, lost=[1])[0]
    assert failure.is_a(poplar.CollectiveTimeout), failure
    assert "rank(s) 1" in failure.message
    assert not (tmp_path / "saved").exists()


def save_while_the_disk_hangs(folder: str) -> list[harness.Failure]:
    """Rank 0 writes nothing until all give up. The clock of rank 1 sees the deadline later."""
    _, optimizer = build(TWO, timeout=timedelta(seconds=2))
    rate = 1.0 - 0.1 * harness.rank()
    clock = SimpleNamespace(monotonic=lambda: rate * time.monotonic(), sleep=time.sleep)

    def slow(self: DataFile, *arguments: Any) -> Any:
        is_stopped = arguments[-1]
        while harness.rank() == 0 and not is_stopped():
            time.sleep(0.05)
        return write_items(self, *arguments)

    write_items = DataFile.write_items
    with (
        mock.patch.object(DataFile, "write_items", slow),
        mock.patch.object(save_job, "time", clock),
        harness.catching() as caught,
    ):
        poplar.save_checkpoint(folder, optimizer)
    poplar.save_checkpoint(f"{folder} again", optimizer)
    return caught


def test_all_ranks_give_up_a_save_at_the_same_time(ranks: Pool, tmp_path: Path) -> None:
    by_rank = ranks.run(save_while_the_disk_hangs, str(tmp_path / "saved"), ranks=2)
    for failures in by_rank:
        assert ["rank(s) [0] wrote nothing for 2 s" in one.message for one in failures] == [True]
    assert not (tmp_path / "saved").exists()


class Crash(BaseException):
    """Ends a save as the end of the process does: nothing is cleaned up."""


def save_odd_steps(folder: str) -> list[harness.Failure]:
    """A symbolic link that a save would remove, and steps that are no whole numbers."""
    _, optimizer = build(TWO)
    manager, failures = poplar.CheckpointManager(folder, optimizer), []
    for step in (-1, 10**30, True, 1.0, "5", None, 10 + harness.rank()):
        with harness.catching() as caught:
            manager.save(step)
        failures += caught
    manager.save(torch.tensor(7))  # as an index; its checkpoint has a plain number
    assert manager.load_latest() == 7
    return failures


def test_steps_are_whole_numbers_and_links_are_not_followed(ranks: Pool, tmp_path: Path) -> None:
    target = tmp_path / "target" / "file"
    target.parent.mkdir()
    target.write_text("kept")
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "step-00000001.incomplete").symlink_to(target.parent)
    by_rank = ranks.run(save_odd_steps, str(tmp_path / "saved"), ranks=2)
    of_range = ["step must be at least 0", "step must be below 2**63"]
    expected = [*of_range, *["must be a whole number"] * 4, "{0: 'step-00000010', 1: 'step-"]
    for number, pattern in enumerate(expected):
        assert_raised([failures[number] for failures in by_rank], pattern)
    assert [path.name for path in (tmp_path / "saved").iterdir()] == ["step-00000007"]
    assert target.read_text() == "kept"


def crash_while_publishing(folder: str, calls: int) -> bool:
    """Save step 1 again, and crash at the n-th call that changes the folders."""
    _, optimizer = build(plan_of_one())
    train(optimizer, calls, 1)
    manager = poplar.CheckpointManager(folder, optimizer)
    left = [calls]

    def counted(function: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            if left[0] == 0:
                raise Crash
            left[0] -= 1
            return function(*arguments, **options)

        return call

    names = ("rename", "unlink")
    with contextlib.ExitStack() as stack:
        for name in names:
            stack.enter_context(mock.patch.object(Path, name, counted(getattr(Path, name))))
        for name in ("write_whole", "sync_folder"):
            function = counted(getattr(save_job, name))
            stack.enter_context(mock.patch.object(save_job, name, function))
        remove = counted(shutil.rmtree)
        stack.enter_context(mock.patch.object(save_job.shutil, "rmtree", remove))
        stack.enter_context(
            mock.patch.object(save_job.PendingSave, "_give_up", side_effect=Crash, autospec=True)
        )
        try:
            manager.save(1)
        except Crash:
            return False
    return True


def plan_of_one() -> Plan:
    return Plan(stage=1, global_batch=8, micro_batches=((8,),), shares=(1.0,))


def crash_everywhere(folder: str) -> int:
    _, optimizer = build(plan_of_one())
    poplar.CheckpointManager(folder, optimizer).save(1)
    calls = 0
    while not crash_while_publishing(folder, calls):
        manager = poplar.CheckpointManager(folder, optimizer)
        assert manager.load_latest() == 1
        calls += 1
    assert poplar.CheckpointManager(folder, optimizer).load_latest() == 1
    return calls


def test_crash_at_every_change_of_the_folders_leaves_a_complete_checkpoint(
    ranks: Pool, tmp_path: Path
) -> None:
    crashes = ranks.run(crash_everywhere, str(tmp_path / "saved"), ranks=1)[0]
    assert crashes >= 10


def save_until_killed(folder: str, asynchronous: bool) -> None:
    """Before each save, note which values belong to the step; afterwards, that it is complete."""
    model, optimizer = build(TWO, timeout=timedelta(seconds=5))
    manager = poplar.CheckpointManager(folder, optimizer, keep=2, asynchronous=asynchronous)
    with open(f"{folder}.log-{harness.rank()}", "a") as log:
        for step in range(1, 1000):
            train(optimizer, step, 1)
            print("begins", step, digest(values_of(model, optimizer)), file=log, flush=True)
            manager.save(step)
            print("ended", step - asynchronous, file=log, flush=True)


def digest(values: dict[str, torch.Tensor]) -> int:
    crc = 0
    for name in sorted(values):
        crc = zlib.crc32(pickle.dumps(values[name].tolist()), crc)
    return crc


def killed_while_saving(folder: Path, victims: list[int], draw: random.Random) -> None:
    world = harness._World(2, "gloo", forked=True)
    try:
        asynchronous = draw.random() < 0.5
        call = harness._Call(save_until_killed, (str(folder), asynchronous), {}, 2, 0)
        for channel in world.channels:
            channel.send_bytes(pickle.dumps(call))
        deadline = time.monotonic() + 60
        while not list(folder.glob("step-*[0-9]")):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep(draw.uniform(0, 0.3))
        for rank in victims:
            os.kill(world.processes[rank].pid, signal.SIGKILL)
        time.sleep(draw.uniform(0, 0.1))
    finally:
        world.kill()


@pytest.mark.filterwarnings("ignore")
def test_kill_at_any_moment_of_saving_leaves_a_complete_checkpoint(tmp_path: Path) -> None:
    draw = random.Random(0)
    for number in range(choose(quick=10, full=100)):
        folder = tmp_path / str(number)
        victims = draw.choice(([0], [1], [0, 1]))
        killed_while_saving(folder, victims, draw)
        lines = [line.split() for line in Path(f"{folder}.log-0").read_text().splitlines()]
        begun = {int(line[1]): int(line[2]) for line in lines if line[0] == "begins"}
        ended = max((int(line[1]) for line in lines if line[0] == "ended"), default=1)
        steps = [int(path.name[5:13]) for path in folder.glob("step-*[0-9]")]
        latest = folder / f"step-{max(steps):08d}"
        OpenedCheckpoint(latest).verify()
        assert max(steps) >= ended
        assert digest(content(latest)["model"]) == begun[max(steps)]


def load_slowly(folder: str, reads: bool) -> list[harness.Failure]:
    """Rank 0 needs longer for its files than the deadline of collectives, with reads or without."""
    verify = OpenedCheckpoint.verify

    def slow(opened: OpenedCheckpoint, *args: Any) -> None:
        end = time.monotonic() + 5.0
        while harness.rank() == 0 and time.monotonic() < end:
            if reads:
                with Path("/dev/zero").open("rb") as zeros:
                    zeros.read(1 << 20)
            time.sleep(0.05)
        verify(opened, *args)

    _, optimizer = build(TWO, seed=2, timeout=timedelta(seconds=2))
    with mock.patch.object(OpenedCheckpoint, "verify", slow), harness.catching() as caught:
        poplar.load_checkpoint(folder, optimizer)
    return caught


@pytest.mark.parametrize("reads", [True, False])
def test_a_load_waits_as_long_as_a_rank_reads(ranks: Pool, saved: Path, reads: bool) -> None:
    for failures in ranks.run(load_slowly, str(saved / "saved"), reads, ranks=2):
        assert len(failures) == (not reads)
        assert all("rank 0 has read and written nothing for 2 s" in one.message for one in failures)


def save_model_slowly(path: str, writes: bool) -> tuple[list[harness.Failure], bool]:
    """Rank 0 needs longer for its file than the deadline of collectives, with writes or without.

    Also whether the file was closed while a thread wrote it.
    """
    write, discard, begun = Writer.write, Writer.discard, list[float]()
    inside, closed = [False], [False]

    def slow(writer: Writer, name: str, values: torch.Tensor, **options: Any) -> None:
        inside[0] = True
        begun.append(time.monotonic())
        while time.monotonic() < begun[0] + 5.0:
            if writes:
                with Path("/dev/null").open("wb") as nothing:
                    nothing.write(bytes(1 << 20))
            time.sleep(0.05)
        write(writer, name, values, **options)
        inside[0] = False

    def discarded(writer: Writer) -> None:
        closed[0] = inside[0]
        discard(writer)

    _, optimizer = build(replace(TWO, stage=1), timeout=timedelta(seconds=2))
    changed = mock.patch.multiple(Writer, write=slow, discard=discarded)
    with changed, harness.catching() as caught:
        optimizer.save_model(path)
    return caught, closed[0]


@pytest.mark.parametrize("writes", [True, False])
def test_saving_a_model_waits_as_long_as_a_rank_writes(
    ranks: Pool, tmp_path: Path, writes: bool
) -> None:
    path = tmp_path / "model.safetensors"
    for failures, was_closed in ranks.run(save_model_slowly, str(path), writes, ranks=2):
        assert len(failures) == (not writes)
        assert all("rank 0 has read and written nothing" in one.message for one in failures)
        assert not was_closed
    assert path.exists() == writes
