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
operators served than it names. In a copy without git, `POPLAR_COMMIT` tells rows what they are of.
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
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from gpu_parts import CPP, HERE, Part, parts
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import poplar
from poplar import ops

TESTS = HERE.parent / "tests"
SECONDS = 480.0
"""For all parts together. The first six may take all of theirs; the rest takes what is left."""
LEAST_SECONDS = 15.0
"""With less left a part is not begun."""
LOG_LINES = 30
"""Of a part that failed, on the console."""


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
    if part.cpp and ops.providers()["cuda"] != CPP:
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
    for pattern in (part.verdict, part.besides):
        if status == "exit status 0" and not any(re.search(pattern, line) for line in lines):
            status += f", but no line matches {pattern!r}"
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
