"""The plan for a model that no rank can hold."""

from __future__ import annotations

import time
from functools import cached_property

import torch
from torch import nn

from memory_limits.clusters import MemoryCluster
from memory_limits.task import GrowingLlama
from poplar import NoPlanFits, Plan, search
from poplar.profile import (
    BatchPoint,
    ClusterProfile,
    DeviceProfile,
    ModelProfile,
    NetworkProfile,
)
from poplar.profiler.memory import peak_bytes
from poplar.profiler.preserved_state import gradients_dropped

STAGE = 3
SECONDS_PER_BLOCK = 1e-3
"""Times do not matter here: all ranks are equally fast."""
RESERVE = 0.05


class NoPlan(RuntimeError):
    """No plan fits the limits; `seconds` is how long it took to find out."""

    def __init__(self, message: str, seconds: float) -> None:
        super().__init__(message)
        self.seconds = seconds


class Planner:
    """Plans from a profile of small models, scaled to the number of blocks."""

    source = "scaled profile"

    def __init__(self, cluster: MemoryCluster, task: GrowingLlama) -> None:
        self.cluster = cluster
        self.task = task

    def plan(self, task: GrowingLlama) -> Plan:
        """The fastest plan at stage 3 for one sample per rank.

        Raises:
            NoPlan: no plan fits.
        """
        began = time.perf_counter()
        try:
            return search(self._profile(task), global_batch=self.cluster.size, stages=(STAGE,))
        except NoPlanFits as error:
            raise NoPlan(str(error.args[0]), time.perf_counter() - began) from None

    def _profile(self, task: GrowingLlama) -> ClusterProfile:
        blocks, size = task.blocks_count, self.cluster.size
        one, two = (self.task.with_blocks(count).parameters for count in (1, 2))
        block, root = two - one, one - (two - one)
        points = tuple(
            BatchPoint(
                batch=batch,
                seconds=SECONDS_PER_BLOCK * blocks * batch,
                activation_bytes=self._activation_bytes(blocks, batch),
            )
            for batch in range(1, size + 1)
        )
        return ClusterProfile(
            devices=tuple(
                DeviceProfile(
                    name=f"{limit >> 20} MiB",
                    memory_bytes=limit,
                    points=points,
                    optimizer_seconds=SECONDS_PER_BLOCK * blocks,
                )
                for limit in self.cluster.limits
            ),
            model=ModelProfile(
                unit_numels=(root, *[block] * blocks),
                unit_names=("root", *(f"blocks.{number}" for number in range(blocks))),
                resident_units=(0,),
                largest_flat_numels=(block,) * 4,
            ),
            network=NetworkProfile(
                reduce_scatter_seconds=SECONDS_PER_BLOCK * blocks,
                all_gather_seconds=SECONDS_PER_BLOCK * blocks,
                send_seconds_per_byte=(1e-10,) * size,
                receive_seconds_per_byte=(1e-10,) * size,
            ),
            memory_reserve=RESERVE,
        )

    def _activation_bytes(self, blocks: int, batch: int) -> int:
        """A line through the peaks of two small models."""
        few, more = self._measured[batch]
        slope = (more - few) / (_MORE - _FEW)
        return round(few + slope * (blocks - _FEW))

    @cached_property
    def _measured(self) -> dict[int, tuple[int, int]]:
        """By batch, peaks of a pass of models with `_FEW` and `_MORE` blocks."""
        models = [self.task.with_blocks(count).new_real_model() for count in (_FEW, _MORE)]
        return {
            batch: tuple(self._peak(model, batch) for model in models)  # type: ignore[misc]
            for batch in range(1, self.cluster.size + 1)
        }

    def _peak(self, model: nn.Module, batch: int) -> int:
        samples = self.task.batch(batch)

        def one_pass() -> None:
            self.task.loss_fn(model, samples).backward()
            model.zero_grad()

        with gradients_dropped(model):
            one_pass()
            return peak_bytes(one_pass, torch.device("cpu"))


_FEW, _MORE = 2, 4
