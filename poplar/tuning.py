"""One call from a model to a plan: measure, search, try, agree.

`autotune` profiles all ranks (or takes what the cache has), searches the best plan of each stage,
measures the batches that this choice rests on where nobody did, lets the best plans race, and keeps
what the prediction missed. All ranks end with the same plan or the same error.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, ParamSpec

import torch
import torch.distributed as dist
from torch import nn

from poplar.active_measurement import Inquiry, on_first_rank
from poplar.comm import Group, connect_control
from poplar.plan import STRATEGIES, Plan
from poplar.planner.baselines import POLICIES
from poplar.planner.prediction import describe, predict
from poplar.planner.search import alternatives
from poplar.profile import BatchPoint, ClusterProfile, DeviceProfile
from poplar.profiler.cluster_profiler import Profiler, cache_of
from poplar.profiler.engine_steps import Observation
from poplar.profiler.passes import LossFunction
from poplar.profiler.preserved_state import surroundings_kept
from poplar.profiler.progress import Tell
from poplar.profiler.progress import progress as shown
from poplar.profiler.request import Request
from poplar.trial_race import Race, plainer
from poplar.zero.agreement import raise_on_any_error
from poplar.zero.update import OptimizerFactory

_P = ParamSpec("_P")

CANDIDATES = 2
"""The best plans of so many stages run first."""
_PROFILE_PART = 0.75
"""Of the budget; the rest is for the trials."""
_INQUIRY_PART = 0.3
"""Of what is left for the trials, at most, for measuring what the plan rests on."""
_MUST_MATCH = (
    "model",
    "units",
    "optimizer",
    "compute_dtype",
    "reduce_dtype",
    "example",
    "world_size",
    "device",
)
"""What of a profile's identity decides whether it speaks of this job."""


@dataclass(frozen=True)
class Tuned:
    """What `autotune` found out."""

    plan: Plan
    profile: ClusterProfile
    """With the points that were asked for, and the residuals that the trials left."""
    observations: tuple[Observation, ...]
    """The plans that ran, each over all its turns; empty if the plan comes from the cache or
    nothing was tried."""


def tune(
    model: nn.Module,
    loss_fn: LossFunction,
    example_batch: Any,
    *,
    global_batch: int,
    optimizer_class: OptimizerFactory = torch.optim.AdamW,
    stage: int | Literal["auto"] = "auto",
    policy: str = "exact",
    profile: ClusterProfile | None = None,
    verify: bool = True,
    max_batch: int | None = None,
    memory_limit: int | None = None,
    seconds: float = 60.0,
    max_norm: float | None = 1.0,
    process_group: dist.ProcessGroup | None = None,
    units: Sequence[str | nn.Module | type[nn.Module]] | None = None,
    compute_dtype: torch.dtype | str = "auto",
    reduce_dtype: torch.dtype = torch.float32,
    timeout: timedelta | None = None,
    allow_batch_norm: bool = False,
    cache: bool | str | Path = True,
    progress: bool = True,
    **optimizer_kwargs: Any,
) -> Tuned:
    """`autotune`, with the profile and the trials behind the plan. Collective.

    Args:
        model, loss_fn, example_batch, optimizer_class, max_batch, memory_limit, max_norm,
            process_group, units, compute_dtype, reduce_dtype, timeout, allow_batch_norm, cache,
            progress, optimizer_kwargs: as for `profile_cluster`; give what training will use.
        global_batch: samples behind one optimizer step, over all ranks. No plan changes it.
        stage: a ZeRO stage, or the fastest of those that fit.
        policy: `"exact"`, or a published one to compare with: `"even"`, `"flops"`, `"paper"`.
        profile: plan on this one instead of measuring; it must be of this job.
        verify: measure the batches that decide between plans and that no rank has measured, on
            a given profile too; then run the best plans of the best two stages in turns, a few
            steps each, before deciding; a better one that shows itself meanwhile may join.
        seconds: budget for profile and trials together.

    Returns:
        The same on every rank. The model is afterwards as it was.

    Raises:
        NoPlanFits: no stage fits the ranks' memory; says what is missing on which rank.
        ValueError, TypeError, RuntimeError, RankFailed, CollectiveTimeout: as `profile_cluster`;
            also a profile of another model, dtype or world.
    """
    error = None
    if isinstance(global_batch, bool) or not isinstance(global_batch, int) or global_batch < 1:
        error = ValueError(f"global_batch must be a whole number above 0, got {global_batch!r}")
    elif policy not in POLICIES:
        error = ValueError(f"policy={policy!r} is not known; use one of {sorted(POLICIES)}")
    group = Group.of(process_group, timeout)
    raise_on_any_error(connect_control(group), error, doing="autotune()")
    request = Request(
        model=model,
        loss_fn=loss_fn,
        example=example_batch,
        optimizer_class=optimizer_class,
        optimizer_options=optimizer_kwargs,
        max_batch=_power_of_two_from(global_batch) if max_batch is None else max_batch,
        memory_limit=memory_limit,
        stages=tuple(range(len(STRATEGIES))) if stage == "auto" else (stage,),
        seconds=seconds * _PROFILE_PART,
        max_norm=max_norm,
        units=units,
        compute_dtype=compute_dtype,
        reduce_dtype=reduce_dtype,
        allow_batch_norm=allow_batch_norm,
    )
    profiler = Profiler(request, group, cache_of(cache), show=progress)
    tuner = Tuner(profiler, global_batch=global_batch, policy=policy)
    return tuner.tune(profile, verify=verify)


