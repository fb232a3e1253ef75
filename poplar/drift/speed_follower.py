"""Follows the speeds of the ranks of one optimizer, and changes or suggests its plan."""

from __future__ import annotations

import logging
import math
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from poplar.comm.announcements import Announcements
from poplar.data import pytree
from poplar.drift.idle_speed import FRESH_SECONDS, IdleSpeed
from poplar.drift.replanning import Replan, Replanner
from poplar.drift.speed_levels import Row
from poplar.planner.active_ranks import active_part
from poplar.planner.cost_model import costs_of
from poplar.planner.prediction import predict
from poplar.planner.search import Choice
from poplar.system.devices import slowdown_reasons
from poplar.values.errors import agreed, check_class
from poplar.values.formatting import format_ranks, format_signed_percent
from poplar.values.plan import Plan
from poplar.values.profile import ClusterProfile
from poplar.values.schema import Count, checked
from poplar.zero.agreement import exchange_results
from poplar.zero.micro_batches import MicroBatch
from poplar.zero.setup import check_choice
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


def follow(
    optimizer: HeteroZeroOptimizer,
    profile: ClusterProfile,
    replan: Literal["auto", "advise", "off"],
    steps: int | None,
    leave_out: Choice,
) -> SpeedFollower | None:
    """`HeteroZeroOptimizer.follow_drift`, which documents it. Collective over all ranks."""
    training, doing = optimizer._training, "follow_drift()"

    def check() -> tuple[ClusterProfile, str, int | None, str]:
        check_choice("replan", replan, Literal["auto", "advise", "off"])
        check_choice("leave_out", leave_out, Choice)
        check_class("profile", profile, ClusterProfile)
        if optimizer.plan is None:
            raise ValueError("follow_drift() needs an optimizer that was built with a plan")
        predict(profile, optimizer.plan)  # raises if it is of other ranks or another model
        return profile, replan, checked(Count | None, steps, "steps"), leave_out

    if training.ranks.left_out:
        training.calls.let_all_run(doing if training.ranks.is_active else "")
    arguments = exchange_results(training.ranks.whole_control, check, what=doing)
    if any(other != arguments[0] for other in arguments):
        raise agreed(
            ValueError(
                "the ranks passed different arguments to follow_drift(); pass the profile of "
                "the first rank, and the same replan, steps and leave_out, on all ranks"
            )
        )
    _, _, steps, _ = arguments[0]
    follower = None
    if replan != "off":
        applies = replan == "auto"
        follower = SpeedFollower(
            optimizer, profile, applies=applies, steps=steps, leave_out=leave_out
        )
    training.follow_speeds(follower)
    return follower


