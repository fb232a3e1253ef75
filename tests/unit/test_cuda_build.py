"""What is built and runs for which CUDA toolkit and device; needs neither."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from poplar import _core, ops
from poplar.zero import setup

ROOT = Path(__file__).resolve().parents[2]
CUDA_13 = "sm_75,sm_80,sm_86,sm_89,sm_90,sm_100,sm_120,compute_120"
CUDA_12_6 = "sm_70,sm_75,sm_80,sm_86,sm_89,sm_90,compute_90"


@pytest.mark.parametrize(
    ("capability", "architectures", "served"),
    [
        ((6, 1), CUDA_13, False),
        ((7, 0), CUDA_13, False),
        ((7, 0), CUDA_12_6, True),
        ((7, 5), CUDA_13, True),
        ((8, 6), CUDA_13, True),
        ((8, 7), "sm_86", True),
        ((8, 6), "sm_89", False),
        ((8, 9), "sm_90,sm_90a", False),
        ((12, 0), CUDA_12_6, True),
        ((12, 1), CUDA_13, True),
        ((13, 0), CUDA_13, True),
        ((8, 6), "", True),
    ],
)
def test_a_device_that_the_library_has_no_kernels_for_is_refused(
    monkeypatch, capability, architectures, served
):
    device = torch.device("cuda", 0)
    monkeypatch.setattr(ops, "_cuda_provider", ops.Provider("C++", "libpoplar_ops_cuda.so"))
    monkeypatch.setattr(_core, "CUDA_ARCHITECTURES", architectures)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", str)
    if served:
        setup._check_operators(device)
        return
    message = f"cuda:0: .* not compiled for sm_{capability[0]}{capability[1]}, only for sm_"
    with pytest.raises(ValueError, match=message):
        setup._check_operators(device)
    monkeypatch.setattr(ops, "_cuda_provider", ops.Provider("Triton", "POPLAR_OPS=triton"))
    setup._check_operators(device)


def test_poplar_ops_refuses_other_words():
    program, environment = "from poplar import ops", {**os.environ, "POPLAR_OPS": "of"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True
    )
    assert "POPLAR_OPS must be off, triton or unset, got 'of'" in done.stderr
    assert done.returncode == 1


def cmake(*arguments: object) -> subprocess.CompletedProcess[str]:
    program = shutil.which("cmake", path=Path(sys.executable).parent) or shutil.which("cmake")
    if program is None:
        pytest.skip("no cmake here")
    command = [program, *map(str, arguments)]
    return subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )


@pytest.mark.parametrize(
    ("architectures", "names"),
    [
        ("75-real;80-real;120", "sm_75,sm_80,sm_120,compute_120"),
        ("90-virtual", "compute_90"),
        ("90a-real;100f", "sm_90a,sm_100f,compute_100f"),
        ("native", "sm_89"),
        ("all-major", "sm_80,sm_90,compute_90"),
        ("all", ""),
    ],
)
def test_architectures_are_recorded_as_torch_names_them(tmp_path, architectures, names):
    script = tmp_path / "names.cmake"
    script.write_text(
        "cmake_minimum_required(VERSION 3.26)\n"
        f'include("{ROOT / "csrc/ops/cuda/toolkit.cmake"}")\n'
        "set(CMAKE_CUDA_ARCHITECTURES_NATIVE 89-real)\n"
        "set(CMAKE_CUDA_ARCHITECTURES_ALL_MAJOR 80-real 90)\n"
        f'poplar_architecture_names(names "{architectures}")\n'
        'message(STATUS "[${names}]")\n'
    )
    assert cmake("-P", script).stdout.strip() == f"-- [{names}]"


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
