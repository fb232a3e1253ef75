"""What each rank writes of a checkpoint, in a thread and without communication.

[Note: a save]
Every rank writes its data file into `NAME.incomplete`, and beside it a list of the places of items
in the file. The first rank waits for all lists, adds the metadata, and renames the folder to
`NAME`. All that is renamed is on the disk by then, so `NAME` is either absent or complete.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import pickle
import shutil
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem

from poplar import _core
from poplar.checkpoint.files import manifest as manifest_file
from poplar.checkpoint.files.data_file import Cancelled, DataFile, Stored, sync_folder, write_whole
from poplar.checkpoint.files.manifest import Manifest
from poplar.checkpoint.files.metadata_file import METADATA
from poplar.checkpoint.files.new_files import aside_name, has_writer
from poplar.comm import Control
from poplar.values.errors import RankFailed
from poplar.values.formatting import printable
from poplar.values.regular_files import naming
from poplar.values.schema import parse_json
from poplar.zero.agreement import raise_on_all_ranks

PLAN = "plan.json"
_LIST = "__{rank}.list"
_POLL_SECONDS = (0.002, 0.02)
_STATUS_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True)
class SaveJob:
    """What one rank writes, without communication."""

    folder: Path
    rank: int
    names: Sequence[int]
    """By rank, its number in messages."""
    items: Sequence[Sequence[WriteItem]]
    """By rank, what it writes, in this order."""
    values: Mapping[MetadataIndex, Any]
    """By item of this rank, the tensor or value; a tensor is a view of the training state or of a
    copy."""
    metadata: Metadata
    aliases: Mapping[str, str]
    manifest: Manifest
    plan: str | None
    replaces: bool
    timeout_seconds: float
    on_this_host: Collection[int]
    """Ranks of which the host sees whether they still write."""

    @property
    def name(self) -> int:
        """The number of this rank in messages."""
        return self.names[self.rank]

    @property
    def aside(self) -> Path:
        """Where the checkpoint is written."""
        return aside_name(self.folder)


class PendingSave:
    """A save that a thread of this rank is writing.

    All that may fail to start is started here; nothing is written before `begin`.
    """

    def __init__(
        self, job: SaveJob, control: Control, file: DataFile | None, *, asynchronous: bool
    ) -> None:
        """Take the file of this rank, if it was made with the folder, or make it."""
        if not job.aside.exists():
            raise FileNotFoundError(
                f"{job.aside}, which the first rank has made, does not exist for rank {job.name}: "
                "save to a folder that all ranks share"
            )
        self.job = job
        self._control = control
        self._doing = f"saving the checkpoint {str(job.folder)!r}"
        self._may_write, self._cancel = threading.Event(), threading.Event()
        self._is_awaited = not asynchronous
        self._error: BaseException | None = None
        self._file = file or DataFile(job.aside / data_file_of(job.rank))
        self._thread = threading.Thread(target=self._run, name="poplar-checkpoint")
        try:
            self._thread.start()
        except BaseException:
            self._file.close()
            raise

    def begin(self) -> None:
        """Begin to write: all ranks are ready."""
        self._may_write.set()

    def cancel(self) -> None:
        """Write nothing more; some rank has failed."""
        self._cancel.set()
        self._may_write.set()

    def wait(self) -> None:
        """Wait until the checkpoint is complete. Collective.

        Raises:
            OSError: this rank could not write its part.
            RankFailed: another rank could not, or none made progress before the deadline.
        """
        self._is_awaited = True
        try:
            self._wait_for_all_ranks()
        except BaseException:
            self.cancel()  # do not wait for ranks that may have ended
            raise
        finally:
            _UNREPORTED.discard(self)

    def _wait_for_all_ranks(self) -> None:
        timeout = self.job.timeout_seconds
        progress, since = -1, time.monotonic()
        while True:
            self._thread.join(min(_STATUS_SECONDS, timeout / 4))
            done, error = not self._thread.is_alive(), self._error
            silent = time.monotonic() - since
            status = [float(done), float(error is not None), self._file.written.length, silent]
            values = torch.tensor(status, dtype=torch.float64, device="cpu")
            ranks = self._control.exchange(values, what=self._doing)()
            if any(bool(rank[1]) for rank in ranks):
                self._give_up(error)
            if all(bool(rank[0]) for rank in ranks):
                return
            total = sum(int(rank[2]) for rank in ranks)
            if total != progress:
                progress, since = total, time.monotonic()
            elif float(ranks[0][3]) > timeout:  # the same value on all ranks
                late = [number for number, rank in enumerate(ranks) if not rank[0]]
                names = [self.job.names[rank] for rank in late]
                message = f"rank(s) {names} wrote nothing for {timeout:g} s"
                self._give_up(TimeoutError(message) if self.job.rank in late else None)

    def _give_up(self, error: BaseException | None) -> None:
        """Remove what has been written and raise on all ranks. Collective."""
        self.cancel()
        self._thread.join(self.job.timeout_seconds)
        try:  # a rank that only misses another one's part raises that rank's error
            own = None if isinstance(error, RankFailed) else error
            raise_on_all_ranks(self._control, own, doing=self._doing)
        finally:
            if self.job.rank == 0:  # the other ranks have stopped writing
                with contextlib.suppress(OSError):
                    discard(self.job.aside)

    def _run(self) -> None:
        self._may_write.wait()
        try:
            self._write()
            if self.job.rank == 0:
                publish(self.job, self._cancel.is_set)
        except Cancelled:
            pass
        except BaseException as error:
            self._error = error
            if not self._is_awaited:
                self._report(error)
        finally:
            self._file.close()

    def _report(self, error: BaseException) -> None:
        """Print an error that the program might never ask for."""
        _UNREPORTED.add(self)
        text = f"rank {self.job.name}: {self._doing} failed: {type(error).__name__}: {error}"
        print(f"poplar: {printable(text)}", file=sys.stderr, flush=True)

    def _write(self) -> None:
        job = self.job
        places = self._file.write_items(job.items[job.rank], job.values, self._cancel.is_set)
        path = job.aside / _LIST.format(rank=job.rank)
        hidden = path.with_suffix(".part")
        with naming(hidden):
            hidden.write_text(json.dumps([self._file.written, places]))
        hidden.rename(path)  # so that the first rank reads all of it


_UNREPORTED: set[PendingSave] = set()
"""Failed saves whose errors no call has raised."""


@atexit.register
def _fail_if_unreported() -> None:
    for save in _UNREPORTED:
        _core.fail_at_exit()
        if save.job.rank == 0:
            with contextlib.suppress(OSError):
                discard(save.job.aside)


def publish(job: SaveJob, is_stopped: Callable[[], bool]) -> None:
    """Complete the checkpoint once all ranks have written their parts; the first rank calls it."""
    storage: dict[MetadataIndex, _StorageInfo] = {}
    files: dict[str, Stored] = {}
    for rank in range(job.manifest.world_size):
        path = job.aside / _LIST.format(rank=rank)
        _wait_for(path, rank, job, is_stopped)
        file = data_file_of(rank)
        written, places = parse_json(path.read_bytes())
        files[file] = Stored(*written)
        for item, place in zip(job.items[rank], places, strict=True):
            storage[item.index] = _StorageInfo(file, *place)
        path.unlink()
    metadata = _with_aliases(replace(job.metadata, storage_data=storage), job.aliases)
    files[METADATA] = write_whole(job.aside / METADATA, pickle.dumps(metadata))
    if job.plan is not None:
        files[PLAN] = write_whole(job.aside / PLAN, job.plan.encode())
    manifest = replace(job.manifest, files=files)
    write_whole(job.aside / manifest_file.NAME, manifest.to_text().encode())
    manifest_file.check_files(job.aside, manifest)  # every rank's file is here, whole
    sync_folder(job.aside)
    _take_name(job)
    sync_folder(job.folder.parent)
    with contextlib.suppress(OSError):  # the next save removes it
        remove(replaced_name(job.folder))


def _take_name(job: SaveJob) -> None:
    """Give a complete checkpoint its name. `complete_name` finds the earlier one at any moment."""
    replaced = replaced_name(job.folder)
    is_replaced = job.replaces and job.folder.exists()
    if is_replaced:
        remove(replaced)
        job.folder.rename(replaced)
    try:
        job.aside.rename(job.folder)
    except OSError:
        if is_replaced:
            replaced.rename(job.folder)
        raise


def discard(aside: Path) -> None:
    """Remove an incomplete checkpoint, unless another program has begun to write it."""
    if not any(has_writer(file, if_unknown=False) for file in data_files(aside)):
        remove(aside)


def remove(path: Path) -> None:
    """Remove a folder, or whatever else has its name; the target of a symbolic link stays."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def data_file_of(rank: int) -> str:
    """The name that `FileSystemWriter` of torch uses, too."""
    return f"__{rank}_0.distcp"


