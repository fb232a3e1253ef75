"""An existing checkpoint: its names, shapes and values, and whether its files are as written."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.planner_helpers import _create_read_items
from torch.distributed.checkpoint.utils import find_state_dict_object

from poplar.checkpoint import manifest as manifest_file
from poplar.checkpoint.data_file import ItemReader, check_parts
from poplar.checkpoint.manifest import Manifest, Part, read_manifest
from poplar.checkpoint.save_job import METADATA, aside_name
from poplar.errors import DamagedCheckpoint

PRIVATE = "poplar."
"""Names that only Poplar writes start with this."""


class OpenedCheckpoint:
    """A checkpoint of Poplar, or of `torch.distributed.checkpoint`, which has no checksums.

    Args:
        folder: where it is.

    Raises:
        FileNotFoundError: there is no checkpoint.
        DamagedCheckpoint: its metadata is not as written, or files are missing or truncated.
        ValueError: it has a newer format.
    """

    manifest: Manifest | None
    """None: the checkpoint was not written by Poplar."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if not (folder / METADATA).exists() and not (folder / manifest_file.NAME).exists():
            raise FileNotFoundError(_not_a_checkpoint(folder))
        self.manifest = None
        if (folder / manifest_file.NAME).exists():
            self.manifest = read_manifest(folder)
            check_parts(folder / METADATA, self.manifest.files.get(METADATA, []))
        self.metadata = _read_metadata(folder / METADATA)
        if self.manifest is None and any(n.startswith(PRIVATE) for n in self.described):
            raise DamagedCheckpoint(folder / manifest_file.NAME, "the file is missing")
        self.paths: Mapping[str, tuple[str | int, ...]] = self.metadata.planner_data or {}
        """By name, its place in the nested form."""
        self._reader = ItemReader(folder)
        files = self.manifest.files if self.manifest is not None else {}
        self._parts = {(n, part.offset): part for n, parts in files.items() for part in parts}

    @property
    def described(self) -> Mapping[str, Any]:
        """By name, the shape and dtype of a tensor; other values have none."""
        return self.metadata.state_dict_metadata

    def tensor(self, name: str) -> TensorStorageMetadata | None:
        """Shape, dtype and parts of a tensor; None if the name is absent or not a tensor."""
        found = self.described.get(name)
        return found if isinstance(found, TensorStorageMetadata) else None

    def verify(self, rank: int = 0, world_size: int = 1) -> None:
        """Read the data files and compare their checksums, each rank its part of them.

        Raises:
            DamagedCheckpoint: they differ; names the file.
        """
        for name, parts in _share_of(self.manifest, rank, world_size).items():
            check_parts(self.folder / name, parts)

    def value(self, name: str) -> Any:
        """A value that is not a sharded tensor. It is unpickled: the source must be trusted.

        Raises:
            DamagedCheckpoint: its checksum differs.
        """
        described = self.tensor(name)
        offset = None if described is None else [0] * len(described.size)
        place = self._place(MetadataIndex(name, offset))
        if self.manifest is not None:
            part = self._parts[place.relative_path, place.offset]
            check_parts(self.folder / place.relative_path, [part])
        return self._reader.value(place.relative_path, place.offset, place.length)

    def model_value(self, name: str) -> Any:
        """A value of the model that may be stored in parts: entries of mappings have own names.

        Raises:
            KeyError: nothing is stored under this name.
        """
        name = f"model.{name}"
        if name in self.described:
            return self.value(name)
        parts = [other for other in self.described if other.startswith(f"{name}.")]
        if not parts:
            raise KeyError(name)
        root: dict[str, Any] = {}
        for part in parts:
            set_element(root, self.paths[part][2:], self.value(part))
        return root

    def read_into(self, targets: Iterable[tuple[str, Tensor]]) -> None:
        """Read tensors into the memory of these, which may be `ShardTensor`s.

        Raises:
            DamagedCheckpoint: a file does not contain what its metadata says.
        """
        reads: list[tuple[Any, ReadItem, Tensor]] = []
        for name, target in targets:
            for read in _create_read_items(name, self.described[name], target):
                reads.append((self._place(read.storage_index), read, target))
        reads.sort(key=lambda item: (item[0].relative_path, item[0].offset))
        last: tuple[Any, Tensor] | None = None
        for place, read, target in reads:
            part = find_state_dict_object({read.dest_index.fqn: target}, read.dest_index)
            wanted = narrow_tensor_by_index(part.detach(), read.dest_offsets, read.lengths)
            if self._read_directly(place, read, wanted):
                continue
            if last is None or last[0] != place:
                last = None  # free it before the next one is allocated
                stored = self._reader.tensor(place.relative_path, place.offset, place.length)
                last = place, stored
            wanted.copy_(narrow_tensor_by_index(last[1], read.storage_offsets, read.lengths))

    def _read_directly(self, place: Any, read: ReadItem, wanted: Tensor) -> bool:
        """Read into the memory of `wanted` if the elements follow each other in the file."""
        item = self._parts.get((place.relative_path, place.offset))
        described = self.tensor(read.storage_index.fqn)
        assert described is not None
        if item is None or item.values is None or not wanted.is_contiguous() or wanted.numel() == 0:
            return False
        chunk = next(c for c in described.chunks if c.offsets == read.storage_index.offset)
        first = _first_of_contiguous(chunk.sizes, read.storage_offsets, read.lengths)
        if first is None:
            return False
        dtype = described.properties.dtype
        direct = wanted.device.type == "cpu" and wanted.dtype is dtype
        buffer = wanted if direct else torch.empty(wanted.shape, dtype=dtype, device="cpu")
        start = item.values + first * dtype.itemsize
        self._reader.elements(place.relative_path, start, buffer)
        if not direct:
            wanted.copy_(buffer)
        return True

    def close(self) -> None:
        """Close the data files."""
        self._reader.close()

    def _place(self, index: MetadataIndex) -> Any:
        place = self.metadata.storage_data.get(index)
        if place is None:
            raise DamagedCheckpoint(self.folder / METADATA, f"it has no place for {index.fqn!r}")
        return place


