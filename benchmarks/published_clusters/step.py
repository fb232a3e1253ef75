"""What ranks do in one step under the decisions of a policy: the input of the simulation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from published_clusters.costs import Transfer


class Compute(NamedTuple):
    """Work of one rank."""

    seconds: float


class Start(NamedTuple):
    """The rank is ready for a transfer, which begins when all ranks are."""

    transfer: int


class Wait(NamedTuple):
    """The rank needs the result of a transfer."""

    transfer: int


Task = Compute | Start | Wait


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One layer under a policy."""

    forward: tuple[float, ...]
    """Seconds, by rank."""
    backward: tuple[float, ...]
    update: tuple[float, ...]
    before: tuple[Transfer, ...] = ()
    """Of activations, for which the forward waits; the backward ends with their gradients."""
    after: tuple[Transfer, ...] = ()
    """Of the outputs; the backward moves their gradients first."""
    gathered: Transfer | None = None
    """Of parameters, which arrive during earlier layers."""
    gathered_again: Transfer | None = None
    """The same for the backward."""
    gradient: Transfer | None = None
    """Of gradients, which leave during the backward of earlier layers."""
    published: Transfer | None = None
    """Of updated parameters, at the end of the step."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """All layers, in the order of the forward."""

    parts: tuple[Part, ...]
    largest_first: bool = False
    """Of gradients that wait for the network, the longest transfer begins first; else the one that
    was ready first."""
    gradients_of_passes: int = 1
    """How often gradients and gathered parameters move in a step."""


class Programme(NamedTuple):
    """A step as tasks."""

    tasks: list[list[Task]]
    """By rank."""
    transfers: list[Transfer]
    priorities: list[float]
    """By transfer; of those that are ready, the smallest begins first."""


def programme(step: Step, ranks: int) -> Programme:
    """The tasks of a step."""
    tasks: list[list[Task]] = [[] for _ in range(ranks)]
    transfers: list[Transfer] = []
    priorities: list[float] = []

    def start(transfer: Transfer | None, priority: float = 0.0) -> int | None:
        if transfer is None:
            return None
        transfers.append(transfer)
        priorities.append(priority)
        for own in tasks:
            own.append(Start(len(transfers) - 1))
        return len(transfers) - 1

    def wait(number: int | None) -> None:
        if number is not None:
            for own in tasks:
                own.append(Wait(number))

    def move(moved: Sequence[Transfer]) -> None:
        for transfer in moved:
            wait(start(transfer, -1.0))

    def compute(seconds: Sequence[float]) -> None:
        for own, one in zip(tasks, seconds, strict=True):
            own.append(Compute(one))

    def repeated(transfer: Transfer | None) -> Transfer | None:
        times = step.gradients_of_passes
        return transfer and tuple(times * seconds for seconds in transfer)

    parts = step.parts
    gathers = [start(repeated(part.gathered)) for part in parts]
    for part, gather in zip(parts, gathers, strict=True):
        move(part.before)
        wait(gather)
        compute(part.forward)
        move(part.after)
    again = [start(repeated(part.gathered_again)) for part in reversed(parts)]
    gradients = []
    for part, gather in zip(reversed(parts), again, strict=True):
        move(part.after)
        wait(gather)
        compute(part.backward)
        move(part.before)
        length = max(part.gradient) if part.gradient else 0.0
        priority = -1.0 / (1.0 + 1.0 / length) if step.largest_first and length else 0.0
        gradients.append(start(repeated(part.gradient), priority))
    for number in gradients:
        wait(number)
    compute([sum(column) for column in zip(*(part.update for part in parts), strict=True)])
    published = [start(part.published) for part in parts]
    for number in published:
        wait(number)
    return Programme(tasks, transfers, priorities)
