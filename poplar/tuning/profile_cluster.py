"""`profile_cluster`: measure every rank, run calibration steps, fit the cost model to them.

Every rank gets the same profile or an error. A profile of the same job that is in the cache is
used instead, with the memory that is available now.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from poplar.planner import calibration
from poplar.planner.memory_shortfall import NoPlanFits
from poplar.profiler.cache import Cache, default_folder
from poplar.profiler.cluster_profiler import Profiler, noise_notes
from poplar.profiler.job import UNKNOWN_SIZE, Job
from poplar.profiler.progress import Report, show_progress
from poplar.values.plan import Plan
from poplar.values.profile import ClusterProfile
from poplar.zero.collective_calls import new_group
from poplar.zero.micro_batch_loss import LossFunction
from poplar.zero.setup import stages_of

MUCH_LONGER = 1.5
"""A cached profile is measured again if its time budget was smaller by this factor. More than what
`autotune` and `profile_cluster` differ by with the same `seconds`."""


def profile_cluster(
    model: nn.Module, loss_fn: LossFunction, example_batch: Any, **options: Any
) -> ClusterProfile:
    """Measure every rank, and the network between them. Collective: every rank calls it.

    Args:
        model: on this rank's device, not wrapped; may be compiled. It is unchanged afterwards, bit
            by bit. Compiled functions are compiled again at their next call. Or on `meta`, or in
            host memory with `device="cuda"`, if it fits on no device: it is then measured while its
            parameters are sharded.
        loss_fn: as for `train_step`: `loss_fn(model, micro_batch)` -> mean loss.
        example_batch: a batch as in training; its samples are repeated for larger batches, so a
            few are enough. Use typical sequence lengths: they determine the time of a pass. For
            samples that are not rows of tensors, what `CollateMicroBatches(collate)` makes of them.
        options: those below; all others are options of the optimizer, as training will use them.

    Keyword Args:
        optimizer_class: as training will use it; default: AdamW.
        max_batch: largest micro-batch to try on this rank; default: what memory and time allow.
        memory_limit: what this rank may use, in bytes or as "10GiB"; default: the memory of its
            device, less what other processes use. Or a mapping by rank number or device, the same
            on all ranks: `{"cuda:1": "10GiB", 3: 8 << 30}`. An entry for a device counts for every
            rank on a device of this name; ranks without an entry have no limit.
        stages: ZeRO stages to run steps at; default: all at which the optimizer can train. `search`
            takes others only if it is asked to: they are predicted less accurately.
        seconds: time budget; default: 60. Exceeded if a few passes of each kind take longer, and by
            the warm-up: each batch size runs until its time settles, so that compilation, cuDNN's
            choice of algorithms and kernel tuning are not timed.
        max_norm: gradient clipping in the measured steps, as in training; None for none; default:
            1.
        process_group, units, compute_dtype, reduce_dtype, timeout, allow_forward_state, weights,
            device, granularity: as for `HeteroZeroOptimizer`.
        lengths: length of each sample of the dataset, the same on all ranks, if lengths vary. The
            example is then cut or repeated along dim 1: the time of a batch size is measured at the
            expected longest of so many random samples, and the profile does not depend on how far
            the example is padded. Samples that are not rows of tensors are measured as they are.
        length_quantile: memory is measured at the longest sample of at least this part of all
            micro-batches of a size; default: 0.99. Longer ones may need more.
        cache: True (the default) to use and store profiles in the default folder, a folder, or
            False. A cached profile is used if model, code, dtype, devices and versions are equal,
            and if `seconds` is less than 1.5 times what it was measured with.
        progress: show on stderr of rank 0 what is being measured; default: True.

    Returns:
        The same `ClusterProfile` on every rank. Its `notes` say if the machine was too noisy, and
        which stages cannot train this model with this loss (`failed_stages`).

    Raises:
        ValueError, TypeError, RuntimeError: an argument of this rank is wrong, or ranks differ; or
            a compiled function changes so often that torch would give up compiling it.
        RankFailed: an argument of another rank is wrong, or that rank could not be measured.
        CollectiveTimeout: a rank did not answer in time. Compiling one batch size may take long:
            pass a larger `timeout`.
    """
    process_group, timeout = options.get("process_group"), options.get("timeout")
    with new_group(process_group, timeout, "profile_cluster()") as group:
        job = Job.of(model, loss_fn, example_batch, **options)
        return CachedProfile(Profiler(job, group)).profile()


class CachedProfile:
    """The profile of one job, from the cache or measured; its methods are collective."""

    def __init__(self, profiler: Profiler) -> None:
        self.profiler = profiler
        job, is_first = profiler.session.job, profiler.session.group.rank == 0
        self.show = job.progress and is_first
        self.plans: dict[str, Plan] = {}
        """Verified plans that are cached with the profile."""
        folder = _folder(job.cache, warns=is_first)
        if folder is not None and UNKNOWN_SIZE in profiler.session.identity["example"]:
            folder = None
            if is_first:
                warnings.warn(
                    "profiles are not cached: samples of example_batch have no tensors, or objects "
                    "that cannot be pickled, so it is not known whether their sizes have changed "
                    "since; pass cache=False, or give objects that a DataLoader worker can send",
                    stacklevel=4,
                )
        self._cache = None if folder is None else Cache(folder)

    def profile(self) -> ClusterProfile:
        """Look into the cache, else measure what is not known, calibrate and save."""
        session = self.profiler.session
        seconds = session.job.profile_seconds

        def load() -> tuple[ClusterProfile, dict[str, Plan]] | None:
            found = None if self._cache is None else self._cache.load(session.identity)
            budget = None if found is None else found[0].budget_seconds
            return found if budget is None or seconds < MUCH_LONGER * budget else None

        found = session.on_first_rank(load, "looking into the cache")
        if found is not None:
            profile, self.plans = found
            profile = self.profiler.with_present_memory(profile)
            self.profiler.use(profile)
            return profile
        with show_progress(self.show, seconds) as report, session.measuring():
            profile = self.profiler.with_network(self.profiler.measure_devices(report), report)
            profile = _calibrated(self.profiler, profile, report)
        self.save(profile)
        return profile

    def save(self, profile: ClusterProfile) -> None:
        """Write the profile and the plans into the cache, on rank 0."""
        if self._cache is None or self.profiler.session.group.rank != 0:
            return
        try:
            self._cache.save(profile, self.plans)
        except OSError as error:
            text = f"the profile could not be saved in the cache: {error}"
            warnings.warn(text, stacklevel=2)


def _folder(cache: bool | str | Path, *, warns: bool) -> Path | None:
    """The folder of the cache; None for no cache."""
    if not isinstance(cache, bool):
        return Path(cache)
    folder = default_folder() if cache else None
    if cache and folder is None and warns:
        warnings.warn(
            "profiles are not cached, because this user has no home folder (neither HOME nor an "
            "entry in the password database); set POPLAR_CACHE to a folder, or pass cache=False",
            stacklevel=4,
        )
    return folder


def _calibrated(profiler: Profiler, profile: ClusterProfile, report: Report) -> ClusterProfile:
    """Run calibration plans of every stage on the engine and fit the residuals.

    Raises:
        Exception: the first error of a plan, if no stage is left at which plans can run.
    """
    plans: list[Plan] = []
    notes = list(profile.notes)
    longest = profiler.longest_observed_pass(sum(calibration.PASSES_OBSERVED))
    for stage in profiler.session.job.stages:
        try:
            plans += calibration.plans_to_observe(profile, stage, overlapped_seconds=longest)
        except NoPlanFits as error:
            error.allow_only(stages_of(profiler.session.setup.classes))
            notes.append(f"stage {stage} was not run: {error}")
    turns, errors = profiler.observe(profile, plans, report)
    if errors and errors.keys() >= {plan.stage for plan in plans}:
        raise next(iter(errors.values()))
    told = profiler.session.from_first_rank({stage: str(error) for stage, error in errors.items()})
    notes += [
        f"stage {stage} cannot train this model with this loss: {why}"
        for stage, why in sorted(told.items())
    ]
    observed = {seen.plan for turn in turns for seen in turn}
    notes += [
        f"a step of stage {plan.stage} with micro-batches {plan.micro_batches} ran out of memory"
        for plan in plans
        if plan not in observed and plan.stage not in errors
    ]
    profile = profiler.with_later_memory(replace(profile, failed_stages=tuple(sorted(errors))))
    profile = calibration.fit(profile, turns, asynchronous=profiler.session.asynchronous)
    return replace(profile, notes=(*noise_notes(profile.devices), *notes))
