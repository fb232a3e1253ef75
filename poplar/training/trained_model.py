"""`TrainedModel`: the ranks that train a model, their plan, and the engine that runs it."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from poplar.checkpoint.state_dicts.model_state import ModelState
from poplar.checkpoint.state_dicts.optimizer_state import OptimizerState
from poplar.comm import connect
from poplar.system.out_of_memory import free_cached_memory
from poplar.training.active_ranks import ActiveRanks, state_plan
from poplar.training.left_out_model import LeftOutModel
from poplar.training.moved_engine import follow_plan, replace_engine, send_masters
from poplar.training.regrouped_engine import leave_engine, regroup_engine
from poplar.values.errors import agreed
from poplar.values.plan import Plan
from poplar.zero.absent_parameter import mark_present
from poplar.zero.checks.model_checks import register_owner
from poplar.zero.checks.model_structure import ModelStructure
from poplar.zero.checks.step_checks import StepChecks
from poplar.zero.checks.written_casts import WrittenCasts
from poplar.zero.collective_calls import CollectiveCalls, LeftOutCalls
from poplar.zero.engine import Engine
from poplar.zero.grad_scaler import GradScaler
from poplar.zero.held_memory import smaller_batches_message
from poplar.zero.input_cast import cast_inputs
from poplar.zero.micro_batch_loss import LossFunction
from poplar.zero.micro_batches import BatchSplitter, Weight
from poplar.zero.model_hook import do_nothing
from poplar.zero.setup import (
    BUILDING,
    STRATEGY_CLASSES,
    Request,
    build_engine,
    new_update,
    prepare_without_engine,
    with_cut,
)
from poplar.zero.steps.step import SpeedFollower, Step
from poplar.zero.steps.step_hooks import has_hooks
from poplar.zero.steps.step_settings import StepSettings, settings_in
from poplar.zero.unit import Unit
from poplar.zero.update import ShardedUpdate


class TrainedModel:
    """A model in training on this rank. One optimizer owns it.

    It has the engine with its update, steps and checks, and says for which ranks (`ranks`) and plan
    (`request`) they are. `PlanChanges` alone calls what changes these two. On a rank that the plan
    leaves out there is no engine: using it, or what belongs to it, raises.
    """

    state: Mapping[Any, Any]
    """By trained parameter, the optimizer state that this rank has."""
    left_out_model: LeftOutModel
    """On a rank that is left out: the model there."""
    scaler: GradScaler | None = None
    """The loss scaler of a model with fp16 parameters, for steps without one of the user."""
    _scales_loops = False
    """An integration scales the losses of its loop by `scaler`."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        request: Request,
        ranks: ActiveRanks,
    ) -> None:
        """Build the engine. Collective over all ranks.

        The request is what all ranks have agreed on, with the plan of the active ones. The param
        groups of the optimizer, which keeps this object alive and not the other way around, get all
        settings of their classes.
        """
        self._optimizer, self.model = weakref.ref(optimizer), request.model
        self.ranks = ranks
        self.largest_batches: dict[int, int] = {}
        """By rank, the largest micro-batch to which running out of memory has reduced it."""
        self.unfinished: dict[object, Callable[[], None]] = {}
        """As in `TrainingParts`."""
        self._follower: SpeedFollower | None = None
        self._run_by(with_cut(request, ranks.control) if ranks.is_active else request)
        if ranks.is_active:
            self.calls = CollectiveCalls(ranks.group, do_nothing, ranks.announcements)
            with self.calls.running(BUILDING):
                planned = request.plan.transport if request.plan is not None else None
                given = ranks.communicator, request.device
                comm = connect(ranks.group, *given, planned=planned)
                check = _weak_method(self.check_model)
                engine, update = build_engine(self.request, comm, ranks.control, check)
            self._use_settings_of(update)
            self._train_by(engine, update)
            self.calls.announce(BUILDING)
        else:
            self._be_left_out()
            self.calls.call(BUILDING, do_nothing)
            prepare_without_engine(request)
            self._use_settings_of(new_update(request, []))

    # What belongs to a plan.

    def _run_by(self, request: Request) -> None:
        """Note the request with the plan of now. Local."""
        self.request = request
        own = request.plan
        self.plan = None if own is None else own.beside(self.ranks.left_out)
        """Of all ranks; `request` has that of the active ones."""

    @property
    def splitter(self) -> BatchSplitter:
        """Splits batches by the plan."""
        every_pass = STRATEGY_CLASSES[self.request.stage].reduces_every_pass
        return BatchSplitter(self.request.plan, every_pass, self.largest_batches)

    def use_smaller_batches(self, too_large: Mapping[int, int]) -> None:
        """Halve micro-batches that did not fit, for this step and later ones. Equal on all ranks.

        `too_large` has their samples, by rank.
        """
        limits, group = {r: batch // 2 for r, batch in too_large.items()}, self.ranks.group
        for limited, most in limits.items():
            self.largest_batches[limited] = min(most, self.largest_batches.get(limited, most))
        if self.plan is not None:
            plan = self.plan.with_largest_batches(limits).of_active_ranks()
            self._run_by(replace(self.request, plan=plan))
        free_cached_memory(self.engine.trained[0].device)
        if group.rank == 0 or group.name in limits:
            warnings.warn(smaller_batches_message(too_large), stacklevel=3)

    def send_masters(self) -> None:
        """Give all ranks the fp32 values, if they compute with others. Collective then."""
        if self.engine.strategy.sends_differences:
            send_masters(self.engine, self.update)

    def follow_speeds(self, follower: SpeedFollower | None) -> None:
        """Report the times of later steps to `follower`, which all ranks have, or none. Local."""
        self._follower = follower
        if self.ranks.is_active:
            self.step.follow_speeds(follower)

    def hand_over_speeds(self, first: int) -> None:
        """Follow the speeds of the ranks that train now. Collective over all ranks.

        `first` of the ranks that trained before knows the speeds of all.
        """
        if self._follower is not None:
            what = "the speeds of the ranks"
            known = self.ranks.whole_control.exchange_objects(self._follower.known, what=what)
            self._follower.follow_ranks(known[first])

    def _measure(self) -> None:
        if self._follower is not None:
            self._follower.measure()

    def _obey(self, order: Any) -> None:
        assert self._follower is not None, "all ranks have one, and only theirs give orders"
        self._follower.obey(order)

    # What belongs to an engine.

    def _train_by(self, engine: Engine, update: ShardedUpdate) -> None:
        """Train by the first engine of a group of ranks. Local."""
        plan, model, ranks = self.request.plan, self.model, self.ranks
        optimizer, request = self.optimizer, self.request
        has_fp16 = any(parameter.dtype is torch.float16 for parameter in model.parameters())
        if self.scaler is None and has_fp16:
            self.scaler = GradScaler(engine.trained[0].device.type)
        self.update = update
        self.checks = StepChecks(
            model,
            ranks.control,
            looking=0 if plan is None else max(range(plan.world_size), key=plan.samples),
            allow_forward_state=request.allow_forward_state,
            flats=engine.flats,
            strategy=engine.strategy,
        )
        if type(self.calls) is not CollectiveCalls:
            self.calls = CollectiveCalls(ranks.group, do_nothing)
        self.calls.follow(ranks.group, ranks.announcements)
        self._use_engine(engine)
        groups = optimizer.param_groups
        self._structure = ModelStructure(model, groups)
        named = dict(model.named_parameters()) if ranks.group.rank == 0 else {}
        self._casts = WrittenCasts({n: p for n, p in named.items() if request.is_rounded(p)})

    def _use_engine(self, engine: Engine) -> None:
        """Train by this engine, whose flat parameters the update and the checks have. Local."""
        self.engine, update = engine, self.update
        self.state = OptimizerState(engine, update)
        self.step = Step(engine, update, self.checks, self.request.on_nonfinite)
        self.step.follow_speeds(self._follower)
        self.calls.serve(engine.hooks.before_call, self.step.stop)
        engine.add_changes(ModelState(engine, update).register())
        named = list(self.model.named_parameters())
        self._unregister = register_owner(named, self.optimizer, engine.changes)

    def _be_left_out(self) -> None:
        """Have no engine, and make the calls of the active ranks. Local."""
        self.scaler, whole, request = None, self.ranks.whole, self.request
        # Frozen parameters keep their values, unless they are sharded or were never made.
        loses_all = request.values.on_meta or STRATEGY_CLASSES[request.stage].shards_parameters
        old = [
            parameter
            for parameter in self.model.parameters()
            if parameter.numel() and (loses_all or id(parameter) in request.group_of)
        ]
        self.left_out_model = LeftOutModel(self.model, whole.name, old)
        self._have_no_engine(self.left_out_model.no_state)
        hooks = [
            *self.left_out_model.register(),
            *cast_inputs(self.model, request.cast_to, request.unit_names),
        ]
        self._unregister = register_owner([], self.optimizer, hooks)
        assert self.ranks.announcements is not None
        checks = {"evaluate()": self._check_no_batches}
        ends: dict[str, Callable[[], Any]] = {"full_gradients()": dict}
        self._has_dropped_batches = False
        given = whole, self.ranks.announcements, checks, ends
        self.calls = LeftOutCalls(*given, run=self._obey, idle=self._measure)

    def _check_no_batches(
        self, _: object, loss_fn: LossFunction, loader: Iterable[Any], weight: Weight | None = None
    ) -> None:
        """Check, for `evaluate` on a rank that is left out, that it has no batches.

        They are dropped if the rank was left out by itself, which the user's loop does not know.
        """
        if self._has_dropped_batches or next(iter(loader), None) is None:
            return
        if self._follower is None or not self._follower.changes_ranks:
            raise ValueError(
                f"evaluate() on rank {self.ranks.whole.name}, which the plan leaves out, so it "
                "cannot evaluate its batches; divide the data among plan.active_ranks, and pass an "
                "empty loader here"
            )
        self._has_dropped_batches = True
        warnings.warn(
            f"rank {self.ranks.whole.name} is left out by follow_drift, so evaluate() drops its "
            "batches while it is: the mean is over those of the other ranks. To evaluate all data, "
            "divide them among optimizer.plan.active_ranks before each evaluation, or pass "
            "leave_out='never' to follow_drift",
            stacklevel=5,
        )

    def _have_no_engine(self, why: str) -> Any:
        missing: Any = _NoEngine(why)
        self.state = self.engine = self.update = self.step = self.checks = missing
        self._unregister = do_nothing
        return missing

    def detach(self) -> None:
        """Drop the model and the engine without changing the parameters. Every later call raises.

        No part of the state lives as long as the optimizer then.
        """
        self._unregister()
        for parameter in self.model.parameters():
            mark_present(parameter)
        self.calls = self._have_no_engine("this optimizer has released its model; build a new one")
        self.ranks.close()

    # What belongs to the user's optimizer.

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The user's, with the param groups and hooks."""
        optimizer = self._optimizer()
        assert optimizer is not None, "it owns this object"
        return optimizer

    def _use_settings_of(self, update: ShardedUpdate) -> None:
        """Give the optimizer all settings of its classes, which schedulers read. Local."""
        self.optimizer.defaults.update(update.inners[0].defaults)
        self._use_settings(update.outer_groups(self.request.groups))

    def _use_settings(self, groups: Iterable[Mapping[str, Any]]) -> None:
        for group, settings in zip(self.optimizer.param_groups, groups, strict=True):
            group.update(settings_in(settings))

    def settings(self, **further: Any) -> StepSettings:
        """What must be equal on all ranks in this step; `further` as for `StepSettings`."""
        optimizer, update = self.optimizer, self.update
        given: dict[str, Any] = {"updates": update.updates, "later": update.later_settings}
        given |= {"has_hooks": has_hooks(optimizer), **further}
        return StepSettings(optimizer.param_groups, **given)

    def with_own_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """A state dict with the loss scaler, if any, and the steps that seed compression."""
        strategy, own = self.engine.strategy, dict[str, Any]()
        if self.scaler is not None:
            own["scaler"] = self.scaler.state_dict()
        if strategy.communication.compresses:
            own["steps"] = strategy.steps
        return {**state, "poplar": own} if own else state

    # The loss scale.

    def scale_loops(self) -> None:
        """Let an integration scale the losses of its loop, by `scaled_loss`. Local, on all ranks.

        `clip_grad_norm_`, `full_gradients` and `step` of the optimizer unscale the gradient then.
        """
        self._scales_loops = True

    @property
    def step_scaler(self) -> GradScaler | None:
        """By which Poplar scales the losses of this step; None: nothing does, or the user does."""
        return self.engine.step.scaler or (self.scaler if self._scales_loops else None)

    def scaled_loss(self, loss: Tensor) -> Tensor:
        """The loss of a pass in the loop of an integration, scaled if the model has a scaler."""
        self.checks.look_at_graph(loss, stacklevel=3)
        scaler = self.step_scaler
        return loss if scaler is None else scaler.scale(loss)

    def unscale(self) -> None:
        """Unscale the gradient, once per step, if Poplar has scaled the losses. Collective."""
        scaler, optimizer = self.step_scaler, self.optimizer
        if scaler is None or self.engine.step.is_unscaled:
            return
        scaler.abandon(optimizer)  # an earlier step, if it failed after it had been unscaled
        scaler.unscale_(optimizer)
        self.engine.step.unscale()

    def check_scaled(self) -> None:
        """Check, before an update, that the gradient has been unscaled if it had to be scaled."""
        is_scaled = self.step_scaler is not None or self.engine.step.found_inf is not None
        if self.scaler is not None and not is_scaled:
            raise agreed(RuntimeError(_NOT_SCALED))

    def check_model(self) -> None:
        """Check, before a step, that the optimizer still trains what it was built for."""
        self.checks.open_step()
        self.checks.check_structure(self._structure, self.optimizer.param_groups)
        self.update.adopt_replaced_data(self.engine.flats)
        self._casts.look()

    def expect_artificial_data(self) -> None:
        """Do not warn of the data and the mode of the model in the first step; for measurements."""
        if self.ranks.is_active:
            self.checks.expect_artificial_data()

    # Changes of the plan and of the ranks.

    def change_plan(self, request: Request, units: Sequence[Unit]) -> None:
        """Change to a plan of the same ranks that has been checked on all. Collective over them.

        `units` are without values, if the plan needs others than now; else there are none.
        """
        self.step.nonfinite.raise_if_found()
        engine, update = self.engine, self.update
        if units:
            self._unregister()
            check = _weak_method(self.check_model)
            engine = replace_engine(engine, update, request, units, check)
            self.checks.follow(engine.flats, engine.strategy)
            self._use_engine(engine)
        elif request.plan is not None:
            follow_plan(engine, update, request.plan)
        self._run_by(request)

    def expect_plan(self, plan: Plan) -> None:
        """Note, on a rank that a plan leaves out, the plan of the active ranks. Local."""
        self._run_by(replace(self.request, plan=plan.of_active_ranks()))

    def finish(self) -> None:
        """Finish what only the ranks that train now can. Collective over them."""
        for finish in list(self.unfinished.values()):
            finish()

    def regroup(self, active: Sequence[int], plan: Plan) -> None:
        """Let other ranks train, of which those that do now have all state. Collective over all.

        Args:
            active: either some of those that train now, or all of these and others.
            plan: that comes next, of all ranks.
        """
        before, old, update = self.ranks, self.engine, self.update
        everyone = range(before.whole.size)
        self.ranks = before.changed(tuple(rank for rank in everyone if rank not in active))
        self._unregister()
        if not self.ranks.is_active:
            if before.is_active:
                leave_engine(old, on_meta=self.request.values.on_meta)
                self.calls.follow(before.whole, None)
            self._be_left_out()
            return
        joining = [at for at, rank in enumerate(active) if rank in before.left_out]
        sender = next(at for at in range(len(active)) if at not in joining)
        own = self._common() if before.is_active else None
        ranks, request = self.ranks, self.request
        common = ranks.control.exchange_objects(own, what="apply_plan()")[sender]
        assert common is not None
        given = ranks.communicator, request.device
        comm = connect(ranks.group, *given, planned=common["transport"])
        plan = state_plan(plan, active, common["stage"], even=True)
        self._run_by(replace(request.under(plan), cut=common["cut"]))
        engine, update = regroup_engine(
            old if before.is_active else None,
            update if before.is_active else None,
            self.request,
            comm,
            ranks.control,
            _weak_method(self.check_model),
            joining=joining,
            sender=sender,
        )
        self._train_by(engine, update)
        if not before.is_active:
            self._take(common)

    def _common(self) -> dict[str, Any]:
        """What is equal on all active ranks, beside parameters and the state of their elements."""
        return {
            "stage": self.request.stage,
            "cut": self.request.cut,
            "transport": self.request.plan and self.request.plan.transport,
            "updates": (self.update.updates, self.update.later_settings),
            "groups": list(map(settings_in, self.optimizer.param_groups)),
            "largest batches": self.largest_batches,
            "scaler": self.scaler and self.scaler.state_dict(),
        }

    def _take(self, common: Mapping[str, Any]) -> None:
        self._use_settings(common["groups"])
        self.update.continue_after(*common["updates"])
        self.largest_batches = dict(common["largest batches"])
        if self.scaler is not None and common["scaler"]:
            self.scaler.load_state_dict(common["scaler"])


class _NoEngine:
    """Replaces the engine after `release`, and on a rank that is left out."""

    def __init__(self, why: str) -> None:
        self.why = why

    def _raise(self, *_: object) -> Any:
        raise RuntimeError(self.why)

    # `__len__` must raise too: torch tests `if optimizer.state:`, and would call `step`.
    __getattr__ = __len__ = __iter__ = __getitem__ = _raise


def _weak_method(method: Callable[[], None]) -> Callable[[], None]:
    """A function that calls a method while its object exists, and does not keep it alive."""
    reference = weakref.WeakMethod(method)

    def call() -> None:
        bound = reference()
        if bound is not None:
            bound()

    return call


_NOT_SCALED = (
    "the model has fp16 parameters, so small gradients become 0 without a loss scale, and this "
    "loop has none: make one scaler = poplar.GradScaler(device_type), call "
    "scaler.scale(loss).backward() in each pass, then scaler.step(optimizer) in place of "
    "optimizer.step(), and scaler.update(). optimizer.train_step() scales by itself"
)
