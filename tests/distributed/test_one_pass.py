"""Between backward and step only Poplar's operators read and write the gradients."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest import mock

import pytest
import ranks as harness
import torch
from ranks import Pool
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from poplar import GradScaler, HeteroZeroOptimizer, Plan, ops

WIDTH = 512
"""One weight of 512 x 512 is large enough for ranks to share its summation."""


SHARES = (0.75, 0.25)
LARGE = WIDTH * WIDTH // 4
"""The smaller share: an operator on fewer elements is not a pass over the gradients."""


class LargeOperators(TorchDispatchMode):
    """Records the operators on large tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        if any(tensor.numel() >= LARGE for tensor in tensors):
            self.found.append(str(func.overloadpacket))
        return func(*args, **kwargs)


MODEL = {"aten.mm", "aten.t"}
NOT_READ = {
    "aten.slice",
    "aten.split_with_sizes",
    "aten.view",
    "aten.detach",
    "aten.unbind",
    "aten.new_empty",
}
MESSAGES = {"c10d.send", "c10d.recv_"}
SUMS = {"poplar.rank_sum_", "poplar.rank_sum_chunks_"}


def large_operators(
    stage: int, communicator: str, scaled: bool, own_loop: bool
) -> tuple[list[str], float]:
    """Operators on large tensors in a step, except the model, views and communication."""
    torch.manual_seed(0)
    model = nn.Linear(WIDTH, WIDTH, bias=False)
    optimizer = HeteroZeroOptimizer(
        model,
        torch.optim.AdamW,
        plan=Plan.manual("1,2", stage=stage, shares=SHARES),
        process_group=harness.group(),
        communicator=communicator,
        lr=0.1,
    )
    batch = torch.randn(1 + optimizer.control.group.rank, WIDTH)
    scaler = GradScaler("cpu", init_scale=8.0, enabled=scaled)

    def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).square().mean()

    for _ in range(2):  # they allocate buffers and moments, and check the replicas of stage 0
        optimizer.train_step(loss_of, batch)
    with LargeOperators() as mode:
        if own_loop:
            for micro_batch in optimizer.micro_batches(batch):
                scaler.scale(loss_of(model, micro_batch)).backward()
            scaler.unscale_(optimizer)
            norm = optimizer.clip_grad_norm_(1e-3)
            scaler.step(optimizer)
        else:
            given = scaler if scaled else None
            norm = optimizer.train_step(loss_of, batch, max_norm=1e-3, scaler=given).grad_norm
    return [name for name in mode.found if name not in MODEL | NOT_READ | MESSAGES], float(norm)


@pytest.mark.skipif(not ops.native, reason="plain PyTorch serves")
@pytest.mark.parametrize("scaled", [False, True], ids=["", "scaled"])
@pytest.mark.parametrize("communicator", ["shared_memory", "process_group"])
@pytest.mark.parametrize(
    ("stage", "own_loop"), [(0, False), *((s, own) for s in (1, 2, 3) for own in (False, True))]
)
def test_gradient_is_packed_once_reduced_once_and_applied(
    ranks: Pool, stage: int, own_loop: bool, communicator: str, scaled: bool
) -> None:
    for found, norm in ranks.run(large_operators, stage, communicator, scaled, own_loop, ranks=2):
        assert norm > 1e-3, "clipping has something to do"
        # With shared memory, ranks share the summation, and all-gathers are copies.
        arithmetic = [name for name in found if name not in {"aten.copy_", "aten.empty"}]
        assert arithmetic[0] == "poplar.pack_"
        assert arithmetic[-1] == "poplar.adamw_"
        assert {*arithmetic[1:-1]} <= SUMS
        assert arithmetic[1:-1]
        assert found.count("aten.copy_") <= 2, "an all-gather from two ranks"
        if communicator == "process_group":
            assert len(arithmetic) == 3
            copies = {3: 1}.get(stage, 0)  # a rank's own shard in the unsharded parameters
            assert found.count("aten.copy_") == copies


