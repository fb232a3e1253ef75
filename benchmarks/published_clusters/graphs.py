"""The models of `examples/` with the sizes of the evaluations, as graphs for the programme search.

Models and batches are on the `meta` device, so that they take no memory. The language models get
the published vocabulary and predict every token.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from poplar.programmes.graph.graph import Graph
from poplar.programmes.run.exported_graph import export_loss
from published_clusters.models import BERT_TOKENS, WIKITEXT_2

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import encoder
import images
import mixture
import vgg
import vit

_TOKENS = 128


def graph(model: str, ranks: int, global_batch: int) -> Graph:
    """The loss of a model.

    Args:
        model: a name of `models.HAP_MODELS` or `models.HETEROG_MODELS`.
        ranks: on which HAP's number of experts depends.
        global_batch: samples.
    """
    with torch.device("meta"):
        made, loss, batch = _CASES[model](ranks, global_batch)
    return export_loss(made, loss, batch).graph


def module(model: str, ranks: int) -> nn.Module:
    """The model, without values."""
    with torch.device("meta"):
        return _CASES[model](ranks, 1)[0]


_Case = tuple[nn.Module, Callable[..., Any], dict[str, torch.Tensor]]


def _vgg(ranks: int, samples: int) -> _Case:
    return vgg.VGG(vgg.SIZES["vgg19"]), images.image_loss, _images(samples)


def _large_vgg(ranks: int, samples: int) -> _Case:
    model = vgg.VGG(vgg.SIZES["vgg19"])
    model.head = nn.Linear(vgg.SIZES["vgg19"].hidden, 1000)
    return model, images.image_loss, _images(samples, side=224)


def _vit(ranks: int, samples: int) -> _Case:
    return vit.ViT(vit.SIZES["base"]), images.image_loss, _images(samples)


def _bert(ranks: int, samples: int) -> _Case:
    config = replace(encoder.SIZES["base"], context=_TOKENS, vocabulary=WIKITEXT_2)
    model = encoder.Encoder(config)
    model.head.decoder = nn.Linear(config.width, WIKITEXT_2)
    return model, encoder.masked_byte_loss, _text(samples)


def _bert_large(ranks: int, samples: int) -> _Case:
    config = encoder.EncoderConfig(
        vocabulary=BERT_TOKENS, width=1024, layers=24, heads=16, context=_TOKENS
    )
    model = encoder.Encoder(config)
    model.head.decoder = nn.Linear(config.width, 2)
    return model, encoder.masked_byte_loss, _text(samples)


def _bert_moe(ranks: int, samples: int) -> _Case:
    inner = replace(encoder.SIZES["base"], context=_TOKENS, vocabulary=WIKITEXT_2)
    model = mixture.Mixture(mixture.MixtureConfig(encoder=inner, experts=2 * ranks))
    model.head.decoder = nn.Linear(inner.width, WIKITEXT_2)
    return model, mixture.mixture_loss, _text(samples)


def _images(samples: int, side: int = images.SIDE) -> dict[str, torch.Tensor]:
    return {
        "input": torch.empty(samples, images.CHANNELS, side, side),
        "target": torch.zeros(samples, dtype=torch.long),
    }


def _text(samples: int) -> dict[str, torch.Tensor]:
    tokens = torch.zeros(samples, _TOKENS, dtype=torch.long)
    return {"input": tokens, "places": tokens, "target": tokens}


_CASES: dict[str, Callable[[int, int], _Case]] = {
    "vgg19": _vgg,
    "vgg19-224": _large_vgg,
    "vit": _vit,
    "bert-base": _bert,
    "bert-moe": _bert_moe,
    "bert-large": _bert_large,
}
