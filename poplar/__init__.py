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
    from poplar.planning.cluster import (
        BatchPoint,
        ClusterProfile,
        DeviceProfile,
        ModelProfile,
        NetworkProfile,
    )
    from poplar.planning.cost_model import DoesNotFit, Prediction, predict
    from poplar.planning.explain import explain
    from poplar.planning.explanation import Explanation
    from poplar.planning.plan import Plan, UnitPlan
    from poplar.planning.search import search
    from poplar.planning.shortage import NoPlanFits
    from poplar.planning.simulator import simulate
    from poplar.planning.timeline import Timeline
    from poplar.profiler import profile_cluster
    from poplar.scaler import GradScaler
    from poplar.tuner import Tuned, autotune, tune
    from poplar.verification import Verification, verify

__version__ = "0.1.0"

_HOME = {
    "BatchPoint": "poplar.planning.cluster",
    "ClusterProfile": "poplar.planning.cluster",
    "CollectiveTimeout": "poplar.errors",
    "DeviceProfile": "poplar.planning.cluster",
    "DoesNotFit": "poplar.planning.cost_model",
    "Explanation": "poplar.planning.explanation",
    "GradScaler": "poplar.scaler",
    "HeteroBatchSampler": "poplar.data",
    "HeteroZeroOptimizer": "poplar.optimizer",
    "ModelProfile": "poplar.planning.cluster",
    "NetworkProfile": "poplar.planning.cluster",
    "NoPlanFits": "poplar.planning.shortage",
    "OutOfOrder": "poplar.errors",
    "Plan": "poplar.planning.plan",
    "PoplarError": "poplar.errors",
    "Prediction": "poplar.planning.cost_model",
    "RankFailed": "poplar.errors",
    "StepResult": "poplar.optimizer",
    "Timeline": "poplar.planning.timeline",
    "Tuned": "poplar.tuner",
    "UnitPlan": "poplar.planning.plan",
    "Verification": "poplar.verification",
    "autotune": "poplar.tuner",
    "explain": "poplar.planning.explain",
    "predict": "poplar.planning.cost_model",
    "profile_cluster": "poplar.profiler",
    "search": "poplar.planning.search",
    "simulate": "poplar.planning.simulator",
    "split_stream": "poplar.data",
    "tune": "poplar.tuner",
    "verify": "poplar.verification",
}

__all__ = [
    "BatchPoint",
    "ClusterProfile",
    "CollectiveTimeout",
    "DeviceProfile",
    "DoesNotFit",
    "Explanation",
    "GradScaler",
    "HeteroBatchSampler",
    "HeteroZeroOptimizer",
    "ModelProfile",
    "NetworkProfile",
    "NoPlanFits",
    "OutOfOrder",
    "Plan",
    "PoplarError",
    "Prediction",
    "RankFailed",
    "StepResult",
    "Timeline",
    "Tuned",
    "UnitPlan",
    "Verification",
    "autotune",
    "explain",
    "predict",
    "profile_cluster",
    "search",
    "simulate",
    "split_stream",
    "tune",
    "verify",
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
