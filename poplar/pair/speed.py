"""The yardstick: the sum of the ranks' speeds in plain PyTorch, without communication.

Each rank runs forward and backward at its best batch size that fits. All ranks run at the same
time, so what they share (a core, a memory bus, a power limit) is shared while it is measured.
Measure before and after a run; the larger sum counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from poplar.data import pytree
from poplar.system import devices
from poplar.system.out_of_memory import free_failed_pass, is_out_of_memory


@dataclass(frozen=True, kw_only=True, slots=True)
class Speed:
    """Speed of one rank in plain passes at its best batch size."""

    samples_per_second: float
    batch: int


def measure_speeds(
    model: nn.Module,
    loss_fn: Callable[[nn.Module, Any], Tensor],
    make_batch: Callable[[int], Any],
    *,
    max_batch: int,
    seconds: float = 10.0,
    group: dist.ProcessGroup | None = None,
    search: bool = True,
) -> tuple[Speed, ...]:
    """Measure every rank's speed while all of them run. Every rank must call it.

    Args:
        model: the plain model; its gradients are deleted, its parameters do not change.
        loss_fn: as for `train_step`.
        make_batch: returns a batch of that many samples on the device of the model.
        max_batch: the largest batch size to try, if memory allows.
        seconds: duration; half of it is for finding the best batch size.
        group: a gloo group of all ranks (see `control_group`); the default one if it is gloo.
        search: find the best batch size; otherwise `max_batch` is used.

    Returns:
        One `Speed` per rank, the same on every rank.

    Raises:
        RuntimeError: a pass failed on some rank; raised on all of them. A
            `torch.OutOfMemoryError`, which is one, if no batch fits.
    """
    best, error, kind = None, "", RuntimeError
    dist.barrier(group=group)
    try:
        size = max_batch
        if search:
            size = _best_batch(model, loss_fn, make_batch, max_batch, seconds / 2)
            seconds /= 2  # measured again: the best of several noisy figures is biased
        batch = make_batch(size)
        _pass(model, loss_fn, batch)
        best = Speed(samples_per_second=_measure(model, loss_fn, batch, seconds), batch=size)
    except Exception as failure:
        error = f"{type(failure).__name__}: {failure}"
        kind = torch.OutOfMemoryError if is_out_of_memory(failure) else RuntimeError
    all_done = dist.barrier(group=group, async_op=True)
    while best and not all_done.is_completed():
        _pass(model, loss_fn, batch)
    all_done.wait()
    model.zero_grad(set_to_none=True)

    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, (best, error, kind), group=group)
    for rank, (_, text, kind) in enumerate(gathered):
        if text:
            raise kind(f"rank {rank} could not run plain passes to measure its speed: {text}")
    return tuple(speed for speed, _, _ in gathered)


def control_group() -> dist.ProcessGroup | None:
    """A gloo group of all ranks for waits on the host. Every rank must call it."""
    backend = dist.get_default_backend_for_device("cpu")
    return None if dist.get_backend() == backend else dist.new_group(backend=backend)


def sum_of_speeds(*measurements: tuple[Speed, ...]) -> float:
    """Samples per second of all ranks together: the largest of the measurements."""
    return max(sum(speed.samples_per_second for speed in speeds) for speeds in measurements)


def _best_batch(
    model: nn.Module,
    loss_fn: Callable[[nn.Module, Any], Tensor],
    make_batch: Callable[[int], Any],
    max_batch: int,
    seconds: float,
) -> int:
    """The batch size with the most samples per second among those that fit in memory."""
    sizes = list(_sizes(max_batch))
    measured: dict[int, float] = {}
    for size in sizes:
        try:
            batch = make_batch(size)
            _pass(model, loss_fn, batch)
            measured[size] = _measure(model, loss_fn, batch, seconds / len(sizes))
        except Exception as error:
            if not measured or not is_out_of_memory(error):
                raise
            free_failed_pass(error)
            model.zero_grad(set_to_none=True)
            break
    return max(measured, key=measured.__getitem__)


def _sizes(max_batch: int) -> Iterator[int]:
    """1, 2, 4, ... and `max_batch` itself."""
    size = 1
    while size < max_batch:
        yield size
        size *= 2
    yield max_batch


def _measure(
    model: nn.Module, loss_fn: Callable[[nn.Module, Any], Tensor], batch: Any, seconds: float
) -> float:
    """Passes per second over a slot of time, times samples.

    The mean, not the median: ranks that share a core alternate, so single passes are much faster or
    slower than the mean.
    """
    passes = 0
    start = time.perf_counter()
    while True:
        _pass(model, loss_fn, batch)
        passes += 1
        elapsed = time.perf_counter() - start
        if elapsed >= seconds:
            return passes * pytree.samples_in(batch) / elapsed


def _pass(model: nn.Module, loss_fn: Callable[[nn.Module, Any], Tensor], batch: Any) -> None:
    loss = loss_fn(model, pytree.copied(batch))
    loss.backward()
    model.zero_grad(set_to_none=True)
    devices.synchronize(loss.device)
