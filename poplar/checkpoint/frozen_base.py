"""The frozen base of a model with adapters, which is not saved unless the whole model is asked for.

It is what the optimizer does not train, without the buffers of plain modules, such as statistics,
and without adapters that are frozen: the pretrained model does not have their values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from poplar.values.canonical_name import canonical
from poplar.values.formatting import format_names
from poplar.zero.absent_parameter import classes_of
from poplar.zero.engine import Engine
from poplar.zero.opaque_parameter import is_opaque, opaque_tensors


def saves_base(model: nn.Module, frozen: bool | None) -> bool:
    """Whether frozen values are saved: as asked for, and by default if there are no adapters.

    A model with adapters is one of PEFT, or has quantised parameters.
    """
    if frozen is not None:
        return frozen
    return not (getattr(model, "peft_config", None) or opaque_tensors(model))


def base_of(engine: Engine, state: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a state dict with variables that belong to the base."""
    opaque = set(map(id, opaque_tensors(engine.model).values()))
    kept = {id(p) for flat in engine.trained for p in flat.parameters}
    for module in engine.model.modules():
        buffers = list(module.buffers(recurse=False))
        if not any(id(own) in opaque for own in (*module.parameters(recurse=False), *buffers)):
            kept.update(map(id, buffers))
        kept.update(map(id, _adapters_of(module)))
    return {
        name: value
        for name, value in state.items()
        if id(value) not in kept and name.rpartition(".")[2] != "_extra_state"
    }


def _adapters_of(module: nn.Module) -> Iterator[Tensor]:
    """The tensors of a layer of PEFT, or of its prompts, that are not those of the base."""
    names = (*getattr(module, "adapter_layer_names", ()), *getattr(module, "other_param_names", ()))
    for name in (*names, "prompt_encoder"):
        try:
            found = attrgetter(name)(module)
        except AttributeError:  # a class names what only some of its layers have
            continue
        if isinstance(found, Tensor):
            yield found
        elif isinstance(found, nn.Module):
            yield from found.parameters()
            yield from found.buffers()


def description_of(model: nn.Module, base: Mapping[str, Any]) -> dict[str, str]:
    """By parameter and buffer of a base, its shape and what kind of values it has.

    Plain parameters have the dtype in which the ranks compute, so it does not count.
    """
    tensors = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    return {
        canonical(name): f"{tuple(value.shape)} {_kind(value)}"
        for name, value in base.items()
        if id(value) in tensors
    }


def check_base(folder: Path, saved: Mapping[str, str], own: Mapping[str, str]) -> None:
    """Check that adapters were trained on a base like this one.

    Args:
        saved: the description of the base that it was saved without.

    Raises:
        ValueError: there are other names, shapes or dtypes.
    """
    if saved.keys() != own.keys():
        raise ValueError(
            f"{folder} has adapters of another base: it lacks "
            f"{format_names(sorted(own.keys() - saved.keys()))} and has "
            f"{format_names(sorted(saved.keys() - own.keys()))}"
        )
    for name, there in saved.items():
        if there != own[name]:
            raise ValueError(
                f"{folder} has adapters of another base: {name!r} was {there} when they were "
                f"saved, but is {own[name]} here; load the same base, quantised in the same way"
            )


def _kind(tensor: Tensor) -> str:
    if isinstance(tensor, nn.Parameter) and is_opaque(tensor):
        return f"{tensor.dtype} {classes_of(tensor)[0].__name__}"
    return "floating point" if tensor.is_floating_point() else str(tensor.dtype)
