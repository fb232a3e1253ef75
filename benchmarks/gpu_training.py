"""Training with several ranks on one GPU, each with its own part of the memory.

Communication is staged through host memory (`communicator="auto"` with gloo), or uses NCCL if it
lets ranks share a GPU. The gradient is compared with one process's in fp32, so that errors are not
mistaken for rounding; then a few steps are trained in the GPU's usual dtype. Speed is not measured,
because the ranks compete for the GPU.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import provenance
import torch
import torch.distributed as dist
from rows import write_rows

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

from llama import SIZES, Llama, next_byte_loss
from single_gpu import ranks
from watchdog import watch

import poplar
from poplar import HeteroZeroOptimizer, Plan, ops

MICRO_BATCHES, SHARES, MEMORY = (4, 2, 1), (0.5, 0.3, 0.2), (0.4, 0.2, 0.1)
PASSES, STEPS = 2, 8
STAGES = (0, 1, 2, 3)


class RanksFailed(RuntimeError):
    """A rank failed or hung; the message has the stacks or the output of every rank."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """The result of one stage."""

    benchmark: str
    backend: str
    stage: int
    micro_batches: tuple[int, ...]
    shares: tuple[float, ...]
    memory_fractions: tuple[float, ...]
    relative_error: float
    """The largest of any parameter's gradient, against one process on the whole batch."""
    tolerance: float
    losses: tuple[float, ...]
    step_seconds: float
    peak_bytes: tuple[int, ...]
    """Allocated on the GPU, by rank."""
    operators: str
    """The providers of the operators on the CPU and on the GPU."""
    device: str
    versions: str
    commit: str
    day: str


def train_on_one_gpu(file: str, backend: str, size: str, device: str, seconds: str) -> None:
    """In a rank: train at all stages; rank 0 writes the rows."""
    target = ranks.join(device, nccl=backend == "nccl", seconds=float(seconds))
    rank = dist.get_rank()
    if device == "cuda":
        torch.cuda.set_per_process_memory_fraction(MEMORY[rank])
    for stage in STAGES:
        row = train(stage, backend, size, target)
        if rank == 0:
            write_rows(file, [row])
    ranks.leave()


def train(stage: int, backend: str, size: str, device: torch.device) -> Row:
    """Verify one step in fp32, then train."""
    config = SIZES[size]
    torch.manual_seed(0)
    model = Llama(config).to(device)
    plan = Plan.manual(MICRO_BATCHES, stage=stage, passes=PASSES, shares=SHARES)
    bytes_of_text = torch.randint(0, 256, (plan.global_batch, config.context + 1))
    batch = {"input": bytes_of_text[:, :-1].to(device), "target": bytes_of_text[:, 1:].to(device)}
    found = poplar.verify(model, next_byte_loss, batch, plan, compute_dtype=torch.float32)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    optimizer = HeteroZeroOptimizer(model, torch.optim.AdamW, plan=plan, lr=1e-3)
    first = sum(plan.samples(other) for other in range(dist.get_rank()))
    own = {
        name: values[first : first + plan.samples(dist.get_rank())]
        for name, values in batch.items()
    }
    results = [optimizer.train_step(next_byte_loss, own, max_norm=1.0) for _ in range(STEPS)]
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    optimizer.release()
    return Row(
        benchmark="gpu_training",
        backend=backend,
        stage=stage,
        micro_batches=MICRO_BATCHES,
        shares=SHARES,
        memory_fractions=MEMORY,
        relative_error=found.parameters[0].relative_error,
        tolerance=found.tolerance,
        losses=tuple(float(result.loss) for result in results),
        step_seconds=statistics.median(result.seconds for result in results[2:]),
        peak_bytes=all_gather(peak),
        operators=ops.describe(),
        device=provenance.device(device.type),
        versions=provenance.versions("torch", "triton"),
        commit=provenance.commit(),
        day=date.today().isoformat(),
    )


def all_gather(value: int) -> tuple[int, ...]:
    """The value of every rank."""
    values: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return tuple(values)


def run(output: Path, backend: str, size: str, device: str, seconds: float) -> list[Row]:
    """Train at all stages, on as many ranks as there are micro-batches.

    Args:
        output: file of the rows.
        backend: `gloo` or `nccl`.
        size: of the Llama model.
        device: `cuda` or `cpu`.
        seconds: the deadline of the ranks.

    Raises:
        RanksFailed: a rank failed, or did not end in time.
    """
    with tempfile.TemporaryDirectory(prefix="poplar-training-") as name:
        file = Path(name, "rows.jsonl")
        ended = watch(
            __file__,
            [file, backend, size, device, f"{seconds:g}"],
            [ranks.environment(Path(name))] * len(MICRO_BATCHES),
            Path(name),
            seconds=seconds,
        )
        if ended.verdict != "ok":
            raise RanksFailed(ended.report)
        rows = [Row(**json.loads(line)) for line in file.read_text(encoding="utf-8").splitlines()]
    write_rows(output, rows)
    return rows


def agrees(row: Row) -> bool:
    """Whether the gradient is that of one process, and the loss falls."""
    falls = row.losses[-1] < row.losses[0]
    return row.relative_error <= row.tolerance and falls


def one_step() -> None:
    """One rank, one step of every stage, for compute-sanitizer."""
    if not torch.cuda.is_available():
        sys.exit(f"torch {torch.__version__} sees no GPU here; see `python -m poplar doctor`")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for stage in STAGES:
        torch.manual_seed(0)
        model = Llama(SIZES["tiny"]).cuda()
        plan = Plan.manual((2,), stage=stage, passes=2)
        tokens = torch.randint(0, 256, (4, 65), device="cuda")
        batch = {"input": tokens[:, :-1], "target": tokens[:, 1:]}
        optimizer = HeteroZeroOptimizer(model, torch.optim.AdamW, plan=plan, lr=1e-3)
        optimizer.train_step(next_byte_loss, batch, max_norm=1.0)
        optimizer.release()
    torch.cuda.synchronize()
    dist.destroy_process_group()
    print("a step of every stage")


if __name__ == "__main__":
    train_on_one_gpu(*sys.argv[1:]) if sys.argv[1:] else one_step()
