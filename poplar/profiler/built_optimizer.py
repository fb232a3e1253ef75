"""An optimizer that the profiler builds on the user's model, and the model as before afterwards."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from poplar.optimizer import HeteroZeroOptimizer
from poplar.profiler.session import Session
from poplar.values.plan import FIRST_STAGE_SHARDING_PARAMETERS, Plan
from poplar.zero.update import OptimizerFactory
from poplar.zero.weights.materialization import move_to_meta


@contextmanager
def built_optimizer(
    session: Session,
    plan: Plan,
    optimizer_class: OptimizerFactory,
    options: Mapping[str, Any],
) -> Iterator[HeteroZeroOptimizer]:
    """An optimizer under a plan. Collective at both ends; the parameters are restored at the end.

    No rank gathers the parameters for that: the values were kept, on CUDA in host memory. A model
    that was on `meta` is put back there.
    """
    job = session.job
    hooked = plan.stage >= FIRST_STAGE_SHARDING_PARAMETERS
    with session.graphs.run(hooked=hooked), session.parameters_preserved():
        optimizer = HeteroZeroOptimizer(
            job.model,
            optimizer_class,
            plan=plan,
            process_group=session.group.process_group,
            units=job.units,
            compute_dtype=job.compute_dtype,  # type: ignore[arg-type]
            reduce_dtype=job.reduce_dtype,
            timeout=session.group.timeout,
            allow_forward_state=job.allow_forward_state,
            weights=job.weights,
            device=job.device,
            on_out_of_memory="raise",  # a changed plan would be measured as the given one
            **options,
        )
        optimizer.expect_artificial_data()
        try:
            yield optimizer
            session.exchange(None)  # no rank reads the shards of another one any more
            if session.is_on_meta:
                optimizer.release(values=False)
        except BaseException:
            optimizer._detach()
            with suppress(RuntimeError):  # the error may hold a graph: the caller retries
                put_back_on_meta(session)
            raise
        else:
            optimizer._detach()
        del optimizer
        gc.collect()  # Python does not see how much memory a reference cycle holds


def put_back_on_meta(session: Session) -> None:
    """Put the parameters on `meta` if the model was there before; an optimizer must not own them.

    Raises:
        RuntimeError: a graph of autograd still holds one of them.
    """
    if session.is_on_meta:
        move_to_meta([p for p in session.job.model.parameters() if not p.is_meta])
