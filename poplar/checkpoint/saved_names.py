"""Compares the names, shapes and param groups of a checkpoint with those of a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from poplar.checkpoint.files.metadata_file import METADATA
from poplar.checkpoint.files.opened import WHOLE_PATH, OpenedCheckpoint
from poplar.checkpoint.training_state import TrainingParts
from poplar.values.canonical_name import canonical
from poplar.values.errors import DamagedCheckpoint
from poplar.values.formatting import format_names


def check_model(opened: OpenedCheckpoint, model: Mapping[str, Tensor]) -> dict[str, str]:
    """Check that a checkpoint has exactly the names and shapes of a model.

    Args:
        model: parameters and buffers, as `model_values` gives them. Of tied parameters, one name
            is enough.

    Returns:
        By name in the model, the name in the checkpoint.

    Raises:
        ValueError: names are missing or left over, or a shape differs.
    """
    saved = {
        name
        for name in opened.described
        if name.startswith("model.") and "_extra_state" not in name.split(".")
    }
    if not saved:
        found = sorted({name.partition(".")[0] for name in opened.described})
        raise ValueError(f"{opened.folder} has no names 'model.…'; its names start with {found}")
    by_value: dict[int, list[str]] = {}
    for name, value in model.items():
        by_value.setdefault(id(value), []).append(name)
    stored: dict[str, str] = {}
    for names in by_value.values():
        present = [f"model.{name}" for name in names if f"model.{name}" in saved]
        stored.update(dict.fromkeys(names, present[0]) if present else {})
    missing = sorted(model.keys() - stored.keys())
    unexpected = sorted(saved - {f"model.{name}" for name in model})
    if missing or unexpected:
        raise ValueError(
            f"{opened.folder} is of another model: it lacks {format_names(missing)} and has "
            f"{format_names(unexpected)}"
        )
    for name, value in model.items():
        described = opened.tensor(stored[name])
        if described is None or described.size != value.shape:
            shape = None if described is None else tuple(described.size)
            raise ValueError(
                f"{opened.folder} is of another model: {name!r} has shape {shape} there, but "
                f"{tuple(value.shape)} here"
            )
    return stored


def saved_optimizer_keys(
    opened: OpenedCheckpoint, parts: TrainingParts
) -> dict[str, dict[str, str]]:
    """By parameter and name of its state, the name in the checkpoint.

    Raises:
        ValueError: there is state of parameters that the optimizer does not have.
    """
    keys: dict[str, dict[str, str]] = {}
    for name, path in opened.paths.items():
        if len(path) == 4 and path[:2] == ("optim", "state"):
            keys.setdefault(str(path[2]), {})[str(path[3])] = name
    own = {canonical(name) for name, _ in parts.engine.model.named_parameters()}
    if unknown := sorted(keys.keys() - own):
        raise ValueError(f"{opened.folder} has optimizer state of {format_names(unknown)}")
    return keys


def read_groups(opened: OpenedCheckpoint) -> list[dict[str, Any]]:
    """The saved param groups; "params" are the names of their parameters.

    Raises:
        DamagedCheckpoint: they are not numbered from 0 on, or have no names.
    """
    groups: dict[str | int, dict[str, Any]] = {}
    places = {
        (path[2:] if path[:2] == WHOLE_PATH else path)[:4]: None for path in opened.paths.values()
    }
    for path in places:
        if len(path) == 4 and path[:2] == ("optim", "param_groups"):
            try:
                value = opened.whole_value(path)
            except KeyError as error:
                raise DamagedCheckpoint(opened.folder / METADATA, f"it lacks {error}") from error
            groups.setdefault(path[2], {"params": []})[str(path[3])] = value
    if groups.keys() != set(range(len(groups))):
        raise DamagedCheckpoint(opened.folder / METADATA, f"it numbers param groups {list(groups)}")
    for number, group in groups.items():
        names = group["params"]
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise DamagedCheckpoint(
                opened.folder / METADATA, f"param group {number} has no names of parameters"
            )
    return [groups[number] for number in range(len(groups))]
