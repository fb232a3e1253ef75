"""Writes the weights of a model as safetensors without unsharding it on any rank.

A file is written flat parameter by flat parameter: its header, which names the place of every
tensor, is known before the values are. It gets its final name only when it is complete on disk.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from poplar.checkpoint.files.data_file import SYNC_BYTES
from poplar.checkpoint.files.new_files import aside_name, discard, open_aside, written_aside
from poplar.checkpoint.files.transfers import transfer_on_all_ranks
from poplar.checkpoint.frozen_base import base_of, saves_base
from poplar.comm import Control
from poplar.comm.copies import to_bytes
from poplar.comm.shard_layout import Layout
from poplar.values.canonical_name import canonical
from poplar.values.regular_files import naming
from poplar.zero.agreement import run_on_all_ranks
from poplar.zero.engine import Engine
from poplar.zero.flat_parameter import FlatParameter
from poplar.zero.opaque_parameter import is_opaque_buffer
from poplar.zero.weights.weight_files import DTYPES, INDEX, SINGLE

T = TypeVar("T")

_CHUNK = 1 << 18
"""Elements that are copied to the host at a time."""

Owners = Mapping[FlatParameter, Sequence[int]]
"""The rank that writes each parameter of a flat parameter."""
Files = dict[int, tuple[Path, list[tuple[str, Tensor]]]]
"""By rank, the file that it writes, with its tensors."""


@dataclass(frozen=True, kw_only=True)
class Catalog:
    """What a saved model consists of, by canonical name, the same on all ranks."""

    tensors: Mapping[str, Tensor]
    """Parameters, which may be sharded, and buffers, each once."""
    tied: Mapping[str, str]
    """The stored name of each omitted name."""


def save_model(
    engine: Engine,
    control: Control,
    model: nn.Module,
    path: str | Path,
    *,
    sharded: bool,
    frozen: bool | None,
) -> None:
    """Write weights and buffers, tied ones once. Collective.

    Args:
        path: a file, which rank 0 writes; or, if `sharded`, a folder that all ranks see.
        sharded: every rank writes the parameters of which it holds the largest part. Rank
            `Engine.buffer_rank` writes the buffers too, and rank 0 an index.
        frozen: as for `save_checkpoint`. Quantised parameters are unsharded on all ranks for it.
    """
    whole = saves_base(model, frozen)
    gathers = whole and any(unit.opaque for unit in engine.units)
    with engine.values.unsharded(writeback=False) if gathers else nullcontext():
        _save(engine, control, model, path, sharded=sharded, whole=whole)


def _save(
    engine: Engine,
    control: Control,
    model: nn.Module,
    given: str | Path,
    *,
    sharded: bool,
    whole: bool,
) -> None:
    doing, rank = f"save_model({str(given)!r})", control.group.rank
    device = engine.flats[0].device

    def on_all_ranks(work: Callable[[], T]) -> T:
        return run_on_all_ranks(control, work, doing=doing)

    catalog = on_all_ranks(lambda: _prepare(engine, model, Path(given), sharded, whole))
    path = Path(given)
    owners = {flat: _owners(flat, engine.comm.group.size, sharded) for flat in engine.flats}
    if not sharded:
        catalog = _with_buffers_of_all(engine, control, model, catalog, doing)
    files = _files(catalog, owners, path, engine.buffer_rank, sharded)
    writer = Writer(*files[rank], catalog.tied) if rank in files else None
    try:
        _write_sharded(engine, catalog, owners, writer)
        transfer_on_all_ranks(control, device, lambda: _finish(writer, catalog), doing=doing)
        on_all_ranks(lambda: check_parts(files, catalog, control) if rank == 0 else None)
        if sharded:  # an old index must not name old and new files
            on_all_ranks(lambda: (path / INDEX).unlink(missing_ok=True) if rank == 0 else None)
        on_all_ranks(lambda: writer.publish() if writer else None)
    finally:
        if writer is not None and not writer.is_busy:
            writer.discard()
    if sharded:
        on_all_ranks(lambda: write_index(path, files) if rank == 0 else None)


def _prepare(engine: Engine, model: nn.Module, path: Path, sharded: bool, whole: bool) -> Catalog:
    """Check that the model can be saved there. Local."""
    if engine.scheduler.active:
        raise RuntimeError("save_model() inside a pass; end the backward first")
    if sharded:
        path.mkdir(parents=True, exist_ok=True)
        if (path / SINGLE).exists():
            raise ValueError(
                f"{path} holds {SINGLE}, which readers prefer to an index; remove it, or save to "
                "another folder"
            )
    known = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    tensors: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    first: dict[int | tuple[int, torch.Size, torch.dtype], str] = {}
    with engine.values.naming_parameters():
        state = model.state_dict(keep_vars=True)
    base = {} if whole else base_of(engine, state)
    for name, value in state.items():
        if name in base:
            continue
        name = canonical(name)
        is_wrapper = is_traceable_wrapper_subclass(value)
        if is_wrapper or not isinstance(value, Tensor) or value.dtype not in DTYPES:
            is_plain = isinstance(value, Tensor) and not is_wrapper
            kind = value.dtype if is_plain else type(value).__name__
            raise TypeError(
                f"state_dict() has {name!r}, which is {kind}; safetensors cannot store it"
            )
        if id(value) not in known and not engine.values.are_readable:
            raise TypeError(
                f"state_dict() computes {name!r}, but the parameters are sharded (stage 3); save "
                "it yourself, inside full_parameters()"
            )
        # Sharded parameters have no memory by which to compare them.
        memory = (value.data_ptr(), value.shape, value.dtype)
        key = id(value) if isinstance(value, nn.Parameter) else memory
        if value.numel() and first.setdefault(key, name) != name:
            tied[name] = first[key]
        else:
            tensors[name] = value
    return Catalog(tensors=tensors, tied=tied)


def _with_buffers_of_all(
    engine: Engine, control: Control, model: nn.Module, catalog: Catalog, doing: str
) -> Catalog:
    """The catalog with the values of the rank whose buffers are saved for all. Collective."""
    whose = engine.buffer_rank
    if whose == 0:  # which has them, and writes
        return catalog
    buffers = {id(buffer) for buffer in model.buffers() if not is_opaque_buffer(buffer)}
    own = {n: value.detach() for n, value in catalog.tensors.items() if id(value) in buffers}
    sent = own if control.group.rank == whose else {}
    received = control.exchange_objects(sent, what=doing)[whose]
    return replace(catalog, tensors={**catalog.tensors, **received})


def _owners(flat: FlatParameter, world_size: int, sharded: bool) -> list[int]:
    """The rank that writes each parameter: the first one, or the one that holds most of it."""
    if not sharded:
        return [0] * len(flat.parameters)
    bounds = [flat.layout.bounds(rank) for rank in range(world_size)]
    owners: list[int] = []
    for position in range(len(flat.parameters)):
        start, stop = flat.span(position)
        held = [min(stop, high) - max(start, low) for low, high in bounds]
        # Ascending, also for empty parameters, because slices are.
        owners.append(max([held.index(max(held)), *owners[-1:]]))
    return owners


def _layout(flat: FlatParameter, owners: Sequence[int], world_size: int) -> Layout:
    """The layout in which every parameter is whole on its owner."""
    ends = [0] * (world_size + 1)
    for position, owner in enumerate(owners):
        ends[owner + 1] = flat.span(position)[1]
    return Layout(tuple(itertools.accumulate(ends, max)))


def _files(catalog: Catalog, owners: Owners, path: Path, buffer_rank: int, sharded: bool) -> Files:
    """By rank, the file that it writes, with its tensors.

    `buffer_rank` writes what has no owner, if it is `sharded`.
    """
    if not sharded:
        return {0: (path, list(catalog.tensors.items()))}
    owner_of = {
        id(parameter): owner
        for flat, ranks in owners.items()
        for parameter, owner in zip(flat.parameters, ranks, strict=True)
    }
    by_rank: dict[int, list[tuple[str, Tensor]]] = {}
    for name, tensor in catalog.tensors.items():
        by_rank.setdefault(owner_of.get(id(tensor), buffer_rank), []).append((name, tensor))
    count = len(by_rank)
    return {
        rank: (path / f"model-{number:05d}-of-{count:05d}.safetensors", by_rank[rank])
        for number, rank in enumerate(sorted(by_rank), start=1)
    }


def _write_sharded(engine: Engine, catalog: Catalog, owners: Owners, writer: Writer | None) -> None:
    """Write every sharded parameter on the rank that owns it. Collective at stage 3.

    A rank that cannot write takes part nevertheless, and `Writer.finish` raises.
    """
    group = engine.comm.group
    names = {id(tensor): name for name, tensor in catalog.tensors.items()}
    sharded = (
        flat for unit in engine.units if engine.values.is_sharded(unit) for flat in unit.flats
    )
    for flat in sharded:
        new = _layout(flat, owners[flat], group.size)
        low = new.bounds(group.rank)[0]
        what = f"saving unit {flat.name}"
        values = engine.comm.reshard(flat.shard, flat.layout, new, what=what)
        for parameter, offset in zip(flat.parameters, flat.offsets, strict=True):
            name = names.get(id(parameter))
            if writer is not None and name in writer.unwritten:
                start = offset - low
                writer.write(name, values[start : start + parameter.numel()])
        del values  # before the next ones are allocated


def _finish(writer: Writer | None, catalog: Catalog) -> None:
    """Write what is not sharded, and bring the file to the disk. Local."""
    if writer is None:
        return
    writer.is_busy = True
    try:
        for name in list(writer.unwritten):
            writer.write(name, catalog.tensors[name].detach(), may_sync=True)
        writer.finish()
    finally:
        writer.is_busy = False


def write_index(folder: Path, files: Files) -> None:
    """Write the index of files, as Hugging Face writes it."""
    tensors = [(name, tensor, path) for path, inside in files.values() for name, tensor in inside]
    index = {
        "metadata": {"total_size": sum(t.numel() * t.element_size() for _, t, _ in tensors)},
        "weight_map": {name: path.name for name, _, path in sorted(tensors, key=lambda t: t[0])},
    }
    with written_aside(folder / INDEX) as file:
        file.write(f"{json.dumps(index, indent=2)}\n".encode())


def check_parts(files: Files, catalog: Catalog, control: Control) -> None:
    """Check that the first rank sees, whole, what every rank has written.

    Raises:
        FileNotFoundError: it does not.
    """
    for rank, (path, tensors) in files.items():
        aside, expected = aside_name(path), _size(tensors, catalog.tied)
        found = aside.stat().st_size if aside.exists() else 0
        if found != expected:
            raise FileNotFoundError(
                f"{aside}, of which rank {control.group.names[rank]} has written {expected} bytes, "
                f"has {found} for the first rank: save to a folder that all ranks share"
            )


class Writer:
    """Writes one safetensors file, tensor by tensor in any order.

    It keeps its first error for `finish`, so that a rank which cannot write still takes part in the
    collectives.
    """

    def __init__(
        self, path: Path, tensors: Sequence[tuple[str, Tensor]], tied: Mapping[str, str]
    ) -> None:
        self._path = path
        self._error: Exception | None = None
        self._places, header = _header(tensors, tied)
        self.unwritten = set(self._places)
        self._file: BinaryIO | None = None
        self._unsynced = 0
        self.is_busy = False
        """Another thread writes, which may hang: to close the file could then wait for ever."""
        try:
            self._file = open_aside(path)
            self._file.write(header)
        except OSError as error:
            self._error = error

    def write(self, name: str, values: Tensor, *, may_sync: bool = False) -> None:
        """Write one tensor. `may_sync`: flush much data to disk, so `finish` has little left."""
        if self._error is not None or self._file is None:
            return
        try:
            self._file.seek(self._places[name])
            for data in _chunks(values):
                self._unsynced += self._file.write(data)
            self.unwritten.remove(name)
            if may_sync and self._unsynced >= SYNC_BYTES:
                self._sync()
        except Exception as error:
            self._error = error

    def finish(self) -> None:
        """Flush the file to disk.

        Raises:
            OSError: the file could not be written; names it.
        """
        with naming(self._path):
            if self._error is not None:
                raise self._error
            assert self._file is not None
            assert not self.unwritten, self.unwritten
            self._sync()

    def _sync(self) -> None:
        assert self._file is not None
        self._file.flush()
        os.fsync(self._file.fileno())
        self._unsynced = 0

    def publish(self) -> None:
        """Give the finished file its name. It is locked until then."""
        assert self._file is not None
        aside_name(self._path).replace(self._path)
        self._file.close()
        self._file = None

    def discard(self) -> None:
        """Remove the file unless it has been published."""
        if self._file is not None:
            discard(self._path, self._file)


def _header(
    tensors: Sequence[tuple[str, Tensor]], tied: Mapping[str, str]
) -> tuple[dict[str, int], bytes]:
    """The place of each tensor in the file, and what comes before the first."""
    inside = {name for name, _ in tensors}
    omitted = {name: stored for name, stored in tied.items() if stored in inside}
    described: dict[str, object] = {"__metadata__": {"format": "pt", **omitted}}
    places, end = {}, 0
    # Large elements first, so that every tensor is aligned.
    for name, tensor in sorted(tensors, key=lambda item: (-item[1].element_size(), item[0])):
        start, end = end, end + tensor.numel() * tensor.element_size()
        places[name] = start
        described[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    before = len(text).to_bytes(8, "little") + text
    return {name: len(before) + start for name, start in places.items()}, before


def _size(tensors: Sequence[tuple[str, Tensor]], tied: Mapping[str, str]) -> int:
    """The bytes of a file."""
    return len(_header(tensors, tied)[1]) + sum(t.numel() * t.element_size() for _, t in tensors)


def _chunks(values: Tensor) -> Iterator[bytearray]:
    flat = values.reshape(-1)
    for start in range(0, flat.numel(), _CHUNK):
        part = flat[start : start + _CHUNK].cpu().contiguous()
        yield to_bytes(part.resolve_conj().resolve_neg())
