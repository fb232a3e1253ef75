"""Rows that the `nn.Linear` layers of a model compute for a sample."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from poplar.profiler.compilation import is_compiled


@contextmanager
def counting_rows(model: nn.Module) -> Iterator[dict[str, int]]:
    """Count the rows of each layer in the forwards inside: [..., inputs] has `numel / inputs`.

    Yields the counts by module name, complete at the end. Nothing is counted in a model with
    compiled modules, because hooks would change what is compiled.
    """
    rows: dict[str, int] = {}

    def counter(name: str) -> Callable[..., None]:
        def count(layer: nn.Linear, arguments: tuple[Any, ...]) -> None:
            if arguments and isinstance(arguments[0], Tensor):
                rows[name] = rows.get(name, 0) + arguments[0].numel() // layer.in_features

        return count

    handles = []
    if not any(map(is_compiled, model.modules())):
        layers = dict(model.named_modules())
        handles = [
            layer.register_forward_pre_hook(counter(name))
            for name, layer in layers.items()
            if type(layer) is nn.Linear
        ]
    try:
        yield rows
    finally:
        for handle in handles:
            handle.remove()
