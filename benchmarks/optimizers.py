"""Speed of training with 8-bit and whole-tensor optimizers, beside AdamW.

python benchmarks/optimizers.py --output rows.jsonl

Two CPU ranks with unequal shares of the state train one Llama per optimizer, in turns of one step.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
import bitsandbytes
import torch
import torch.distributed as dist
import torchao.optim
from launch import run_ranks
from llama import SIZES, Llama, next_byte_loss
from rows import Column, Kind, Row, Target, new_parser, report

from poplar import HeteroZeroOptimizer, Plan

SHARES = (0.7, 0.3)
STAGE = 2
SPEED = 0.95
"""Least part of the speed of AdamW."""
CLASSES: dict[str, tuple[Any, dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, {}),
    "bitsandbytes AdamW8bit": (bitsandbytes.optim.AdamW8bit, {}),
    "torchao AdamW8bit": (torchao.optim.AdamW8bit, {}),
    "Adafactor": (torch.optim.Adafactor, {}),
    "Muon for matrices, AdamW for the rest": (torch.optim.AdamW, {"has_muon": True}),
}
COLUMNS = (
    Column("optimizer", "optimizer"),
    Column("samples/s", "samples_per_second", "{:.2f}"),
    Column("of AdamW", "of_adamw", "{:.3f}"),
    Column("state, MB by rank", "state_megabytes"),
)


def main() -> None:
    """Measure all classes, or show saved rows."""
    options = new_parser(__doc__, quick="a tiny model", rounds=7).parse_args()
    rows = measure(options.rounds, "tiny" if options.quick else "demo")
    report(options, rows, Kind("optimizers", COLUMNS, targets))


def measure(rounds: int, size: str) -> Iterator[Row]:
    """One row per class."""
    found = run_ranks(train, len(SHARES), rounds, size)
    case = {"size": size, "stage": STAGE, "shares": SHARES, "rounds": rounds}
    packages = ("torch", "bitsandbytes", "torchao")
    for name, figures in found.items():
        yield Row.of("optimizers", {"optimizer": name, **case}, figures, packages=packages)


def train(rounds: int, size: str) -> dict[str, dict[str, Any]]:
    """Time steps of all classes in turns. Collective."""
    config, rank = SIZES[size], dist.get_rank()
    samples = 64 if size == "demo" else 8
    plan = Plan(
        stage=STAGE, global_batch=samples, micro_batches=((samples // 2,),) * 2, shares=SHARES
    )
    generator = torch.Generator().manual_seed(rank)
    tokens = torch.randint(256, (samples // 2, config.context + 1), generator=generator)
    batch = {"input": tokens[:, :-1], "target": tokens[:, 1:]}
    optimizers = {name: build(name, Llama(config), plan) for name in CLASSES}
    seconds: dict[str, list[float]] = {name: [] for name in CLASSES}
    for step in range(rounds + 2):
        for name, optimizer in optimizers.items():
            start = time.perf_counter()
            optimizer.train_step(next_byte_loss, batch, max_norm=1.0)
            dist.barrier()
            if step > 1:  # torchao has compiled its update
                seconds[name].append(time.perf_counter() - start)
    held = [round(optimizer.memory()["optimizer"] / 1e6, 2) for optimizer in optimizers.values()]
    by_rank: list[list[float]] = [[]] * len(SHARES)
    dist.all_gather_object(by_rank, held)
    speeds = {name: samples / median(times) for name, times in seconds.items()}
    return {
        name: {
            "samples_per_second": speeds[name],
            "of_adamw": speeds[name] / speeds["AdamW"],
            "state_megabytes": [own[index] for own in by_rank],
        }
        for index, name in enumerate(CLASSES)
    }


def build(name: str, model: Llama, plan: Plan) -> HeteroZeroOptimizer:
    """An optimizer of one of the classes."""
    cls, options = CLASSES[name]
    groups: list[dict[str, Any]] = [{"params": list(model.parameters())}]
    if "has_muon" in options:
        matrices = [p for p in model.blocks.parameters() if p.dim() == 2]
        known = {id(p) for p in matrices}
        rest = [p for p in model.parameters() if id(p) not in known]
        muon = {"optimizer_class": torch.optim.Muon, "lr": 1e-3}
        groups = [{"params": matrices, **muon}, {"params": rest}]
    return HeteroZeroOptimizer(model, cls, plan=plan, params=groups, lr=1e-3)


def targets(rows: Sequence[Row]) -> Iterator[Target]:
    """Speeds beside that of AdamW."""
    for row in rows:
        what = "samples/s, of those with AdamW"
        yield Target(case=row["optimizer"], what=what, value=row["of_adamw"], wanted=SPEED)


if __name__ == "__main__":
    main()
