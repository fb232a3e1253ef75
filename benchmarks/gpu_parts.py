"""The parts of `make gpu` in order of value: commands, limits and what their output must show."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
SITE = ROOT / "build" / "gpu" / "site"
"""Where the package is built for this machine's GPU; no file outside this repository changes."""
PYTEST = ("-m", "pytest", "-q", "--maxfail=10", "-p", "no:cacheprovider")
PASSED = r"\b[1-9]\d* passed"
RANKS_PASSED = r"^([1-9]\d*) of \1 tasks passed"
# Tests that only need nvcc need no GPU.
OPERATORS = ("--full", "unit/test_ops.py", "unit/test_codec.py", "-k", "cuda and not test_cuda_")
# A few tests of each kernel: every launch is many times slower under the sanitizer.
MEMORY = (
    "gives_the_bits or pack_of_thousands or pack_in_place or more_ranks or adamw_of_more_shards "
    "or exact_sum_of_more or encode_of_many or ranks_are_summed or (large and dtype1) "
    "or (large_adamw and None and False)"
)
COMPILERS = {"CC": "gcc", "CXX": "g++", "CUDAHOSTCXX": "g++"}
"""The system's: an operator that raises ends a process that has two C++ runtimes, as it has if
another compiler links its own into the library."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """A command, and what its output must show."""

    name: str
    command: Sequence[str | Path]
    """Arguments of Python."""
    seconds: float
    """The limit: about twice what it should take."""
    verdict: str
    """A pattern; the last matching line is shown, and without a match the part has failed."""
    environment: Mapping[str, str] = field(default_factory=dict)
    spare: bool = False
    """It runs only if there is time left, and is not missed."""
    needs: str = ""
    """Why it cannot run here."""


def parts(output: Path, device: str) -> list[Part]:
    """All parts, the most valuable first.

    Args:
        output: folder of the rows.
        device: "cuda", or "cpu" to try the same parts without a GPU.
    """
    cuda = device == "cuda"
    rows = output / "ranks.jsonl"
    found = [build(cuda)]
    limits = {"exact": 90, "delays": 90, "plans": 60, "codecs": 90, "elastic": 60, "drift": 120}
    for task, seconds in limits.items():
        found.append(of_ranks(f"two ranks: {task}", [task], device, rows, seconds))
    failures = ["raises", "late", "exits"]
    found += [
        of_ranks("two ranks: quantised bases", ["bases"], device, rows, 90),
        of_triton(device, rows),
        of_ranks("two ranks: failures", failures, device, rows, 120),
        of_ranks("two ranks: short memory", ["memory"], device, rows, 60),
        of_tests(
            "no host synchronization",
            ("--full", "distributed/test_no_host_synchronization.py"),
            seconds=60,
        ),
        of_tests("operators", OPERATORS if cuda else ("unit/test_ops.py", "-k", "pack"), 90),
        of_codec(output, device),
        step(output, device),
        pair(output, device),
        unequal(output, device),
        sanitizer(cuda),
    ]
    return found


def build(cuda: bool) -> Part:
    """Build and install the package for this GPU alone."""
    architecture = ["-C", "cmake.define.CMAKE_CUDA_ARCHITECTURES=native"] if cuda else []
    path = os.environ.get("PATH", os.defpath)
    toolkit = "/usr/local/cuda/bin"  # first, as CMake looks for nvcc there by default
    compilers = {name: f"/usr/bin/{program}" for name, program in COMPILERS.items()}
    return Part(
        name="build",
        command=[
            *(HERE / "gpu_build.py", "--target", SITE, "--provider", "cuda" if cuda else "cpu"),
            *("--", "-C", f"build-dir={SITE.parent / 'cmake'}", *architecture),
            *("-C", f"cmake.define.POPLAR_CUDA={'ON' if cuda else 'OFF'}"),
        ],
        seconds=180,
        verdict=r"^built: ",
        environment={
            "PATH": f"{toolkit}{os.pathsep}{path}",
            **{name: file for name, file in compilers.items() if Path(file).exists()},
        },
    )


def of_ranks(name: str, tasks: Sequence[str], device: str, rows: Path, seconds: float) -> Part:
    """A part of `gpu_ranks.py`, whose own limit comes first, so that a hang shows its stacks."""
    own = (seconds - 10) / len(tasks)
    options = ["--device", device, "--seconds", f"{own:g}", "--output", rows]
    return Part(
        name=name,
        command=[HERE / "gpu_ranks.py", *tasks, *options],
        seconds=seconds,
        verdict=RANKS_PASSED,
    )


def of_triton(device: str, rows: Path) -> Part:
    """Two ranks whose operators are Triton's: every launcher, through PyTorch's dispatcher."""
    part = of_ranks("two ranks: Triton", ["exact", "codecs"], device, rows, 150)
    return replace(part, environment={"POPLAR_OPS": "triton"})


def of_tests(name: str, arguments: Sequence[str], seconds: float) -> Part:
    """A part that runs tests; it fails if all of them are skipped."""
    return Part(name=name, command=[*PYTEST, *arguments], seconds=seconds, verdict=PASSED)


def of_codec(output: Path, device: str) -> Part:
    """Encoding and decoding beside copying."""
    quick = () if device == "cuda" else ("--quick",)
    options = ("--device", device, *quick, "--output", output / "codec.jsonl")
    return Part(
        name="codec",
        command=[HERE / "codec.py", *options],
        seconds=60,
        verdict=r"^\d+ of \d+ targets met",
    )


def step(output: Path, device: str) -> Part:
    """One rank: a step of plain autocast, FSDP2 and Poplar at stage 3."""
    size = "350M" if device == "cuda" else "tiny"
    return Part(
        name="a step beside FSDP2",
        command=[
            *(HERE / "gpu_step.py", "--device", device, "--sizes", size, "--modes", "eager"),
            *("--ways", "plain autocast", "fsdp2", "poplar 3", "--rounds", "1"),
            *("--seconds", "45", "--output", output / "step.jsonl"),
        ],
        seconds=100,
        verdict=r"^([1-9]\d*) of \1 ways measured",
    )


def pair(output: Path, device: str) -> Part:
    """`poplar pair` on all GPUs of this machine."""
    import torch

    few = device == "cuda" and torch.cuda.device_count() < 2
    options = ("--minutes", "1", "--device", device, "--output", output / "pair.json")
    return Part(
        name="card pair",
        command=["-m", "poplar", "pair", *options],
        seconds=150,
        verdict=r"of the sum of solo speeds, .* an equal split",
        spare=True,
        needs="there are fewer than two GPUs" if few else "",
    )


def unequal(output: Path, device: str) -> Part:
    """Three ranks that MPS makes unequal: planned against even steps and the sum of speeds."""
    options = ("--seconds", "15", "--speed-seconds", "4", "--rounds", "3", "--deadline", "130")
    case = () if device == "cuda" else ("--case", "tiny ranks")
    return Part(
        name="unequal ranks",
        command=[
            *(HERE / "gpu_unequal.py", "--device", device, *case, *options),
            *("--transports", "nccl", "--output", output / "unequal.jsonl"),
        ],
        seconds=150,
        verdict=r"^\d+ of \d+ targets met",
        spare=True,
    )


def sanitizer(cuda: bool) -> Part:
    """The operators' tests under compute-sanitizer, for Poplar's own kernels only.

    The kernels of torch and cuBLAS are skipped, because they would take minutes. Failed CUDA calls
    are not reported, because torch makes some to detect features.
    """
    path = f"{os.environ.get('PATH', os.defpath)}{os.pathsep}/usr/local/cuda/bin"
    program = shutil.which("compute-sanitizer", path=path)
    names = OPERATORS[-1]
    tests = [sys.executable, *PYTEST, *OPERATORS[:-1], f"{names} and ({MEMORY})"]
    run = "import subprocess, sys; sys.exit(subprocess.call(sys.argv[1:]))"
    return Part(
        name="compute-sanitizer",
        command=[
            *("-c", run, program or "compute-sanitizer", "--tool", "memcheck"),
            *("--error-exitcode", "1", "--kernel-name", "kernel_substring=poplar"),
            *("--report-api-errors", "no", "--launch-timeout", "0", *tests),
        ],
        seconds=100,
        verdict=r"SUMMARY: 0 ",
        # torch's cached memory would hide accesses out of bounds.
        environment={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        needs="" if program and cuda else "compute-sanitizer or a GPU is missing",
        spare=True,
    )
