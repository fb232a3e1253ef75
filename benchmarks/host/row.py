"""The schema of `host_overhead.py --output`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Row:
    """One engine in one case. A step has one pass."""

    benchmark: str
    provider: str
    model: str
    divisor: int
    """Of every width of the model."""
    layers: int
    ranks: int
    stage: int
    max_norm: float | None
    """Gradients are clipped to this norm; None: not clipped."""
    calls: dict[str, int]
    """Collective calls of a step by operator of torch.distributed, the control channel included."""
    sent_bytes: dict[str, int] | None
    """Sent by one rank in a step at full size: "gather" and "reduce". None for FSDP2, whose padding
    depends on the widths."""
    modelled_bytes: dict[str, int]
    """What the planner's cost model expects Poplar to send."""
    p20_seconds: float
    """CPU seconds of a step."""
    p50_seconds: float
    p80_seconds: float
    passes_seconds: float
    """CPU seconds (median) of the forward and the backward alone, without an engine."""
    steps: int
    device: str
    versions: str
    commit: str
    day: str

    @property
    def total_calls(self) -> int:
        """Collective calls per pass."""
        return sum(self.calls.values())

    @property
    def case(self) -> str:
        """What both engines ran."""
        return f"{self.model}, {self.ranks} ranks, stage {self.stage}"
