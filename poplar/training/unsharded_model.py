"""The model with all its values on every rank: for a while (`full_parameters`), or without the
engine (`release`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

from torch import Tensor, nn

from poplar.training.trained_model import TrainedModel
from poplar.zero.agreement import run_on_all_ranks
from poplar.zero.unit import Unit
from poplar.zero.weights.materialization import check_unused, move_to_meta


@contextmanager
def full_parameters(
    training: TrainedModel, writeback: bool, modules: Sequence[str | nn.Module] | None
) -> Iterator[None]:
    """`HeteroZeroOptimizer.full_parameters`, which documents it."""
    ranks, calls, name = training.ranks, training.calls, "full_parameters()"
    model = training.model
    if not ranks.is_active:
        names = calls.call(name, str).splitlines()
        ranks.share_values(model, names)
        with training.left_out_model.current(names):
            yield
        return
    engine = training.engine
    strategy = engine.strategy
    is_local = not strategy.shards_parameters and not strategy.sends_differences
    communicates = bool(modules is not None or ranks.left_out or not is_local)

    def running(*, begins: bool) -> AbstractContextManager[None]:
        return calls.running(name, begins=begins) if communicates else nullcontext()

    with ExitStack() as stack:
        with running(begins=True):
            training.step.nonfinite.raise_if_found()
            units = engine.values.agreed_units(modules) if communicates else engine.units
            training.send_masters()
            stack.enter_context(engine.values.unsharded(writeback=writeback, units=units))
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


def release(training: TrainedModel, values: bool) -> None:
    """`HeteroZeroOptimizer.release`, which documents it. Collective."""
    engine, model = training.engine, training.model

    def check() -> None:
        engine.reject_open_step("release()")
        if not values:
            if any(unit.opaque for unit in engine.units):
                raise RuntimeError(
                    "release(values=False) would lose quantised parameters, which nothing "
                    "initializes again; use release()"
                )
            check_unused(model.parameters())

    run_on_all_ranks(engine.control, check, doing="release()")
    if not values:
        training.detach()
        move_to_meta(list(model.parameters()))
        return
    training.send_masters()
    parameters = [p for flat in engine.flats for p in flat.parameters]
    opaque = [opaque for unit in engine.units for opaque in unit.opaque]

    def copy_all() -> tuple[list[Tensor], list[Tensor]]:
        copies = [parameter.detach().clone() for parameter in parameters]
        return copies, [each.values.clone() for each in opaque]

    with engine.values.unsharded(writeback=False):
        copies, frozen = run_on_all_ranks(engine.control, copy_all, doing="release()")
    training.detach()
    for parameter, copy in zip(parameters, copies, strict=True):
        parameter.grad = None
        parameter.data = copy
    for each, bytes_of_all in zip(opaque, frozen, strict=True):
        each.use_values(bytes_of_all, lasting=True)
        each.attach_parameters()
