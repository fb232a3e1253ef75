"""A model under measurement is afterwards as it was: values, gradients, buffers, random state."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def surroundings_kept(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Put random state, buffers, gradients and the training mode back at the end.

    Random state: torch's on the CPU and on `device`, Python's, and numpy's if it is loaded.
    Inside, parameters have no gradient.
    """
    numpy_random = sys.modules["numpy"].random if "numpy" in sys.modules else None
    states = random.getstate(), numpy_random.get_state() if numpy_random else None
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    # By name too: a forward may put a new tensor in a buffer's place.
    buffers = [
        (module, name, buffer, None if buffer is None else buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
    ]
    modes = [(module, module.training) for module in model.modules()]
    devices = [device] if device.type == "cuda" else []
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        with torch.no_grad():
            for module, name, buffer, value in buffers:
                module._buffers[name] = buffer
                if buffer is not None and value is not None:
                    buffer.copy_(value)
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for module, training in modes:
            module.training = training
        random.setstate(states[0])
        if numpy_random:
            numpy_random.set_state(states[1])


@contextmanager
def parameters_kept(model: nn.Module, *, to_host: bool = False) -> Iterator[None]:
    """Put the parameters' values and dtypes back at the end, bit by bit.

    Args:
        to_host: keep CUDA values in host memory meanwhile, where an engine needs the device's.
    """
    kept = [(p, p.data.cpu() if to_host else p.data, p.device) for p in model.parameters()]
    # An engine leaves trained values where they are and takes copies; frozen ones it overwrites
    # with the first rank's.
    frozen = [(value, value.clone()) for p, value, _ in kept if not p.requires_grad]
    try:
        yield
    finally:
        for value, before in frozen:
            value.copy_(before)
        for parameter, value, device in kept:
            parameter.grad = None
            parameter.data = value.to(device)


@contextmanager
def computing_in(model: nn.Module, dtype: torch.dtype | None) -> Iterator[None]:
    """Floating-point parameters in the dtype of compute, as the engine will hold them."""
    if dtype is None:
        yield
        return
    with parameters_kept(model):
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)
        yield
