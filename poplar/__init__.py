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
    from poplar.cli.workload import Workload
    from poplar.data.sampler import HeteroBatchSampler
    from poplar.data.stream import split_stream
    from poplar.data.token_weights import tokens
    from poplar.optimizer import HeteroZeroOptimizer
    from poplar.planner.explain import Explanation, explain
    from poplar.planner.memory_shortfall import DoesNotFit, NoPlanFits
    from poplar.planner.prediction import Prediction, predict
    from poplar.planner.search import search
    from poplar.programmes.training.distribute import distribute
    from poplar.programmes.training.training import DistributedTraining
    from poplar.simulator.step_simulation import simulate
    from poplar.simulator.timeline import Timeline
    from poplar.tuning.autotune import Tuned, autotune, tune
    from poplar.tuning.profile_cluster import profile_cluster
    from poplar.tuning.verification import Verification, verify
    from poplar.values.errors import (
        CollectiveTimeout,
        DamagedCheckpoint,
        OutOfOrder,
        PoplarError,
        RankFailed,
    )
    from poplar.values.plan import Plan, UnitPlan
    from poplar.values.profile import (
        BatchPoint,
        ClusterProfile,
        DeviceProfile,
        ModelProfile,
        NetworkProfile,
    )
    from poplar.zero.grad_scaler import GradScaler
    from poplar.zero.step_result import StepResult
    from poplar.zero.weights.materialization import parameters_on_meta

__version__ = "0.1.0"

_HOME = {
    "BatchPoint": "poplar.values.profile",
    "CheckpointManager": "poplar.checkpoint.manager",
    "ClusterProfile": "poplar.values.profile",
    "CollectiveTimeout": "poplar.values.errors",
    "DamagedCheckpoint": "poplar.values.errors",
    "DeviceProfile": "poplar.values.profile",
    "DistributedTraining": "poplar.programmes.training.training",
    "DoesNotFit": "poplar.planner.memory_shortfall",
    "Explanation": "poplar.planner.explain",
    "GradScaler": "poplar.zero.grad_scaler",
    "HeteroBatchSampler": "poplar.data.sampler",
    "HeteroZeroOptimizer": "poplar.optimizer",
    "ModelProfile": "poplar.values.profile",
    "NetworkProfile": "poplar.values.profile",
    "NoPlanFits": "poplar.planner.memory_shortfall",
    "OutOfOrder": "poplar.values.errors",
    "Plan": "poplar.values.plan",
    "PoplarError": "poplar.values.errors",
    "Prediction": "poplar.planner.prediction",
    "RankFailed": "poplar.values.errors",
    "StepResult": "poplar.zero.step_result",
    "Timeline": "poplar.simulator.timeline",
    "Tuned": "poplar.tuning.autotune",
    "UnitPlan": "poplar.values.plan",
    "Verification": "poplar.tuning.verification",
    "Workload": "poplar.cli.workload",
    "autotune": "poplar.tuning.autotune",
    "distribute": "poplar.programmes.training.distribute",
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
    "BatchPoint",
    "CheckpointManager",
    "ClusterProfile",
    "CollectiveTimeout",
    "DamagedCheckpoint",
    "DeviceProfile",
    "DistributedTraining",
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
    "Workload",
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
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'poplar' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
