"""Adapters on a quantised base at every stage, against one process on the whole batch."""

from __future__ import annotations

import copy
import importlib.util
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from poplar import HeteroZeroOptimizer, Plan
from two_ranks.rank import Rank
from two_ranks.training import STAGES, TOLERANCE

WIDTH, BLOCKS, STEPS = 512, 3, 4
SAMPLES = ((3, 1), (0, 2))
SHARES = ((0.5, 0.5), (0.8, 0.2))


class Adapted(nn.Module):
    """A frozen layer, and an adapter of rank 8 beside it."""

    def __init__(self, frozen: nn.Module) -> None:
        super().__init__()
        self.frozen = frozen
        self.down, self.up = nn.Linear(WIDTH, 8, bias=False), nn.Linear(8, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.frozen(x) + self.up(self.down(x)))


def bitsandbytes_4bit(device: torch.device) -> nn.Module:
    """Quantised by the library when it moves to a device."""
    from bitsandbytes.nn import Linear4bit

    return Linear4bit(WIDTH, WIDTH, bias=False, compute_dtype=torch.float32).to(device)


def torchao_int8(device: torch.device) -> nn.Module:
    """A layer whose weight is a tensor subclass."""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    layer = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False)).to(device)
    quantize_(layer, Int8WeightOnlyConfig())
    return layer.requires_grad_(False)


def bases(own: Rank) -> None:
    """Losses of both libraries at all stages; at stage 3 the 4-bit base also moves from the CPU."""
    cases: list[tuple[str, Callable[[torch.device], nn.Module], torch.device]] = [
        ("bitsandbytes 4-bit", bitsandbytes_4bit, own.device),
        ("bitsandbytes 4-bit, from the CPU", bitsandbytes_4bit, torch.device("cpu")),
        ("torchao int8", torchao_int8, own.device),
    ]
    for name, layer, start in cases:
        library = name.partition(" ")[0]
        if importlib.util.find_spec(library) is None:
            if own.rank == 0:
                own.note("bases", name, True, f"not run: {library} is not installed")
            continue
        torch.manual_seed(0)
        base = nn.Sequential(*(Adapted(layer(start)) for _ in range(BLOCKS))).to(start)
        expected = train_alone(copy.deepcopy(base).to(own.device), own.device)
        for stage in STAGES if start == own.device else (3,):
            for shares in SHARES:
                began = time.monotonic()
                losses = train(own, copy.deepcopy(base), stage, shares)
                off = max(abs(a / b - 1) for a, b in zip(losses, expected, strict=True))
                if own.rank == 0:
                    case = f"{name}, stage {stage}, shares {shares}"
                    seconds = time.monotonic() - began
                    own.note("bases", case, off <= TOLERANCE, losses=off, seconds=seconds)


def train(own: Rank, model: nn.Module, stage: int, shares: tuple[float, ...]) -> list[float]:
    """The loss of each step."""
    plan = Plan(stage=stage, global_batch=6, micro_batches=SAMPLES, shares=shares)
    optimizer = HeteroZeroOptimizer(model, torch.optim.AdamW, plan=plan, device=own.device, lr=1e-3)
    first, count = plan.offset(own.rank), plan.samples(own.rank)
    batch = samples(own.device)[first : first + count]
    losses = [float(optimizer.train_step(loss_of, batch).loss) for _ in range(STEPS)]
    optimizer.release()
    return losses


def train_alone(model: nn.Module, device: torch.device) -> list[float]:
    """The loss of each step of one process on the whole batch."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer, losses = torch.optim.AdamW(trained, lr=1e-3), []
    for _ in range(STEPS):
        loss = loss_of(model, samples(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    """A loss per sample, so that passes of any size have one mean."""
    return model(x).square().mean()


def samples(device: torch.device) -> Tensor:
    """The global batch."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(6, WIDTH, generator=generator).to(device)
