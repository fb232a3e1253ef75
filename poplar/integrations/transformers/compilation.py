"""`torch_compile=True`: compiles the repeated blocks of a model, which are the units."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from accelerate.utils import DynamoBackend
from torch import nn

from poplar.zero.unit import find_blocks


@contextlib.contextmanager
def compile_blocks(accelerator: Any, model: nn.Module) -> Iterator[None]:
    """Compile the blocks in place, and keep Accelerate from compiling the model as a whole.

    A graph of the whole model would contain the communication of its units.
    """
    plugin = accelerator.state.dynamo_plugin
    backend = plugin.backend
    if backend == DynamoBackend.NO or getattr(model, "_is_accelerate_prepared", False):
        yield
        return
    for name in find_blocks(model) or [""]:
        model.get_submodule(name).compile(**plugin.to_kwargs())
    plugin.backend = DynamoBackend.NO
    try:
        yield
    finally:
        plugin.backend = backend
