"""Units: parameters that are unsharded and reduced together.

A unit is usually a transformer block. It is unsharded before it runs and reduced after its
backward. Parameters that belong to no block, or to several, form the root unit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple, cast

import torch
from torch import Tensor, nn

from poplar.step.units import MAX_FLAT_BYTES, MERGED_UNIT_BYTES, cut, merged
from poplar.values.plan import Plan
from poplar.zero.flat_parameter import FlatParameter
from poplar.zero.opaque_parameter import Memory, OpaqueBytes

ROOT = "root"

Merge = Literal["all", "blocks", "none"]
"""Which small units are merged: "all" where parameters are not sharded; "blocks" (consecutive
blocks, but not the root, which stays unsharded); "none" where the user named the units."""
Shares = tuple[float, ...]


class Cut(NamedTuple):
    """How parameters are cut into units and flat parameters."""

    merge: Merge
    max_flat_bytes: int | None
    """Size in fp32 from which a unit is split; None: `MAX_FLAT_BYTES`."""


@dataclass(frozen=True, eq=False)
class Unit:
    """Parameters that are unsharded and reduced together."""

    index: int
    name: str
    modules: tuple[nn.Module, ...]
    """Their forwards need the unit's parameters."""
    flats: tuple[FlatParameter, ...]
    resident: bool
    """The root unit: stays unsharded until the pass is over."""
    opaque: tuple[OpaqueBytes, ...] = ()
    """Its opaque tensors, where they are sharded; at most one buffer."""

    @cached_property
    def trained(self) -> tuple[FlatParameter, ...]:
        """The flat parameters that have gradients."""
        return tuple(flat for flat in self.flats if flat.trained)

    @cached_property
    def buffers(self) -> tuple[FlatParameter | OpaqueBytes, ...]:
        """What is unsharded together, in this order."""
        return (*self.flats, *self.opaque)

    @cached_property
    def unsharded_bytes(self) -> int:
        """Bytes of the parameters while the unit is unsharded."""
        return sum(buffer.numel * buffer.dtype.itemsize for buffer in self.buffers)


@dataclass(frozen=True, eq=False)
class Member:
    """A parameter and its properties, before it belongs to a flat parameter."""

    name: str
    parameter: Tensor
    """A parameter, or an opaque buffer."""
    group: int
    trained: bool
    dtype: torch.dtype
    kind: Callable[..., FlatParameter] | None = None
    """Makes a flat parameter of its own for it, because it is reduced in another way."""
    step: int | None = None
    """Elements between two points where it may be cut; 0: nowhere; None: as any other."""
    is_local: bool = False
    """Every rank has another part of it, and maybe of another size."""
    memories: Sequence[Memory] = ()
    """What an opaque tensor consists of; empty for others."""

    @property
    def numel(self) -> int:
        """Elements that are communicated, of opaque tensors as if fp32: the same on all ranks."""
        if self.memories:
            return sum(memory[0].nbytes for memory in self.memories) // 4
        return 0 if self.is_local else self.parameter.numel()


def find_blocks(model: nn.Module) -> list[str]:
    """Find repeated blocks: children of one container that share a class and have parameters.

    Only the outermost containers count, so a block inside a block is part of the outer one. What
    has no forward cannot be a block: in `ModuleList([ModuleList([attention, mlp]), ...])`, as in
    models that call the parts of a layer themselves, the parts are the blocks. A module that is
    registered in several places counts once, under its name in `named_modules()`.
    """
    found: dict[int, nn.Module] = {}

    def search(module: nn.Module) -> None:
        is_container = isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential))
        children = list(_parts_with_forward(module) if is_container else module.children())
        classes = Counter(
            type(child) for child in children if next(child.parameters(), None) is not None
        )
        repeated = {cls for cls, count in classes.items() if count > 1}
        for child in children:
            if is_container and type(child) in repeated:
                found[id(child)] = child
            else:
                search(child)

    search(model)
    inside = {id(own) for block in found.values() for own in block.modules() if own is not block}
    names = {id(module): name for name, module in model.named_modules()}
    return [names[block] for block in found if block not in inside]


def _parts_with_forward(module: nn.Module) -> Iterator[nn.Module]:
    """The children, each child without a forward replaced by its own."""
    for child in module.children():
        if _has_forward(child):
            yield child
        else:
            yield from _parts_with_forward(child)


