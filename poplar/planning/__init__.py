"""What was measured and what was decided, as values, and the arithmetic that leads from one to the
other: the cost of a plan, the search for the best one, shard layouts and the moves between them.

Knows no processes, no tensors and no clock: everything here runs in a test in milliseconds, without
torch.
"""

from __future__ import annotations

from poplar.planning.cluster import (
    BatchPoint,
    ClusterProfile,
    DeviceProfile,
    ModelProfile,
    NetworkProfile,
)
from poplar.planning.cost_model import DoesNotFit, Prediction, memory_needed, predict
from poplar.planning.explain import explain
from poplar.planning.explanation import Explanation
from poplar.planning.layout import ALIGNMENT, Layout, Transfer, transfers
from poplar.planning.plan import STRATEGIES, Plan, UnitPlan
from poplar.planning.search import alternatives, search
from poplar.planning.shortage import NoPlanFits
from poplar.planning.simulator import simulate
from poplar.planning.timeline import Timeline

__all__ = [
    "ALIGNMENT",
    "STRATEGIES",
    "BatchPoint",
    "ClusterProfile",
    "DeviceProfile",
    "DoesNotFit",
    "Explanation",
    "Layout",
    "ModelProfile",
    "NetworkProfile",
    "NoPlanFits",
    "Plan",
    "Prediction",
    "Timeline",
    "Transfer",
    "UnitPlan",
    "alternatives",
    "explain",
    "memory_needed",
    "predict",
    "search",
    "simulate",
    "transfers",
]
