"""Every rank holds the training state that the memory formula predicts.

The count is independent of the engine: it is the memory of all tensors that the garbage collector
knows, and of their gradients. Only the buckets in flight are taken from the engine's own report,
and are listed separately.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import models
import pytest
import torch
import training
from models import ModelSpec
from ranks import Pool
from reference import Recipe
from torch import Tensor
from training import STAGES, Run

from poplar import Plan
from poplar.zero.checks.placeholder_gradient import PlaceholderGradient
from poplar.zero.held_memory import HeldMemory

SHARES = (0.5, 0.3, 0.2, 0.0)
BATCHES = ((1,), (1,), (1,), (1,))


def large(dtype: torch.dtype) -> ModelSpec:
    """More than 2M parameters in blocks of 252,000, so that alignment is negligible."""
    return ModelSpec(kind="mlp", blocks=8, width=300, hidden=420, dtype=dtype)


@dataclass(frozen=True)
class Counted:
    """Bytes on one rank."""

    state: int
    """Everything allocated between backward and step, without earlier memory and buckets."""
    buckets: int
    reported: dict[str, int]
    """What the engine reports."""


def live_bytes() -> int:
    """Bytes of the memory of all tensors in this process."""
    gc.collect()
    found: list[Tensor] = []
    for thing in gc.get_objects():
        if issubclass(type(thing), Tensor) and type(thing) is not PlaceholderGradient:
            found.append(thing)
            if thing.is_leaf and thing.grad is not None:
                found.append(thing.grad)
    return bytes_of(found)


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Bytes of the memory of tensors, each once.

    A parameter and the flat buffer that it is part of have storages of their own over the same
    memory. The garbage collector lists them in any order.
    """
    storages = [
        tensor.untyped_storage()
        for tensor in tensors
        if type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout == torch.strided
    ]
    total = last = 0
    for begin, size in sorted((storage.data_ptr(), storage.nbytes()) for storage in storages):
        end = begin + size if begin else 0
        total += max(0, end - max(begin, last))
        last = max(last, end)
    return total


def count_bytes(run: Run) -> Counted:
    before = live_bytes()
    model, optimizer = training.prepare(run)
    loss = training.loss_of(run.recipe)
    training.take_step(run, model, optimizer, 0)
    for micro_batch in optimizer.micro_batches(training.batch_of(run, 1)):
        loss(model, micro_batch).backward()
    micro_batch = None
    reported = dict(optimizer.memory())
    buckets = reported.get("buckets", 0)
    held = live_bytes() - before - buckets
    optimizer.step()
    return Counted(held, buckets, reported)


def bytes_per_element(stage: int, share: float, parameter: int) -> float:
    """The formula: P, D = 4 and O, full or by share; O has fp32 masters if P is 2."""
    accumulator = 4
    optimizer = 8 + (4 if parameter < 4 else 0)
    whole, shared = {
        0: (parameter + accumulator + optimizer, 0),
        1: (parameter + accumulator, optimizer),
        2: (parameter, accumulator + optimizer),
        3: (0, parameter + accumulator + optimizer),
    }[stage]
    return whole + shared * share


def kinds_per_element(stage: int, share: float, parameter: int) -> dict[str, float]:
    """The same by kind, between backward and step."""
    return {
        "parameters": parameter * (share if stage == 3 else 1),
        "unsharded": 0,
        "masters": (4 if parameter < 4 else 0) * (share if stage >= 1 else 1),
        "optimizer": 8 * (share if stage >= 1 else 1),
        "gradients": 4 * (share if stage >= 2 else 1),
    }


def added_by_differences(stage: int, share: float, parameter: int) -> float:
    """Masters in fp32 beside fp32 values, and the owned values after the last update."""
    return share * (parameter + (4 if parameter == 4 else 0)) if stage in (1, 2) else 0.0


@pytest.mark.parametrize("communication", ["exact", "int4"])
@pytest.mark.parametrize(
    ("stage", "dtype"),
    [*((stage, torch.float32) for stage in STAGES), (0, torch.bfloat16), (3, torch.bfloat16)],
)
def test_state_bytes_match_the_formula(
    ranks: Pool, stage: int, dtype: torch.dtype, communication: str
) -> None:
    spec = large(dtype)
    elements = sum(p.numel() for p in models.build(spec).parameters())
    assert elements >= 2_000_000
    plan = Plan(stage=stage, global_batch=4, micro_batches=BATCHES, shares=SHARES)
    recipe = Recipe(spec=spec, batches=(4, 4))
    engine = {"compute_dtype": dtype, "communication": communication}
    counted = ranks.run(count_bytes, Run(recipe, plan, engine=engine))
    for rank, (count, share) in enumerate(zip(counted, SHARES, strict=True)):
        itemsize = dtype.itemsize
        added = added_by_differences(stage, share, itemsize) if communication != "exact" else 0.0
        expected = elements * (bytes_per_element(stage, share, itemsize) + added)
        # An empty share leaves a few kilobytes of counters and scalars.
        assert abs(count.state - expected) <= 0.02 * expected + 65536, (
            f"rank {rank}: {count.state} bytes, formula {expected:.0f}; {count}"
        )
        transport = ("buckets", "shared_memory")
        reported = sum(size for kind, size in count.reported.items() if kind not in transport)
        assert abs(count.state - reported) <= 65536, f"rank {rank}: {count}"
        kinds = kinds_per_element(stage, share, itemsize)
        kinds["masters"] += added
        for kind, size in kinds.items():
            assert count.reported[kind] == pytest.approx(elements * size, rel=0.03, abs=65536), kind


