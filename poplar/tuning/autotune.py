"""`autotune`: from a model to a plan in one call.

Profile all ranks (or use the cache), search the best plans, measure the batch sizes of the chosen
plan that the profile lacks, run the best plans in turns, and choose the fastest.
"""

from __future__ import annotations

import gc
import json
import math
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch
from torch import nn

from poplar.comm import Group
from poplar.planner.calibration import change_of_speeds, noise_of_speeds, refine
from poplar.planner.memory_shortfall import NoPlanFits
from poplar.planner.prediction import describe, fits, predict, unmeasured_batches
from poplar.planner.search import CHOICES, Choice, Sends, alternatives, check_choices, search
from poplar.planner.simple_plans import simplified
from poplar.planner.what_if import at_worst
from poplar.profiler.batch_curves import with_measured
from poplar.profiler.cluster_profiler import Profiler
from poplar.profiler.job import Job, digest
from poplar.profiler.progress import Report, show_progress
from poplar.profiler.session import Session
from poplar.profiler.trial_runs import OutOfMemoryInTrial
from poplar.tuning.profile_cluster import CachedProfile
from poplar.values.errors import agreed, equal_on_all_ranks, is_agreed
from poplar.values.observation import Observation, Trials
from poplar.values.plan import Plan
from poplar.values.profile import BatchPoint, ClusterProfile
from poplar.values.schema import positive_count
from poplar.zero.checks.loss_mean import wrong_weight
from poplar.zero.collective_calls import new_group
from poplar.zero.micro_batch_loss import LossFunction
from poplar.zero.micro_batches import Loss, Weight
from poplar.zero.setup import stages_of

PROFILE_PART = 0.75
"""Part of the time budget for the profile; the rest is for measuring planned batches and trials."""
POINTS_PART = 0.3
"""Part of the rest, at most, for measuring planned batches."""
ROUNDS = 4
"""Rounds of measuring the batches of the best plan and searching again. On random clusters with
stepped curves, four rounds removed 94 % of the time that wrong plans cost, three rounds 88 %."""
_PASSES_PER_POINT = 16
"""Passes that measuring one batch takes, about, those of its reference included."""
SIMPLER = 0.1
"""A simpler plan is timed too, if it is predicted to be slower by at most this fraction."""
CANDIDATES = 2
"""Plans that run at least one turn, whatever the budget, of as many stages."""
CONTENDERS = 3
"""Plans in one turn, at most."""
TURNS = 7
"""Turns of plans that are equally fast. The time budget is for so many."""
LEAST_TURNS = 3
"""No plan joins so late that it would have fewer turns, and a plan without rivals has no more."""
SURE = 0.01
"""Relative standard error of the step times above which trials go on until time is up."""
MOST_TURNS = 40
TURN_STEPS = range(3, 16)
"""Steps of a plan in a turn: as many as the budget allows."""
CLOSE = 0.04
"""A plan that is slower than the fastest by more than this fraction is dropped."""
WORTH_A_TRIAL = 5e-3
"""A plan joins if it is predicted to be faster than all others by more than this fraction."""
UNSEEN = 0.05
"""Part of a rank's memory that plans leave free in addition, after they have run out of it."""
_MUST_MATCH = (
    "model",
    "units",
    "optimizer",
    "compute_dtype",
    "reduce_dtype",
    "length_distribution",
    "example",
    "device",
    "cores",
    "quota",
    "threads",
    "backend",
)
"""Entries of a profile's identity that must be those of this job. The structure is not among them:
it has the counters of modules, and forwards since the profile may have changed them."""


@dataclass(frozen=True)
class Tuned:
    """The result of `tune`."""

    plan: Plan
    profile: ClusterProfile
    """The profile with the batch sizes that were measured, calibrated to the trials."""
    observations: tuple[Observation, ...]
    """The plans that ran, medians over their turns; empty if none ran."""
    cast_to: torch.dtype | None = None
    """Dtype that the engine casts the model to; None: it keeps the dtypes."""


