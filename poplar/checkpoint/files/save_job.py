"""What each rank writes of a checkpoint, in a thread and without communication.

[Note: a save]
Every rank writes its data file into `NAME.incomplete`, and beside it a list of the parts of the
file. The first rank waits for all lists, adds the metadata, and renames the folder to `NAME`. All
that is renamed is on the disk by then, so `NAME` is either absent or complete.
"""

from __future__ import annotations

import json
import pickle
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from poplar.checkpoint.files import manifest as manifest_file
from poplar.checkpoint.files.data_file import Cancelled, DataFile, sync_folder, write_whole
from poplar.checkpoint.files.manifest import Manifest, Part
from poplar.checkpoint.files.metadata_file import METADATA
from poplar.comm import Control
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
    items: Sequence[Sequence[MetadataIndex]]
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

    @property
    def aside(self) -> Path:
        """Where the checkpoint is written."""
        return aside_name(self.folder)

    @property
    def data_file(self) -> str:
        """The name that `FileSystemWriter` of torch uses, too."""
        return f"__{self.rank}_0.distcp"


class PendingSave:
    """A save that a thread of this rank is writing."""

    def __init__(
        self, job: SaveJob, control: Control, *, after: Callable[[], None] | None = None
    ) -> None:
        self.job = job
        self._control = control
        self._doing = f"saving the checkpoint {str(job.folder)!r}"
        self._after = after
        self._cancel = threading.Event()
        self._file: DataFile | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="poplar-checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Wait until the checkpoint is complete. Collective.

        Raises:
            OSError: this rank could not write its part.
            RankFailed: another rank could not, or none made progress before the deadline.
        """
        try:
            self._wait_for_all_ranks()
        except BaseException:
            self._cancel.set()  # do not wait for ranks that may have ended
            raise

    def _wait_for_all_ranks(self) -> None:
        timeout = self.job.timeout_seconds
        progress, since = -1, time.monotonic()
        while True:
            self._thread.join(min(_STATUS_SECONDS, timeout / 4))
            done, error = not self._thread.is_alive(), self._error
            status = [float(done), float(error is not None), float(self._bytes_written)]
            values = torch.tensor(status, dtype=torch.float64, device="cpu")
            ranks = self._control.exchange(values, what=self._doing)()
            if any(bool(rank[1]) for rank in ranks):
                self._give_up(error)
            if all(bool(rank[0]) for rank in ranks):
                return
            total = sum(int(rank[2]) for rank in ranks)
            if total != progress:
                progress, since = total, time.monotonic()
            elif time.monotonic() - since > timeout:
                late = [number for number, rank in enumerate(ranks) if not rank[0]]
                message = f"rank(s) {late} wrote nothing for {timeout:g} s"
                self._give_up(TimeoutError(message) if self.job.rank in late else None)

    @property
    def _bytes_written(self) -> int:
        return 0 if self._file is None else self._file.bytes_written

    def _give_up(self, error: BaseException | None) -> None:
        """Remove what has been written and raise on all ranks. Collective."""
        self._cancel.set()
        self._thread.join(self.job.timeout_seconds)
        try:
            raise_on_all_ranks(self._control, error, doing=self._doing)
        finally:
            if self.job.rank == 0:  # the other ranks have stopped writing
                shutil.rmtree(self.job.aside, ignore_errors=True)

    def _run(self) -> None:
        try:
            self._write()
            if self.job.rank == 0:
                publish(self.job, self._is_stopped)
                self._finish()
        except Cancelled:
            pass
        except BaseException as error:
            self._error = error

    def _finish(self) -> None:
        """Call `after`; its error says that the checkpoint is complete."""
        if self._after is None:
            return
        try:
            self._after()
        except OSError as error:
            raise OSError(
                error.errno,
                f"the checkpoint {str(self.job.folder)!r} is complete, but older ones could not be "
                f"removed: {error.strerror}",
                error.filename,
            ) from error

    def _is_stopped(self) -> bool:
        return self._cancel.is_set() or bool(self._control.group.failures)

    def _write(self) -> None:
        job = self.job
        if not job.aside.exists():
            raise FileNotFoundError(
                f"{job.aside}, which the first rank has made, does not exist for rank {job.rank}: "
                "save to a folder that all ranks share"
            )
        self._file = DataFile(job.aside / job.data_file, self._is_stopped)
        try:
            parts = [self._file.write_item(job.values[item]) for item in job.items[job.rank]]
        except BaseException:
            self._file.abandon()
            raise
        self._file.close()
        path = job.aside / _LIST.format(rank=job.rank)
        hidden = path.with_suffix(".part")
        hidden.write_text(json.dumps(parts))
        hidden.rename(path)  # so that the first rank reads all of it


def publish(job: SaveJob, is_stopped: Callable[[], bool]) -> None:
    """Complete the checkpoint once all ranks have written their parts; the first rank calls it."""
    storage: dict[MetadataIndex, _StorageInfo] = {}
    files: dict[str, list[Part]] = {}
    for rank in range(job.manifest.world_size):
        path = job.aside / _LIST.format(rank=rank)
        _wait_for(path, job, is_stopped)
        file = replace(job, rank=rank).data_file
        files[file] = [Part(*part) for part in json.loads(path.read_bytes())]
        for index, part in zip(job.items[rank], files[file], strict=True):
            storage[index] = _StorageInfo(file, part.offset, part.length)
        path.unlink()
    metadata = _with_aliases(replace(job.metadata, storage_data=storage), job.aliases)
    files[METADATA] = [write_whole(job.aside / METADATA, pickle.dumps(metadata))]
    if job.plan is not None:
        files[PLAN] = [write_whole(job.aside / PLAN, job.plan.encode())]
    manifest = replace(job.manifest, files=files)
    write_whole(job.aside / manifest_file.NAME, manifest.to_text().encode())
    manifest_file.check_files(job.aside, manifest)  # every rank's file is here, whole
    sync_folder(job.aside)
    if job.replaces and job.folder.exists():
        shutil.rmtree(replaced_name(job.folder), ignore_errors=True)
        job.folder.rename(replaced_name(job.folder))
    job.aside.rename(job.folder)
    sync_folder(job.folder.parent)
    shutil.rmtree(replaced_name(job.folder), ignore_errors=True)


def aside_name(folder: Path) -> Path:
    """Where a checkpoint is while it is incomplete."""
    return folder.with_name(folder.name + ".incomplete")


def replaced_name(folder: Path) -> Path:
    """Where a checkpoint is while another one takes its name."""
    return folder.with_name(folder.name + ".replaced")


def _wait_for(path: Path, job: SaveJob, is_stopped: Callable[[], bool]) -> None:
    """Wait for a file of another rank. The deadline starts again while any rank writes."""
    interval, most = _POLL_SECONDS
    progress, since = -1, time.monotonic()
    while not path.exists():
        if is_stopped():
            raise Cancelled
        time.sleep(interval)
        interval = min(2 * interval, most)
        written = sum(file.stat().st_size for file in job.aside.glob("*.distcp"))
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