def _has_forward(module: nn.Module) -> bool:
    return getattr(module.forward, "__func__", None) is not nn.Module.forward


def resolve_units(
    model: nn.Module, units: Sequence[str | nn.Module | type[nn.Module]] | None
) -> list[str]:
    """Module names of the units, in registration order.

    `units` are module names, modules or module classes; None finds repeated blocks.
    """
    if units is None:
        return find_blocks(model)
    names_of = {id(module): name for name, module in model.named_modules()}
    chosen: set[str] = set()
    for unit in units:
        if isinstance(unit, str):
            matches = [unit] if unit in names_of.values() else []
        elif isinstance(unit, type):
            matches = [name for name, module in model.named_modules() if isinstance(module, unit)]
        else:
            matches = [names_of[id(unit)]] if id(unit) in names_of else []
        if not matches:
            raise ValueError(
                f"units: {unit!r} is not in the model; give module names as named_modules() "
                "lists them, modules of the model, or module classes"
            )
        chosen.update(matches)
    ordered = [name for name in names_of.values() if name in chosen]
    for outer in ordered:
        for inner in ordered:
            if inner != outer and (outer == "" or inner.startswith(outer + ".")):
                raise ValueError(
                    f"units: {inner!r} lies inside {outer!r}; units must not be nested, name one "
                    f"of the two"
                )
    for name in ordered:
        module = model.get_submodule(name)
        if not _has_forward(module):
            raise ValueError(
                f"units: {name!r} is a {type(module).__name__}, which has no forward, so at stage "
                "3 it would not be unsharded before its parts run; name the parts"
            )
    return ordered


def build_units(
    model: nn.Module,
    members: Sequence[Member],
    unit_names: Sequence[str],
    *,
    merge: Merge,
    max_flat_bytes: int | None = None,
    device: torch.device | None = None,
) -> list[Unit]:
    """Assign the parameters to units and flat parameters.

    Args:
        members: each parameter once, in registration order.
        unit_names: as `resolve_units` returns them.
        max_flat_bytes: size in fp32 from which a unit is split; default: `MAX_FLAT_BYTES`. The root
            is split at the default if that is smaller, so that its first gradients are reduced
            early.
        device: of opaque tensors; default: that of the first member.
    """
    modules = dict(model.named_modules())
    home = _units_of_parameters(modules, unit_names)
    belongs: dict[str, list[Member]] = {ROOT: [], **{name: [] for name in unit_names}}
    for member in members:
        homes = home[id(member.parameter)]
        belongs[next(iter(homes)) if len(homes) == 1 else ROOT].append(member)
    limit = MAX_FLAT_BYTES if max_flat_bytes is None else max_flat_bytes
    shared_limit = min(limit, MAX_FLAT_BYTES)
    # The root comes first: it contains the parameters that are used before the first block.
    batches: list[tuple[tuple[str, ...], list[Member]]] = [
        ((name,), inside) for name, inside in belongs.items() if inside
    ]
    if merge == "all":
        batches = _merge_small(batches, shared_limit)
    elif merge == "blocks":
        root = [batch for batch in batches if ROOT in batch[0]]
        blocks = [batch for batch in batches if ROOT not in batch[0]]
        batches = root + _merge_small(blocks, MERGED_UNIT_BYTES)
    if device is None:
        device = members[0].parameter.device
    units = []
    for index, (names, inside) in enumerate(batches):
        name = names[0] if len(names) == 1 else f"{names[0]}..{names[-1]}"
        units.append(
            Unit(
                index=index,
                name=name,
                modules=tuple(
                    module
                    for unit in names
                    for module in _entry_modules(model, modules, unit, inside)
                ),
                flats=tuple(_flats(name, inside, limit if ROOT not in names else shared_limit)),
                resident=ROOT in names,
                opaque=tuple(_opaque(name, inside, device)),
            )
        )
    return units


def _units_of_parameters(
    modules: dict[str, nn.Module], unit_names: Sequence[str]
) -> dict[int, set[str]]:
    """For each parameter and buffer (by id) the units that contain it; several if it is tied."""
    homes: dict[int, set[str]] = {}
    inside: dict[int, set[str]] = {}
    for name in unit_names:
        for module in modules[name].modules():
            inside.setdefault(id(module), set()).add(name)
    for module in modules.values():
        for tensor in _own_tensors(module):
            homes.setdefault(id(tensor), set()).update(inside.get(id(module), {ROOT}))
    return homes


