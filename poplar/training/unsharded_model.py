"""The model with all its values on every rank: for a while (`full_parameters`), or without the
engine (`release`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor, nn

from poplar.system.storage import with_own_storage
from poplar.training.trained_model import TrainedModel
from poplar.values.errors import agreed
from poplar.zero.agreement import run_on_all_ranks
from poplar.zero.flat_parameter import FlatParameter
from poplar.zero.opaque_parameter import OpaqueBytes
from poplar.zero.setup import cast_parameters, undo_cast, unmanaged_tensors
from poplar.zero.unit import Unit
from poplar.zero.weights.materialization import check_unused, move_to_meta


@contextmanager
def full_parameters(
    training: TrainedModel,
    writeback: bool,
    modules: Sequence[str | nn.Module] | None,
    masters: bool,
) -> Iterator[None]:
    """`HeteroZeroOptimizer.full_parameters`, which documents it."""
    ranks, calls, name = training.ranks, training.calls, "full_parameters()"
    model = training.model
    if not ranks.is_active:
        names = calls.call(name, str).splitlines()
        with _in_exact_dtypes(training, names) if masters else nullcontext():
            ranks.share_values(model, names)
            with training.left_out_model.current(names):
                yield
        return
    engine = training.engine
    strategy = engine.strategy
    is_local = not strategy.shards_parameters and not strategy.sends_differences
    communicates = bool(modules is not None or ranks.left_out or masters or not is_local)

    def running(*, begins: bool) -> AbstractContextManager[None]:
        return calls.running(name, begins=begins) if communicates else nullcontext()

    with ExitStack() as stack:
        with running(begins=True):
            training.step.nonfinite.raise_if_found()
            units = engine.values.agreed_units(modules) if communicates else engine.units
            if masters and engine.values.present:  # what is written there is not in the masters yet
                raise agreed(RuntimeError(_INSIDE))
            training.send_masters()
            stack.enter_context(engine.values.unsharded(writeback=writeback, units=units))
            if masters:
                stack.enter_context(_exact_values(training, units, writeback=writeback))
            if ranks.left_out:
                names = _readable_names(model, units, whole=modules is None)
                calls.announce(name, "\n".join(names))
                ranks.share_values(model, names)
        try:
            yield
        finally:
            with running(begins=False):
                stack.close()
                for flat in (flat for unit in units for flat in unit.trained if writeback):
                    training.update.refresh(flat)


def _readable_names(model: nn.Module, units: Sequence[Unit], *, whole: bool) -> list[str]:
    """Names of the parameters of units and, of the whole model, of all others and buffers."""
    if not whole:
        return [name for unit in units for flat in unit.flats for name in flat.names]
    named = (*model.named_parameters(), *model.named_buffers())
    return [name for name, tensor in named if tensor.numel()]


@contextmanager
def _in_exact_dtypes(training: TrainedModel, names: Sequence[str]) -> Iterator[None]:
    """A context in which these parameters can get exact values, on a rank that is left out."""
    known, request = dict(training.model.named_parameters()), training.request
    parameters = [known[name] for name in names if name in known]
    try:
        for parameter in parameters:
            parameter.data = parameter.data.to(request.exact_dtype(parameter))
        yield
    finally:
        cast_parameters(request, parameters)


@contextmanager
def _exact_values(
    training: TrainedModel, units: Sequence[Unit], *, writeback: bool
) -> Iterator[None]:
    """A context in which parameters have exact values, in their `Request.exact_dtype`.

    These units are unsharded. Collective at its begin.
    """
    engine, request = training.engine, training.request
    inside = {flat for unit in units for flat in unit.flats}
    flats = [flat for flat in engine.flats if flat.has_masters and flat in inside]
    not_cast = {p for f in engine.flats if f.has_masters or f not in inside for p in f.parameters}

    def allocate() -> tuple[dict[nn.Parameter, Tensor], list[Tensor]]:
        training.update.adopt_replaced_data(engine.flats)
        cast = {
            parameter: parameter.data.to(dtype)
            for parameter, dtype in request.dtypes.items()
            if parameter not in not_cast and parameter.dtype != dtype
        }
        return cast, [
            torch.empty(flat.numel, dtype=torch.float32, device=flat.device) for flat in flats
        ]

    with torch.inference_mode(False):
        exact, memory = run_on_all_ranks(engine.control, allocate, doing="full_parameters()")
    for flat, whole in zip(flats, memory, strict=True):
        _gather_masters(training, flat, whole)
        for parameter, values in zip(flat.parameters, flat.parts(whole), strict=True):
            exact[parameter] = with_own_storage(values)
    given = {parameter: parameter.data for parameter in exact}
    with engine.values.showing_masters():
        for parameter, values in exact.items():
            parameter.data = values
        try:
            yield
        finally:
            written = {parameter: parameter.data for parameter in exact}
            for parameter, values in given.items():
                parameter.data = values
            if writeback:
                for parameter, values in written.items():
                    exact[parameter].copy_(values)
                    given[parameter].copy_(values)
                for flat, whole in zip(flats, memory, strict=True):
                    flat.master.copy_(whole[slice(*flat.owned)])


def _gather_masters(training: TrainedModel, flat: FlatParameter, whole: Tensor) -> None:
    """Copy all masters of a flat parameter, written values included. Collective."""
    engine = training.engine
    training.update.take_written_values(flat)
    whole[slice(*flat.owned)].copy_(flat.master)
    if not (engine.strategy.replicates_state or flat.is_local):
        engine.comm.all_gather(whole, flat.layout, what=f"the masters of {flat.name}").wait()


@torch.inference_mode(False)  # else the parameters could never be trained again
def release(training: TrainedModel, values: bool) -> None:
    """`HeteroZeroOptimizer.release`, which documents it. Collective over all ranks."""
    model, request, ranks = training.model, training.request, training.ranks
    lasting = _LastingValues({}, [])
    if ranks.is_active:
        lasting = _prepare_release(training, values)
    if ranks.left_out:
        training.calls.let_all_run(_RELEASE if ranks.is_active else "")

        def prepare() -> _LastingValues:
            return lasting if ranks.is_active else _memory_of_left_out(training, values)

        lasting = run_on_all_ranks(ranks.whole_control, prepare, doing=_RELEASE)
    training.detach()
    if not values:
        move_to_meta(list(model.parameters()))
        undo_cast(request)
        return
    with request.values.real_tensors(request.device):
        for parameter, copy in lasting.of_parameters.items():
            parameter.grad = None
            parameter.data = copy
    for each, bytes_of_all in lasting.of_opaque:
        each.use_values(bytes_of_all, lasting=True)
        each.attach_parameters()
    undo_cast(request)
    ranks.share_tensors(unmanaged_tensors(request, ()), _RELEASE)


class _LastingValues(NamedTuple):
    """What the model has after `release`, in memory of its own."""

    of_parameters: dict[nn.Parameter, Tensor]
    of_opaque: list[tuple[OpaqueBytes, Tensor]]


def _prepare_release(training: TrainedModel, values: bool) -> _LastingValues:
    """Check that the engine can end, and copy the values that it has. Collective."""
    engine, model, request = training.engine, training.model, training.request

    def check() -> None:
        engine.reject_open_step(_RELEASE)
        if engine.values.present:
            raise RuntimeError("release() inside full_parameters(); leave that context first")
        if not values:
            if any(unit.opaque for unit in engine.units):
                raise RuntimeError(
                    "release(values=False) would lose quantised parameters, which nothing "
                    "initializes again; use release()"
                )
            check_unused(model.parameters())

    run_on_all_ranks(engine.control, check, doing=_RELEASE)
    if not values:
        return _LastingValues({}, [])
    with_masters = {flat for flat in engine.flats if flat.has_masters}
    others = [u for u in engine.units if u.opaque or not with_masters.issuperset(u.flats)]
    opaque = [opaque for unit in engine.units for opaque in unit.opaque]

    def allocate() -> tuple[_LastingValues, Tensor]:
        copies = {
            p: torch.empty(p.shape, dtype=request.dtypes[p], device=flat.device)
            for flat in engine.flats
            for p in flat.parameters
        }
        numel = max((flat.numel for flat in with_masters), default=0)
        whole = torch.empty(numel, dtype=torch.float32, device=request.device)
        return _LastingValues(copies, [(each, each.values.clone()) for each in opaque]), whole

    with torch.no_grad(), engine.values.unsharded(writeback=False, units=others):
        lasting, whole = run_on_all_ranks(engine.control, allocate, doing=_RELEASE)
        for flat in engine.flats:
            sources: list[Tensor] = list(flat.parameters)
            if flat in with_masters:
                _gather_masters(training, flat, whole[: flat.numel])
                replaced = [] if flat.is_detached else flat.replaced()
                parts = enumerate(flat.parts(whole))
                sources = [sources[at] if at in replaced else part for at, part in parts]
            for parameter, source in zip(flat.parameters, sources, strict=True):
                lasting.of_parameters[parameter].copy_(source)
    return lasting


def _memory_of_left_out(training: TrainedModel, values: bool) -> _LastingValues:
    """Memory for the values of the others, on a rank that is left out. Local."""
    request = training.request
    if not values:
        check_unused(training.model.parameters())
        return _LastingValues({}, [])
    memory = {
        parameter: torch.empty_like(parameter, dtype=dtype, device=request.device)
        for parameter, dtype in request.dtypes.items()
        if parameter.is_meta or parameter.dtype != dtype
    }
    return _LastingValues(memory, [])


_INSIDE = "full_parameters(masters=True) inside full_parameters(); leave that context first"
_RELEASE = "release()"
