"""The drawings of docs/how-it-works.md have every module that a step and a tuning run enter."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import models
import pytest
import ranks as harness
import torch
from models import ModelSpec
from ranks import Pool

import poplar
from poplar import Plan

PAGE = (Path(__file__).parents[2] / "docs" / "how-it-works.md").read_text("utf-8")
PLANNING = ("poplar.planner.", "poplar.tuning.", "poplar.profiler.cluster_profiler")
"""Modules that the second drawing is about; the instruments are listed on the page of profiling."""


@contextmanager
def entered() -> Iterator[set[str]]:
    """The modules of Poplar of which a function is called in this thread."""
    modules: set[str] = set()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_name != "<module>":
            modules.add(frame.f_globals.get("__name__", ""))

    sys.setprofile(note)
    try:
        yield modules
    finally:
        sys.setprofile(None)
        modules -= {name for name in modules if not name.startswith("poplar.")}


def in_a_step() -> list[str]:
    """The modules that a step of training enters, once the order of collectives is agreed."""
    plan = Plan(stage=3, global_batch=6, micro_batches=((2, 2), (2, 0)), shares=(0.6, 0.4))
    optimizer = poplar.HeteroZeroOptimizer(
        models.build(ModelSpec()),
        torch.optim.AdamW,
        plan=plan,
        process_group=harness.group(),
        communicator="process_group",
        lr=1e-2,
    )
    batch = models.data(4 if harness.rank() == 0 else 2, seed=harness.rank())
    for _ in range(3):
        optimizer.train_step(models.mean_over_samples, batch, max_norm=1.0)
    with entered() as modules:
        optimizer.train_step(models.mean_over_samples, batch, max_norm=1.0)
    return sorted(modules)


def in_tuning() -> list[str]:
    """The modules that `autotune` enters."""
    with entered() as modules:
        poplar.autotune(
            models.build(ModelSpec()),
            models.mean_over_samples,
            models.data(3, seed=1),
            global_batch=8,
            optimizer_class=torch.optim.AdamW,
            seconds=0.5,
            max_batch=4,
            progress=False,
            cache=False,
            process_group=harness.group(),
        )
    return sorted(name for name in modules if name.startswith(PLANNING))


def named_below(heading: str) -> set[str]:
    """The modules that a section of the page names up to its numbered list."""
    section = PAGE.partition(f"## {heading}\n")[2].partition("\n1. ")[0]
    paths = re.findall(r"\bpoplar/([\w/]+)\.py", section)
    return {f"poplar.{path.removesuffix('/__init__').replace('/', '.')}" for path in paths}


@pytest.mark.parametrize(
    ("heading", "run"), [("From batch to update", in_a_step), ("From profile to plan", in_tuning)]
)
def test_page_names_the_modules_that_are_entered(
    ranks: Pool, heading: str, run: Callable[[], list[str]]
) -> None:
    found = set().union(*ranks.run(run, ranks=2))
    named = named_below(heading)
    assert found - named == set(), "the page leaves out modules that are entered"
    if run is in_a_step:  # a search remembers what earlier ones have computed
        assert named - found == set(), "the page names modules that are not entered"
