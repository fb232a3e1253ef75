"""A model whose training state is larger than the memory limit of any rank, from build to file.

The kernel enforces the limits. Ranks communicate by the process group, so that all of their memory
is private and counts. The reference is one process with plain torch.
"""

from __future__ import annotations

import gc
import json
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import limited_memory
import pytest
import ranks as harness
import torch
from ranks import one_off
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import poplar
from poplar import HeteroZeroOptimizer, Plan
from poplar.comm.host_memory import rendezvous

RANKS = 4
STATE_BYTES = 16
"""Per parameter: value, gradient and the state of AdamW."""
TIMES_THE_LIMIT = 3
STEPS = 20
GLOBAL_BATCH = 12
WIDTH, BLOCKS = 256, 100
OBJECTS_BYTES = 16 << 20
"""Of the limit, for what plans do not count: objects of Python and of autograd, code that is loaded
at its first use, and freed blocks of a few KiB that glibc keeps."""
OPTIONS = {"lr": 1e-3, "eps": 1e-3}
"""With this `eps`, cutting the batch differently in one process changes losses by less than 1e-6.
With 1e-5, AdamW divides gradients that are close to 0 by themselves, and it is 2e-3."""
MAX_NORM = 1.0


class Blocks(nn.Module):
    """Residual blocks with two matrices each."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.Tanh(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(count)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


Batch = dict[str, Tensor]


def samples(step: int) -> Batch:
    """The global batch of a step."""
    generator = torch.Generator().manual_seed(step)
    inputs, targets = torch.randn(2, GLOBAL_BATCH, 4, WIDTH, generator=generator)
    return {"inputs": inputs, "targets": targets}


def distance(model: nn.Module, batch: Batch) -> Tensor:
    return (model(batch["inputs"]) - batch["targets"]).square().mean()


@dataclass(frozen=True)
class Trained:
    plan: Plan
    losses: list[float]
    on_meta: bool
    """Whether profiling and planning left the model without values."""
    peak: int
    """Largest resident memory, above what the process held before it built the model."""


def train(limit: int, weights: str | None, folder: str) -> Trained:
    """Profile, plan, build, train and save within the limit."""
    limited_memory.return_freed_memory()
    with mock.patch.object(rendezvous, "CAN_SHARE", False):
        use_everything_once()
        gc.collect()
        before = limited_memory.resident_bytes()
        limited_memory.reset_peak()
        limited_memory.limit_to(limit)
        plan, on_meta, losses = profile_and_train(
            BLOCKS, limit - OBJECTS_BYTES, weights, folder, seconds=2.0
        )
    return Trained(plan, losses, on_meta, limited_memory.peak_resident_bytes() - before)


def use_everything_once() -> None:
    """Import modules, connect ranks, start threads: what a process holds with any model.

    With a limit at which one rank could not hold the model, so that every kind of pass is measured.
    """
    profile_and_train(4, 20 * numel_of(4), None, "", seconds=0.1)


def numel_of(blocks: int) -> int:
    with poplar.parameters_on_meta():
        return sum(parameter.numel() for parameter in Blocks(blocks).parameters())


def profile_and_train(
    blocks: int, limit: int, weights: str | None, folder: str, *, seconds: float
) -> tuple[Plan, bool, list[float]]:
    with poplar.parameters_on_meta():
        model = Blocks(blocks)
    everything = {"weights": weights, "process_group": harness.group(), **OPTIONS}
    plan = poplar.autotune(
        model,
        distance,
        {name: value[:2] for name, value in samples(0).items()},
        global_batch=GLOBAL_BATCH,
        memory_limit=limit,
        max_batch=3,
        seconds=seconds,
        max_norm=MAX_NORM,
        compute_dtype=torch.float32,
        cache=False,
        progress=False,
        **everything,
    )
    on_meta = all(parameter.is_meta for parameter in model.parameters())
    torch.manual_seed(0)
    optimizer = HeteroZeroOptimizer(
        model, torch.optim.AdamW, plan=plan, compute_dtype=torch.float32, **everything
    )
    losses = [take_step(optimizer, plan, step) for step in range(STEPS)]
    if folder:
        optimizer.save_model(f"{folder}/one.safetensors")
        optimizer.save_model(f"{folder}/parts", sharded=True)
    return plan, on_meta, losses


def take_step(optimizer: HeteroZeroOptimizer, plan: Plan, step: int) -> float:
    begin, count = plan.offset(harness.rank()), plan.samples(harness.rank())
    batch = {name: value[begin : begin + count] for name, value in samples(step).items()}
    result = optimizer.train_step(distance, batch if count else None, max_norm=MAX_NORM)
    return float(result.loss)


def train_in_one_process(model: nn.Module) -> list[float]:
    """Plain torch on the global batch."""
    optimizer = torch.optim.AdamW(model.parameters(), **OPTIONS)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = distance(model, samples(step))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        losses.append(loss.item())
    return losses


def weights_in(folder: Path) -> dict[str, Tensor]:
    """The parameters in the files of an index."""
    files = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    parts = {file: load_file(folder / file) for file in set(files.values())}
    return {name: parts[file][name] for name, file in files.items()}


@pytest.mark.full
@pytest.mark.parametrize("source", ["meta", "safetensors"])
def test_a_model_larger_than_any_limit_trains_like_one_process(source: str, tmp_path: Path) -> None:
    torch.manual_seed({"meta": 0, "safetensors": 1}[source])
    model = Blocks(BLOCKS)
    limit = STATE_BYTES * numel_of(BLOCKS) // TIMES_THE_LIMIT
    weights = None
    if source == "safetensors":
        weights = str(tmp_path / "before.safetensors")
        save_file(model.state_dict(), weights)
    answers = one_off(RANKS, train, limit, weights, str(tmp_path), timeout=1500.0)
    failures = [str(answer) for answer in answers if isinstance(answer, harness.Failure)]
    assert not failures, "\n".join(failures)
    losses = train_in_one_process(model)
    for rank, trained in enumerate(answers):
        assert trained.plan.stage == 3
        assert trained.on_meta
        assert trained.losses == pytest.approx(losses, rel=1e-5)
        assert trained.peak <= limit, f"rank {rank}: {trained.peak >> 10} KiB of {limit >> 10}"
    for saved in (load_file(tmp_path / "one.safetensors"), weights_in(tmp_path / "parts")):
        assert saved.keys() == model.state_dict().keys()
        for name, value in model.state_dict().items():
            torch.testing.assert_close(saved[name], value, rtol=1e-4, atol=1e-5)
