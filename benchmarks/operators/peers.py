"""Optimizers of other libraries, which take part in `update` if they are installed."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from operators.optimizers import RULE, MakeOptimizer


@dataclass(frozen=True)
class Peer:
    """An optimizer, and how its library prepares the gradients."""

    name: str
    optimizer: MakeOptimizer
    multiply: Callable[[list[Tensor], float], object] = torch._foreach_mul_
    flat: bool = False
    """Whether it gets one flat tensor, as in the engine that it was written for."""


def apex() -> Peer:
    """A list of parameters; gradients are scaled by its own kernel."""
    import amp_C
    from apex.multi_tensor_apply import multi_tensor_applier
    from apex.optimizers import FusedAdam

    overflow = torch.zeros(1, dtype=torch.int, device="cuda")

    def multiply(grads: list[Tensor], factor: float) -> None:
        multi_tensor_applier(amp_C.multi_tensor_scale, overflow, [grads, grads], factor)

    return Peer("multi_tensor_scale, apex FusedAdam", partial(FusedAdam, **RULE), multiply)


def deepspeed() -> Peer:
    """On a GPU; ZeRO calls it with its rank's slice of a flat buffer."""
    from deepspeed.ops.adam import FusedAdam

    return Peer("mul_, DeepSpeed FusedAdam", partial(FusedAdam, **RULE), flat=True)


def deepspeed_cpu() -> Peer:
    """The optimizer of ZeRO-Offload, called in the same way; compiled at its first use."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    return Peer("mul_, DeepSpeedCPUAdam", partial(DeepSpeedCPUAdam, **RULE), flat=True)


OPTIONAL: Mapping[str, Sequence[Callable[[], Peer]]] = {
    "cuda": (apex, deepspeed),
    "cpu": (deepspeed_cpu,),
}
"""By device. Each raises ImportError if it is not installed."""


def installed(device: str) -> list[Peer]:
    """The peers that can be imported and take a step; warns if an installed one cannot."""
    os.environ.setdefault("DEEPSPEED_LOG_LEVEL", "error")
    found = []
    for load in OPTIONAL[device]:
        try:
            peer = load()
            _try_out(peer, device)
        except ModuleNotFoundError:
            continue
        except Exception as error:  # compilers raise many types of errors
            warnings.warn(f"measuring without {load.__name__}: {error}", stacklevel=2)
            continue
        found.append(peer)
    return found


def _try_out(peer: Peer, device: str) -> None:
    parameter = torch.nn.Parameter(torch.zeros(64, device=device))
    parameter.grad = torch.ones(64, device=device)
    peer.multiply([parameter.grad], 0.5)
    peer.optimizer([parameter]).step()
