"""`MemoryState`: the files in memory of all hosts as one checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from poplar.checkpoint.files.opened import OpenedCheckpoint
from poplar.checkpoint.state_dicts.shard_tensor import ShardTensor
from poplar.comm import Control
from poplar.comm.point_to_point import Message
from poplar.elastic.shard_file import Description, Mark, ShardFile, mark_in
from poplar.values.errors import DamagedCheckpoint


class Found(NamedTuple):
    """A file that is whole."""

    slot: str
    """Its name up to the owner."""
    owner: int
    """The rank whose part it has."""
    mark: Mark


class Whole(NamedTuple):
    """A step of which every part is on some host."""

    step: int
    slot: str
    servers: Mapping[int, int]
    """By owner of a part, the first rank whose host has it."""


def path_of(folder: Path, slot: str, owner: int) -> Path:
    """The file with the part of a rank, in one of the slots that are written in turn."""
    return folder / f"{slot}-{owner}.shard"


def files_in(folder: Path) -> list[Path]:
    """All files of a folder, whole or not."""
    return sorted(folder.glob("*.shard"))


def find(folder: Path) -> list[Found]:
    """The files of a folder that are whole."""
    marks = {path: mark_in(path) for path in files_in(folder)}
    named = [(*path.stem.rpartition("-")[::2], mark) for path, mark in marks.items() if mark]
    return [Found(slot, int(owner), mark) for slot, owner, mark in named]


def newest_whole(by_rank: Sequence[Sequence[Found]]) -> tuple[Whole | None, str]:
    """The newest step that is whole, given the files of the host of each rank.

    Returns:
        It; if there is none, what the newest step lacks: empty if there are no files.
    """
    steps: dict[tuple[int, str, int], dict[int, int]] = {}
    for rank, found in enumerate(by_rank):
        for slot, owner, mark in found:
            steps.setdefault((mark.step, slot, mark.ranks), {}).setdefault(owner, rank)
    missing = ""
    for (step, slot, ranks), servers in sorted(steps.items(), reverse=True):
        if len(servers) == ranks:
            return Whole(step, slot, servers), ""
        lost = sorted(set(range(ranks)) - servers.keys())
        missing = missing or f"step {step} lacks the parts of ranks {lost} of {ranks}"
    return None, missing


class _Range(NamedTuple):
    """Elements `[start, stop)` of a tensor that are in one file."""

    name: str
    owner: int
    start: int
    stop: int


class MemoryState(OpenedCheckpoint):
    """A step that is whole in memory."""

    def __init__(
        self, folder: Path, whole: Whole, rank: int, described: Mapping[int, Description]
    ) -> None:
        self.folder, self._rank, self._servers = folder, rank, whole.servers
        self._by_owner = described
        files = {owner: ShardFile(path_of(folder, whole.slot, owner)) for owner in described}
        # A spare may be torn, or of an earlier step, where another host has the part.
        self._files = {o: f for o, f in files.items() if f.mark and f.mark.step == whole.step}
        self._received: dict[_Range, Tensor] = {}
        self._values: dict[str, Any] = {}
        self._aliases: dict[str, str] = {}
        self.paths = {}
        known: dict[str, Any] = {}
        for one in described.values():
            self.manifest = one.manifest
            self.paths |= one.paths
            self._values = {**one.values, **self._values}
            self._aliases |= one.aliases
            known |= {n: _described(part.dtype, part.shape) for n, part in one.parts.items()}
        for name, value in self._values.items():
            is_tensor = isinstance(value, Tensor)
            known[name] = _described(value.dtype, value.shape) if is_tensor else None
        self.metadata = Metadata(known | {a: known[name] for a, name in self._aliases.items()})

    def value(self, name: str) -> Any:
        return self._values[name]

    def check_complete(self, targets: Mapping[str, Tensor]) -> None:
        for name, target in targets.items():
            _, start, stop = _bounds(target)
            found = sum(one.stop - one.start for one in self._ranges(name, target))
            if found != stop - start and self._first_name(name) not in self._values:
                raise DamagedCheckpoint(self.folder, f"it has {found} elements of {name!r}")

    def collect(self, control: Control, targets: Mapping[str, Tensor]) -> None:
        what = "loading from the memory of other hosts"
        wanted: dict[int, list[_Range]] = {}
        for one in (one for name in targets for one in self._ranges(name, targets[name])):
            if one.owner not in self._files:
                wanted.setdefault(self._servers[one.owner], []).append(one)
        by_rank = control.exchange_objects(wanted, what=what)
        messages = [
            Message(rank, torch.cat([self._stored(one) for one in found[self._rank]]), False)
            for rank, found in enumerate(by_rank)
            if self._rank in found
        ]
        sizes = {rank: [self._size(one) for one in ranges] for rank, ranges in wanted.items()}
        received = {
            rank: torch.empty(sum(each), dtype=torch.uint8, device="cpu")
            for rank, each in sizes.items()
        }
        messages += [Message(rank, data, incoming=True) for rank, data in received.items()]
        control.send_and_receive(messages, what=what)
        for rank, ranges in wanted.items():
            self._received |= zip(ranges, received[rank].split(sizes[rank]), strict=True)

    def read_into(self, targets: Mapping[str, Tensor]) -> None:
        for name, target in targets.items():
            to, start, stop = _bounds(target)
            if (first_name := self._first_name(name)) in self._values:
                to.copy_(self._values[first_name].reshape(-1)[start:stop])
            for one in self._ranges(name, target):
                dtype = self._by_owner[one.owner].parts[one.name].dtype
                values = self._stored(one).clone().view(dtype)  # at an aligned address
                to[one.start - start : one.stop - start].copy_(values)
            if not isinstance(target, ShardTensor):
                target.copy_(to.view(target.shape))

    def _first_name(self, name: str) -> str:
        return self._aliases.get(name, name)

    def _ranges(self, name: str, target: Tensor) -> Iterator[_Range]:
        """Where the elements of a target are, unless they are no parts."""
        name = self._first_name(name)
        _, first, last = _bounds(target)
        for owner, one in self._by_owner.items():
            if part := one.parts.get(name):
                start, stop = max(part.start, first), min(part.stop, last)
                if start < stop:
                    yield _Range(name, owner, start, stop)

    def _size(self, one: _Range) -> int:
        return (one.stop - one.start) * self._by_owner[one.owner].parts[one.name].dtype.itemsize

    def _stored(self, one: _Range) -> Tensor:
        """The bytes of a range."""
        if one in self._received:
            return self._received[one]
        part = self._by_owner[one.owner].parts[one.name]
        first = part.place + (one.start - part.start) * part.dtype.itemsize
        return self._files[one.owner].bytes[first : first + self._size(one)]


def _bounds(target: Tensor) -> tuple[Tensor, int, int]:
    """Memory for the elements of a target in row-major order, and where they start and stop."""
    if isinstance(target, ShardTensor):
        return target.local, target.start, target.stop
    return torch.empty(target.numel(), dtype=target.dtype, device="cpu"), 0, target.numel()


def _described(dtype: torch.dtype, shape: torch.Size) -> TensorStorageMetadata:
    return TensorStorageMetadata(TensorProperties(dtype=dtype), shape, [])
