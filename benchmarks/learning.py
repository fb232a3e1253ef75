"""Losses of compressed communication beside exact: stages 1 to 3, several seeds, real text.

Two CPU ranks with 4 and 1 samples of each global batch train a Llama of 11 million parameters on
the source files of Python's standard library. A seed draws the first weights and all batches, so
runs of a seed differ only in what ranks send. Without compression all stages have one gradient:
`benchmarks/convergence.py` shows it, and exact runs use one stage. "reordered" is exact too, with
the samples of each batch in reverse order: it shows how much rounding alone changes the losses.

    python benchmarks/learning.py --quick
    nice -n 19 python benchmarks/learning.py --output learning.jsonl
    python benchmarks/learning.py --show benchmarks/results/h200/learning.jsonl --draw curves.svg

Runs that the output file already has are skipped, so a command that was ended can be repeated. With
`--device cuda` both ranks share a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
import torch
import torch.distributed as dist
from convergence import batch_of, evaluation
from launch import run_ranks
from llama import Llama, LlamaConfig, next_byte_loss
from rows import (
    Column,
    Row,
    Target,
    at_least,
    new_console,
    new_parser,
    print_targets,
    read_rows,
    shown_rows,
    table_of,
    write_rows,
)
from single_gpu import nccl
from text import load_text
from torch import Tensor

from poplar import HeteroZeroOptimizer, Plan

BENCHMARK = "learning"
EXACT, REORDERED, EXACT_STAGE = "exact", "reordered", 2
COMMUNICATIONS, EXACT_ONES = (EXACT, "int8", "int4", REORDERED), (EXACT, REORDERED)
MICRO_BATCHES, SHARES = ((4,), (1,)), (0.8, 0.2)
SAMPLES = sum(map(sum, MICRO_BATCHES))
LEARNING_RATE = 5e-4
"""The largest, after a tenth of the steps; it begins at a 25th, and ends at almost 0."""
EVERY = 10
"""A row has the mean loss of each so many steps."""
DRAWN = 3
"""Of these means, in each point of a curve."""
MOST_INT4 = 0.005
"""By which the held-out loss at 4 bits may differ from the exact one, as a fraction of it."""
COLUMNS = (
    Column("communication", "communication"),
    Column("stage", "stage"),
    Column("seed", "seed"),
    Column("steps", "steps"),
    Column("loss, last 100 steps", "last_loss", "{:.4f}"),
    Column("held out", "held_out_loss", "{:.4f}"),
    Column("of exact, %", "of_exact", "{:+.2f}"),
    Column("minutes", lambda row: row["seconds"] / 60, "{:.1f}"),
    Column("commit", "commit"),
)


MEANS = (
    *(Column(name, name) for name in ("communication", "stage", "seeds")),
    Column("loss, last 100 steps", "last_loss", "{:.4f}"),
    Column("of exact, %", "last_loss_of_exact", "{:+.2f}"),
    Column("held out", "held_out_loss", "{:.4f}"),
    Column("of exact, %", "held_out_loss_of_exact", "{:+.2f}"),
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run."""

    communication: str
    stage: int
    seed: int
    steps: int
    width: int
    layers: int
    context: int
    device: str = "cpu"

    @property
    def config(self) -> LlamaConfig:
        """The model."""
        heads = self.width // 64
        return LlamaConfig(
            width=self.width,
            layers=self.layers,
            heads=heads,
            kv_heads=heads,
            hidden=3 * self.width,
            context=self.context,
        )

    @property
    def is_cuda(self) -> bool:
        """Whether the ranks share a GPU."""
        return self.device == "cuda"

    @property
    def command(self) -> str:
        """What measures this row."""
        return (
            f"python benchmarks/learning.py --communications {self.communication} "
            f"--stages {self.stage} --seeds {self.seed} --steps {self.steps} --width {self.width} "
            f"--layers {self.layers} --context {self.context} --device {self.device}"
        )


def main() -> None:
    """Train all runs that are missing, or show saved ones."""
    options = parse_options()
    rows = shown_rows(options.show, BENCHMARK) if options.show else []
    if not options.show and options.output and options.output.exists():
        rows = read_rows(options.output, BENCHMARK)
    done = {json.dumps(row.case) for row in rows}
    for case in [] if options.show else cases(options):
        if json.dumps(asdict(case)) not in done:
            row = measure(case)
            rows.append(row)
            if options.output:
                write_rows(options.output, [row])
    console = new_console()
    console.print(table_of(compared(rows), COLUMNS))
    console.print(table_of(list(means(rows)), MEANS, "means of the seeds that also ran exactly"))
    print_targets(targets(rows), console)
    if options.draw:
        draw(rows, options.draw)