def _plan_of(tune: Callable[_P, Tuned]) -> Callable[_P, Plan]:
    @functools.wraps(tune)
    def autotune(*args: _P.args, **kwargs: _P.kwargs) -> Plan:
        return tune(*args, **kwargs).plan

    autotune.__name__ = autotune.__qualname__ = "autotune"
    signature = inspect.signature(tune).replace(return_annotation="Plan")
    autotune.__signature__ = signature  # type: ignore[attr-defined]
    autotune.__doc__ = f"""The fastest plan for this model on these ranks. Collective.

        plan = poplar.autotune(model, loss_fn, example_batch, global_batch=512, lr=3e-4)
        print(plan)                              # what it decided and why
        optimizer = HeteroZeroOptimizer(model, torch.optim.AdamW, plan=plan, lr=3e-4)

    Every rank calls it, and gets the same plan or the same error.
    {(tune.__doc__ or "").partition("Collective.")[2]}"""
    return autotune


autotune = _plan_of(tune)


class Tuner:
    """Searches on what a profiler measured and tries the result; its methods are collective."""

    def __init__(self, profiler: Profiler, *, global_batch: int, policy: str) -> None:
        self.profiler = profiler
        self.control = profiler.control
        self.global_batch = global_batch
        self.policy = policy
        self._seconds = profiler.request.seconds / _PROFILE_PART

    def tune(self, given: ClusterProfile | None = None, *, verify: bool = True) -> Tuned:
        """The best plan on `given`, or on the profiler's own profile."""
        raise_on_any_error(self.control, self._complaint(given), doing="autotune()")
        self._check_same_on_all_ranks(given, verify)
        ends = time.perf_counter() + self._seconds
        profile = self.profiler.profile() if given is None else self._within_limits(given)
        known = self.profiler.verified.get(self._key) if given is None else None
        if known is not None:
            return Tuned(known, profile, ())
        plans = self._search(profile)
        if not verify:
            return self._agreed(Tuned(plans[0], profile, ()))
        with (
            shown(self.profiler.show) as tell,
            surroundings_kept(self.profiler.request.model, self.profiler.device),
        ):
            if self.policy == "exact":
                inquiry = Inquiry(self.profiler, self._search)
                profile, plans = inquiry.settled(
                    profile, plans, seconds=_INQUIRY_PART * self._left(ends), tell=tell
                )
            tuned = self._try(profile, plans, self._left(ends), tell)
        if given is None:
            self.profiler.verified[self._key] = tuned.plan
            self.profiler.keep(tuned.profile)
        return self._agreed(tuned)

    @property
    def _key(self) -> str:
        """What a verified plan answers, beside the profile."""
        return json.dumps([self.global_batch, self.policy])

    def _search(self, profile: ClusterProfile) -> tuple[Plan, ...]:
        """The best plans of the best stages."""
        request = self.profiler.request
        return on_first_rank(
            self.control,
            lambda: alternatives(
                profile,
                global_batch=self.global_batch,
                stages=request.stages,
                policy=self.policy,
            )[:CANDIDATES],
        )

    def _left(self, ends: float) -> float:
        """Seconds until then, by the clock of rank 0, for all."""
        left = ends - time.perf_counter()
        return self.control.exchange_objects(left, what="the budget")[0]

    def _try(
        self, profile: ClusterProfile, plans: Sequence[Plan], seconds: float, tell: Tell
    ) -> Tuned:
        race = Race(
            self.profiler,
            profile,
            lambda refined: self._search(refined)[0],
            seconds=seconds,
            rebalances=self.policy == "exact",
        )
        best = race.winner(self._contenders(profile, plans), tell)
        profile = race.refined(exactly=best)
        best = describe(profile, best, predict(profile, best), self.policy)
        return Tuned(best, profile, race.trials.observations())

    def _contenders(self, profile: ClusterProfile, plans: Sequence[Plan]) -> list[Plan]:
        """And their plainer sisters."""
        sisters = [plainer(profile, plan) for plan in plans] if self.policy == "exact" else []
        return list(dict.fromkeys([*plans, *sisters]))

    def _within_limits(self, profile: ClusterProfile) -> ClusterProfile:
        """What the ranks were told to keep to, if that is less than was measured."""
        request = self.profiler.request
        mine = (request.max_batch, request.memory_limit)
        everyones = self.control.exchange_objects(mine, what="the ranks' limits")
        return replace(
            profile,
            devices=tuple(
                _limited(device, *limits)
                for device, limits in zip(profile.devices, everyones, strict=True)
            ),
        )

    def _agreed(self, tuned: Tuned) -> Tuned:
        """All ranks hold the same plan now; if they did not, none would go on."""
        digests = self.control.exchange_objects(tuned.plan.digest(), what="agreeing on the plan")
        assert len(set(digests)) == 1, f"the ranks arrived at different plans: {digests}"
        return tuned

    def _check_same_on_all_ranks(self, given: ClusterProfile | None, verify: bool) -> None:
        """What ranks would otherwise part ways over, each waiting for the others."""
        mine = {
            "global_batch": self.global_batch,
            "policy": self.policy,
            "verify": bool(verify),
            "profile": None if given is None else _digest(given),
        }
        everyones = self.control.exchange_objects(mine, what="autotune()")
        for key in mine:
            values = [own[key] for own in everyones]
            if any(value != values[0] for value in values):
                raise ValueError(
                    f"the ranks disagree on {key}: {dict(enumerate(values))}; call autotune() "
                    "with the same arguments on every rank"
                )

    def _complaint(self, given: ClusterProfile | None) -> Exception | None:
        if given is None:
            return None
        size = self.control.group.size
        if given.world_size != size:
            return ValueError(
                f"the profile is of {given.world_size} ranks, but there are {size}; measure again "
                "with profile_cluster()"
            )
        mine = self.profiler.agreed.identity
        for key in _MUST_MATCH:
            if key in given.identity and given.identity[key] != mine[key]:
                return ValueError(
                    f"the profile is of another {key.replace('_', ' ')}: measured "
                    f"{given.identity[key]!r}, here {mine[key]!r}; measure again with "
                    "profile_cluster()"
                )
        return None


def _digest(profile: ClusterProfile) -> str:
    content = json.dumps(profile.to_dict(), sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:12]


def _limited(
    device: DeviceProfile, max_batch: int | None, memory_limit: int | None
) -> DeviceProfile:
    points = [p for p in device.points if max_batch is None or p.batch <= max_batch]
    known = points[-1].batch if points else 0
    if max_batch is not None and known < max_batch < device.max_batch:
        low, high = device.seconds_within(max_batch)
        points.append(
            BatchPoint(
                batch=max_batch,
                seconds=device.seconds(max_batch),
                activation_bytes=round(device.activation_bytes(max_batch)),
                spread_seconds=(high - low) / 4.0,  # it was not measured
            )
        )
    memory = device.memory_bytes if memory_limit is None else min(device.memory_bytes, memory_limit)
    return replace(device, points=tuple(points), memory_bytes=memory)


def _power_of_two_from(number: int) -> int:
    """The next power of two: global batches that differ a little share a profile in the cache."""
    return 1 << (number - 1).bit_length()
