"""`own_dtype`: the `compute_dtype` of trainers that compute as the model is."""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn


def own_dtype(model: nn.Module) -> torch.dtype | Literal["auto"]:
    """`torch.float32` for an fp32 model, which "auto" computes in bf16 on GPUs; else "auto"."""
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
    return torch.float32 if dtypes == {torch.float32} else "auto"