def memory_beside_the_plan(run: Run) -> tuple[HeldMemory, str, HeldMemory]:
    """Between steps; also as text, and under another plan, without a prediction."""
    model, optimizer = training.prepare(run)
    training.take_step(run, model, optimizer, 0)
    held = optimizer.memory()
    optimizer.apply_plan(replace(run.plan, prediction=None))
    return held, str(held), optimizer.memory()


def test_memory_is_shown_beside_the_prediction_of_the_plan(ranks: Pool) -> None:
    prediction = {"memory_bytes": [10 << 20, 20 << 20]}
    plan = replace(Plan.manual("2,2", stage=1), prediction=prediction)
    for rank, found in enumerate(
        ranks.run(memory_beside_the_plan, Run(Recipe(batches=(4,)), plan), ranks=2)
    ):
        held, text, other = found
        assert held.total == sum(held.values()) > 0
        assert held.predicted == prediction["memory_bytes"][rank]
        assert held.peak > held.total, "the process has libraries too"
        assert other.predicted is None
        for line in ("parameters", "optimizer", "total", "predicted peak  *[12]0.0 MiB"):
            assert re.search(f"^{line}", text, re.MULTILINE), text


def held_after_each_step(run: Run, steps: int) -> list[HeldMemory]:
    model, optimizer = training.prepare(run)
    held = []
    for _ in range(steps):
        training.take_step(run, model, optimizer, 0)
        held.append(optimizer.memory())
    return held


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("communicator", ["process_group", "shared_memory"])
def test_buckets_and_segments_do_not_grow_after_the_second_step(
    ranks: Pool, stage: int, communicator: str
) -> None:
    plan = Plan(
        stage=stage, global_batch=7, micro_batches=((1, 2), (0, 1), (3, 0)), shares=(0.5, 0.5, 0.0)
    )
    run = Run(Recipe(batches=(7,)), plan, engine={"communicator": communicator})
    model_bytes = 4 * sum(p.numel() for p in models.build(run.recipe.spec).parameters())
    for held in ranks.run(held_after_each_step, run, 8, ranks=3):
        for later in held[2:]:
            # How many blocks of a segment are needed depends on when other ranks have read them.
            assert later.pop("shared_memory") <= 8 * model_bytes
            assert later.items() <= held[1].items()


def keep_receive_buffers(run: Run) -> None:
    model, optimizer = training.prepare(run)
    pool = optimizer._training.engine.comm.queue.buffers
    after: list[list[Tensor]] = []
    for _ in range(4):
        training.take_step(run, model, optimizer, 0)
        after.append([buffer for idle in pool._idle.values() for buffer, _ in idle])
    assert after[1]
    for later in after[2:]:
        assert {*map(id, later)} == {*map(id, after[1])}


@pytest.mark.parametrize("stage", STAGES)
def test_receive_buffers_on_the_host_are_used_again_in_the_next_step(
    ranks: Pool, stage: int
) -> None:
    """New memory costs a page fault for each page, or is pinned page by page."""
    plan = Plan.even(2, 4, 1, stage)
    run = Run(Recipe(batches=(4,)), plan, engine={"communicator": "process_group"})
    ranks.run(keep_receive_buffers, run, ranks=2)


def shared_after_steps(plans: Sequence[Plan]) -> int:
    """Bytes of shared memory that this rank holds after steps under one plan after the other."""
    recipe, engine = (
        Recipe(spec=large(torch.float32), batches=(2,)),
        {"communicator": "shared_memory"},
    )
    run = Run(recipe, plans[0], engine=engine)
    model, optimizer = training.prepare(run)
    for plan in plans:
        run = replace(run, plan=plan)
        optimizer.apply_plan(plan)
        for _ in range(3):
            training.take_step(run, model, optimizer, 0)
    return optimizer.memory()["shared_memory"]


def test_shared_memory_of_other_shares_is_returned(ranks: Pool) -> None:
    first, second = (
        Plan(stage=3, global_batch=2, micro_batches=((1,), (1,)), shares=shares)
        for shares in ((0.9, 0.1), (0.1, 0.9))
    )
    unit = 4 * sum(p.numel() for p in models.build(large(torch.float32)).blocks[0].parameters())
    fresh, changed = [], []
    for _ in range(6):  # timing decides how many buffers are in use at once, with one plan, too
        fresh.append(ranks.run(shared_after_steps, [second], ranks=2))
        changed.append(ranks.run(shared_after_steps, [first, second], ranks=2))
        least, usual = (
            [min(held) for held in zip(*runs, strict=True)] for runs in (changed, fresh)
        )
        if all(least[rank] <= usual[rank] + 2 * unit for rank in range(2)):
            return
    pytest.fail(f"{changed}, without the first plan {fresh}")
