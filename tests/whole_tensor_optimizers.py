"""Optimizer classes that need whole tensors, and a model with parameters of several kinds."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT


class Lamb(torch.optim.Optimizer):
    """LAMB: Adam whose step has the norm of the parameter."""

    def __init__(self, params: ParamsT, lr: float = 1e-2, weight_decay: float = 0.01) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state.update(step=0, m=torch.zeros_like(p), v=torch.zeros_like(p))
                state["step"] += 1
                m = state["m"].lerp_(p.grad, 0.1) / (1 - 0.9 ** state["step"])
                v = state["v"].lerp_(p.grad.square(), 0.01) / (1 - 0.99 ** state["step"])
                update = m / (v.sqrt() + 1e-6) + group["weight_decay"] * p
                norm, length = p.norm(), update.norm()
                trust = torch.where((norm > 0) & (length > 0), norm / length, 1.0)
                p.sub_(group["lr"] * trust * update)


def clip_together(optimizer: torch.optim.Optimizer) -> None:
    """Clip the gradients of all parameters by their norm, as the step of some classes does."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    torch.nn.utils.clip_grad_norm_(params, 1.0)


class ClippedLamb(Lamb):
    """LAMB as that of NVIDIA."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        clip_together(self)
        super().step()


class ClippedAdamW(torch.optim.AdamW):
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        clip_together(self)
        return super().step()


class Noisy(torch.optim.SGD):
    """Adds noise to the gradients, as Langevin dynamics do."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            p.grad.add_(torch.randn_like(p))
        return super().step()


class Preconditioned(torch.optim.Optimizer):
    """As Shampoo and SOAP: matrices of other shapes than the parameter's are its state."""

    def __init__(self, params: ParamsT, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                update, state = p.grad, self.state[p]
                for side in range(p.dim() if p.dim() == 2 else 0):
                    flat = p.grad if side == 0 else p.grad.mT
                    known = state.setdefault(f"side{side}", torch.eye(len(flat), device=p.device))
                    known.mul_(0.9).addmm_(flat, flat.mT)
                    update = torch.linalg.solve(known, update if side == 0 else update.mT)
                    update = update if side == 0 else update.mT
                p.sub_(group["lr"] * update)


class Block(nn.Module):
    """Matrices of 12,288 elements, which blocks of 4,096 divide, and small vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.up, self.down = nn.Linear(64, 192), nn.Linear(192, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(torch.tanh(self.up(self.norm(x))))
        return out


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 64), Block(), Block(), nn.Linear(64, 64))


def mean_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def matrices_and_rest(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The matrices of the blocks, and all other parameters."""
    inside = [p for name, p in model.named_parameters() if ("up" in name or "down" in name)]
    matrices = [p for p in inside if p.dim() == 2]
    return matrices, [p for p in model.parameters() if all(p is not m for m in matrices)]
