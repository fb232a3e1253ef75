"""Lightning's checkpoints as folders of `poplar.save_checkpoint`, which no rank gathers.

A folder has the training state of all ranks, and Lightning's own values (loops, callbacks,
schedulers) as `state["lightning"]`. A checkpoint with weights only is a file, as Lightning's.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from poplar.checkpoint.conversion import values_of
from poplar.checkpoint.files.new_files import written_aside
from poplar.checkpoint.files.opened import OpenedCheckpoint
from poplar.checkpoint.frozen_base import check_base, description_of
from poplar.checkpoint.load import load_checkpoint
from poplar.checkpoint.save import save_now
from poplar.optimizer import HeteroZeroOptimizer
from poplar.values.canonical_name import canonical
from poplar.values.formatting import format_names

LIGHTNING = "lightning"
BASE = "poplar_base"
"""Entry of adapters that were saved alone: `Manifest.base`, which describes the rest."""


def save_folder(folder: Path, optimizer: HeteroZeroOptimizer, values: dict[str, Any]) -> None:
    """Save the training state and Lightning's values. Collective.

    Args:
        folder: a checkpoint there is replaced once the new one is complete.
        optimizer: of the model.
        values: Lightning's checkpoint, equal on all ranks.
    """
    own = {**values}
    for elsewhere in ("optimizer_states", _entry_of_model(values)):  # in Poplar's own form
        own.pop(elsewhere, None)
    step = values.get("global_step")
    save_now(folder, optimizer, state={LIGHTNING: own}, step=step, replaces=True)


def load_folder(
    folder: Path, optimizer: HeteroZeroOptimizer, module: nn.Module, *, weights_only: bool = True
) -> dict[str, Any]:
    """Load the training state; returns Lightning's values, with the model's. Collective."""
    loaded = load_checkpoint(folder, optimizer, weights_only=weights_only)
    values = _lightning_values(folder, loaded)
    values[_entry_of_model(values)] = module.state_dict()
    return values


def read_folder(folder: Path, *, weights_only: bool = True) -> dict[str, Any]:
    """A folder as the checkpoint of a single process, on the CPU. Local."""
    opened = OpenedCheckpoint(folder, weights_only=weights_only)
    opened.verify()
    read = values_of(opened)
    values = _lightning_values(folder, read["state"])
    values |= {_entry_of_model(values): read["model"], "optimizer_states": [read["optimizer"]]}
    if opened.manifest is not None and opened.manifest.base:
        values[BASE] = dict(opened.manifest.base)
    return values


def load_adapters(module: nn.Module, checkpoint: Mapping[str, Any], source: Any) -> None:
    """Load adapters that were saved alone; the base of the module stays as it is.

    Args:
        source: where the checkpoint comes from, for messages.

    Raises:
        ValueError: they were trained on another base, or belong to another model.
    """
    base = checkpoint[BASE]
    tensors = (
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    )
    own = {name: tensor for name, tensor in tensors if canonical(name) in base}
    check_base(source, base, description_of(module, own))
    found = module.load_state_dict(checkpoint["state_dict"], strict=False)
    missing = [name for name in found.missing_keys if canonical(name) not in base]
    if missing or found.unexpected_keys:
        raise ValueError(
            f"{source} is of another model: it lacks {format_names(missing)} and has "
            f"{format_names(found.unexpected_keys)}"
        )


def to_lightning_checkpoint(folder: str | Path, file: str | Path) -> None:
    """Write a folder as a checkpoint file of a single process, with weights and optimizer state.

    `LightningModule.load_from_checkpoint(file)` and `Trainer.fit(ckpt_path=file)` with any strategy
    read it; adapters that were saved alone, with `strict=False`, or `strict_loading = False` of the
    module. A place in the middle of an epoch is left out, because a plain DataLoader cannot go
    there. One process needs memory for all of it.

    Raises:
        FileExistsError: the file exists.
        DamagedCheckpoint, FileNotFoundError, ValueError: as `poplar.load_checkpoint`; also a folder
            that was not saved by Lightning.
    """
    path = Path(file)
    if path.exists():
        raise FileExistsError(f"{path} exists; choose another name, or remove it first")
    values = read_folder(Path(folder))
    values["loops"]["fit_loop"]["state_dict"].pop("combined_loader", None)
    with written_aside(path) as output:
        torch.save(values, output)


def _entry_of_model(values: Mapping[str, Any]) -> str:
    """The entry for the model; `WeightAveraging` puts its average into `state_dict`."""
    return "current_model_state" if "averaging_state" in values else "state_dict"


def _lightning_values(folder: Path, values: dict[str, Any]) -> dict[str, Any]:
    if LIGHTNING not in values:
        raise ValueError(
            f"{folder} was not saved by a Lightning Trainer; load it with poplar.load_checkpoint"
        )
    found: dict[str, Any] = values[LIGHTNING]
    return found