def _own_tensors(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters(recurse=False)
    yield from module.buffers(recurse=False)


def _entry_modules(
    model: nn.Module, modules: dict[str, nn.Module], unit: str, inside: Sequence[Member]
) -> list[nn.Module]:
    """Modules whose forward needs the unit's parameters."""
    if unit != ROOT:
        return [modules[unit]]
    mine = {id(member.parameter) for member in inside}
    others = [module for module in modules.values() if module is not model]
    return [model, *(m for m in others if any(id(own) in mine for own in _own_tensors(m)))]


def _merge_small(
    batches: list[tuple[tuple[str, ...], list[Member]]], limit: int
) -> list[tuple[tuple[str, ...], list[Member]]]:
    numels = [sum(member.numel for member in inside) for _, inside in batches]
    return [
        (
            tuple(name for number in group for name in batches[number][0]),
            [member for number in group for member in batches[number][1]],
        )
        for group in merged(numels, limit)
    ]


def _flats(unit: str, inside: Sequence[Member], limit: int) -> Iterator[FlatParameter]:
    """One flat parameter per dtype and trained or frozen, split at `limit` bytes."""
    groups: dict[tuple[torch.dtype, bool, bool, str], list[Member]] = {}
    for member in inside:
        if not member.memories:
            own = member.name if member.kind else ""
            key = (member.dtype, member.trained, member.is_local, own)
            groups.setdefault(key, []).append(member)
    for (dtype, trained, is_local, _), members in groups.items():
        members.sort(key=lambda member: member.group)
        for numbers in cut([member.numel for member in members], limit):
            part = [members[number] for number in numbers]
            yield (part[0].kind or FlatParameter)(
                unit,
                [(member.name, cast(nn.Parameter, member.parameter)) for member in part],
                dtype=dtype,
                trained=trained,
                groups=[member.group for member in part],
                steps=[member.step for member in part],
                is_local=is_local,
            )


def _opaque(unit: str, inside: Sequence[Member], device: torch.device) -> Iterator[OpaqueBytes]:
    members = [member for member in inside if member.memories]
    if members:
        named = [(member.name, member.parameter) for member in members]
        yield OpaqueBytes(unit, named, [member.memories for member in members], device)


# What a plan says of units.


def check_unit_names(plan: Plan | None, units: Sequence[Unit], blocks: Sequence[str]) -> None:
    """Check that the plan names existing units, of the engine at its stage, and recomputes no root.

    A unit that is only recomputed is named by blocks, as at stage 3, because stages that do not
    shard parameters merge blocks in another way.
    """
    known = [unit.name for unit in units]
    named = plan.units if plan is not None else ()
    for unit in named:
        if unit.recomputed_on:
            blocks_of(unit.name, blocks)
    followed = {u.name for u in named if u.persistent or u.shares or not u.recomputed_on}
    unknown = sorted(followed - set(known))
    if unknown:
        raise ValueError(
            f"the plan names units {unknown} that the model does not have; it has {known}. Make "
            "the plan from a profile of this model, or leave them out: dataclasses.replace(plan, "
            "units=())"
        )


def shares_by_unit(plan: Plan | None) -> Mapping[str, Shares]:
    """The shares of units that have their own, by unit name."""
    units = plan.units if plan is not None else ()
    return {unit.name: unit.shares for unit in units if unit.shares is not None}


def persistent_units(plan: Plan | None, units: Sequence[Unit]) -> frozenset[Unit]:
    """The units that stay unsharded between the passes of a step."""
    named = plan.units if plan is not None else ()
    names = {unit.name for unit in named if unit.persistent}
    return frozenset(unit for unit in units if unit.name in names)


def blocks_of(unit: str, blocks: Sequence[str]) -> tuple[str, ...]:
    """The blocks of a unit: `a`, or `a..b` for consecutive blocks that form one unit."""
    first, _, last = unit.partition("..")
    if first in blocks and (last or first) in blocks:
        return tuple(blocks[blocks.index(first) : blocks.index(last or first) + 1])
    if first == ROOT:
        raise ValueError(
            f"unit {unit!r} cannot be recomputed: it holds what is outside of the repeated blocks; "
            "leave its recomputed_on empty"
        )
    raise ValueError(
        f"unit {unit!r} cannot be recomputed: the model has no such block; it has {list(blocks)}"
    )
