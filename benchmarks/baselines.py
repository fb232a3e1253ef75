"""Our own even plan against what a user would pick on equal ranks: DDP (stage 0), FSDP2 (stage 3).

A gain over a slow baseline is no gain, so before `Plan.even` serves as one it is held against these
two: same model, same batches, same fused AdamW, same processes, turn by turn. The slowest rank
counts.

    python benchmarks/baselines.py --ranks 2
    torchrun --nproc-per-node 2 benchmarks/baselines.py --size base     # GPUs
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
from launch import LaunchError, run_ranks
from llama import SIZES, Llama, next_byte_loss
from rich.console import Console
from rich.table import Table
from text import ByteWindows, load_text
from train_llama import Batch, epochs, start_process_group, to_device

from poplar import HeteroBatchSampler, HeteroZeroOptimizer, Plan

SEED = 0
TURN_STEPS = 2
"""Short turns: what else the machine does should hit both alike."""
LEARNING_RATE = 1e-3
WARMUP_STEPS = 3
"""Not counted: allocations, DDP's rebuilding of its buckets, the recording of our schedule."""

Step = Callable[[Batch], "Tensor | float"]
"""One training step of one contender on this rank's batch; returns a loss."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One contender's result, as it is appended to `--output`."""

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
    """Of the model's gradients in fp32: what a step has to reduce."""
    ratio: float
    """Speed over the peer's: the median over steps of its seconds over ours in the same step, which
    were taken close together; 1 for the peer itself."""
    device: str
    versions: str
    commit: str


def main() -> None:
    """Run under torchrun if it started us, else on CPU ranks of our own."""
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
    """Hold the even plan against each peer that was asked for; every rank runs this."""
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
        contenders = [
            Contender(make(new_model(options, device), plan), text, plan, device)
            for make in (poplar_even, make_peer)
        ]
        train_in_turns(contenders, options.steps)
        rows += rows_of(peer, stage, contenders, options, device)
        ours, theirs = (contender.agreed_losses() for contender in contenders)
        difference = (ours - theirs).abs().max().item()
        console.print(f"{peer}: losses differ by at most {difference:.2g} in {options.steps} steps")
    if dist.get_rank() == 0:
        console.print(table_of(rows))
        if options.output:
            with Path(options.output).open("a") as output:
                output.writelines(json.dumps(asdict(row)) + "\n" for row in rows)


def new_model(options: argparse.Namespace, device: torch.device) -> Llama:
    """The same weights at every call, on every rank."""
    torch.manual_seed(SEED)
    return Llama(SIZES[options.size]).to(device)


def poplar_even(model: Llama, plan: Plan) -> Step:
    """Our engine, used as its peers have to be: the same for every rank."""
    optimizer = HeteroZeroOptimizer(
        model, torch.optim.AdamW, plan=plan, lr=LEARNING_RATE, compute_dtype=torch.float32
    )
    return lambda batch: optimizer.train_step(next_byte_loss, batch).loss


def ddp(model: Llama, plan: Plan) -> Step:
    """Torch's replicated data parallelism, with the options its tutorial recommends for speed."""
    del plan
    parallel = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=LEARNING_RATE, fused=True)
    return plain_step(parallel, optimizer)


def fsdp2(model: Llama, plan: Plan) -> Step:
    """Torch's sharded data parallelism, a unit per block."""
    del plan
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    return plain_step(model, optimizer)


PEERS: dict[str, tuple[Callable[[Llama, Plan], Step], int]] = {"ddp": (ddp, 0), "fsdp2": (fsdp2, 3)}
"""Whom we are held against, and at which of our stages."""


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    """The loop that everybody writes."""

    def step(batch: Batch) -> Tensor:
        loss = next_byte_loss(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


class Contender:
    """A way to train, the batches it is fed, and how it did on this rank."""

    def __init__(self, step: Step, text: ByteWindows, plan: Plan, device: torch.device) -> None:
        self.step = step
        self.device = device
        sampler = HeteroBatchSampler(len(text), plan, seed=SEED)
        self.batches: Iterator[Batch] = epochs(DataLoader(text, batch_sampler=sampler), sampler)
        self.losses: list[float] = []
        self.seconds: list[float] = []

    def take_step(self) -> None:
        """One step on the next batch; what the device still has to do counts."""
        batch = to_device(next(self.batches), self.device)
        start = time.perf_counter()
        loss = self.step(batch)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.seconds.append(time.perf_counter() - start)
        self.losses.append(float(loss))

    def agreed_losses(self) -> Tensor:
        """The mean over ranks of each step's loss (ours is agreed already: its mean is itself)."""
        losses = torch.tensor(self.losses, device=self.device)
        dist.all_reduce(losses)
        return losses / dist.get_world_size()

    def slowest_seconds(self) -> list[float]:
        """Seconds of each step that counts, on the rank that took longest."""
        seconds = torch.tensor(self.seconds[WARMUP_STEPS:], device=self.device)
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        return seconds.tolist()


def train_in_turns(contenders: Sequence[Contender], steps: int) -> None:
    """A few steps each, in rounds; who began a round ends the next."""
    order = list(contenders)
    for start in range(0, steps, TURN_STEPS):
        for contender in order:
            for _ in range(min(TURN_STEPS, steps - start)):
                dist.barrier()
                contender.take_step()
        order.reverse()


def rows_of(
    peer: str,
    stage: int,
    contenders: Sequence[Contender],
    options: argparse.Namespace,
    device: torch.device,
) -> list[Row]:
    """Ours and the peer's; every rank must call it."""
    seconds = [contender.slowest_seconds() for contender in contenders]
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
            device=device_name(device),
            versions=f"torch {torch.__version__}, python {platform.python_version()}",
            commit=commit(),
        )
        for provider, own in zip(("poplar even", peer), seconds, strict=True)
    ]


def device_name(device: torch.device) -> str:
    """What the numbers were measured on."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU, {os.cpu_count()} cores"


def commit() -> str:
    """The commit that is checked out."""
    found = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent,
        check=False,
    )
    return found.stdout.strip() or "unknown"


def table_of(rows: Sequence[Row]) -> Table:
    """The rows, for people."""
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
        description="Hold Plan.even against DDP (stage 0) and FSDP2 (stage 3) on equal ranks.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--ranks", type=int, default=2, help="CPU processes; not under torchrun")
    parser.add_argument("--peers", nargs="+", choices=tuple(PEERS), default=list(PEERS), help=" ")
    parser.add_argument("--size", choices=tuple(SIZES), default="demo", help="of the model")
    parser.add_argument("--batch", type=int, default=8, help="samples per rank and step")
    parser.add_argument("--steps", type=int, default=40, help="by each contender")
    parser.add_argument("--output", metavar="FILE", help="append one JSON row per contender")
    options = parser.parse_args()
    if options.steps < WARMUP_STEPS + 2:
        parser.error(f"--steps must be at least {WARMUP_STEPS + 2}, got {options.steps}")
    return options


if __name__ == "__main__":
    main()