def data_files(aside: Path) -> list[Path]:
    """Those that ranks have begun to write."""
    return list(aside.glob("*.distcp"))


def replaced_name(folder: Path) -> Path:
    """Where a checkpoint is while another one takes its name."""
    return folder.with_name(folder.name + ".replaced")


def complete_name(folder: Path) -> Path:
    """Where the complete checkpoint with a name is: aside if its replacement was interrupted."""
    replaced = replaced_name(folder)
    return replaced if replaced.exists() and not folder.exists() else folder


def _wait_for(path: Path, rank: int, job: SaveJob, is_stopped: Callable[[], bool]) -> None:
    """Wait for the list of a rank. The deadline starts again while any rank writes."""
    interval, most = _POLL_SECONDS
    progress, since, is_announced = -1, time.monotonic(), False
    written_by = job.aside / data_file_of(rank)
    while not path.exists():
        if is_stopped():
            raise Cancelled
        has_ended = rank in job.on_this_host and not has_writer(written_by, if_unknown=True)
        if has_ended and not path.exists():  # it may have been written meanwhile
            raise RankFailed(
                f"rank {job.names[rank]} has ended or failed before its part of the checkpoint was "
                "written"
            )
        if not is_announced and not threading.main_thread().is_alive():
            is_announced = True
            print(
                f"poplar: rank {job.name}: the program has ended; waiting at most "
                f"{job.timeout_seconds:g} s for rank {job.names[rank]} to write its part of "
                f"{job.folder}",
                file=sys.stderr,
                flush=True,
            )
        time.sleep(interval)
        interval = min(2 * interval, most)
        written = sum(file.stat().st_size for file in data_files(job.aside))
        if written != progress:
            progress, since = written, time.monotonic()
        elif time.monotonic() - since > job.timeout_seconds:
            raise TimeoutError(
                f"{path.name} did not appear in {path.parent} within {job.timeout_seconds:g} s: "
                "its rank has stopped, or does not see this folder, which all ranks must share"
            )


def _with_aliases(metadata: Metadata, aliases: Mapping[str, str]) -> Metadata:
    """Add the further names of tied parameters, which are stored once."""
    described = dict(metadata.state_dict_metadata)
    storage = dict(metadata.storage_data)
    for index, info in metadata.storage_data.items():
        for alias, stored in aliases.items():
            if index.fqn == stored:
                storage[MetadataIndex(alias, index.offset, index.index)] = info
    for alias, stored in aliases.items():
        described[alias] = described[stored]
    return replace(metadata, state_dict_metadata=described, storage_data=storage)
