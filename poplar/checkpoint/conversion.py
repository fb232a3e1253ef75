"""Writes the content of a checkpoint for programs that read no distributed checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from poplar.checkpoint.files.metadata_file import METADATA
from poplar.checkpoint.files.new_files import written_aside
from poplar.checkpoint.files.opened import WHOLE, OpenedCheckpoint
from poplar.checkpoint.save import SCALER, STATE
from poplar.checkpoint.saved_model import Writer
from poplar.checkpoint.saved_names import read_groups
from poplar.checkpoint.training_state import is_extra_state
from poplar.values.errors import DamagedCheckpoint
from poplar.zero.weights.weight_files import DTYPES

Format = Literal["torch", "safetensors"]
Dtype = Literal["model", "stored"]


def convert(
    folder: Path,
    output: Path,
    to: Format,
    *,
    dtype: Dtype = "model",
    weights_only: bool = True,
) -> None:
    """Convert a checkpoint, in one process.

    Args:
        folder: the checkpoint; its checksums are verified first.
        output: the file to write.
        to: "torch": a file for `torch.load`, with "model", "optimizer", "step", "scaler" and
            "state", which needs memory for all of them; "safetensors": a file with the weights,
            which needs memory for one of them.
        dtype: of the weights: as the "model" computes, or as "stored", trained ones in fp32.
        weights_only: as for `load_checkpoint`.

    Raises:
        FileExistsError: the output exists.
        DamagedCheckpoint, FileNotFoundError: as `load_checkpoint`.
        ValueError: it has a newer format, or contains an object of a class, see `weights_only`.
    """
    if output.exists():
        raise FileExistsError(f"{output} exists; choose another name, or remove it first")
    opened = OpenedCheckpoint(folder, weights_only=weights_only)
    opened.verify()
    (_to_torch if to == "torch" else _to_safetensors)(opened, output, dtype)


def _to_torch(opened: OpenedCheckpoint, output: Path, dtype: Dtype) -> None:
    values = values_of(opened, dtype)
    with written_aside(output) as file:
        torch.save(values, file)


def values_of(opened: OpenedCheckpoint, dtype: Dtype = "model") -> dict[str, Any]:
    """All values of a checkpoint, as `convert` writes them for "torch"."""
    return {
        "model": _model(opened, dtype),
        "optimizer": plain_optimizer_state(opened),
        "step": None if opened.manifest is None else opened.manifest.step,
        "scaler": opened.value(SCALER) if SCALER in opened.described else None,
        "state": {
            name.removeprefix(STATE): opened.value(name)
            for name in opened.described
            if name.startswith(STATE)
        },
    }


def _model(opened: OpenedCheckpoint, dtype: Dtype) -> dict[str, Any]:
    values: dict[str, Any] = {}
    whole = {n.removeprefix(WHOLE) for n in opened.described if n.startswith(f"{WHOLE}model.")}
    for name in sorted({*_names(opened), *whole}):
        own = str(opened.paths[name][1]) if name in opened.paths else name[len("model.") :]
        if is_extra_state(own):
            values[own] = opened.whole_value(("model", own))
        else:
            values[name.removeprefix("model.")] = _value(opened, name, dtype)
    return values


def plain_optimizer_state(opened: OpenedCheckpoint) -> dict[str, Any]:
    """The state dict of a plain torch optimizer with the same param groups."""
    groups = read_groups(opened)
    numbers = {
        name: n for n, name in enumerate(name for group in groups for name in group["params"])
    }
    state: dict[int, dict[str, Any]] = {}
    for name, path in opened.paths.items():
        if len(path) == 4 and path[:2] == ("optim", "state"):
            if path[2] not in numbers:
                raise DamagedCheckpoint(
                    opened.folder / METADATA, f"{path[2]!r} has state, but is in no param group"
                )
            value = _value(opened, name, "stored")
            state.setdefault(numbers[str(path[2])], {})[str(path[3])] = value
    packed = [{**group, "params": [numbers[name] for name in group["params"]]} for group in groups]
    return {"state": state, "param_groups": packed}


def _to_safetensors(opened: OpenedCheckpoint, output: Path, dtype: Dtype) -> None:
    tied = _tied(opened)
    tensors: list[tuple[str, Tensor]] = []
    for name in _names(opened):
        found = opened.tensor(name)
        written = None if found is None else _dtype(opened, name, found.properties.dtype, dtype)
        if found is None or written not in DTYPES:
            kind = "not a tensor" if found is None else written
            raise TypeError(
                f"{opened.folder}: {name!r} is {kind}, which safetensors cannot store; convert to "
                "torch"
            )
        if name not in tied:
            like = torch.empty(found.size, dtype=written, device="meta")
            tensors.append((name.removeprefix("model."), like))
    short = {a.removeprefix("model."): b.removeprefix("model.") for a, b in tied.items()}
    writer = Writer(output, tensors, short)
    try:
        for name, _ in tensors:
            writer.write(name, _value(opened, f"model.{name}", dtype))
        writer.finish()
        writer.publish()
    finally:
        writer.discard()


def _names(opened: OpenedCheckpoint) -> list[str]:
    return sorted(name for name in opened.described if name.startswith("model."))


def _tied(opened: OpenedCheckpoint) -> Mapping[str, str]:
    """Names with the same place in the files as an earlier one."""
    places: dict[str, list[Any]] = {}
    for index, place in opened.metadata.storage_data.items():
        entry = (place.relative_path, place.offset)
        places.setdefault(index.fqn, []).append(entry)
    first: dict[Any, str] = {}
    tied = {}
    for name in _names(opened):
        stored = first.setdefault(tuple(sorted(places.get(name, []))) or name, name)
        if stored != name:
            tied[name] = stored
    return tied


def _dtype(opened: OpenedCheckpoint, name: str, stored: torch.dtype, dtype: Dtype) -> torch.dtype:
    """That in which a weight is written, given that in which it is stored."""
    if dtype == "stored" or opened.manifest is None:
        return stored
    computing = opened.manifest.computes_in.get(name.removeprefix("model."))
    found: torch.dtype = stored if computing is None else getattr(torch, computing)
    return found


def _value(opened: OpenedCheckpoint, name: str, dtype: Dtype) -> Any:
    found = opened.tensor(name)
    if found is None:
        return opened.value(name)
    written = _dtype(opened, name, found.properties.dtype, dtype)
    value = torch.empty(found.size, dtype=written, device="cpu")
    opened.read_into({name: value})
    return value
