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


def clip_what_was_written_behind_autograds_back(stage: int) -> tuple[float, float]:
    torch.manual_seed(0)
    model = nn.Linear(8, 8, bias=False)
    plan = Plan.manual("1,2", stage=stage)
    optimizer = HeteroZeroOptimizer(
        model, torch.optim.SGD, plan=plan, process_group=harness.group(), lr=0.1
    )
    for micro_batch in optimizer.micro_batches(torch.ones(1 + optimizer._group.rank, 8)):
        model(micro_batch).square().sum().backward()
    assert model.weight.grad is not None
    model.weight.grad.data.mul_(1e-3)
    expected = float(model.weight.grad.norm())
    return optimizer.clip_grad_norm_(1e6).item(), expected


def test_the_norm_is_of_what_grad_shows(ranks: Pool) -> None:
    for norm, expected in ranks.run(clip_what_was_written_behind_autograds_back, 0, ranks=2):
        assert norm == pytest.approx(expected, rel=1e-6)


def a_hook_sees(max_norm: float) -> tuple[float, float]:
    """The norms of `.grad` in a hook before the step, and after `train_step`."""
    torch.manual_seed(0)
    model = nn.Linear(8, 8, bias=False)
    optimizer = HeteroZeroOptimizer(
        model,
        torch.optim.SGD,
        plan=Plan.manual("1,2", stage=0),
        process_group=harness.group(),
        lr=1,
    )
    seen = []
    batch = torch.ones(1 + optimizer._group.rank, 8)

    def hook(*_: Any) -> None:
        assert model.weight.grad is not None
        seen.append(float(model.weight.grad.norm()))

    handle = optimizer.register_step_pre_hook(hook)
    result = optimizer.train_step(lambda m, b: m(b).square().sum(), batch, max_norm=max_norm)
    handle.remove()
    assert result.grad_norm is not None
    return seen[0], result.grad_norm


def test_hooks_before_the_step_see_what_is_applied(ranks: Pool) -> None:
    for seen, norm in ranks.run(a_hook_sees, 1e-2, ranks=2):
        assert norm > 1e-2
        assert seen == pytest.approx(1e-2, rel=1e-3)


@torch.inference_mode()
def step_in_inference_mode(stage: int) -> bool:
    model = nn.Linear(8, 8, bias=False)
    plan = Plan.even(2, 2, 1, stage=stage)
    with torch.inference_mode(False):
        optimizer = HeteroZeroOptimizer(
            model, torch.optim.SGD, plan=plan, process_group=harness.group(), lr=1
        )
    before = model.weight.detach().clone()
    model.weight.grad = torch.ones(8, 8)
    optimizer.clip_grad_norm_(1.0)
    optimizer.step()
    return bool((model.weight != before).any())


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_gradients_set_by_hand_are_applied_in_inference_mode(ranks: Pool, stage: int) -> None:
    assert all(ranks.run(step_in_inference_mode, stage, ranks=2))
