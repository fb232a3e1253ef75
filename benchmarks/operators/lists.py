"""The parameter shapes of models: a 124M GPT and a 1.1B Llama."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

Shape = tuple[int, ...]


@dataclass(frozen=True)
class TensorList:
    """The shapes of a model's parameters."""

    name: str
    shapes: tuple[Shape, ...]

    @property
    def numel(self) -> int:
        """Elements of all tensors."""
        return sum(math.prod(shape) for shape in self.shapes)


def gpt(
    name: str, layers: int, width: int, vocabulary: int = 50_257, context: int = 1024
) -> TensorList:
    """A GPT-2: fused attention, biases everywhere, embeddings shared with the head."""
    block: Sequence[Shape] = (
        *((width,),) * 2,
        (width, 3 * width),
        (3 * width,),
        (width, width),
        (width,),
        *((width,),) * 2,
        (width, 4 * width),
        (4 * width,),
        (4 * width, width),
        (width,),
    )
    ends = ((width,), (width,))
    return TensorList(name, ((vocabulary, width), (context, width), *block * layers, *ends))


def llama(
    name: str, layers: int, width: int, hidden: int, keys: int, vocabulary: int = 32_000
) -> TensorList:
    """A Llama with grouped queries: no biases, a separate head."""
    block: Sequence[Shape] = (
        (width,),
        (width, width),
        (keys, width),
        (keys, width),
        (width, width),
        (width,),
        (hidden, width),
        (hidden, width),
        (width, hidden),
    )
    return TensorList(name, ((vocabulary, width), *block * layers, (width,), (vocabulary, width)))


LISTS = {
    "gpt-124m": gpt("gpt-124m", layers=12, width=768),
    "llama-1.1b": llama("llama-1.1b", layers=22, width=2048, hidden=5632, keys=256),
    "small": gpt("small", layers=2, width=64, vocabulary=1000, context=64),
}
