"""An existing checkpoint: its names, shapes and values, and whether its files are as written."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

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

from poplar.checkpoint.files import manifest as manifest_file
from poplar.checkpoint.files.item_reader import ItemReader
from poplar.checkpoint.files.manifest import Manifest, read_manifest
from poplar.checkpoint.files.save_job import METADATA, aside_name
from poplar.checkpoint.state_dicts.shard_tensor import ShardTensor
from poplar.errors import DamagedCheckpoint

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
        self._reader = ItemReader(folder)
        files = self.manifest.files if self.manifest is not None else {}
        self._parts = {(n, p.offset): p for n, parts in sorted(files.items()) for p in parts}
        self._numbers = {key: number for number, key in enumerate(self._parts)}
        self.verified: set[int] = set()
        """Numbers of the parts, in the manifest's order, whose checksums were compared here."""
        self._verify((METADATA, 0))
        self.metadata = _read_metadata(folder / METADATA)
        if self.manifest is None and any(n.startswith(PRIVATE) for n in self.described):
            raise DamagedCheckpoint(folder / manifest_file.NAME, "the file is missing")
        self.paths: Mapping[str, tuple[str | int, ...]] = self.metadata.planner_data or {}
        """By name, its place in the nested form."""

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
        """A value that is not a sharded tensor. It is unpickled: the source must be trusted.

        Raises:
            DamagedCheckpoint: its checksum differs.
        """
        described = self.tensor(name)
        offset = None if described is None else [0] * len(described.size)
        place = self._place(MetadataIndex(name, offset))
        key = place.relative_path, place.offset
        if described is not None and key in self._parts and self._parts[key].values is not None:
            # Unpickling would take much longer than reading the elements of a small tensor.
            value = torch.empty(described.size, dtype=described.properties.dtype, device="cpu")
            self._verify(key, value)
            return value
        self._verify(key)
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
                stored = self._reader.tensor(place.relative_path, place.offset, place.length)
                last = place, stored
            part = narrow_tensor_by_index(last[1], item.storage_offsets, item.lengths)
            read.wanted.copy_(part)

    def _read_of(self, item: ReadItem, target: Tensor) -> Read:
        place = self._place(item.storage_index)
        box = find_state_dict_object({item.dest_index.fqn: target}, item.dest_index)
        wanted = narrow_tensor_by_index(box.detach(), item.dest_offsets, item.lengths)
        part = self._parts.get((place.relative_path, place.offset))
        if part is None or part.values is None or not wanted.is_contiguous():
            return Read(place, item, wanted, None, False)
        described = self.tensor(item.storage_index.fqn)
        assert described is not None
        sizes = next(c.sizes for c in described.chunks if c.offsets == item.storage_index.offset)
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
