"""Training that goes on when ranks are lost or join, under `torchrun`.

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    torchrun --nnodes 3:4 --nproc-per-node 1 --max-restarts 10 \
        --rdzv-backend c10d --rdzv-endpoint HOST:29400 --rdzv-id JOB \
        examples/elastic.py --folder /shared/run

Run this command on every host. If a host is lost, torchrun starts the ranks of the others again.
Each start makes a plan for the ranks that are there, loads the last step from the memory of the
hosts, or else the last checkpoint, and continues with the same global batches. See
docs/guides/elastic.md.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import poplar
from poplar import CheckpointManager, HeteroBatchSampler, HeteroZeroOptimizer, Plan
from poplar.elastic import MemoryCheckpoints

Batch = dict[str, Tensor]

SAMPLES = 1000
FEATURES = 16
SEED = 0
LEARNING_RATE = 1e-2
DEADLINE = timedelta(seconds=30)
"""A rank that waits longer for another one fails. Larger than the longest step and the longest
save; torchrun starts the ranks again when one has failed."""


class Numbers(Dataset[Batch]):
    """Random samples. Each contains its index, so that the log shows what was trained."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(SEED)
        self.inputs = torch.randn(SAMPLES, FEATURES, generator=generator)
        self.targets = self.inputs.sin().sum(dim=1, keepdim=True)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Batch:
        return {
            "index": torch.tensor(index),
            "input": self.inputs[index],
            "target": self.targets[index],
        }


def build_model() -> nn.Module:
    torch.manual_seed(SEED)  # the same initial weights on every rank
    return nn.Sequential(nn.Linear(FEATURES, 64), nn.GELU(), nn.Linear(64, 1))


def build_scheduler(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=10, gamma=0.9)


def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
    device = next(model.parameters()).device
    return nn.functional.mse_loss(model(batch["input"].to(device)), batch["target"].to(device))


def main() -> None:
    options = parse_options()
    options.folder.mkdir(parents=True, exist_ok=True)
    device = start_process_group()
    train(options, device)
    dist.destroy_process_group()


def train(options: argparse.Namespace, device: torch.device) -> None:
    dataset = Numbers()
    model = build_model().to(device)
    # The global batch is the same for any number of ranks, so the learning rate is too.
    plan = poplar.autotune(
        model,
        loss_fn,
        torch.utils.data.default_collate([dataset[index] for index in range(8)]),
        global_batch=options.global_batch,
        optimizer_class=torch.optim.AdamW,
        seconds=options.tuning_seconds,
        leave_out="never",
        timeout=DEADLINE,
        progress=False,
        lr=LEARNING_RATE,
    )
    optimizer = HeteroZeroOptimizer(
        model, torch.optim.AdamW, plan=plan, timeout=DEADLINE, lr=LEARNING_RATE
    )
    scheduler = build_scheduler(optimizer)
    sampler = HeteroBatchSampler(len(dataset), plan, seed=SEED)
    loader = DataLoader(dataset, batch_sampler=sampler, num_workers=0)
    state = {"sampler": sampler, "scheduler": scheduler}
    memory = MemoryCheckpoints(optimizer, state=state, spare_shards=1)
    checkpoints = CheckpointManager(options.folder, optimizer, state=state, keep=2)
    done = memory.load_latest() or checkpoints.load_latest() or 0

    for step, batch in zip(range(done + 1, options.steps + 1), epochs(loader), strict=False):
        result = optimizer.train_step(loss_fn, batch, max_norm=1.0)
        scheduler.step()
        log(options.folder / "log.jsonl", plan, step, float(result.loss), batch)
        memory.save(step)
        if step % options.save_every == 0 or step == options.steps:
            checkpoints.save(step)
    memory.remove()


def epochs(loader: DataLoader[Batch]) -> Iterator[Batch]:
    """The rest of the present epoch, then one epoch after the other."""
    while True:
        yield from loader


def log(path: Path, plan: Plan, step: int, loss: float, batch: Batch) -> None:
    """Append one line for this step, on rank 0. Collective."""
    own = batch["index"].tolist() if plan.samples(dist.get_rank()) else []
    by_rank: list[list[int]] = [[]] * dist.get_world_size()
    dist.all_gather_object(by_rank, own)
    if dist.get_rank() == 0:
        line = {
            "step": step,
            "loss": loss,
            "samples": digest([index for indices in by_rank for index in indices]),
            "world_size": dist.get_world_size(),
        }
        with path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def digest(indices: list[int]) -> str:
    """Identifies the samples of a global batch, in any order."""
    return hashlib.sha256(str(sorted(indices)).encode()).hexdigest()[:16]


def start_process_group() -> torch.device:
    """Initialize the process group of `torchrun` and select this rank's device."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        # torch's issue 135712: a new start may read the addresses of the last one.
        raise SystemExit("set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 before torchrun")
    if not torch.cuda.is_available():
        dist.init_process_group("gloo", timeout=DEADLINE)
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    # torch's watchdog ends the process after this timeout: Poplar's comes first.
    dist.init_process_group("nccl", timeout=DEADLINE + timedelta(minutes=2))
    return device


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, required=True, help="that all hosts see")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=10, help="steps")
    parser.add_argument("--global-batch", type=int, default=32, help="samples")
    parser.add_argument("--tuning-seconds", type=float, default=30.0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
