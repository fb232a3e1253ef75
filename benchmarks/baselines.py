"""Poplar's even plan against DDP (stage 0) and FSDP2 (stage 3) on equal ranks.

`Plan.even` is the baseline of other benchmarks, so it must not be slow. It is compared with
the same model, batches, fused AdamW and processes, in turns of a few steps. The slowest
rank's time counts.

    python benchmarks/baselines.py --ranks 2
    torchrun --nproc-per-node 2 benchmarks/baselines.py --size base     # GPUs
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
import provenance
from launch import LaunchError, run_ranks
from llama import SIZES, Llama, next_byte_loss
from rich.console import Console
from rich.table import Table
from rows import write_rows
from text import ByteWindows, load_text
from train_llama import Batch, epochs, start_process_group, to_device

from poplar import HeteroBatchSampler, HeteroZeroOptimizer, Plan

SEED = 0
TURN_STEPS = 2
"""Short turns spread other load on the machine over both."""
LEARNING_RATE = 1e-3
WARMUP_STEPS = 3
"""Steps that are not counted: first allocations, DDP's new buckets, Poplar's collective order."""

Step = Callable[[Batch], "Tensor | float"]
"""One training step on this rank's batch; returns a loss."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One engine's result, as appended to `--output`."""

    name: str
    provider: str
    size: str
    ranks: int
    batch: int
    """Samples per rank and step."""
    p20_seconds: float
    p50_seconds: float
    p80_seconds: float
    bytes: int
    """Bytes of the model's gradients in fp32."""
    ratio: float
    """Median over steps of the peer's seconds over this engine's; 1 for the peer."""
    device: str
    versions: str
    commit: str


def main() -> None:
    """Run under torchrun if it started this process, else start CPU ranks."""
    options = parse_options()
    if "RANK" in os.environ:
        start_process_group()
        compare(options)
        dist.destroy_process_group()
        return
    cores = sorted(os.sched_getaffinity(0))
    try:
        bound = tuple(cores[rank % len(cores)] for rank in range(options.ranks))
        run_ranks(compare, options.ranks, options, cores=bound)
    except LaunchError as failure:
        print(failure, file=sys.stderr)
        raise SystemExit(1) from None


def compare(options: argparse.Namespace) -> None:
    """Compare the even plan with each requested peer. Collective."""
    device = torch.device("cpu")
    if dist.get_backend() == "nccl":
        device = torch.device("cuda", torch.cuda.current_device())
    console = Console(quiet=dist.get_rank() != 0, soft_wrap=True, highlight=False)
    text, _ = load_text(SIZES[options.size].context, limit=8_000_000)
    rows = []
    for peer in options.peers:
        make_peer, stage = PEERS[peer]
        world_size = dist.get_world_size()
        plan = Plan.even(world_size, world_size * options.batch, options.batch, stage)
        engines = [
            TimedEngine(make(new_model(options, device), plan), text, plan, device)
            for make in (poplar_even, make_peer)
        ]
        train_in_turns(engines, options.steps)
        rows += rows_of(peer, stage, engines, options, device)
        ours, theirs = (engine.agreed_losses() for engine in engines)
        difference = (ours - theirs).abs().max().item()
        console.print(f"{peer}: losses differ by at most {difference:.2g} in {options.steps} steps")
    if dist.get_rank() == 0:
        console.print(table_of(rows))
        if options.output:
            write_rows(options.output, rows)


def new_model(options: argparse.Namespace, device: torch.device) -> Llama:
    """The same weights at every call, on every rank."""
    torch.manual_seed(SEED)
    return Llama(SIZES[options.size]).to(device)


def poplar_even(model: Llama, plan: Plan) -> Step:
    """Poplar with the same batches and shares on every rank."""
    optimizer = HeteroZeroOptimizer(
        model, torch.optim.AdamW, plan=plan, lr=LEARNING_RATE, compute_dtype=torch.float32
    )
    return lambda batch: optimizer.train_step(next_byte_loss, batch).loss


def ddp(model: Llama, plan: Plan) -> Step:
    """DDP with the options that its tutorial recommends for speed."""
    del plan
    parallel = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=LEARNING_RATE, fused=True)
    return plain_step(parallel, optimizer)


def fsdp2(model: Llama, plan: Plan) -> Step:
    """FSDP2 with a unit per block."""
    del plan
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    return plain_step(model, optimizer)


