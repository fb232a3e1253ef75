"""A loss that is no mean over samples is noticed; one that is never warns."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import unequal_passes as training
from torch import Tensor, nn

from poplar.tuning import autotune
from poplar.zero.checks.loss_mean import wrong_weight

SEEDS = range(10)


def ragged(seed: int, samples: int = 6) -> dict[str, Tensor]:
    """Token sequences whose labels have different lengths."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randint(0, training.VOCABULARY, (samples, training.LENGTH), generator=generator)
    counts = torch.randint(1, training.LENGTH, (samples, 1), generator=generator)
    counts[0], counts[1] = 2, training.LENGTH
    labels = inputs.masked_fill(torch.arange(training.LENGTH) >= counts, training.IGNORED)
    return {"input_ids": inputs, "labels": labels}


def mean_of_sample_means(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The mean over samples of each one's mean over tokens: a mean over samples."""
    single = [
        {key: value[i : i + 1] for key, value in batch.items()} for i in range(len(batch["labels"]))
    ]
    return torch.stack([training.loss_fn(model, one) for one in single]).mean()


@pytest.mark.parametrize(
    ("name", "expression"),
    [
        ("llama", "weight=poplar.tokens() here"),
        ("gpt2", "weight=poplar.tokens() here"),
        ("bert", "weight=poplar.tokens(shift=False) here"),
        ("tagger", "weight=poplar.tokens(shift=False) here"),
    ],
)
def test_language_models_get_the_line_to_add(name, expression):
    model = training.build(name)
    found = wrong_weight(training.loss_fn, model, ragged(seed=1))
    assert found is not None
    assert found.startswith("the loss is a mean over tokens")
    assert expression in found


def test_labels_with_another_name_are_named():
    def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return training.loss_fn(model, {"input_ids": batch[0], "labels": batch[1]})

    found = wrong_weight(loss_fn, training.build("tagger"), tuple(ragged(seed=1).values()))
    assert "weight=poplar.tokens(shift=False, labels=1) here" in found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_means_over_samples_never_warn(dtype):
    for seed in SEEDS:
        model = training.build("tagger").to(dtype)
        assert wrong_weight(mean_of_sample_means, model, ragged(seed)) is None


def test_means_over_samples_under_autocast_never_warn():
    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return mean_of_sample_means(model, batch)

    for seed in SEEDS:
        assert wrong_weight(loss_fn, training.build("tagger"), ragged(seed)) is None


def images(seed: int, samples: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randn(samples, 3, 8, 8, generator=generator)
    return {"pixels": pixels, "labels": torch.randint(0, 5, (samples,), generator=generator)}


def classifier() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Flatten(),
        nn.Linear(144, 5),
    )


def cross_entropy(model: nn.Module, batch: dict[str, Tensor], reduction: str = "mean") -> Tensor:
    return nn.functional.cross_entropy(model(batch["pixels"]), batch["labels"], reduction=reduction)


@pytest.mark.parametrize("samples", [1, 2, 3, 7, 32])
def test_classifiers_with_dropout_never_warn(samples):
    for seed in SEEDS:
        assert wrong_weight(cross_entropy, classifier(), images(seed, samples)) is None


def test_losses_of_any_sign_never_warn():
    """Their sum may be close to 0, where relative errors mean nothing."""

    def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return model(batch["pixels"]).mean()

    for seed in SEEDS:
        assert wrong_weight(loss_fn, classifier(), images(seed, 8)) is None


def test_sums_are_told_from_means():
    def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return cross_entropy(model, batch, "sum")

    assert "pass loss='sum'" in wrong_weight(loss_fn, classifier(), images(0, 6))


def test_coupled_samples_are_told():
    def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        logits = model(batch["pixels"])
        return (logits - logits.mean(0)).square().mean()

    found = wrong_weight(loss_fn, classifier(), images(0, 6))
    assert "not the mean of its samples' losses" in found


def test_random_losses_and_losses_that_raise_tell_nothing():
    def random(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return cross_entropy(model, batch) * torch.rand(())

    def only_in_training(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        assert model.training
        return cross_entropy(model, batch, "sum")

    for loss_fn in (random, only_in_training):
        assert wrong_weight(loss_fn, classifier(), images(0, 6)) is None


def test_nothing_changes_in_model_and_random_state():
    model, state = classifier(), torch.get_rng_state()
    model[3].eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wrong_weight(cross_entropy, model, images(0, 6))
    assert torch.equal(torch.get_rng_state(), state)
    assert [m.training for m in model] == [True, True, True, False, True, True]
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    assert all(p.grad is None for p in model.parameters())
    assert not model._forward_pre_hooks


def test_autotune_warns_on_the_first_rank_of_models_with_values():
    model, batch = training.build("tagger"), ragged(seed=1)
    request = SimpleNamespace(loss_fn=training.loss_fn, model=model, example=batch)

    def warnings_of(rank: int, is_on_meta: bool) -> list[str]:
        group = SimpleNamespace(rank=rank)
        session = SimpleNamespace(request=request, group=group, is_on_meta=is_on_meta)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            autotune._warn_of_wrong_weight(SimpleNamespace(session=session))
        return [str(warning.message) for warning in caught]

    assert "weight=poplar.tokens(shift=False)" in warnings_of(0, False)[0]
    assert warnings_of(1, False) == warnings_of(0, True) == []
