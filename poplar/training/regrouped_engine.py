"""Another group of ranks for the state of an engine: a change of the ranks that are left out.

No state moves here: every rank keeps what it has, so ranks that leave must have nothing that others
need, and ranks that join get what all ranks have, and no share. `moved_engine` moves shares.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from poplar.checkpoint.moved_state import gather_schemas
from poplar.comm import Communicator, Control
from poplar.comm.shard_layout import Layout
from poplar.training.active_ranks import share_tensors
from poplar.training.moved_engine import DOING, EngineMove
from poplar.zero.absent_parameter import mark_present
from poplar.zero.engine import Engine
from poplar.zero.factors.parameter import FactoredParameter
from poplar.zero.flat_parameter import FlatParameter
from poplar.zero.setup import (
    Request,
    assemble_engine,
    compare_kernels,
    host_copies,
    new_update,
    strategy_of,
    unmanaged_tensors,
)
from poplar.zero.unit import Unit
from poplar.zero.update import ParameterRun, ShardedUpdate
from poplar.zero.weights.materialization import move_to_meta


class _Flat(NamedTuple):
    """What a flat parameter is made of."""

    names: tuple[str, ...]
    dtype: torch.dtype
    trained: bool
    groups: tuple[int, ...]
    steps: list[int | None]
    sizes: tuple[int, ...]
    """Elements that the ranks own."""


class _Unit(NamedTuple):
    """What a unit is made of."""

    number: int
    name: str
    modules: list[str]
    resident: bool
    flats: list[_Flat]


def regroup_engine(
    old: Engine | None,
    update: ShardedUpdate | None,
    request: Request,
    comm: Communicator,
    control: Control,
    check_step: Callable[[], None],
    *,
    joining: Sequence[int],
    sender: int,
) -> tuple[Engine, ShardedUpdate]:
    """The engine of another group of ranks, with the state of `old`, and its update. Collective.

    Args:
        old: as for `replace_engine`; None, as `update`, on a rank that joins.
        request: with the stage of `old`.
        comm, control: of the new group.
        joining: ranks of the new group that join.
        sender: a rank of the new group that does not.
    """
    own = None
    if old is not None:
        own = _described(old), old.comm.group.ranks, old.strategy.steps
    described = control.exchange_objects(own, what=DOING)[sender]
    assert described is not None
    structure, ranks, steps = described
    strategy = strategy_of(request, comm, steps=steps)
    with request.values.real_tensors(request.device):
        if old is None and request.values.on_meta and not strategy.shards_parameters:
            for parameter in request.model.parameters():
                dtype = request.cast_to or parameter.dtype
                parameter.data = torch.empty(parameter.shape, dtype=dtype, device=request.device)
        units = _units_like(structure, request, control)
        flats = [flat for unit in units for flat in unit.flats]
        if strategy.replicates_state:
            layouts = strategy.layouts(dict.fromkeys(flats, ()))
        else:
            old_flats = (flat for unit in structure for flat in unit.flats)
            sizes = [dict(zip(ranks, flat.sizes, strict=True)) for flat in old_flats]
            layouts = {
                flat: Layout((0, *accumulate(own.get(rank, 0) for rank in comm.group.ranks)))
                for flat, own in zip(flats, sizes, strict=True)
            }
        if update is None:
            update = new_update(request, strategy, [])
        for flat, source in zip(flats, () if old is None else old.flats, strict=old is not None):
            flat.keep_on_host(source.is_hosted)
            if source.trained:
                update.take_written_values(source)
        schemas = gather_schemas(control, update)
        move = EngineMove(old, update, strategy, schemas, layouts, stays=True)
        for unit in units:
            move.take(unit, request.plan)
        move.finish()
    update.copy_by(host_copies(strategy))
    if joining:
        tensors = unmanaged_tensors(request, units)
        if not strategy.shards_parameters:
            tensors |= {f"{n} {flat.name}": flat.values for n, flat in enumerate(flats)}
        members = [sender, *joining]
        others = [rank for rank in range(comm.group.size) if rank not in members]
        group = comm.group.split([members, others] if others else [members])
        if comm.group.rank in members and tensors:
            share_tensors(group, tensors, DOING)
    _take_runs(update, flats, control, sender, joins=old is None)
    engine = assemble_engine(request, units, strategy, control, check_step)
    compare_kernels(engine, update, DOING)
    return engine, update


def _take_runs(
    update: ShardedUpdate,
    flats: Sequence[FlatParameter],
    control: Control,
    sender: int,
    joins: bool,
) -> None:
    """Let a rank that joins divide its flat parameters into the runs of the others. Collective."""
    own = [(flats.index(run.flat), run.first, run.last) for run in update.runs]
    found = control.exchange_objects(own, what=DOING)[sender]
    for at, flat in enumerate(flats if joins else ()):
        places = [(first, last) for number, first, last in found if number == at]
        runs = [ParameterRun(flat, flat.groups[first], first, last) for first, last in places]
        for run in runs:
            run.bind()
        if runs:
            update.replace_runs(flat, runs, lambda _: None)


def leave_engine(engine: Engine, *, on_meta: bool) -> None:
    """Give the parameters of a rank that leaves memory of their own. Local.

    Where they are sharded they become NaN. `on_meta`: they lose their values and go to `meta`,
    where the model was built.
    """
    for flat in engine.flats:
        engine.strategy.wait_for_readers(flat)
        for parameter in flat.parameters:
            mark_present(parameter)
            parameter.grad = None
            if not on_meta:
                parameter.data = parameter.data.clone(memory_format=torch.contiguous_format)
        flat.free()
    if on_meta:
        move_to_meta(list(engine.model.parameters()))


def _described(engine: Engine) -> list[_Unit]:
    names = {id(module): name for name, module in engine.model.named_modules()}

    def flat_of(flat: FlatParameter) -> _Flat:
        steps = [
            step if alone else None for step, alone in zip(flat.steps, flat.separate, strict=True)
        ]
        return _Flat(
            flat.names, flat.dtype, flat.trained, flat.groups, steps, tuple(flat.layout.sizes)
        )

    return [
        _Unit(
            unit.index,
            unit.name,
            [names[id(module)] for module in unit.modules],
            unit.resident,
            list(map(flat_of, unit.flats)),
        )
        for unit in engine.units
    ]


def _units_like(structure: Sequence[_Unit], request: Request, control: Control) -> list[Unit]:
    """Units of the model that are made of the same as others, without values."""
    modules = dict(request.model.named_modules())
    parameters = dict(request.model.named_parameters())
    layers = {id(layer.weight): layer for layer in request.factored.values()}

    def made(unit: str, flat: _Flat) -> FlatParameter:
        inside = [(name, parameters[name]) for name in flat.names]
        given: dict[str, Any] = flat._asdict()
        del given["names"], given["sizes"]
        layer = layers.get(id(inside[0][1]))
        if layer is None:
            return FlatParameter(unit, inside, **given)
        return FactoredParameter(unit, inside, layer=layer, control=control, **given)

    return [
        Unit(
            index=unit.number,
            name=unit.name,
            modules=tuple(modules[name] for name in unit.modules),
            flats=tuple(made(unit.name, flat) for flat in unit.flats),
            resident=unit.resident,
        )
        for unit in structure
    ]