PEERS: dict[str, tuple[Callable[[Llama, Plan], Step], int]] = {"ddp": (ddp, 0), "fsdp2": (fsdp2, 3)}
"""Peers and the equivalent stage of Poplar."""


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    """The usual training loop."""

    def step(batch: Batch) -> Tensor:
        loss = next_byte_loss(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


class TimedEngine:
    """An engine, its batches, and its measurements on this rank."""

    def __init__(self, step: Step, text: ByteWindows, plan: Plan, device: torch.device) -> None:
        self.step = step
        self.device = device
        sampler = HeteroBatchSampler(len(text), plan, seed=SEED)
        self.batches: Iterator[Batch] = epochs(DataLoader(text, batch_sampler=sampler), sampler)
        self.losses: list[float] = []
        self.seconds: list[float] = []

    def take_step(self) -> None:
        """Run and time one step on the next batch, until the device has finished."""
        batch = to_device(next(self.batches), self.device)
        start = time.perf_counter()
        loss = self.step(batch)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.seconds.append(time.perf_counter() - start)
        self.losses.append(float(loss))

    def agreed_losses(self) -> Tensor:
        """The mean over ranks of each step's loss. Collective."""
        losses = torch.tensor(self.losses, device=self.device)
        dist.all_reduce(losses)
        return losses / dist.get_world_size()

    def slowest_seconds(self) -> list[float]:
        """Seconds of each counted step on the slowest rank. Collective."""
        seconds = torch.tensor(self.seconds[WARMUP_STEPS:], device=self.device)
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        return seconds.tolist()


def train_in_turns(engines: Sequence[TimedEngine], steps: int) -> None:
    """Run turns of a few steps each, in reverse order every other round."""
    order = list(engines)
    for start in range(0, steps, TURN_STEPS):
        for engine in order:
            for _ in range(min(TURN_STEPS, steps - start)):
                dist.barrier()
                engine.take_step()
        order.reverse()


def rows_of(
    peer: str,
    stage: int,
    engines: Sequence[TimedEngine],
    options: argparse.Namespace,
    device: torch.device,
) -> list[Row]:
    """One row for Poplar and one for the peer. Collective."""
    seconds = [engine.slowest_seconds() for engine in engines]
    gradients = sum(p.numel() for p in Llama(SIZES[options.size]).parameters()) * 4
    return [
        Row(
            name=f"stage {stage}",
            provider=provider,
            size=options.size,
            ranks=dist.get_world_size(),
            batch=options.batch,
            p20_seconds=statistics.quantiles(own, n=5)[0],
            p50_seconds=statistics.median(own),
            p80_seconds=statistics.quantiles(own, n=5)[3],
            bytes=gradients,
            ratio=statistics.median(
                peers / ours for peers, ours in zip(seconds[1], own, strict=True)
            ),
            device=provenance.device(device.type),
            versions=provenance.versions("torch"),
            commit=provenance.commit(),
        )
        for provider, own in zip(("poplar even", peer), seconds, strict=True)
    ]


def table_of(rows: Sequence[Row]) -> Table:
    """The rows as a table."""
    table = Table(title=f"{rows[0].ranks} ranks, size {rows[0].size}, batch {rows[0].batch} each")
    table.add_column("step at")
    table.add_column("provider")
    for heading in ("ms, p20", "p50", "p80", "speed over peer"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        seconds = (row.p20_seconds, row.p50_seconds, row.p80_seconds)
        milliseconds = (f"{1000 * value:.1f}" for value in seconds)
        table.add_row(row.name, row.provider, *milliseconds, f"{row.ratio:.3f}")
    return table


def parse_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description="Compare Plan.even with DDP (stage 0) and FSDP2 (stage 3) on equal ranks.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--ranks", type=int, default=2, help="CPU processes; not under torchrun")
    parser.add_argument(
        "--peers", nargs="+", choices=tuple(PEERS), default=list(PEERS), help="peers"
    )
    parser.add_argument("--size", choices=tuple(SIZES), default="demo", help="size of the model")
    parser.add_argument("--batch", type=int, default=8, help="samples per rank and step")
    parser.add_argument("--steps", type=int, default=40, help="steps of each engine")
    parser.add_argument("--output", metavar="FILE", help="append one JSON row per engine")
    options = parser.parse_args()
    if options.steps < WARMUP_STEPS + 2:
        parser.error(f"--steps must be at least {WARMUP_STEPS + 2}, got {options.steps}")
    return options


if __name__ == "__main__":
    main()
