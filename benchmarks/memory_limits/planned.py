"""The plan for a model that no rank can hold, and how large a model may be by prediction.

The prediction comes from a profile of two small models, scaled to the number of blocks. The
bisection starts from it. The plan that is trained comes from `poplar.autotune`, which profiles the
model itself under the limits; or, with `--plans scaled`, from the scaled profile, in a second.
"""

from __future__ import annotations

import operator
import time
from functools import cached_property
from typing import Any

import torch
from head_to_head.workers import WorkerContext, Workers, WorkersFailed
from torch import nn

from memory_limits import process_memory
from memory_limits.bisection import largest_that_fits
from memory_limits.clusters import MemoryCluster
from memory_limits.configurations import EVEN, STAGE, configuration_of, even_plan
from memory_limits.task import GrowingLlama
from memory_limits.trial import BLOCKS_BEFORE, first_cause, warm_up
from poplar import NoPlanFits, Plan, autotune, search
from poplar.planner.prediction import memory_needed
from poplar.planner.search import plan_or_error
from poplar.profiler.memory import pass_bytes
from poplar.values.profile import (
    BatchPoint,
    ClusterProfile,
    DeviceProfile,
    ModelProfile,
    NetworkProfile,
)
from poplar.zero.preserved_state import gradients_dropped

OBJECTS_BYTES = 10 << 20
"""Of a limit, for what plans do not count: objects of Python and of autograd, and the freed blocks
that glibc keeps from one measured plan to the next."""
FRAGMENTS_BYTES = 360 << 10
"""The same, per block of the model: its activations have 8 to 60 KiB, so glibc places them in its
heap, where freed ones leave gaps. With 98 blocks, ranks need 21 to 34 MiB more than the tensors."""
BYTES_BEFORE = 20
"""Limit per parameter of the model that is tuned before the limits are set: memory is scarce, so
all kinds of passes run."""
SECONDS_PER_BLOCK = 1e-3
"""Times do not matter here: all ranks are equally fast."""
RESERVE = 0.05
DEADLINE = 600.0
GRACE_SECONDS = 5.0


class NoPlan(RuntimeError):
    """No plan fits the limits; `seconds` is how long it took to find out."""

    def __init__(self, message: str, seconds: float) -> None:
        super().__init__(message)
        self.seconds = seconds


def tuned_plan(cluster: MemoryCluster, task: GrowingLlama, seconds: float) -> Plan:
    """The plan of `poplar.autotune` for a model on `meta`, found by new processes under the limits.

    Autotune uses shared memory between its ranks, which the limits do not count; the trial, which
    decides whether the model fits, does not.

    Raises:
        NoPlan: autotune fails; usually because no plan fits.
    """
    began = time.perf_counter()
    even = configuration_of(EVEN, even_plan(cluster))
    with Workers(cluster.open(), "autotune", grace_seconds=GRACE_SECONDS) as workers:
        try:
            workers.call(warm_up, task, even, timeout=DEADLINE)
            workers.call(_warm_up_tuning, task, timeout=DEADLINE)
            plans = workers.call(_tune, cluster.limits, task, seconds, timeout=DEADLINE)
        except WorkersFailed as failure:
            raise NoPlan(first_cause(str(failure)), time.perf_counter() - began) from None
    plan: Plan = plans[0]
    return plan


def _warm_up_tuning(context: WorkerContext, task: GrowingLlama) -> None:
    """Tune a small model, with a limit at which no rank could train it alone."""
    small = task.with_blocks(BLOCKS_BEFORE)
    _autotune(context, small, BYTES_BEFORE * small.parameters, seconds=0.5)


def _tune(
    context: WorkerContext, limits: tuple[int, ...], task: GrowingLlama, seconds: float
) -> Plan:
    limit = limits[context.rank]
    uncounted = OBJECTS_BYTES + FRAGMENTS_BYTES * task.blocks_count
    process_memory.release_freed_memory()
    with process_memory.limited_to(limit):
        return _autotune(context, task, max(1, limit - uncounted), seconds)


def _autotune(context: WorkerContext, task: GrowingLlama, limit: int, seconds: float) -> Plan:
    return autotune(
        task.new_model(),
        task.loss_fn,
        task.batch(1),
        global_batch=context.size,
        stage=STAGE,
        memory_limit=limit,
        seconds=seconds,
        max_norm=None,
        compute_dtype=torch.float32,
        device="cpu",
        cache=False,
        progress=False,
        lr=task.learning_rate,
    )


class Planner:
    """Plans from a profile of small models, scaled to the number of blocks."""

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
            return search(self._profile(task), **self._request)
        except NoPlanFits as error:
            raise NoPlan(str(error.args[0]), time.perf_counter() - began) from None

    def predicted_largest(self, *, even: bool) -> int:
        """Blocks of the largest model that fits by prediction, with an even plan or a search."""
        plan = Plan.even(self.cluster.size, self.cluster.size, 1, STAGE)

        def fits(blocks: int) -> bool:
            profile = self._profile(self.task.with_blocks(blocks))
            if even:
                needed = memory_needed(profile, plan)
                return all(map(operator.le, needed, self.cluster.limits))
            return isinstance(plan_or_error(profile, **self._request), Plan)

        return largest_that_fits(fits, guess=1)

    @property
    def _request(self) -> dict[str, Any]:
        return {"global_batch": self.cluster.size, "stages": (STAGE,)}

    def _profile(self, task: GrowingLlama) -> ClusterProfile:
        blocks, size = task.blocks_count, self.cluster.size
        block = task.block_parameters
        root = task.parameters - blocks * block
        points = tuple(
            BatchPoint(
                batch=batch,
                seconds=SECONDS_PER_BLOCK * blocks * batch,
                activation_bytes=self._activation_bytes(blocks, batch),
            )
            for batch in range(1, size + 1)
        )
        cut_root = [*[block] * (root // block), *[root % block] * bool(root % block)]
        buffers = (tuple(cut_root), *[(block,)] * blocks)
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
                unit_buffers=buffers,
                merged_buffers=buffers,
                unit_names=("root", *(f"blocks.{number}" for number in range(blocks))),
                resident_units=(0,),
            ),
            network=NetworkProfile(
                reduce_scatter_seconds=SECONDS_PER_BLOCK * blocks,
                all_gather_seconds=SECONDS_PER_BLOCK * blocks,
                send_seconds_per_byte=(1e-10,) * size,
                receive_seconds_per_byte=(1e-10,) * size,
                receive_buffers="step",
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
            return pass_bytes(one_pass, torch.device("cpu")).peak


_FEW, _MORE = 2, 4
