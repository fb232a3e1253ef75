"""The rendezvous under ThreadSanitizer, with ranks as threads of a C++ program."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMPILER = shutil.which("c++")
SANITIZED = ["-std=c++20", "-O1", "-g", "-fsanitize=thread", "-pthread", "-Wall", "-Wextra"]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("rendezvous") / "rendezvous_threads"
    sources = [ROOT / "tests/csrc/rendezvous_threads.cpp", ROOT / "csrc/core/rendezvous.cpp"]
    command = [COMPILER, *SANITIZED, "-I", ROOT / "csrc/include", *sources, "-o", target]
    built = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    if "libtsan" in built.stderr or "tsan" in built.stderr:
        pytest.skip(f"this compiler has no ThreadSanitizer: {built.stderr.strip()[-200:]}")
    assert built.returncode == 0, built.stderr
    return target


@pytest.mark.skipif(COMPILER is None, reason="there is no C++ compiler")
@pytest.mark.parametrize("ranks", [2, 4])
def test_no_data_races_between_ranks(program: Path, ranks: int) -> None:
    command = [str(program), str(ranks), "3000"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout == "done\n"
    assert "ThreadSanitizer" not in ran.stderr
