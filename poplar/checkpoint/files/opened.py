"""An existing checkpoint: its names, shapes and values, and whether its files are as written.

It may come from a stranger: only regular files of the folder are opened, values are tensors and
plain types, and tensors have the dtype and shape that the metadata says.
"""

from __future__ import annotations

import errno
import io
import math
import os
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.planner_helpers import _create_read_items
from torch.distributed.checkpoint.utils import _create_file_view, find_state_dict_object
from torch.serialization import get_unsafe_globals_in_checkpoint

from poplar.checkpoint.files import manifest as manifest_file
from poplar.checkpoint.files.data_file import checksum, read_tensor
from poplar.checkpoint.files.manifest import Manifest, read_manifest
from poplar.checkpoint.files.metadata_file import METADATA, read_metadata
from poplar.checkpoint.files.new_files import aside_name
from poplar.checkpoint.files.save_job import complete_name
from poplar.checkpoint.files.stored_files import open_stored
from poplar.checkpoint.state_dicts.shard_tensor import ShardTensor
from poplar.comm import Control
from poplar.system.out_of_memory import is_out_of_memory
from poplar.system.storage import has_plain_elements
from poplar.values.errors import DamagedCheckpoint

PRIVATE = "poplar."
"""Names that only Poplar writes start with this."""
WHOLE = "poplar.whole."
"""Starts the names of mappings and lists of any content: extra states of modules, and values in
param groups. torch reads them in parts, with strings as keys and without empty mappings."""
WHOLE_PATH = ("poplar", "whole")
"""Starts their places in the nested form."""


class OpenedCheckpoint:
    """A checkpoint of Poplar, or of `torch.distributed.checkpoint`, which has no checksums.

    Args:
        folder: where it is, also if a save that would have replaced it was interrupted.
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
        self.folder = folder = complete_name(folder)
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
            self._check_checksums(self.manifest)
        self._weights_only = weights_only

    def _check_checksums(self, manifest: Manifest) -> None:
        """Check that all values are in files with checksums."""
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
            return self._read_value(MetadataIndex(name))
        dtype = described.properties.dtype
        value = torch.empty(described.size, dtype=dtype, device="cpu")
        self.read_into({name: value})
        return value

    def whole_value(self, path: tuple[str | int, ...]) -> Any:
        """A value of any content, by its place in the nested form.

        torch, and earlier versions of Poplar, store mappings and lists in parts alone.

        Raises:
            KeyError: nothing is stored there.
            DamagedCheckpoint, ValueError: as `value`.
        """
        name = ".".join(map(str, path))
        for stored in (WHOLE + name, name):
            if stored in self.described:
                return self.value(stored)
        parts = [other for other in self.described if other.startswith(f"{name}.")]
        if not parts:
            raise KeyError(name)
        root: dict[str, Any] = {}
        values = {part: self.value(part) for part in parts}
        try:
            for part, value in values.items():
                set_element(root, self.paths[part][len(path) - 1 :], value)
            return root[str(path[-1])]
        except Exception as error:  # paths that contradict each other
            raise DamagedCheckpoint(
                self.folder / METADATA, f"the nested form of {name!r} ({error!r})"
            ) from error

    def collect(self, control: Control, targets: Mapping[str, Tensor]) -> None:
        """Get what `read_into` will read and this rank cannot see: nothing here. Collective."""

    def read_into(self, targets: Mapping[str, Tensor]) -> None:
        """Read into the memory of tensors, by name, which may be `ShardTensor`s.

        Raises:
            DamagedCheckpoint: the checkpoint lacks elements of them, or a file does not contain
                what its metadata says.
        """
        items = [item for name, target in targets.items() for item in self._items(name, target)]
        try:
            items.sort(key=lambda item: self._place(item.storage_index)[:2])
            for name, of_file in groupby(items, lambda item: self._place(item.storage_index)[0]):
                with open_stored(self.folder, name) as file:
                    for item in of_file:
                        self._read_item(file, item, targets[item.dest_index.fqn])
        except DamagedCheckpoint:
            raise
        except Exception as error:  # torch raises many types for content that it cannot read
            no_byte_of_file = isinstance(error, OSError) and error.errno != errno.EINVAL
            if no_byte_of_file or is_out_of_memory(error):
                raise
            names = ", ".join(sorted(targets))[:200]
            raise DamagedCheckpoint(
                self.folder, f"its files do not have the elements of {names}: {error}"
            ) from error

    def _read_item(self, file: io.BufferedReader, item: ReadItem, target: Tensor) -> None:
        index, described = item.storage_index, self.described[item.storage_index.fqn]
        sizes = next(part.sizes for part in described.chunks if part.offsets == index.offset)
        dtype = described.properties.dtype
        file_name, offset, length = self._place(index)
        box = find_state_dict_object({item.dest_index.fqn: target}, item.dest_index)
        wanted = narrow_tensor_by_index(box.detach(), item.dest_offsets, item.lengths)
        is_same = (wanted.dtype, wanted.shape) == (dtype, sizes) and has_plain_elements(wanted)
        in_place = is_same and type(wanted) is Tensor and wanted.is_cpu and wanted.is_contiguous()
        stored = wanted if in_place else torch.empty(sizes, dtype=dtype, device="cpu")
        if not read_tensor(file, offset, stored):
            view: Any = _create_file_view(file, offset, length)
            stored = torch.load(view, map_location="cpu", weights_only=True)
        if (stored.dtype, stored.shape) != (dtype, sizes):
            raise TypeError(
                f"{stored.dtype} of shape {tuple(stored.shape)} at byte {offset} of {file_name}, "
                f"but {METADATA} describes {dtype} of {tuple(sizes)}"
            )
        if stored is not wanted:
            wanted.copy_(narrow_tensor_by_index(stored, item.storage_offsets, item.lengths))

    def _read_value(self, index: MetadataIndex) -> Any:
        file_name, offset, length = self._place(index)
        path = self.folder / file_name
        with open_stored(self.folder, file_name) as file:
            if offset + length > os.fstat(file.fileno()).st_size:
                raise DamagedCheckpoint(path, f"it has no byte {offset + length - 1}")
            file.seek(offset)
            item = io.BytesIO(file.read(length))
        try:
            return torch.load(item, map_location="cpu", weights_only=self._weights_only)
        except Exception as error:  # torch raises many types for content that it cannot read
            if classes := _refused_classes(item):
                raise ValueError(
                    f"{path}: the value at byte {offset} needs {classes}, which may run any "
                    "code. If you trust the checkpoint, register these classes with "
                    "torch.serialization.add_safe_globals, or load it with weights_only=False"
                ) from error
            raise DamagedCheckpoint(path, f"the item at byte {offset}: {error}") from error

    def _place(self, index: MetadataIndex) -> tuple[str, int, int]:
        """File, first byte and bytes of an item."""
        place = self.metadata.storage_data.get(index)
        if place is None:
            raise DamagedCheckpoint(self.folder / METADATA, f"it has no place for {index.fqn!r}")
        return place.relative_path, place.offset, place.length

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


def _refused_classes(item: Any) -> str:
    """What a pickled item names that is not allowed; empty if it is none or is damaged."""
    item.seek(0)
    try:
        return ", ".join(sorted(get_unsafe_globals_in_checkpoint(item)))
    except Exception:
        return ""