@dataclass(frozen=True, kw_only=True)
class TuningJob(Job):
    """A job with the arguments that only `autotune` has, which documents them."""

    global_batch: int
    policy: str = "exact"
    recompute: Choice = "auto"
    factored: Choice = "auto"
    host_state: Choice = "auto"
    leave_out: Choice = "auto"
    communication: Sends = "exact"
    profile: ClusterProfile | None = None
    verify: bool = True
    weight: Weight | None = None
    loss: Loss = "mean"

    def check(self) -> None:
        if positive_count(self.global_batch) is None:
            raise ValueError(f"global_batch must be an integer above 0, got {self.global_batch!r}")
        check_choices(self.choices)
        super().check()

    def must_be_equal(self) -> dict[str, Any]:
        return {
            **super().must_be_equal(),
            "global_batch": self.global_batch,
            **self.choices,
            "verify": bool(self.verify),
            "profile": None if self.profile is None else digest(self.profile.to_dict()),
        }

    @property
    def profile_seconds(self) -> float:
        return PROFILE_PART * self.seconds

    @property
    def choices(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in CHOICES}

    @property
    def request(self) -> dict[str, Any]:
        """The arguments of the search, beside the profile."""
        return {"global_batch": self.global_batch, "stages": self.stages, **self.choices}


OPTIONS = frozenset({"stage", *(each.name for each in fields(TuningJob))})
"""Names of the arguments of `autotune`, without the optimizer's."""


def autotune(
    model: nn.Module,
    loss_fn: LossFunction,
    example_batch: Any,
    *,
    global_batch: int,
    stage: int | Literal["auto"] = "auto",
    **options: Any,
) -> Plan:
    """The fastest plan for this model on these ranks. Collective.

        plan = poplar.autotune(model, loss_fn, example_batch, global_batch=512, lr=3e-4)
        print(plan)                              # the plan and its prediction
        optimizer = HeteroZeroOptimizer(model, torch.optim.AdamW, plan=plan, lr=3e-4)

    Every rank calls it, and gets the same plan or an error. The model is unchanged afterwards.

    Args:
        model, loss_fn, example_batch: as for `profile_cluster`.
        global_batch: samples behind one optimizer step, over all ranks. No plan changes it.
        stage: a ZeRO stage, or "auto" for the fastest stage that fits.
        options: those below and those of `profile_cluster` but `stages`, as training will use them;
            all others are options of the optimizer.

    Keyword Args:
        policy, recompute, factored, host_state: as for `search`.
        leave_out: "auto" (the default): with policy "exact", ranks are left out (`Plan.left_out`)
            if no plan fits otherwise, or if the step is shorter by more than 4 % without them, in
            the prediction and in trials in turns with the best plan of all ranks. "never": all
            ranks train.
        communication: "exact" (the default), or "int8" or "int4" for slow networks: the precision
            in which ranks send (`Plan.communication`). The gradient is then not exact. "auto":
            fewer bits only where they make the step clearly faster, in the prediction and in
            trials in turns with the best exact plan. Or a `Communication`.
        profile: use this profile of the same job instead of measuring, with no more memory than is
            available now.
        verify: measure the batch sizes of the chosen plan that were not profiled, then time the
            best plans of the best two stages in turns. A better plan that the search finds with
            these times joins. Default: True.
        weight, loss: as for `train_step`. They change no plan: a warning says if the loss of the
            example is not the mean over what `weight` counts.
        seconds: time budget for profile and trials together, without compilation and tuning of
            kernels; default: 60.

    Raises:
        NoPlanFits: no stage fits the ranks' memory; says how much is missing on which rank.
        ValueError, TypeError, RuntimeError, RankFailed, CollectiveTimeout: as `profile_cluster`;
            also a profile of another model, dtype or world size.
    """
    return tune(
        model, loss_fn, example_batch, global_batch=global_batch, stage=stage, **options
    ).plan


def tune(
    model: nn.Module,
    loss_fn: LossFunction,
    example_batch: Any,
    *,
    global_batch: int,
    stage: int | Literal["auto"] = "auto",
    **options: Any,
) -> Tuned:
    """The plan of `autotune`, with the profile and the trial runs behind it. Collective.

    Args and errors are those of `autotune`.
    """
    if stage != "auto":
        options["stages"] = (stage,)
    with new_group(options.get("process_group"), options.get("timeout"), "autotune()") as group:
        job = TuningJob.of(model, loss_fn, example_batch, global_batch=global_batch, **options)
        return tune_job(job, group)


