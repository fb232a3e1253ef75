"""What every rank holds of the training state, counted from outside, is what the formula says.

The count knows nothing of the engine: it walks every tensor that the garbage collector knows, and
their gradients, and adds up distinct storages. Only what the engine calls buckets in flight is
taken from its own report, and listed apart.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass

import models
import pytest
import ranks as harness
import torch
import training
from models import ModelSpec
from ranks import Pool
from reference import Recipe
from torch import Tensor
from training import STAGES, Run

from poplar import Plan

SHARES = (0.5, 0.3, 0.2, 0.0)
BATCHES = ((1,), (1,), (1,), (1,))


def large(dtype: torch.dtype) -> ModelSpec:
    """More than 10M parameters, in blocks of 1.26M: alignment rounds little away."""
    return ModelSpec(kind="mlp", blocks=8, width=630, hidden=1000, dtype=dtype)


@dataclass(frozen=True)
class Counted:
    """Bytes on one rank."""

    state: int
    """Everything alive between backward and step, but for what was there before and the buckets."""
    buckets: int
    reported: dict[str, int]
    """What the engine says of itself."""


def live_bytes() -> int:
    """Bytes of all distinct storages that tensors of this process hold."""
    gc.collect()
    storages: dict[int, int] = {}

    def count(tensor: Tensor) -> None:
        if type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout == torch.strided:
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()

    for thing in gc.get_objects():
        if issubclass(type(thing), Tensor):
            count(thing)
            if thing.is_leaf and thing.grad is not None:
                count(thing.grad)
    storages.pop(0, None)
    return sum(storages.values())


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
    """The formula: P, D = 4 and O, each whole or by share; O has fp32 masters where P is less."""
    accumulator = 4
    optimizer = 8 + (4 if parameter < 4 else 0)
    whole, shared = {
        0: (parameter + accumulator + optimizer, 0),
        1: (parameter + accumulator, optimizer),
        2: (parameter, accumulator + optimizer),
        3: (0, parameter + accumulator + optimizer),
    }[stage]
    return whole + shared * share


@pytest.mark.parametrize(
    ("stage", "dtype"),
    [*((stage, torch.float32) for stage in STAGES), (0, torch.bfloat16), (3, torch.bfloat16)],
)
def test_state_bytes_are_those_of_the_formula(ranks: Pool, stage: int, dtype: torch.dtype) -> None:
    spec = large(dtype)
    elements = sum(p.numel() for p in models.build(spec).parameters())
    assert elements >= 10_000_000
    plan = Plan(stage=stage, global_batch=4, micro_batches=BATCHES, shares=SHARES)
    recipe = Recipe(spec=spec, batches=(4, 4))
    engine = {"compute_dtype": dtype}
    counted = ranks.run(count_bytes, Run(recipe, plan, engine=engine), timeout=120)
    for rank, (count, share) in enumerate(zip(counted, SHARES, strict=True)):
        expected = elements * bytes_per_element(stage, share, dtype.itemsize)
        # An empty share leaves a few kilobytes of counters and scalars.
        assert abs(count.state - expected) <= 0.02 * expected + 65536, (
            f"rank {rank}: {count.state} bytes, formula {expected:.0f}; {count}"
        )


def count_gathered(run: Run) -> tuple[int, int]:
    """Most bytes alive at a block's forward or backward beyond what is held between steps."""
    model, optimizer = training.prepare(run)
    training.take_step(run, model, optimizer, 0)
    between = live_bytes()
    most = 0

    def look(*_: object) -> None:
        nonlocal most
        most = max(most, live_bytes() - between)

    handles = [model.blocks[-1].register_forward_hook(look)]
    handles += [model.blocks[i].register_full_backward_hook(look) for i in (0, 1, 2, 4)]
    training.take_step(run, model, optimizer, 1)
    for handle in handles:
        handle.remove()
    return most, harness.rank()


def test_stage_3_never_gathers_the_whole_model(ranks: Pool) -> None:
    """Two gathered units and one unit's gradients and buckets, of nine units."""
    spec = large(torch.float32)
    model = models.build(spec)
    elements = sum(p.numel() for p in model.parameters())
    unit = 4 * sum(p.numel() for p in model.blocks[0].parameters())
    plan = Plan(stage=3, global_batch=4, micro_batches=BATCHES, shares=SHARES)
    run = Run(Recipe(spec=spec, batches=(4, 4)), plan)
    for most, rank in ranks.run(count_gathered, run, timeout=120):
        # gathered: 2 units and the small root; gradients: 1; packed and received: 2 of (1 + 4 p)
        bound = (2 + 0.1 + 1 + 2 * (1 + 4 * SHARES[rank])) * unit
        bound += 4 * elements * SHARES[rank]  # the accumulator may come and go with a step
        assert most <= bound, f"rank {rank}: {most / unit:.1f} units, bound {bound / unit:.1f}"
