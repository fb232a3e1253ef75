"""`.metadata`: names, shapes and places of all values, as `torch.distributed.checkpoint` writes it.

Everything is checked before it is used: the file may be damaged, or come from a stranger.
"""

from __future__ import annotations

import io
import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from poplar.checkpoint.files.metadata_unpickler import Unpickler, expect, is_count
from poplar.checkpoint.files.stored_files import read_stored
from poplar.values.errors import DamagedCheckpoint

METADATA = ".metadata"

_MOST_CUT_DIMS = 8
"""More dimensions than the parts of one tensor are cut along."""
_MOST_STEPS = 256
"""More levels than nested state has."""


def read_metadata(folder: Path) -> Metadata:
    """Read and check the metadata of a checkpoint.

    Raises:
        DamagedCheckpoint: it is missing, or is not the metadata of a checkpoint.
        OSError: it cannot be read.
    """
    data = read_stored(folder, METADATA)
    try:
        metadata = Unpickler(io.BytesIO(data)).load()
        _check(metadata)
    except Exception as error:  # content that is no pickle raises many types
        reason = f"{type(error).__name__}: {error}"[:500]
        raise DamagedCheckpoint(
            folder / METADATA, f"it is not the metadata of a checkpoint ({reason})"
        ) from error
    found: Metadata = metadata
    return found


def _check(metadata: Any) -> None:
    """Check all that is read of the metadata."""
    expect(type(metadata) is Metadata, "the whole,", metadata)
    described, places = metadata.state_dict_metadata, metadata.storage_data
    expect(type(described) is dict, "the shapes,", described)
    expect(type(places) is dict, "the places,", places)
    left = len(places)
    sizes: dict[str, dict[Any, int]] = {}
    for name, found in described.items():
        expect(type(name) is str, "the name", name)
        if type(found) is not BytesStorageMetadata:
            expect(type(found) is TensorStorageMetadata, "the shape of", name)
            expect(type(found.chunks) is list, "the parts of", name)
            left -= len(found.chunks)  # tensors that share one list would take long
            expect(left >= 0, "more parts than places, from here on:", name)
            sizes[name] = _part_sizes(name, found)
    for index, place in places.items():
        expect(type(index) is MetadataIndex and index.fqn in described, "the place of", index)
        _check_place(index, place, sizes.get(index.fqn))
    _check_paths(metadata.planner_data)


def _part_sizes(name: str, found: TensorStorageMetadata) -> dict[Any, int]:
    """The bytes of each part of a tensor, by its offsets."""
    properties, size = found.properties, found.size
    expect(type(properties) is TensorProperties, "the properties of", name)
    expect(isinstance(properties.dtype, torch.dtype), "the dtype of", name)
    boxes = []
    for chunk in found.chunks:
        expect(type(chunk) is ChunkStorageMetadata, "the parts of", name)
        boxes.append((chunk.offsets, chunk.sizes))
    for shape in (size, *itertools.chain(*boxes)):
        expect(type(shape) is torch.Size and len(shape) == len(size), "a shape of", name)
    expect(_tiles(size, boxes), "parts that do not make up the shape of", name)
    itemsize = properties.dtype.itemsize
    return {offsets: math.prod(sizes) * itemsize for offsets, sizes in boxes}


def _tiles(size: Sequence[int], boxes: Sequence[tuple[Sequence[int], Sequence[int]]]) -> bool:
    """Whether boxes (offsets and sizes) cover a tensor once: the signs of their corners cancel."""
    whole = (torch.Size([0] * len(size)), size)
    if all(box == whole for box in boxes):
        return len(boxes) == 1 or 0 in size
    cut = [
        dim
        for dim in range(len(size))
        if any((offsets[dim], sizes[dim]) != (0, size[dim]) for offsets, sizes in boxes)
    ]
    if len(cut) > _MOST_CUT_DIMS:
        return False
    corners: Counter[tuple[int, ...]] = Counter()
    for sign, (offsets, sizes) in [(-1, whole), *((1, box) for box in boxes)]:
        if 0 in sizes:
            continue
        for upper in itertools.product((0, 1), repeat=len(cut)):
            ends = zip(cut, upper, strict=True)
            corner = tuple(offsets[dim] + is_upper * sizes[dim] for dim, is_upper in ends)
            corners[corner] += sign * (-1) ** sum(upper)
    return not any(corners.values())


def _check_place(index: MetadataIndex, place: Any, sizes: Mapping[Any, int] | None) -> None:
    name = index.fqn
    expect(type(place) is _StorageInfo, "the place of", name)
    expect(type(place.relative_path) is str, "the file of", name)
    expect(is_count(place.offset) and is_count(place.length), "the bytes of", name)
    expect(place.transform_descriptors is None, "transforms, such as compression, of", name)
    if sizes is not None:
        expect(index.offset in sizes, "a place that is of no part of", name)
        expect(place.length >= sizes[index.offset], "fewer bytes than elements of", name)


def _check_paths(paths: Any) -> None:
    """Check the places of values in the nested form: names of entries, and indices of lists."""
    expect(paths is None or type(paths) is dict, "the nested form,", paths)
    for name, path in (paths or {}).items():
        expect(type(path) is tuple and 0 < len(path) <= _MOST_STEPS, "the nested form of", name)
        for step in path:
            is_index = is_count(step) and step < len(paths)
            expect(type(step) is str or is_index, "the nested form of", name)
