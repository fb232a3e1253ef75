"""The drawings of docs/how-it-works.md have every module that a step and a tuning run enter."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import models
import pytest
import ranks as harness
import torch
from models import ModelSpec
from ranks import Pool

import poplar
from poplar import Plan
from poplar.comm.collective_queue import CollectiveQueue
from poplar.zero.steps.step import Step

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


def trained_at_stage_3() -> tuple[poplar.HeteroZeroOptimizer, Any]:
    """An optimizer, once the order of collectives is agreed, and this rank's batch."""
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
    return optimizer, batch


def in_a_step() -> list[str]:
    """The modules that a step of training enters."""
    optimizer, batch = trained_at_stage_3()
    with entered() as modules:
        optimizer.train_step(models.mean_over_samples, batch, max_norm=1.0)
    return sorted(modules)


def in_passes() -> tuple[list[str], list[str]]:
    """The modules that the passes of a step enter, and the functions from hook to collective."""
    optimizer, batch = trained_at_stage_3()
    run_passes, exchange = Step.run_passes, CollectiveQueue.exchange
    modules: set[str] = set()
    functions: list[str] = []

    def run(*args: Any) -> Any:
        nonlocal modules
        with entered() as modules:
            return run_passes(*args)

    def start(*args: Any, **kwargs: Any) -> Any:
        frame: FrameType | None = sys._getframe(1)
        names = []
        while frame is not None and frame.f_globals["__name__"].startswith("poplar."):
            names.append(frame.f_code.co_qualname)
            frame = frame.f_back
        if any("_forward_pre_hook" in name for name in names):
            functions[:] = names
        return exchange(*args, **kwargs)

    with (
        mock.patch.object(Step, "run_passes", run),
        mock.patch.object(CollectiveQueue, "exchange", start),
    ):
        optimizer.train_step(models.mean_over_samples, batch, max_norm=1.0)
    return sorted(modules), functions


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


def test_passes_enter_few_modules_and_frames(ranks: Pool) -> None:
    """The passes of a step at stage 3: at most 25 modules; 7 frames from a hook to its collective.

    The frames are those of the module's pre-hook, of the collective, and between them.
    """
    for modules, functions in ranks.run(in_passes, ranks=2):
        assert len(modules) <= 25, modules
        assert len(functions) + 1 <= 7, functions
