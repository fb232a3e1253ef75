"""What the ranks exchange before the first backward of a step and before its update.

Opening a step exchanges sample counts and input errors, so that weights are exact. Closing it
exchanges errors, settings, used parameters, the loss and the gradient norm. If one rank could not
finish the step, or has other settings, no rank applies it and every rank raises.
"""

from __future__ import annotations

import functools
import math
import operator
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from poplar import ops
from poplar.comm import Communicator, Control
from poplar.values.errors import RankFailed, agreed
from poplar.zero.flat_parameter import FlatParameter
from poplar.zero.gradient_norm import combine_norm, fill_norm_row, gather_rows, norm_rows
from poplar.zero.passes.collective_order import LeaderFailed
from poplar.zero.steps.step_settings import LATER, UPDATES, StepSettings
from poplar.zero.streams import PassWork, RankTimes, with_communication

T = TypeVar("T")

OPENING = "opening a step"
"""What the ranks do, in messages."""
_LOSS = ops.EXACT_WORDS
"""Index of the loss in a row."""
_CHECKSUM = _LOSS + 1
"""Index of the checksum of the replicas in a row."""
_FLAGS = 52
"""Flags of parameters in a word: what a float64 holds exactly."""
_SETTINGS = _CHECKSUM + 1
"""Index of the checksum of the settings that are tensors in a row."""
_FAILS, _FAILS_ITSELF, _TOO_LARGE, _MAY_RUN_AGAIN, _HAS_HOOKS, _DIGEST, _AGREES, _TIMES = range(8)
"""Indices of what the hosts of the ranks send each other to close a step."""


@dataclass(frozen=True)
class StepSizes:
    """Samples and weights of all ranks, known before the first backward."""

    samples: tuple[int, ...]
    """By rank."""
    total_weight: float
    kinds: tuple[int, ...]
    """By rank, the number of what its loss function returns and how its samples are weighted."""
    versions: tuple[int, ...]
    """By rank, `PlanSchedule.version` of its batch."""
    waited: float
    """Seconds that this rank has waited for them."""
    has_error: bool
    """A rank has an error, so there is no step."""


@dataclass(frozen=True)
class StepSummary:
    """Known to all ranks once the gradients are final."""

    losses: Tensor
    """By rank, its part of the weighted loss; float64 on the device."""
    norm_type: float
    norm: Tensor
    """Norm of the accumulated gradient (any loss scale included), one float64 on the device."""
    unused: dict[FlatParameter, set[int]]
    """Positions of parameters that got a gradient on no rank."""
    times: tuple[RankTimes, ...]
    """By rank."""
    wants_to_agree: bool
    """A rank wants all ranks to agree on something after the step."""
    checksums: Tensor
    """By rank, the checksum of its replicas; int64 on the device, 0 if none was given."""
    has_hooks: bool
    """A rank runs code of the user between this agreement and the end of the step."""
    settings: Tensor | None
    """By rank, the checksum of the settings that are tensors; int64 on the device. None: none."""

    @property
    def waiting_on(self) -> int | None:
        """The rank that waited least: the others waited for it. None if that is unknown."""
        waited = [rank.waiting_seconds for rank in self.times]
        if any(map(math.isnan, waited)):
            return None
        return min(range(len(waited)), key=waited.__getitem__)


class MicroBatchesTooLarge(Exception):
    """Ranks ran out of memory in a step, which all ranks can run again in smaller micro-batches."""

    def __init__(self, batches: Mapping[int, int]) -> None:
        """`batches`: by rank, the samples of the micro-batch that did not fit, at least 2."""
        super().__init__(batches)
        self.batches = batches


def leader_of(sizes: Sequence[int]) -> int | None:
    """The first rank with samples; None if no rank has any."""
    return next((rank for rank, size in enumerate(sizes) if size > 0), None)


def caught(work: Callable[[], object]) -> Exception | None:
    """The error of work of this rank alone, to be reported in the next exchange."""
    try:
        work()
    except Exception as error:
        return error
    return None


def raise_on_any_error(
    control: Control, error: Exception | None, *, doing: str, outcome: str = "nothing was applied"
) -> None:
    """Raise on all ranks if one rank has an error: there the error, elsewhere `RankFailed`.

    It names what failed (`doing`) and the state of all ranks then (`outcome`). Collective.
    """
    flags = control.exchange(torch.tensor([error is not None], device="cpu"), what=doing)()
    if any(bool(flag) for flag in flags):
        raise_on_all_ranks(control, error, doing=doing, outcome=outcome)


