"""Between backward and update the host asks for nothing that a device computes.

On a GPU each such question would wait for all that has been issued. Here every value that depends
on the batch counts as the device's; norm, scale, clipping and whether to skip must stay among those
until the update has been issued.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import ranks as harness
import torch
from ranks import Pool
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import poplar
from poplar import HeteroZeroOptimizer, Plan
from poplar.zero.update import ShardedUpdate

ANSWERS = {
    "aten::_local_scalar_dense",
    "aten::nonzero",
    "aten::equal",
    "aten::bincount",
    "aten::masked_select",
    "aten::_unique2",
}
"""Operators that are done on a GPU when the host has its answer."""
UPDATES = {"poplar::adamw_", "aten::_fused_sgd_"}
SIZE = 64


class DeviceValues(TorchDispatchMode):
    """Follows values through operators, by the memory they lie in, and notes who asks for them."""

    def __init__(self, root: Tensor) -> None:
        super().__init__()
        self.found: list[str] = []
        self.updated = False
        self._kept: dict[int, Tensor] = {}  # alive, so that no memory comes twice
        self._add(root)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, func._schema.name
        depends = any(self.holds(value) for value in tree_leaves((args, kwargs)))
        self.updated = self.updated or name in UPDATES
        by_truth = any(isinstance(v, Tensor) and v.dtype is torch.bool for v in tree_leaves(args))
        if depends and (name in ANSWERS or ("index" in name and by_truth)):
            self.note(name)
        result = func(*args, **kwargs)
        if depends:
            given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
            written = [
                given.get(argument.name)
                for argument in func._schema.arguments
                if argument.alias_info is not None and argument.alias_info.is_write
            ]
            for value in tree_leaves((result, written)):
                self._add(value)
        return result

    def holds(self, value: Any) -> bool:
        return isinstance(value, Tensor) and value.untyped_storage().data_ptr() in self._kept

    def note(self, name: str) -> None:
        if not self.updated:
            self.found.append(name)

    def _add(self, value: Any) -> None:
        if isinstance(value, Tensor) and value.numel():
            self._kept[value.untyped_storage().data_ptr()] = value


@contextmanager
def watching(batch: Tensor) -> Iterator[DeviceValues]:
    mode = DeviceValues(batch)

    def noted(name: str) -> Any:
        real = getattr(Tensor, name)

        def call(self: Tensor, *arguments: Any, **options: Any) -> Any:
            if mode.holds(self):
                mode.note(name)
            return real(self, *arguments, **options)

        return mock.patch.object(Tensor, name, call)

    with noted("tolist"), noted("cpu"), noted("numpy"), mode:
        yield mode


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def questions(stage: int, name: str, scaled: bool, own_loop: bool) -> tuple[list[str], bool]:
    """What the host asked for in a step before its update, and whether there was an update."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE))
    plan = Plan.manual("1,2", stage=stage, passes=2)
    options = {"momentum": 0.9} if "momentum" in name else {}
    kind = getattr(torch.optim, name.split()[0])
    optimizer = HeteroZeroOptimizer(
        model, kind, plan=plan, process_group=harness.group(), lr=0.1, **options
    )
    scaler = poplar.GradScaler("cpu", init_scale=8.0, enabled=scaled)
    batch = torch.randn(plan.samples(optimizer._group.rank), SIZE)
    optimizer.train_step(loss_of, batch, max_norm=1e-3)
    with watching(batch) as mode:
        if own_loop:
            for micro_batch in optimizer.micro_batches(batch):
                scaler.scale(loss_of(model, micro_batch)).backward()
            scaler.unscale_(optimizer)
            optimizer.clip_grad_norm_(1e-3)
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.train_step(loss_of, batch, max_norm=1e-3, scaler=scaler if scaled else None)
    return mode.found, mode.updated


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("name", ["AdamW", "SGD", "SGD with momentum"])
@pytest.mark.parametrize("scaled", [False, True], ids=["", "scaled"])
@pytest.mark.parametrize("own_loop", [False, True], ids=["train_step", "own loop"])
def test_the_update_is_issued_before_anybody_asks(
    ranks: Pool, own_loop: bool, scaled: bool, name: str, stage: int
) -> None:
    for found, updated in ranks.run(questions, stage, name, scaled, own_loop, ranks=2):
        assert updated
        assert found == []


@pytest.fixture(scope="module")
def alone() -> Iterator[Pool]:
    """One rank, on gloo and NCCL whatever the other tests' ranks are on: one GPU is enough."""
    pool = Pool(1, backend="nccl")
    yield pool
    pool.close()


def clip_and_step(stage: int, name: str, scaled: bool) -> bool:
    """With PyTorch raising where it waits for the device; whether the transport lets it be so.

    Once all has been issued, the optimizer asks whether a scaled step was one.
    """
    device = harness.device()
    model = nn.Sequential(nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)).to(device)
    plan = Plan.manual((2,), stage=stage, passes=2)
    kind = getattr(torch.optim, name)
    optimizer = HeteroZeroOptimizer(model, kind, plan=plan, process_group=harness.group(), lr=0.1)
    scaler = poplar.GradScaler(device.type, init_scale=8.0, enabled=scaled)
    batch = torch.randn(plan.global_batch, SIZE, device=device)
    for step in range(3):
        for micro_batch in optimizer.micro_batches(batch):
            scaler.scale(loss_of(model, micro_batch)).backward()
        # In the first step memory is taken, and libraries are loaded.
        with raising_where_pytorch_waits() if step else nullcontext(), asking_at_the_end():
            scaler.unscale_(optimizer)
            optimizer.clip_grad_norm_(1e-3)
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
    return optimizer._engine.comm.waits_on_stream


@contextmanager
def raising_where_pytorch_waits() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@contextmanager
def asking_at_the_end() -> Iterator[None]:
    ask = ShardedUpdate.undo_if_skipped

    def may_wait(self: ShardedUpdate, found_inf: Tensor) -> bool:
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("default")
        try:
            return ask(self, found_inf)
        finally:
            torch.cuda.set_sync_debug_mode(before)

    with mock.patch.object(ShardedUpdate, "undo_if_skipped", may_wait):
        yield


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: only their order was looked at")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("name", ["AdamW", "SGD"])
@pytest.mark.parametrize("scaled", [False, True], ids=["", "scaled"])
def test_pytorch_sees_nobody_wait_for_a_gpu(
    alone: Pool, scaled: bool, name: str, stage: int
) -> None:
    # Within the deadline that `make gpu` has for all of them, so that a hang shows its stacks.
    assert alone.run(clip_and_step, stage, name, scaled, timeout=30) == [True]


def wait_for_a_gpu() -> None:
    value = torch.ones(1, device=harness.device())
    with raising_where_pytorch_waits():
        value.item()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_pytorch_would_see_somebody_wait_for_a_gpu(alone: Pool) -> None:
    (failure,) = alone.run_expecting_errors(wait_for_a_gpu)
    assert "synchronizing" in failure.message


def ask_for_the_loss() -> list[str]:
    batch = torch.ones(1, 2)
    with watching(batch) as mode:
        loss = loss_of(nn.Linear(2, 2), batch)
        float(loss.detach())
        loss.tolist()
    return mode.found


def test_a_question_would_be_noticed() -> None:
    assert ask_for_the_loss() == ["aten::_local_scalar_dense", "tolist"]
