"""Training loaders of Lightning: their epochs, and where a resumed training goes on."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import ranks as pool
import torch
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from subset import choose
from test_lightning_integration import (
    EVERY_RANK,
    SAMPLES,
    WIDTH,
    Regression,
    data,
    environment,
    on_ranks,
    plan_of,
)
from torch.utils.data import DataLoader, TensorDataset, default_collate

import poplar
from poplar.integrations.lightning.batches import check_train_loader, even

PLAN = plan_of(1, EVERY_RANK)
EPOCH = SAMPLES // PLAN.global_batch
"""Steps of an epoch."""


class Records(Regression):
    """Keeps what every step of this rank has trained, and when the model was validated."""

    def __init__(self, fails_before: int | None = None, fails_in: int | None = None) -> None:
        super().__init__()
        self.steps: list[tuple[list[int], float]] = []
        self.validated: list[int] = []
        self.fails_before, self.fails_in = fails_before, fails_in

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.global_step == self.fails_before:
            raise RuntimeError("before a step")

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.global_step == self.fails_in:
            raise RuntimeError("in a step")
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        rate = self.trainer.optimizers[0].param_groups[0]["lr"]
        self.steps.append((batch[2].tolist(), rate))

    def on_validation_end(self) -> None:
        self.validated.append(self.global_step)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]


def samples() -> TensorDataset:
    """Each has its index."""
    x = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x[:, :1], torch.arange(SAMPLES))


def loader_of(kind: str, workers: int = 0) -> DataLoader[Any]:
    # The processes of the pool are daemons, which must not have children otherwise.
    multiprocessing.current_process()._config["daemon"] = False
    if kind == "stream":
        stream = poplar.split_stream(list(samples()), PLAN)
        return DataLoader(stream, None, collate_fn=default_collate, num_workers=workers)
    if kind == "sampler":
        batches = poplar.HeteroBatchSampler(SAMPLES, PLAN, seed=1)
        return DataLoader(samples(), batch_sampler=batches, num_workers=workers)
    return DataLoader(samples(), 2, shuffle=True, drop_last=True, num_workers=workers)


def fit(folder: Path, loader: DataLoader[Any], module: Records, **options: Any) -> Records:
    checkpoint = options.pop("ckpt_path", None)
    options = {"max_steps": -1, "max_epochs": 3, "gradient_clip_val": None, **options}
    run = on_ranks(folder, PLAN, **options)
    run.fit(module, loader, data(8), ckpt_path=checkpoint)
    return module


def train_epochs(folder: Path, options: dict[str, Any]) -> list[list[int]]:
    with environment():
        return [drawn for drawn, _ in fit(folder, loader_of("sampler"), Records(), **options).steps]


@pytest.mark.parametrize(
    ("options", "epochs"),
    [
        ({"limit_train_batches": 2}, (0, 1, 2)),
        ({"overfit_batches": 2}, (0, 0, 0)),
    ],
)
def test_an_own_sampler_gets_the_epochs_of_the_trainer(ranks, tmp_path, options, epochs):
    for rank, found in enumerate(ranks.run(train_epochs, tmp_path, options)):
        sampler, expected = poplar.HeteroBatchSampler(SAMPLES, PLAN, seed=1, rank=rank), []
        for epoch in epochs:
            sampler.set_epoch(epoch)
            expected += list(sampler)[:2]
        assert found == expected


class Saves(pl.Callback):
    """Saves at the end of a step of every epoch and at the end of the first one."""

    def __init__(self, folder: Path, steps: tuple[int, ...]) -> None:
        self.folder, self.steps = folder, steps

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step in self.steps:
            trainer.save_checkpoint(self.folder / f"{trainer.global_step}.ckpt")

    def on_train_epoch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.current_epoch == 0:
            trainer.save_checkpoint(self.folder / "epoch.ckpt")


def resume(folder: Path, kind: str, workers: int, options: dict[str, Any]) -> dict[str, Any]:
    """By checkpoint, how many steps were done, what was trained then, and what is after it."""
    epoch = options.get("limit_train_batches", EPOCH)
    done = {f"{epoch + 1}.ckpt": epoch + 1}
    # In the other cases Lightning counts the epoch twice that has ended.
    if kind != "stream" or "limit_train_batches" in options:
        done[f"{epoch}.ckpt"] = epoch
    if "max_steps" not in options:
        done["epoch.ckpt"] = epoch
    with environment():
        saves = Saves(folder, (epoch, epoch + 1))
        pl.seed_everything(5, verbose=False)
        whole = fit(folder, loader_of(kind, workers), Records(), callbacks=[saves], **options)
        found = {}
        for name, steps in done.items():
            options["ckpt_path"] = folder / name
            rest = fit(folder, loader_of(kind, workers), Records(), **options)
            found[name] = rest.steps, whole.steps[steps:]
    return found


@pytest.mark.parametrize("kind", ["sampler", "stream", "planned"])
@pytest.mark.parametrize(
    ("workers", "options"),
    choose(
        quick=((0, {}), (1, {"limit_train_batches": 2})),
        full=tuple(
            (workers, {**limit, **end})
            for workers in (0, 1)
            for limit in ({}, {"limit_train_batches": 2})
            for end in ({}, {"max_steps": 8})
        ),
    ),
)
def test_training_resumes_with_the_next_batch(ranks, tmp_path, kind, workers, options):
    for found in ranks.run(resume, tmp_path, kind, workers, options):
        for name, (rest, expected) in found.items():
            assert expected, name
            assert rest == expected, name


def fail_and_resume(folder: Path, where: str, step: int) -> dict[str, Any]:
    """What is trained and validated without a failure, before one, and after the resume."""
    with environment():
        pl.seed_everything(5, verbose=False)
        whole = fit(folder, loader_of("planned"), Records())
        failed = Records(**{where: step})
        saves: Any = {"callbacks": [OnExceptionCheckpoint(folder, "failed")]}
        with pytest.raises(RuntimeError, match="a step"):
            fit(folder, loader_of("planned"), failed, enable_checkpointing=True, **saves)
        rest = fit(folder, loader_of("planned"), Records(), ckpt_path=folder / "failed.ckpt")
        by_name = {"whole": whole, "failed": failed, "rest": rest}
        return {name: (each.steps, each.validated) for name, each in by_name.items()}


@pytest.mark.parametrize("where", ["fails_before", "fails_in"])
@pytest.mark.parametrize("step", [EPOCH - 1, EPOCH + 1])
def test_a_step_that_failed_is_trained_after_the_resume(ranks, tmp_path, where, step):
    """`step` is the last one of an epoch, or in the middle of one."""
    for found in ranks.run(fail_and_resume, tmp_path, where, step):
        failed, rest = found["failed"], found["rest"]
        assert len(failed[0]) == step
        assert (failed[0] + rest[0], failed[1] + rest[1]) == found["whole"]


class OwnIteration(DataLoader[Any]):
    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return reversed(list(super().__iter__()))


def test_a_loader_that_iterates_in_its_own_way_is_not_replaced():
    problem = "its class OwnIteration iterates in its own way, unlike torch's DataLoader"
    by_plan = poplar.HeteroBatchSampler(SAMPLES, PLAN, rank=0)
    for own in (OwnIteration(samples(), 2), OwnIteration(samples(), batch_sampler=by_plan)):
        with pytest.raises(TypeError, match=f"cannot rebuild the training loader: {problem}"):
            check_train_loader(own)
    with pytest.raises(TypeError, match=f"cannot split this loader evenly: {problem}"):
        even(OwnIteration(samples(), 2), 0, pool.WORLD, predicting=False)
