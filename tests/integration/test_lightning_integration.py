"""Lightning on unequal ranks trains as Lightning in one process on the same global batches."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import ranks as pool
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import poplar
from poplar.integrations.lightning import PoplarStrategy

SAMPLES, GLOBAL_BATCH, WIDTH = 46, 8, 32
STEPS = 20
UNEQUAL = ((2, 2), (0, 3), (0, 1), (0, 0))
"""Three unequal ranks, and one without samples."""
EVERY_RANK = ((3, 1), (0, 2), (0, 1), (0, 1))


class Regression(pl.LightningModule):
    """As users write it: nothing in it is for several ranks."""

    def __init__(self, lr: float = 1e-2):
        super().__init__()
        self.save_hyperparameters()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, 1)
        self.losses: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.mse_loss(self(batch[0]), batch[1])
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        self.log("largest", batch[0].max(), reduce_fx="max", on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", F.mse_loss(self(batch[0]), batch[1]))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", F.mse_loss(self(batch[0]), batch[1]))

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> Any:
        decayed = [p for p in self.parameters() if p.dim() > 1]
        others = [p for p in self.parameters() if p.dim() <= 1]
        groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=self.hparams.lr, weight_decay=0.1)
        total = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-2, total_steps=total + 1)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def data(samples: int = SAMPLES, **options: Any) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(samples, WIDTH, generator=generator)
    y = x[:, :1].sin() + x[:, 1:2]
    return DataLoader(TensorDataset(x, y), **{"batch_size": 2, "drop_last": True, **options})


def trainer(folder: Path, **options: Any) -> pl.Trainer:
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "max_steps": STEPS,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "default_root_dir": folder,
        "gradient_clip_val": 0.5,
    }
    return pl.Trainer(**{**defaults, **options})


def plan_of(stage: int, micro_batches: Any = UNEQUAL) -> poplar.Plan:
    shares = (0.4, 0.3, 0.2, 0.1)
    return poplar.Plan(
        stage=stage, global_batch=GLOBAL_BATCH, micro_batches=micro_batches, shares=shares
    )


def on_ranks(folder: Path, plan: Any, **options: Any) -> pl.Trainer:
    """A Trainer of one rank of the pool, as a launcher would have started it."""
    with mock.patch.dict(os.environ, LOCAL_RANK=str(pool.rank())):
        strategy = options.pop("strategy", None) or PoplarStrategy(plan=plan)
        return trainer(folder, strategy=strategy, devices=pool.size(), **options)


def environment() -> Any:
    return mock.patch.dict(os.environ, LOCAL_RANK=str(pool.rank()))


def model() -> Regression:
    torch.manual_seed(3)
    return Regression()


def in_one_process(folder: Path, **options: Any) -> tuple[pl.Trainer, Regression]:
    reference = trainer(folder, devices=1, **options)
    module = model()
    reference.fit(module, data(batch_size=GLOBAL_BATCH), data(45, batch_size=7, drop_last=False))
    return reference, module


def numbers(metrics: Any) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items()}


def train(folder: Path, plan: Any) -> dict[str, Any]:
    with environment():
        module, run = model(), on_ranks(folder, plan)
        run.fit(module, data(), data(45, batch_size=3, drop_last=False))
        return {"losses": module.losses, "logged": numbers(run.callback_metrics)}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_losses_and_logged_values_are_those_of_one_process(ranks, tmp_path, stage):
    reference, module = in_one_process(tmp_path)
    assert len(module.losses) == STEPS
    for found in ranks.run(train, tmp_path, plan_of(stage), timeout=120):
        torch.testing.assert_close(found["losses"], module.losses, rtol=1e-4, atol=1e-6)
        expected = numbers(reference.callback_metrics)
        assert found["logged"].keys() == expected.keys()
        for name, value in expected.items():
            assert found["logged"][name] == pytest.approx(value, rel=1e-4), name
