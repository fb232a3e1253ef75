r"""Everything that only a GPU can show, in one command: `make gpu`.

Without make, in this repository's folder:

    export PATH=/usr/local/cuda/bin:$PATH
    python -m pip install --no-index --no-deps --no-build-isolation --upgrade \
      --target build/gpu/site -C build-dir=build/gpu/cmake -C cmake.define.POPLAR_CUDA=ON \
      -C cmake.define.CMAKE_CUDA_ARCHITECTURES=native .
    PYTHONPATH=$PWD/build/gpu/site python benchmarks/gpu.py --output gpu

The operators' tests with the C++ library and with Triton, exact steps with several ranks on the
GPU, training at every stage with ranks of unequal memory against one process, the kernels'
benchmark, and compute-sanitizer. Each part runs in a process of its own, with a deadline, and the
next one goes on where one fails; a short table comes last. Logs and rows are in the folder. A part
is only ok if it said what it was run for: not if all of its tests were skipped, nor if other
operators served than it names.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import poplar
from poplar import ops

HERE = Path(__file__).resolve().parent
TESTS = HERE.parent / "tests"
SECONDS = 480.0
"""For all parts together. The first six may take all of theirs; the rest takes what is left."""
LEAST_SECONDS = 15.0
"""With less left a part is not begun."""
LOG_LINES = 30
"""Of a part that failed, on the console."""

CPP = "C++ (libpoplar_ops_cuda.so)"
"""What `ops.describe` says of CUDA where the library serves."""
PLAIN_SERVES = "error:Triton's kernels don't serve"
"""A filter of warnings: where Triton can't, plain PyTorch would be compared with itself."""

