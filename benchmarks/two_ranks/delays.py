"""Random delays of collectives, sums and the computation: they must not change any bit."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from poplar.comm import process_group
from poplar.comm.collective_queue import CollectiveQueue
from poplar.zero.streams import DeviceStreams, Streams
from two_ranks.rank import Rank
from two_ranks.training import STAGES, STEPS, Training

RUNS = 3
DELAY_SECONDS, DELAYED_PART = (2e-3, 5e-3), 0.3
"""Length of a delay, and how many of the places have one."""
CLOCK_HERTZ = 1.5e9
"""About that of a GPU, for `torch.cuda._sleep`."""


class Delays:
    """Pauses the current stream of this rank at random places."""

    def __init__(self, own: Rank, seed: int) -> None:
        self.count, self._device = 0, own.device
        self._draw = random.Random(1000 * seed + own.rank)

    def pause(self, *_: Any) -> None:
        """Delay what follows, or not."""
        if self._draw.random() > DELAYED_PART:
            return
        self.count += 1
        seconds = self._draw.uniform(*DELAY_SECONDS)
        if self._device.type == "cuda":
            torch.cuda._sleep(int(seconds * CLOCK_HERTZ))
        else:
            time.sleep(seconds)

    @contextmanager
    def active(self, training: Training) -> Iterator[None]:
        """Delay collectives, what the reduction stream does, and the blocks of the model."""
        streams = DeviceStreams if self._device.type == "cuda" else Streams
        work, exchange = process_group.StreamWork, CollectiveQueue.exchange
        reduction = streams.reduction

        def late_work(group: Any, call: Callable[[], Any] | None, *others: Any) -> Any:
            def late() -> Any:
                self.pause()
                return call() if call is not None else None

            return work(group, late, *others)

        def late_exchange(*arguments: Any, **options: Any) -> Any:
            self.pause()
            return exchange(*arguments, **options)

        @contextmanager
        def late_reduction(streams: Any) -> Iterator[None]:
            with reduction(streams):
                self.pause()
                yield

        hooks = [block.register_forward_hook(self.pause) for block in training.model.blocks]
        hooks += [block.register_full_backward_hook(self.pause) for block in training.model.blocks]
        with (
            mock.patch.object(process_group, "StreamWork", late_work),
            mock.patch.object(CollectiveQueue, "exchange", late_exchange),
            mock.patch.object(streams, "reduction", late_reduction),
        ):
            yield
        for hook in hooks:
            hook.remove()


def delays(own: Rank) -> None:
    """Delayed runs have the bits of one that is not delayed."""
    for stage in STAGES:
        undelayed, differ, count = train(own, stage, None), 0, 0
        for seed in range(1, RUNS):
            delayed = Delays(own, seed)
            found = train(own, stage, delayed)
            differ += any(not torch.equal(found[name], undelayed[name]) for name in undelayed)
            count += delayed.count
        if own.rank == 0:
            ok = not differ and count > 0
            own.note("delays", f"stage {stage}", ok, runs=RUNS, differ=differ, delays=count)


def train(own: Rank, stage: int, delayed: Delays | None) -> dict[str, torch.Tensor]:
    """Parameters and losses of a short training."""
    training = Training(own, stage)
    if delayed is None:
        results = [training.step() for _ in range(STEPS)]
    else:
        with delayed.active(training):
            results = [training.step() for _ in range(STEPS)]
    losses = torch.tensor([result.loss for result in results])
    found = {**training.parameters(), "loss": losses}
    training.optimizer.release()
    return found
