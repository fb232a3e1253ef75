"""Losses of 1,000 steps under unequal plans of stages 0 to 3, beside those of one process.

python benchmarks/convergence.py --output rows.jsonl --draw docs/assets/convergence.svg

Three CPU ranks with unequal batches, passes and shares train a small Llama on the source files of
Python's standard library. A second process, which takes the samples of each batch in reverse
order, shows how much rounding alone changes the losses.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
import torch
import torch.distributed as dist
from launch import run_ranks
from llama import SIZES, Llama, next_byte_loss, warmup_then_cosine
from rows import Column, Kind, Row, Target, at_least, new_parser, report
from text import ByteWindows, load_text
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from poplar import HeteroZeroOptimizer, Plan

CONFIG = SIZES["tiny"]
MICRO_BATCHES, SHARES = ((6, 5), (0, 3), (1, 1)), (0.6, 0.3, 0.1)
"""Ranks with 11, 3 and 2 samples of the global batch, in two passes; one pass is empty."""
SAMPLES = sum(map(sum, MICRO_BATCHES))
PROCESS, REVERSED = "one process", "one process, samples reversed"
EVERY = 5
"""A row has the losses of every fifth step."""
HELD_OUT_ERROR = 0.01
"""Most by which the loss on held-out text may differ from that of one process."""
COLUMNS = (
    Column("run", "run"),
    Column("loss, last 100 steps", "last_loss", "{:.4f}"),
    Column("held out", "held_out_loss", "{:.4f}"),
    Column("largest difference from one process", "largest_difference", "{:.1e}"),
)


def main() -> None:
    """Train all runs, or show saved ones."""
    options = parse_options()
    rows = report(options, measure(options.steps), Kind("convergence", COLUMNS, targets))
    if options.draw:
        draw(rows, options.draw)


def measure(steps: int) -> Iterator[Row]:
    """One row per run, as soon as it has ended; the plain process first."""
    torch.set_num_threads(1)
    expected = train_alone(steps)
    yield row_of(PROCESS, *expected, expected[0])
    yield row_of(REVERSED, *train_alone(steps, reverse=True), expected[0])
    for stage in range(4):
        found = run_ranks(train_on_ranks, len(SHARES), steps, stage)
        yield row_of(f"stage {stage}", *found, expected[0])


def row_of(run: str, losses: list[float], held_out_loss: float, expected: list[float]) -> Row:
    """One run beside the losses of the plain process."""
    differences = [abs(a - b) for a, b in zip(losses, expected, strict=True)]
    return Row.of(
        "convergence",
        {"run": run, "steps": len(losses), "global_batch": SAMPLES},
        {
            "losses": [round(loss, 6) for loss in losses[::EVERY]],
            "differences": [float(f"{value:.3g}") for value in differences[::EVERY]],
            "last_loss": sum(losses[-100:]) / len(losses[-100:]),
            "held_out_loss": held_out_loss,
            "largest_difference": max(differences),
        },
    )


def train_alone(steps: int, *, reverse: bool = False) -> tuple[list[float], float]:
    """The reference in plain PyTorch: the losses, and the loss on held-out text."""
    model, (data, held_out) = new_model(), new_data()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = scheduler_of(optimizer, steps)
    losses = []
    for step in range(steps):
        batch = batch_of(data, indices(len(data), step))
        if reverse:
            batch = {name: value.flip(0) for name, value in batch.items()}
        loss = next_byte_loss(model, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(loss.item())
    with torch.no_grad():
        found = [next_byte_loss(model, batch).item() for batch in evaluation(held_out)]
    return losses, sum(found) / len(found)


def train_on_ranks(steps: int, stage: int) -> tuple[list[float], float]:
    """The same under an unequal plan. Collective."""
    rank = dist.get_rank()
    plan = Plan(
        stage=stage, global_batch=SAMPLES, micro_batches=MICRO_BATCHES, shares=shares_of(stage)
    )
    model, (data, held_out) = new_model(), new_data()
    optimizer = HeteroZeroOptimizer(model, torch.optim.AdamW, plan=plan, lr=3e-3)
    scheduler = scheduler_of(optimizer, steps)
    first = sum(plan.samples(other) for other in range(rank))
    own = slice(first, first + plan.samples(rank))
    losses = []
    for step in range(steps):
        batch = batch_of(data, indices(len(data), step)[own])
        losses.append(float(optimizer.train_step(next_byte_loss, batch, max_norm=1.0).loss))
        scheduler.step()
    own = evaluation(held_out)[rank :: len(SHARES)]
    return losses, optimizer.evaluate(next_byte_loss, own)


def scheduler_of(optimizer: torch.optim.Optimizer, steps: int) -> LambdaLR:
    """Warm-up over a tenth of the steps."""
    return LambdaLR(optimizer, warmup_then_cosine(max(1, steps // 10), steps))


def shares_of(stage: int) -> tuple[float, ...]:
    """At stage 0 nothing is sharded."""
    return SHARES if stage else (1 / len(SHARES),) * len(SHARES)


def new_model() -> Llama:
    """The same weights at every call."""
    torch.manual_seed(0)
    return Llama(CONFIG)


def new_data() -> tuple[ByteWindows, ByteWindows]:
    """Text for training and held-out text; half a megabyte, so that samples repeat little."""
    return load_text(CONFIG.context, limit=1 << 20)


def indices(length: int, step: int) -> list[int]:
    """The samples of a global batch, drawn by the number of the step."""
    generator = torch.Generator().manual_seed(step)
    return torch.randint(length, (SAMPLES,), generator=generator).tolist()


def batch_of(data: ByteWindows, samples: Sequence[int]) -> dict[str, Tensor]:
    """These samples as one batch."""
    items = [data[index] for index in samples]
    return {name: torch.stack([item[name] for item in items]) for name in items[0]}


def evaluation(held_out: ByteWindows) -> list[dict[str, Tensor]]:
    """Equal batches of held-out text."""
    count = min(len(held_out), 480) // 16
    return [batch_of(held_out, range(16 * number, 16 * (number + 1))) for number in range(count)]


def targets(rows: Sequence[Row]) -> Iterator[Target]:
    """Held-out losses beside that of one process."""
    expected = next((row["held_out_loss"] for row in rows if row["run"] == PROCESS), None)
    for row in rows:
        if expected is not None and row["run"].startswith("stage"):
            error = abs(row["held_out_loss"] - expected)
            what = "difference of the loss on held-out text"
            yield Target(
                case=row["run"], what=what, value=error, wanted=HELD_OUT_ERROR, at_most=True
            )


def draw(rows: Sequence[Row], path: Path) -> None:
    """Losses above, their differences from one process below, as SVG."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "convergence"  # the same file for the same rows
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(
        2, 1, sharex=True, figsize=(8, 6), layout="constrained"
    )
    for row in rows:
        at = range(0, row["steps"], EVERY)
        style = "-" if row["run"] in (PROCESS, REVERSED) else "--"
        above.plot(at, row["losses"], style, linewidth=1, label=row["run"])
        if row["run"] != PROCESS:
            below.semilogy(at, [value or math.nan for value in row["differences"]], linewidth=0.8)
        else:
            below.semilogy([], [])  # the same color for a run in both parts
    above.set_ylabel("loss (nats per byte)")
    above.legend(frameon=False, ncols=2)
    below.set_ylabel("difference from one process")
    below.set_xlabel("step")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = new_parser(__doc__)
    parser.add_argument("--steps", type=at_least(1), default=1000, help="steps of each run")
    parser.add_argument("--draw", type=Path, metavar="FILE", help="draw the curves as SVG")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