def run_on_all_ranks(control: Control, work: Callable[[], T], *, doing: str) -> T:
    """The result of `work`, if it fails on no rank; else as `raise_on_any_error`. Collective."""
    error: Exception | None = None
    try:
        result = work()
    except Exception as failure:
        error = failure
    raise_on_any_error(control, error, doing=doing)
    return result


def raise_on_all_ranks(
    control: Control,
    error: BaseException | None,
    *,
    doing: str,
    outcome: str = "nothing was applied",
) -> None:
    """Exchange error messages and raise. Collective, if at least one rank has an error."""
    follows = isinstance(error, LeaderFailed)  # from the error of another rank
    mine = None if error is None or follows else f"{type(error).__name__}: {error}"
    messages = control.exchange_objects(mine, what=doing)
    if error is not None and not (follows and any(messages)):
        raise agreed(error)
    by_rank = control.group.by_name(messages).items()
    causes = "; ".join(f"rank {rank}: {text}" for rank, text in by_rank if text)
    raise agreed(RankFailed(f"another rank failed in {doing}, so {outcome}. {causes}"))


def exchange_results(control: Control, work: Callable[[], T], *, what: str) -> list[T]:
    """By rank, the results of `work`, if it fails on none. Collective, as `run_on_all_ranks`."""
    results: list[T] = []
    error = caught(lambda: results.append(work()))
    received = control.exchange_objects((error is None, results), what=what)
    if not all(succeeded for succeeded, _ in received):
        raise_on_all_ranks(control, error, doing=what)
    return [result for _, (result,) in received]


def open_step(
    control: Control,
    *,
    samples: int,
    weight: float,
    kind: int,
    has_error: bool,
    version: int = 0,
) -> Callable[[], StepSizes]:
    """Start to exchange what this rank has of `StepSizes`. Collective.

    Returns:
        A function that waits for the other ranks and returns the sizes.
    """
    values = torch.tensor(
        [float(has_error), samples, weight, kind, version], dtype=torch.float64, device="cpu"
    )
    collect = control.exchange(values, what=OPENING)

    def wait() -> StepSizes:
        began = time.perf_counter()
        received = collect()
        waited = time.perf_counter() - began
        return StepSizes(
            samples=tuple(int(values[1]) for values in received),
            total_weight=sum(float(values[2]) for values in received),
            kinds=tuple(int(values[3]) for values in received),
            versions=tuple(int(values[4]) for values in received),
            waited=waited,
            has_error=any(bool(values[0]) for values in received),
        )

    return wait


def close_step(
    comm: Communicator,
    control: Control,
    flats: Sequence[FlatParameter],
    *,
    loss: Tensor | float,
    times: RankTimes,
    wants_to_agree: bool,
    norm_type: float,
    settings: StepSettings,
    error: BaseException | None,
    too_large: int = 0,
    may_run_again: bool = False,
    checksum: Tensor | None = None,
) -> StepSummary:
    """Agree that the step may be applied. Collective.

    Loss and norm are computed on the device and stay there. The host waits only for values that
    are known on the hosts, so it does not wait for a device that still runs the last pass.

    Args:
        loss: this rank's part of the weighted loss.
        times: of this rank, in the latest step that is known.
        settings: of this rank, which must be equal on all ranks.
        error: why this rank could not finish its passes.
        too_large: samples of the micro-batch in which it ran out of memory; 0 if it has not.
        may_run_again: it can run the passes of the step again.
        checksum: of its replicas: one int64 on the device. See `replica_check`.

    Raises:
        MicroBatchesTooLarge: all ranks can run the step again, and memory is all that failed.
        RankFailed: another rank could not finish its passes.
        ValueError: on all ranks; their settings differ.
    """
    rows = norm_rows(comm, flats)
    if error is None:  # a failed rank does not know which norm the others compute
        fill_norm_row(rows, flats, comm.group.rank, norm_type)
    rows[comm.group.rank, _LOSS] = _float64_bits(loss, rows.device)
    if checksum is not None:
        rows[comm.group.rank, _CHECKSUM] = checksum
    if settings.tensors:
        rows[comm.group.rank, _SETTINGS] = settings.checksum(rows.device)
    pending = gather_rows(comm, rows, what="the loss and the gradient norm")
    # not only because another rank failed
    fails_itself = error is not None and not isinstance(error, LeaderFailed)
    outcome = [float(error is not None), float(fails_itself), float(too_large)]
    outcome += [float(may_run_again), float(settings.has_hooks), settings.digest]
    outcome += [float(wants_to_agree)]
    outcome += [times.compute_seconds, times.waiting_seconds, *times.work]
    head = torch.tensor(outcome, dtype=torch.float64, device="cpu")
    received = control.exchange(torch.cat([head, _used(flats)]), what="closing a step")()
    pending.wait()
    if any(bool(values[_FAILS]) for values in received):
        _raise_if_too_large(
            control, [values[_FAILS_ITSELF : _MAY_RUN_AGAIN + 1].tolist() for values in received]
        )
        raise_on_all_ranks(control, error, doing="a step")
    if any(values[_DIGEST] != received[0][_DIGEST] for values in received):
        reject_different_settings(control, settings.by_name())
    return StepSummary(
        losses=rows[:, _LOSS].view(torch.float64),
        norm_type=norm_type,
        norm=combine_norm(rows, norm_type),
        unused=_unused(flats, [values[len(head) :].tolist() for values in received]),
        times=_times(values[_TIMES : len(head)].tolist() for values in received),
        wants_to_agree=any(bool(values[_AGREES]) for values in received),
        checksums=rows[:, _CHECKSUM],
        has_hooks=any(bool(values[_HAS_HOOKS]) for values in received),
        settings=rows[:, _SETTINGS] if settings.tensors else None,
    )


