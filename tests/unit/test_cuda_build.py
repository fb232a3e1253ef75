"""What is built with which CUDA toolkit; needs none."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
ROOT = Path(__file__).resolve().parents[2]


def cmake(*arguments: object) -> subprocess.CompletedProcess[str]:
    program = shutil.which("cmake", path=Path(sys.executable).parent) or shutil.which("cmake")
    if program is None:
        pytest.skip("no cmake here")
    command = [program, *map(str, arguments)]
    return subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )


@pytest.mark.slow
@pytest.mark.parametrize(("choice", "fails"), [("auto", False), ("ON", True)])
def test_a_too_old_nvcc_is_an_error_only_if_cuda_is_asked_for(tmp_path, choice, fails):
    """An nvcc and a CUDA build of torch that only look like it."""
    nvcc = tmp_path / "nvcc"
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 12.0, V12.0.140'\n")
    nvcc.chmod(0o755)
    for name in ("include/torch/csrc/stable/library.h", "lib/libtorch_cuda.so"):
        (tmp_path / "torch" / name).parent.mkdir(parents=True)
        (tmp_path / "torch" / name).touch()
    pybind11 = subprocess.run(
        [sys.executable, "-m", "pybind11", "--cmakedir"], capture_output=True, text=True, check=True
    )
    done = cmake(
        *("-S", ROOT, "-B", tmp_path / "build", f"-DPOPLAR_CUDA={choice}", "-DPOPLAR_CPU_OPS=OFF"),
        *(f"-DPOPLAR_TORCH={tmp_path / 'torch'}", f"-DCMAKE_CUDA_COMPILER={nvcc}"),
        *(f"-DPython_EXECUTABLE={sys.executable}", f"-Dpybind11_DIR={pybind11.stdout.strip()}"),
    )
    assert (done.returncode != 0) == fails, done.stdout
    if not fails:
        assert "is CUDA 12.0, so the CUDA operators are NOT built" in " ".join(done.stdout.split())
        assert "poplar: CUDA operators OFF (POPLAR_CUDA=auto)" in done.stdout
