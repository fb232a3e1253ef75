"""Follows the speeds of the ranks of one optimizer, and changes or suggests its plan."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from poplar.data import pytree
from poplar.drift.replanning import Replan, Replanner
from poplar.drift.speed_levels import Row
from poplar.planner.active_ranks import active_part
from poplar.planner.cost_model import costs_of
from poplar.system.devices import slowdown_reasons
from poplar.values.formatting import format_signed_percent
from poplar.values.plan import Plan
from poplar.values.profile import ClusterProfile
from poplar.zero.micro_batches import MicroBatch
from poplar.zero.streams import PassWork, RankTimes

if TYPE_CHECKING:
    from poplar.optimizer import HeteroZeroOptimizer

UNKNOWN_STEPS = 1000
"""Steps in which a new plan must pay for itself, if it is not known how many are left."""
STEPS_PER_LOOK = 2
"""Steps after which a change is looked for. In every fourth step, 1.15x is noticed too late."""
_MOST_RANKS = 4
_MOST_BATCHES = 16

_LOGGER = logging.getLogger("poplar")


class SpeedFollower:
    """Made by `HeteroZeroOptimizer.follow_drift`, which documents it.

    The first rank alone estimates speeds and searches, because the bits of logarithms differ
    between processors. All ranks learn in the next step that it has found a plan, and then get it.
    """

    plan: Plan | None = None
    """The latest plan that was found to be faster; None if there has been none. Equal on all
    ranks."""

    def __init__(
        self,
        optimizer: HeteroZeroOptimizer,
        profile: ClusterProfile,
        device: torch.device,
        *,
        applies: bool,
        steps: int | None,
    ) -> None:
        """
        Args:
            optimizer: whose steps it follows.
            profile: of its ranks.
            device: of this rank.
            applies: faster plans are applied.
            steps: that are left to train; None: unknown.
        """
        self._optimizer = weakref.ref(optimizer)
        self._control, self._device = optimizer.control, device
        self._rank = self._control.group.rank
        assert optimizer.plan is not None, "follow_drift() has refused an optimizer without one"
        # Ranks that the plan leaves out are in no group of the others, and have no times.
        self._left_out = optimizer.plan.left_out
        self._profile, _ = active_part(profile, optimizer.plan)
        self._applies = applies
        self._replanner = Replanner(self._profile)
        self._steps_left = UNKNOWN_STEPS if steps is None else steps
        self._counts_down = steps is not None
        self._found: Replan | None = None
        self._expected: tuple[Plan | None, dict[int, float]] = None, {}
        """A plan, and the seconds of its passes by their samples."""
        self._unread: list[Sequence[RankTimes]] = []
        self.messages: list[str] = []
        """What was reported so far, equal on all ranks."""

    @property
    def wants_to_agree(self) -> bool:
        """This rank has found a plan."""
        return self._found is not None

    def work(self, micro_batch: MicroBatch) -> PassWork:
        """What a pass of this rank computes."""
        plan, samples = self._current_optimizer().plan, micro_batch.samples
        # The property makes a new one for each call if ranks are left out.
        if plan is not self._expected[0] and plan != self._expected[0]:
            self._expected = plan, {}
        expected = self._expected[1].get(samples)
        if expected is None:
            costs = costs_of(self._profile, self._current_plan())
            expected = self._expected[1][samples] = costs.pass_seconds(self._rank, samples)
        elements = sum(tensor.numel() for tensor in pytree.tensors(micro_batch.batch))
        return PassWork(expected, float(micro_batch.samples), float(elements))

    def add(self, times: Sequence[RankTimes], *, step: int, agree: bool) -> None:
        """Add a step that has been applied. Collective if a rank has found a plan.

        Args:
            times: by rank, of the latest step that is known.
            step: its number.
            agree: a rank had found a plan when the step was closed.
        """
        if self._counts_down:
            self._steps_left = max(0, self._steps_left - 1)
        if agree:
            self._agree(step)
        elif self._rank == 0:
            self._unread.append(times)
            if len(self._unread) == STEPS_PER_LOOK:
                steps = [list(map(_row, each)) for each in self._unread]
                self._unread.clear()
                self._found = self._replanner.add(
                    steps,
                    self._current_plan(),
                    steps_left=self._steps_left,
                    largest_batches=self._current_optimizer().largest_batches,
                )

    def _agree(self, step: int) -> None:
        """Report the plan of the first rank, and apply it if that was asked for. Collective."""
        mine = self._found, slowdown_reasons(self._device)
        received = self._control.exchange_objects(mine, what="a plan for changed speeds")
        self._found, found = None, received[0][0]
        if found is None:
            return
        self.plan = found.plan.beside(self._left_out)
        reasons = [reason for _, reason in received]
        message = f"step {step}: {_message(found, self.plan, reasons)}"
        if self._applies and not self._changes_soon():
            self._current_optimizer().apply_plan(self.plan)
        else:
            message += " with optimizer.apply_plan() of this plan"
        self.messages.append(message)
        if self._rank == 0:
            _LOGGER.warning(message)

    def _changes_soon(self) -> bool:
        """Whether a later step changes the plan, whose speeds are not known until then."""
        optimizer = self._optimizer()
        return optimizer is not None and optimizer.pending_plan is not None

    def _current_plan(self) -> Plan:
        """Of the active ranks alone."""
        plan = self._current_optimizer().plan
        assert plan is not None, "follow_drift() has refused an optimizer without one"
        return plan.of_active_ranks()

    def _current_optimizer(self) -> HeteroZeroOptimizer:
        optimizer = self._optimizer()
        assert optimizer is not None, "it calls this object"
        return optimizer


def _row(times: RankTimes) -> Row:
    work = times.work
    length = max(work.elements, 1.0) / max(work.samples, 1.0)
    return Row(times.compute_seconds, work.expected_seconds, length)


def _message(found: Replan, plan: Plan, reasons: Sequence[str]) -> str:
    """`rank 2 is 1.9x slower (power cap); new batches 12,12,5; +38 %`.

    Args:
        found: of the active ranks.
        plan: its plan, of all ranks.
        reasons: by active rank, why it may be slower.
    """
    changes = []
    for rank, factor in found.slowdowns.items():
        is_slower = factor > 1.0
        because = f" ({reasons[rank]})" if is_slower and reasons[rank] else ""
        times = f"{max(factor, 1.0 / factor):.2g}x {'slower' if is_slower else 'faster'}"
        changes.append(f"rank {plan.active_ranks[rank]} is {times}{because}")
    more = f" and {len(changes) - _MOST_RANKS} more" if len(changes) > _MOST_RANKS else ""
    shown = ", ".join(changes[:_MOST_RANKS]) or "the speeds of the ranks have changed"
    samples = [str(plan.samples(rank)) for rank in range(plan.world_size)]
    batches = ",".join([*samples[:_MOST_BATCHES], "..."] if samples[_MOST_BATCHES:] else samples)
    return f"{shown}{more}; new batches {batches}; {format_signed_percent(found.gain)}"
