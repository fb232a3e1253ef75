"""An existing checkpoint: its names, shapes and values, and whether its files are as written."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.planner_helpers import _create_read_items
from torch.distributed.checkpoint.utils import find_state_dict_object

from poplar.checkpoint.files import manifest as manifest_file
from poplar.checkpoint.files.item_reader import ItemReader
from poplar.checkpoint.files.manifest import Manifest, read_manifest
from poplar.checkpoint.files.metadata_file import METADATA, read_metadata
from poplar.checkpoint.files.save_job import aside_name
from poplar.checkpoint.state_dicts.shard_tensor import ShardTensor
from poplar.values.errors import DamagedCheckpoint

T = TypeVar("T")
Key = tuple[str, int]
"""Of a part: its file and the first byte in it."""

PRIVATE = "poplar."
"""Names that only Poplar writes start with this."""
_THREADS = 3
"""That read: some wait for the disk while others compute checksums. With two, the disk is idle at
times."""
_RUN_BYTES = 8 << 20
"""About so many bytes of a file are read by one thread, so that small parts are read together."""


class Read(NamedTuple):
    """Elements of a stored part that belong into a tensor."""

    place: Any
    item: ReadItem
    wanted: Tensor
    first: int | None
    """The first of the elements in the part, if they follow each other there and in `wanted`."""
    is_whole: bool
    """They follow each other and are all elements of the part."""

    @property
    def key(self) -> Key:
        """Of the part."""
        return self.place.relative_path, self.place.offset

    @property
    def is_direct(self) -> bool:
        """Nothing but the elements has to be read."""
        return self.first is not None

    def aside(self) -> tuple[Read, Tensor]:
        """The same into new memory of the host, and the tensor where it belongs."""
        memory = torch.empty_like(self.wanted, device="cpu")
        return self._replace(wanted=memory), self.wanted


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
        self._reader = ItemReader(folder, weights_only=weights_only)
        files = self.manifest.files if self.manifest is not None else {}
        self._parts = {(n, p.offset): p for n, parts in sorted(files.items()) for p in parts}
        self._numbers = {key: number for number, key in enumerate(self._parts)}
        self.verified: set[int] = set()
        """Numbers of the parts, in the manifest's order, whose checksums were compared here."""
        self._verify((METADATA, 0))
        self.metadata = read_metadata(folder)
        if self.manifest is None and any(n.startswith(PRIVATE) for n in self.described):
            raise DamagedCheckpoint(folder / manifest_file.NAME, "the file is missing")
        self.paths: Mapping[str, tuple[str | int, ...]] = self.metadata.planner_data or {}
        """By name, its place in the nested form."""
        self._part_sizes: dict[str, dict[Any, torch.Size]] = {}
        """Of tensors, by name and offsets of the part."""
        if self.manifest is not None:
            self._check_places()

    @property
    def described(self) -> Mapping[str, Any]:
        """By name, the shape and dtype of a tensor; other values have none."""
        return self.metadata.state_dict_metadata

    def tensor(self, name: str) -> TensorStorageMetadata | None:
        """Shape, dtype and parts of a tensor; None if the name is absent or not a tensor."""
        found = self.described.get(name)
        return found if isinstance(found, TensorStorageMetadata) else None

    def verify(self, verified: Collection[int] = (), rank: int = 0, world_size: int = 1) -> None:
        """Compare the checksums of this rank's share of the parts, about the same bytes each.

        Args:
            verified: the parts that were verified already, equal on all ranks.
            rank: this rank.
            world_size: ranks that share the work.

        Raises:
            DamagedCheckpoint: they differ; names the file.
        """
        left = {key: self._parts[key] for key, n in self._numbers.items() if n not in verified}
        before, total = 0, max(1, sum(part.length for part in left.values()))
        mine = []
        for key, part in left.items():
            if min(before * world_size // total, world_size - 1) == rank:
                mine.append(key)
            before += part.length
        self._read_parts([(key, partial(self._verify, key)) for key in mine])

    def value(self, name: str) -> Any:
        """A value that is not sharded: a tensor, or plain types.

        Raises:
            DamagedCheckpoint: its checksum differs, or it is another tensor than described.
            ValueError: it contains an object of a class, and only weights may be loaded.
        """
        described = self.tensor(name)
        if described is not None:
            value = self.empty(name, described.properties.dtype)
            key = self._key_of_whole(name, described)
            if key is None:
                self.read_into(self.reads([(name, value)]))
            else:  # one read, without threads: most are small
                self._verify(key, value)
            return value
        place = self._place(MetadataIndex(name))
        self._verify((place.relative_path, place.offset))
        return self._reader.value(place.relative_path, place.offset, place.length)

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

    def _key_of_whole(self, name: str, described: TensorStorageMetadata) -> Key | None:
        """The part with all elements of a tensor, if their place in it is known."""
        if len(described.chunks) != 1 or described.chunks[0].sizes != described.size:
            return None
        place = self._place(MetadataIndex(name, described.chunks[0].offsets))
        key = place.relative_path, place.offset
        return key if key in self._parts and self._parts[key].values is not None else None

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

    def reads(self, targets: Iterable[tuple[str, Tensor]]) -> list[Read]:
        """What has to be read for these tensors, which may be `ShardTensor`s.

        Raises:
            DamagedCheckpoint: the checkpoint lacks elements of them.
        """
        reads = []
        for name, target in targets:
            items = _create_read_items(name, self.described[name], target)
            found = [self._read_of(item, target) for item in items]
            count = sum(read.wanted.numel() for read in found)
            local = target.local if isinstance(target, ShardTensor) else target
            if count != local.numel():
                raise DamagedCheckpoint(
                    self.folder / METADATA,
                    f"it has {count} of the {local.numel()} elements of {name!r} that were read",
                )
            reads += found
        return reads

    def read_into(self, reads: Iterable[Read]) -> None:
        """Read into the memory of tensors, in the order of the files.

        A part of which all elements are read is verified. Other parts have to be verified too.

        Args:
            reads: as `reads` returns them.

        Raises:
            DamagedCheckpoint: a file does not contain what its metadata says.
        """
        wanted = sorted(reads, key=lambda read: read.key)
        self._read_parts(
            [(read.key, partial(self._read_directly, read)) for read in wanted if read.is_direct]
        )
        last: tuple[Any, Tensor] | None = None
        for read in wanted:
            if read.is_direct:
                continue
            place, item = read.place, read.item
            if last is None or last[0] != place:
                last = None  # free it before the next one is allocated
                last = place, self._stored_part(read)
            part = narrow_tensor_by_index(last[1], item.storage_offsets, item.lengths)
            read.wanted.copy_(part)

    def _stored_part(self, read: Read) -> Tensor:
        """A part of a tensor, read as a whole."""
        place, index = read.place, read.item.storage_index
        stored = self._reader.value(place.relative_path, place.offset, place.length)
        dtype, sizes = self.described[index.fqn].properties.dtype, self._sizes(index)
        if not isinstance(stored, Tensor) or (stored.dtype, stored.shape) != (dtype, sizes):
            raise DamagedCheckpoint(
                self.folder / place.relative_path,
                f"at byte {place.offset} is not what {METADATA} describes: {dtype} of shape "
                f"{tuple(sizes)}, of {index.fqn!r}",
            )
        return stored

    def _sizes(self, index: MetadataIndex) -> torch.Size:
        """The shape of a part of a tensor."""
        if index.fqn not in self._part_sizes:
            chunks = self.described[index.fqn].chunks
            self._part_sizes[index.fqn] = {chunk.offsets: chunk.sizes for chunk in chunks}
        return self._part_sizes[index.fqn][index.offset]

    def _read_of(self, item: ReadItem, target: Tensor) -> Read:
        place = self._place(item.storage_index)
        box = find_state_dict_object({item.dest_index.fqn: target}, item.dest_index)
        wanted = narrow_tensor_by_index(box.detach(), item.dest_offsets, item.lengths)
        part = self._parts.get((place.relative_path, place.offset))
        if part is None or part.values is None or not wanted.is_contiguous():
            return Read(place, item, wanted, None, False)
        sizes = self._sizes(item.storage_index)
        first = _first_of_contiguous(sizes, item.storage_offsets, item.lengths)
        is_whole = first is not None and tuple(item.lengths) == tuple(sizes)
        return Read(place, item, wanted, first, is_whole)

    def _read_directly(self, read: Read) -> None:
        """Read into the memory of the target, or into a CPU tensor if it has another dtype."""
        described = self.tensor(read.item.storage_index.fqn)
        key = read.key
        start = self._parts[key].values
        assert described is not None
        assert start is not None
        assert read.first is not None
        dtype, wanted = described.properties.dtype, read.wanted
        direct = wanted.device.type == "cpu" and wanted.dtype is dtype
        buffer = wanted if direct else torch.empty(wanted.shape, dtype=dtype, device="cpu")
        if read.is_whole:
            self._verify(key, buffer)
        else:
            self._reader.elements(key[0], start + read.first * dtype.itemsize, buffer)
        if not direct:
            wanted.copy_(buffer)

    def _verify(self, key: Key, target: Tensor | None = None) -> None:
        """Compare the checksum of a part, if it has one; see `ItemReader.verify`."""
        if key in self._parts:
            self._reader.verify(key[0], self._parts[key], target)
            self.verified.add(self._numbers[key])

    def _read_parts(self, work: Sequence[tuple[Key, Callable[[], None]]]) -> None:
        """Call functions, in threads, each of which reads the part of this key."""
        begin = self._reader.read_ahead([(key[0], self._parts[key]) for key, _ in work])

        def read(run: Sequence[tuple[Key, Callable[[], None]]]) -> None:
            file, offset = run[-1][0]
            self._reader.expect(file, offset + self._parts[file, offset].length)
            for _, action in run:
                begin()
                action()

        _in_threads(read, self._runs(work))

    def _runs(
        self, work: Sequence[tuple[Key, Callable[[], None]]]
    ) -> list[list[tuple[Key, Callable[[], None]]]]:
        """Cut work into parts that follow each other in a file, of about `_RUN_BYTES`."""
        runs: list[list[tuple[Key, Callable[[], None]]]] = []
        size, end = 0, ("", 0)
        for key, action in work:
            if key != end or size >= _RUN_BYTES:
                runs.append([])
                size = 0
            runs[-1].append((key, action))
            size += self._parts[key].length
            end = key[0], key[1] + self._parts[key].length
        return runs

    def close(self) -> None:
        """Close the data files."""
        self._reader.close()

    def _check_places(self) -> None:
        """Check what Poplar writes: all values have a path, and are in parts with checksums."""
        if not self.described.keys() <= self.paths.keys():
            raise DamagedCheckpoint(self.folder / METADATA, "it has no nested form of some values")
        for index, place in self.metadata.storage_data.items():
            part = self._parts.get((place.relative_path, place.offset))
            described = self.tensor(index.fqn)
            needed = 0
            if described is not None:
                needed = math.prod(self._sizes(index)) * described.properties.dtype.itemsize
            if (
                part is None
                or part.length != place.length
                or (part.values is not None and part.values + needed > part.offset + part.length)
            ):
                raise DamagedCheckpoint(
                    self.folder / METADATA,
                    f"it has another place for {index.fqn!r} than {manifest_file.NAME}",
                )

    def _place(self, index: MetadataIndex) -> Any:
        place = self.metadata.storage_data.get(index)
        if place is None:
            raise DamagedCheckpoint(self.folder / METADATA, f"it has no place for {index.fqn!r}")
        return place


def _in_threads(work: Callable[[T], None], items: Sequence[T]) -> None:
    """Call `work` for all items; after an error no further ones are begun."""
    left = iter(items)  # every item goes to one thread

    def run() -> None:
        try:
            for item in left:
                work(item)
        except BaseException:
            list(left)
            raise

    with ThreadPoolExecutor(_THREADS - 1) as threads:
        others = [threads.submit(run) for _ in range(_THREADS - 1)]
        run()
        for other in others:
            other.result()


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


def _not_a_checkpoint(folder: Path) -> str:
    if not folder.exists():
        text = f"there is no checkpoint {folder}"
        if aside_name(folder).exists():
            text += f": saving it was interrupted, and {aside_name(folder).name} is incomplete"
        return text
    return f"{folder} is not a checkpoint: it has neither {manifest_file.NAME} nor {METADATA}"
