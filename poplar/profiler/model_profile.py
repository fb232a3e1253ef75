"""Describes the trained model by the units and flat buffers that the engine builds for it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from poplar.profiler.memory_budget import MemoryBudget, PassMemory
from poplar.profiler.session import Session
from poplar.profiler.unit_hooks import TrainedUnit
from poplar.values.profile import LinearLayer, ModelProfile
from poplar.zero import setup
from poplar.zero.factors.layers import factorable_layers
from poplar.zero.opaque_parameter import is_opaque_buffer
from poplar.zero.unit import Unit


def model_profile(session: Session, state_bytes: float) -> ModelProfile:
    """The model; `state_bytes` is the optimizer state per element, without an fp32 master."""
    units = all_units(session)
    bytes_each = session.compute_dtype.itemsize
    return ModelProfile(
        unit_numels=tuple(sum(_buffers(unit)) for unit in units),
        unit_names=tuple(unit.name for unit in units),
        unit_frozen_bytes=tuple(
            unit.unsharded_bytes - sum(flat.numel * flat.dtype.itemsize for flat in unit.trained)
            for unit in units
        ),
        resident_units=tuple(number for number, unit in enumerate(units) if unit.resident),
        unit_buffers=tuple(map(_buffers, units)),
        merged_buffers=tuple(map(_buffers, all_units(session, shards_parameters=False))),
        param_bytes=float(bytes_each),
        grad_bytes=float(bytes_each),
        optimizer_bytes=state_bytes + (0.0 if bytes_each == 4 else 4.0),
        wire_bytes=float(session.job.reduce_dtype.itemsize),
        frozen_bytes=_replicated_bytes(session),
    )


def linear_layers(session: Session, rows: Mapping[str, float]) -> tuple[LinearLayer, ...]:
    """The layers that can be factored.

    Args:
        rows: for a sample of each layer, by module name; layers without any do not count.
    """
    request = session.setup
    unit_of = {
        id(parameter): number
        for number, unit in enumerate(all_units(session))
        for flat in unit.trained
        for parameter in flat.parameters
    }
    layers = factorable_layers(request.model, set(unit_of))
    return tuple(
        LinearLayer(
            name=name,
            unit=unit_of[id(layer.weight)],
            outputs=layer.out_features,
            inputs=layer.in_features,
            rows_per_sample=rows[name],
        )
        for name, layer in layers.items()
        if rows.get(name)
    )


def flat_numels(session: Session) -> list[int]:
    """Elements of each flat buffer that is reduced at stages that replicate parameters."""
    units = all_units(session, shards_parameters=False)
    return [numel for unit in units for numel in _buffers(unit)]


def _buffers(unit: Unit) -> tuple[int, ...]:
    return tuple(flat.numel for flat in unit.trained)


def trained_units(session: Session) -> list[TrainedUnit]:
    """The parameters of the units of `model_profile`."""
    return [
        TrainedUnit(
            [p for flat in unit.trained for p in flat.parameters],
            unit.resident,
            () if unit.resident else unit.modules,
        )
        for unit in all_units(session)
    ]


def all_units(session: Session, *, shards_parameters: bool = True) -> list[Unit]:
    """The units of the engine."""
    return setup.units_of(session.setup, session.control, shards_parameters=shards_parameters)


def pass_memory(session: Session, budgets: Sequence[MemoryBudget]) -> PassMemory:
    """The limits of all ranks, from their budgets."""
    units, buffers = all_units(session), _replicated_bytes(session)
    opaque = set(map(id, session.setup.opaque_tensors().values()))
    plain = [p for p in session.job.model.parameters() if id(p) not in opaque]
    originals = 0 if session.cast_to is None else sum(p.nbytes for p in plain)
    flats = [flat for unit in units for flat in unit.flats]
    values = sum(unit.unsharded_bytes for unit in units)
    masters = sum(4 * flat.numel for flat in flats if flat.trained and flat.dtype.itemsize != 4)
    staying = _unsharded_at_once(units) + buffers
    # Plain passes in another dtype keep the original values, to restore them.
    whole = values + buffers + originals
    return PassMemory(
        parameters=values + masters,
        unsharded_units=staying,
        budgets=tuple(budget.activation_bytes for budget in budgets),
        unsharded=tuple(
            budget.activation_bytes - whole if session.model_is_on_device else -math.inf
            for budget in budgets
        ),
    )


def _replicated_bytes(session: Session) -> int:
    """Bytes of the buffers that no stage shards."""
    return sum(b.nbytes for b in session.job.model.buffers() if not is_opaque_buffer(b))


def _unsharded_at_once(units: Sequence[Unit]) -> int:
    """Bytes of the root and of the two largest other units: the current one and the next."""
    staying = sum(unit.unsharded_bytes for unit in units if unit.resident)
    others = sorted(unit.unsharded_bytes for unit in units if not unit.resident)
    return staying + sum(others[-2:])
