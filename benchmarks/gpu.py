r"""Run all checks that need a GPU, in one command: `make gpu`.

Without make, in this repository's folder:

    export PATH=/usr/local/cuda/bin:$PATH
    python -m pip install --no-index --no-deps --no-build-isolation --upgrade \
      --target build/gpu/site -C build-dir=build/gpu/cmake -C cmake.define.POPLAR_CUDA=ON \
      -C cmake.define.CMAKE_CUDA_ARCHITECTURES=native .
    PYTHONPATH=$PWD/build/gpu/site python benchmarks/gpu.py --output gpu

First the checks, several at a time: the operators' tests with the C++ library and with Triton,
exact steps and failing ranks with several ranks on the GPU, training at every stage with ranks of
unequal memory against one process, and compute-sanitizer. Then what measures time, alone: a step of
one rank against plain autocast and FSDP2 (`gpu_step.py`), unequal ranks (`gpu_unequal.py`), and the
kernels. With NCCL 2.30 or newer (`--nccl PATH` preloads it), ranks also share the GPU by NCCL.

Each part runs in a separate process with a deadline, and a failure does not stop the next part. A
short table comes last; it also says what was not run, and why. Logs and rows are in the output
folder. A part passes only if its output shows that it checked what it should: not if all of its
tests were skipped, nor if another provider ran the operators. Missed targets of speed do not fail
it. In a copy without git, set `POPLAR_COMMIT` for the rows.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import torch
from gpu_parts import CPP, HERE, Part, parts
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from single_gpu import nccl

import poplar
from poplar import ops

TESTS = HERE.parent / "tests"
SECONDS = 540.0
"""For all parts together; the build before them takes about a minute."""
MEASURE_SECONDS = 370.0
"""Of it, kept for the parts that measure time."""
ENVIRONMENT = {
    "GLOO_SOCKET_IFNAME": "lo",  # all ranks are on this machine, whose host name may not resolve
    "PYTHONFAULTHANDLER": "1",
}
CORES_PER_CHECK = 4
MOST_CHECKS = 3
"""Checks that run at the same time, if there are enough cores."""
LEAST_SECONDS = 15.0
"""A part is not started with less time left."""
STACK_SECONDS = 0.3
"""Time for each process of a part to write its stacks, after the deadline. All write into one
file, so they do it one after another."""
LOG_LINES = 30
"""Lines of a failed part's log on the console."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of a part."""

    name: str
    verdict: str
    """`ok`, `FAILED`, `not run` (not possible here) or `LEFT OUT` (no time left)."""
    message: str
    """The last line of interest, or the reason for another verdict."""
    seconds: float | None = None
    log: Sequence[str] = ()
    """What is shown of the part's output: its end if it has failed."""


def main() -> None:
    """Run the parts; the exit status is 0 if everything that can run here passed."""
    options = parse_options()
    options.output = options.output.resolve()
    options.output.mkdir(parents=True, exist_ok=True)
    if options.part == "training":
        sys.exit(train(options))
    if not torch.cuda.is_available():
        sys.exit(f"torch {torch.__version__} sees no GPU here: `python -m poplar doctor` says more")
    sys.exit(run_parts(options))


