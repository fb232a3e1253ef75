"""NCCL and MPS for several ranks on one GPU, with stand-ins for both."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from single_gpu import mps, nccl

# NCCL


@pytest.fixture
def library(tmp_path) -> Path:
    """A library that answers as NCCL 2.30.7 does."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    source, target = tmp_path / "nccl.c", tmp_path / "nvidia" / "nccl" / "lib" / "libnccl.so.2"
    source.write_text("int ncclGetVersion(int *version) { *version = 23007; return 0; }\n")
    target.parent.mkdir(parents=True)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", target, source], check=True)
    return target


def test_library_is_found_by_file_and_by_folder(library, tmp_path):
    assert nccl.find_library(library) == library
    assert nccl.find_library(tmp_path) == library
    (library.parent / "libnccl.so").symlink_to(library)
    assert nccl.find_library(tmp_path) == library, "links are not other libraries"
    with pytest.raises(ValueError, match="found none"):
        nccl.find_library(tmp_path / "absent")


def test_library_is_asked_for_its_version(library, tmp_path):
    assert nccl.version_of(library) == (2, 30, 7)
    (tmp_path / "libnccl.so.2").write_text("no library")
    with pytest.raises(ValueError, match="cannot be used as NCCL"):
        nccl.version_of(tmp_path / "libnccl.so.2")


LOADED = "from single_gpu import nccl; print(nccl.loaded_version())"


@pytest.mark.parametrize("way", ["preloaded", "mapped"])
def test_loaded_version_is_that_of_the_library_in_use(library, way):
    environment = {**os.environ, **(nccl.environment(library) if way == "preloaded" else {})}
    load = f"import ctypes; ctypes.CDLL({str(library)!r}); " if way == "mapped" else ""
    done = subprocess.run(
        [sys.executable, "-c", load + LOADED],
        env=environment,
        cwd=Path(nccl.__file__).parents[1],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "(2, 30, 7)\n"


@pytest.mark.parametrize(
    ("code", "version"), [(2708, (2, 7, 8)), (22809, (2, 28, 9)), (23007, (2, 30, 7))]
)
def test_version_number_is_parsed(code, version):
    assert nccl.parse(code) == version


def test_environment_limits_thread_blocks(tmp_path):
    assert nccl.environment(None)["NCCL_MAX_CTAS"] == str(nccl.MAX_CTAS)
    chosen = nccl.environment(tmp_path / "libnccl.so.2", 5)
    assert chosen["NCCL_MAX_CTAS"] == "5"
    assert chosen["NCCL_MULTI_RANK_GPU_ENABLE"] == "1"
    assert chosen["LD_PRELOAD"] == str(tmp_path / "libnccl.so.2")


# MPS

DAEMON = f"""#!{sys.executable}
import os, pathlib, sys, time
folder = pathlib.Path(os.environ["CUDA_MPS_PIPE_DIRECTORY"])
if sys.argv[1:] == ["-f"]:
    print("started", flush=True)
    if {{fails}}:
        sys.exit("no device")
    (folder / "control").touch()
    while not (folder / "quit").exists():
        time.sleep(0.01)
    sys.exit(0)
command = sys.stdin.read().strip()
if command.startswith("quit"):
    (folder / "quit").touch()
sys.exit(0 if (folder / "control").exists() else 1)
"""


@pytest.fixture
def daemon(tmp_path, monkeypatch):
    """Puts a stand-in for the daemon on the path."""

    def install(*, fails: bool = False) -> None:
        program = tmp_path / mps.CONTROL
        program.write_text(DAEMON.replace("{fails}", str(fails)))
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)

    return install


def test_daemon_has_folders_of_its_own_and_ends_with_the_block(daemon):
    daemon()
    with mps.mps_daemon() as clients:
        pipe, log = (Path(path) for path in clients.values())
        assert pipe.is_dir()
        assert log.is_dir()
        assert len(str(pipe)) < 80
    assert not pipe.exists()


def test_daemon_that_fails_is_reported_with_its_output(daemon):
    daemon(fails=True)
    with pytest.raises(mps.MpsUnavailable, match=r"ended with 1: .*no device"), mps.mps_daemon():
        pass


def test_missing_daemon_is_reported(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(mps.MpsUnavailable, match="not on the path"), mps.mps_daemon():
        pass


def test_percentage_is_given_to_each_client():
    assert mps.thread_percentage(12.5) == {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "12.5"}
