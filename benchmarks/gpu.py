"""Everything that only a GPU can show, in one command: `make gpu`.

    python benchmarks/gpu.py --output gpu

The operators' tests with the C++ library and with Triton, exact steps with several ranks on the
GPU, the kernels' benchmark, training at every stage with ranks of unequal memory against one
process, and compute-sanitizer over a step. Each part runs in a process of its own, with a deadline,
and goes on where another fails; a short table comes last. Logs and rows are in the folder.
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
from rich.table import Table

import poplar
from poplar import ops

HERE = Path(__file__).resolve().parent
TESTS = HERE.parent / "tests"
OPERATORS = [TESTS / "test_ops.py", "-k", "cuda and not compile and not launches"]
_LEAST_SECONDS = 15.0
ENGINE = [
    TESTS / name for name in ("test_exact_steps.py", "test_norm.py", "test_random_collectives.py")
]


@dataclass(frozen=True, kw_only=True)
class Part:
    """A program, and what to look for in what it says."""

    name: str
    command: Sequence[str | Path]
    seconds: float
    """After which it is ended."""
    verdict: str
    """A pattern; the last line that matches is shown."""
    environment: Mapping[str, str] = field(default_factory=dict)
    needs: Callable[[], str] = lambda: ""
    """Says why it can't be run here, if it can't."""


def parts(output: Path) -> list[Part]:
    """In the order in which they run: what tells most comes first."""
    pytest = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    passed = r"(passed|failed|error)"
    training = [sys.executable, HERE / "gpu.py", "--part", "training", "--output", output]
    return [
        Part(name="operators, C++", command=[*pytest, *OPERATORS], seconds=90, verdict=passed),
        Part(
            name="operators, Triton",
            command=[*pytest, *OPERATORS],
            seconds=120,
            verdict=passed,
            environment={"POPLAR_OPS": "triton"},
        ),
        Part(
            name="training, by way of the host",
            command=[*training, "--backend", "gloo"],
            seconds=120,
            verdict=r"stages? agree",
        ),
        Part(
            name="training, NCCL",
            command=[*training, "--backend", "nccl"],
            seconds=120,
            verdict=r"stages? agree",
            environment={"NCCL_MULTI_RANK_GPU_ENABLE": "1"},
            needs=why_no_shared_nccl,
        ),
        Part(
            name="kernels",
            command=[
                *(sys.executable, HERE / "kernels.py", "--device", "cuda"),
                *("--rounds", "21", "--output", output / "kernels.jsonl"),
            ],
            seconds=120,
            verdict=r"(short|chain.*best|>=)",
        ),
        Part(
            name="compute-sanitizer, a step",
            command=[
                *("compute-sanitizer", "--error-exitcode", "1"),
                *(sys.executable, HERE / "gpu_training.py"),
            ],
            seconds=90,
            verdict=r"ERROR SUMMARY",
            needs=lambda: "" if shutil.which("compute-sanitizer") else "not on the path",
        ),
        Part(
            name="engine, four ranks",
            command=[*pytest, *ENGINE],
            seconds=150,
            verdict=passed,
            environment={"POPLAR_TEST_BACKEND": "gloo", "POPLAR_TEST_DEVICE": "cuda"},
        ),
    ]


def main() -> None:
    """Run the parts; the exit status tells whether all that ran are well."""
    options = parse_options()
    options.output = options.output.resolve()
    options.output.mkdir(parents=True, exist_ok=True)
    if options.part == "training":
        sys.exit(train(options))
    if not torch.cuda.is_available():
        sys.exit(f"torch {torch.__version__} sees no GPU here: `python -m poplar doctor` says more")
    sys.exit(run_parts(options))


def run_parts(options: argparse.Namespace) -> int:
    """One after the other."""
    console = Console(width=max(100, shutil.get_terminal_size().columns))
    table = Table("part", "seconds", "", "last word")
    console.print(f"poplar in {Path(poplar.__file__).parent}; {ops.describe()}", soft_wrap=True)
    failed, deadline = 0, time.monotonic() + options.seconds
    for part in parts(options.output):
        if options.only and not any(word in part.name for word in options.only):
            continue
        why_not = part.needs()
        if why_not:
            table.add_row(part.name, "", "not run", why_not)
            continue
        left = deadline - time.monotonic()
        if left < _LEAST_SECONDS:
            table.add_row(part.name, "", "not run", "no time was left; name it with --only")
            continue
        began = time.monotonic()
        ok, said = run(part, options.output, min(part.seconds, left))
        failed += not ok
        verdict = "ok" if ok else "FAILED"
        console.print(f"{part.name}: {verdict}. {said}", highlight=False, soft_wrap=True)
        table.add_row(part.name, f"{time.monotonic() - began:.0f}", verdict, said)
    console.print(table)
    return int(failed > 0)


def run(part: Part, output: Path, seconds: float) -> tuple[bool, str]:
    """Whether it went well, and its last word."""
    log = output / (re.sub(r"\W+", "-", part.name) + ".log")
    environment = {**os.environ, **part.environment, "COLUMNS": "160"}
    with log.open("w", encoding="utf-8") as file:
        started = subprocess.Popen(
            [str(word) for word in part.command],
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environment,
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
    ok = status == "exit status 0"
    return ok, (said[-1] if said else "") if ok else f"{status}; see {log}"


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
    parser.add_argument("--seconds", type=float, default=480.0, help="for all parts together")
    parser.add_argument("--part", choices=("training",), help="this alone, in this process")
    parser.add_argument("--backend", choices=("gloo", "nccl"), default="gloo")
    parser.add_argument("--size", default="small", help="of the Llama that is trained")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    return parser.parse_args()


if __name__ == "__main__":
    main()