class SpeedFollower:
    """Made by `HeteroZeroOptimizer.follow_drift`, which documents it.

    The first active rank alone estimates speeds and searches, because the bits of logarithms differ
    between processors. All active ranks learn in the next step that it has found a plan, and then
    get it. A rank that is left out measures itself and reports to the first active rank.
    """

    plan: Plan | None = None
    """The latest plan that was found to be faster; None if there has been none. Equal on all
    active ranks."""

    def __init__(
        self,
        optimizer: HeteroZeroOptimizer,
        profile: ClusterProfile,
        *,
        applies: bool,
        steps: int | None,
        leave_out: Choice,
    ) -> None:
        """
        Args:
            profile: of all ranks.
            steps: that are left to train; None: unknown.
            leave_out: "auto": plans may leave out other ranks.
        """
        self._optimizer = weakref.ref(optimizer)
        self._profile, self._applies, self._leave_out = profile, applies, leave_out
        self._steps_left = UNKNOWN_STEPS if steps is None else steps
        self._counts_down = steps is not None
        self._times_left_out = 0
        self._idle: IdleSpeed | None = None
        self.messages: list[str] = []
        """What was reported so far, on a rank that is left out as far as it concerned it. Equal on
        all active ranks."""
        self.follow_ranks((None, {}, self._steps_left))

    def follow_ranks(self, known: Any) -> None:
        """Follow the ranks that train now. Local, on all ranks.

        Args:
            known: as `known` on the first of the ranks that trained before.
        """
        levels, since, self._steps_left = known
        optimizer = self._current_optimizer()
        ranks = optimizer._training.ranks
        may_change = self._leave_out == "auto" and optimizer._changes.ranks_may_change
        self._replanner = Replanner(
            self._profile,
            left_out=ranks.left_out,
            levels=levels,
            since=since,
            leave_out="auto" if may_change else "never",
        )
        if ranks.is_active:
            self._idle = None
        elif self._idle is None:
            self._times_left_out += 1
            self._idle = IdleSpeed(optimizer._training.request.device, self._times_left_out)
        self._found: Replan | None = None
        self._expected: tuple[Plan | None, dict[int, float]] = None, {}
        """A plan, and the seconds of its passes by their samples."""
        self._unread: list[Sequence[RankTimes]] = []
        self._looks = deque([time.monotonic()], maxlen=2)
        """When a change was looked for last."""

    @property
    def known(self) -> Any:
        """What this rank knows of the speeds of all, for `follow_ranks`."""
        return self._replanner.levels, self._replanner.since, self._steps_left

    @property
    def changes_ranks(self) -> bool:
        """It may leave out ranks and take them back by itself."""
        return self._applies and self._leave_out == "auto"

    @property
    def wants_to_agree(self) -> bool:
        """This rank has found a plan."""
        return self._found is not None

    def measure(self) -> None:
        """Measure this rank, which is left out, if it is time to, and report it. Local."""
        announcements = self._current_optimizer()._training.ranks.announcements
        if self._idle is not None and announcements is not None:
            change = self._idle.change()
            if change is not None:
                announcements.reply(change)

    def work(self, micro_batch: MicroBatch) -> PassWork:
        """What a pass of this rank computes."""
        plan, samples = self._current_plan(), micro_batch.samples
        if plan is not self._expected[0]:
            self._expected = plan, {}
        expected = self._expected[1].get(samples)
        if expected is None:
            expected = self._expected[1][samples] = self._expected_seconds(plan, samples)
        elements = sum(tensor.numel() for tensor in pytree.tensors(micro_batch.batch))
        return PassWork(expected, float(micro_batch.samples), float(elements))

    def _expected_seconds(self, plan: Plan, samples: int) -> float:
        """Of a pass of this rank, by the profile; infinite if that does not have such passes."""
        rank = self._current_optimizer().control.group.rank
        try:
            return costs_of(*active_part(self._profile, plan)).pass_seconds(rank, samples)
        except ValueError:  # `apply_plan` takes plans that were not profiled
            return math.inf

    def add(self, times: Sequence[RankTimes], *, step: int, agree: bool) -> None:
        """Add a step that has been applied. Collective if a rank has found a plan.

        Args:
            times: by rank, of the latest step that is known.
            agree: a rank had found a plan when the step was closed.
        """
        if self._counts_down:
            self._steps_left = max(0, self._steps_left - 1)
        if agree:
            self._agree(step)
        elif (optimizer := self._current_optimizer()).control.group.rank == 0:
            self._unread.append(times)
            # A plan that is about to change is not compared with: what is found would be too late.
            if len(self._unread) >= STEPS_PER_LOOK and optimizer.pending_plan is None:
                steps = [list(map(_row, each)) for each in self._unread]
                self._unread.clear()
                self._found = self._replanner.add(
                    steps,
                    self._current_plan(),
                    steps_left=self._steps_left,
                    largest_batches=optimizer.largest_batches,
                    idle=self._fresh(optimizer._training.ranks.announcements),
                )
                self._looks.append(time.monotonic())

    def _fresh(self, announcements: Announcements | None) -> dict[int, float]:
        """By rank that is left out, the change of its level that it has reported of late.

        It reports once per step at most, so in long steps what is new since two looks counts.
        """
        replies = {} if announcements is None else dict(announcements.replies)
        since = min(time.monotonic() - FRESH_SECONDS, self._looks[0])
        return {rank: change for rank, (when, change) in replies.items() if when > since}

    def _agree(self, step: int) -> None:
        """Report the plan of the first rank, and apply it if that was asked for. Collective."""
        optimizer = self._current_optimizer()
        training = optimizer._training
        found, self._found = self._found, None
        if found is not None and (
            optimizer.pending_plan is not None or optimizer.plan != found.compared_with
        ):  # `apply_plan` was called since, or memory has run out
            self._replanner.reject()
            found = None
        mine = found, slowdown_reasons(training.request.device)
        received = optimizer.control.exchange_objects(mine, what="a plan for changed speeds")
        found = received[0][0]
        if found is None:
            return
        plan, before = found.plan, training.ranks.left_out
        reasons = dict(zip(training.ranks.active, (reason for _, reason in received), strict=True))
        order = plan, f"step {step}: {_message(found, before, reasons)}"
        if self._applies:
            if plan.left_out == before:
                self.obey(order)
            else:
                training.calls.end_by(order, partial(self.obey, order))
        else:
            self._note(plan, f"{order[1]} with optimizer.apply_plan() of this plan")

    def obey(self, order: tuple[Plan, str]) -> None:
        """Change to a plan, and report it. Collective, over all ranks if others are left out.

        If the data of a rank cannot follow, which the user may not expect, training goes on with
        the plan of now, as with "advise".
        """
        plan, message = order
        optimizer = self._current_optimizer()
        changes, ranks = optimizer._changes, optimizer._training.ranks
        control = ranks.control if plan.left_out == ranks.left_out else ranks.whole_control
        refusals = control.exchange_objects(changes.refusal(plan), what="a plan for changed speeds")
        by_rank = {rank: why for rank, why in control.group.by_name(refusals).items() if why}
        if by_rank:
            rank, why = next(iter(by_rank.items()))
            self._note(plan, f"{message}; not applied, because rank {rank} cannot follow: {why}")
            return
        changes.apply(plan, None)
        self._note(plan, message)

    def _note(self, plan: Plan, message: str) -> None:
        self.plan = plan
        self.messages.append(message)
        optimizer = self._current_optimizer()
        if optimizer.is_active and optimizer.control.group.rank == 0:
            _LOGGER.warning(message)

    def _current_plan(self) -> Plan:
        plan = self._current_optimizer().plan
        assert plan is not None, "follow_drift() has refused an optimizer without one"
        return plan

    def _current_optimizer(self) -> HeteroZeroOptimizer:
        optimizer = self._optimizer()
        assert optimizer is not None, "it calls this object"
        return optimizer


