"""What `make gpu` runs: programs, how long they may take, and what they must say."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
CPP = "C++ (libpoplar_ops_cuda.so)"
"""What `ops.describe` says of CUDA where the library serves."""
PLAIN_SERVES = "error:Triton's kernels don't serve"
"""A filter of warnings: where Triton can't, plain PyTorch would be compared with itself."""

PYTEST = [sys.executable, "-m", "pytest", "-q", "--maxfail=10", "-p", "no:cacheprovider"]
PASSED = r"\b[1-9]\d* passed"
# Those that only ask nvcc need no GPU.
OPERATORS = ["unit/test_ops.py", "-k", "cuda and not test_cuda_"]
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
NOBODY_WAITS = ["distributed/test_no_host_synchronization.py", "-k", "for_a_gpu"]
# A few of each kernel's, since every launch is many times slower than without.
MEMORY = (
    "pack_takes_thousands or large_pack or lies_at_its_place or block_sums_give or more_ranks "
    "or (clip_coefficients and 0.05) "
    "or exact_sums_are_exact or norms_are_roots or (rank_sum_leaves and dtype1) "
    "or (unpack_gives and dtype1) or (adamw_gives and False)"
)
# The kernels that have shared memory.
RACES = "(pack_leaves and dtype0) or norms_are_roots"


@dataclass(frozen=True, kw_only=True)
class Part:
    """A program, and what to look for in what it says."""

    name: str
    command: Sequence[str | Path]
    seconds: float
    """After which it is ended. A guess until a GPU has run it."""
    verdict: str
    """A pattern; the last line that matches is shown, and without one the part has failed."""
    besides: str = ""
    """Another one that a line has to match."""
    environment: Mapping[str, str] = field(default_factory=dict)
    needs: Callable[[], str] = lambda: ""
    """Says why it can't be run here, if it can't."""
    cpp: bool = False
    """Whether it has failed where the C++ library does not serve CUDA."""


def parts(output: Path) -> list[Part]:
    """In the order in which they run: what tells most comes first."""
    triton = {"POPLAR_OPS": "triton"}
    training = [sys.executable, HERE / "gpu.py", "--part", "training", "--output", output]
    # Others' optimizers may have to be compiled first, which takes minutes.
    kernels = [HERE / "kernels.py", "--device", "cuda", "--no-peers", "--output"]
    agree = r"stages? agree"
    return [
        of_tests("operators, C++", OPERATORS, seconds=70, cpp=True),
        of_tests(
            "engine, four ranks",
            ENGINE,
            seconds=120,
            environment={"POPLAR_TEST_BACKEND": "gloo", "POPLAR_TEST_DEVICE": "cuda"},
        ),
        of_tests("nobody waits", NOBODY_WAITS, seconds=45),
        Part(
            name="training, by way of the host",
            command=[*training, "--backend", "gloo"],
            seconds=65,
            verdict=agree,
        ),
        Part(
            name="kernels, C++",
            command=[sys.executable, *kernels, output / "kernels.jsonl", "--rounds", "11"],
            seconds=90,
            verdict=">= ",
            cpp=True,
        ),
        of_tests(
            "operators, Triton",
            [*OPERATORS, "-W", PLAIN_SERVES],
            seconds=90,
            environment=triton,
        ),
        sanitizer(
            "compute-sanitizer, operators",
            [*PYTEST, *operators_with(MEMORY)],
            seconds=75,
            besides=PASSED,
        ),
        sanitizer(
            "compute-sanitizer, a step",
            [sys.executable, HERE / "gpu_training.py"],
            seconds=60,
            besides="a step of every stage",
        ),
        sanitizer(
            "compute-sanitizer, races",
            [*PYTEST, *operators_with(RACES)],
            seconds=50,
            besides=PASSED,
            tool="racecheck",
        ),
        Part(
            name="kernels, Triton",
            command=[
                *(sys.executable, "-W", PLAIN_SERVES, *kernels, output / "kernels-triton.jsonl"),
                *("--tensors", "gpt-124m", "--operations", "pack", "chain", "--rounds", "7"),
            ],
            seconds=60,
            verdict=">= ",
            environment=triton,
        ),
        Part(
            name="training, NCCL",
            command=[*training, "--backend", "nccl"],
            seconds=70,
            verdict=agree,
            environment={"NCCL_MULTI_RANK_GPU_ENABLE": "1"},
            needs=why_no_shared_nccl,
        ),
    ]


def of_tests(
    name: str,
    arguments: Sequence[str],
    *,
    seconds: float,
    environment: Mapping[str, str] | None = None,
    cpp: bool = False,
) -> Part:
    """Some of the tests; if all of them were skipped, they have shown nothing."""
    return Part(
        name=name,
        command=[*PYTEST, *arguments],
        seconds=seconds,
        verdict=PASSED,
        environment=environment or {},
        cpp=cpp,
    )


def operators_with(words: str) -> list[str]:
    """Arguments of pytest: the operators' tests with these words, on the GPU."""
    return ["unit/test_ops.py", "-k", f"cuda and not test_cuda_ and ({words})"]


def sanitizer(
    name: str,
    command: Sequence[str | Path],
    *,
    seconds: float,
    besides: str,
    tool: str = "memcheck",
) -> Part:
    """A program under compute-sanitizer, which looks at Poplar's own kernels alone.

    Neither at those of torch and cuBLAS, which would take minutes, nor at calls of CUDA that fail,
    which torch makes to find out what there is.
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
        # What torch keeps for later is not out of bounds.
        environment={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        needs=lambda: "" if found else "neither on the path nor in /usr/local/cuda/bin",
        cpp=True,
    )


def compute_sanitizer() -> str | None:
    """Where it is; None: nowhere."""
    path = os.environ.get("PATH", os.defpath)
    return shutil.which("compute-sanitizer", path=f"{path}{os.pathsep}/usr/local/cuda/bin")


def why_no_shared_nccl() -> str:
    """Why ranks can't share a GPU under NCCL; empty if they can."""
    version = torch.cuda.nccl.version()
    if version < (2, 30):
        return f"NCCL {'.'.join(map(str, version))} refuses several ranks on a GPU; 2.30 takes them"
    return ""
