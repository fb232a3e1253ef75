"""The parts of `make gpu`: commands, deadlines, and the output that they must show."""

from __future__ import annotations

import functools
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from single_gpu import mps, nccl

from poplar.ops import Provider

HERE = Path(__file__).resolve().parent
CPP = Provider("C++", "libpoplar_ops_cuda.so")
"""The provider of CUDA operators if the C++ library was built."""
NO_FALLBACK = "error:Triton's kernels do not run on"
"""A warning filter: if Triton cannot run, plain PyTorch would be compared with itself."""

PYTEST = [sys.executable, "-m", "pytest", "-q", "--maxfail=10", "-p", "no:cacheprovider"]
PASSED = r"\b[1-9]\d* passed"
TARGETS = r"^\d+ of \d+ targets met"
STEP_WAYS = ("plain autocast", "fsdp2", *(f"poplar {stage}" for stage in range(4)))
# Tests that only need nvcc need no GPU.
OPERATORS = ["--full", "unit/test_ops.py", "-k", "cuda and not test_cuda_"]
CASES = (
    "uneven shares",
    "passes with a remainder",
    "token weights",
    "clipping",
    "frozen, tied, unused, two groups",
    "activation checkpointing",
    "own loop, a short last batch",
)
OVERFLOWS = [f"{name}-second step" for name in ("AdamW", "momentum", "RMSprop")]
STAGES = range(4)
ENGINE = [
    *(
        f"distributed/test_exact_steps.py::test_steps_equal_one_process_on_the_whole_batch[{case}-{stage}]"
        for case in CASES
        for stage in STAGES
    ),
    "distributed/test_exact_steps.py::test_random_plans_equal_one_process_on_the_whole_batch",
    "distributed/test_exact_steps.py::test_steps_are_exact_on_any_number_of_ranks",
    "distributed/test_exact_steps.py::test_bf16_parameters_are_within_their_rounding",
    "distributed/test_exact_steps.py::test_ranks_may_have_different_batches_without_a_plan",
    "distributed/test_same_bits.py::test_shares_do_not_change_the_bits",
    "distributed/test_persistent_units.py::test_steps_are_exact_and_persistent_units_change_no_bit",
    "integration/test_ecosystem.py::test_scaled_gradients_are_exact",
    *(
        f"integration/test_ecosystem.py::test_overflow_on_one_rank_skips_the_step_on_all[{case}-{stage}]"
        for case in OVERFLOWS
        for stage in STAGES
    ),
    "integration/test_unusual_uses.py::test_fp16_on_rank_without_samples",
]
FAILURES = [
    "distributed/test_bad_input.py::test_exception_in_loss_of_one_rank",
    "distributed/test_killed_ranks.py",
]
NCCL_ENGINE = [
    *(name for name in ENGINE if "[uneven shares-" in name or "[passes with a remainder-" in name),
    "distributed/test_same_bits.py::test_shares_do_not_change_the_bits",
]
NO_HOST_SYNC = ["--full", "distributed/test_no_host_synchronization.py", "-k", "for_a_gpu"]
# A few tests of each kernel: every launch is many times slower under the sanitizer.
MEMORY = (
    "pack_of_thousands or large_pack or pack_in_place or block_sums_give or more_ranks "
    "or (clip_coefficient_matches and 0.05) "
    "or exact_sums_are_exact or norm_is_the_square_root or (rank_sum_computes and dtype1) "
    "or (adamw_gives and False) or adamw_of_more_shards or exact_sum_of_more"
)
# The kernels that use shared memory.
RACES = "(pack_gives and dtype0 and False) or norm_is_the_square_root"


