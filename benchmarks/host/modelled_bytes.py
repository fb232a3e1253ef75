"""What the planner's cost model expects one rank to send in a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from poplar.step.actions import RANK_ACTIONS, Issue
from poplar.step.units import StepUnits
from poplar.values.profile import ModelProfile
from poplar.zero.unit import Unit

PARAM_BYTES, WIRE_BYTES = 2, 4
"""bf16 values, gradients reduced in fp32."""


def bytes_sent(units: Sequence[Unit], stage: int, ranks: int) -> Counter[str]:
    """Bytes of a step with one pass, by kind ("gather", "reduce"), under even shares."""
    model = ModelProfile(
        unit_numels=tuple(sum(flat.numel for flat in unit.trained) for unit in units),
        resident_units=tuple(place for place, unit in enumerate(units) if unit.resident),
        param_bytes=PARAM_BYTES,
        grad_bytes=PARAM_BYTES,
        wire_bytes=WIRE_BYTES,
        optimizer_bytes=12,
    )
    layout = StepUnits.of(model, stage)
    sent: Counter[str] = Counter()
    for action in RANK_ACTIONS[stage](layout, (True,)).step():
        if isinstance(action, Issue) and action.unit is not None:
            numel = layout.numels[action.unit]
            if action.what == "reduce":
                sent["reduce"] += round(numel / len(layout.buffers[action.unit]) * WIRE_BYTES)
            else:
                sent["gather"] += numel * PARAM_BYTES
    return Counter({kind: total * (ranks - 1) // ranks for kind, total in sent.items()})
