"""Poplar: one PyTorch model on unequal GPUs at the sum of their speeds, with the exact gradient.

The names below are the public face. They are loaded when they are first used, so that `import
poplar` is quick and planning works where torch is not installed.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from poplar.data import HeteroBatchSampler, split_stream
    from poplar.errors import CollectiveTimeout, OutOfOrder, PoplarError, RankFailed
    from poplar.optimizer import HeteroZeroOptimizer, StepResult
    from poplar.planning.plan import Plan, UnitPlan
    from poplar.scaler import GradScaler

__version__ = "0.1.0"

_HOME = {
    "CollectiveTimeout": "poplar.errors",
    "GradScaler": "poplar.scaler",
    "HeteroBatchSampler": "poplar.data",
    "HeteroZeroOptimizer": "poplar.optimizer",
    "OutOfOrder": "poplar.errors",
    "Plan": "poplar.planning.plan",
    "PoplarError": "poplar.errors",
    "RankFailed": "poplar.errors",
    "StepResult": "poplar.optimizer",
    "UnitPlan": "poplar.planning.plan",
    "split_stream": "poplar.data",
}

__all__ = [
    "CollectiveTimeout",
    "GradScaler",
    "HeteroBatchSampler",
    "HeteroZeroOptimizer",
    "OutOfOrder",
    "Plan",
    "PoplarError",
    "RankFailed",
    "StepResult",
    "UnitPlan",
    "split_stream",
]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'poplar' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
