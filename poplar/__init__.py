"""Poplar: one PyTorch model on unequal GPUs at the sum of their speeds, with the exact gradient.

The names below are the public API. Each is loaded when it is first used, so that `import poplar` is
quick and planning works without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from poplar.checkpoint.load import load_checkpoint
    from poplar.checkpoint.manager import CheckpointManager
    from poplar.checkpoint.save import save_checkpoint
    from poplar.data.sampler import HeteroBatchSampler
    from poplar.data.stream import split_stream
    from poplar.data.token_weights import tokens
    from poplar.optimizer import HeteroZeroOptimizer
    from poplar.planner.explain import explain
    from poplar.planner.memory_shortfall import DoesNotFit, NoPlanFits
    from poplar.planner.prediction import predict
    from poplar.planner.search import search
    from poplar.programmes.run.distribute import distribute
    from poplar.simulator.step_simulation import simulate
    from poplar.tuning.autotune import autotune, tune
    from poplar.tuning.profile_cluster import profile_cluster
    from poplar.tuning.verification import verify
    from poplar.values.errors import (
        CollectiveTimeout,
        PoplarError,
        RankFailed,
    )
    from poplar.values.plan import Plan, UnitPlan
    from poplar.values.profile import (
        ClusterProfile,
    )
    from poplar.zero.grad_scaler import GradScaler
    from poplar.zero.steps.step_result import StepResult
    from poplar.zero.weights.materialization import parameters_on_meta

__version__ = "0.1.0"

_HOME = {
    "CheckpointManager": "poplar.checkpoint.manager",
    "ClusterProfile": "poplar.values.profile",
    "CollectiveTimeout": "poplar.values.errors",
    "DoesNotFit": "poplar.planner.memory_shortfall",
    "GradScaler": "poplar.zero.grad_scaler",
    "HeteroBatchSampler": "poplar.data.sampler",
    "HeteroZeroOptimizer": "poplar.optimizer",
    "NoPlanFits": "poplar.planner.memory_shortfall",
    "Plan": "poplar.values.plan",
    "PoplarError": "poplar.values.errors",
    "RankFailed": "poplar.values.errors",
    "StepResult": "poplar.zero.steps.step_result",
    "UnitPlan": "poplar.values.plan",
    "autotune": "poplar.tuning.autotune",
    "distribute": "poplar.programmes.run.distribute",
    "explain": "poplar.planner.explain",
    "load_checkpoint": "poplar.checkpoint.load",
    "parameters_on_meta": "poplar.zero.weights.materialization",
    "predict": "poplar.planner.prediction",
    "profile_cluster": "poplar.tuning.profile_cluster",
    "save_checkpoint": "poplar.checkpoint.save",
    "search": "poplar.planner.search",
    "simulate": "poplar.simulator.step_simulation",
    "split_stream": "poplar.data.stream",
    "tokens": "poplar.data.token_weights",
    "tune": "poplar.tuning.autotune",
    "verify": "poplar.tuning.verification",
}

__all__ = [
    "CheckpointManager",
    "ClusterProfile",
    "CollectiveTimeout",
    "DoesNotFit",
    "GradScaler",
    "HeteroBatchSampler",
    "HeteroZeroOptimizer",
    "NoPlanFits",
    "Plan",
    "PoplarError",
    "RankFailed",
    "StepResult",
    "UnitPlan",
    "autotune",
    "distribute",
    "explain",
    "load_checkpoint",
    "parameters_on_meta",
    "predict",
    "profile_cluster",
    "save_checkpoint",
    "search",
    "simulate",
    "split_stream",
    "tokens",
    "tune",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name == "_core":
        try:
            return import_module("poplar._core")
        except ModuleNotFoundError:
            raise ImportError(
                f"{__path__[0]} has no compiled modules: it is the source, not an installed "
                "Poplar. Start the program in another folder, or install with `pip install -e .`"
            ) from None
    if name not in _HOME:
        raise AttributeError(f"module 'poplar' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
