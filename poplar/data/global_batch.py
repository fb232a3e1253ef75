"""The part of a rank in a global batch, and checks that the sampler and the stream share."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from typing import Any

import torch.distributed as dist

from poplar.values.errors import check_class
from poplar.values.plan import Plan

STATE_VERSION = 1


def rank_slice(plan: Plan, rank: int, samples: int) -> tuple[int, int]:
    """Start and end of the part of `rank` in a global batch of `samples`."""
    bounds = list(accumulate(plan.cut(samples), initial=0))
    if bounds[rank] == bounds[rank + 1]:
        return 0, 1  # one sample, because an empty list breaks collate functions
    return bounds[rank], bounds[rank + 1]


def check_last_batch(tail: int, plan: Plan, why: str) -> None:
    """Check that a last global batch of `tail` samples is enough for the ranks with samples."""
    working = sum(plan.samples(rank) > 0 for rank in range(plan.world_size))
    if tail < working:
        raise ValueError(
            f"{why}, and its last global batch has {tail} samples (of {plan.global_batch}), too "
            f"few for the {working} ranks that have samples in the plan; pass drop_last=True, or "
            f"pad the data by {working - tail} samples"
        )


def check_state(
    state: Mapping[str, Any], position: set[str], expected: Mapping[str, Any], owner: str
) -> None:
    """Check the fields and the version of a `state_dict` of `owner`."""
    fields = {"version", *position, *expected}
    if set(state) != fields:
        raise ValueError(
            f"this is not a state of {owner}: its fields are {sorted(state)}, expected "
            f"{sorted(fields)}"
        )
    if state["version"] != STATE_VERSION:
        raise ValueError(
            f"state format {state['version']!r}, but this version of Poplar reads {STATE_VERSION}"
        )
    for name, value in expected.items():
        if state[name] != value:
            raise ValueError(
                f"the state was saved with {name}={state[name]!r}, but here it is {value!r}, so "
                f"its step would be other samples; use {name}={state[name]!r}, or start again"
            )


def resolve_rank(plan: Plan, rank: int | None) -> int:
    """The given rank, or this process's rank in `torch.distributed`; checked against the plan."""
    check_class("plan", plan, Plan)
    if rank is None:
        if dist.is_available() and dist.is_initialized():
            world_size = dist.get_world_size()
            if world_size != plan.world_size:
                raise ValueError(
                    f"rank {dist.get_rank()}: the plan is for {plan.world_size} ranks, but "
                    f"torch.distributed has {world_size}; make a plan for {world_size}, or pass "
                    "rank="
                )
            return dist.get_rank()
        if plan.world_size == 1:
            return 0
        raise ValueError(
            f"the plan is for {plan.world_size} ranks and torch.distributed is not initialized, so "
            "this process has no rank; call init_process_group first, or pass rank="
        )
    if not 0 <= rank < plan.world_size:
        raise ValueError(
            f"rank {rank}: the plan is for ranks 0 to {plan.world_size - 1}; pass one of these"
        )
    return rank
