"""The outcome of a step. Values that a device computes are read when they are asked for."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from functools import cached_property
from typing import Any

from torch import Tensor

from poplar.comm import Group
from poplar.values.plan import Plan
from poplar.zero.streams import RankTimes, Streams, seconds_between


class Stopwatch:
    """The time of a step; on a device, between two events of the compute stream."""

    def __init__(self, streams: Streams, group: Group) -> None:
        self._streams, self._group = streams, group
        self._start = streams.timestamp()
        self._stop: Any = None

    def stop(self) -> None:
        """Called when all work of the step has been issued."""
        self._stop = self._streams.timestamp()

    def wait(self) -> None:
        """Wait until the device has finished the step, until the deadline."""
        if self._streams.asynchronous:
            self._group.wait_for_event(self._stop, "the end of a step")

    def seconds(self) -> float:
        """Seconds between construction and `stop`."""
        self.wait()
        return seconds_between(self._start, self._stop)


class StepResult:
    """The outcome of one `train_step`; equal on all ranks, except for `seconds` and
    `waiting_seconds`.

    `loss`, `grad_norm`, `skipped`, `seconds` and `waiting_seconds` wait for the device when they
    are first read, and raise `CollectiveTimeout` if it is not done at the deadline. A loop that
    reads them only now and then keeps the device busy in between. Copying and pickling read them.
    """

    samples: int
    """Samples in the global batch."""
    waiting_on: int | None
    """The rank that waited least: the slowest one, for which the others waited. On GPUs, in the
    latest step that all devices had finished; None if there is none."""
    rank_times: tuple[RankTimes, ...]
    """By rank of all, its seconds of compute, communication and waiting: zeros for a rank that the
    plan leaves out. On GPUs, in the latest step that its device had finished. Not known (empty) in
    Lightning."""
    plan: Plan | None
    """The plan that the step ran under, with the micro-batches that fitted; None without a plan.
    `optimizer.plan` may have changed by the end of the step."""
    left_out = False
    """The plan leaves this rank out. Then the times are those of the first active rank."""

    def __init__(
        self,
        *,
        samples: int,
        waiting_on: int | None,
        skipped: bool | Callable[[], bool],
        losses: Tensor,
        norm: Tensor | None,
        rank_times: tuple[RankTimes, ...] = (),
        plan: Plan | None = None,
        stopwatch: Stopwatch,
        waiting_seconds: Callable[[], float],
    ) -> None:
        """
        Args:
            skipped: a function if the device decides it.
            losses: by rank, its part of the weighted loss.
            waiting_seconds: returns the part of the step that this rank has waited.
        """
        self.samples, self.waiting_on, self._skipped = samples, waiting_on, skipped
        self._losses, self._norm, self.rank_times = losses, norm, rank_times
        self.plan = plan
        self._stopwatch, self._waiting_seconds = stopwatch, waiting_seconds

    @cached_property
    def loss(self) -> float:
        """Weighted loss of the global batch."""
        self._stopwatch.wait()
        return float(sum(self._losses.tolist()))

    @cached_property
    def grad_norm(self) -> float | None:
        """Norm of the full gradient before clipping; None without `max_norm`."""
        self._stopwatch.wait()
        return None if self._norm is None else float(self._norm)

    @property
    def loss_on_device(self) -> Tensor:
        """`loss` as a float64 tensor on the device. Reading it has no deadline."""
        return self._losses.sum()

    @property
    def grad_norm_on_device(self) -> Tensor | None:
        """`grad_norm` as a float64 tensor on the device. Reading it has no deadline."""
        return self._norm

    @cached_property
    def skipped(self) -> bool:
        """The loss or the gradient was not finite, so no rank has stepped."""
        return self._skipped() if callable(self._skipped) else self._skipped

    @cached_property
    def seconds(self) -> float:
        """Time of the step on this rank, waiting included."""
        return self._stopwatch.seconds()

    @cached_property
    def waiting_seconds(self) -> float:
        """Part of `seconds` that this rank has waited for other ranks."""
        self._stopwatch.wait()
        return self._waiting_seconds()

    def of_left_out(self) -> StepResult:
        """This result as a rank has it that the plan leaves out; waits for the device."""
        copied = copy(self)
        vars(copied).update(left_out=True)
        return copied

    def __getstate__(self) -> dict[str, Any]:
        """The values, without the group and the device's events, which exist in this process only.

        Values that have been read are attributes, so a copy has nothing to wait for. Its tensors
        are on the CPU.
        """
        values = {name: getattr(self, name) for name in _KEPT}
        norm = None if self._norm is None else self._norm.cpu()
        return {**values, "_losses": self._losses.cpu(), "_norm": norm}

    def __repr__(self) -> str:
        values = ", ".join(f"{name}={getattr(self, name)!r}" for name in _VALUES)
        return f"StepResult({values})"


_VALUES = (
    "loss",
    "grad_norm",
    "samples",
    "seconds",
    "waiting_seconds",
    "waiting_on",
    "rank_times",
    "skipped",
)
_KEPT = (*_VALUES, "plan", "left_out")