def cases(options: argparse.Namespace) -> Iterator[Case]:
    """All runs: one stage after the other, and within a stage all runs of a seed."""
    names = ("steps", "width", "layers", "context", "device")
    sizes = {name: getattr(options, name) for name in names}
    for number, stage in enumerate(options.stages):
        for seed in options.seeds:
            for communication in options.communications:
                is_exact = communication in EXACT_ONES
                if number == 0 or not is_exact:
                    at = EXACT_STAGE if is_exact else stage
                    yield Case(communication=communication, stage=at, seed=seed, **sizes)


def measure(case: Case) -> Row:
    """Train one run on two ranks."""
    options = {"before": be_a_host, "backend": "cpu:gloo,cuda:nccl"} if case.is_cuda else {}
    found = run_ranks(train, len(SHARES), case, **options)
    losses = found.pop("losses")
    parts = [losses[start : start + EVERY] for start in range(0, len(losses), EVERY)]
    found["losses"] = [round(mean(part), 5) for part in parts]
    found["last_loss"] = mean(losses[-100:])
    figures = found | {"command": case.command}
    return Row.of(BENCHMARK, asdict(case), figures, device=case.device)


def be_a_host(rank: int) -> None:
    """For NCCL, which refuses two ranks of one host on one GPU."""
    os.environ.update(nccl.one_host_per_rank(rank))


def train(case: Case) -> dict[str, Any]:
    """The figures. Collective."""
    rank = dist.get_rank()
    plan = Plan(stage=case.stage, global_batch=SAMPLES, micro_batches=MICRO_BATCHES, shares=SHARES)
    torch.manual_seed(case.seed)
    device = torch.device(case.device)
    model, (data, held_out) = Llama(case.config).to(device), load_text(case.context)
    optimizer = HeteroZeroOptimizer(
        model,
        torch.optim.AdamW,
        plan=plan,
        compute_dtype=torch.float32,
        communication=EXACT if case.communication == REORDERED else case.communication,
        lr=LEARNING_RATE,
        betas=(0.9, 0.95),
        weight_decay=0.1,
    )
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, LEARNING_RATE, total_steps=case.steps, pct_start=0.1, cycle_momentum=False
    )
    own = slice(plan.offset(rank), plan.offset(rank) + plan.samples(rank))
    draws = torch.Generator().manual_seed(case.seed)
    losses, began = [], time.perf_counter()
    for step in range(case.steps):
        samples = torch.randint(len(data), (SAMPLES,), generator=draws).tolist()
        if case.communication == REORDERED:
            samples.reverse()
        batch = moved(batch_of(data, samples[own]), device)
        losses.append(float(optimizer.train_step(next_byte_loss, batch, max_norm=1.0).loss))
        scheduler.step()
        if rank == 0 and step % 100 == 99:
            print(f"{case.command}: step {step + 1}, loss {losses[-1]:.4f}", file=sys.stderr)
    seconds = time.perf_counter() - began
    batches = [moved(batch, device) for batch in evaluation(held_out)[rank :: len(SHARES)]]
    held_out_loss = optimizer.evaluate(next_byte_loss, batches)
    return {
        "losses": losses,
        "held_out_loss": held_out_loss,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "seconds": seconds,
    }


