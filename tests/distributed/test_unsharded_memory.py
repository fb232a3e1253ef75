"""At stage 3 two units are unsharded, besides the root and persistent units, at any time.

At stages 2 and 3 the gradients of one unit are held, besides the root's, and few buckets.

The fake process group of torch never waits: the host is as far ahead of the device as it can be.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from poplar import HeteroZeroOptimizer, Plan
from poplar.comm import Bucket, Communicator
from poplar.values.plan import UnitPlan
from poplar.zero import unit as units

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from host.fake_ranks import fake_ranks

RANKS = 4
HIDDEN = (64, 512, 8, 8, 256, 8, 8, 128)
"""Widths inside the blocks: units of very different sizes."""


class Block(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, hidden), nn.Linear(hidden, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    def __init__(self, *, recompute: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(map(Block, HIDDEN))
        self.head = nn.Linear(32, 4)
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return self.head(x)


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def optimizer_of(model: nn.Module, plan: Plan, names: list[str]) -> HeteroZeroOptimizer:
    """What the fake ranks send is random, so losses need not be finite."""
    return HeteroZeroOptimizer(
        model, torch.optim.AdamW, plan=plan, units=names, lr=1e-3, on_nonfinite="skip"
    )


class UnshardedBytes:
    """Counts the bytes of all storages of unsharded values while the engine resizes them."""

    def __init__(self, engine_units: tuple[units.Unit, ...]) -> None:
        self.sizes = {
            flat.values.untyped_storage()._cdata: unit
            for unit in engine_units
            for flat in unit.flats
        }
        self.held: dict[int, int] = {}
        self.most = 0

    @contextmanager
    def counting(self) -> Iterator[None]:
        resize = torch.UntypedStorage.resize_

        def counted(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            if storage._cdata in self.sizes:
                self.held[storage._cdata] = size
                self.most = max(self.most, sum(self.held.values()))
            return resize(storage, size)

        with mock.patch.object(torch.UntypedStorage, "resize_", counted):
            yield


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("persistent", [(), (1,), (2, 3, 5)])
@pytest.mark.parametrize("passes", [1, 3])
def test_two_units_and_persistent_ones_are_unsharded_at_most(
    recompute: bool, persistent: tuple[int, ...], passes: int
) -> None:
    names = [f"blocks.{number}" for number in range(len(HIDDEN))]
    # The fake group cannot gather slices of different sizes.
    uneven = mock.patch("torch.distributed.all_gather", return_value=mock.Mock(wait=lambda: None))
    with fake_ranks(RANKS), uneven:
        model = Model(recompute=recompute)
        plan = Plan(
            stage=3,
            global_batch=RANKS * passes,
            micro_batches=((1,) * passes,) * RANKS,
            shares=(0.4, 0.3, 0.3, 0.0),
            units=tuple(
                UnitPlan(name, persistent=names.index(name) in persistent) for name in names
            ),
        )
        optimizer = optimizer_of(model, plan, names)
        engine_units = optimizer._training.engine.units
        counter = UnshardedBytes(engine_units)
        with counter.counting():
            for _ in range(3):
                optimizer.train_step(loss_of, torch.randn(passes, 32))
        staying = [
            u for u in engine_units if u.resident or u.name in {names[p] for p in persistent}
        ]
        others = sorted(unit.unsharded_bytes for unit in engine_units if unit not in staying)
        limit = sum(unit.unsharded_bytes for unit in staying) + sum(others[-2:])
        assert 0 < counter.most <= limit
        assert sum(counter.held.values()) == 0, "nothing stays unsharded between steps"
        optimizer.release()


class HeldGradients:
    """Counts the bytes of `.grad` and of the buckets that are alive."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters = list(model.parameters())
        self.most = 0
        self.live_buckets = self.most_buckets = 0
        for parameter in self.parameters:
            parameter.register_hook(self.count)

    def count(self, arriving: Tensor) -> None:
        held = sum(p.grad.nbytes for p in self.parameters if p.grad is not None)
        self.most = max(self.most, held + arriving.nbytes)

    @contextmanager
    def counting_buckets(self) -> Iterator[None]:
        allocate = Communicator.buffer

        def counted(comm: Communicator, *arguments: Any, **options: Any) -> Bucket:
            bucket = allocate(comm, *arguments, **options)
            self.live_buckets += 1
            self.most_buckets = max(self.most_buckets, self.live_buckets)
            weakref.finalize(bucket, self.drop)
            return bucket

        with mock.patch.object(Communicator, "buffer", counted):
            yield

    def drop(self) -> None:
        self.live_buckets -= 1


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize("flat_bytes", [1 << 10, 1 << 14, units.MAX_FLAT_BYTES])
def test_gradients_of_one_unit_and_few_buckets_are_held(
    stage: int, passes: int, flat_bytes: int
) -> None:
    names = [f"blocks.{number}" for number in range(len(HIDDEN))]
    uneven = mock.patch("torch.distributed.all_gather", return_value=mock.Mock(wait=lambda: None))
    small = mock.patch.object(units, "MAX_FLAT_BYTES", flat_bytes)
    with fake_ranks(RANKS), uneven, small:
        model = Model(recompute=False)
        plan = Plan(
            stage=stage,
            global_batch=RANKS * passes,
            micro_batches=((1,) * passes,) * RANKS,
            shares=(0.4, 0.3, 0.3, 0.0),
        )
        optimizer = optimizer_of(model, plan, names)
        engine_units = optimizer._training.engine.units
        held = HeldGradients(model)
        with held.counting_buckets():
            for _ in range(3):
                optimizer.train_step(loss_of, torch.randn(passes, 32))
        largest = max(unit.unsharded_bytes for unit in engine_units)
        root = sum(unit.unsharded_bytes for unit in engine_units if unit.resident)
        assert 0 < held.most <= largest + root
        assert 0 < held.most_buckets <= max(2, 1 + max(len(unit.flats) for unit in engine_units))
        assert held.live_buckets == 0, "between steps"
        optimizer.release()