def _first_of_contiguous(
    sizes: Sequence[int], offsets: Sequence[int], lengths: Sequence[int]
) -> int | None:
    """The first element of a box in a tensor of these sizes; None if it is not contiguous there."""
    first, row, whole = 0, 1, True
    for size, offset, length in reversed(list(zip(sizes, offsets, lengths, strict=True))):
        if length > 1 and not whole:
            return None
        first += offset * row
        row *= size
        whole = whole and length == size
    return first


def _read_metadata(path: Path) -> Metadata:
    try:
        metadata = pickle.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise DamagedCheckpoint(path, "the file is missing") from error
    except OSError:
        raise
    except Exception as error:  # pickle raises many types for content that it cannot read
        raise DamagedCheckpoint(path, f"it cannot be read ({error!r})") from error
    if not isinstance(metadata, Metadata):
        raise DamagedCheckpoint(path, f"it is a {type(metadata).__name__}, not metadata")
    return metadata


def _not_a_checkpoint(folder: Path) -> str:
    if not folder.exists():
        text = f"there is no checkpoint {folder}"
        if aside_name(folder).exists():
            text += f": saving it was interrupted, and {aside_name(folder).name} is incomplete"
        return text
    return f"{folder} is not a checkpoint: it has neither {manifest_file.NAME} nor {METADATA}"


def _share_of(manifest: Manifest | None, rank: int, world_size: int) -> dict[str, list[Part]]:
    """The parts of the files that one rank verifies: about the same bytes on every rank."""
    share: dict[str, list[Part]] = {}
    if manifest is None:
        return share
    before, total = 0, max(1, manifest.size)
    for name, parts in sorted(manifest.files.items()):
        for part in parts:
            if before * world_size // total == rank:
                share.setdefault(name, []).append(part)
            before += part.length
    return share