def tune_job(job: TuningJob, group: Group) -> Tuned:
    """The plan of a job, with the profile and the trial runs behind it. Collective."""
    if job.max_batch is None and positive_count(job.global_batch):
        # The next power of two: global batches that differ a little share a profile in the cache.
        job = replace(job, max_batch=1 << (job.global_batch - 1).bit_length())
    tuner = Tuner(CachedProfile(Profiler(job, group)), job)
    try:
        return replace(tuner.tune(), cast_to=tuner.session.cast_to)
    except NoPlanFits as error:
        error.allow_only(stages_of(tuner.session.setup.classes))
        raise


def _warn_of_wrong_weight(session: Session, weight: Weight | None) -> None:
    """Warn on the first rank if this is the wrong weight for the loss."""
    job = session.job
    if session.group.rank == 0 and session.model_is_on_device:
        found = wrong_weight(job.loss_fn, job.model, job.example, weight=weight)
        if found is not None:
            warnings.warn(found, stacklevel=4)


class Tuner:
    """One job on its ranks; all methods are collective."""

    def __init__(self, cached: CachedProfile, job: TuningJob) -> None:
        self.cached, self.job = cached, job
        self.profiler = cached.profiler
        self.session = cached.profiler.session
        self._refused: set[Plan] = set()
        """Plans that failed on all ranks in a trial, for another reason than memory."""

    def tune(self) -> Tuned:
        """The best plan on the given profile, or on one from the cache or measured now."""
        job, given = self.job, self.job.profile
        ends = time.perf_counter() + job.seconds
        profile = self.cached.profile() if given is None else self._limited_profile(given)
        # Compilation may have taken longer than the whole budget.
        ends = max(ends, time.perf_counter() + (1.0 - PROFILE_PART) * job.seconds)
        if job.loss == "mean":
            _warn_of_wrong_weight(self.session, job.weight)
        # What the plan depends on beside the profile.
        key = json.dumps([job.global_batch, *job.choices.values()], default=repr)
        known = self.cached.plans.get(key) if given is None else None
        if known is not None and fits(profile, known):
            return Tuned(known, profile, ())
        plans = self._search(profile)
        if plans[0].left_out:
            return Tuned(plans[0], profile, ())
        if not job.verify:
            return Tuned(self._without_slow_ranks(profile, plans[0]), profile, ())
        left = self._seconds_left(ends)
        with show_progress(self.cached.show, left) as report, self.session.measuring():
            if job.policy == "exact":
                until = time.perf_counter() + POINTS_PART * self._seconds_left(ends)
                profile, plans = self._measure_planned_batches(profile, plans, until, report)
            tuned = self._fastest(profile, plans, self._seconds_left(ends), report)
            tuned = self._exact_if_as_fast(tuned, self._seconds_left(ends), report)
            tuned = self._fastest_ranks(tuned, self._seconds_left(ends), report)
        if given is None:
            self.cached.plans[key] = tuned.plan
            self.cached.save(tuned.profile)
        return tuned

    def _search(self, profile: ClusterProfile) -> tuple[Plan, ...]:
        """The best plans of the best stages; with policy "exact" also a simpler one of the first.

        The search trusts the profile. Where noise suggests to cut the samples into many passes,
        the simpler plan shows in the trial runs whether that is worth it.
        """
        job = self.job

        def best() -> tuple[Plan, ...]:
            of_all_ranks = {**job.request, "leave_out": "never"}
            try:
                plans = alternatives(profile, **of_all_ranks)[:CANDIDATES]
            except NoPlanFits:
                if job.leave_out == "never":
                    raise
                return alternatives(profile, **job.request)[:1]
            simpler = [simplified(profile, plans[0], SIMPLER)] if job.policy == "exact" else []
            return tuple(dict.fromkeys([*plans, *simpler]))

        return self.session.on_first_rank(best, "the search")

    def _without_slow_ranks(self, profile: ClusterProfile, plan: Plan) -> Plan:
        """A plan that leaves ranks out, if it is predicted to be clearly faster; else this one."""

        def find() -> Plan:
            if self.job.leave_out == "never":
                return plan
            try:
                found = search(profile, **self.job.request)
            except NoPlanFits:  # in the memory that the trials have shown
                return plan
            steps = [predict(profile, each).step_seconds for each in (found, plan)]
            return found if found.left_out and (1.0 + CLOSE) * steps[0] < steps[1] else plan

        return self.session.on_first_rank(find, "the choice of ranks")

    def _fastest_ranks(self, tuned: Tuned, seconds: float, report: Report) -> Tuned:
        """The result, or a plan that leaves ranks out and is clearly faster in trials in turns."""
        found = self._without_slow_ranks(tuned.profile, tuned.plan)
        if not found.left_out:
            return tuned
        return self._in_turns(tuned, found, tuned.plan, seconds, report)

    def _exact_if_as_fast(self, tuned: Tuned, seconds: float, report: Report) -> Tuned:
        """With "auto", the result if it is clearly faster in trials in turns than an exact plan.

        Also if no exact plan fits in the memory that the trials have shown: a warning says so.
        """
        if self.job.communication != "auto" or not tuned.plan.communication.compresses:
            return tuned
        request = {**self.job.request, "leave_out": "never", "communication": "exact"}

        def find() -> Plan | None:
            try:
                return search(tuned.profile, **request)
            except NoPlanFits:
                warnings.warn(
                    "autotune: trials ran out of memory, and no plan with exact communication fits "
                    "in what is left. The plan sends "
                    f"{tuned.plan.communication.gradients} gradients",
                    stacklevel=1,
                )
                return None

        exact = self.session.on_first_rank(find, "the search")
        if exact is None:
            return tuned
        return self._in_turns(tuned, tuned.plan, exact, seconds, report)

    def _in_turns(
        self, tuned: Tuned, found: Plan, other: Plan, seconds: float, report: Report
    ) -> Tuned:
        """The result with a plan if it is clearly faster than another one, else with the other."""
        trials, both = Trials(_noise(tuned.profile)), [found, other]
        for _ in range(LEAST_TURNS):
            self._add_turn(trials, tuned.profile, both, seconds, report)
            both = [plan for plan in both if trials.ran_last(plan)]
        is_faster = both[:1] == [found] and (
            len(both) == 1 or trials.is_slower(other, found, by=CLOSE)
        )
        seen = (*tuned.observations, *trials.observations())
        return replace(tuned, plan=found if is_faster else other, observations=seen)

    def _measure_planned_batches(
        self, profile: ClusterProfile, plans: tuple[Plan, ...], until: float, report: Report
    ) -> tuple[ClusterProfile, tuple[Plan, ...]]:
        """Measure the batches of the best plan that no rank has measured, and search again.

        If some are still not measured after `ROUNDS`, or when time is up, the best plan on measured
        batches is a candidate too, after those of the best stages.
        """
        for _ in range(ROUNDS):
            batches = unmeasured_batches(profile, plans[0])
            longest = max(
                sum(map(device.seconds, own))
                for device, own in zip(profile.devices, batches, strict=True)
            )
            if not any(batches) or self._seconds_left(until) < _PASSES_PER_POINT * longest:
                break
            report(f"planned batch sizes {sorted({b for own in batches for b in own})}")
            references = _references(profile, plans[0], batches)
            points = self.profiler.measure_points(batches, references)
            profile = with_measured(profile, points)
            plans = self._search(profile)
        if any(unmeasured_batches(profile, plans[0])):
            safe = replace(self._search(at_worst(profile))[0], prediction=None)
            if fits(profile, safe):
                stages = len({plan.stage for plan in plans})
                plans = tuple(dict.fromkeys([*plans[:stages], safe, *plans[stages:]]))
        return profile, plans

    def _fastest(
        self, profile: ClusterProfile, plans: Sequence[Plan], seconds: float, report: Report
    ) -> Tuned:
        """Run plans in turns; after each turn drop slow ones and search on the speeds it showed."""
        ends = time.perf_counter() + seconds
        steps = [predict(profile, plan).step_seconds for plan in plans[:CONTENDERS]]
        one_turn = (TURN_STEPS[0] + 1) * sum(steps)
        running = list(plans[: CONTENDERS if one_turn <= seconds else CANDIDATES])
        trials = Trials(_noise(profile))
        lacked: list[int] = []
        for turn in range(1, MOST_TURNS + 1):
            began = time.perf_counter()
            order = running if turn % 2 else running[::-1]  # so that no plan always runs last
            lacked += self._add_turn(trials, profile, order, seconds, report)
            running = [plan for plan in running if trials.ran_last(plan)]
            if not running:
                running = [self._search(_with_less_memory(profile, lacked))[0]]
                if turn < TURNS:
                    continue
                break
            fastest = trials.ranking(running)[0]
            running = [p for p in running if not trials.is_slower(p, fastest, by=CLOSE)]
            half_a_turn = (time.perf_counter() - began) / 2
            if self._seconds_left(ends - half_a_turn) <= 0.0:
                break
            if turn <= TURNS - LEAST_TURNS:
                running = self._with_newcomer(profile, trials, running, lacked)
            enough = LEAST_TURNS if len(running) == 1 else TURNS
            if all(trials.turns(p) >= enough and trials.error(p) <= SURE for p in running):
                break
        if not trials.turns(running[0]):
            raise agreed(
                torch.OutOfMemoryError(
                    "all plans that ran needed more memory than predicted, the last one "
                    f"{running[0]}; pass a smaller memory_limit"
                )
            )
        best, observations = _simplest(trials, running), trials.observations()
        of_best = [seen for seen in observations if seen.plan == best]
        measured, profile = profile, self._refined(profile, observations)
        profile = self._refined(profile, of_best)
        profile = _with_less_memory_beside(profile, lacked, best)
        spread = trials.noise(best)
        if not self.session.asynchronous:  # else the seconds of passes are not known
            speeds = noise_of_speeds(profile, best, trials.each())
            spread = max(spread, speeds, change_of_speeds(measured, best, of_best))
        plan = describe(profile, best, self.job.policy, noise=spread)
        tuned = Tuned(plan, profile, observations)
        return self.session.on_first_rank(lambda: tuned, "the choice of a plan")

    def _add_turn(
        self,
        trials: Trials,
        profile: ClusterProfile,
        plans: Sequence[Plan],
        seconds: float,
        report: Report,
    ) -> set[int]:
        """Run each plan; returns the ranks on which a plan ran out of memory. Collective.

        A plan that fails on all ranks for another reason is dropped. Its error is raised if there
        is no other plan: then it may be one of the loss, which every plan meets.
        """
        seen: list[Observation] = []
        ranks: set[int] = set()
        for plan in plans:
            step = predict(profile, plan).step_seconds
            steps = int(seconds / (TURNS * CONTENDERS * step))
            steps = min(max(steps, TURN_STEPS[0]), TURN_STEPS[-1])
            try:
                seen.append(self.profiler.run_plan(plan, steps=steps, report=report))
            except OutOfMemoryInTrial as short:
                report(str(short))
                ranks.update(short.ranks)
            except Exception as error:
                if not is_agreed(error):
                    raise
                if plan.factored:  # there are plans without
                    self.job = replace(self.job, factored="never")
                elif plan == plans[-1] and not seen and not ranks:
                    raise
                self._refused.add(plan)
                report(f"the plan of stage {plan.stage} is dropped: {error}")
            if plan in self._refused:
                gc.collect()  # what the error has held: the engine is a reference cycle
        trials.add(seen)
        return ranks

    def _with_newcomer(
        self,
        profile: ClusterProfile,
        trials: Trials,
        running: list[Plan],
        lacked: Sequence[int],
    ) -> list[Plan]:
        """Adds the plan that a search on the observed speeds finds, if it promises to be faster.

        It leaves more memory free on ranks that have `lacked` memory in trials.
        """
        observations = trials.observations()
        refined = self._refined(profile, observations)
        try:
            found = self._search(_with_less_memory(refined, lacked))[0]
        except NoPlanFits:  # those that run need what it leaves free
            return running
        best = min(predict(refined, seen.plan).step_seconds for seen in observations)
        promised = predict(refined, found).step_seconds
        is_known = found in self._refused or trials.turns(found)
        if is_known or promised >= (1.0 - WORTH_A_TRIAL) * best:
            return running
        return [*trials.ranking(running)[: CONTENDERS - 1], found]

    def _refined(
        self, profile: ClusterProfile, observations: Sequence[Observation]
    ) -> ClusterProfile:
        return refine(profile, observations, asynchronous=self.session.asynchronous)

    def _seconds_left(self, ends: float) -> float:
        """Seconds until then by the clock of rank 0."""
        return self.session.from_first_rank(ends - time.perf_counter())

    def _limited_profile(self, given: ClusterProfile) -> ClusterProfile:
        """A given profile, cut to the present memory, `max_batch` and `memory_limit` of each rank.

        Raises:
            ValueError: it is of another job; the same on every rank.
        """
        with equal_on_all_ranks():
            self._check_profile(given)
        given = self.profiler.within_present_memory(given)
        limits = self.session.exchange((self.job.max_batch, self.session.memory_limit))
        devices = []
        for device, (max_batch, memory) in zip(given.devices, limits, strict=True):
            limited = device if max_batch is None else device.with_largest_batch(max_batch)
            memory = min(device.memory_bytes, memory or device.memory_bytes)
            devices.append(replace(limited, memory_bytes=memory))
        given = replace(given, devices=tuple(devices))
        self.profiler.use(given)
        return given

    def _check_profile(self, given: ClusterProfile) -> None:
        size = self.session.group.size
        if given.world_size != size:
            raise ValueError(
                f"the profile is of {given.world_size} ranks, but there are {size}; measure again "
                "with profile_cluster()"
            )
        own = self.session.identity
        for key in _MUST_MATCH:
            if key in given.identity and given.identity[key] != own.get(key):
                what = key if key not in ("cores", "threads") else f"number of {key}"
                raise ValueError(
                    f"the profile is of another {what.replace('_', ' ')}: measured "
                    f"{given.identity[key]!r}, here {own.get(key)!r}; measure again with "
                    "profile_cluster()"
                )
        if self.job.lengths is not None and "length_distribution" not in given.identity:
            raise ValueError(
                "the profile was measured without lengths=; measure again with "
                "profile_cluster(lengths=...), or leave out lengths"
            )


