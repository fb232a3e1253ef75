"""A short description of how one plan differs from another."""

from __future__ import annotations

from poplar.values.formatting import format_passes
from poplar.values.plan import Plan


def difference(plan: Plan, chosen: Plan) -> str:
    """`rank 0 -2, rank 3 +2`, or other passes or shares; "the chosen plan" if equal."""
    if plan == chosen:
        return "the chosen plan"
    parts = []
    if plan.stage != chosen.stage:
        parts.append(f"stage {plan.stage}")
    moved = _moved_samples(plan, chosen)
    if moved:
        parts.append(moved)
    elif plan.micro_batches != chosen.micro_batches:
        parts.append(_other_passes(plan, chosen))
    if plan.shares != chosen.shares:
        parts.append("shares " + " ".join(f"{100 * share:.0f}" for share in plan.shares))
    counts = [
        [len(one.recomputed_units(rank)) for rank in range(one.world_size)]
        for one in (plan, chosen)
    ]
    if counts[0] != counts[1]:
        parts.append("recomputed units " + " ".join(map(str, counts[0])))
    return ", ".join(parts) or "different units"


def _moved_samples(plan: Plan, chosen: Plan) -> str:
    changes = [plan.samples(r) - chosen.samples(r) for r in range(plan.world_size)]
    return ", ".join(f"rank {rank} {change:+d}" for rank, change in enumerate(changes) if change)


def _other_passes(plan: Plan, chosen: Plan) -> str:
    counts = {len(sizes) for sizes in plan.micro_batches}
    if len(counts) == 1 and plan.stage >= 2 and counts != {len(chosen.micro_batches[0])}:
        return f"{_passes(counts.pop())} on all ranks"
    for rank, (ours, theirs) in enumerate(
        zip(plan.micro_batches, chosen.micro_batches, strict=True)
    ):
        if len(ours) != len(theirs):
            return f"rank {rank} in {_passes(len(ours))}"
        if ours != theirs:
            return f"rank {rank} in {format_passes(ours)}"
    return ""


def _passes(count: int) -> str:
    return f"{count} pass" if count == 1 else f"{count} passes"
