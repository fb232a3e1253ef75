"""Another group of ranks for the state of an engine: a change of the ranks that are left out.

No state moves here: every rank keeps what it has, so ranks that leave must have nothing that others
need, and ranks that join get what all ranks have, and no share. `moved_engine` moves shares.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch

from poplar.checkpoint.moved_state import gather_schemas
from poplar.comm import Communicator, Control
from poplar.comm.shard_layout import Layout
from poplar.training.active_ranks import share_tensors
from poplar.training.moved_engine import DOING, EngineMove
from poplar.zero.absent_parameter import mark_present
from poplar.zero.engine import Engine
from poplar.zero.flat_parameter import FlatParameter
from poplar.zero.setup import (
    Request,
    assemble_engine,
    compare_kernels,
    new_update,
    strategy_of,
    units_of,
    unmanaged_tensors,
)
from poplar.zero.update import ParameterRun, ShardedUpdate
from poplar.zero.weights.materialization import move_to_meta


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
        request: with the stage of `old`, and how that is cut into units.
        comm, control: of the new group.
        joining: ranks of the new group that join.
        sender: a rank of the new group that does not.
    """
    own = None
    if old is not None:
        owned = [flat.layout.sizes for flat in old.flats]
        own = owned, old.comm.group.ranks, old.strategy.steps
    described = control.exchange_objects(own, what=DOING)[sender]
    assert described is not None
    owned, ranks, steps = described
    strategy = strategy_of(request, comm, steps=steps)
    with request.values.real_tensors(request.device):
        if old is None and request.values.on_meta and not strategy.shards_parameters:
            for parameter in request.model.parameters():
                dtype = request.computing_dtype(parameter)
                parameter.data = torch.empty(parameter.shape, dtype=dtype, device=request.device)
        units = units_of(request, control, shards_parameters=strategy.shards_parameters)
        flats = [flat for unit in units for flat in unit.flats]
        if strategy.replicates_state:
            layouts = strategy.layouts(dict.fromkeys(flats, ()))
        else:
            by_rank = [dict(zip(ranks, sizes, strict=True)) for sizes in owned]
            layouts = {
                flat: Layout((0, *accumulate(sizes.get(rank, 0) for rank in comm.group.ranks)))
                for flat, sizes in zip(flats, by_rank, strict=True)
            }
        if update is None:
            update = new_update(request, [])
        for flat, source in zip(flats, () if old is None else old.flats, strict=old is not None):
            flat.keep_on_host(source.is_hosted)
            if source.trained:
                update.take_written_values(source)
        schemas = gather_schemas(control, update)
        move = EngineMove(old, update, strategy, schemas, layouts, stays=True)
        for unit in units:
            move.take(unit, request.plan)
        move.finish()
    if joining:
        tensors = unmanaged_tensors(request, units)
        if not strategy.shards_parameters:
            tensors |= {f"{n} {flat.name}": flat.values for n, flat in enumerate(flats)}
        members = [sender, *joining]
        others = [rank for rank in range(comm.group.size) if rank not in members]
        group = comm.group.split([members, others] if others else [members])
        if comm.group.rank in members:
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
