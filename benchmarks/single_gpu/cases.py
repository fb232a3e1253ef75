"""What is trained: Llama models by size, and batches of random tokens on the device."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from llama import SIZES, Llama, LlamaConfig
from torch import Tensor

Batch = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A model and the samples of a step. A small picklable value."""

    name: str
    model: LlamaConfig
    batch: int
    """Samples per step and rank, on average."""
    passes: int = 1

    def new_model(self, device: torch.device) -> Llama:
        """The same weights at every call with the same kind of device."""
        torch.manual_seed(0)
        with device:  # initialization on the host would take longer than the steps
            return Llama(self.model)

    def new_batch(self, samples: int, device: torch.device, seed: int = 0) -> Batch:
        """Random tokens, the same for the same seed and kind of device."""
        generator = torch.Generator(device).manual_seed(seed)
        shape = (samples, self.model.context + 1)
        tokens = torch.randint(self.model.vocabulary, shape, device=device, generator=generator)
        return {"input": tokens[:, :-1], "target": tokens[:, 1:]}


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
        # Several ranks on one GPU.
        Case(
            name="narrow",
            model=LlamaConfig(width=256, layers=8, heads=4, kv_heads=2, context=1024),
            batch=128,
        ),
        Case(name="tiny ranks", model=replace(SIZES["tiny"], width=32), batch=8),
    )
}
