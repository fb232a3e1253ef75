"""Measure again all saved rows that are older than the code they measure. It takes hours.

    make results                                       # all of them, one file after the other
    python benchmarks/remeasure.py --only codec drift  # some of them
    python benchmarks/remeasure.py --list              # which are older, and why
    python benchmarks/remeasure.py --markdown > benchmarks/results/README.md

A file is current if the code that it measures is as it was at the commits of its rows. Files that
are current are skipped, and so are commands that have ended, so a run that was stopped can be
repeated. Write tables of README.md and docs/ that cite a file again afterwards.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from provenance import ROOT, commit
from rows import NOTHING, Row, markdown_table, new_console, read_rows

RESULTS = ROOT / "benchmarks" / "results"
STEP = ("csrc", "poplar/comm", "poplar/ops", "poplar/training", "poplar/zero", "poplar/step")
"""What a training step runs."""
PLAN = ("poplar/planner", "poplar/profiler", "poplar/tuning", "poplar/values")
"""What makes a plan, and predicts it."""
SEARCH = ("poplar/planner", "poplar/step", "poplar/values")
HEADINGS = ("rows", "measured", "state", "hours", "commands")
CURRENT = "current"


@dataclass(frozen=True)
class Saved:
    """A file of rows, what measures it, and the code whose changes make it old."""

    file: str
    measures: tuple[str, ...]
    hours: float
    commands: tuple[str, ...]
    """Of scripts in this folder, without `--output`; none: no script is left that measures it."""
    needs: str = ""
    """Beside two idle cores and root."""

    @property
    def path(self) -> Path:
        return RESULTS / self.file

    @property
    def name(self) -> str:
        return self.path.stem

    def rows(self) -> list[Row]:
        """All of the file."""
        return read_rows(self.path)

    def changed(self) -> list[str]:
        """What of `measures` is not as it was at the commit of a row, or why that is not known."""
        commits = sorted({str(row["commit"]) for row in self.rows()})
        if any(not is_known(commit) for commit in commits):
            return ["unknown, because their commit is not in the history"]
        return [path for path in self.measures if not all(is_same(c, path) for c in commits)]

    def cells(self) -> Sequence[str]:
        """A line of the table of all files."""
        days = sorted({str(row["day"]) for row in self.rows() if row.get("day")})
        day = " to ".join(dict.fromkeys([days[0], days[-1]])) if days else NOTHING
        since = described(self.changed())
        commands = [f"`{command}`" for command in self.commands]
        needs = [f"needs {self.needs}"] if self.needs else []
        how = "; ".join([*commands, *needs]) or "no script is left"
        return self.file, day, since, f"{self.hours:g}", how


def described(changed: Sequence[str]) -> str:
    """What `Saved.changed` found, in words."""
    return f"changed: {', '.join(changed)}" if changed else CURRENT


SAVED = (
    Saved("search.jsonl", SEARCH, 0.1, ("search.py --rounds 5",)),
    Saved("recomputation.jsonl", ("poplar/hardware", *SEARCH), 0.1, ("recomputation.py",)),
    Saved("per_tensor.jsonl", ("poplar/programmes", *SEARCH), 0.1, ("per_tensor.py",)),
    Saved("noise.jsonl", ("poplar/step", *PLAN), 0.1, ("noise.py --clusters 1008",)),
    Saved("codec.jsonl", ("csrc/ops/cpu", "csrc/include"), 0.1, ("codec.py",)),
    Saved("demo.jsonl", (*STEP, *PLAN), 0.4, ("demo_runs.py",)),
    Saved("optimizers.jsonl", STEP, 0.1, ("optimizers.py",)),
    Saved("host_overhead.jsonl", STEP, 0.1, ("host_overhead.py",)),
    Saved("convergence.jsonl", STEP, 0.2, ("convergence.py",)),
    Saved("checkpoint_format.jsonl", ("poplar/checkpoint", "poplar/zero"), 0.1, ("checkpoint.py",)),
    Saved("elastic.jsonl", ("poplar/elastic", "poplar/checkpoint", *STEP), 0.2, ("elastic.py",)),
    Saved("drift.jsonl", ("poplar/drift", *STEP, *PLAN), 0.5, ("drift.py", "drift.py --overhead")),
    Saved(
        "left_out.jsonl",
        ("poplar/drift", *STEP, *PLAN),
        0.6,
        ("left_out.py", "left_out.py --recovers --stages 1"),
    ),
    Saved("allreduce.jsonl", ("csrc", "poplar/comm", "poplar/ops"), 0.6, (
        "allreduce.py", *(f"allreduce.py --link {rate}" for rate in ("0.1", "1", "10", "25")),
    ), "`make peers`, Open MPI"),
    Saved("memory.jsonl", (*STEP, *PLAN), 0.1, ("memory.py --quick",)),
    Saved("largest_model.jsonl", (*STEP, *PLAN), 0.6, (
        "largest_model.py", "largest_model.py --limits 8 1 1 1"), "`make peers`"),
    Saved("largest_base.jsonl", (*STEP, *PLAN), 0.4, ("largest_base.py",)),
    Saved("watched_jobs.jsonl", ("poplar/watch", *STEP), 0.5, ("watched_jobs.py",), "`make peers`"),
    Saved("prediction.jsonl", (*STEP, *PLAN), 1.0, ("prediction.py --seconds 90 --rounds 3",)),
    Saved(
        "prediction_unsteady.jsonl", (*STEP, *PLAN), 1.0, (),
        "no other run: it is a second one of `prediction.py`, on a machine that was not steady",
    ),
    Saved("slow_links.jsonl", (*STEP, *PLAN), 0.6, (
        "train.py --clusters 2:1@100M 4:2:1@100M --stages 0 1 2 --policies exact int8 int4 "
        "--peers ddp fsdp2 --samples 8 --steps 15 --no-memory --no-parts",
        *(
            "train.py --clusters 2:1@100M --stages 0 2 --policies exact int8 int4 --peers ddp "
            f"--samples 8 --steps 10 --no-memory --no-parts --model {model}"
            for model in ("encoder", "vit")
        ),
        "train.py --clusters 2:1@1G 2:1:1@1G 4:2:1@1G --stages 0 2 --policies exact int8 int4 "
        "--peers ddp --samples 8 --steps 15 --no-memory --no-parts",
        "train.py --clusters 2:1@100M --stages 0 --policies exact int8 int4 --peers ddp "
        "--samples 8 --steps 5 --no-memory --no-parts --model vgg",
    )),
    Saved("per_tensor_measured.jsonl", ("poplar/programmes", *STEP, *PLAN), 3.0, tuple(
        "train.py --quick --no-memory --no-parts --stages 0 1 --peers ddp deepspeed "
        "--policies even flops exact programme --samples 8 --steps 10 --context 16 "
        f"--clusters 2:1 2:1:1 4:2:1 2:1@1G 2:1:1@1G 4:2:1@1G --model {model}"
        for model in ("mixture", "vgg", "encoder", "vit")
    ), "`make peers`"),
    Saved("uneven_baseline.jsonl", (*STEP, *PLAN), 0.5, (
        "train.py --clusters 2:1:1 --samples 16",
    ), "`make peers`"),
    Saved("train.jsonl", (*STEP, *PLAN), 5.0, ("train.py",), "`make peers`"),
    Saved("h200/ranks.jsonl", STEP, 0.1, (), "a GPU: `make gpu`"),
    Saved("h200/learning.jsonl", STEP, 0.1, (), "a GPU: `learning.py --device cuda`"),
    Saved("h200/codec.jsonl", ("csrc/ops/cuda", "csrc/include"), 0.1, (), "a GPU: `make gpu`"),
    Saved("h200/step.jsonl", STEP, 0.1, (), "a GPU: `make gpu`"),
    Saved("h200/unequal.jsonl", (*STEP, *PLAN), 0.1, (), "a GPU: `make gpu`"),
)  # fmt: skip


def main() -> None:
    """Measure what is old, or say what is."""
    options = parse_options()
    chosen = [each for each in SAVED if not options.only or each.name in options.only]
    if options.markdown:
        print("\n".join(page()))
        return
    console = new_console()
    for saved in chosen:
        changed = saved.changed()
        console.print(f"{saved.file}: {described(changed)}")
        if changed and saved.commands and not options.list:
            if commit().endswith("-dirty"):
                sys.exit("files differ from the last commit, so rows could not name their code")
            measure(saved)


def measure(saved: Saved) -> None:
    """Replace a file by rows of today's code. A command that has ended is not run again."""
    done = [saved.path.with_suffix(f".{number}") for number in range(len(saved.commands))]
    for output, command in zip(done, saved.commands, strict=True):
        if not output.exists():
            unfinished = output.with_suffix(output.suffix + ".unfinished")
            unfinished.unlink(missing_ok=True)
            script, *options = shlex.split(command)
            program = [sys.executable, str(ROOT / "benchmarks" / script), *options]
            subprocess.run([*program, "--output", str(unfinished)], check=True)
            unfinished.replace(output)
    saved.path.write_text("".join(map(Path.read_text, done)), encoding="utf-8")
    for output in done:
        output.unlink()


def page() -> Iterator[str]:
    """The lines of `results/README.md`."""
    yield "# Saved rows\n"
    yield (
        "`python benchmarks/remeasure.py --markdown` writes this page. `make results` measures "
        "again what is not current: run it on a machine that does nothing else. Rows are current "
        "if the code that they measure is as it was; else the page names what has changed since.\n"
    )
    yield from markdown_table(HEADINGS, [saved.cells() for saved in SAVED])


def is_known(measured: str) -> bool:
    """Whether a commit is in the history."""
    return _git("cat-file", "-e", f"{measured}^{{commit}}")


def is_same(measured: str, path: str) -> bool:
    """Whether a path has the content that it had at a commit, changes not committed included."""
    return _git("diff", "--quiet", measured, "--", path)


def _git(*command: str) -> bool:
    return subprocess.run(["git", *command], cwd=ROOT, capture_output=True).returncode == 0


def parse_options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [saved.name for saved in SAVED]
    parser.add_argument("--only", nargs="+", choices=names, help="these files")
    parser.add_argument("--list", action="store_true", help="measure nothing")
    parser.add_argument("--markdown", action="store_true", help="print the page of all files")
    return parser.parse_args()


if __name__ == "__main__":
    main()
