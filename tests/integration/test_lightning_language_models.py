"""Language models of Hugging Face under Lightning, with losses that are means over tokens."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import ranks as pool
import torch
from language_models import WORDS, model_of
from subset import choose
from test_lightning_integration import EVERY_RANK, environment, plan_of, trainer
from torch import Tensor
from torch.utils.data import DataLoader
from torchmetrics import SumMetric

import poplar
from poplar.integrations.lightning import PoplarStrategy

STEPS, GLOBAL_BATCH, LENGTH = 20, 8, 12


class LanguageModel(pl.LightningModule):
    def __init__(self, kind: str):
        super().__init__()
        self.model = model_of(kind)
        self.seen = SumMetric()
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.model(**batch).loss
        self.log("loss", loss)
        self.seen.update(len(batch["labels"]))
        self.log("samples", self.seen, on_step=False, on_epoch=True)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def samples() -> list[dict[str, Tensor]]:
    """Sequences whose labels count in part, from two tokens to all."""
    generator = torch.Generator().manual_seed(2)
    found = []
    for _ in range(GLOBAL_BATCH * 4):
        tokens = torch.randint(WORDS, (LENGTH,), generator=generator)
        counted = int(torch.randint(2, LENGTH, (1,), generator=generator))
        labels = torch.where(torch.arange(LENGTH) < counted, tokens, -100)
        found.append({"input_ids": tokens, "labels": labels})
    return found


def shifted_tokens(batch: Any) -> int:
    return int((batch["labels"][:, 1:] != -100).sum())


def all_tokens(batch: Any) -> int:
    return int((batch["labels"] != -100).sum())


def train(folder: Path, kind: str, stage: int) -> dict[str, Any]:
    module = LanguageModel(kind)
    with environment():
        weight = all_tokens if kind == "bert" else shifted_tokens
        plan: poplar.Plan = plan_of(stage, EVERY_RANK)
        strategy = PoplarStrategy(plan=plan, weight=weight)
        run = trainer(folder, strategy=strategy, devices=pool.size(), max_steps=STEPS)
        run.fit(module, DataLoader(samples(), batch_size=2))
    return {"losses": module.losses, "samples": float(run.callback_metrics["samples"])}


@pytest.mark.every_combination
@pytest.mark.parametrize(
    ("kind", "stage"),
    choose(
        quick=(("llama", 1), ("llama", 3)),
        full=tuple((kind, stage) for kind in ("llama", "bert", "gpt2") for stage in range(4)),
    ),
)
def test_losses_over_tokens_are_those_of_one_process(ranks, tmp_path, kind, stage):
    """Where ranks have all parameters, the check of the first loss asks for other weights, too."""
    reference = LanguageModel(kind)
    alone = trainer(tmp_path, devices=1, max_steps=STEPS)
    alone.fit(reference, DataLoader(samples(), batch_size=GLOBAL_BATCH))
    for found in ranks.run(train, tmp_path, kind, stage):
        torch.testing.assert_close(found["losses"], reference.losses, rtol=1e-4, atol=1e-5)
        assert found["samples"] == float(alone.callback_metrics["samples"])


def warnings_without_a_weight(folder: Path) -> tuple[list[str], float]:
    """What the first steps warn of, and how many samples the metric has seen in them."""
    module = LanguageModel("llama")
    with environment(), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        strategy = PoplarStrategy(plan=plan_of(1, EVERY_RANK))
        run = trainer(folder, strategy=strategy, devices=pool.size(), max_steps=2)
        run.fit(module, DataLoader(samples(), batch_size=2))
    of_weights = [str(w.message) for w in warned if "weight=" in str(w.message)]
    return of_weights, float(run.callback_metrics["samples"])


def test_a_mean_over_tokens_without_its_weight_warns_once(ranks, tmp_path):
    (first, seen), *others = ranks.run(warnings_without_a_weight, tmp_path)
    assert len(first) == 1
    assert "pass weight=poplar.tokens() to PoplarStrategy" in first[0]
    assert seen == 2 * GLOBAL_BATCH
    assert others == [([], seen)] * 3