@dataclass(frozen=True, kw_only=True)
class Part:
    """A command, and what its output must show."""

    name: str
    command: Sequence[str | Path]
    seconds: float
    """The deadline. An estimate until a GPU has run it."""
    verdict: str
    """A pattern; the last matching line is shown, and without a match the part has failed."""
    besides: str = ""
    """Another pattern that must match a line."""
    environment: Mapping[str, str] = field(default_factory=dict)
    needs: Callable[[], str] = lambda: ""
    """Returns why it cannot run here; empty if it can."""
    cpp: bool = False
    """Whether it fails unless the C++ library runs the CUDA operators."""
    alone: bool = False
    """Nothing else runs beside it, because it measures time."""
    show: bool = False
    """All of its output is shown, not only the last word."""
    spare_seconds: float | None = None
    """If given, the command gets `--seconds`: the time until its deadline, less this."""


def parts(output: Path, library: Path | None = None) -> list[Part]:
    """Checks first, then what measures time; within each, the most important first.

    Args:
        output: folder of logs and rows.
        library: NCCL to preload where several ranks share the GPU.
    """
    return [*checks(output, library), *measurements(output, library)]


def checks(output: Path, library: Path | None = None) -> list[Part]:
    """The parts that may run beside each other, because they measure no time."""
    staged = {"POPLAR_TEST_BACKEND": "gloo", "POPLAR_TEST_DEVICE": "cuda"}
    shared_nccl = {"environment": on_nccl(library), "needs": lambda: why_no_nccl(library)}
    return [
        of_tests("operators, C++", OPERATORS, seconds=100, cpp=True),
        of_tests("engine, four ranks", ENGINE, seconds=150, environment=staged),
        of_tests("no host synchronization", NO_HOST_SYNC, seconds=60),
        training("training, staged", "gloo", output, seconds=90),
        of_tests("failures, staged", FAILURES, seconds=90, environment=staged),
        of_tests(
            "operators, Triton",
            [*OPERATORS, "-W", NO_FALLBACK],
            seconds=120,
            environment={"POPLAR_OPS": "triton"},
        ),
        training("training, NCCL", "nccl", output, seconds=100, **shared_nccl),
        of_tests("engine, NCCL", NCCL_ENGINE, seconds=100, **shared_nccl),
        of_tests("failures, NCCL", FAILURES, seconds=90, **shared_nccl),
        sanitizer(
            "compute-sanitizer, operators",
            [*PYTEST, *operators_with(MEMORY)],
            seconds=100,
            besides=PASSED,
        ),
        sanitizer(
            "compute-sanitizer, a step",
            [sys.executable, HERE / "gpu_training.py"],
            seconds=80,
            besides="a step of every stage",
        ),
        sanitizer(
            "compute-sanitizer, races",
            [*PYTEST, *operators_with(RACES)],
            seconds=70,
            besides=PASSED,
            tool="racecheck",
        ),
    ]


def measurements(output: Path, library: Path | None = None) -> list[Part]:
    """The parts that measure time, one after the other."""
    # The peers' optimizers may have to be compiled first, which takes minutes.
    kernels = [HERE / "kernels.py", "--device", "cuda", "--no-peers", "--output"]
    return [
        Part(
            name="kernels, C++",
            command=[sys.executable, *kernels, output / "kernels.jsonl", "--rounds", "11"],
            seconds=90,
            verdict=">= ",
            cpp=True,
            alone=True,
        ),
        Part(
            name="a step, one rank",
            command=[
                *(sys.executable, HERE / "gpu_step.py", "--output", output / "step.jsonl"),
                *("--logs", output / "step", "--sizes", "350M", "1.1B", "--rounds", "2"),
                *("--ways", *STEP_WAYS),
            ],
            seconds=230,
            verdict=TARGETS,
            besides=r"^[1-9]\d* of \d+ ways measured",
            alone=True,
            show=True,
            spare_seconds=55,  # as for training; the last case may be late
        ),
        unequal("unequal ranks, NCCL", "nccl", output, library),
        unequal("unequal ranks, staged", "staged", output, library),
        Part(
            name="kernels, Triton",
            command=[
                *(sys.executable, "-W", NO_FALLBACK, *kernels, output / "kernels-triton.jsonl"),
                *("--tensors", "gpt-124m", "--operations", "pack", "chain", "--rounds", "7"),
            ],
            seconds=60,
            verdict=">= ",
            environment={"POPLAR_OPS": "triton"},
            alone=True,
        ),
    ]


