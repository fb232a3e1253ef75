"""Names of parameters as torch's `get_state_dict` gives them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")
"""Parts of names that torch.compile and activation checkpointing add, and that torch removes."""


def canonical(name: str) -> str:
    """A parameter's name without what wrappers add to it."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def names_of(model: nn.Module, groups: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """The name of every parameter, by param group."""
    names = {id(parameter): canonical(name) for name, parameter in model.named_parameters()}
    return [[names[id(parameter)] for parameter in group["params"]] for group in groups]
