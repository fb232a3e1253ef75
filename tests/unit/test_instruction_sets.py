"""The CPU operators for other instruction sets: the loops that the loader does not select here.

Each operator is compiled from one source for several instruction sets. The versions without AVX-512
and without AVX are built separately here, and the operators' own tests run on them.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
TORCH = Path(torch.__file__).parent
SECONDS = 300
CHIPS = {"avx2": "-mavx2", "sse2": "-msse2"}
"""The feature that the processor needs, and the compiler's option for it."""
FLAGS = ("-ffp-contract=off", "-fno-math-errno")
PROGRAM = """
import sys, pytest, torch
from poplar import ops

torch.ops.load_library(sys.argv[1])
assert not ops.native
assert torch._C._dispatch_has_kernel_for_dispatch_key("poplar::adamw_", "CPU")
sys.exit(pytest.main(["-q", "-x", "-p", "no:cacheprovider", "-m", "not slow", *sys.argv[2:]]))
"""

pytestmark = [
    pytest.mark.full,
    pytest.mark.slow,
    pytest.mark.skipif(platform.machine() != "x86_64", reason="no x86 here"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ here"),
]


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One library for each chip, built in parallel."""
    folder = tmp_path_factory.mktemp("chips")
    built = {chip: folder / f"libpoplar_ops_{chip}.so" for chip in CHIPS}
    started = [subprocess.Popen(build(chip, path)) for chip, path in built.items()]
    assert [process.wait(SECONDS) for process in started] == [0] * len(CHIPS)
    return built


def build(chip: str, path: Path) -> list[str]:
    sources = [str(source) for source in sorted((ROOT / "csrc/ops/cpu").glob("*.cpp"))]
    return [
        *("g++", "-O3", "-std=c++20", CHIPS[chip], *FLAGS),
        *("-fPIC", "-shared", "-w", "-DTORCH_TARGET_VERSION=0x020a000000000000ULL"),
        *(f"-I{ROOT / 'csrc/include'}", "-isystem", str(TORCH / "include"), *sources),
        *(str(TORCH / "lib/libtorch_cpu.so"), str(TORCH / "lib/libc10.so")),
        *(f"-Wl,-rpath,{TORCH / 'lib'}", "-o", str(path)),
    ]


@pytest.mark.parametrize("chip", CHIPS)
def test_operators_give_the_same_bits_on_other_instruction_sets(
    libraries: dict[str, Path], chip: str
) -> None:
    recipe = (ROOT / "CMakeLists.txt").read_text()
    assert all(flag in recipe for flag in FLAGS)
    if chip not in Path("/proc/cpuinfo").read_text().split():
        pytest.skip(f"this processor has no {chip}")
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            PROGRAM,
            str(libraries[chip]),
            "unit/test_ops.py",
            "unit/test_codec.py",
        ],
        cwd=ROOT / "tests",
        env={**os.environ, "POPLAR_OPS": "off"},
        timeout=SECONDS,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