def _references(
    profile: ClusterProfile, plan: Plan, batches: Sequence[Sequence[int]]
) -> list[BatchPoint]:
    """The measured point of each rank nearest to what it will measure, or else will run."""
    references = []
    for device, passes, wanted in zip(profile.devices, plan.micro_batches, batches, strict=True):
        size = max([*wanted] or [*passes, 1])
        references.append(min(device.points, key=lambda p: abs(math.log(p.batch / size))))
    return references


def _noise(profile: ClusterProfile) -> float:
    """Relative standard deviation of a step: that of the noisiest rank."""
    return max(device.noise for device in profile.devices)


def _simplest(trials: Trials, plans: Sequence[Plan]) -> Plan:
    """The plan of the fewest passes, then with even shares, of those that may be the fastest."""
    fastest, *others = trials.ranking(plans)
    close = [plan for plan in others if not trials.is_slower(plan, fastest)]

    def complexity(plan: Plan) -> tuple[int, bool]:
        passes = max(sum(map(bool, own)) for own in plan.micro_batches)
        return passes, len(set(plan.shares)) > 1

    return min([fastest, *close], key=complexity)


def _with_less_memory_beside(
    profile: ClusterProfile, ranks: Sequence[int], plan: Plan
) -> ClusterProfile:
    """As `_with_less_memory`, of as many of the ranks as leave enough for a plan that ran."""
    counts = range(len(ranks), 0, -1)
    limited = (_with_less_memory(profile, ranks[:count]) for count in counts)
    return next((each for each in limited if fits(each, plan)), profile)


def _with_less_memory(profile: ClusterProfile, ranks: Sequence[int]) -> ClusterProfile:
    """Plans ran out of memory on these ranks, so more is held there than was measured.

    A rank may be there several times, if it ran out of memory in several turns.
    """
    return profile.with_devices(
        lambda device: replace(
            device, held_bytes=device.held_bytes + round(UNSEEN * device.memory_bytes)
        ),
        ranks,
    )
