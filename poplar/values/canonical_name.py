"""The names of parameters without what wrappers add to them, under which they are saved."""

from __future__ import annotations

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")
"""Parts of names that torch.compile and activation checkpointing add, and that torch removes."""


def canonical(name: str) -> str:
    """A parameter's name without what wrappers add to it."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name