def run_parts(options: argparse.Namespace) -> int:
    """Run the checks beside each other, then the other parts; returns 1 if one failed."""
    console = Console(width=max(100, shutil.get_terminal_size().columns))
    plainly = {"highlight": False, "markup": False, "soft_wrap": True}
    console.print(f"poplar in {Path(poplar.__file__).parent}; {ops.describe()}", **plainly)
    # A part that is ended by SIGABRT must not write gigabytes of memory to disk.
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    deadline = time.monotonic() + options.seconds
    chosen = [part for part in parts(options.output, options.nccl) if is_chosen(part, options.only)]
    checks = [part for part in chosen if not part.alone]
    others = [part for part in chosen if part.alone]
    outcomes = []

    def add(outcome: Outcome) -> None:
        console.print(f"{outcome.name}: {outcome.verdict}. {outcome.message}", **plainly)
        for line in outcome.log:
            console.print(f"  | {line}", **plainly)
        outcomes.append(outcome)

    kept = min(MEASURE_SECONDS, sum(part.seconds for part in others))
    at_a_time = max(1, min(MOST_CHECKS, len(os.sched_getaffinity(0)) // CORES_PER_CHECK))
    with ThreadPoolExecutor(at_a_time) as threads:
        started = [
            threads.submit(attempt, part, options.output, deadline - kept) for part in checks
        ]
        for done in as_completed(started):
            add(done.result())
    for part in others:
        add(attempt(part, options.output, deadline))
    names = [part.name for part in chosen]
    console.print(table_of(sorted(outcomes, key=lambda outcome: names.index(outcome.name))))
    bad = [one.name for one in outcomes if one.verdict in ("FAILED", "LEFT OUT")]
    if bad:
        console.print(f"failed or left out: {'; '.join(bad)}", **plainly)
    return int(bool(bad))


def is_chosen(part: Part, words: Sequence[str] | None) -> bool:
    """Whether `--only` selects a part."""
    return not words or any(word in part.name for word in words)


def table_of(outcomes: Sequence[Outcome]) -> Table:
    """One line per part."""
    table = Table("part", "seconds", "", "last word")
    for one in outcomes:
        seconds = "" if one.seconds is None else f"{one.seconds:.0f}"
        table.add_row(one.name, seconds, one.verdict, escape(one.message))
    return table


def attempt(part: Part, output: Path, deadline: float) -> Outcome:
    """Run a part if it can run here and there is time."""
    left = deadline - time.monotonic()
    why_not = part.needs()
    if why_not:
        return Outcome(name=part.name, verdict="not run", message=why_not)
    if part.cpp and ops.providers()["cuda"] != CPP:
        message = f"it needs the C++ library, but the provider is another: {ops.describe()}"
        return Outcome(name=part.name, verdict="FAILED", message=message)
    if left < LEAST_SECONDS:
        message = "no time was left: select it with --only, or raise --seconds"
        return Outcome(name=part.name, verdict="LEFT OUT", message=message)
    return run(part, output, min(part.seconds, left))


def run(part: Part, output: Path, seconds: float) -> Outcome:
    """Run a part in a separate process; at the deadline, end it with all its children."""
    log = output / (re.sub(r"\W+", "-", part.name) + ".log")
    command = [str(word) for word in part.command]
    if part.spare_seconds is not None:
        command += ["--seconds", f"{max(1.0, seconds - part.spare_seconds):.0f}"]
    began = time.monotonic()
    with log.open("w", encoding="utf-8") as file:
        started = subprocess.Popen(
            command,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**ENVIRONMENT, **os.environ, **part.environment, "COLUMNS": "160"},
            cwd=TESTS,  # not the folder of `poplar/`, so that the built package is tested
            start_new_session=True,
        )
        try:
            status = f"exit status {started.wait(seconds)}"
        except subprocess.TimeoutExpired:
            status = f"not over after {seconds:.0f} s"
            for process in processes_of(started.pid):  # Python writes its stacks into the log
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGABRT)
                time.sleep(STACK_SECONDS)
        finally:
            with contextlib.suppress(ProcessLookupError):  # ends its ranks too
                os.killpg(started.pid, signal.SIGKILL)
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    message = [line.strip() for line in lines if re.search(part.verdict, line)]
    for pattern in (part.verdict, part.besides):
        if status == "exit status 0" and not any(re.search(pattern, line) for line in lines):
            status += f", but no line matches {pattern!r}"
    ok = status == "exit status 0"
    return Outcome(
        name=part.name,
        verdict="ok" if ok else "FAILED",
        message=message[-1] if ok else f"{status}; see {log}",
        seconds=time.monotonic() - began,
        log=lines[-LOG_LINES:] if not ok else lines if part.show else (),
    )


def processes_of(group: int) -> list[int]:
    """The processes of a process group, the youngest first."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            if os.getpgid(int(folder.name)) == group:
                found.append(int(folder.name))
    return sorted(found, reverse=True)


def train(options: argparse.Namespace) -> int:
    """Train at every stage; one row each."""
    import gpu_training

    rows = gpu_training.run(
        options.output / "training.jsonl",
        options.backend,
        options.size,
        options.device,
        options.seconds,
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


def parse_options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--output", type=Path, default=Path("gpu"), metavar="FOLDER")
    parser.add_argument(
        "--only", nargs="+", metavar="WORD", help="run only parts whose name contains one of these"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=SECONDS,
        help="time for all parts together, or for the ranks of --part",
    )
    parser.add_argument(
        "--nccl",
        type=Path,
        metavar="PATH",
        help="preload this NCCL for several ranks on the GPU: a library or its folder",
    )
    parser.add_argument("--part", choices=("training",), help="run only this part, in this process")
    parser.add_argument("--backend", choices=("gloo", "nccl"), default="gloo")
    parser.add_argument("--size", default="small", help="size of the trained Llama model")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    options = parser.parse_args()
    if options.nccl:
        try:
            options.nccl = nccl.find_library(options.nccl)
        except ValueError as error:
            parser.error(str(error))
    return options


if __name__ == "__main__":
    main()
