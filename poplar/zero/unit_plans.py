"""Checks and lookups of a plan's `UnitPlan`s, which name the units that differ from the plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from poplar.values.plan import Plan, UnitPlan
from poplar.zero.recomputation import blocks_of
from poplar.zero.unit import Unit

Shares = tuple[float, ...]


def check_unit_names(plan: Plan | None, units: Sequence[Unit], blocks: Sequence[str]) -> None:
    """Check that the plan names existing units.

    Args:
        plan: None has no units.
        units: of the engine at the plan's stage.
        blocks: names of the repeated blocks. A unit that is only recomputed is named by them, as at
            stage 3, because stages that do not shard parameters merge blocks in another way.

    Raises:
        ValueError: the plan names a unit that does not exist, or recomputes the root.
    """
    known = [unit.name for unit in units]
    named = plan.units if plan is not None else ()
    for unit in named:
        if unit.recomputed_on:
            blocks_of(unit.name, blocks)
    followed = {unit.name for unit in named if not is_only_recomputed(unit)}
    unknown = sorted(followed - set(known))
    if unknown:
        raise ValueError(
            f"the plan names units {unknown} that the model does not have; it has {known}. Make "
            "the plan from a profile of this model, or leave them out: dataclasses.replace(plan, "
            "units=())"
        )


def is_only_recomputed(unit: UnitPlan) -> bool:
    """Whether the entry sets nothing but the ranks that recompute the unit."""
    return bool(unit.recomputed_on) and not unit.persistent and unit.shares is None


def check_plan_change(
    old: Plan | None, new: Plan, units: Sequence[Unit], blocks: Sequence[str]
) -> None:
    """Check that the units can change to another plan during training.

    Raises:
        ValueError: a unit gets its own shares that it does not have now, or does not exist, or
            other layers are factored.
    """
    factored = old.factored if old is not None else ()
    if new.factored != factored:
        raise ValueError(
            f"apply_plan cannot change which layers are factored; got {list(new.factored)}, now "
            f"they are {list(factored)}. Keep them (dataclasses.replace(plan, factored=...)), or "
            "build a new optimizer for this plan"
        )
    before, after = shares_by_unit(old), shares_by_unit(new)
    for name, shares in after.items():
        if before.get(name) != shares:
            raise ValueError(
                f"unit {name!r}: apply_plan can change which units are persistent or "
                f"recomputed, but not give a unit its own shares; got {shares}, now it has "
                f"{before.get(name, 'none')}. Leave its shares out, or build a new optimizer for "
                "this plan"
            )
    check_unit_names(new, units, blocks)


def shares_by_unit(plan: Plan | None) -> Mapping[str, Shares]:
    """The shares of units that have their own, by unit name."""
    units = plan.units if plan is not None else ()
    return {unit.name: unit.shares for unit in units if unit.shares is not None}


def persistent_units(plan: Plan | None, units: Sequence[Unit]) -> frozenset[Unit]:
    """The units that stay unsharded between the passes of a step."""
    named = plan.units if plan is not None else ()
    names = {unit.name for unit in named if unit.persistent}
    return frozenset(unit for unit in units if unit.name in names)
