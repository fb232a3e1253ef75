"""What was decided, as values: plans, shard layouts and the arithmetic between them.

Knows no processes, no tensors and no clock: everything here runs in a test in milliseconds, without
torch.
"""

from __future__ import annotations

from poplar.planning.layout import ALIGNMENT, Layout, Transfer, transfers
from poplar.planning.plan import STRATEGIES, Plan, UnitPlan

__all__ = ["ALIGNMENT", "STRATEGIES", "Layout", "Plan", "Transfer", "UnitPlan", "transfers"]
