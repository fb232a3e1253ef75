"""The state of an optimizer stays where a new one has it."""

from __future__ import annotations

import torch

from poplar.zero.optimizers.state_values import fill_state


def test_values_of_another_rank_go_to_the_device_of_those_that_they_replace() -> None:
    state = {
        "step": torch.zeros((), device="meta"),  # as a fused class has it on the GPU
        "count": torch.zeros((), device="cpu"),
        "factor": 1.0,
    }
    others = {name: torch.ones(()) for name in ("step", "count", "unknown")} | {"factor": 2.0}
    fill_state(state, {}, others)
    assert {name: getattr(value, "device", None) for name, value in state.items()} == {
        "step": torch.device("meta"),
        "count": torch.device("cpu"),
        "factor": None,
    }
    assert state["count"] == 1
    assert state["count"] is not others["count"]
    assert state["factor"] == 2.0