def _times(received: Iterable[Sequence[float]]) -> tuple[RankTimes, ...]:
    return with_communication(
        [RankTimes(compute, waited, work=PassWork(*work)) for compute, waited, *work in received]
    )


def reject_different_settings(control: Control, mine: Mapping[str, str]) -> None:
    """Raise ValueError on all ranks if their settings differ. Collective."""
    by_rank = control.exchange_objects(dict(mine), what="comparing the settings of a step")
    texts = []
    for name in dict.fromkeys(name for settings in by_rank for name in settings):
        ranks_with: dict[str, list[int]] = {}
        for rank, settings in control.group.by_name(by_rank).items():
            ranks_with.setdefault(settings.get(name, "absent"), []).append(rank)
        if len(ranks_with) > 1:
            values = [f"{value} on rank(s) {ranks}" for value, ranks in ranks_with.items()]
            texts.append(f"{name} is {', '.join(values)}")
    if not texts:
        return
    advice = "give all ranks the same, such as a learning rate that follows the loss of all ranks"
    if any(UPDATES in text for text in texts):
        advice = "a rank has left out an update of its part; load a checkpoint on all ranks"
    elif any(LATER in text for text in texts):
        advice = "the last update, if none was skipped, has done so; load a checkpoint on all ranks"
    raise agreed(
        ValueError(
            f"the ranks differ in a step, so no rank applied it: {'; '.join(texts)}. Each would "
            f"update its part of the parameters with its own; {advice}"
        )
    )


def _raise_if_too_large(control: Control, outcomes: Sequence[Sequence[float]]) -> None:
    """Raise if the step can be run again in smaller micro-batches, from the outcomes of all ranks.

    All ranks decide alike, because they decide from the same values.
    """
    batches = {}
    by_rank = control.group.by_name(outcomes)
    for rank, (fails_itself, too_large, may_run_again) in by_rank.items():
        if not may_run_again or (fails_itself and too_large < 2):
            return
        if fails_itself:
            batches[rank] = int(too_large)
    if batches:
        raise agreed(MicroBatchesTooLarge(batches))


def agree_on_unused(
    control: Control, flats: Sequence[FlatParameter]
) -> dict[FlatParameter, set[int]]:
    """Positions of parameters that got a gradient on no rank. Collective."""
    received = control.exchange(_used(flats), what="the parameters that a step uses")()
    return _unused(flats, [words.tolist() for words in received])


def _used(flats: Sequence[FlatParameter]) -> Tensor:
    """Which parameters got a gradient on this rank, as the bits of words."""
    flags = [place in flat.used for flat in flats for place in range(len(flat.parameters))]
    words = [flags[first : first + _FLAGS] for first in range(0, len(flags), _FLAGS)]
    bits = [sum(flag << bit for bit, flag in enumerate(word)) for word in words]
    return torch.tensor(bits, dtype=torch.float64, device="cpu")


def _unused(
    flats: Sequence[FlatParameter], used: Sequence[Sequence[float]]
) -> dict[FlatParameter, set[int]]:
    """Positions of parameters that got a gradient on no rank, from the words of all ranks."""
    words = [functools.reduce(operator.or_, map(int, word)) for word in zip(*used, strict=True)]
    flags = (word >> bit & 1 for word in words for bit in range(_FLAGS))
    return {
        flat: {place for place, _ in enumerate(flat.parameters) if not next(flags)}
        for flat in flats
    }


def _float64_bits(value: Tensor | float, device: torch.device) -> Tensor:
    """A float64 as int64 bits on the device, without a synchronization of the host."""
    if not isinstance(value, Tensor):
        value = torch.full((), value, dtype=torch.float64, device=device)
    return value.to(device, torch.float64).view(torch.int64)
