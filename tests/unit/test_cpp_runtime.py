"""Errors of the C++ operators reach Python whatever C++ runtime their library is linked with.

Some compilers link libstdc++ and libgcc statically. torch cannot catch the exceptions of such a
library, so they must not leave it: see `csrc/ops/operator.h`.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
TORCH = Path(torch.__file__).parent
SECONDS = 300
SOURCES = (ROOT / "csrc/ops/cpu/copy.cpp", ROOT / "tests/csrc/one_operator.cpp")
PROGRAM = """
import sys, torch
from poplar import ops

torch.ops.load_library(sys.argv[1])
assert torch._C._dispatch_has_kernel_for_dispatch_key("poplar::copy_", "CPU")
for size in (4, 5, 4):
    try:
        torch.ops.poplar.copy_(torch.zeros(size), torch.ones(4))
        print("copied")
    except RuntimeError as error:
        print(error)
"""
HIDDEN = "-Wl,--exclude-libs,ALL"


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    if shutil.which("g++") is None:
        pytest.skip("no g++ here")
    folder = tmp_path_factory.mktemp("runtime")
    built = [folder / f"{source.stem}.o" for source in SOURCES]
    for source, path in zip(SOURCES, built, strict=True):
        options = ["-std=c++20", "-O1", "-fPIC", "-fvisibility=hidden", "-w", "-c", "-o", str(path)]
        headers = [f"-I{ROOT / 'csrc/include'}", "-isystem", str(TORCH / "include")]
        version = "-DTORCH_TARGET_VERSION=0x020a000000000000ULL"
        subprocess.run(["g++", *options, version, *headers, str(source)], check=True)
    return built


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize(
    "linked",
    [
        (HIDDEN,),
        ("-static-libstdc++",),
        ("-static-libstdc++", "-static-libgcc"),
        ("-static-libstdc++", "-static-libgcc", HIDDEN),
    ],
    ids=" ".join,
)
def test_errors_of_a_library_with_its_own_runtime_reach_python(
    objects: list[Path], linked: tuple[str, ...], tmp_path: Path
) -> None:
    library = tmp_path / "operator.so"
    torch_libraries = [str(TORCH / "lib/libtorch_cpu.so"), str(TORCH / "lib/libc10.so")]
    subprocess.run(
        ["g++", "-shared", *linked, "-o", str(library), *map(str, objects), *torch_libraries],
        check=True,
    )
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(library)],
        env={**os.environ, "POPLAR_OPS": "off"},
        timeout=SECONDS,
        capture_output=True,
        text=True,
        check=False,
    )
    message = "poplar::copy_: target has 5 elements, source 4"
    assert (done.returncode, done.stdout) == (0, f"copied\n{message}\ncopied\n"), done.stderr


def test_torch_exports_the_function_that_throws_its_errors() -> None:
    """Without it, operators throw exceptions of their own runtime, as the stable ABI expects."""
    symbol = "_ZN3c106detail14torchCheckFailEPKcS2_jS2_"
    assert getattr(ctypes.CDLL(str(TORCH / "lib/libc10.so")), symbol)
