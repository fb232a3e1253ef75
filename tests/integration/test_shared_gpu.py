"""MPS for several ranks on one GPU, with a stand-in for its daemon."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from single_gpu import mps

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
