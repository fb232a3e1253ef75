"""Averaged weights under Lightning are saved and resumed as in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from subset import choose
from test_lightning_integration import (
    EVERY_RANK,
    GLOBAL_BATCH,
    Regression,
    data,
    environment,
    model,
    on_ranks,
    plan_of,
    trainer,
)

from poplar.integrations.lightning import to_lightning_checkpoint

STEPS, EPOCH = 8, 3


class SavesEpoch(pl.Callback):
    """Saves after the last step of the first epoch."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == EPOCH:
            trainer.save_checkpoint(self.path)


def average() -> EMAWeightAveraging:
    return EMAWeightAveraging(decay=0.5)


def weights(module: Regression) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def train_and_resume(folder: Path, run_of: Any, batch_size: int) -> dict[str, Any]:
    """What is trained, resumed and tested with averages; also by the Trainer that has trained."""

    def fit(run: Any, checkpoint: Path | None = None) -> tuple[Regression, list[float]]:
        module = model(total=STEPS)
        loader = data(EPOCH * GLOBAL_BATCH, batch_size=batch_size)
        run.fit(module, loader, ckpt_path=checkpoint)
        return module, module.losses

    def tested(run: Any, module: Regression) -> float:
        loader = data(16, batch_size=batch_size)
        return run.test(module, loader, folder / "average.ckpt", verbose=False)[0]["test_loss"]

    run = run_of(callbacks=[average(), SavesEpoch(folder / "average.ckpt")])
    module, losses = fit(run)
    found: dict[str, Any] = {"average": weights(module), "losses": losses}
    found["tested by the same"] = tested(run, module)
    found["tested"] = tested(run_of(), model())
    resumed, rest = fit(run_of(callbacks=[average()]), folder / "average.ckpt")
    found["resumed"] = weights(resumed)
    assert rest == pytest.approx(losses[EPOCH:], rel=1e-5)

    plain, _ = fit(run_of(callbacks=[SavesEpoch(folder / "plain.ckpt")]))
    found["plain"] = weights(plain)
    begun, _ = fit(run_of(callbacks=[average()]), folder / "plain.ckpt")
    found["begun later"] = weights(begun)
    return found


def on_a_rank(folder: Path, stage: int) -> dict[str, Any]:
    plan = plan_of(stage, EVERY_RANK)
    with environment():
        return train_and_resume(
            folder, lambda **options: on_ranks(folder, plan, max_steps=STEPS, **options), 2
        )


@pytest.mark.parametrize("stage", choose(quick=(2,), full=(0, 1, 2)))
def test_averages_are_saved_resumed_and_tested_as_in_one_process(ranks, tmp_path, stage):
    alone, together = tmp_path / "alone", tmp_path / "together"
    expected = train_and_resume(
        alone, lambda **options: trainer(alone, devices=1, max_steps=STEPS, **options), GLOBAL_BATCH
    )
    assert not torch.equal(expected["average"]["head.weight"], expected["plain"]["head.weight"])
    for found in ranks.run(on_a_rank, together, stage):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)

    to_lightning_checkpoint(together / "average.ckpt", together / "one.ckpt")
    saved = torch.load(together / "one.ckpt")
    reference = torch.load(alone / "average.ckpt")
    for name in ("state_dict", "current_model_state", "averaging_state"):
        found, expected = dict(saved[name]), dict(reference[name])
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
