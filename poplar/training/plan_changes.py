"""`PlanChanges`: when and how a model in training changes to another plan (`apply_plan`)."""

from __future__ import annotations

import logging
import time
from typing import Any

from poplar.comm import Communicator, Control
from poplar.training.active_ranks import state_plan
from poplar.training.moved_engine import DOING
from poplar.training.plan_schedule import PlanSchedule
from poplar.training.trained_model import TrainedModel
from poplar.values.errors import agreed, check_class
from poplar.values.plan import Plan
from poplar.zero.agreement import caught, exchange_results, run_on_all_ranks
from poplar.zero.setup import (
    STRATEGY_CLASSES,
    Request,
    changed_request,
    changes_units,
    compare_identities,
    units_of,
    with_cut,
)
from poplar.zero.unit import Unit, check_unit_names
from poplar.zero.weights.materialization import check_unused

_LOGGER = logging.getLogger("poplar")


class PlanChanges:
    """Changes the plan of a model in training, at steps that its schedule has."""

    def __init__(self, training: TrainedModel) -> None:
        self._training = training
        self.schedule = PlanSchedule()

    def apply(self, plan: Plan, at_step: int | None) -> int:
        """`HeteroZeroOptimizer.apply_plan`, which documents it. Collective, between steps."""
        training, schedule = self._training, self.schedule
        ranks = training.ranks

        def check() -> tuple[dict[str, Any], int, int]:
            check_class("plan", plan, Plan)
            request, _ = self._prepared(plan, ranks.whole.size)
            identity = {
                **request.change_identity(),
                "ranks that the plan leaves out": plan.left_out,
                "argument at_step": at_step,
                "number of steps that have begun": schedule.steps,
            }
            return identity, schedule.first_step(plan), schedule.changes

        def agreed_on(control: Control) -> list[tuple[dict[str, Any], int, int]]:
            received = exchange_results(control, check, what=DOING)
            compare_identities(control, [identity for identity, *_ in received])
            return received

        control = ranks.control
        if ranks.is_active:
            received = agreed_on(control)
        if ranks.left_out and self._needs_left_out(plan):
            training.calls.let_all_run(DOING if ranks.is_active else "")
            control = ranks.whole_control
            steps = control.exchange_objects(schedule.steps, what=DOING)
            schedule.count_from(steps[ranks.active[0]])
            received = agreed_on(control)
        first = max(first for _, first, _ in received)
        step = first if at_step is None else at_step
        if step < first:
            by_rank = control.group.by_name([own for _, own, _ in received])
            raise agreed(
                ValueError(
                    f"apply_plan(at_step={step}): {schedule.steps} steps have begun, and batches "
                    f"of the plan of now have been drawn up to the steps before {by_rank} by rank; "
                    f"pass at_step={first} or later, or None for the first possible step"
                )
            )
        schedule.add(step, plan, max(changes for *_, changes in received))
        self._follow_schedule()
        return step

    def refusal(self, plan: Plan) -> str:
        """Why this rank cannot change to a plan; empty if it can. Local, between steps."""
        try:
            self._prepared(plan, self._training.ranks.whole.size)
            self.schedule.first_step(plan)
        except ValueError as error:
            return str(error)
        return ""

    def _needs_left_out(self, plan: Plan) -> bool:
        """Whether the plan, or one that it may replace, leaves out other ranks than now."""
        ranks, plans = self._training.ranks, (plan, *self.schedule.plans)
        return not ranks.is_active or any(each.left_out != ranks.left_out for each in plans)

    def begin_step(self) -> None:
        """Change to the plan of a step that begins, and count it. Collective if the plan changes.

        Inside of another step, which raises when this one is opened, the plan stays.
        """
        training, schedule = self._training, self.schedule
        if not training.ranks.is_active:
            self._follow_schedule()
        elif schedule.is_due and not (
            training.step.has_open_loop or training.engine.values.present
        ):
            training.engine.hooks.drop_implicit_pass()
            if training.engine.has_gradients:  # which were not applied
                training.engine.begin_step()
            self._follow_schedule()
        schedule.begin_step()

    def end_step(self) -> None:
        """A step has been applied. In a loop without micro-batches it begins now, too. Collective
        then if the plan changes.
        """
        try:
            if not self.schedule.in_step:
                self.schedule.begin_step()
                self._follow_schedule(in_step=True)
        finally:  # the step has been applied, whatever becomes of the plan
            self.schedule.end_step()

    def _follow_schedule(self, *, in_step: bool = False) -> None:
        """Change to the plan of the next step, if it is another one. Collective then.

        `in_step`: only the active ranks make this call.
        """
        training = self._training
        while (plan := self.schedule.due()) is not None:
            began = time.perf_counter()
            if plan.left_out != training.ranks.left_out:
                if in_step:
                    raise agreed(RuntimeError(_RANKS_CHANGE_OUTSIDE))
                training.calls.let_all_run()
                self._change_active_ranks(plan)
            else:
                self._change(plan)
            group = training.ranks.group
            group.trace.add("optimizer", "the change to another plan", began)
            if group.rank == 0 and training.ranks.is_active:
                steps, seconds = self.schedule.steps, time.perf_counter() - began
                _LOGGER.info("step %d: changed to another plan in %.3f s", steps, seconds)

    def _change(self, plan: Plan) -> None:
        """Change to a plan of the ranks of now. Collective over the active ones."""
        if self._training.ranks.is_active:
            self._training.change_plan(*self._prepared(plan))
        else:
            self._training.expect_plan(plan)

    def _change_active_ranks(self, plan: Plan) -> None:
        """Change to a plan that leaves out other ranks. Collective over all ranks.

        [Note: change of ranks] State moves within one group: of the ranks that were active and
        those that will be. First the ranks that come back join it, without a share. Then the shares
        are those of the new plan. Last, the ranks that have none any more leave. What is
        replicated, at stage 0, is divided before, so that what joins needs no state.
        """
        training, ranks = self._training, self._training.ranks
        union = sorted({*ranks.active, *plan.active_ranks})
        joining = len(union) > len(ranks.active)

        def check() -> None:
            if ranks.is_active:
                training.finish()  # first, as other checks may fail on some ranks only
                training.step.nonfinite.raise_if_found()
                self._prepared(plan)
                if training.request.values.on_meta and ranks.whole.rank in plan.left_out:
                    check_unused(training.model.parameters())

        run_on_all_ranks(ranks.whole_control, check, doing=DOING)
        if ranks.is_active:
            training.send_masters()
            divides = training.request.stage == 0
            if divides and (joining or not training.engine.strategy.updates_agree):
                self._change(state_plan(plan, ranks.active, 1, even=True))
        if joining:
            training.regroup(union, plan)
        if len(union) > len(plan.active_ranks):
            if training.ranks.is_active and training.request.stage > 0:
                self._change(state_plan(plan, union, training.request.stage))
            training.regroup(plan.active_ranks, plan)
        self._change(plan)
        training.hand_over_speeds(ranks.active[0])
        # The others do not wait for a rank that leaves, so its errors since then reach them here.
        ranks.whole_control.exchange_objects(None, what=DOING)

    def _prepared(self, plan: Plan, world_size: int | None = None) -> tuple[Request, list[Unit]]:
        """The request of another plan, and its units if they are not those of now. Local.

        `world_size`: for how many ranks the plan must be; None: that is known.
        """
        training, old = self._training, self._training.request
        if world_size is not None and plan.left_out != training.ranks.left_out:
            self._check_change_of_ranks()
        request = changed_request(old, plan, world_size or plan.world_size)
        if not training.ranks.is_active:
            return request, []
        engine = training.engine
        engine.reject_open_step("apply_plan()")
        if engine.values.present:
            raise RuntimeError("apply_plan() inside full_parameters(); leave that context first")
        units: list[Unit] = []
        if changes_units(old, request):
            sharded = STRATEGY_CLASSES[request.stage].shards_parameters
            if sharded and any(unit.opaque for unit in engine.units):
                raise ValueError(
                    "apply_plan cannot give units shares of their own if quantised parameters are "
                    "sharded; leave these shares out, or build a new optimizer for this plan"
                )
            request = with_cut(request, training.ranks.control)
            units = units_of(request, training.ranks.control, shards_parameters=sharded)
        check_unit_names(plan, units or engine.units, request.unit_names)
        return request, units

    @property
    def ranks_may_change(self) -> bool:
        """Whether other ranks can be left out than now."""
        return caught(self._check_change_of_ranks) is None

    def _check_change_of_ranks(self) -> None:
        """Check that other ranks can be left out. Local."""
        training = self._training
        if isinstance(training.ranks.communicator, Communicator):
            raise ValueError(
                "apply_plan cannot leave out other ranks with a communicator object, which is for "
                "the ranks of now; build the optimizer with the name of a communicator"
            )
        if training.request.local:
            raise ValueError("apply_plan cannot leave out other ranks with local parameters")
        if training.ranks.is_active and any(unit.opaque for unit in training.engine.units):
            raise ValueError(
                "apply_plan cannot leave out other ranks while quantised parameters are sharded "
                "(stage 3); apply a plan of stage 2 first, or build a new optimizer for this plan"
            )


_RANKS_CHANGE_OUTSIDE = (
    "a plan that leaves out other ranks is due, but step() is called without train_step() or "
    "micro_batches(), where it would take effect. The step was applied, with the plan of before; "
    "use one of them, or apply the plan when no DataLoader worker has drawn batches ahead"
)
