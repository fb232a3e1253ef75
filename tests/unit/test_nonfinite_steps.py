"""On a device that computes asynchronously, the host reads a step's outcome in the next step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from poplar.values.errors import PoplarError, RankFailed
from poplar.zero.setup import check_choice
from poplar.zero.steps.nonfinite import IssuedStep, NonFiniteSteps, OnNonFinite
from poplar.zero.steps.step_settings import StepSettings
from poplar.zero.streams import Streams


class FakeStreams(Streams):
    """Events are names; nothing is computed."""

    asynchronous = True

    def timestamp(self) -> Any:
        return "the end of the update"


class Host:
    """Records what the host waits for and undoes."""

    def __init__(
        self, choice: str = "raise", *, rank: int = 0, skips_on_device: bool = True
    ) -> None:
        self.did: list[str] = []
        self.undecided: list[Any] = []
        self.nonfinite: str | None = None
        group = SimpleNamespace(
            rank=rank,
            size=2,
            name=rank,
            names=(0, 1),
            by_name=lambda values: dict(enumerate(values)),
            wait_for_event=self._wait,
        )
        control = SimpleNamespace(
            group=group,
            exchange_objects=self._exchange,
            exchange=lambda value, what: lambda: [value, value],
        )
        update = SimpleNamespace(
            skips_on_device=skips_on_device,
            undo_if=self.undecided.append,
            settle=self.settle_update,
            nonfinite_parameter=lambda: self.nonfinite,
        )
        self.steps = NonFiniteSteps(choice, update, FakeStreams(), control)  # type: ignore[arg-type]

    def settle_update(self) -> None:
        """As `ShardedUpdate.settle`, before state is read."""
        while self.undecided:
            if self.undecided.pop().wait()[0]:
                self.did.append("undo")

    def _wait(self, event: str, what: str) -> None:
        self.did.append(f"wait for {event}")

    def _exchange(self, value: Any, *, what: str) -> list[Any]:
        return [value, "PoplarError: rank 1: the loss is nan"]

    def end_step(self, *losses: float, norm: float = 1.0, scaled: bool = False) -> None:
        summary = SimpleNamespace(
            losses=torch.tensor(losses, dtype=torch.float64),
            norm=torch.tensor(norm, dtype=torch.float64),
            settings=None,
        )
        flag = self.steps.flag(summary)  # type: ignore[arg-type]
        own, applied = [summary.losses[0]], not self.steps.skips()
        settings = StepSettings((), updates=0)
        step = IssuedStep(summary, own, settings, applied, scaled)  # type: ignore[arg-type]
        self.steps.record(flag, step)


WAIT = "wait for the end of the update"


def test_a_finite_step_is_read_in_the_next_one() -> None:
    host = Host()
    host.end_step(1.0, 2.0, norm=3.0)
    assert host.did == []
    host.steps.raise_if_found()
    assert host.did == [WAIT]


def test_the_rank_with_the_loss_raises_it_and_the_other_names_the_rank() -> None:
    host = Host()
    host.end_step(float("nan"), 2.0)
    assert host.did == []
    with pytest.raises(PoplarError, match=r"rank 0: the loss is nan in pass 1 of 1; no rank"):
        host.steps.raise_if_found()
    assert host.did == [WAIT, "undo"]
    host.steps.raise_if_found()  # once

    other = Host()
    other.end_step(1.0, float("inf"))
    with pytest.raises(RankFailed, match=r"rank 1: the loss is nan"):
        other.steps.raise_if_found()


def test_state_is_complete_before_it_is_read() -> None:
    host = Host("skip")
    host.end_step(float("nan"), 2.0)
    host.settle_update()
    assert host.did == [WAIT, "undo"]
    with pytest.warns(UserWarning, match=r"skipped: the loss of rank\(s\) \[0\]"):
        host.steps.raise_if_found()


def test_a_step_that_a_loss_scaler_skips_is_read_in_the_next_one_without_an_error() -> None:
    host = Host()
    host.end_step(float("inf"), 2.0, norm=float("inf"), scaled=True)
    assert host.did == []
    host.steps.raise_here()
    host.steps.raise_if_found()
    assert host.did == [WAIT, "undo"]
    host.nonfinite = "layer.weight"
    host.end_step(1.0, 2.0, norm=float("nan"), scaled=True)
    with pytest.raises(PoplarError, match=r"'layer.weight' has values that are NaN"):
        host.steps.raise_if_found()


def test_a_local_read_raises_and_leaves_it_to_the_next_collective_call() -> None:
    host = Host(rank=1)
    host.end_step(float("nan"), 2.0)
    for _ in range(2):
        with pytest.raises(PoplarError, match=r"rank 0: the loss is nan; no rank"):
            host.steps.raise_here()
    with pytest.raises(RankFailed):
        host.steps.raise_if_found()
    host.steps.raise_here()


def test_a_local_read_of_a_skipped_step_raises_nothing() -> None:
    host = Host("skip")
    host.end_step(float("nan"), 2.0)
    host.steps.raise_here()
    assert host.did == [WAIT, "undo"]


@pytest.mark.parametrize(("choice", "waits"), [("raise", False), ("skip", True)])
def test_a_class_that_cannot_skip_on_the_device_delays_the_host_only_to_skip(
    choice: str, waits: bool
) -> None:
    host = Host(choice, skips_on_device=False)
    assert host.steps.skips() == waits
    if not waits:
        host.end_step(float("nan"), 2.0)
        with pytest.raises(PoplarError, match="load a checkpoint"):
            host.steps.raise_if_found()
        assert "undo" not in host.did


def test_unknown_choice_raises() -> None:
    with pytest.raises(ValueError, match="use 'raise' or 'skip'"):
        check_choice("on_nonfinite", "ignore", OnNonFinite)
