"""Between backward and update the host does not read values that the device computes.

On a GPU each read would wait for all issued work. Here every value that depends on the batch counts
as a device value; norm, scale, clipping and the decision to skip must stay device values until the
update has been issued.
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
from poplar.zero.checks.forward_state import FIRST_STEPS

ANSWERS = {
    "aten::_local_scalar_dense",
    "aten::nonzero",
    "aten::equal",
    "aten::bincount",
    "aten::masked_select",
    "aten::_unique2",
}
"""Operators that synchronize with a GPU before the host has the result."""
UPDATES = {"poplar::adamw_", "aten::_fused_sgd_"}
SIZE = 64


class DeviceValues(TorchDispatchMode):
    """Tracks values that depend on the batch, by their memory, and records reads by the host."""

    def __init__(self, root: Tensor) -> None:
        super().__init__()
        self.found: list[str] = []
        self.updated = False
        self._alive: dict[int, Tensor] = {}  # keeps them alive, so that no memory is reused
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
        return isinstance(value, Tensor) and value.untyped_storage().data_ptr() in self._alive

    def note(self, name: str) -> None:
        if not self.updated:
            self.found.append(name)

    def _add(self, value: Any) -> None:
        if isinstance(value, Tensor) and value.numel():
            self._alive[value.untyped_storage().data_ptr()] = value


@contextmanager
def tracking(batch: Tensor) -> Iterator[DeviceValues]:
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


def host_reads(stage: int, name: str, scaled: bool, own_loop: bool) -> tuple[list[str], bool]:
    """What the host read in a step before its update, and whether there was an update."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE))
    plan = Plan.manual("1,2", stage=stage, passes=2)
    options = {"momentum": 0.9} if "momentum" in name else {}
    kind = getattr(torch.optim, name.split()[0])
    optimizer = HeteroZeroOptimizer(
        model, kind, plan=plan, process_group=harness.group(), lr=0.1, **options
    )
    scaler = poplar.GradScaler("cpu", init_scale=8.0, enabled=scaled)
    batch = torch.randn(plan.samples(optimizer.control.group.rank), SIZE)
    optimizer.train_step(loss_of, batch, max_norm=1e-3)
    with tracking(batch) as mode:
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
def test_update_is_issued_before_the_host_reads_a_value(
    ranks: Pool, own_loop: bool, scaled: bool, name: str, stage: int
) -> None:
    for found, updated in ranks.run(host_reads, stage, name, scaled, own_loop, ranks=2):
        assert updated
        assert found == []


@pytest.fixture(scope="module")
def one_rank() -> Iterator[Pool]:
    """One rank on gloo or NCCL, independent of other tests: one GPU is enough."""
    pool = Pool(1, backend="nccl")
    yield pool
    pool.close()


def clip_and_step(stage: int, name: str, scaled: bool) -> bool:
    """Run a step in which PyTorch raises if the host waits for the device.

    Returns whether the transport waits on streams.
    """
    device = harness.device()
    model = nn.Sequential(nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)).to(device)
    plan = Plan.manual((2,), stage=stage, passes=2)
    kind = getattr(torch.optim, name)
    optimizer = HeteroZeroOptimizer(model, kind, plan=plan, process_group=harness.group(), lr=0.1)
    scaler = poplar.GradScaler(device.type, init_scale=8.0, enabled=scaled)
    batch = torch.randn(plan.global_batch, SIZE, device=device)
    for step in range(FIRST_STEPS + 2):
        for micro_batch in optimizer.micro_batches(batch):
            scaler.scale(loss_of(model, micro_batch)).backward()
        # In the first steps libraries are loaded and the ranks compare what their forwards wrote.
        with raise_on_synchronization() if step >= FIRST_STEPS else nullcontext():
            scaler.unscale_(optimizer)
            optimizer.clip_grad_norm_(1e-3)
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
    return optimizer._training.engine.comm.waits_on_stream


@contextmanager
def raise_on_synchronization() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: only their order was looked at")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("name", ["AdamW", "SGD"])
@pytest.mark.parametrize("scaled", [False, True], ids=["", "scaled"])
def test_step_does_not_wait_for_a_gpu(one_rank: Pool, scaled: bool, name: str, stage: int) -> None:
    # Shorter than the deadline of `make gpu`, so that a hang shows its stacks.
    assert one_rank.run(clip_and_step, stage, name, scaled) == [True]


def synchronize() -> None:
    value = torch.ones(1, device=harness.device())
    with raise_on_synchronization():
        value.item()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_wait_for_a_gpu_is_detected(one_rank: Pool) -> None:
    (failure,) = one_rank.run_expecting_errors(synchronize)
    assert "synchronizing" in failure.message


def read_the_loss() -> list[str]:
    batch = torch.ones(1, 2)
    with tracking(batch) as mode:
        loss = loss_of(nn.Linear(2, 2), batch)
        float(loss.detach())
        loss.tolist()
    return mode.found


def test_read_of_a_device_value_is_detected() -> None:
    assert read_the_loss() == ["aten::_local_scalar_dense", "tolist"]
