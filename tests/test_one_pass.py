"""Between backward and step gradients are read and written by Poplar's operators alone."""

from __future__ import annotations

from typing import Any

import pytest
import ranks as harness
import torch
from ranks import Pool
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from poplar import HeteroZeroOptimizer, Plan, ops

WIDTH = 512
"""One weight of 512 x 512 is enough for peers to help with its sum."""


class Readers(TorchDispatchMode):
    """Notes which operators take tensors that lie in given memory, however they are viewed."""

    def __init__(self, memory: dict[int, int]) -> None:
        super().__init__()
        self.memory, self.found = memory, []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t.numel()]
        if any(self._is_inside(tensor) for tensor in tensors):
            self.found.append(func.overloadpacket.__str__())
        return func(*args, **kwargs)

    def _is_inside(self, tensor: Tensor) -> bool:
        place = tensor.data_ptr()
        return any(begin <= place < begin + size for begin, size in self.memory.items())


VIEWS = {"aten.slice", "aten.view", "aten.detach", "aten.alias", "aten.as_strided", "aten.split"}


def readers(stage: int, max_norm: float) -> tuple[list[str], float]:
    """What reads the reduced gradients from the end of the passes to the end of the step."""
    torch.manual_seed(0)
    model = nn.Linear(WIDTH, WIDTH, bias=False)
    plan = Plan.manual("1,2", stage=stage, shares=(0.75, 0.25))
    optimizer = HeteroZeroOptimizer(
        model, torch.optim.AdamW, plan=plan, process_group=harness.group(), lr=0.1
    )
    batch = torch.randn(1 + optimizer._group.rank, WIDTH)
    for micro_batch in optimizer.micro_batches(batch):
        model(micro_batch).square().mean().backward()
    flats = optimizer._engine.trained
    gradients = {flat.gradient.data_ptr(): flat.gradient.nbytes for flat in flats}
    with Readers(gradients) as mode:
        norm = optimizer.clip_grad_norm_(max_norm).item()
        optimizer.step()
    return mode.found, norm


@pytest.mark.skipif(not ops.native, reason="plain PyTorch serves")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_nothing_but_the_sum_and_the_update_reads_a_gradient(ranks: Pool, stage: int) -> None:
    for found, norm in ranks.run(readers, stage, 1e-3, ranks=2):
        assert norm > 1e-3, "clipping has something to do"
        allowed = {"poplar.rank_sum_", "poplar.rank_sum_claimed_", "poplar.adamw_", *VIEWS}
        assert set(found) <= allowed
        assert "poplar.adamw_" in found
