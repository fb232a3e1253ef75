"""The models of both evaluations that the examples can express, as chains of layers.

Sizes are those of the public code (github.com/ylxdzsw/hap: config.py, models.py;
github.com/eval-submissions/HeteroG: GAT/prepare_graphdef_input.py). A test compares the numbers of
parameters with those of the models in `examples/`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from published_clusters.layer import Layer

WIKITEXT_2 = 33278
"""Words in the vocabulary of HAP's language models."""
BERT_TOKENS = 30522
_VGG_CHANNELS = ((64, 2), (128, 2), (256, 4), (512, 4), (512, 4))
_CAPACITY = 2.5
"""HAP's capacity factor of two experts per token, twice 1.25."""


def linear(
    name: str, fan_in: int, fan_out: int, *, rows: int = 1, written: float = 1.0, block: str = ""
) -> Layer:
    """A linear layer with bias; `written`: elements written per output."""
    return Layer(
        name=name,
        parameters=fan_in * fan_out + fan_out,
        flops=2.0 * rows * fan_in * fan_out,
        produced=written * rows * fan_out,
        inputs=rows * fan_in,
        outputs=rows * fan_out,
        splits=True,
        sums=True,
        rows=rows,
        fan_in=fan_in,
        fan_out=fan_out,
        block=block,
    )


def vgg19(side: int, classes: int) -> tuple[Layer, ...]:
    """VGG19 for square images."""
    layers, before = [], 3
    for group, (channels, count) in enumerate(_VGG_CHANNELS):
        for number in range(count):
            pixels, pools = side * side, number == count - 1
            layers.append(
                Layer(
                    name=f"convolution {group}.{number}",
                    parameters=9 * before * channels + channels,
                    flops=2.0 * 9 * before * channels * pixels,
                    produced=2.0 * channels * pixels,
                    inputs=before * pixels,
                    outputs=channels * pixels / (4 if pools else 1),
                    splits=True,
                    sums=True,
                )
            )
            before = channels
        side = max(1, side // 2)
    layers.append(linear("first", 512 * 49, 4096, written=2.0))
    layers.append(linear("second", 4096, 4096, written=2.0))
    layers.append(linear("head", 4096, classes))
    return tuple(layers)


def _attention(block: str, width: int, tokens: int) -> Iterator[Layer]:
    """Queries, keys, values and attention; then the output projection, with norm and residual."""
    elements = width * tokens
    yield Layer(
        name=f"{block} attention",
        parameters=3 * width * (width + 1) + 2 * width,
        flops=6.0 * tokens * width * width + 4.0 * tokens * tokens * width,
        produced=5.0 * elements,
        inputs=elements,
        outputs=elements,
        splits=True,
        block=block,
    )
    yield linear(f"{block} projection", width, width, rows=tokens, written=2.0, block=block)


def _feed_forward(block: str, width: int, tokens: int) -> Iterator[Layer]:
    up = linear(f"{block} up", width, 4 * width, rows=tokens, written=2.25, block=block)
    yield up
    yield linear(f"{block} down", 4 * width, width, rows=tokens, written=2.0, block=block)


def _experts(block: str, width: int, tokens: int, experts: int) -> Layer:
    """Two matrices per expert, a gate, and a norm. The capacity limits the tokens of an expert."""
    places = math.ceil(_CAPACITY * tokens / experts)
    routed = experts * places
    return Layer(
        name=f"{block} experts",
        parameters=experts * 8 * width * width + experts * width,
        flops=16.0 * routed * width * width
        + 2.0 * tokens * width * experts
        + 4.0 * tokens * routed * width,
        produced=10.0 * routed * width + 3.0 * tokens * routed,
        inputs=width * tokens,
        outputs=width * tokens,
        experts=routed * width,
        expert_count=experts,
    )


def vit(layers: int = 12, width: int = 768, tokens: int = 64) -> tuple[Layer, ...]:
    """HAP's vision transformer on images of 32 x 32 pixels, patches of 4 x 4."""
    parts = [_embedding(48 * width + width + tokens * width, 2.0 * 48 * width, width, tokens)]
    for number in range(layers):
        parts += _attention(f"block {number}", width, tokens)
        parts += _feed_forward(f"block {number}", width, tokens)
    return (*parts, linear("head", width, 10))


def bert(layers: int, width: int, tokens: int, vocabulary: int, outputs: int) -> tuple[Layer, ...]:
    """An encoder with a linear layer at every position."""
    parts = [_embedding(vocabulary * width, 0.0, width, tokens)]
    for number in range(layers):
        parts += _attention(f"block {number}", width, tokens)
        parts += _feed_forward(f"block {number}", width, tokens)
    return (*parts, linear("head", width, outputs, rows=tokens, written=3.0))


def bert_moe(
    experts: int, layers: int = 12, width: int = 768, tokens: int = 128
) -> tuple[Layer, ...]:
    """HAP's BERT in which every second block has experts."""
    parts = [_embedding(WIKITEXT_2 * width, 0.0, width, tokens)]
    for number in range(layers):
        parts += _attention(f"block {number}", width, tokens)
        if number % 2:
            parts.append(_experts(f"block {number}", width, tokens, experts))
        else:
            parts += _feed_forward(f"block {number}", width, tokens)
    return (*parts, linear("head", width, WIKITEXT_2, rows=tokens, written=3.0))


def _embedding(parameters: int, flops_per_token: float, width: int, tokens: int) -> Layer:
    elements = width * tokens
    return Layer(
        name="embedding",
        parameters=parameters,
        flops=flops_per_token * tokens,
        produced=2.0 * elements,
        inputs=tokens,
        outputs=elements,
    )


Model = Callable[[int], tuple[Layer, ...]]
"""The layers for a number of ranks, on which HAP's number of experts depends."""

HAP_MODELS: dict[str, Model] = {
    "vgg19": lambda ranks: vgg19(side=32, classes=10),
    "vit": lambda ranks: vit(),
    "bert-base": lambda ranks: bert(12, 768, 128, WIKITEXT_2, WIKITEXT_2),
    "bert-moe": lambda ranks: bert_moe(experts=2 * ranks),
}
HETEROG_MODELS: dict[str, Model] = {
    "vgg19-224": lambda ranks: vgg19(side=224, classes=1000),
    "bert-large": lambda ranks: bert(24, 1024, 128, BERT_TOKENS, 2),
}
