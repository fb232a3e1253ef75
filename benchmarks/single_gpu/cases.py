"""What is trained: Llama models by size, in full or as QLoRA, and batches of random tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from llama import SIZES, Llama, LlamaConfig
from torch import Tensor, nn

Batch = dict[str, Tensor]
RANK = 16
"""Of the adapters."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A model and the samples of a step. A small picklable value."""

    name: str
    model: LlamaConfig
    batch: int
    """Samples per step and rank, on average."""
    passes: int = 1
    quantised: bool = False
    """QLoRA: the blocks' matrices are frozen in 4 bits by bitsandbytes and have adapters."""

    def new_model(self, device: torch.device) -> Llama:
        """The same weights at every call with the same kind of device."""
        torch.manual_seed(0)
        with device:  # initialization on the host would take longer than the steps
            model = Llama(self.model)
            if self.quantised:
                model.requires_grad_(False)
                for block in model.blocks:
                    _adapt(block, device)
            return model

    def new_batch(self, samples: int, device: torch.device, seed: int = 0) -> Batch:
        """Random tokens, the same for the same seed and kind of device."""
        generator = torch.Generator(device).manual_seed(seed)
        shape = (samples, self.model.context + 1)
        tokens = torch.randint(self.model.vocabulary, shape, device=device, generator=generator)
        return {"input": tokens[:, :-1], "target": tokens[:, 1:]}


class _Adapted(nn.Module):
    """A frozen linear layer in 4 bits and its adapter in fp32."""

    def __init__(self, layer: nn.Linear, device: torch.device) -> None:
        super().__init__()
        from bitsandbytes.nn import Linear4bit

        sizes = layer.in_features, layer.out_features
        self.frozen = Linear4bit(*sizes, bias=False, compute_dtype=torch.bfloat16)
        self.frozen.weight.data = layer.weight.data
        self.frozen.to(device)  # quantises it
        self.down = nn.Linear(sizes[0], RANK, bias=False)
        self.up = nn.Linear(RANK, sizes[1], bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_features] to [..., out_features]."""
        return self.frozen(x) + self.up(self.down(x))


def _adapt(module: nn.Module, device: torch.device) -> None:
    """Replace all linear layers inside."""
    for name, child in list(module.named_children()):
        if isinstance(child, nn.Linear):
            setattr(module, name, _Adapted(child, device))
        else:
            _adapt(child, device)


_350M = LlamaConfig(width=1024, layers=24, heads=16, kv_heads=16, context=1024)
_1B = LlamaConfig(
    vocabulary=32_000, width=2048, layers=22, heads=32, kv_heads=4, hidden=5632, context=2048
)
CASES = {
    case.name: case
    for case in (
        Case(name="tiny", model=SIZES["tiny"], batch=2),
        Case(name="tiny x2", model=SIZES["tiny"], batch=4, passes=2),
        Case(name="85M", model=SIZES["base"], batch=16),
        Case(name="350M", model=_350M, batch=8),
        Case(name="350M x4", model=_350M, batch=16, passes=4),
        Case(name="1.1B", model=_1B, batch=4),
        Case(name="tiny QLoRA", model=SIZES["tiny"], batch=2, quantised=True),
        Case(name="1.1B QLoRA", model=_1B, batch=4, quantised=True),
        # Several ranks on one GPU.
        Case(
            name="narrow",
            model=LlamaConfig(width=256, layers=8, heads=4, kv_heads=2, context=1024),
            batch=128,
        ),
        Case(name="tiny ranks", model=replace(SIZES["tiny"], width=32), batch=8),
    )
}
