"""`exact_values`: what integrations read a state dict in, so that what they save is exact."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from poplar.optimizer import HeteroZeroOptimizer
from poplar.zero.trained_buffers import take_trained_buffers


def exact_values(optimizer: HeteroZeroOptimizer) -> AbstractContextManager[None]:
    """A context with exact values on all ranks, see [Note: differences]. Collective.

    Sharded parameters are exact, and stay sharded: maybe no rank could hold them. The first rank,
    which saves, may have no samples, so it takes the trained buffers.
    """
    engine = optimizer._training_parts().engine
    take_trained_buffers(engine, doing="saving the model")
    if engine.strategy.shards_parameters:
        return nullcontext()
    return optimizer.full_parameters()
