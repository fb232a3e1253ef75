"""The states of the random number generators of a process."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch


def random_state(device: torch.device) -> dict[str, Any]:
    """States of the generators of Python, torch, `device`, and NumPy if it is used."""
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    if "numpy" in sys.modules:
        kind, keys, *rest = sys.modules["numpy"].random.get_state(legacy=True)
        state["numpy"] = [kind, keys.tolist(), *rest]
    return state


def set_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Restore the result of `random_state`; generators that this process lacks are left out."""
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
    if "numpy" in state:
        try:
            import numpy
        except ImportError:
            return
        kind, keys, *rest = state["numpy"]
        numpy.random.set_state((kind, numpy.array(keys, dtype=numpy.uint32), *rest))
