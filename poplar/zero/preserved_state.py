"""Restores a model after measurements: parameters, gradients, buffers, modes, random state."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from poplar.zero.absent_parameter import mark_present
from poplar.zero.input_cast import inputs_cast
from poplar.zero.weights.materialization import move_to_meta


@contextmanager
def model_preserved(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Restore buffers, gradients, training modes and random state at the end.

    Random state: torch on the CPU and on `device`, Python, and numpy if it is loaded. Inside,
    parameters have no gradient. Parameters are not restored: see `parameters_preserved`.
    """
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    # By name too: a forward may replace a buffer by a new tensor.
    buffers = [
        (module, name, buffer, None if buffer is None else buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
    ]
    modes = [(module, module.training) for module in model.modules()]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        with random_state_preserved(device):
            yield
    finally:
        with torch.no_grad():
            for module, name, buffer, value in buffers:
                module._buffers[name] = buffer
                if buffer is None or value is None:
                    continue
                if not value.is_meta:
                    buffer.copy_(value)
                elif not buffer.is_meta:  # an optimizer has made it real
                    move_to_meta([buffer])  # type: ignore[list-item]
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for module, training in modes:
            module.training = training


@contextmanager
def random_state_preserved(device: torch.device) -> Iterator[None]:
    """Restore the random state of torch on the CPU and on `device`, of Python and of numpy."""
    numpy_random = sys.modules["numpy"].random if "numpy" in sys.modules else None
    states = random.getstate(), numpy_random.get_state() if numpy_random else None
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(states[0])
        if numpy_random:
            numpy_random.set_state(states[1])


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Every module is in evaluation mode inside, and in its own mode again at the end."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def host_copies(model: nn.Module) -> list[Tensor]:
    """The values of the parameters in host memory, for `parameters_restored`."""
    return [parameter.data.to("cpu", copy=True) for parameter in model.parameters()]


@contextmanager
def parameters_restored(model: nn.Module, copies: Sequence[Tensor]) -> Iterator[None]:
    """Copy the values that `host_copies` returned into the parameters at the end."""
    devices = [parameter.device for parameter in model.parameters()]
    try:
        yield
    finally:
        for parameter, value, device in zip(model.parameters(), copies, devices, strict=True):
            mark_present(parameter)
            parameter.grad = None
            parameter.data = value.to(device, copy=True)


@contextmanager
def parameters_preserved(model: nn.Module, *, to_host: bool = False) -> Iterator[None]:
    """Restore the values and dtypes of the parameters at the end, bit by bit.

    Args:
        model: whose parameters are preserved.
        to_host: store CUDA values in host memory meanwhile, to leave device memory to the engine.
    """
    saved = [(p, p.data.cpu() if to_host else p.data, p.device) for p in model.parameters()]
    # The engine copies trained values, but overwrites frozen ones with those of rank 0.
    frozen = [(value, value.clone()) for p, value, _ in saved if not p.requires_grad]
    try:
        yield
    finally:
        for value, before in frozen:
            value.copy_(before)
        for parameter, value, device in saved:
            mark_present(parameter)
            parameter.grad = None
            parameter.data = value.to(device)


@contextmanager
def gradients_dropped(model: nn.Module) -> Iterator[None]:
    """Free every gradient as soon as it is complete, as the engine does."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    handles = [p.register_post_accumulate_grad_hook(_drop_gradient) for p in trained]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _drop_gradient(parameter: Tensor) -> None:
    parameter.grad = None


@contextmanager
def computing_in(
    model: nn.Module, dtype: torch.dtype | None, unit_names: Sequence[str]
) -> Iterator[None]:
    """Hold parameters in the compute dtype and cast inputs, as the engine does; None: unchanged."""
    if dtype is None:
        yield
        return
    with parameters_preserved(model):
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)
        with inputs_cast(model, dtype, unit_names):
            yield
