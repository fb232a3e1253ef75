"""Which step in memory is whole, and on which hosts ranks have their spares."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from poplar.comm.host_topology import Hosts
from poplar.elastic import agent_folder
from poplar.elastic.memory_checkpoints import MemoryCheckpoints, holders_of
from poplar.elastic.memory_state import Found, Whole, find, newest_whole, path_of
from poplar.elastic.shard_file import START, Description, Mark, ShardFile, write_shard


def found(slot: str, owner: int, step: int, ranks: int = 2) -> Found:
    return Found(slot, owner, Mark(step, ranks, START, START))


def test_newest_step_with_all_parts_is_chosen():
    first = [found("a-0", 0, 8), found("a-1", 0, 9), found("b-0", 0, 10, ranks=3)]
    second = [found("a-0", 1, 8), found("a-1", 1, 7), found("b-0", 1, 10, ranks=3)]
    assert newest_whole([first, second]) == (Whole(8, "a-0", {0: 0, 1: 1}), "")


def test_parts_of_different_starts_are_not_mixed():
    """They may have been cut by different plans."""
    whole, missing = newest_whole([[found("a-0", 0, 9)], [found("b-0", 1, 9)]])
    assert whole is None
    assert missing == "step 9 lacks the parts of ranks [0] of 2"


def test_nothing_is_missing_at_a_first_start():
    assert newest_whole([[], []]) == (None, "")


@pytest.mark.parametrize("spares", [1, 2, 3])
def test_spares_are_on_other_hosts(spares: int):
    hosts = Hosts(((0, 1, 2), (3,), (4, 5)))
    for owner in range(6):
        holders = holders_of(hosts, owner, spares)
        on = {hosts.host_of(rank) for rank in holders}
        assert len(on) == len(holders) == min(spares, 2)
        assert hosts.host_of(owner) not in on


def test_file_that_is_being_written_is_not_found(tmp_path: Path):
    file = ShardFile(path_of(tmp_path, "a-0", 3))
    file.reserve(4096)
    assert find(tmp_path) == []
    file.finish(Mark(5, 4, START, START))
    assert find(tmp_path) == [found("a-0", 3, 5, ranks=4)]
    file.begin()
    file.bytes[START:] = torch.ones(1, dtype=torch.uint8)
    assert find(tmp_path) == []
    path_of(tmp_path, "a-1", 3).touch()  # its rank was killed before there was any room
    assert find(tmp_path) == []


def test_room_is_reserved_before_anything_is_written(tmp_path: Path):
    file = ShardFile(tmp_path / "part")
    full = OSError(errno.ENOSPC, "No space left on device")
    with (
        mock.patch.object(os, "posix_fallocate", side_effect=full),
        pytest.raises(OSError, match=r"takes 2.0 MiB, but .* are free; make /dev/shm larger"),
    ):
        file.reserve(2 << 20)


def test_two_files_take_twice_the_memory_of_large_values(tmp_path: Path):
    manifest: Any = None
    average = torch.zeros(2 << 20)
    files = [ShardFile(tmp_path / name) for name in ("first", "second")]
    write_shard(files, 1, 1, Description({}, {"average": average}, {}, {}, manifest))
    assert sum(file.bytes.numel() for file in files) < 2.5 * average.nbytes


class Driver:
    """Refuses to pin memory twice, as CUDA does."""

    def __init__(self) -> None:
        self.pinned: dict[int, int] = {}

    def cudaHostRegister(self, start: int, size: int, flags: int) -> int:
        if any(start < end and begin < start + size for begin, end in self.pinned.items()):
            return 712  # cudaErrorHostMemoryAlreadyRegistered
        self.pinned[start] = start + size
        return 0

    def cudaHostUnregister(self, start: int) -> None:
        del self.pinned[start]


def test_memory_of_a_file_is_pinned_only_while_the_file_is_open(tmp_path: Path):
    driver = Driver()
    with mock.patch.object(torch.cuda, "cudart", return_value=driver):
        for size in (1 << 20, 2 << 20, 2 << 20):
            file = ShardFile(tmp_path / "part", pinned=True)
            file.reserve(size)
            assert list(driver.pinned) == [file.bytes.data_ptr()]
            del file
            assert not driver.pinned
        driver.cudaHostRegister = lambda *_: 1
        with pytest.raises(RuntimeError, match=r"CUDA pins files in memory only, .* one is /"):
            ShardFile(tmp_path / "part", pinned=True)


def test_folder_to_which_others_may_write_is_refused(tmp_path: Path):
    made = agent_folder.private_folder(agent_folder.private_folder(tmp_path / "a"), "made")
    assert made.stat().st_mode & 0o777 == 0o700
    assert agent_folder.private_folder(made) == made
    for mode in (0o770, 0o702):
        made.chmod(mode)
        with pytest.raises(PermissionError, match=rf"other users \(mode {mode:o}\), .*pass a fold"):
            MemoryCheckpoints(mock.Mock(), folder=tmp_path / "a", name="made")
    made.chmod(0o700)
    (tmp_path / "link").symlink_to(made)
    with pytest.raises(PermissionError, match="is a symbolic link"):
        agent_folder.private_folder(tmp_path / "link")
    other = mock.patch.object(agent_folder.os, "getuid", return_value=os.getuid() + 1)
    with other, pytest.raises(PermissionError, match="belongs to another user"):
        agent_folder.private_folder(made)


def test_folder_that_others_may_replace_is_refused(tmp_path: Path):
    umask = os.umask(0o002)
    try:
        named = MemoryCheckpoints(mock.Mock(), folder=tmp_path / "new", name="named").folder
    finally:
        os.umask(umask)
    folder = named.parent
    assert folder.stat().st_mode & 0o777 == 0o700
    for mode in (0o770, 0o707):
        folder.chmod(mode)
        with pytest.raises(
            PermissionError, match=rf"new can be written .* \(mode {mode:o}\), .*ed "
        ):
            MemoryCheckpoints(mock.Mock(), folder=folder, name="named")
    folder.chmod(0o1777)  # as /dev/shm
    assert MemoryCheckpoints(mock.Mock(), folder=folder, name="named").folder == named


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder to another user")
@pytest.mark.parametrize("mode", [0o755, 0o1777])
def test_folder_that_its_owner_may_replace_is_refused(tmp_path: Path, mode: int):
    agent_folder.private_folder(tmp_path / "named")
    tmp_path.chmod(mode)
    os.chown(tmp_path, 1, -1)
    with pytest.raises(PermissionError, match=f"{tmp_path} belongs to another user"):
        MemoryCheckpoints(mock.Mock(), folder=tmp_path, name="named")


def test_folders_of_agents_that_have_ended_are_removed(tmp_path: Path):
    with mock.patch.object(agent_folder, "_ROOT", tmp_path):
        own = agent_folder.agent_folder()
        ended = own.with_name(own.name + "9")  # the same process number, started at another time
        ended.mkdir()
        prefix = own.name.removesuffix(f"{os.getppid()}-{own.name.rpartition('-')[2]}")
        others = [tmp_path / name for name in ("poplar-of-another-namespace", f"{prefix}x", prefix)]
        for other in others:
            other.mkdir()
        assert agent_folder.agent_folder() == own
    assert sorted(tmp_path.iterdir()) == sorted([own, *others])


def test_names_of_processes_may_be_any_bytes(tmp_path: Path):
    program = os.fsencode(tmp_path) + b"/\xff) ("
    os.symlink(os.fsencode(shutil.which("sleep")), program)
    process = subprocess.Popen([program, "60"])  # returns after the program has started
    try:
        assert agent_folder._start_of(process.pid).isdecimal()
    finally:
        process.kill()
        process.wait()
