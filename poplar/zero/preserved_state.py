"""Restores a model after measurements: parameters, gradients, buffers, modes, random state."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from poplar.system.storage import bits_are_equal, has_plain_elements, separate_elements
from poplar.zero.absent_parameter import mark_present
from poplar.zero.input_cast import inputs_cast
from poplar.zero.opaque_parameter import (
    OpaqueBytes,
    is_opaque_buffer,
    memories_of,
    opaque_tensors,
)
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
        (module, name, buffer, None if buffer is None else buffer.data, _copied(buffer))
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
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for module, training in modes:
            module.training = training
        with torch.no_grad():
            for module, name, buffer, data, value in buffers:
                module._buffers[name] = buffer
                if buffer is None or data is None or value is None:
                    continue
                if not value.is_meta:
                    if buffer.device != data.device:  # an optimizer has moved it
                        buffer.data = data
                    if not _is_unchanged(buffer, value):
                        separate_elements(buffer)
                        buffer.copy_(value)
                elif not buffer.is_meta:  # an optimizer has made it real
                    move_to_meta([buffer])  # type: ignore[list-item]


def _is_unchanged(buffer: Tensor, value: Tensor) -> bool:
    """Whether a buffer in host memory, which may be a read-only file, need not be written.

    On a device, comparing would wait for it.
    """
    is_comparable = type(buffer) is Tensor and buffer.is_cpu and has_plain_elements(buffer)
    return is_comparable and bits_are_equal(buffer, value)


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


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """By name, the buffers that are in a state dict."""
    saved = {
        id(buffer)
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if name not in module._non_persistent_buffers_set
    }
    return {name: buffer for name, buffer in model.named_buffers() if id(buffer) in saved}


def set_evaluation_mode(model: nn.Module) -> None:
    """`model.eval()`, but modules with an opaque parameter of their own keep their mode.

    bitsandbytes rewrites 4-bit weights that compute in evaluation mode on CPUs with AVX512-BF16, in
    less precision, so later losses would differ.
    """
    opaque = set(map(id, opaque_tensors(model).values()))
    kept = [
        (module, module.training)
        for module in model.modules()
        if any(id(parameter) in opaque for parameter in module._parameters.values())
    ]
    model.eval()
    for module, training in kept:
        module.training = training


class Copies(NamedTuple):
    """The values of the parameters of a model, and what they belong to."""

    plain: list[tuple[nn.Parameter, Tensor, torch.device]]
    """The parameters that are not opaque, with their values and devices."""
    opaque: list[tuple[OpaqueBytes, Tensor, torch.device]]
    """The opaque tensors with all of their bytes and their device, if there are any."""

    def restore(self, *, copy: bool) -> None:
        """Give the parameters these values, or a `copy` of them, and no gradient."""
        for opaque, values, device in self.opaque:
            opaque.use_values(values.to(device, copy=copy), lasting=True)
            opaque.attach_parameters()
        for parameter, value, device in self.plain:
            mark_present(parameter)
            parameter.grad = None
            parameter.data = value.to(device, copy=copy)


def host_copies(model: nn.Module) -> Copies:
    """The values of the parameters in host memory, to leave device memory to the engine."""
    return _copies(model, to_host=True)


@contextmanager
def parameters_preserved(model: nn.Module, copies: Copies | None = None) -> Iterator[None]:
    """Restore the values and dtypes of the parameters at the end, bit by bit.

    `copies`: of `host_copies`, which can be used again; default: they stay where they are.
    """
    kept = _copies(model, to_host=False) if copies is None else copies
    # The engine copies trained values, but overwrites frozen ones with those of rank 0.
    frozen = [(v, v.clone()) for p, v, _ in kept.plain if copies is None and not p.requires_grad]
    try:
        yield
    finally:
        for value, before in frozen:
            value.copy_(before)
        kept.restore(copy=copies is not None)


def _copies(model: nn.Module, *, to_host: bool) -> Copies:
    """Only opaque tensors, and what moves to the host, are copied."""
    named = opaque_tensors(model)
    known = set(map(id, named.values()))
    plain = [(p, p.data, p.device) for p in model.parameters() if id(p) not in known]
    if to_host:
        plain = [(p, value.to("cpu", copy=True), device) for p, value, device in plain]
    copies = Copies(plain, [])
    if named:
        device = next(iter(named.values())).device
        place = torch.device("cpu") if to_host else device
        opaque = OpaqueBytes("", [*named.items()], memories_of(model, [*named.values()]), place)
        copies.opaque.append((opaque, opaque.packed_bytes(), device))
    return copies


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
    opaque = set(map(id, opaque_tensors(model).values()))
    plain = [p for p in model.parameters() if id(p) not in opaque and p.is_floating_point()]
    values = [parameter.data for parameter in plain]
    try:
        for parameter in plain:
            parameter.data = parameter.data.to(dtype)
        with inputs_cast(model, dtype, unit_names):
            yield
    finally:
        for parameter, value in zip(plain, values, strict=True):
            parameter.grad = None
            parameter.data = value


def _copied(buffer: Tensor | None) -> Tensor | None:
    """A copy of a buffer, unless it is opaque, and nothing writes to it."""
    return None if buffer is None or is_opaque_buffer(buffer) else buffer.detach().clone()