def _row(times: RankTimes) -> Row:
    work = times.work
    # Tensors inside of objects are not seen, so without elements the length is unknown.
    length = work.elements / work.samples if work.elements and work.samples else 1.0
    return Row(times.compute_seconds, work.expected_seconds, length)


def _message(found: Replan, before: Sequence[int], reasons: Mapping[int, str]) -> str:
    """`rank 2 is 1.9x slower (power cap); new batches 12,12,5; +38 %`.

    Args:
        before: ranks that the plan of before leaves out.
        reasons: by active rank, why it may be slower.
    """
    plan, changes = found.plan, []
    for rank, factor in found.slowdowns.items():
        is_slower = factor > 1.0
        because = f" ({reasons[rank]})" if is_slower and reasons.get(rank) else ""
        times = f"{max(factor, 1.0 / factor):.2g}x {'slower' if is_slower else 'faster'}"
        changes.append(f"rank {rank} is {times}{because}")
    more = f" and {len(changes) - _MOST_RANKS} more" if len(changes) > _MOST_RANKS else ""
    shown = ", ".join(changes[:_MOST_RANKS]) or "the speeds of the ranks have changed"
    for ranks, what in (
        (set(plan.left_out) - set(before), "left out"),
        (set(before) - set(plan.left_out), "taken back"),
    ):
        more += f"; {format_ranks(sorted(ranks))} {what}" if ranks else ""
    samples = [str(plan.samples(rank)) for rank in range(plan.world_size)]
    batches = ",".join([*samples[:_MOST_BATCHES], "..."] if samples[_MOST_BATCHES:] else samples)
    return f"{shown}{more}; new batches {batches}; {format_signed_percent(found.gain)}"
