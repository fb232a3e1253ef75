"""A rank fails when it enters a Python function of a collective method, of Poplar or of the user.

Without `--full`, a test names the function in which a rank fails: how many calls a step makes
differs from run to run, because ranks wait for each other.
"""

from __future__ import annotations

import gc
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
from typing import Any

import torch.distributed as dist
from subset import choose

from poplar.zero import collective_calls

DEADLINE = timedelta(seconds=120)
SECONDS = 10.0
"""In which all ranks raise: far less than the deadline; a loaded machine is slow."""

_OPTIMIZER = "poplar.optimizer.HeteroZeroOptimizer"
_FULL = "poplar.training.unsharded_model"
_CHECKPOINT = "poplar.checkpoint"
_CALLS = "poplar.zero.collective_calls"
_STRATEGY = "poplar.zero.stages.strategy.Strategy"
_LOOP = "poplar.zero.micro_batch_loop.MicroBatchLoop"
BEFORE = {
    *(f"{_OPTIMIZER}.{name}" for name in ("micro_batches", "collective_calls", "full_parameters")),
    *(f"{_FULL}.full_parameters{part}" for part in ("", ".<locals>.running")),
    *(f"{_STRATEGY}.{name}" for name in ("sends_differences", "sends_updates")),
    *(f"{_CHECKPOINT}.save.{name}" for name in ("save_checkpoint", "save_now")),
    *(f"{_CHECKPOINT}.load.{name}" for name in ("load_checkpoint", "load_as")),
    *(f"{_CHECKPOINT}.manager.CheckpointManager.{n}" for n in ("load_latest", "collective_calls")),
    *(f"{_CALLS}.{name}" for name in ("_raising", "_Nesting.enter")),
    *(f"{_CALLS}.CollectiveCalls.{name}" for name in ("call", "running")),
    f"{_CALLS}.collective.<locals>.collective_call",
    *(f"{_OPTIMIZER}.micro_batches.<locals>.{name}" for name in ("begin", "running")),
    *(f"{_LOOP}.{name}" for name in ("__init__", "__enter__", "__exit__", "close", "is_running")),
    f"{_LOOP}._takes_part",
}
"""Functions that a rank enters before it begins a collective call, or between two calls. An error
there is its own alone: the program may go on with the call that the others make."""
AT_ANY_TIME = ("__del__", "leave")


class Fault(Exception):
    """What the program of one rank raises."""


@dataclass(frozen=True)
class Place:
    """Where a rank fails."""

    rank: int
    call: int
    name: str = ""
    """Count calls of this function, with or without its module and class; default: of all."""

    @property
    def ending(self) -> str:
        """Of the full names of functions that count."""
        return f".{self.name}" if self.name else ""


class Calls:
    """Raises at a call, or counts them: a profiling function."""

    def __init__(
        self, place: Place | None, kind: type[BaseException] = Fault, *, after: str = ""
    ) -> None:
        """`after`: count from the first call of this function on, `Group.of` for instance."""
        self.place, self.kind, self.after = place, kind, after
        self.has_begun = False
        self.count = 0
        self.names: Counter[str] = Counter()
        """Calls by the full names of functions."""
        self.fired = ""
        self.fired_at = 0.0
        self.fired_inside: list[str] = []
        """The full names of the functions that were running, innermost first."""

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if event != "call" or self.fired or not is_of_step(frame, self.has_begun):
            return
        if self.after:
            if frame.f_code.co_name == self.after:
                self.after, self.has_begun = "", True
            return
        name = full_name(frame)
        if self.place is not None and not f".{name}".endswith(self.place.ending):
            return
        self.count += 1
        self.names[name] += 1
        if self.place is not None and self.count == self.place.call:
            self.fired, self.fired_at = name, time.monotonic()
            self.fired_inside = [full_name(running) for running in with_callers(frame)]
            raise self.kind(f"at call {self.count}, {self.fired}")

    @contextmanager
    def running(self) -> Iterator[None]:
        """Cycles are not collected: calls of their finalizers would be counted, too."""
        gc.disable()
        sys.setprofile(self)
        try:
            yield
        finally:
            sys.setprofile(None)
            gc.enable()


def with_callers(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def full_name(frame: FrameType) -> str:
    return f"{frame.f_globals.get('__name__', '')}.{frame.f_code.co_qualname}"


def is_of_step(frame: FrameType, begun: bool) -> bool:
    """Whether a function is called in a collective method, and not before it begins.

    `begun`: it has begun in any case.
    """
    code = frame.f_code
    # The end of an `any` finalizes its expression, and no error of a finalizer leaves it.
    if code.co_name in (*AT_ANY_TIME, "<genexpr>"):
        return False
    if not frame.f_globals.get("__name__", "").startswith("poplar."):
        return code.co_name.startswith("user_")
    return full_name(frame) not in BEFORE or begun or has_begun(frame)


def has_begun(frame: FrameType | None) -> bool:
    """Whether this rank is in a collective call, or in the loop over a step's micro-batches."""
    if collective_calls._NESTING.depth:
        return True
    while frame is not None and frame.f_code.co_qualname != "MicroBatchLoop.__next__":
        frame = frame.f_back
    return frame is not None and frame.f_locals["self"].is_running


def attempt(act: Callable[[], object], calls: Calls | None = None) -> str | None:
    """What a call raised."""
    try:
        with nullcontext() if calls is None else calls.running():
            act()
    except (Exception, KeyboardInterrupt) as error:
        return f"{type(error).__name__}: {error}"
    return None


def gathered(called: Counter[str], group: dist.ProcessGroup) -> list[Counter[str]]:
    """The calls of all ranks. Collective."""
    by_rank = [Counter[str]()] * dist.get_world_size(group)
    dist.all_gather_object(by_rank, called, group)
    return by_rank


def places_to_fail(
    called: Sequence[Counter[str]], subject: str, *, quick: int, full: int
) -> list[Place]:
    """Places of each rank, by what it has called.

    Args:
        called: of each rank, the calls by function.
        subject: other subjects choose other places.
        quick: functions of each rank; it fails when it enters one first.
        full: calls of each rank with `--full`, spread over all calls.
    """
    number = choose(quick=quick, full=full)
    places = []
    for rank, calls in enumerate(called):
        if number == full:
            start, total = zlib.crc32(subject.encode()), calls.total()
            steps = (n * (total - 1) // number for n in range(number))
            places += [Place(rank, 1 + (start + step) % total) for step in steps]
        else:
            by_hash = sorted(calls, key=lambda n: zlib.crc32(f"{subject} {rank} {n}".encode()))
            places += [Place(rank, 1, name) for name in by_hash[:number]]
    return places
