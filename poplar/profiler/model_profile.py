"""Describes the trained model by the units and flat buffers that the engine builds for it."""

from __future__ import annotations

from poplar.profile import ModelProfile
from poplar.profiler.session import Session
from poplar.zero import setup
from poplar.zero.unit import Member, Unit, build_units


def model_profile(session: Session, state_bytes: float) -> ModelProfile:
    """The model; `state_bytes` is the optimizer state per element, without an fp32 master."""
    units = _units(session, shards_parameters=True)
    bytes_each = session.compute_dtype.itemsize
    largest = max(flat_numels(session))
    largest_sharded = max(flat.numel for unit in units for flat in unit.trained)
    buffers = session.request.model.buffers()
    return ModelProfile(
        unit_numels=tuple(sum(flat.numel for flat in unit.trained) for unit in units),
        unit_names=tuple(unit.name for unit in units),
        unit_frozen_numels=tuple(
            sum(flat.numel for flat in unit.flats if not flat.trained) for unit in units
        ),
        resident_units=tuple(number for number, unit in enumerate(units) if unit.resident),
        largest_flat_numels=(largest, largest, largest, largest_sharded),
        param_bytes=float(bytes_each),
        grad_bytes=float(bytes_each),
        optimizer_bytes=state_bytes + (0.0 if bytes_each == 4 else 4.0),
        wire_bytes=float(session.request.reduce_dtype.itemsize),
        frozen_bytes=sum(tensor.numel() * tensor.element_size() for tensor in buffers),
    )


def flat_numels(session: Session) -> list[int]:
    """Elements of each flat buffer that is reduced at stages that replicate parameters."""
    units = _units(session, shards_parameters=False)
    return [flat.numel for unit in units for flat in unit.trained]


def _units(session: Session, *, shards_parameters: bool) -> list[Unit]:
    """The units with trained parameters. Frozen parameters are members only if they are sharded."""
    request = session.setup
    members = []
    for name, parameter in request.model.named_parameters():
        group = request.group_of.get(id(parameter), -1)
        if shards_parameters or group >= 0:
            members.append(Member(name, parameter, group, group >= 0, parameter.dtype))
    merge = setup.merge_policy(request, shards_parameters=shards_parameters)
    units = build_units(
        request.model,
        members,
        request.unit_names,
        merge=merge,
        max_flat_bytes=session.group.max_flat_bytes(session.device),
    )
    return [unit for unit in units if unit.trained]
