"""An existing checkpoint: its names, shapes and values, and whether its files are as written."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.planner_helpers import _create_read_items

from poplar.checkpoint.files import manifest as manifest_file
from poplar.checkpoint.files.data_file import DataFiles, checksum
from poplar.checkpoint.files.manifest import Manifest, read_manifest
from poplar.checkpoint.files.metadata_file import METADATA, read_metadata
from poplar.checkpoint.files.save_job import aside_name
from poplar.checkpoint.state_dicts.shard_tensor import ShardTensor
from poplar.values.errors import DamagedCheckpoint

PRIVATE = "poplar."
"""Names that only Poplar writes start with this."""


class OpenedCheckpoint:
    """A checkpoint of Poplar, or of `torch.distributed.checkpoint`, which has no checksums.

    Args:
        folder: where it is.
        weights_only: values are tensors and plain types, as `torch.load` defines them. False: of
            any classes, which may run any code; for trusted checkpoints.

    Raises:
        FileNotFoundError: there is no checkpoint.
        DamagedCheckpoint: its metadata is not as written, or files are missing or truncated.
        ValueError: it has a newer format.
    """

    manifest: Manifest | None
    """None: the checkpoint was not written by Poplar."""

    def __init__(self, folder: Path, *, weights_only: bool = True) -> None:
        self.folder = folder
        has_manifest = os.path.lexists(folder / manifest_file.NAME)
        if not has_manifest and not os.path.lexists(folder / METADATA):
            raise FileNotFoundError(_not_a_checkpoint(folder))
        self.manifest = read_manifest(folder) if has_manifest else None
        self._verify(METADATA)
        self.metadata = read_metadata(folder)
        if self.manifest is None and any(n.startswith(PRIVATE) for n in self.described):
            raise DamagedCheckpoint(folder / manifest_file.NAME, "the file is missing")
        self.paths: Mapping[str, tuple[str | int, ...]] = self.metadata.planner_data or {}
        """By name, its place in the nested form."""
        if self.manifest is not None:
            self._check_against(self.manifest)
        self._files = DataFiles(folder, self.metadata, weights_only=weights_only)

    def _check_against(self, manifest: Manifest) -> None:
        """Check what Poplar writes: all values have a path, and are in files with checksums."""
        if not self.described.keys() <= self.paths.keys():
            raise DamagedCheckpoint(self.folder / METADATA, "it has no nested form of some values")
        for index, place in self.metadata.storage_data.items():
            if place.relative_path not in manifest.files:
                raise DamagedCheckpoint(
                    self.folder / METADATA,
                    f"it has another place for {index.fqn!r} than {manifest_file.NAME}",
                )

    @property
    def described(self) -> Mapping[str, Any]:
        """By name, the shape and dtype of a tensor; other values have none."""
        return self.metadata.state_dict_metadata

    def tensor(self, name: str) -> TensorStorageMetadata | None:
        """Shape, dtype and parts of a tensor; None if the name is absent or not a tensor."""
        found = self.described.get(name)
        return found if isinstance(found, TensorStorageMetadata) else None

    def verify(self, rank: int = 0, world_size: int = 1) -> None:
        """Compare the checksums of this rank's share of the files.

        Args:
            rank: this rank.
            world_size: ranks that share the work.

        Raises:
            DamagedCheckpoint: they differ; names the file.
        """
        if self.manifest is not None:
            for name in sorted(self.manifest.files)[rank::world_size]:
                self._verify(name)

    def _verify(self, name: str) -> None:
        expected = None if self.manifest is None else self.manifest.files.get(name)
        if expected is not None and checksum(self.folder, name) != expected:
            raise DamagedCheckpoint(self.folder / name, "its checksum differs: it has changed")

    def value(self, name: str) -> Any:
        """A value that is not sharded: a tensor, or plain types.

        Raises:
            DamagedCheckpoint: it is another tensor than described.
            ValueError: it contains an object of a class, and only weights may be loaded.
        """
        described = self.tensor(name)
        if described is None:
            return self._files.value(MetadataIndex(name))
        value = self.empty(name, described.properties.dtype)
        self.read_into({name: value})
        return value

    def empty(self, name: str, dtype: torch.dtype) -> Tensor:
        """Memory on the CPU for a tensor.

        Raises:
            ValueError: torch cannot allocate it.
        """
        size = self.described[name].size
        try:
            return torch.empty(size, dtype=dtype, device="cpu")
        except (RuntimeError, NotImplementedError) as error:
            reason = str(error).partition("\n")[0]
            raise ValueError(
                f"{self.folder}: no memory for {name!r}, {dtype} of shape {tuple(size)}: {reason}"
            ) from error

    def model_value(self, name: str) -> Any:
        """A value of the model that may be stored in parts: entries of mappings have own names.

        Raises:
            KeyError: nothing is stored under this name.
            DamagedCheckpoint, ValueError: as `value`.
        """
        name = f"model.{name}"
        if name in self.described:
            return self.value(name)
        parts = [other for other in self.described if other.startswith(f"{name}.")]
        if not parts:
            raise KeyError(name)
        root: dict[str, Any] = {}
        for part in parts:
            value = self.value(part)
            try:
                set_element(root, self.paths[part][2:], value)
            except Exception as error:  # paths that contradict each other
                raise DamagedCheckpoint(
                    self.folder / METADATA, f"the nested form of {name!r} ({error!r})"
                ) from error
        return root

    def read_into(self, targets: Mapping[str, Tensor]) -> None:
        """Read into the memory of tensors, by name, which may be `ShardTensor`s.

        Raises:
            DamagedCheckpoint: the checkpoint lacks elements of them, or a file does not contain
                what its metadata says.
        """
        items = [item for name, target in targets.items() for item in self._items(name, target)]
        if items:
            self._files.read(items, targets)

    def check_complete(self, targets: Mapping[str, Tensor]) -> None:
        """Check that no elements of these tensors are missing; nothing is read."""
        for name, target in targets.items():
            self._items(name, target)

    def _items(self, name: str, target: Tensor) -> list[ReadItem]:
        items: list[ReadItem] = _create_read_items(name, self.described[name], target)
        count = sum(math.prod(item.lengths) for item in items)
        local = target.local if isinstance(target, ShardTensor) else target
        if count != local.numel():
            raise DamagedCheckpoint(
                self.folder / METADATA,
                f"it has {count} of the {local.numel()} elements of {name!r} that were read",
            )
        return items


def _not_a_checkpoint(folder: Path) -> str:
    if not folder.exists():
        text = f"there is no checkpoint {folder}"
        if aside_name(folder).exists():
            text += f": saving it was interrupted, and {aside_name(folder).name} is incomplete"
        return text
    return f"{folder} is not a checkpoint: it has neither {manifest_file.NAME} nor {METADATA}"
