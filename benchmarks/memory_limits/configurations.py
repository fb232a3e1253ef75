"""The engines that are compared, as configurations of `head_to_head`."""

from __future__ import annotations

from head_to_head.engine import Configuration

from memory_limits.clusters import MemoryCluster
from memory_limits.row import PLANNED
from poplar import Plan

STAGE = 3
EVEN = "poplar even"
ENGINES = (EVEN, PLANNED, "FSDP2", "DeepSpeed ZeRO-3")
_PROVIDERS = {PLANNED: "poplar", EVEN: "poplar", "FSDP2": "fsdp2", "DeepSpeed ZeRO-3": "deepspeed"}


def even_plan(cluster: MemoryCluster) -> Plan:
    """One sample and an equal share for every rank."""
    return Plan.even(cluster.size, cluster.size, 1, STAGE)


def configuration_of(engine: str, plan: Plan) -> Configuration:
    """The configuration of one of `ENGINES`; those of others than Poplar use the batches only."""
    return Configuration(
        name=engine,
        provider=_PROVIDERS[engine],
        stage=STAGE,
        policy="exact" if engine == PLANNED else "even",
        plan=plan,
        ranks=tuple(range(plan.world_size)),
    )