class Operators(TorchDispatchMode):
    """Counts all operators."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count[str(func.overloadpacket)] += 1
        return func(*args, **(kwargs or {}))


def operators_of_update(stage: int, blocks: int) -> tuple[int, Counter[str], Counter[str]]:
    """Number of runs, operators of a whole step, and those of its update."""
    with mock.patch("poplar.zero.unit.MAX_FLAT_BYTES", 1):
        model = nn.Sequential(*[nn.Linear(32, 32) for _ in range(blocks)])
        groups = [
            {"params": [layer.weight for layer in model]},
            {"params": [layer.bias for layer in model], "weight_decay": 0.0},
        ]
        optimizer = HeteroZeroOptimizer(
            model,
            torch.optim.AdamW,
            plan=Plan.manual("1,2", stage=stage),
            process_group=harness.group(),
            params=groups,
            units=[nn.Linear],
            lr=0.1,
        )
    batch = torch.ones(1 + optimizer.control.group.rank, 32)
    whole, of_update = Operators(), Operators()
    step = optimizer._training.update.step

    def counted_step(*arguments: Any, **options: Any) -> None:
        with of_update:
            step(*arguments, **options)

    optimizer.train_step(lambda m, b: m(b).square().sum(), batch)
    with mock.patch.object(optimizer._training.update, "step", counted_step), whole:
        optimizer.train_step(lambda m, b: m(b).square().sum(), batch, max_norm=1e-3)
    owned = [run for run in optimizer._training.update.runs if run.tensor is not None]
    return len(owned), whole.count, of_update.count


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_norm_and_update_are_one_operator_each_for_any_number_of_runs(
    ranks: Pool, stage: int
) -> None:
    for runs, whole, of_update in ranks.run(operators_of_update, stage, 6, ranks=2):
        assert runs >= 6
        assert whole["poplar.exact_sum_"] == whole["poplar.exact_norm"] == 1
        assert of_update["poplar.adamw_"] == of_update["aten._foreach_add_"] == 1
        assert of_update.total() <= 6, of_update


def test_stage_0_scales_grad_in_the_users_loop(ranks: Pool) -> None:
    """`.grad` shows what the step will apply, so the scale is applied to it.

    Between unscaling and clipping the user may write to it, so the norm is computed again.
    """
    for found, _ in ranks.run(large_operators, 0, "process_group", True, True, ranks=2):
        extra = [name for name in found if name not in {"poplar.pack_", "poplar.adamw_", *SUMS}]
        scales = ["aten._foreach_mul_"] * 2  # the loss scale, and clipping
        assert sorted(extra) == [*scales, *["poplar.block_sums_of_squares"] * 2]


def norms_in_hook(max_norm: float) -> tuple[float, float]:
    """Norms of `.grad` in a hook before the step, and after `train_step`."""
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
    batch = torch.ones(1 + optimizer.control.group.rank, 8)

    def hook(*_: Any) -> None:
        assert model.weight.grad is not None
        seen.append(float(model.weight.grad.norm()))

    handle = optimizer.register_step_pre_hook(hook)
    result = optimizer.train_step(lambda m, b: m(b).square().sum(), batch, max_norm=max_norm)
    handle.remove()
    assert result.grad_norm is not None
    return seen[0], result.grad_norm


def test_pre_step_hooks_see_the_applied_gradient(ranks: Pool) -> None:
    for seen, norm in ranks.run(norms_in_hook, 1e-2, ranks=2):
        assert norm > 1e-2
        assert seen == pytest.approx(1e-2, rel=1e-3)


@torch.inference_mode()
def step_in_inference_mode(stage: int) -> bool:
    plan = Plan.even(2, 2, 1, stage=stage)
    with torch.inference_mode(False):
        model = nn.Linear(8, 8, bias=False)
        optimizer = HeteroZeroOptimizer(
            model, torch.optim.SGD, plan=plan, process_group=harness.group(), lr=1
        )
    before = model.weight.detach().clone()
    model.weight.grad = torch.ones(8, 8)
    optimizer.clip_grad_norm_(1.0)
    optimizer.step()
    return bool((model.weight != before).any())


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_user_gradients_are_applied_in_inference_mode(ranks: Pool, stage: int) -> None:
    assert all(ranks.run(step_in_inference_mode, stage, ranks=2))
