"""Training in DDP or FSDP2 with unequal passes, and the same training in one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import ranks
import torch
import torch.distributed as dist
from language_models import WORDS as VOCABULARY
from language_models import model_of
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import poplar
from poplar.data import pytree
from poplar.integrations import ddp, fsdp2
from poplar.values.plan import Plan

IGNORED = -100
LENGTH = 12


@dataclass(frozen=True)
class Job:
    """A model, its data and its plan; the same on every rank and in one process."""

    model: str
    """Of `model_of`, or "tagger": a `Tagger`."""
    plan: Plan
    steps: int = 3
    optimizer: str = "AdamW"
    max_norm: float | None = None
    variant: str = ""
    """"checkpointing", "reentrant checkpointing", "compiled", "scaler" or "autocast"."""
    ddp: dict[str, Any] = field(default_factory=dict)
    """Options of DistributedDataParallel."""

    @property
    def engine(self) -> Any:
        """The integration that runs the plan."""
        return ddp if self.plan.stage == 0 else fsdp2

    @property
    def weight(self) -> Callable[[Any], Any] | None:
        return WEIGHTS[self.model]


class Tagger(nn.Module):
    """Labels each token; some samples have no labels at all, so their mean is NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.recomputes = self.is_reentrant = False
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.head = nn.Linear(16, VOCABULARY)
        self.register_buffer("scale", torch.ones(1))

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.embedding(input_ids) * self.scale
        for block in self.blocks:
            if self.recomputes:
                x = x + checkpoint(block, x, use_reentrant=self.is_reentrant).tanh()
            else:
                x = x + block(x).tanh()
        return {"loss": nn.functional.cross_entropy(self.head(x).mT, labels, ignore_index=IGNORED)}


WEIGHTS = {
    "llama": poplar.tokens(),
    "gpt2": poplar.tokens(),
    "bert": poplar.tokens(shift=False),
    "tagger": poplar.tokens(shift=False),
}


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    return Tagger() if name == "tagger" else model_of(name)


def batch_of(job: Job, step: int) -> dict[str, Tensor]:
    """A global batch whose samples have different numbers of labels."""
    generator = torch.Generator().manual_seed(step)
    size = job.plan.global_batch
    inputs = torch.randint(0, VOCABULARY, (size, LENGTH), generator=generator)
    counts = torch.randint(2, LENGTH + 1, (size, 1), generator=generator)
    if job.model == "tagger":
        counts[::3] = 0
    labels = inputs.masked_fill(torch.arange(LENGTH) >= counts, IGNORED)
    return {"input_ids": inputs, "labels": labels}


def part_of(job: Job, step: int) -> dict[str, Tensor]:
    """This rank's part of a global batch; one sample if it has none, as the sampler gives it."""
    whole, rank = batch_of(job, step), ranks.rank()
    sizes = [job.plan.samples(other) for other in range(job.plan.world_size)]
    part = pytree.split(whole, sizes)[rank]
    return part if sizes[rank] else pytree.take(whole, [0])


def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch)["loss"]


def loss_of(job: Job, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16, enabled=job.variant == "autocast"):
        return loss_fn(model, batch)


def optimizer_of(job: Job, model: nn.Module) -> torch.optim.Optimizer:
    options = {"AdamW": {"lr": 3e-3}, "SGD": {"lr": 0.1, "momentum": 0.9}, "Muon": {"lr": 1e-2}}
    matrices = [p for p in model.parameters() if job.optimizer != "Muon" or p.dim() == 2]
    return getattr(torch.optim, job.optimizer)(matrices, **options[job.optimizer])


def clip(job: Job, model: nn.Module) -> None:
    if job.max_norm is not None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), job.max_norm)


def train_alone(job: Job) -> list[float]:
    """Losses of plain training in one process, on the same global batches."""
    model = build(job.model)
    optimizer = optimizer_of(job, model)
    losses = []
    for step in range(job.steps):
        loss = loss_of(job, model, batch_of(job, step))
        loss.backward()
        clip(job, model)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def wrap(
    job: Job, model: nn.Module | None = None, group: dist.ProcessGroup | None = None
) -> nn.Module:
    """The model in the engine of the plan, on the ranks of this call."""
    model = build(job.model) if model is None else model
    if job.variant.endswith("checkpointing"):
        model.recomputes, model.is_reentrant = True, job.variant.startswith("reentrant")
    group = group or ranks.group()
    if job.plan.stage == 0:
        return DistributedDataParallel(model, process_group=group, **job.ddp)
    # Its name keeps it from being equal to that of a group that a test has destroyed.
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=(group.group_name,))
    for module in list(model.modules()):
        if isinstance(module, nn.ModuleList):
            for block in module:
                fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def step_with(
    job: Job, model: nn.Module, optimizer: Any, passes: Any, step: int, scaler: Any = None
) -> float:
    """One step as users write it; returns the loss of the global batch."""
    scaler = scaler or torch.amp.GradScaler("cpu", enabled=False)
    for micro_batch in passes(part_of(job, step), weight=job.weight):
        passes.backward(scaler.scale(loss_of(job, model, micro_batch)))
    scaler.unscale_(optimizer)
    clip(job, model)
    loss = float(passes.global_loss()) / scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    return loss


def train(job: Job) -> list[float]:
    """Losses of training in the engine, on this rank."""
    model = wrap(job)
    optimizer = optimizer_of(job, model)
    called = torch.compile(model, backend="aot_eager") if job.variant == "compiled" else model
    passes = job.engine.UnequalPasses(called, job.plan)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0) if job.variant == "scaler" else None
    return [step_with(job, called, optimizer, passes, step, scaler) for step in range(job.steps)]


def train_many(jobs: list[Job]) -> list[list[float]]:
    """Several trainings in one call, one after the other."""
    made = []
    for job in jobs:
        ranks.note(repr(job))
        made.append(train(job))
    return made


def assert_equal_losses(by_rank: list[list[float]], job: Job, tolerance: float = 1e-4) -> None:
    """All ranks report the losses of one process."""
    expected = train_alone(job)
    for rank, losses in enumerate(by_rank):
        worst = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
        assert worst <= tolerance, f"rank {rank}: {losses}, expected {expected}; {job}"
