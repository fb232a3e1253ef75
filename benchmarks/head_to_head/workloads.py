"""The models that a task can train, with their data and losses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import encoder
import images
import llama
import mixture
import vgg
import vit
from text import load_text
from torch import Tensor, nn
from torch.utils.data import Dataset

Batch = dict[str, Tensor]
LossFunction = Callable[[nn.Module, Batch], Tensor]

TEXT_BYTES = 2_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """One kind of model."""

    sizes: Mapping[str, Any]
    """Configurations by name."""
    new: Callable[[Any, int], nn.Module]
    """A model of a configuration, for samples of this many bytes if they are text."""
    blocks: Callable[[Any], list[nn.Module]]
    """What sharding engines use as units."""
    data: Callable[[int, int], Dataset[Batch]]
    """The dataset for a context and a seed, the same on every rank."""
    loss: LossFunction
    """Mean over samples."""
    learning_rate: float = 1e-3
    """With which rounding stays small: cutting a batch in another way changes the losses of 40
    steps by less than 1e-4."""


def _text(context: int, seed: int) -> Dataset[Batch]:
    return load_text(context, limit=TEXT_BYTES)[0]


def _masked_text(context: int, seed: int) -> Dataset[Batch]:
    return encoder.MaskedBytes(load_text(context, limit=TEXT_BYTES)[0], seed)


def _images(context: int, seed: int) -> Dataset[Batch]:
    return images.Images(seed=seed)


def _new_mixture(config: mixture.MixtureConfig, context: int) -> nn.Module:
    return mixture.Mixture(replace(config, encoder=replace(config.encoder, context=context)))


WORKLOADS = {
    "llama": Workload(
        sizes=llama.SIZES,
        new=lambda config, context: llama.Llama(replace(config, context=context)),
        blocks=lambda model: list(model.blocks),
        data=_text,
        loss=llama.next_byte_loss,
    ),
    "encoder": Workload(
        sizes=encoder.SIZES,
        new=lambda config, context: encoder.Encoder(replace(config, context=context)),
        blocks=lambda model: list(model.blocks),
        data=_masked_text,
        loss=encoder.masked_byte_loss,
    ),
    "mixture": Workload(
        sizes=mixture.SIZES,
        new=_new_mixture,
        blocks=lambda model: list(model.blocks),
        data=_masked_text,
        loss=mixture.mixture_loss,
    ),
    "vgg": Workload(
        sizes=vgg.SIZES,
        new=lambda config, context: vgg.VGG(config),
        blocks=lambda model: [*model.groups, model.first, model.second],
        data=_images,
        loss=images.image_loss,
        learning_rate=3e-6,
    ),
    "vit": Workload(
        sizes=vit.SIZES,
        new=lambda config, context: vit.ViT(config),
        blocks=lambda model: list(model.blocks),
        data=_images,
        loss=images.image_loss,
    ),
}
