"""What a plan says of single units: checked, and looked up by unit.

A `Plan` names the units that differ; all others follow it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from poplar.plan import STRATEGIES, Plan
from poplar.zero.unit import Unit

Shares = tuple[float, ...]


def check_unit_plans(plan: Plan) -> None:
    """Refuse what a `UnitPlan` can say and the engine can't do.

    Raises:
        ValueError: a unit of another stage, or with a transport of its own.
    """
    expected = STRATEGIES[plan.stage]
    for unit in plan.units:
        if unit.strategy != expected:
            raise ValueError(
                f"unit {unit.name!r}: strategy {unit.strategy!r} under a stage-{plan.stage} plan; "
                f"units of different stages are not supported yet, use {expected!r}"
            )
        if unit.transport is not None:
            raise ValueError(
                f"unit {unit.name!r}: a transport of its own ({unit.transport!r}) is not supported "
                "yet; leave it out, or give the plan a transport"
            )


def check_unit_names(plan: Plan | None, units: Sequence[Unit]) -> None:
    """
    Raises:
        ValueError: the plan names units that are not among these.
    """
    known = [unit.name for unit in units]
    unknown = sorted({unit.name for unit in plan.units} - set(known)) if plan is not None else []
    if unknown:
        raise ValueError(
            f"the plan names units {unknown} that the model does not have; it has {known}. Plan on "
            "a profile of this model, or leave them out: dataclasses.replace(plan, units=())"
        )


def check_plan_change(old: Plan | None, new: Plan, units: Sequence[Unit]) -> None:
    """Refuse a change of plan, in the middle of training, that the units could not follow.

    Raises:
        ValueError: a unit gets shares of its own that it does not have now, or is not known.
    """
    check_unit_plans(new)
    before, after = shares_by_unit(old), shares_by_unit(new)
    for name, shares in after.items():
        if before.get(name) != shares:
            raise ValueError(
                f"unit {name!r}: apply_plan can change which units stay gathered (keep_gathered), "
                f"but not give one shares of its own; got {shares}, now it has "
                f"{before.get(name, 'none')}. Leave its shares out, or build a new optimizer for "
                "this plan"
            )
    check_unit_names(new, units)


def shares_by_unit(plan: Plan | None) -> Mapping[str, Shares]:
    """Shares of the units that have their own, by name."""
    units = plan.units if plan is not None else ()
    return {unit.name: unit.shares for unit in units if unit.shares is not None}


def persistent_units(plan: Plan | None, units: Sequence[Unit]) -> frozenset[Unit]:
    """Those of these units that stay gathered between the passes of a step."""
    named = plan.units if plan is not None else ()
    names = {unit.name for unit in named if unit.keep_gathered}
    return frozenset(unit for unit in units if unit.name in names)
