"""`PoplarTrainer` weights passes by what the loss of the model is a mean over, or as a sum."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from language_models import model_of
from launched import PLANS, SHARES, as_launched, fresh_state, three_ranks
from ranks import Pool
from torch.utils.data import Dataset
from trainers import Sentences, arguments, logged, padded
from transformers import (
    Trainer,
    Wav2Vec2Config,
    Wav2Vec2ForCTC,
)

from poplar.integrations.transformers import PoplarArguments, PoplarTrainer
from poplar.integrations.transformers.what_counts import WhatCounts

STEPS = 4


@pytest.fixture(scope="module")
def three() -> Iterator[Pool]:
    yield from three_ranks()


class Utterances(Dataset[dict[str, list[Any]]]):
    """Sound of one length, with transcripts of `labels` to 9 labels."""

    def __init__(self, labels: int = 1) -> None:
        generator = torch.Generator().manual_seed(1)
        self.samples = []
        for _ in range(36):
            count = int(torch.randint(labels, 10, (1,), generator=generator))
            sound = torch.randn(200, generator=generator).tolist()
            words = torch.randint(1, 12, (count,), generator=generator).tolist()
            self.samples.append({"input_values": sound, "labels": words})

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, at: int) -> dict[str, list[Any]]:
        return self.samples[at]


def with_padded_labels(samples: list[dict[str, list[Any]]]) -> dict[str, torch.Tensor]:
    longest = max(len(sample["labels"]) for sample in samples)
    labels = [s["labels"] + [-100] * (longest - len(s["labels"])) for s in samples]
    sound = [sample["input_values"] for sample in samples]
    return {"input_values": torch.tensor(sound), "labels": torch.tensor(labels)}


def recognizer(reduction: str) -> Wav2Vec2ForCTC:
    """Takes `num_items_in_batch`, but does not use it."""
    torch.manual_seed(0)
    dropouts = ("hidden_dropout", "activation_dropout", "attention_dropout", "final_dropout")
    config = Wav2Vec2Config(
        **dict.fromkeys((*dropouts, "layerdrop", "feat_proj_dropout"), 0.0),
        apply_spec_augment=False,
        conv_dim=(8, 8),
        conv_kernel=(5, 3),
        conv_stride=(3, 2),
        ctc_loss_reduction=reduction,
        hidden_size=16,
        intermediate_size=24,
        num_attention_heads=2,
        num_conv_pos_embedding_groups=2,
        num_conv_pos_embeddings=4,
        num_hidden_layers=2,
        vocab_size=12,
    )
    return Wav2Vec2ForCTC(config)


MODELS = {"mean": recognizer, "sum": recognizer, "tagger": model_of}
NAMES = {"mean": "samples", "sum": "sum", "tagger": "items"}
"""What counts: the tagger returns a mean over labels, by its own count."""


def train(trainer_class: Any, name: str, folder: str, sizes: Any, **options: Any) -> Any:
    data: dict[str, Any] = {"train_dataset": Utterances(), "data_collator": with_padded_labels}
    if name == "tagger":
        data = {"train_dataset": Sentences(60), "data_collator": padded}
    args = arguments(folder, max_steps=STEPS, **sizes)
    trainer = trainer_class(MODELS[name](name), args, **data, **options)
    trainer.train()
    return trainer


def train_on_ranks(name: str, stage: int, folder: str) -> Any:
    as_launched()
    options = {"poplar": PoplarArguments(plan=PLANS[stage])}
    trainer = train(PoplarTrainer, name, folder, SHARES, **options)
    return logged(trainer), trainer.what_counts.name


@pytest.mark.parametrize("stage", PLANS)
@pytest.mark.parametrize("name", NAMES)
def test_losses_and_gradients_are_those_of_the_whole_batch(three, tmp_path, name, stage):
    fresh_state()
    alone = logged(train(Trainer, name, str(tmp_path), {}))
    for here, counted in three.run(train_on_ranks, name, stage, str(tmp_path)):
        torch.testing.assert_close(torch.tensor(here), torch.tensor(alone), rtol=1e-4, atol=1e-5)
        assert counted == NAMES[name]


class CountsLabels(PoplarTrainer):
    def loss_weight(self, inputs: Any) -> float:
        return float(inputs["labels"].ne(-100).sum())


class CountsSamples(PoplarTrainer):
    def loss_weight(self, inputs: Any) -> float:
        return float(len(inputs["labels"]))


def warnings_of(trainer_class: Any, name: str, folder: str) -> list[str]:
    as_launched()
    messages: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    logger, listener = logging.getLogger(WhatCounts.__module__), Listener()
    logger.addHandler(listener)
    try:
        options = {"poplar": PoplarArguments(plan=PLANS[0])}
        train(trainer_class, name, folder, SHARES, **options)
    finally:
        logger.removeHandler(listener)
    return messages


def test_a_wrong_loss_weight_of_the_user_warns(three, tmp_path):
    for trainer_class, name, text in (
        (CountsLabels, "mean", "a mean over samples"),
        (CountsSamples, "sum", "a sum over samples"),
    ):
        (message,), *others = three.run(warnings_of, trainer_class, name, str(tmp_path))
        assert f"{text}, but loss_weight(inputs) of the trainer" in message
        assert others == [[], []]
    assert three.run(warnings_of, CountsSamples, "mean", str(tmp_path)) == [[], [], []]


class NotFiniteAtFirst(PoplarTrainer):
    def compute_loss(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(model, *args, **kwargs)
        return loss if model.training or self.state.global_step else loss * float("nan")


def name_after_a_loss_that_is_not_finite(folder: str) -> str:
    as_launched()
    options = {"poplar": PoplarArguments(plan=PLANS[0])}
    return train(NotFiniteAtFirst, "mean", folder, SHARES, **options).what_counts.name


def name_after_a_batch_without_labels(folder: str) -> str:
    as_launched()
    data = Sentences(60)
    for sample in data.samples[:11]:
        sample["labels"] = [-100] * len(sample["labels"])
    args = arguments(folder, max_steps=STEPS, train_sampling_strategy="sequential", **SHARES)
    options = {"train_dataset": data, "data_collator": padded}
    plan = PoplarArguments(plan=PLANS[0])
    trainer = PoplarTrainer(model_of("llama"), args, poplar=plan, **options)
    trainer.train()
    return trainer.what_counts.name


def test_a_loss_that_tells_nothing_is_looked_at_again(three, tmp_path):
    assert set(three.run(name_after_a_loss_that_is_not_finite, str(tmp_path))) == {"samples"}
    assert set(three.run(name_after_a_batch_without_labels, str(tmp_path))) == {"items"}


class OnlyInTraining(PoplarTrainer):
    def compute_loss(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        assert model.training
        return super().compute_loss(model, *args, **kwargs)


def test_a_loss_that_cannot_be_looked_at_warns(three, tmp_path):
    (message,), *others = three.run(warnings_of, OnlyInTraining, "mean", str(tmp_path))
    assert others == [[], []]
    assert "override loss_weight(inputs)" in message