def moved(batch: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """The batch on a device."""
    return {name: tensor.to(device) for name, tensor in batch.items()}


def exact_of(row: Row, rows: Sequence[Row]) -> Row | None:
    """The exact run of the same seed and sizes."""
    wanted = dict(row.case) | {"communication": EXACT, "stage": EXACT_STAGE}
    return next((other for other in rows if other.case == wanted), None)


def compared(rows: Sequence[Row]) -> list[Row]:
    """Rows with their held-out loss over that of the exact run of the same seed, in percent."""
    found = []
    for row in rows:
        exact = exact_of(row, rows)
        of_exact = exact and 100 * (row["held_out_loss"] / exact["held_out_loss"] - 1)
        found.append(replace(row, figures={**row.figures, "of_exact": of_exact}))
    return found


def means(rows: Sequence[Row]) -> Iterator[Row]:
    """For each communication and stage, the mean losses, and these beside those of exact runs."""
    groups: dict[tuple[str, int], list[tuple[Row, Row]]] = {}
    for row in rows:
        if (exact := exact_of(row, rows)) is not None:
            groups.setdefault((row["communication"], row["stage"]), []).append((row, exact))
    for (communication, stage), pairs in sorted(groups.items()):
        figures: dict[str, float] = {"seeds": len(pairs)}
        for name in ("last_loss", "held_out_loss"):
            found, expected = (mean(row[name] for row in own) for own in zip(*pairs, strict=True))
            figures |= {name: found, f"{name}_of_exact": 100 * (found / expected - 1)}
        case = {"communication": communication, "stage": stage}
        yield replace(pairs[0][0], case=case, figures=figures)


def targets(rows: Sequence[Row]) -> Iterator[Target]:
    """Held-out losses beside the exact ones, means over the seeds that have both."""
    exact = [row["held_out_loss"] for row in rows if row["communication"] == EXACT]
    groups: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for row in rows:
        beside = exact_of(row, rows)
        if beside is not None and row["communication"] not in EXACT_ONES:
            pair = row["held_out_loss"], beside["held_out_loss"]
            groups.setdefault((row["communication"], row["stage"]), []).append(pair)
    for (communication, stage), pairs in sorted(groups.items()):
        found, expected = map(mean, zip(*pairs, strict=True))
        case = f"{communication}, stage {stage}, {len(pairs)} seeds"
        what, value = "difference from the exact held-out loss, nats", abs(found - expected)
        # At 8 bits the spread of the seeds.
        wanted = MOST_INT4 * expected if communication == "int4" else max(exact) - min(exact)
        yield Target(case=case, what=what, value=value, wanted=wanted, at_most=True)


def drawn(row: Row) -> list[float]:
    """The loss of each point of a curve."""
    losses = row["losses"]
    return [mean(losses[start : start + DRAWN]) for start in range(0, len(losses), DRAWN)]


def draw(rows: Sequence[Row], path: Path) -> None:
    """Losses above, and below them the differences from the exact run of the seed, as SVG."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = BENCHMARK  # the same file for the same rows
    from matplotlib import pyplot

    compressed = {row["stage"] for row in rows if row["communication"] not in EXACT_ONES}
    stages = sorted(compressed or {EXACT_STAGE})
    figure, axes = pyplot.subplots(
        2, len(stages), sharex=True, sharey="row", figsize=(4 * len(stages), 6), squeeze=False,
        layout="constrained",
    )  # fmt: skip
    colors = dict(zip(COMMUNICATIONS, ("black", "tab:blue", "tab:orange", "tab:gray"), strict=True))
    for column, stage in enumerate(stages):
        above, below = axes[:, column]
        for communication, color in colors.items():
            own_stage = EXACT_STAGE if communication in EXACT_ONES else stage
            labels = iter([communication])
            for row in rows:
                if (row["communication"], row["stage"]) != (communication, own_stage):
                    continue
                losses = drawn(row)
                at = [EVERY * DRAWN * (number + 0.5) for number in range(len(losses))]
                above.plot(at, losses, color=color, linewidth=0.7, label=next(labels, None))
                exact = exact_of(row, rows)
                if exact is not None and exact is not row:
                    parts = zip(losses, drawn(exact), strict=True)
                    percents = [100 * (one / other - 1) for one, other in parts]
                    below.plot(at, percents, color=color, linewidth=0.7)
        above.set_title(f"stage {stage}")
        above.legend(frameon=False)
        below.axhline(0, color="black", linewidth=0.5)
        below.set_xlabel("step")
    axes[0, 0].set_ylabel("loss (nats per byte)")
    axes[1, 0].set_ylabel("above the exact run of the seed, %")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    quick = "a tiny model, 5 steps, one seed and stage, unless given"
    parser = new_parser(__doc__, quick=quick)
    several = {"nargs": "+", "default": None}
    parser.add_argument("--communications", choices=COMMUNICATIONS, **several)
    parser.add_argument("--stages", type=int, choices=range(4), **several)
    parser.add_argument("--seeds", type=at_least(0), **several)
    sizes = {"steps": (1500, 5), "width": (448, 64), "layers": (4, 2), "context": (64, 32)}
    for name, (default, _) in sizes.items():
        parser.add_argument(f"--{name}", type=at_least(1), help=f"(default: {default})")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--draw", type=Path, metavar="FILE", help="draw the curves as SVG")
    options = parser.parse_args(arguments)
    options.communications = options.communications or list(COMMUNICATIONS)
    options.stages = options.stages or ([2] if options.quick else [2, 3, 1])
    options.seeds = options.seeds or ([0] if options.quick else [0, 1, 2])
    for name, values in sizes.items():
        setattr(options, name, getattr(options, name) or values[options.quick])
    return options


if __name__ == "__main__":
    main()
