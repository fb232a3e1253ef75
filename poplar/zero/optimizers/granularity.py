"""What an optimizer class needs of a tensor: any elements, whole blocks, or a whole parameter.

A class whose update of an element depends on no other element can update shards that are cut
anywhere. One with quantised state needs blocks of one parameter, and one that reads a parameter as
a matrix, or takes its norm, needs all of it.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from poplar.comm.shard_layout import ALIGNMENT
from poplar.zero.preserved_state import random_state_preserved

OptimizerFactory = Callable[..., torch.optim.Optimizer]
Granularity = Literal["elements", "parameter"] | int
"""What a class needs; a number: blocks of so many elements."""
WHOLE = 0
"""The step of a parameter that is not cut: see `step_of`."""
SMALLEST_QUANTISED = 4096
"""Elements below which classes do not quantise the state of a tensor; no part is smaller."""

_UNLIKE = (1e4, 1.0, 1e-4)
"""Factors of trial gradients by step. Adam has nearly the same update if all are clipped alike, so
what is clipped by a norm over other elements must be clipped unlike in each step."""

_STATE_IN_GROUP = "its step() keeps state in the param group"

_WHOLE = (
    ("torch.optim", ("Muon", "Adafactor")),
    ("transformers.optimization", ("Adafactor",)),
    ("bitsandbytes.optim", ("AdEMAMix", "PagedAdEMAMix", "LAMB", "LARS")),
)
"""Classes that need whole parameters, by the beginnings of their modules and names."""


def known_granularity(factory: OptimizerFactory, options: Mapping[str, Any]) -> Granularity | None:
    """What a class is known to need, by its name and that of its module; None: not known."""
    for cls in bases_of(factory):
        module, name = cls.__module__, cls.__name__
        if any(module.startswith(m) and name.startswith(names) for m, names in _WHOLE):
            return "parameter"
        if module.startswith("bitsandbytes.optim"):
            return 256 if name.endswith("8bit") or options.get("optim_bits") == 8 else None
        if module.startswith("torchao.optim"):
            default = inspect.signature(cls).parameters.get("block_size")
            block = options.get("block_size", None if default is None else default.default)
            return block if isinstance(block, int) else None
    return None


def bases_of(factory: OptimizerFactory) -> Iterator[type]:
    """The class and its base classes; none if a function makes the optimizer."""
    while isinstance(factory, partial):
        factory = factory.func
    return iter(factory.__mro__ if isinstance(factory, type) else ())


def granularity_of(
    factory: OptimizerFactory,
    options: Mapping[str, Any],
    device: torch.device,
    given: Granularity | None = None,
) -> Granularity:
    """What a class needs: as given, as known, or elements if a test shows that these suffice.

    Raises:
        ValueError: it needs more than elements and this is not known, or it has state that cannot
            be moved between ranks.
    """
    name = getattr(factory, "__name__", repr(factory))
    if _needs_closure(factory):
        raise ValueError(
            f"{name}.step() needs a closure that computes loss and gradient again, which is not "
            "supported: the ranks reduce gradients once per step. Use an elementwise class whose "
            "step() needs none, such as AdamW"
        )
    known = known_granularity(factory, options)
    needs = known if given is None else given
    is_block = isinstance(needs, int) and not isinstance(needs, bool) and needs > 0
    if not is_block and needs not in (None, "elements", "parameter"):
        raise ValueError(
            f"granularity={needs!r}; use 'elements', 'parameter' or the number of elements of a "
            "block"
        )
    if given is None and known is not None:
        return known
    problem = problem_with(factory, options, device, needs or "elements")
    if problem is None:
        return needs or "elements"
    if needs == "parameter" or problem.startswith(_STATE_IN_GROUP):  # no granularity helps
        raise ValueError(f"{name} cannot be divided among ranks: {problem}")
    if isinstance(needs, int):
        raise ValueError(
            f"{name} cannot update blocks of {needs} elements: {problem}. If it needs whole "
            "tensors, pass granularity='parameter' (stages 0 to 2)"
        )
    raise ValueError(
        f"{name} cannot update flat shards, which split parameters anywhere: {problem}. If it "
        "needs whole tensors, pass granularity='parameter' (stages 0 to 2); if it needs whole "
        "blocks of N elements, granularity=N; or use an elementwise optimizer: AdamW, Adam, SGD, "
        "RMSprop, Adagrad"
    )


def _needs_closure(factory: OptimizerFactory) -> bool:
    step = getattr(next(bases_of(factory), None), "step", None)
    closure = inspect.signature(step).parameters.get("closure") if step is not None else None
    return closure is not None and closure.default is closure.empty


def problem_with(
    factory: OptimizerFactory,
    options: Mapping[str, Any],
    device: torch.device,
    granularity: Granularity,
) -> str | None:
    """Test whether a class can update what it gets; returns why not, or None if it can."""
    if granularity == "parameter":
        return _problem_of_whole(factory, options, device)
    block = _block_step(granularity) if isinstance(granularity, int) else None
    return _problem_of_parts(factory, options, device, block)


def step_of(granularity: Granularity, numel: int) -> int | None:
    """The elements between two points at which a parameter may be cut.

    `WHOLE`: it is not cut. None: it may be cut like any other.

    Parts are multiples of a block and are quantised if the whole is, so each has the codes and
    scales that it has in the whole.
    """
    if granularity == "elements":
        return None
    if granularity == "parameter":
        return WHOLE
    step = _block_step(granularity)
    return step if numel % granularity == 0 and numel >= 2 * step else WHOLE


def _block_step(block: int) -> int:
    aligned = math.lcm(block, ALIGNMENT)
    return -(-SMALLEST_QUANTISED // aligned) * aligned


def _problem_of_parts(
    factory: OptimizerFactory,
    options: Mapping[str, Any],
    device: torch.device,
    block: int | None,
) -> str | None:
    """Why ranks cannot update parts of a parameter, each with an optimizer of its own.

    It compares three steps on one matrix with three steps on two flat parts of it, which have
    nothing in common. The parts are large enough for classes that quantise the state of large
    tensors only. The first has `block` elements; None: a number that no blocks divide.
    """
    generator = torch.Generator(device="cpu").manual_seed(0)
    shape, cut = ((128, 96), 6000) if block is None else ((3, block), block)
    start = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
    gradients = [
        torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu") for _ in range(3)
    ]
    for gradient, scale in zip(gradients, _UNLIKE, strict=True):
        gradient.view(-1)[cut:] *= scale
    problems: list[str] = []

    def after(part: Callable[[Tensor], Tensor]) -> Tensor:
        values = part(start).clone().to(device)
        optimizer = factory([{"params": [values]}], **options)
        own = ([part(gradient).clone().to(device)] for gradient in gradients)
        problems.extend(_step(optimizer, [values], own))
        state = optimizer.state.get(values, {})
        problems.extend(_nested_state(state) if block else _unsupported_state(state, values))
        return values.flatten().cpu()

    # Wrong options raise here, with the message of the class itself.
    factory([{"params": [start.clone().to(device)]}], **options)
    try:
        whole = after(lambda values: values)
        parts = [after(lambda v: v.flatten()[:cut]), after(lambda v: v.flatten()[cut:])]
    except Exception as error:
        return f"it does not step a flat slice of a parameter ({type(error).__name__}: {error})"
    if not torch.allclose(whole, torch.cat(parts), rtol=1e-5, atol=1e-6, equal_nan=True):
        problems.append("its update of an element depends on other elements")
    return problems[0] if problems else None


def _problem_of_whole(
    factory: OptimizerFactory, options: Mapping[str, Any], device: torch.device
) -> str | None:
    """Why not even whole parameters can be divided among ranks; None: they can.

    It steps one parameter twice, beside another one that has other values and gradients the second
    time. The shapes, and so the kernels, and the random numbers are the same.
    """
    generator = torch.Generator(device="cpu").manual_seed(0)
    start, *gradients = (
        torch.randn((8, 8), generator=generator, dtype=torch.float32, device="cpu")
        for _ in range(4)
    )
    problems: list[str] = []

    def change_beside(scales: Sequence[float]) -> Tensor:
        """The change of the parameter; `scales`: of the other one's gradients by step."""
        both = [start.clone().to(device), (start.flip(0) * scales[0]).to(device)]
        optimizer = factory([{"params": both}], **options)
        given = (
            [gradient.clone().to(device), (gradient.flip(0) * scale).to(device)]
            for gradient, scale in zip(gradients, scales, strict=True)
        )
        with random_state_preserved(device):
            problems.extend(_step(optimizer, both, given))
        problems.extend(_nested_state(optimizer.state.get(both[0], {})))
        return both[0].cpu() - start

    alike, unlike = change_beside((1.0, 1.0, 1.0)), change_beside(_UNLIKE)
    if not torch.allclose(alike, unlike, rtol=0.0, atol=1e-3 * float(alike.abs().max())):
        problems.append(
            "its update of a parameter depends on other parameters, such as by a norm over all, "
            "but each rank updates only some; let train_step(max_norm=...) or clip_grad_norm_() "
            "clip instead of the class"
        )
    return problems[0] if problems else None