def training(name: str, backend: str, output: Path, *, seconds: float, **others: Any) -> Part:
    """Training at every stage with ranks of unequal memory, compared with one process."""
    return Part(
        name=name,
        command=[
            *(sys.executable, HERE / "gpu.py", "--part", "training"),
            *("--output", output, "--backend", backend),
        ],
        seconds=seconds,
        verdict=r"stages? agree",
        spare_seconds=15,  # the ranks' own deadline comes first, so that a hang shows stacks
        **others,
    )


def unequal(name: str, transport: str, output: Path, library: Path | None) -> Part:
    """Unequal ranks by one transport: through host memory only if NCCL cannot be used."""

    def why_not() -> str:
        without_nccl = why_no_nccl(library)
        if transport == "staged" and not without_nccl:
            return "NCCL is used instead: gpu_unequal.py --transports staged"
        return without_nccl if transport == "nccl" else ""

    return Part(
        name=name,
        command=[
            *(sys.executable, HERE / "gpu_unequal.py", "--output", output / "unequal.jsonl"),
            *("--logs", output / "unequal", "--transports", transport, "--starts", "2"),
            *("--seconds", "15", "--speed-seconds", "4", "--rounds", "3", "--deadline", "130"),
            *(("--nccl", library) if library else ()),
        ],
        seconds=240,  # 130, and 45 for each start
        verdict=TARGETS,
        needs=lambda: why_not() or why_no_mps(),
        alone=True,
        show=True,
    )


def of_tests(name: str, arguments: Sequence[str], *, seconds: float, **others: Any) -> Part:
    """A part that runs tests; it fails if all of them are skipped."""
    return Part(name=name, command=[*PYTEST, *arguments], seconds=seconds, verdict=PASSED, **others)


def operators_with(names: str) -> list[str]:
    """Arguments of pytest: the operators' tests on the GPU whose names match."""
    return ["--full", "unit/test_ops.py", "-k", f"cuda and not test_cuda_ and ({names})"]


def sanitizer(
    name: str,
    command: Sequence[str | Path],
    *,
    seconds: float,
    besides: str,
    tool: str = "memcheck",
) -> Part:
    """A command under compute-sanitizer, for Poplar's own kernels only.

    The kernels of torch and cuBLAS are skipped, because they would take minutes. Failed CUDA calls
    are not reported, because torch makes some to detect features.
    """
    found = compute_sanitizer()
    return Part(
        name=name,
        command=[
            *(found or "compute-sanitizer", "--tool", tool, "--error-exitcode", "1"),
            *("--kernel-name", "kernel_substring=poplar", "--report-api-errors", "no"),
            *("--launch-timeout", "0", *command),
        ],
        seconds=seconds,
        verdict=r"SUMMARY: 0 ",
        besides=besides,
        # torch's cached memory would hide accesses out of bounds.
        environment={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        needs=lambda: "" if found else "neither on the path nor in /usr/local/cuda/bin",
        cpp=True,
    )


def compute_sanitizer() -> str | None:
    """The path of compute-sanitizer; None if it is not installed."""
    path = os.environ.get("PATH", os.defpath)
    return shutil.which("compute-sanitizer", path=f"{path}{os.pathsep}/usr/local/cuda/bin")


def on_nccl(library: Path | None) -> dict[str, str]:
    """Environment of parts whose ranks share the GPU by NCCL."""
    return {**nccl.environment(library), "POPLAR_TEST_BACKEND": "nccl"}


@functools.cache
def why_no_nccl(library: Path | None) -> str:
    """Why ranks cannot share a GPU with NCCL; empty if they can."""
    try:
        return nccl.why_not_shared(nccl.version_in_use(library))
    except ValueError as error:
        return str(error)


def why_no_mps() -> str:
    """Why ranks cannot be made unequal on a GPU; empty if they can."""
    return "" if shutil.which(mps.CONTROL) else f"{mps.CONTROL} is not on the path"