PYTEST = [sys.executable, "-m", "pytest", "-q", "--maxfail=10", "-p", "no:cacheprovider"]
# Those that only ask nvcc need no GPU.
OPERATORS = ["test_ops.py", "-k", "cuda and not test_cuda_"]
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
        f"test_exact_steps.py::test_steps_equal_one_process_on_the_whole_batch[{case}-{stage}]"
        for case in CASES
        for stage in STAGES
    ),
    "test_exact_steps.py::test_random_plans_equal_one_process_on_the_whole_batch",
    "test_exact_steps.py::test_any_number_of_ranks",
    "test_exact_steps.py::test_bf16_parameters_stay_within_their_rounding",
    "test_exact_steps.py::test_without_a_plan_batches_may_differ_all_the_same",
    "test_same_bits.py::test_other_shares_give_the_same_bits",
    "test_kept_units.py::test_steps_equal_one_process_and_keeping_changes_no_bit",
    "test_ecosystem.py::test_scaled_gradients_are_exact",
    *(
        f"test_ecosystem.py::test_an_overflow_on_one_rank_skips_the_step_on_all[{case}-{stage}]"
        for case in OVERFLOWS
        for stage in STAGES
    ),
    "test_everyday_surprises.py::test_fp16_on_a_rank_without_samples",
]
NOBODY_WAITS = ["test_nobody_waits.py", "-k", "for_a_gpu"]
# A few of each kernel's, since every launch is many times slower than without.
MEMORY = (
    "pack_takes_thousands or large_pack or lies_at_its_place or block_sums_give "
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
    """After which it is ended: twice what it should take, or more."""
    verdict: str
    """A pattern; the last line that matches is shown, and without one the part has failed."""
    environment: Mapping[str, str] = field(default_factory=dict)
    needs: Callable[[], str] = lambda: ""
    """Says why it can't be run here, if it can't."""
    cpp: bool = False
    """Whether it has failed where the C++ library does not serve CUDA."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a part went."""

    name: str
    verdict: str
    """`ok`, `FAILED`, `not run` (it can't be, here) or `LEFT OUT` (for lack of time)."""
    said: str
    """Its last word, or why there is none."""
    seconds: float | None = None
    log: Sequence[str] = ()
    """The end of it, where it failed."""


def parts(output: Path) -> list[Part]:
    """In the order in which they run: what tells most comes first."""
    triton = {"POPLAR_OPS": "triton"}
    training = [sys.executable, HERE / "gpu.py", "--part", "training", "--output", output]
    kernels = [HERE / "kernels.py", "--device", "cuda", "--output"]
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
        sanitizer("compute-sanitizer, operators", [*PYTEST, *operators_with(MEMORY)], seconds=75),
        sanitizer(
            "compute-sanitizer, a step", [sys.executable, HERE / "gpu_training.py"], seconds=60
        ),
        sanitizer(
            "compute-sanitizer, races",
            [*PYTEST, *operators_with(RACES)],
            seconds=50,
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
        verdict=r"\b[1-9]\d* passed",
        environment=environment or {},
        cpp=cpp,
    )


def operators_with(words: str) -> list[str]:
    """Arguments of pytest: the operators' tests with these words, on the GPU."""
    return ["test_ops.py", "-k", f"cuda and not test_cuda_ and ({words})"]


def sanitizer(
    name: str, command: Sequence[str | Path], *, seconds: float, tool: str = "memcheck"
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
        # What torch keeps for later is not out of bounds.
        environment={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        needs=lambda: "" if found else "neither on the path nor in /usr/local/cuda/bin",
        cpp=True,
    )


def compute_sanitizer() -> str | None:
    """Where it is; None: nowhere."""
    path = os.environ.get("PATH", os.defpath)
    return shutil.which("compute-sanitizer", path=f"{path}{os.pathsep}/usr/local/cuda/bin")


def main() -> None:
    """Run the parts; the exit status tells whether all that can be run here are well."""
    options = parse_options()
    options.output = options.output.resolve()
    options.output.mkdir(parents=True, exist_ok=True)
    if options.part == "training":
        sys.exit(train(options))
    if not torch.cuda.is_available():
        sys.exit(f"torch {torch.__version__} sees no GPU here: `python -m poplar doctor` says more")
    sys.exit(run_parts(options))


def run_parts(options: argparse.Namespace) -> int:
    """One after the other; 1 if one has failed, or was left out for lack of time."""
    console = Console(width=max(100, shutil.get_terminal_size().columns))
    plainly = {"highlight": False, "markup": False, "soft_wrap": True}
    console.print(f"poplar in {Path(poplar.__file__).parent}; {ops.describe()}", **plainly)
    deadline = time.monotonic() + options.seconds
    outcomes = []
    for part in parts(options.output):
        if options.only and not any(word in part.name for word in options.only):
            continue
        outcome = attempt(part, options.output, deadline - time.monotonic())
        console.print(f"{part.name}: {outcome.verdict}. {outcome.said}", **plainly)
        for line in outcome.log:
            console.print(f"  | {line}", **plainly)
        outcomes.append(outcome)
    console.print(table_of(outcomes))
    bad = [one.name for one in outcomes if one.verdict in ("FAILED", "LEFT OUT")]
    if bad:
        console.print(f"failed or left out: {'; '.join(bad)}", **plainly)
    return int(bool(bad))


def table_of(outcomes: Sequence[Outcome]) -> Table:
    """A line for each."""
    table = Table("part", "seconds", "", "last word")
    for one in outcomes:
        seconds = "" if one.seconds is None else f"{one.seconds:.0f}"
        table.add_row(one.name, seconds, one.verdict, escape(one.said))
    return table


def attempt(part: Part, output: Path, left: float) -> Outcome:
    """Run it, if that is possible and would show something."""
    why_not = part.needs()
    if why_not:
        return Outcome(name=part.name, verdict="not run", said=why_not)
    if part.cpp and CPP not in ops.describe():
        said = f"it is about the C++ library, which does not serve: {ops.describe()}"
        return Outcome(name=part.name, verdict="FAILED", said=said)
    if left < LEAST_SECONDS:
        said = "no time was left: name it with --only, or give more --seconds"
        return Outcome(name=part.name, verdict="LEFT OUT", said=said)
    return run(part, output, min(part.seconds, left))


def run(part: Part, output: Path, seconds: float) -> Outcome:
    """In a process of its own, which is ended with all that it has started."""
    log = output / (re.sub(r"\W+", "-", part.name) + ".log")
    began = time.monotonic()
    with log.open("w", encoding="utf-8") as file:
        started = subprocess.Popen(
            [str(word) for word in part.command],
            stdout=file,
            stderr=subprocess.STDOUT,
            # Gloo's ranks are all here, on a machine whose own name may resolve to nothing.
            env={"GLOO_SOCKET_IFNAME": "lo", **os.environ, **part.environment, "COLUMNS": "160"},
            cwd=TESTS,  # not where `poplar/` lies: what was built is what is tested
            start_new_session=True,
        )
        try:
            status = f"exit status {started.wait(seconds)}"
        except subprocess.TimeoutExpired:
            status = f"not over after {seconds:.0f} s"
        finally:
            with contextlib.suppress(ProcessLookupError):  # its ranks go with it
                os.killpg(started.pid, signal.SIGKILL)
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    said = [line.strip() for line in lines if re.search(part.verdict, line)]
    if status == "exit status 0" and not said:
        status += f", but no line matches {part.verdict!r}"
    ok = status == "exit status 0"
    return Outcome(
        name=part.name,
        verdict="ok" if ok else "FAILED",
        said=said[-1] if ok else f"{status}; see {log}",
        seconds=time.monotonic() - began,
        log=() if ok else lines[-LOG_LINES:],
    )


def train(options: argparse.Namespace) -> int:
    """At every stage; a row each."""
    import gpu_training

    rows = gpu_training.run(
        options.output / "training.jsonl", options.backend, options.size, options.device
    )
    for row in rows:
        print(
            f"stage {row.stage}: gradient off by {row.relative_error:.1e} (tolerance "
            f"{row.tolerance:.0e}), loss {row.losses[0]:.3f} -> {row.losses[-1]:.3f}, "
            f"{row.step_seconds * 1e3:.0f} ms a step, MiB by rank "
            + " / ".join(f"{peak / 2**20:.0f}" for peak in row.peak_bytes)
        )
    well = [row for row in rows if gpu_training.agrees(row)]
    print(f"{len(well)} of {len(rows)} stages agree with one process")
    return int(len(well) < len(rows))


def why_no_shared_nccl() -> str:
    """Why ranks can't share a GPU under NCCL; empty if they can."""
    version = torch.cuda.nccl.version()
    if version < (2, 30):
        return f"NCCL {'.'.join(map(str, version))} refuses several ranks on a GPU; 2.30 takes them"
    return ""


def parse_options() -> argparse.Namespace:
    """What to run, and where it goes."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--output", type=Path, default=Path("gpu"), metavar="FOLDER")
    parser.add_argument("--only", nargs="+", metavar="WORD", help="parts with this in their name")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for all parts together")
    parser.add_argument("--part", choices=("training",), help="this alone, in this process")
    parser.add_argument("--backend", choices=("gloo", "nccl"), default="gloo")
    parser.add_argument("--size", default="small", help="of the Llama that is trained")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    return parser.parse_args()


if __name__ == "__main__":
    main()