def _step(
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[Tensor],
    gradients: Iterator[Sequence[Tensor]],
) -> list[str]:
    """Step `parameters`; what is wrong if that changes the settings, as all ranks have the same."""
    by_step = [_settings(optimizer)]
    for given in gradients:
        for values, gradient in zip(parameters, given, strict=True):
            values.grad = gradient
        optimizer.step()
        by_step.append(_settings(optimizer))
    before, first, last = by_step[0], by_step[1], by_step[-1]
    changed = sorted(key for key in last if last[key] != before.get(key, first.get(key)))
    if not changed:
        return []
    return [
        f"{_STATE_IN_GROUP} ({', '.join(changed)}), which is for settings that the user changes; "
        "use a class that keeps its state by parameter, such as AdamW"
    ]


def _settings(optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """The settings of the first param group, as text."""
    group = optimizer.param_groups[0]
    return {key: repr(value) for key, value in group.items() if key != "params"}


def _nested_state(state: Mapping[str, Any]) -> list[str]:
    """What is wrong with state that is not a tensor or a number by name."""
    return [
        f"its state {key!r} is a {type(value).__name__}, not a tensor or a number"
        for key, value in state.items()
        if not isinstance(value, (Tensor, bool, int, float, str, type(None)))
    ]


def _unsupported_state(state: Mapping[str, Any], values: Tensor) -> list[str]:
    """What is wrong with state that cannot be cut and moved with the elements."""
    for key, value in state.items():
        if not isinstance(value, Tensor) or (value.numel() == 1 and type(value) is Tensor):
            continue
        plain = type(value) is Tensor and value.is_floating_point()
        if not plain or value.shape != values.shape:
            return [
                f"its state {key!r} is a {type(value).__name__} of {value.dtype} and shape "
                f"{tuple(value.shape)}, not one floating-point number per element"
            ]
    return []
