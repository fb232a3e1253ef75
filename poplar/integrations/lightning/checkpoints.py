"""Lightning's checkpoints as folders of `poplar.save_checkpoint`, which no rank gathers.

A folder has the training state of all ranks, and Lightning's own values (loops, callbacks,
schedulers) as `state["lightning"]`. A checkpoint with weights only is a file, as Lightning's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from poplar.checkpoint.conversion import values_of
from poplar.checkpoint.files.new_files import written_aside
from poplar.checkpoint.files.opened import OpenedCheckpoint
from poplar.checkpoint.load import load_checkpoint
from poplar.checkpoint.save import save_now
from poplar.optimizer import HeteroZeroOptimizer

LIGHTNING = "lightning"
_ELSEWHERE = ("state_dict", "optimizer_states")
"""Entries of Lightning's checkpoints that Poplar saves in its own form."""


def save_folder(folder: Path, optimizer: HeteroZeroOptimizer, values: dict[str, Any]) -> None:
    """Save the training state and Lightning's values. Collective.

    Args:
        folder: a checkpoint there is replaced once the new one is complete.
        optimizer: of the model.
        values: Lightning's checkpoint, equal on all ranks.
    """
    own = {name: value for name, value in values.items() if name not in _ELSEWHERE}
    step = values.get("global_step")
    save_now(folder, optimizer, state={LIGHTNING: own}, step=step, replaces=True)


def load_folder(
    folder: Path, optimizer: HeteroZeroOptimizer, *, weights_only: bool = True
) -> dict[str, Any]:
    """Load the training state; returns Lightning's values. Collective."""
    values = load_checkpoint(folder, optimizer, weights_only=weights_only)
    return _lightning_values(folder, values)


def read_folder(folder: Path, *, weights_only: bool = True) -> dict[str, Any]:
    """A folder as the checkpoint of a single process, on the CPU. Local."""
    opened = OpenedCheckpoint(folder, weights_only=weights_only)
    opened.verify()
    read = values_of(opened)
    values = _lightning_values(folder, read["state"])
    return {**values, "state_dict": read["model"], "optimizer_states": [read["optimizer"]]}


def to_lightning_checkpoint(folder: str | Path, file: str | Path) -> None:
    """Write a folder as a checkpoint file of a single process, with weights and optimizer state.

    `LightningModule.load_from_checkpoint(file)` and `Trainer.fit(ckpt_path=file)` with any strategy
    read it. A place in the middle of an epoch is left out, because a plain DataLoader cannot go
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


def _lightning_values(folder: Path, values: dict[str, Any]) -> dict[str, Any]:
    if LIGHTNING not in values:
        raise ValueError(
            f"{folder} was not saved by a Lightning Trainer; load it with poplar.load_checkpoint"
        )
    found: dict[str, Any] = values[LIGHTNING]
    return found
